// The calls in a program that wait for a chain's runtime; targets.py says what they are.

#ifndef CUSTOM_CALLS_RUNTIME_GATE_H_
#define CUSTOM_CALLS_RUNTIME_GATE_H_

#include "xla/ffi/api/c_api.h"

namespace memplan {

XLA_FFI_Error* Gate(XLA_FFI_CallFrame* call_frame);
// Of XLA:GPU: what comes after it is launched when what that reads is there.
XLA_FFI_Error* GateOnGpu(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* StoringGate(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* Store(XLA_FFI_CallFrame* call_frame);

}  // namespace memplan

#endif  // CUSTOM_CALLS_RUNTIME_GATE_H_
