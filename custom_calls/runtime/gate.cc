#include "gate.h"

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>

#include "runtime.h"
#include "xla/ffi/api/ffi.h"

namespace memplan {
namespace {

namespace ffi = xla::ffi;

ffi::Error Invalid(const std::string& sentence) {
  return ffi::Error::InvalidArgument("memplan.gate: " + sentence);
}

// Has the runtime of an array pass to the segment that the attributes name: `step(runtime, number)`.
template <typename Step>
ffi::Error PassWith(Step step_of, ffi::AnyBuffer held, ffi::Result<ffi::AnyBuffer> result,
                    ffi::Dictionary attributes) {
  if (!attributes.contains<int64_t>("step")) {
    return Invalid("attribute step (an int64) is missing");
  }
  if (held.untyped_data() != result->untyped_data()) {
    return Invalid("the result is not operand 0: output_operand_aliasing is missing");
  }
  const int64_t step = *attributes.get<int64_t>("step");
  if (step < 0) return ffi::Error::Success();
  Runtime* const runtime = Runtime::Of(static_cast<const std::byte*>(held.untyped_data()));
  if (runtime == nullptr) {
    return ffi::Error(ffi::ErrorCode::kFailedPrecondition,
                      "memplan.gate: operand 0 lies in the arena of no runtime: such a program is "
                      "called through the runtime that was opened for it");
  }
  const std::string problem = step_of(*runtime, static_cast<uint64_t>(step));
  if (problem.empty()) return ffi::Error::Success();
  return ffi::Error(ffi::ErrorCode::kDataLoss, problem);
}

ffi::Error Pass(ffi::AnyBuffer held, ffi::RemainingArgs /*fences*/,
                ffi::Result<ffi::AnyBuffer> result, ffi::Dictionary attributes) {
  const auto step = [](Runtime& runtime, uint64_t number) { return runtime.Step(number); };
  return PassWith(step, held, result, attributes);
}

ffi::Error PassOnGpu(CudaStream stream, ffi::AnyBuffer held, ffi::RemainingArgs /*fences*/,
                     ffi::Result<ffi::AnyBuffer> result, ffi::Dictionary attributes) {
  const auto step = [stream](Runtime& runtime, uint64_t number) {
    return runtime.StepOn(stream, number);
  };
  return PassWith(step, held, result, attributes);
}

ffi::Error StoreAndPass(ffi::AnyBuffer held, ffi::AnyBuffer value, ffi::RemainingArgs fences,
                        ffi::Result<ffi::AnyBuffer> result, ffi::Dictionary attributes) {
  if (value.size_bytes() != held.size_bytes()) return Invalid("operands 0 and 1 differ in size");
  // An argument outside of any arena is not the runtime's to write.
  if (Runtime::Of(static_cast<const std::byte*>(held.untyped_data())) != nullptr &&
      held.untyped_data() != value.untyped_data()) {
    std::memcpy(held.untyped_data(), value.untyped_data(), held.size_bytes());
  }
  return Pass(held, fences, result, attributes);
}

ffi::Error Mark(ffi::AnyBuffer /*held*/, ffi::AnyBuffer /*value*/,
                ffi::ResultBufferR0<ffi::S32> result) {
  result->typed_data()[0] = 0;
  return ffi::Error::Success();
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

XLA_FFI_Error* GateOnGpu(XLA_FFI_CallFrame* call_frame) {
  static auto* handler = ffi::Ffi::Bind()
                             .Ctx<ffi::PlatformStream<CudaStream>>()
                             .Arg<ffi::AnyBuffer>()
                             .RemainingArgs()
                             .Ret<ffi::AnyBuffer>()
                             .Attrs()
                             .To(PassOnGpu)
                             .release();
  return handler->Call(call_frame);
}

XLA_FFI_Error* StoringGate(XLA_FFI_CallFrame* call_frame) {
  static auto* handler = ffi::Ffi::Bind()
                             .Arg<ffi::AnyBuffer>()
                             .Arg<ffi::AnyBuffer>()
                             .RemainingArgs()
                             .Ret<ffi::AnyBuffer>()
                             .Attrs()
                             .To(StoreAndPass)
                             .release();
  return handler->Call(call_frame);
}

XLA_FFI_Error* Store(XLA_FFI_CallFrame* call_frame) {
  static auto* handler = ffi::Ffi::Bind()
                             .Arg<ffi::AnyBuffer>()
                             .Arg<ffi::AnyBuffer>()
                             .Ret<ffi::BufferR0<ffi::S32>>()
                             .To(Mark)
                             .release();
  return handler->Call(call_frame);
}

}  // namespace memplan
