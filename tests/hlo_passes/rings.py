"""A scanned program as memplan's ring makes it, in XLA's words: slots of 256 bytes."""

from __future__ import annotations

from dataclasses import dataclass

from hlo_passes.hardware.machine import Machine
from hlo_passes.ir import Module
from tests.hlo_passes.toys import link, module_of, toy_machine

SLOT_BYTES = 256
TRIPS = 3

_W = "f32[8,8]{1,0}"
_ROW = "f32[1,8,8]{2,1,0}"
_PRODUCT = "lhs_contracting_dims={1}, rhs_contracting_dims={0}"


@dataclass(frozen=True)
class Ring:
    """`slots` layers an iteration, of which all but one slot are carried.

    Attributes:
      stores: each layer's input goes to the host as well.
      copied: the carried slots are copied into the state, as XLA:GPU does it.
      eager: each fetch starts at the beginning of its iteration; else right where it is
        waited for.
    """

    slots: int = 2
    stores: bool = False
    copied: bool = False
    eager: bool = False

    @property
    def layers(self) -> int:
        return self.slots * TRIPS + self.slots - 1

    @property
    def stack(self) -> str:
        return f"f32[{self.layers},8,8]{{2,1,0:S(5)}}"

    @property
    def state(self) -> str:
        slots = [_W] * (self.slots - 1)
        saved = [self.stack] if self.stores else []
        return f"(s32[], {', '.join([_W, *slots, self.stack, *saved])})"

    def text(self) -> str:
        return f"""HloModule ring, is_scheduled=true

%condition (s.1: {self.state}) -> pred[] {{
  %s.1 = {self.state} parameter(0)
  %j.1 = s32[] get-tuple-element(%s.1), index=0
  %n = s32[] constant({TRIPS})
  ROOT %more = pred[] compare(%j.1, %n), direction=LT
}}

%body (s: {self.state}) -> {self.state} {{
{self._body()}
}}

ENTRY %main (x.0: {_W}, stack.0: {self.stack}) -> {self.state} {{
{self._entry()}
}}
"""

    def module(self) -> Module:
        return module_of(self.text())

    def fetch(self, name: str, stack: str, index: str) -> tuple[str, str]:
        start = (
            f"  %{name}.start = (({self.stack}, s32[], s32[], s32[]), {_ROW}, u32[]) "
            f"dynamic-slice-start(%{stack}, %{index}, %zero, %zero), "
            "dynamic_slice_sizes={1,8,8}"
        )
        return start, f"  %{name}.done = {_ROW} dynamic-slice-done(%{name}.start)"

    def _store(self, name: str, buffer: str, index: str) -> tuple[str, str]:
        start = (
            f"  %{name}.start = (({self.stack}, {_ROW}, s32[], s32[], s32[]), {self.stack}, "
            f"u32[]) dynamic-update-slice-start(%{buffer}, %{name}.row, %{index}, %zero, %zero)"
        )
        return start, f"  %{name}.done = {self.stack} dynamic-update-slice-done(%{name}.start)"

    def _body(self) -> str:
        carried = self.slots - 1
        lines = [
            f"  %s = {self.state} parameter(0)",
            "  %j = s32[] get-tuple-element(%s), index=0",
            f"  %x = {_W} get-tuple-element(%s), index=1",
            *(f"  %w{k} = {_W} get-tuple-element(%s), index={2 + k}" for k in range(carried)),
            f"  %stack = {self.stack} get-tuple-element(%s), index={2 + carried}",
            "  %zero = s32[] constant(0)",
            "  %one = s32[] constant(1)",
            f"  %k = s32[] constant({self.slots})",
            "  %i = s32[] multiply(%j, %k)",
            f"  %ahead = s32[] constant({carried})",
            "  %i0 = s32[] add(%i, %ahead)",
            *(f"  %i{u} = s32[] add(%i{u - 1}, %one)" for u in range(1, self.slots)),
        ]
        fetches = [self.fetch(f"f{u}", "stack", f"i{u}") for u in range(self.slots)]
        if self.eager:
            lines += [start for start, _ in fetches]
        saved = "saved"
        if self.stores:
            lines.append(f"  %saved = {self.stack} get-tuple-element(%s), index={3 + carried}")
        for u in range(self.slots):
            before = "x" if u == 0 else f"y{u - 1}"
            if self.stores:
                lines.append(f"  %p{u}.row = {_ROW} bitcast(%{before})")
                lines += self._store(f"p{u}", saved, f"i{u}")
                saved = f"p{u}.done"
            weight = f"w{u}"
            if u == carried:
                lines += [*fetches[0]] if not self.eager else [fetches[0][1]]
                lines.append(f"  %w{u} = {_W} bitcast(%f0.done)")
            lines.append(f"  %y{u} = {_W} dot(%{before}, %{weight}), {_PRODUCT}")
        handed_on: list[str] = []
        for u in range(1, self.slots):
            start, done = fetches[u]
            lines += [done] if self.eager else [start, done]
            lines.append(f"  %new{u} = {_W} bitcast(%f{u}.done)")
            handed_on.append(f"%new{u}")
            if self.copied:
                lines.append(f"  %copy{u} = {_W} copy(%new{u})")
                handed_on[-1] = f"%copy{u}"
        saved_on = [f"%{saved}"] if self.stores else []
        parts = ", ".join(["%next", f"%y{self.slots - 1}", *handed_on, "%stack", *saved_on])
        lines += ["  %next = s32[] add(%j, %one)", f"  ROOT %out = {self.state} tuple({parts})"]
        return "\n".join(lines)

    def _entry(self) -> str:
        fetches = [self.fetch(f"first{k}", "stack.0", f"index{k}") for k in range(self.slots - 1)]
        lines = [
            f"  %x.0 = {_W} parameter(0)",
            f"  %stack.0 = {self.stack} parameter(1)",
            "  %zero = s32[] constant(0)",
            *(f"  %index{k} = s32[] constant({k})" for k in range(self.slots - 1)),
            *(line for pair in fetches for line in pair),
            f"  %x.start = {_W} negate(%x.0)",
            "  %first = s32[] copy(%zero)",
            *(f"  %slot{k} = {_W} bitcast(%first{k}.done)" for k in range(self.slots - 1)),
        ]
        parts = ["%first", "%x.start", *(f"%slot{k}" for k in range(self.slots - 1)), "%stack.0"]
        if self.stores:
            lines.append(f'  %empty = {self.stack} custom-call(), custom_call_target="Empty"')
            parts.append("%empty")
        lines += [
            f"  %init = {self.state} tuple({', '.join(parts)})",
            f"  ROOT %loop = {self.state} while(%init), condition=%condition, body=%body",
        ]
        return "\n".join(lines)


def ring_machine(bytes_per_s: float = 10.0) -> Machine:
    """A layer of `Ring` takes 7.68 s of memory traffic; a slot 256 bytes of the link."""
    links = tuple(
        link(*ends, nominal_bytes_per_s=bytes_per_s) for ends in (("host", "hbm"), ("hbm", "host"))
    )
    return toy_machine(links=links)
