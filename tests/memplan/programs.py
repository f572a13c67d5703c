"""A program small enough to read: layers whose weights come from the host.

XLA's own order starts every transfer before any compute; the other starts the fetch of
layer n + 1 right before layer n computes.
"""

from pathlib import Path

TOY = Path(__file__).parent / "toy.toml"
"""A machine file: 1 GB/s of everything, 1 MiB of device memory."""

# A fusion shows its root's name and line.
_TANH = 'op_name="jit(step)/tanh" source_file="model.py" source_line=7'
_ACTIVATE = f"""
activate {{
  p = f32[64,256]{{1,0}} parameter(0)
  ROOT t = f32[64,256]{{1,0}} tanh(p), metadata={{{_TANH}}}
}}
"""
_DIMS = "lhs_contracting_dims={1}, rhs_contracting_dims={0}"
_HOST, _DEVICE = "f32[256,256]{1,0:S(5)}", "f32[256,256]{1,0}"


def _start(n: int) -> str:
    return f"  start.{n} = ({_DEVICE}, {_HOST}, u32[]) copy-start(w.{n})"


def _done(n: int) -> str:
    return f"  done.{n} = {_DEVICE} copy-done(start.{n})"


def _layer(n: int) -> str:
    source = f"act.{n - 1}" if n else "x"
    where = f'op_name="jit(step)/layer_{n}/dot" source_file="model.py" source_line={10 + n}'
    return f"""\
  dot.{n} = f32[64,256]{{1,0}} dot({source}, done.{n}), {_DIMS}, metadata={{{where}}}
  act.{n} = f32[64,256]{{1,0}} fusion(dot.{n}), kind=kLoop, calls=activate"""


def streamed_text(*, ahead: int | None = None, layers: int = 3, label: str = "params['w']") -> str:
    """HLO text; each weight is 256 KiB, each activation 64 KiB.

    Args:
      ahead: how many layers ahead a weight is fetched; None for all at the beginning.
      label: the user's name of the weights.
    """
    ahead = layers if ahead is None else ahead
    body = [_start(n) for n in range(min(ahead, layers))]
    for n in range(layers):
        if n + ahead < layers:
            body.append(_start(n + ahead))
        body += [_done(n), _layer(n)]
    weights = (
        f'  w.{n} = {_HOST} parameter({n + 1}), metadata={{op_name="{label}[{n}]"}}'
        for n in range(layers)
    )
    return "\n".join(
        [
            "HloModule jit_step, is_scheduled=true",
            _ACTIVATE,
            "ENTRY main {",
            '  x = f32[64,256]{1,0} parameter(0), metadata={op_name="x"}',
            *weights,
            *body,
            f"  ROOT out = f32[64,256]{{1,0}} negate(act.{layers - 1})",
            "}",
            "",
        ]
    )
