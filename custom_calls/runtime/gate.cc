#include "gate.h"

#include <cstddef>
#include <cstdint>
#include <string>

#include "runtime.h"
#include "xla/ffi/api/ffi.h"

namespace memplan {
namespace {

namespace ffi = xla::ffi;

ffi::Error Pass(ffi::AnyBuffer held, ffi::RemainingArgs /*fences*/,
                ffi::Result<ffi::AnyBuffer> result, ffi::Dictionary attributes) {
  if (!attributes.contains<int64_t>("step")) {
    return ffi::Error::InvalidArgument("memplan.gate: attribute step (an int64) is missing");
  }
  if (held.untyped_data() != result->untyped_data()) {
    return ffi::Error::InvalidArgument(
        "memplan.gate: the result is not operand 0: output_operand_aliasing is missing");
  }
  const int64_t step = *attributes.get<int64_t>("step");
  if (step < 0) return ffi::Error::Success();
  Runtime* const runtime = Runtime::Of(static_cast<const std::byte*>(held.untyped_data()));
  if (runtime == nullptr) {
    return ffi::Error(ffi::ErrorCode::kFailedPrecondition,
                      "memplan.gate: operand 0 lies in the arena of no runtime: such a program is "
                      "called through the runtime that was opened for it");
  }
  const std::string problem = runtime->Step(static_cast<uint64_t>(step));
  if (problem.empty()) return ffi::Error::Success();
  return ffi::Error(ffi::ErrorCode::kDataLoss, problem);
}

}  // namespace

XLA_FFI_Error* Gate(XLA_FFI_CallFrame* call_frame) {
  static auto* handler = ffi::Ffi::Bind()
                             .Arg<ffi::AnyBuffer>()
                             .RemainingArgs()
                             .Ret<ffi::AnyBuffer>()
                             .Attrs()
                             .To(Pass)
                             .release();
  return handler->Call(call_frame);
}

}  // namespace memplan
