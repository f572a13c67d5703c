#include "io_queue.h"

#include <linux/io_uring.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <thread>
#include <vector>

namespace memplan {
namespace {

// ------------------------------------------------------------------------------- io_uring

// The rings that kernel and process share (io_uring_setup(2)): this side fills submissions at
// their tail and takes completions from their head.
class Uring final : public IoQueue {
 public:
  static std::unique_ptr<Uring> Make(uint32_t depth) {
    std::unique_ptr<Uring> ring(new Uring);
    return ring->Open(depth) ? std::move(ring) : nullptr;
  }

  ~Uring() override {
    if (submissions_ != nullptr) munmap(submissions_, submission_bytes_);
    if (ring_ != nullptr) munmap(ring_, ring_bytes_);
    if (descriptor_ >= 0) close(descriptor_);
  }

  const char* name() const override { return "io_uring"; }

  void Submit(uint32_t tag, const IoRequest& request) override {
    const uint32_t tail = *submission_tail_;  // Only this thread writes it.
    const uint32_t index = tail & submission_mask_;
    io_uring_sqe& entry = submissions_[index];
    std::memset(&entry, 0, sizeof(entry));
    entry.opcode = request.is_write ? IORING_OP_WRITE : IORING_OP_READ;
    entry.fd = request.descriptor;
    entry.off = request.offset;
    entry.addr = reinterpret_cast<uint64_t>(request.memory);
    entry.len = request.bytes;
    entry.user_data = tag;
    submission_array_[index] = index;
    __atomic_store_n(submission_tail_, tail + 1, __ATOMIC_RELEASE);
    unsubmitted_++;
    Enter(/*completions=*/0);
  }

  IoCompletion Wait() override {
    while (true) {
      const uint32_t head = *completion_head_;
      if (head != __atomic_load_n(completion_tail_, __ATOMIC_ACQUIRE)) {
        const io_uring_cqe& entry = completions_[head & completion_mask_];
        const IoCompletion completion{static_cast<uint32_t>(entry.user_data), entry.res};
        __atomic_store_n(completion_head_, head + 1, __ATOMIC_RELEASE);
        return completion;
      }
      Enter(/*completions=*/1);
    }
  }

 private:
  bool Open(uint32_t depth) {
    io_uring_params params;
    std::memset(&params, 0, sizeof(params));
    descriptor_ = static_cast<int>(syscall(SYS_io_uring_setup, depth, &params));
    // Both rings in one mapping, and plain reads: Linux 5.6.
    constexpr uint32_t kNeeded = IORING_FEAT_SINGLE_MMAP | IORING_FEAT_RW_CUR_POS;
    if (descriptor_ < 0 || (params.features & kNeeded) != kNeeded) return false;
    const size_t submission_ring =
        params.sq_off.array + params.sq_entries * sizeof(uint32_t);
    const size_t completion_ring =
        params.cq_off.cqes + params.cq_entries * sizeof(io_uring_cqe);
    ring_bytes_ = submission_ring > completion_ring ? submission_ring : completion_ring;
    submission_bytes_ = params.sq_entries * sizeof(io_uring_sqe);
    std::byte* ring = Map(ring_bytes_, IORING_OFF_SQ_RING);
    std::byte* submissions = Map(submission_bytes_, IORING_OFF_SQES);
    if (submissions != nullptr) submissions_ = reinterpret_cast<io_uring_sqe*>(submissions);
    ring_ = ring;
    if (ring == nullptr || submissions == nullptr) return false;
    const auto at = [ring](uint32_t offset) {
      return reinterpret_cast<uint32_t*>(ring + offset);
    };
    submission_tail_ = at(params.sq_off.tail);
    submission_mask_ = *at(params.sq_off.ring_mask);
    submission_array_ = at(params.sq_off.array);
    completion_head_ = at(params.cq_off.head);
    completion_tail_ = at(params.cq_off.tail);
    completion_mask_ = *at(params.cq_off.ring_mask);
    completions_ = reinterpret_cast<io_uring_cqe*>(ring + params.cq_off.cqes);
    return true;
  }

  std::byte* Map(size_t bytes, off_t what) const {
    void* const mapped = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE,
                              descriptor_, what);
    return mapped == MAP_FAILED ? nullptr : static_cast<std::byte*>(mapped);
  }

  // What the kernel does not take now (EAGAIN, EINTR, EBUSY) is taken at the next call, and
  // every wait makes one.
  void Enter(uint32_t completions) {
    const uint32_t flags = completions > 0 ? IORING_ENTER_GETEVENTS : 0;
    const long taken = syscall(SYS_io_uring_enter, descriptor_, unsubmitted_, completions, flags,
                               nullptr, 0);
    if (taken > 0) unsubmitted_ -= static_cast<uint32_t>(taken);
  }

  int descriptor_ = -1;
  std::byte* ring_ = nullptr;
  size_t ring_bytes_ = 0;
  io_uring_sqe* submissions_ = nullptr;
  size_t submission_bytes_ = 0;
  uint32_t* submission_tail_ = nullptr;
  uint32_t* submission_array_ = nullptr;
  uint32_t submission_mask_ = 0;
  uint32_t* completion_head_ = nullptr;
  uint32_t* completion_tail_ = nullptr;
  uint32_t completion_mask_ = 0;
  const io_uring_cqe* completions_ = nullptr;
  uint32_t unsubmitted_ = 0;
};

// -------------------------------------------------------------------------------- Threads

class Threads final : public IoQueue {
 public:
  explicit Threads(uint32_t depth) : requests_(depth) {
    waiting_.reserve(depth);
    ended_.reserve(depth);
    for (uint32_t i = 0; i < depth; ++i) threads_.emplace_back(&Threads::Serve, this);
  }

  ~Threads() override {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      is_closed_ = true;
    }
    submitted_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  const char* name() const override { return "threads"; }

  void Submit(uint32_t tag, const IoRequest& request) override {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      requests_[tag] = request;
      waiting_.push_back(tag);
    }
    submitted_.notify_one();
  }

  IoCompletion Wait() override {
    std::unique_lock<std::mutex> lock(mutex_);
    completed_.wait(lock, [this] { return !ended_.empty(); });
    const IoCompletion completion = ended_.front();
    ended_.erase(ended_.begin());
    return completion;
  }

 private:
  void Serve() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      submitted_.wait(lock, [this] { return is_closed_ || !waiting_.empty(); });
      if (is_closed_) return;
      const uint32_t tag = waiting_.front();
      waiting_.erase(waiting_.begin());
      const IoRequest request = requests_[tag];
      lock.unlock();
      const IoCompletion completion{tag, Run(request)};
      lock.lock();
      ended_.push_back(completion);
      completed_.notify_one();
    }
  }

  static int32_t Run(const IoRequest& r) {
    const auto offset = static_cast<off_t>(r.offset);
    const ssize_t result = r.is_write ? pwrite(r.descriptor, r.memory, r.bytes, offset)
                                      : pread(r.descriptor, r.memory, r.bytes, offset);
    return static_cast<int32_t>(result < 0 ? -errno : result);
  }

  std::mutex mutex_;
  std::condition_variable submitted_;
  std::condition_variable completed_;
  std::vector<IoRequest> requests_;
  std::vector<uint32_t> waiting_;
  std::vector<IoCompletion> ended_;
  bool is_closed_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace

std::unique_ptr<IoQueue> IoQueue::Make(uint32_t depth, bool use_uring) {
  if (use_uring) {
    if (std::unique_ptr<IoQueue> ring = Uring::Make(depth)) return ring;
  }
  return std::make_unique<Threads>(depth);
}

}  // namespace memplan
