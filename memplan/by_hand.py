"""What to write by hand to come near a plan: ``memplan.advise(compiled)``.

    Plan ── placements, streams ──► arguments whose shardings are in the host's memory
         ── streams             ──► a policy of jax.checkpoint for what loops over layers leave
         ── edits               ──► lines whose results go to the host, or are computed again
         ── splits              ──► lines to run in chunks

For those who take no plan. It says nothing of what none of these can say: when transfers start,
into which slots, and in which order instructions run. Policies are those of
https://docs.jax.dev/en/latest/notebooks/host-offloading.html; MaxText's switches those of its
``base.yml``.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal

from hlo_passes.ir import Instruction, Module
from hlo_passes.plan import LoopStack, Plan, Split
from hlo_passes.reading.origins import Origins
from hlo_passes.units import format_bytes
from memplan.explaining import NO_PLAN, plan_of
from memplan.paths import siblings

if TYPE_CHECKING:
    from memplan.compiled import Compiled

Where = Literal["device", "host"]

# How many of the arguments below a path are named, where others stay.
_NAMES = 8

# Of its ``remat_policy=custom``, each of which is on the device, offloaded, or computed again.
_MAXTEXT = frozenset(
    """
    attention_out context decoder_layer_input engram indexer_cutoff_threshold key_proj kv_proj
    kv_wa_proj mla_kv mla_q mlpwi mlpwi_0 mlpwi_1 mlpwo moe_mlpwi_0 moe_mlpwi_1 moe_mlpwo
    moe_routing_maps moe_x_sorted out_proj qkv_proj query_proj query_wa_proj value_proj
    """.split()
)
# By the paths of its states of Flax's Linen and NNX.
_MAXTEXT_STATE = {
    "state.opt_state": "optimizer_memory_host_offload=True",
    "state.optimizer": "optimizer_memory_host_offload=True",
    "state.params": "parameter_memory_host_offload=True",
    "state.model": "parameter_memory_host_offload=True",
}


@dataclass(frozen=True, slots=True)
class HostedArguments:
    """Arguments that are in the host's memory between steps.

    Attributes:
      path: that they have in common, `memplan.paths.dotted`.
      names: of each.
      size: bytes, of one device.
      others: of the arguments below that path, how many stay on the device.
    """

    path: str
    names: tuple[str, ...]
    size: int
    others: int


@dataclass(frozen=True, slots=True)
class Residual:
    """What a layer of a loop leaves for the backward pass.

    Attributes:
      loop: ``file:line``, or ``""``.
      checkpoint_name: ``""`` where it has none.
      line: ``file:line`` that makes it; ``""`` of what a layer is given.
      size: bytes of all layers, of one device.
      where: it is kept.
    """

    loop: str
    checkpoint_name: str
    line: str
    size: int
    where: Where


@dataclass(frozen=True, slots=True)
class EditedLine:
    """Temporaries of one line that leave the device, or are computed again.

    Attributes:
      line: ``file:line``; ``""`` where it is not known, as of a plan without its module.
      action: ``"evict"`` or ``"recompute"``.
      count: how many.
      size: bytes of all.
    """

    line: str
    action: Literal["evict", "recompute"]
    count: int
    size: int


@dataclass(frozen=True, slots=True)
class ByHand:
    """What comes near a plan; each with the most bytes first.

    Attributes:
      hosted: on the host for the whole step.
      residuals: on the host, or kept on the device where others are computed again or on the host.
      recomputed: what loops compute again of what layers could leave.
      lines: of the straight-line program, and inside of loops.
      chunks: parts that run in chunks.
    """

    hosted: tuple[HostedArguments, ...]
    residuals: tuple[Residual, ...]
    recomputed: Literal["nothing", "elementwise", "everything"]
    lines: tuple[EditedLine, ...]
    chunks: tuple[Split, ...]

    def __str__(self) -> str:
        parts = (self._hosted(), self._policy(), self._lines(), self._chunks(), self._maxtext())
        told = "\n".join("\n".join(part) + "\n" for part in map(tuple, parts) if part)
        return told or "nothing but the order of instructions: that is the plan's alone\n"

    def _hosted(self) -> Iterator[str]:
        if not self.hosted:
            return
        total = format_bytes(sum(h.size for h in self.hosted))
        yield f"on the host between steps, {total} a device:"
        for h in self.hosted:
            stay = f", and {h.others} more stay: on the host" if h.others else ""
            yield f"    {h.path}: {_arguments(len(h.names))}, {format_bytes(h.size)}{stay}"
            if h.others:
                yield from (f"        {name}" for name in h.names[:_NAMES])
                if len(h.names) > _NAMES:
                    yield f"        and {len(h.names) - _NAMES} more"
        yield '  in_shardings and out_shardings: x.sharding.with_memory_kind("pinned_host")'
        yield "  in the step, where it is read:  jax.device_put(x, jax.memory.Space.Device)"

    def _policy(self) -> Iterator[str]:
        if not any(r.where == "host" for r in self.residuals) and self.recomputed == "nothing":
            return
        names: dict[Where, list[str]] = {
            where: sorted({r.checkpoint_name for r in self._named if r.where == where})
            for where in ("device", "host")
        }
        # A policy knows names, not loops: what some loop has no room for goes to the host.
        names["device"] = [name for name in names["device"] if name not in names["host"]]
        again = "" if self.recomputed == "nothing" else "; the rest is computed again"
        yield f"what layers leave for the backward pass{again}:"
        for r in self.residuals:
            what = r.checkpoint_name or r.line or "what a layer is given"
            of = f" of the loop at {r.loop}" if r.loop else ""
            there = "stays" if r.where == "device" else "on the host"
            yield f"    {what}{of}, {format_bytes(r.size)}: {there}"
        if not any(names.values()):
            yield "  jax.checkpoint(layer)"
        else:
            yield "  jax.checkpoint(layer, policy="
            yield "      jax.checkpoint_policies.save_and_offload_only_these_names("
            yield f"          names_which_can_be_saved={names['device']},"
            yield f"          names_which_can_be_offloaded={names['host']},"
            yield '          offload_src="device", offload_dst="pinned_host"))'
        for where, kind in (("device", "saved"), ("host", "offloaded")):
            unnamed = {r.line for r in self.residuals if r.where == where and not r.checkpoint_name}
            # What a layer is given stays by itself.
            lines = sorted(unnamed - {""}) + ["what a layer is given"] * (
                where == "host" and "" in unnamed
            )
            if lines:
                yield f"  to be {kind}, give these a checkpoint_name: {', '.join(lines)}"

    def _lines(self) -> Iterator[str]:
        ways = (
            ("evict", "to the host and back, by an offloaded checkpoint_name"),
            ("recompute", "computed again, by jax.checkpoint around what makes them"),
        )
        for action, how in ways:
            found = [line for line in self.lines if line.action == action]
            if found:
                yield f"temporaries {how}:"
            for line in found:
                where = line.line or "of lines that are not known"
                yield f"    {where}: {line.count} of {format_bytes(line.size)} in all"

    def _chunks(self) -> Iterator[str]:
        if self.chunks:
            yield "in chunks, by jax.lax.map(..., batch_size=) or a scan over slices:"
        for split in self.chunks:
            yield f"    {split}"

    def _maxtext(self) -> Iterator[str]:
        """Where all names are MaxText's."""
        names = {r.checkpoint_name: r.where for r in self._named}
        whole = (h.path for h in self.hosted if not h.others)
        switches = [_MAXTEXT_STATE[path] for path in whole if path in _MAXTEXT_STATE]
        kinds = {"device": "device", "host": "offload"}
        if names and names.keys() <= _MAXTEXT:
            values = (f"{name}={kinds[where]}" for name, where in sorted(names.items()))
            switches += ["remat_policy=custom", *values]
        if switches:
            yield "in MaxText:"
            yield f"    {' '.join(switches)}"

    @property
    def _named(self) -> list[Residual]:
        return [r for r in self.residuals if r.checkpoint_name]


def advise(subject: Compiled | Plan) -> str:
    """Says what to write in a program, or its trainer's configuration, to come near a plan
    without it.

    Args:
      subject: a compiled program, or a plan alone, which knows no lines of temporaries.

    Raises:
      SubjectError: when `subject` is neither.
    """
    plan, module = plan_of(subject)
    return f"{NO_PLAN}\n" if plan is None else str(by_hand(plan, module))


def by_hand(plan: Plan, module: Module | None = None) -> ByHand:
    """Returns what comes near a plan.

    Args:
      module: what it was written into, or XLA's executable of it.
    """
    return ByHand(
        tuple(_hosted(plan)),
        tuple(_residuals(plan)),
        "nothing" if plan.preparation is None else plan.preparation.recomputed,
        tuple(sorted(_Lines(plan, module).all(), key=lambda e: -e.size)),
        plan.splits,
    )


def _hosted(plan: Plan) -> Iterator[HostedArguments]:
    placed = {plan.labels.get(p.buffer, p.buffer): p for p in plan.placements}
    found: list[HostedArguments] = []
    for path, members in siblings(placed).items():
        away = tuple(m for m in members if placed[m].tier != plan.device_tier)
        if away:
            size = sum(placed[m].size for m in away)
            found.append(HostedArguments(path, away, size, len(members) - len(away)))
    yield from sorted(found, key=lambda h: -h.size)


def _residuals(plan: Plan) -> Iterator[Residual]:
    """What a loop makes, and another of the same line takes apart: jax calls the backward pass of a
    loop by the loop's line. What the update takes apart are gradients."""
    arguments = {*plan.labels.values()}
    met = Counter(
        (loop.source_line, stack)
        for loop in plan.streams
        for stack in {*loop.fetched, *loop.stored, *loop.on_device}
    )
    found: dict[LoopStack, Residual] = {}
    for loop in plan.streams:
        sides: tuple[tuple[Where, tuple[LoopStack, ...]], ...] = (
            ("host", loop.stored),
            ("device", loop.on_device),
        )
        for where, stacks in sides:
            for s in stacks:
                if s.name not in arguments and met[loop.source_line, s] > 1:
                    size = s.slice_bytes * loop.length
                    made = Residual(loop.source_line, s.checkpoint_name, s.line, size, where)
                    found.setdefault(s, made)
    yield from sorted(found.values(), key=lambda r: (-r.size, r.line))


class _Lines:
    """What a plan's edits do, by line."""

    def __init__(self, plan: Plan, module: Module | None) -> None:
        self._plan = plan
        self._module = module

    def all(self) -> Iterator[EditedLine]:
        sizes: defaultdict[tuple[str, Literal["evict", "recompute"]], dict[str, int]]
        sizes = defaultdict(dict)
        for plan in (self._plan, *(body.plan for body in self._plan.bodies)):
            known = {slot.buffer: slot.size for slot in plan.slots}
            known |= {d.buffer: d.size for d in plan.decisions}
            known |= {t.buffer: t.size for t in plan.transfers}
            for e in plan.edits.evictions:
                sizes[self._line(e.buffer), "evict"][e.buffer] = known.get(e.buffer, 0)
            for r in plan.edits.recomputes:
                size = known.get(r.original, known.get(r.clone, 0))
                sizes[self._line(r.original), "recompute"][r.original] = size
        for (line, action), found in sizes.items():
            yield EditedLine(line, action, len(found), sum(found.values()))

    def _line(self, name: str) -> str:
        instruction = self._instructions.get(name)
        return "" if instruction is None else self._origins.line(instruction)

    @cached_property
    def _origins(self) -> Origins:
        assert self._module is not None
        return Origins(self._module)

    @cached_property
    def _instructions(self) -> Mapping[str, Instruction]:
        computations = () if self._module is None else self._module.computations.values()
        return {i.name: i for c in computations for i in c.instructions}


def _arguments(count: int) -> str:
    return f"{count} argument{'s' * (count != 1)}"
