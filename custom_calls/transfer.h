// Asynchronous copies for XLA:CPU: one thread an engine, a start that returns at once and a
// done that waits. targets.py says what a compiler must guarantee; this is what runs.
//
// Known limit: XLA frees the buffers of a run that fails, and calls no handler to say so. A
// failure that these handlers report lets the copies of the run end first. A failure elsewhere
// (a host callback that raises) between a start and its done does not, and the copy may then
// write to memory that has been freed.

#ifndef CUSTOM_CALLS_TRANSFER_H_
#define CUSTOM_CALLS_TRANSFER_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "xla/ffi/api/ffi.h"

namespace memplan {

// One finished transfer. Times are nanoseconds of std::chrono::steady_clock.
struct TransferRecord {
  int64_t transfer_id = 0;
  int64_t engine = 0;
  int64_t bytes = 0;
  int64_t run = 0;       // XLA's RunId: one logical execution, over all its devices.
  int64_t device = 0;    // XLA's device ordinal.
  int64_t sequence = 0;  // The order of the starts since the trace began.
  uint64_t start_thread = 0;
  uint64_t done_thread = 0;
  int64_t start_issued = 0;
  int64_t copy_began = 0;
  int64_t copy_ended = 0;
  int64_t done_called = 0;
  int64_t done_returned = 0;
};

struct TraceResult {
  std::vector<TransferRecord> records;  // In the order in which the transfers finished.
  int64_t dropped = 0;                  // Transfers that found `capacity` records.
};

// Starts recording at most `capacity` transfers. False if a trace is being recorded already.
bool BeginTrace(size_t capacity);

// Ends the trace. A transfer is in it if both its start and its done lie inside the trace.
// Nothing if no trace is being recorded.
std::optional<TraceResult> EndTrace();

// The rate of every engine from its next copy on, in bytes/s; 0 is as fast as memcpy goes.
void SetLinkBandwidth(double bytes_per_second);

XLA_FFI_Error* CopyStart(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* CopyDone(XLA_FFI_CallFrame* call_frame);

}  // namespace memplan

#endif  // CUSTOM_CALLS_TRANSFER_H_
