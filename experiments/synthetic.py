"""Training steps of any length, written as scheduled HLO without a compiler.

    forward    x ─ norm ─ dot(w1) ─ activation ─ dot(w2) ─ add ─► x'      of each layer
                     │                  │  └ a tuple: its result, and a mask
    backward   g ◄───┴── residuals are read in reverse ─┘
               state' = update(state, dw1, dw2)                           in place

A layer is 25 instructions of the entry: two weights (on TPU and GPU in host memory, each with
the pair that copies it), a donated state, fusions, dots and bitcasts, residuals that live
until the layer's backward pass, and temporaries that die at the next instruction. Widths
differ from layer to layer, so that buffers do not all have one size.
"""

from __future__ import annotations

from collections.abc import Iterator

from hlo_passes.analysis.sharing import Target

INSTRUCTIONS_PER_LAYER = 25

_TOKENS, _WIDTH = 512, 256

# Of the inner dot, in multiples of _WIDTH, from layer to layer.
_EXPANSIONS = (4, 1, 2, 3)

# What XLA:GPU writes at all but every instruction.
_CONFIG = (
    'backend_config={"operation_queue_id":"0","wait_on_operation_queues":[],'
    '"force_earliest_schedule":false}'
)


def training_step_text(instructions: int, target: Target, donated: bool = True) -> str:
    """Returns HLO text whose entry has `instructions` instructions, less than a layer's short
    of that.

    Args:
      target: on ``"cpu"`` weights are plain arguments.
      donated: the states are updated in place; else their allocations are free for others
        until the update.
    """
    layers = max(1, (instructions - 2) // INSTRUCTIONS_PER_LAYER)
    steps = [_Layer(k, target) for k in range(layers)]
    bodies = [line for layer in steps for line in layer.bodies()]
    entry = [
        *(line for layer in steps for line in layer.parameters()),
        f"%x0 = {_activation()} parameter({3 * layers})",
        *(line for layer in steps for line in layer.forward()),
        f"%g{layers} = {_activation()} copy(%x{layers}), {_metadata('loss')}",
        *(line for layer in reversed(steps) for line in layer.backward()),
    ]
    states = [layer.state for layer in steps]
    results = ", ".join([_activation(), *states])
    names = ", ".join(["%g0", *(f"%state{k}.new" for k in range(layers))])
    entry.append(f"ROOT %results = ({results}) tuple({names})")
    aliases = [f"{{{k + 1}}}: ({3 * k + 2}, {{}}, may-alias)" for k in range(layers)]
    in_place = f", input_output_alias={{ {', '.join(aliases)} }}" if donated else ""
    return "\n".join(
        [
            f"HloModule step, is_scheduled=true{in_place}",
            "%add (a: f32[], b: f32[]) -> f32[] {",
            "%a = f32[] parameter(0)",
            "%b = f32[] parameter(1)",
            "ROOT %sum = f32[] add(%a, %b)",
            "}",
            *bodies,
            "ENTRY %main {",
            *entry,
            "}",
        ]
    )


class _Layer:
    """The text of layer `k`: shapes, fused computations, and its part of the entry."""

    def __init__(self, k: int, target: Target) -> None:
        self._k = k
        self._on_host = target != "cpu"
        inner = _EXPANSIONS[k % len(_EXPANSIONS)] * _WIDTH
        self._inner = inner
        self._up = f"bf16[{_WIDTH},{inner}]"
        self._down = f"bf16[{inner},{_WIDTH}]"
        self._hidden = f"bf16[{_TOKENS},{inner}]{{1,0}}"
        self._mask = f"pred[{_TOKENS},{inner}]{{1,0}}"
        self.state = f"f32[{_WIDTH},{inner}]{{1,0}}"

    def parameters(self) -> Iterator[str]:
        k = self._k
        layout = "{1,0:S(5)}" if self._on_host else "{1,0}"
        up, down = ("w1.host", "w2.host") if self._on_host else ("w1", "w2")
        yield f"%{up}.{k} = {self._up}{layout} parameter({3 * k})"
        yield f"%{down}.{k} = {self._down}{layout} parameter({3 * k + 1})"
        yield f"%state{k} = {self.state} parameter({3 * k + 2})"

    def forward(self) -> Iterator[str]:
        k, x, hidden = self._k, _activation(), self._hidden
        if self._on_host:
            yield from self._copy("w1", self._up)
            yield from self._copy("w2", self._down)
        yield self._fusion("stat", _ROW, f"%x{k}", kind="kInput")
        yield self._fusion("norm", x, f"%x{k}, %stat.{k}")
        yield self._dot("h", hidden, f"%norm.{k}, %w1.{k}", contracting=(1, 0))
        yield self._fusion("act", f"({hidden}, {self._mask})", f"%h.{k}")
        yield f"%u.{k} = {hidden} get-tuple-element(%act.{k}), index=0"
        yield f"%mask.{k} = {self._mask} get-tuple-element(%act.{k}), index=1"
        yield self._dot("y", x, f"%u.{k}, %w2.{k}", contracting=(1, 0))
        yield f"%y.view.{k} = {_ACTIVATION_VIEW} bitcast(%y.{k})"
        yield self._fusion("sum", x, f"%x{k}, %y.view.{k}", result=f"x{k + 1}")

    def backward(self) -> Iterator[str]:
        k, x, g = self._k, _activation(), f"%g{self._k + 1}"
        view = f"bf16[1,{self._inner},{_WIDTH}]{{2,1,0}}"
        yield self._dot("du", self._hidden, f"{g}, %w2.{k}", contracting=(1, 1))
        yield self._fusion("dh", self._hidden, f"%du.{k}, %mask.{k}")
        yield self._dot("dw2", self._down + "{1,0}", f"%u.{k}, {g}", contracting=(0, 0))
        yield f"%dw2.view.{k} = {view} bitcast(%dw2.{k})"
        yield self._dot("dn", x, f"%dh.{k}, %w1.{k}", contracting=(1, 1))
        yield self._dot("dw1", self._up + "{1,0}", f"%norm.{k}, %dh.{k}", contracting=(0, 0))
        yield self._fusion(
            "update",
            self.state,
            f"%state{k}, %dw1.{k}, %dw2.view.{k}",
            result=f"state{k}.new",
        )
        yield self._fusion("dstat", _ROW, f"%dn.{k}", kind="kInput")
        yield self._fusion("dx", x, f"{g}, %dn.{k}, %dstat.{k}", result=f"g{k}")

    def bodies(self) -> Iterator[str]:
        x, hidden, mask = _activation(), self._hidden, self._mask
        yield from self._body("stat", [x], *_SUM_OF_ROWS)
        yield from self._body(
            "norm",
            [x, _ROW],
            f"%wide = {x} broadcast(%p1), dimensions={{0}}".replace("bf16", "f32"),
            f"%exact = {x} convert(%p0)".replace("bf16", "f32"),
            f"%scaled = {x} multiply(%exact, %wide)".replace("bf16", "f32"),
            f"ROOT %out = {x} convert(%scaled)",
        )
        yield from self._body(
            "act",
            [hidden],
            "%zero = bf16[] constant(0)",
            f"%zeros = {hidden} broadcast(%zero), dimensions={{}}",
            f"%high = {mask} compare(%p0, %zeros), direction=GT",
            f"%kept = {hidden} select(%high, %p0, %zeros)",
            f"ROOT %out = ({hidden}, {mask}) tuple(%kept, %high)",
        )
        yield from self._body(
            "sum",
            [x, _ACTIVATION_VIEW],
            f"%flat = {x} bitcast(%p1)",
            f"ROOT %out = {x} add(%p0, %flat)",
        )
        yield from self._body(
            "dh",
            [hidden, mask],
            "%zero = bf16[] constant(0)",
            f"%zeros = {hidden} broadcast(%zero), dimensions={{}}",
            f"ROOT %out = {hidden} select(%p1, %p0, %zeros)",
        )
        down = f"bf16[1,{self._inner},{_WIDTH}]{{2,1,0}}"
        up = self._up + "{1,0}"
        yield from self._body(
            "update",
            [self.state, up, down],
            f"%flat = {up} bitcast(%p2)",
            f"%both = {up} add(%p1, %flat)",
            f"%exact = {self.state} convert(%both)",
            f"ROOT %out = {self.state} add(%p0, %exact)",
        )
        yield from self._body("dstat", [x], *_SUM_OF_ROWS)
        yield from self._body(
            "dx",
            [x, x, _ROW],
            f"%wide = {x} broadcast(%p2), dimensions={{0}}".replace("bf16", "f32"),
            f"%narrow = {x} convert(%wide)",
            f"%scaled = {x} multiply(%p1, %narrow)",
            f"ROOT %out = {x} add(%p0, %scaled)",
        )

    def _copy(self, weight: str, shape: str) -> Iterator[str]:
        k, device, host = self._k, shape + "{1,0}", shape + "{1,0:S(5)}"
        yield (f"%{weight}.start.{k} = ({device}, {host}, u32[]) copy-start(%{weight}.host.{k})")
        yield f"%{weight}.{k} = {device} copy-done(%{weight}.start.{k})"

    def _fusion(
        self, name: str, shape: str, operands: str, kind: str = "kLoop", result: str = ""
    ) -> str:
        k = self._k
        return (
            f"%{result or f'{name}.{k}'} = {shape} fusion({operands}), kind={kind}, "
            f"calls=%{name}.body.{k}, {_metadata(f'layer_{k}/{name}')}, {_CONFIG}"
        )

    def _dot(self, name: str, shape: str, operands: str, contracting: tuple[int, int]) -> str:
        k, (lhs, rhs) = self._k, contracting
        return (
            f"%{name}.{k} = {shape} dot({operands}), lhs_contracting_dims={{{lhs}}}, "
            f"rhs_contracting_dims={{{rhs}}}, {_metadata(f'layer_{k}/{name}')}, {_CONFIG}"
        )

    def _body(self, name: str, parameters: list[str], *lines: str) -> Iterator[str]:
        yield f"%{name}.body.{self._k} {{"
        yield from (f"%p{n} = {shape} parameter({n})" for n, shape in enumerate(parameters))
        yield from lines
        yield "}"


def _activation() -> str:
    return f"bf16[{_TOKENS},{_WIDTH}]{{1,0}}"


_ACTIVATION_VIEW = f"bf16[1,{_TOKENS},{_WIDTH}]{{2,1,0}}"
_ROW = f"f32[{_TOKENS}]{{0}}"
_SUM_OF_ROWS = (
    f"%exact = f32[{_TOKENS},{_WIDTH}]{{1,0}} convert(%p0)",
    "%zero = f32[] constant(0)",
    f"ROOT %out = {_ROW} reduce(%exact, %zero), dimensions={{1}}, to_apply=%add",
)


def _metadata(name: str) -> str:
    return f'metadata={{op_name="jit(step)/{name}" source_file="step.py" source_line=1}}'
