"""Does a cluster's plan do what its work says? Played through, on symbols; shares nothing with the
checker, and reads the plan as it is written (`ClusterPlan.to_dict`).

*Chain*: two replays, one descriptor after the other, in which what is released is gone.
*Orders*: two replays of the chain, many times, in drawn orders that its streams and waits allow.
What is under way reads its bytes when it begins and writes them when it ends, each byte a symbol.
*Clock*: once, with everything begun and ended when the plan says. *Wires*: every wire's load in
every stretch between two moments. In each, what is read has to be what the work says.
"""

from __future__ import annotations

import math
import random
from collections import Counter, defaultdict
from collections.abc import Container, Iterator, Sequence
from fractions import Fraction
from itertools import pairwise
from typing import Any

from hlo_passes.chains.chain import Chain, Copy, Descriptor, Execute, Release, SpaceKind
from hlo_passes.cluster.plan import ClusterPlan

ORDERS = 12


def first_fault(plan: ClusterPlan, pick: random.Random) -> str:
    """What goes wrong first, or ``""``."""
    try:
        work = _Expected(plan.to_dict()["work"])
        _play_chain(plan, work)
        _play_clock(plan, work)
        for _ in range(ORDERS):
            _play_order(plan, work, pick)
        _load_wires(plan)
        _fill_memories(plan)
    except _FaultError as fault:
        return str(fault)
    return ""


class _FaultError(Exception):
    pass


class _Expected:
    """What each segment reads and writes, by names, from the work's JSON."""

    def __init__(self, work: Any) -> None:
        self.programs = {p["name"]: p for p in work["programs"]}
        self.reads: dict[str, list[str]] = {}
        self.writes: dict[str, list[str]] = {}
        self.seconds: dict[str, float] = {}
        self.streams: dict[str, str] = {}
        self.before: dict[str, str] = {}
        self.sizes: dict[str, int] = {s["name"]: s["bytes"] for s in work["states"]}
        self.sent: dict[str, int] = {}
        self.taken: list[str] = []
        self.flows = work["flows"]
        self.changes: dict[str, int] = {}
        self.states_of: dict[str, list[str]] = {}
        for p in work["programs"]:
            previous = ""
            for run in range(p["runs"]):
                for k, seconds in enumerate(p["segments"]):
                    name = f"{p['name']}#{run}"
                    name += f".{k}" if len(p["segments"]) > 1 else ""
                    self.reads[name], self.writes[name] = [], []
                    self.seconds[name], self.streams[name] = seconds, p["node"]
                    if previous:
                        self.before[name] = previous
                    previous = name
        self._states(work["states"])
        for f in work["flows"]:
            self._flow(f)
        for p in work["programs"]:
            for run in range(p["runs"]):
                self.writes[self._at(p, run, -1)] += self.states_of[self._at(p, run, -1)]
                self._traffic(p, run)

    def _states(self, states: Any) -> None:
        """As if runs that share a state followed each other: ``w@3`` is what the third of them
        that writes it in a replay has left."""
        made: dict[tuple[str, str], tuple[str, str]] = {}
        for s in states:
            users = [p for p in self._ordered() if s["name"] in (*p["reads"], *p["writes"])]
            rounds = min((p["runs"] for p in users), default=0)
            count = 0
            for turn in range(rounds):
                for p in users:
                    for run in range(p["runs"]):
                        if run * rounds // p["runs"] == turn:
                            before, count = count, count + (s["name"] in p["writes"])
                            ends = f"{s['name']}@{before}", f"{s['name']}@{count}"
                            made[f"{p['name']}#{run}", s["name"]] = ends
            self.changes[s["name"]] = count
        for p in self.programs.values():
            for run in range(p["runs"]):
                of = f"{p['name']}#{run}"
                self.reads[self._at(p, run, 0)] += [made[of, name][0] for name in p["reads"]]
                self.states_of[self._at(p, run, -1)] = [made[of, name][1] for name in p["writes"]]

    def _ordered(self) -> Iterator[Any]:
        """Programs as listed, each after those whose flows it reads in the same run."""
        left, done = list(self.programs.values()), {""}
        while left:
            found = next(
                p
                for p in left
                if all(
                    f["source"] in done
                    for f in self.flows
                    if f["destination"] == p["name"] and not f["lag"]
                )
            )
            left.remove(found)
            done.add(found["name"])
            yield found

    def _at(self, p: Any, run: int, k: int) -> str:
        count = len(p["segments"])
        return f"{p['name']}#{run}" + (f".{k % count}" if count > 1 else "")

    def _flow(self, f: Any) -> None:
        source, reader = self.programs.get(f["source"]), self.programs.get(f["destination"])
        first = reader if source is None else source
        assert first is not None
        for n in range(first["runs"]):
            to = n if source is None else n * f["stride"] + f["lag"]
            if reader is not None and to >= reader["runs"]:
                continue
            self.sizes[f"{f['name']}#{n}"] = f["bytes"]
            if source is not None:
                self.writes[self._at(source, n, f["at"])].append(f"{f['name']}#{n}")
            if reader is not None:
                self.reads[self._at(reader, to, f["needed"])].append(f"{f['name']}#{n}")
            else:
                self.taken.append(f"{f['name']}#{n}")

    def _traffic(self, p: Any, run: int) -> None:
        stored = {t["of"] for t in p["traffic"] if t["source"] in ("hbm", "dram")}
        for t in p["traffic"]:
            is_fabric = t["source"] == "fabric"
            leaves = t["source"] in ("hbm", "dram")
            value = f"{p['name']}#{run}/{t['name' if is_fabric else 'of']}"
            if not is_fabric and t["of"] not in stored:
                value = f"{p['name']}/{t['of']}"
            if is_fabric:
                self.writes[self._at(p, run, t["start"] - 1)].append(f"begun {value}")
                self.reads[value], self.writes[value] = [f"begun {value}"], [value]
                self.seconds[value], self.streams[value] = t["seconds"], f"{p['node']} fabric"
                self.sent[value] = t["bytes"]
            elif leaves:
                self.writes[self._at(p, run, t["start"] - 1)].append(value)
            if not leaves:
                for k in dict.fromkeys((t["done"], t["end"] - 1)):
                    if k < len(p["segments"]):
                        self.reads[self._at(p, run, k)].append(value)


class _Memory:
    """What each byte holds, by the pieces that slots cut a space into, and who is at it."""

    def __init__(self, chain: Chain, states: Container[str]) -> None:
        self.chain = chain
        cuts: defaultdict[int, set[int]] = defaultdict(set)
        for slot in chain.slots:
            cuts[slot.space] |= {slot.offset, slot.offset + slot.bytes}
        self.pieces = [
            [
                (slot.space, a, b)
                for a, b in pairwise(sorted(cuts[slot.space]))
                if slot.offset <= a and b <= slot.offset + slot.bytes
            ]
            for slot in chain.slots
        ]
        self.holds: dict[tuple[int, int, int], tuple[str, int]] = {}
        self.readers: Counter[tuple[int, int, int]] = Counter()
        self.writers: Counter[tuple[int, int, int]] = Counter()
        for k, slot in enumerate(chain.slots):
            if chain.spaces[slot.space].kind == SpaceKind.BOUND:
                self.write(k, f"{slot.name}@0" if slot.name in states else slot.name)

    def read(self, slot: int) -> str:
        """The value all of whose bytes lie there, in their order."""
        start = self.chain.slots[slot].offset
        found = [(self.holds.get(p, ("", 0)), p[1] - start) for p in self.pieces[slot]]
        names = {value for (value, _), _ in found}
        if len(names) != 1 or any(at != offset for (_, at), offset in found):
            return ""
        (name,) = names
        return name

    def write(self, slot: int, value: str) -> None:
        start = self.chain.slots[slot].offset
        for p in self.pieces[slot]:
            self.holds[p] = value, p[1] - start

    def enter(self, reads: Sequence[int], writes: Sequence[int]) -> None:
        for slot in reads:
            if any(self.writers[p] for p in self.pieces[slot]):
                raise _FaultError(f"{self.chain.slots[slot].name} is read while it is written")
        own = Counter(p for slot in reads for p in self.pieces[slot])
        for slot in writes:
            if any(self.writers[p] or self.readers[p] for p in self.pieces[slot]):
                raise _FaultError(f"{self.chain.slots[slot].name} is written while it is in use")
        self.readers += own
        self.writers += Counter(p for slot in writes for p in self.pieces[slot])

    def leave(self, reads: Sequence[int], writes: Sequence[int]) -> None:
        self.readers -= Counter(p for slot in reads for p in self.pieces[slot])
        self.writers -= Counter(p for slot in writes for p in self.pieces[slot])


class _Player:
    """The chain, begun and ended descriptor by descriptor."""

    def __init__(self, plan: ClusterPlan, work: _Expected) -> None:
        self.chain, self.work = plan.chain, work
        self.memory = _Memory(plan.chain, work.changes)
        self.ran: Counter[str] = Counter()
        self.under_way: dict[int, list[str]] = {}
        self.on_node: dict[str, str] = {}

    def operands(self, d: Descriptor) -> tuple[Sequence[int], Sequence[int]]:
        match d.action:
            case Copy(source, destination):
                return (source,), (destination,)
            case Execute(k):
                return self.chain.segments[k].arguments, self.chain.segments[k].results
            case _:
                return (), ()

    def of_replay(self, key: int, values: Sequence[str]) -> list[str]:
        """States go on from one replay to the next."""
        replay = key // len(self.chain.descriptors)
        found: list[str] = []
        for value in values:
            name, _, count = value.partition("@")
            changes = self.work.changes.get(name)
            found.append(value if changes is None else f"{name}@{int(count) + replay * changes}")
        return found

    def begin(self, key: int, d: Descriptor) -> None:
        reads, writes = self.operands(d)
        is_in_place = isinstance(d.action, Execute)
        self.memory.enter([s for s in reads if not (is_in_place and s in writes)], writes)
        self.under_way[key] = [self.memory.read(slot) for slot in reads]
        for slot, value in zip(reads, self.under_way[key], strict=True):
            if not value:
                raise _FaultError(f"{self.chain.slots[slot].name} is read, and holds no value")
        if isinstance(d.action, Execute):
            name = self.chain.segments[d.action.segment].name
            stream = self.chain.streams[d.stream].name
            if name not in self.work.reads or stream != self.work.streams[name]:
                raise _FaultError(f"{name} runs on {stream}")
            if self.under_way[key] != self.of_replay(key, self.work.reads[name]):
                raise _FaultError(f"{name} reads {self.under_way[key]}")
            sizes = [self.chain.slots[slot].bytes for slot in reads]
            for value, size in zip(self.under_way[key], sizes, strict=True):
                if self.work.sizes.get(value.partition("@")[0], size) != size:
                    raise _FaultError(f"{value} has {size} bytes")
            before = self.work.before.get(name)
            if before is not None and self.ran[before] <= self.ran[name]:
                raise _FaultError(f"{name} runs before {before}")

    def end(self, key: int, d: Descriptor) -> None:
        reads, writes = self.operands(d)
        is_in_place = isinstance(d.action, Execute)
        self.memory.leave([s for s in reads if not (is_in_place and s in writes)], writes)
        read = self.under_way.pop(key)
        match d.action:
            case Copy(_, destination):
                self.memory.write(destination, read[0])
            case Execute(k):
                name = self.chain.segments[k].name
                if len(writes) != len(self.work.writes[name]):
                    raise _FaultError(f"{name} writes {len(writes)} results")
                values = self.of_replay(key, self.work.writes[name])
                for slot, value in zip(writes, values, strict=True):
                    size = self.chain.slots[slot].bytes
                    if self.work.sizes.get(value.partition("@")[0], size) != size:
                        raise _FaultError(f"{value} is written into another size")
                    self.memory.write(slot, value)
                self.ran[name] += 1
            case _:
                pass

    def finish(self, replays: int) -> None:
        for name in self.work.reads:
            if self.ran[name] != replays:
                raise _FaultError(f"{name} ran {self.ran[name]} times in {replays} replays")
        last = {of: f"{of}@{replays * count}" for of, count in self.work.changes.items()}
        for name, value in (*zip(self.work.taken, self.work.taken, strict=True), *last.items()):
            slots = [k for k, slot in enumerate(self.chain.slots) if slot.name == name]
            if [self.memory.read(k) for k in slots] != [value]:
                raise _FaultError(f"{value} is not where it is looked for")


def _play_chain(plan: ClusterPlan, work: _Expected) -> None:
    """Two replays in chain order, in which releases mean something: what is released is gone."""
    player = _Player(plan, work)
    for key in range(2 * len(plan.chain.descriptors)):
        d = plan.chain.descriptors[key % len(plan.chain.descriptors)]
        player.begin(key, d)
        player.end(key, d)
        if isinstance(d.action, Release):
            player.memory.write(d.action.slot, "")
    player.finish(2)


def _play_order(plan: ClusterPlan, work: _Expected, pick: random.Random) -> None:
    """Two replays in a drawn order: something begins, or something that is under way ends."""
    n, player = len(plan.chain.descriptors), _Player(plan, work)
    queues: defaultdict[int, list[int]] = defaultdict(list)
    for key in range(2 * n):
        queues[plan.chain.descriptors[key % n].stream].append(key)
    waiting = {stream: iter(keys) for stream, keys in queues.items()}
    head = {stream: next(keys) for stream, keys in waiting.items()}
    running: dict[int, int] = {}
    done: set[int] = set()
    # Some streams are quick in one order, and slow in another.
    weight = {stream: 4.0 ** pick.uniform(-3, 3) for stream in queues}

    def may_begin(stream: int) -> bool:
        if stream in running or stream not in head:
            return False
        key = head[stream]
        awaited = (
            w.index + (key // n - w.is_previous) * n for w in plan.chain.descriptors[key % n].waits
        )
        return all(other < 0 or other in done for other in awaited)

    while head or running:
        choices = [(s, True) for s in head if may_begin(s)] + [(s, False) for s in running]
        if not choices:
            raise _FaultError("everything waits")
        weights = [weight[s] * (4 if begins else 1) for s, begins in choices]
        ((stream, begins),) = pick.choices(choices, weights)
        if begins:
            key = head.pop(stream)
            player.begin(key, plan.chain.descriptors[key % n])
            running[stream] = key
        else:
            key = running.pop(stream)
            player.end(key, plan.chain.descriptors[key % n])
            done.add(key)
            follows = next(waiting[stream], None)
            if follows is not None:
                head[stream] = follows
    player.finish(2)


def _play_clock(plan: ClusterPlan, work: _Expected) -> None:
    player = _Player(plan, work)
    moments: list[tuple[int, int, int, Descriptor]] = []
    busy: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
    for timed in plan.timed:
        begin, end = timed.span.begin, timed.span.end
        if begin < 0 or end < begin:
            raise _FaultError("time runs backwards")
        # What takes no time ends before anything else begins.
        moments.append((begin, 1, timed.at, timed.descriptor))
        moments.append((end, 2 if end == begin else 0, timed.at, timed.descriptor))
        busy[timed.descriptor.stream].append((begin, end))
        if isinstance(timed.descriptor.action, Execute):
            name = plan.chain.segments[timed.descriptor.action.segment].name
            if end - begin < math.floor(work.seconds.get(name, 0) * 1e9):
                raise _FaultError(f"{name} takes {end - begin} ns")
    for spans in busy.values():
        # In the order in which the stream has them.
        if any(begin < end for (_, end), (begin, _) in pairwise(spans)):
            raise _FaultError("a stream does two things at once, or in another order")
    for _, kind, at, d in _by_moment(moments):
        if kind == 1:
            player.begin(at, d)
        else:
            player.end(at, d)
    player.finish(1)
    _follow_waits(plan)


def _by_moment(
    moments: list[tuple[int, int, int, Descriptor]],
) -> Iterator[tuple[int, int, int, Descriptor]]:
    """In time; at one moment ends come first, then what begins, each followed by its end if it
    takes no time, in chain order."""
    return iter(sorted(moments, key=lambda of: (of[0], of[1] > 0, of[2] if of[1] else 0, of[1])))


def _follow_waits(plan: ClusterPlan) -> None:
    ends = {t.at: t.span.end for t in plan.timed}
    begins = {t.at: t.span.begin for t in plan.timed}
    ended: dict[int, int] = {}
    on_stream: dict[int, int] = {}
    for k, d in enumerate(plan.chain.descriptors):
        ready = max(
            [on_stream.get(d.stream, 0), *(ended[w.index] for w in d.waits if not w.is_previous)]
        )
        if k in begins and begins[k] < ready:
            raise _FaultError(f"descriptor {k} begins before what it waits for has ended")
        ended[k] = on_stream[d.stream] = ends.get(k, ready)


def _load_wires(plan: ClusterPlan) -> None:
    wires = {w.name: w for w in plan.cluster.wires}
    follows: defaultdict[str, set[str]] = defaultdict(set)
    for w in plan.cluster.wires:
        follows[str(w.source)].add(w.name)
    loads: defaultdict[str, list[tuple[int, int, Fraction]]] = defaultdict(list)
    sent = _Expected(plan.work.to_dict()).sent
    counts = {node.name: node.count for node in plan.cluster.nodes}
    for timed in plan.timed:
        begin, end, names, rate = timed.span
        latency = Fraction(0)
        if isinstance(timed.descriptor.action, Copy):
            spaces = [
                plan.chain.spaces[plan.chain.slots[slot].space]
                for slot in (timed.descriptor.action.source, timed.descriptor.action.destination)
            ]
            at, to = (space.tier for space in spaces)
            size = timed.descriptor.action.bytes
            latency = sum((Fraction(wires[n].latency_s) for n in names if n in wires), Fraction(0))
        else:
            assert isinstance(timed.descriptor.action, Execute)
            name = plan.chain.segments[timed.descriptor.action.segment].name
            if name not in sent:
                if names or rate:
                    raise _FaultError(f"{name} takes wires")
                continue
            node = plan.chain.streams[timed.descriptor.stream].name.split(" ")[0]
            at = to = str(plan.cluster.node(node).memory)
            size = sent[name] * counts[node]
        if not names:
            raise _FaultError("bytes move over no wire")
        for k, wire in enumerate(names):
            if wire not in follows[at] or (k and "." in at):
                raise _FaultError(f"{wire} does not begin at {at}, or bytes rest there")
            at = str(wires[wire].destination)
            share = rate / Fraction(wires[wire].bytes_per_s)
            loads[wires[wire].medium].append((begin, end, share))
        if at != to:
            raise _FaultError(f"bytes for {to} come to {at}")
        taken = Fraction(end - begin, 10**9) - latency
        # A clock of whole nanoseconds.
        if size > rate * (taken + Fraction(1, 10**9)):
            raise _FaultError(f"{size} bytes do not fit through in {float(taken)} s")
    for medium, spans in loads.items():
        edges = sorted({edge for begin, end, _ in spans for edge in (begin, end)})
        changes: defaultdict[int, Fraction] = defaultdict(Fraction)
        for begin, end, share in spans:
            changes[begin] += share
            changes[end] -= share
        level = Fraction(0)
        for edge in edges:
            level += changes[edge]
            if level > 1:
                raise _FaultError(f"{medium} carries more than it can at {edge} ns")


def _fill_memories(plan: ClusterPlan) -> None:
    held: Counter[str] = Counter()
    for space in plan.chain.spaces:
        held[space.tier] += space.bytes
    has = {
        f"{n.name}.{t.name}": n.count * t.capacity_bytes
        for n in plan.cluster.nodes
        for t in n.tiers
    }
    for tier, size in held.items():
        if size > has.get(tier, 0):
            raise _FaultError(f"{tier} holds {size} bytes of {has.get(tier, 0)}")
    spans = defaultdict[int, list[tuple[int, int, str]]](list)
    for slot in plan.chain.slots:
        if slot.offset + slot.bytes > plan.chain.spaces[slot.space].bytes:
            raise _FaultError(f"{slot.name} lies beyond its space")
        spans[slot.space].append((slot.offset, slot.offset + slot.bytes, slot.name))
    for node in plan.cluster.chips:
        need = max((p.memory_bytes for p in plan.work.programs if p.node == node.name), default=0)
        name = f"{node.name} programs"
        own = [(k, of) for k, all_ in spans.items() for of in all_ if of[2] == name]
        if need and sum(end - begin for _, (begin, end, _) in own) < need * node.count:
            raise _FaultError(f"{node.name} has no room for its programs")
        for k, (begin, end, _) in own:
            if plan.chain.spaces[k].tier != str(node.memory):
                raise _FaultError(f"{name} is elsewhere")
            for a, b, other in spans[k]:
                if other != name and a < end and begin < b:
                    raise _FaultError(f"{other} lies in {name}")
