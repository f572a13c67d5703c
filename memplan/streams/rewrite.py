"""Runs a traced program with some of its arrays in host memory.

The program was traced as if everything were on the device. Here its equations are run
again, in order, on values of which some are on the host:

  - a `scan` that takes a stack from the host, or gives one that is to go there, becomes a
    ring (see `ring`);
  - a loop that is opened brings what it reads whole in each iteration: XLA leaves a copy from
    the host where it is, and the planner finds a place for it in the body;
  - an equation around such a scan (another loop, remat, shard_map, a branch) is run the same
    way inside, and gets its operands where they are;
  - a reshape that only splits a leading axis is done where the array is;
  - any other equation gets its operands on the device: an array is brought there whole.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import jax
from jax import lax
from jax.extend import source_info_util
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var, jaxpr_as_fun
from jax.sharding import NamedSharding

from hlo_passes.equations import (
    Call,
    Cond,
    Path,
    Program,
    Remat,
    Scan,
    ShardMap,
    While,
    bind,
    decode,
    programs,
    with_programs,
)
from memplan.streams.leading_axis import splits_leading_axis
from memplan.streams.orders import (
    Order,
    aval_in_rows,
    seen_as_it_was,
    seen_in_rows,
    slice_as_it_was,
    slice_in_rows,
)
from memplan.streams.ring import DEVICE, HOST, Ring, constrained, run
from memplan.streams.turning import Turn, as_it_was, as_turned


@dataclass(frozen=True)
class Stream:
    """What is decided about one scan.

    Attributes:
      depth: slots of its ring; with 0 it stays a scan, whose iterations bring what they read
        and put away what they make.
      share: the stacks that a layer reads first, up to this share of the bytes that it
        fetches, have so many; the others have one.
      stored: the results, by index among the stacked ones, that go to the host.
      lags: see `Ring`.
      taken, made: the orders of stacks and of stacked results that do not lie in rows.
    """

    depth: int
    share: float = 1.0
    stored: frozenset[int] = frozenset()
    lags: bool = False
    taken: Mapping[int, Order] = field(default_factory=dict[int, Order])
    made: Mapping[int, Order] = field(default_factory=dict[int, Order])


def streamed(
    jaxpr: Jaxpr,
    streams: Mapping[Path, Stream],
    *,
    opened: Collection[Path] = (),
    whole: Collection[int] = (),
    divided: Mapping[int, NamedSharding] = MappingProxyType({}),
    divided_results: Mapping[int, NamedSharding] = MappingProxyType({}),
    donated: Collection[int] = (),
    turned: Mapping[int, Turn] = MappingProxyType({}),
    turned_results: Mapping[int, Turn] = MappingProxyType({}),
    tied: bool = True,
) -> Callable[..., list[Any]]:
    """Returns a function of the flat arguments of `jaxpr` that runs it.

    Args:
      streams: the scans that are streamed, where an operand of theirs is on the host or a
        result is to go there.
      opened: the loops that bring whole arguments from the host in each iteration.
      whole: numbers of the arguments that come to the device as they are, whatever reads them.
      divided: how arguments, which no scan takes apart, lie across devices.
      divided_results: how results, which scans leave on the host, do.
      donated: numbers of the arguments whose memory the results may take.
      turned, turned_results: those that the function has otherwise than `jaxpr`.
      tied: see `Ring`.
    """
    owned = frozenset(jaxpr.invars[n] for n in donated)
    readers = {v: eqn for eqn in reversed(jaxpr.eqns) for v in _variables(eqn)}

    def arrived(n: int, argument: Any) -> Any:
        if n not in whole:
            return argument
        reader = readers.get(jaxpr.invars[n])
        with line_of(reader) if reader is not None else nullcontext():
            return _arrived(argument, divided.get(n))

    known = {jaxpr.invars[n]: sharding for n, sharding in divided.items()}
    for k, sharding in divided_results.items():
        if k not in turned_results and isinstance(made := jaxpr.outvars[k], Var):
            known[made] = sharding

    def function(*args: Any) -> list[Any]:
        placed = [arrived(n, a) for n, a in enumerate(args)]
        placed = [as_turned(a, turned.get(n)) for n, a in enumerate(placed)]
        results = _Rewrite(streams, opened, tied, known).run(jaxpr, placed, (), owned)
        return [as_it_was(r, turned_results.get(k)) for k, r in enumerate(results)]

    return function


def scope_of(path: Path) -> str:
    """What the names of the operations of a ring contain, down to the final executable."""
    return "ring_" + "_".join(map(str, path))


class _Rewrite:
    def __init__(
        self,
        streams: Mapping[Path, Stream],
        opened: Collection[Path],
        tied: bool,
        divided: Mapping[Var, NamedSharding],
    ) -> None:
        self.streams = streams
        self.tied = tied
        self.divided = dict(divided)
        paths = (*streams, *opened)
        self.around = {path[:n] for path in paths for n in range(1, len(path) + 1)}

    def run(
        self,
        jaxpr: Jaxpr,
        args: Sequence[Any],
        path: Path,
        owned: frozenset[Var] = frozenset(),
    ) -> list[Any]:
        """Runs a program, which is at `path`, on all of its inputs.

        Args:
          owned: the inputs whose memory is free once they are read.
        """
        atoms = [*jaxpr.constvars, *jaxpr.invars]
        values: dict[Var, Any] = dict(zip(atoms, [*jaxpr.consts, *args], strict=True))
        last_use = _last_uses(jaxpr)
        begin = 0
        for n, eqn in enumerate(jaxpr.eqns):
            is_view = splits_leading_axis(eqn)
            if (*path, n) in self.around or is_view:
                self._unchanged(jaxpr, begin, n, values, last_use)
                operands = [_read(a, values) for a in eqn.invars]
                self._enter(eqn)
                with line_of(eqn):
                    if is_view:
                        results = bind(eqn, *operands)
                        if eqn.invars[0] in owned:
                            owned |= {eqn.outvars[0]}
                    elif isinstance(scan := decode(eqn), Scan):
                        kept = set(atoms) - owned
                        kept |= {a for a, last in last_use.items() if last > n}
                        free = [isinstance(a, Var) and a not in kept for a in eqn.invars]
                        divided = {
                            r: self.divided[v]
                            for r, v in enumerate(eqn.outvars[scan.carried :])
                            if v in self.divided
                        }
                        results = self._scan(scan, operands, free, divided, (*path, n))
                    else:
                        results = self._around(eqn, operands, (*path, n))
                values.update(zip(eqn.outvars, results, strict=True))
                begin = n + 1
        self._unchanged(jaxpr, begin, len(jaxpr.eqns), values, last_use)
        results = [_read(a, values) for a in jaxpr.outvars]
        return [
            _on_device(r) if a in atoms else r for a, r in zip(jaxpr.outvars, results, strict=True)
        ]

    def _enter(self, eqn: JaxprEqn) -> None:
        """Takes note of how the inputs of the programs inside an equation lie across devices; what
        is inside a `ShardMap` is of one device."""
        for program in programs(eqn):
            for outside, var in zip(eqn.invars[program.first :], program.jaxpr.invars, strict=True):
                self.divided.pop(var, None)
                sharding = self.divided.get(outside) if isinstance(outside, Var) else None
                if sharding is not None and not isinstance(decode(eqn), ShardMap):
                    self.divided[var] = sharding

    def _unchanged(
        self,
        jaxpr: Jaxpr,
        begin: int,
        end: int,
        values: dict[Var, Any],
        last_use: Mapping[Var, int],
    ) -> None:
        """Runs the equations from `begin` to before `end` as they are."""
        eqns = jaxpr.eqns[begin:end]
        made = {v for eqn in eqns for v in eqn.outvars}
        read = (v for eqn in eqns for v in _variables(eqn))
        taken = [v for v in dict.fromkeys(read) if v not in made]
        given = [v for eqn in eqns for v in eqn.outvars if last_use.get(v, -1) >= end]
        part = _between(jaxpr, taken, eqns, given)
        # A copy of its own for each such part: what is on the host stays there for a later loop.
        operands = [
            _arrived(values[v], self.divided.get(v)) if on_host(values[v]) else values[v]
            for v in taken
        ]
        results = jaxpr_as_fun(part)(*operands)
        values.update(zip(given, results, strict=True))

    def _around(self, eqn: JaxprEqn, args: list[Any], path: Path) -> list[Any]:
        """Runs an equation, no scan, around one that is streamed."""

        def inside(program: Program) -> Callable[..., list[Any]]:
            at = (*path, *program.step)
            return lambda *inputs: self.run(program.jaxpr, inputs, at)

        functions = [inside(program) for program in programs(eqn)]
        match decode(eqn):
            case Call():
                return functions[0](*args)
            case Remat():
                return _rebind(eqn, functions[0], args)
            case Cond():
                return lax.switch(args[0], functions, *args[1:])
            case While() as loop:
                return self._while(loop, args, path)
            case ShardMap() as shard_map:
                return list(_shard_map(shard_map, functions[0])(*args))
            case _:
                raise AssertionError(eqn)

    def _scan(
        self,
        scan: Scan,
        args: list[Any],
        free: Sequence[bool],
        divided: Mapping[int, NamedSharding],
        path: Path,
    ) -> list[Any]:
        """Runs a scan as a ring; `free` says whose memory it may take, operand by operand, and
        `divided` how stacked results lie across devices."""
        stream = self.streams.get(path, Stream(depth=0))
        body, carried, first = scan.body, scan.carried, scan.first_stack
        consts, carry = args[: scan.constants], args[scan.constants : first]
        given = {*body.constvars, *body.invars}
        results = body.outvars[carried:]
        on_device = [
            s for s, stack in enumerate(args[first:]) if free[first + s] and not on_host(stack)
        ]
        avals = [v.aval for v in body.invars[first:]]

        def layer(carry: list[Any], slices: list[Any]) -> tuple[list[Any], list[Any]]:
            out = self.run(body, [*consts, *carry, *slices], path)
            return out[:carried], out[carried:]

        if stream.depth == 0:

            def iteration(carry: list[Any], slices: tuple[Any, ...]) -> tuple[list[Any], list[Any]]:
                carry, made = layer(carry, [_on_device(s) for s in slices])
                return carry, [
                    jax.device_put(m, HOST) if r in stream.stored else m for r, m in enumerate(made)
                ]

            carry, stacks = lax.scan(
                iteration,
                [_on_device(c) for c in carry],
                tuple(args[first:]),
                length=scan.length,
                reverse=scan.reverse,
                unroll=scan.unroll,
            )
            return [*carry, *stacks]
        taken, made = stream.taken, stream.made
        in_rows = [aval_in_rows(a, taken.get(s)) for s, a in enumerate(avals)]
        results_in_rows = [aval_in_rows(v.aval, made.get(r)) for r, v in enumerate(results)]

        def layer_on_rows(carry: list[Any], slices: list[Any]) -> tuple[list[Any], list[Any]]:
            turned = [slice_as_it_was(a, taken.get(s)) for s, a in enumerate(slices)]
            carry, given = layer(carry, turned)
            return carry, [slice_in_rows(a, made.get(r)) for r, a in enumerate(given)]

        ring = Ring(
            scan.length,
            scan.reverse,
            stream.depth,
            _read_first(body, first, args[first:], stream.share),
            stream.lags,
            stream.stored,
            frozenset(r for r in stream.stored if results[r] in given),
            _pair(
                {r: a for r, a in enumerate(results_in_rows) if r not in stream.stored},
                {s: in_rows[s] for s in on_device},
            ),
            {r: of_stack for r, of_stack in divided.items() if r not in made},
            self.tied,
        )
        with jax.named_scope(scope_of(path)):
            carry, stacks = run(
                ring,
                layer_on_rows,
                [_on_device(c) for c in carry],
                [seen_in_rows(a, taken.get(s)) for s, a in enumerate(args[first:])],
                results_in_rows,
            )
        return [*carry, *(seen_as_it_was(a, made.get(r)) for r, a in enumerate(stacks))]

    def _while(self, loop: While, args: list[Any], path: Path) -> list[Any]:
        first, carried = loop.condition_constants, loop.first_carried
        return list(
            lax.while_loop(
                lambda carry: jaxpr_as_fun(loop.condition)(*args[:first], *carry)[0],
                lambda carry: tuple(self.run(loop.body, [*args[first:carried], *carry], path)),
                tuple(args[carried:]),
            )
        )


def line_of(eqn: JaxprEqn) -> AbstractContextManager[None]:
    """What is traced in it names the line of the user's program that `eqn` comes from."""
    return source_info_util.user_context(
        eqn.source_info.traceback, name_stack=source_info_util.current_name_stack()
    )


def _rebind(eqn: JaxprEqn, function: Callable[..., list[Any]], args: list[Any]) -> list[Any]:
    """The same equation around another program: remat keeps what it says about derivatives."""
    closed = jax.make_jaxpr(function)(*args)
    jaxpr = _between(closed, [*closed.constvars, *closed.invars], closed.eqns, closed.outvars)
    return bind(with_programs(eqn, [jaxpr]), *closed.consts, *args)


def _shard_map(shard_map: ShardMap, function: Callable[..., Any]) -> Callable[..., Any]:
    return jax.shard_map(
        lambda *args: tuple(function(*args)),
        mesh=shard_map.mesh,
        in_specs=shard_map.in_specs,
        out_specs=shard_map.out_specs,
        axis_names=shard_map.axis_names,
        check_vma=shard_map.check_vma,
    )


def _read_first(layer: Jaxpr, first: int, stacks: Sequence[Any], share: float) -> frozenset[int]:
    """The stacks on the host that a layer reads first, of `share` of their bytes or a little
    more. `first`: the layer's input that is a slice of the first stack."""
    reads = {a: n for n, eqn in reversed([*enumerate(layer.eqns)]) for a in _variables(eqn)}
    hosted = [s for s, stack in enumerate(stacks) if on_host(stack)]
    hosted.sort(key=lambda s: reads.get(layer.invars[first + s], len(layer.eqns)))
    sizes = [stacks[s].size * stacks[s].dtype.itemsize for s in hosted]
    before = [sum(sizes[:n]) for n in range(len(hosted))]
    return frozenset(s for s, b in zip(hosted, before, strict=True) if b < share * sum(sizes))


def _pair(results: Mapping[int, Any], stacks: Mapping[int, Any]) -> dict[int, int]:
    """Gives results the place of stacks of the same kind. Any will do: slice n of a stack is
    read by layer n only, and then written."""
    pairs: dict[int, int] = {}
    for r, made in results.items():
        same = (s for s, taken in stacks.items() if taken == made and s not in pairs.values())
        if (stack := next(same, None)) is not None:
            pairs[r] = stack
    return pairs


def on_host(value: Any) -> bool:
    """Whether a value, or what is known of it while tracing, is in host memory."""
    return getattr(jax.typeof(value), "memory_space", DEVICE) == HOST


def _on_device(value: Any) -> Any:
    return jax.device_put(value, DEVICE) if on_host(value) else value


def _arrived(argument: Any, sharding: NamedSharding | None) -> Any:
    """An argument on its devices. What is divided there has to be said once more: where a reader
    needs all of it, XLA would gather it on the host, and bring all of it to each device."""
    value = _on_device(argument)
    return value if sharding is None else constrained(value, sharding)


def _between(
    jaxpr: Jaxpr, invars: Sequence[Var], eqns: Sequence[JaxprEqn], outvars: Sequence[Any]
) -> Jaxpr:
    """A part of a program, without constants."""
    return jaxpr.replace(constvars=[], invars=invars, eqns=eqns, outvars=outvars)


def _variables(eqn: JaxprEqn) -> list[Var]:
    return [a for a in eqn.invars if isinstance(a, Var)]


def _read(atom: Any, values: Mapping[Var, Any]) -> Any:
    return atom.val if isinstance(atom, Literal) else values[atom]


def _last_uses(jaxpr: Jaxpr) -> dict[Var, int]:
    """The index of the last equation that reads a variable; past the end for results."""
    found = {a: n for n, eqn in enumerate(jaxpr.eqns) for a in _variables(eqn)}
    return found | {a: len(jaxpr.eqns) for a in jaxpr.outvars if isinstance(a, Var)}
