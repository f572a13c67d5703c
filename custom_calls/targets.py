"""The custom calls that stand for an asynchronous copy on XLA:CPU, as a compiler writes them.

XLA:CPU has no `copy-start`/`copy-done`. A transfer is a pair of typed-FFI custom calls:

    %dst  = f32[n] custom-call(%src, fences...), custom_call_target="memplan.copy_start"
    %x    = ...                                            compute that the copy overlaps
    %here = f32[n] custom-call(%dst, %src, %x, fences...), custom_call_target="memplan.copy_done"

`copy_start` begins to copy operand 0 into its result and returns. `copy_done` waits until that
is over; its result is operand 0 itself. No other operand is ever read:

- Operand 1 of `copy_done` is the source. XLA's buffer assignment ends the life of a value at
  its last use, so this use is what keeps the source from being overwritten during the copy.
- The further operands of either call are *fences*: the call runs when they have been computed.
  XLA:CPU runs whatever is ready and orders instructions by the buffers that they read and
  write, and by nothing else: it ignores `control_predecessor_ids` and, unless a program is
  small, the schedule. Without %x above, `copy_done` may well be called before %x is computed.

An injected instruction needs, beside its operands and shape:

- `custom_call_target`, and `custom_call_api_version` = `API_VERSION`;
- a backend configuration: `attributes(...)`, with the same `transfer_id` on both;
- on `copy_done`, an `output_operand_aliasing` of its result to operand 0;
- `custom_call_has_side_effect` where passes still run that merge equal instructions or remove
  dead ones. After scheduling none does, and it makes no difference.

The contract that the compiler keeps (the handlers check what they can):

- Source and destination have the same type, dimensions *and layout*: a copy moves bytes.
- Nothing but `copy_done` uses the result of `copy_start`, and it runs in the same execution.
- No element type is narrower than a byte: the FFI does not say whether they are packed.

Where the bytes come without XLA, from the runtime of a descriptor chain (`custom_calls.runtime`),
there is no transfer to write. The argument lies in the runtime's arena, and calls mark where it is
there, and where it is no more:

    %here  = f32[n] custom-call(%p, fences...), custom_call_target="memplan.gate", step 3
    %y     = ...                                                       reads %here
    %gone  = f32[n] custom-call(%here, fences...), custom_call_target="memplan.gate"

A `gate` gives its operand 0 itself, and what reads an array stands, by its bytes, between the
gates before and after. One with a step waits until the runtime lets the program pass from one
segment of the chain to the next; the segments pass in their order.

What is to be written back, the program marks, and the last gate of the argument does it:

    %mark  = s32[] custom-call(%here, %new), custom_call_target="memplan.store"
    %gone  = f32[n] custom-call(%here, %new, fences...), custom_call_target="memplan.storing_gate"

A `store` does nothing; a `storing_gate` copies its operand 1 over operand 0, all of whose readers
have run by then, and is a gate.

This file imports nothing, so that a compiler pass can name the targets without the runtime.
"""

COPY_START = "memplan.copy_start"
COPY_DONE = "memplan.copy_done"

GATE = "memplan.gate"
STORING_GATE = "memplan.storing_gate"
GATES = (GATE, STORING_GATE)
STORE = "memplan.store"

API_VERSION = 4
"""`CustomCallApiVersion.API_VERSION_TYPED_FFI` (xla/service/hlo.proto)."""

TO_DEVICE = 0
"""The engine that prefetches: copies towards the fast tier."""

TO_HOST = 1
"""The engine that evicts: copies away from the fast tier."""


FROM_DISK = 2
"""The engine, in traces, of what `TO_DEVICE` was asked to copy and lies in a mapped file."""


def attributes(transfer_id: int, engine: int = TO_DEVICE) -> str:
    """The backend configuration of a `copy_start` or a `copy_done`, in MLIR's syntax.

    Args:
        transfer_id: names the transfer in traces and errors, an int64. It need not be unique:
            what pairs a `copy_done` with its `copy_start` is the destination buffer.
        engine: `TO_DEVICE` or `TO_HOST`. The copies of one engine run one after another, in
            the order in which they were started; the two engines run side by side.
    """
    return f"{{engine = {engine} : i64, transfer_id = {transfer_id} : i64}}"


def gate_attributes(step: int | None) -> str:
    """The backend configuration of a `gate`.

    Args:
        step: the segment that begins with it, or how many there are, where the last one ends; None
            for a gate that others stand for.
    """
    return f"{{step = {-1 if step is None else step} : i64}}"
