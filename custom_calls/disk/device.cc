#include "device.h"

#include <dlfcn.h>

namespace memplan {
namespace {

// What is needed of the driver's interface, which is stable (CUDA Driver API, 12.0; names with _v2
// are what its header makes of those without).
using Result = int;
using Address = unsigned long long;

constexpr unsigned kNonBlocking = 1;  // CU_STREAM_NON_BLOCKING

struct Driver {
  Result (*Init)(unsigned);
  Result (*DeviceGet)(int*, int);
  Result (*PrimaryRetain)(void**, int);
  Result (*PrimaryRelease)(int);
  Result (*SetCurrent)(void*);
  Result (*StreamCreate)(CudaStream*, unsigned);
  Result (*StreamDestroy)(CudaStream);
  Result (*StreamSynchronize)(CudaStream);
  Result (*ContextSynchronize)();
  Result (*MemAlloc)(Address*, size_t);
  Result (*MemFree)(Address);
  Result (*HostRegister)(void*, size_t, unsigned);
  Result (*HostUnregister)(void*);
  Result (*MemcpyAsync)(Address, Address, size_t, CudaStream);
  Result (*LaunchHostFunc)(CudaStream, CudaHostFunction, void*);
  Result (*GetErrorString)(Result, const char**);

  std::string missing;  // Empty, or why it cannot be used.
};

template <typename Function>
void Find(void* library, const char* name, Function** function, std::string* missing) {
  *function = reinterpret_cast<Function*>(dlsym(library, name));
  if (*function == nullptr && missing->empty()) {
    *missing = std::string("the CUDA driver has no ") + name;
  }
}

Driver Load() {
  Driver driver{};
  void* const library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
  if (library == nullptr) {
    driver.missing = std::string("the CUDA driver cannot be loaded: ") + dlerror();
    return driver;
  }
  std::string* const missing = &driver.missing;
  Find(library, "cuInit", &driver.Init, missing);
  Find(library, "cuDeviceGet", &driver.DeviceGet, missing);
  Find(library, "cuDevicePrimaryCtxRetain", &driver.PrimaryRetain, missing);
  Find(library, "cuDevicePrimaryCtxRelease_v2", &driver.PrimaryRelease, missing);
  Find(library, "cuCtxSetCurrent", &driver.SetCurrent, missing);
  Find(library, "cuStreamCreate", &driver.StreamCreate, missing);
  Find(library, "cuStreamDestroy_v2", &driver.StreamDestroy, missing);
  Find(library, "cuStreamSynchronize", &driver.StreamSynchronize, missing);
  Find(library, "cuCtxSynchronize", &driver.ContextSynchronize, missing);
  Find(library, "cuMemAlloc_v2", &driver.MemAlloc, missing);
  Find(library, "cuMemFree_v2", &driver.MemFree, missing);
  Find(library, "cuMemHostRegister_v2", &driver.HostRegister, missing);
  Find(library, "cuMemHostUnregister", &driver.HostUnregister, missing);
  Find(library, "cuMemcpyAsync", &driver.MemcpyAsync, missing);
  Find(library, "cuLaunchHostFunc", &driver.LaunchHostFunc, missing);
  Find(library, "cuGetErrorString", &driver.GetErrorString, missing);
  return driver;
}

// Never unloaded: XLA has it, too.
const Driver& TheDriver() {
  static const auto* driver = new Driver(Load());
  return *driver;
}

// Empty for success.
std::string Problem(Result result, const char* what) {
  if (result == 0) return {};
  const char* text = nullptr;
  TheDriver().GetErrorString(result, &text);
  return std::string(what) + ": " + (text == nullptr ? "CUDA error" : text) + " (" +
         std::to_string(result) + ")";
}

Address AsAddress(const std::byte* memory) { return reinterpret_cast<Address>(memory); }

}  // namespace

std::shared_ptr<Device> Device::Open(int ordinal, std::string* error) {
  const Driver& driver = TheDriver();
  *error = driver.missing;
  if (!error->empty()) return nullptr;
  *error = Problem(driver.Init(0), "starting CUDA");
  if (!error->empty()) return nullptr;
  std::shared_ptr<Device> device(new Device);
  *error = Problem(driver.DeviceGet(&device->handle_, ordinal), "finding the GPU");
  if (!error->empty()) return nullptr;
  *error = Problem(driver.PrimaryRetain(&device->context_, device->handle_), "using the GPU");
  if (!error->empty()) return nullptr;
  driver.SetCurrent(device->context_);
  *error = Problem(driver.StreamCreate(&device->stream_, kNonBlocking), "making a stream");
  if (!error->empty()) return nullptr;
  return device;
}

Device::~Device() {
  const Driver& driver = TheDriver();
  if (context_ == nullptr) return;
  if (stream_ != nullptr) {
    driver.SetCurrent(context_);
    driver.StreamDestroy(stream_);
  }
  driver.PrimaryRelease(handle_);
}

std::byte* Device::Allocate(uint64_t bytes, std::string* error) {
  const Driver& driver = TheDriver();
  driver.SetCurrent(context_);
  Address memory = 0;
  *error = Problem(driver.MemAlloc(&memory, bytes), "allocating memory of the GPU");
  return reinterpret_cast<std::byte*>(memory);
}

void Device::Free(std::byte* memory) {
  TheDriver().SetCurrent(context_);
  TheDriver().MemFree(AsAddress(memory));
}

void Device::Pin(std::byte* memory, uint64_t bytes) {
  TheDriver().SetCurrent(context_);
  TheDriver().HostRegister(memory, bytes, 0);
}

void Device::Unpin(std::byte* memory) {
  TheDriver().SetCurrent(context_);
  TheDriver().HostUnregister(memory);
}

std::string Device::Copy(std::byte* to, const std::byte* from, uint64_t bytes) {
  const Driver& driver = TheDriver();
  driver.SetCurrent(context_);
  Result result = driver.MemcpyAsync(AsAddress(to), AsAddress(from), bytes, stream_);
  if (result == 0) result = driver.StreamSynchronize(stream_);
  return Problem(result, "copying to or from the GPU");
}

void Device::Wait() {
  TheDriver().SetCurrent(context_);
  TheDriver().ContextSynchronize();
}

std::string Device::Launch(CudaStream stream, CudaHostFunction function, void* data) {
  if (!TheDriver().missing.empty()) return TheDriver().missing;
  return Problem(TheDriver().LaunchHostFunc(stream, function, data), "launching a host function");
}

}  // namespace memplan
