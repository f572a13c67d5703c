"""What a chain does, told apart from the checker: on painted bytes, and pair by pair."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from hlo_passes.chains.chain import Chain, Copy, Execute, Release, SpaceKind

type Byte = tuple[int, int]


def _slot_bytes(chain: Chain, slot: int, offset: int = 0, size: int | None = None) -> list[Byte]:
    s = chain.slots[slot]
    return [(s.space, s.offset + offset + k) for k in range(s.bytes if size is None else size)]


def reads_and_writes(chain: Chain, index: int) -> tuple[list[list[Byte]], list[list[Byte]]]:
    match chain.descriptors[index].action:
        case Copy(source, destination, size, start, end):
            return (
                [_slot_bytes(chain, source, start, size)],
                [_slot_bytes(chain, destination, end, size)],
            )
        case Execute(segment):
            of = chain.segments[segment]
            return (
                [_slot_bytes(chain, s) for s in of.arguments],
                [_slot_bytes(chain, s) for s in of.results],
            )
        case _:
            return [], []


# --- painted bytes ---------------------------------------------------------------------------


def outcome(chain: Chain, order: Sequence[int]) -> object:
    """What each descriptor reads, and what is left in the end, if keys run in that order.

    A key is ``replay * n + index``. What a segment writes depends on what it reads and on when.
    """
    paint: dict[Byte, int] = {}
    seen: dict[int, tuple[int, ...]] = {}
    for key in order:
        index = key % len(chain.descriptors)
        reads, writes = reads_and_writes(chain, index)
        taken = tuple(paint.get(b, -1 - hash(b)) for read in reads for b in read)
        seen[key] = taken
        if isinstance(chain.descriptors[index].action, Copy):
            paint.update(zip(writes[0], taken, strict=True))
        else:
            for k, written in enumerate(writes):
                paint.update((b, hash((key, k, *b, *taken))) for b in written)
    return seen, paint


def chain_order(chain: Chain, replays: int) -> list[int]:
    return list(range(replays * len(chain.descriptors)))


def interleaving(chain: Chain, replays: int, rng: random.Random) -> list[int]:
    """An order that streams and waits allow, in which some streams are much faster than others."""
    n = len(chain.descriptors)
    queues: list[list[int]] = [[] for _ in chain.streams]
    for key in range(replays * n):
        queues[chain.descriptors[key % n].stream].append(key)
    speeds = [10 ** rng.uniform(0, 3) for _ in queues]
    done: set[int] = set()
    order: list[int] = []

    def is_ready(key: int) -> bool:
        waits = chain.descriptors[key % n].waits
        awaited = [w.index + (key // n - w.is_previous) * n for w in waits]
        return all(a < 0 or a in done for a in awaited)

    while len(order) < replays * n:
        ready = [k for k, queue in enumerate(queues) if queue and is_ready(queue[0])]
        assert ready, "nothing can run any more"
        k = rng.choices(ready, [speeds[k] for k in ready])[0]
        order.append(queues[k].pop(0))
        done.add(order[-1])
    return order


# --- pair by pair ----------------------------------------------------------------------------


def is_right(chain: Chain) -> bool:
    """What the checker is to say, byte by byte and pair by pair, over three replays."""
    return all(_is_good_alone(chain, k) for k in range(len(chain.descriptors))) and (
        not any(_races(chain)) and not _reads_nothing(chain)
    )


def _is_good_alone(chain: Chain, index: int) -> bool:
    reads, writes = reads_and_writes(chain, index)
    if any(not chain.spaces[b[0]].writable for written in writes for b in written):
        return False
    every = [b for written in writes for b in written]
    is_copy = isinstance(chain.descriptors[index].action, Copy)
    return len(every) == len(set(every)) and all(
        (not is_copy and read == written) or not set(read) & set(written)
        for read in reads
        for written in writes
    )


def _races(chain: Chain) -> Iterator[tuple[int, int]]:
    n = len(chain.descriptors)
    before: list[set[int]] = []
    last: dict[int, int] = {}
    for key in range(3 * n):
        d = chain.descriptors[key % n]
        direct = [w.index + (key // n - w.is_previous) * n for w in d.waits]
        direct = [a for a in (*direct, last.get(d.stream, -1)) if a >= 0]
        before.append({*direct, *(b for a in direct for b in before[a])})
        last[d.stream] = key
    sets = [
        tuple({b for of in part for b in of} for part in reads_and_writes(chain, k))
        for k in range(n)
    ]
    for b in range(3 * n):
        for a in set(range(b)) - before[b]:
            (reads, writes), (then_reads, then_writes) = sets[a % n], sets[b % n]
            if writes & (then_reads | then_writes) or reads & then_writes:
                yield a, b


def _reads_nothing(chain: Chain) -> bool:
    dead = {
        (k, b)
        for k, space in enumerate(chain.spaces)
        if space.kind == SpaceKind.ARENA
        for b in range(space.bytes)
    }
    for key in range(3 * len(chain.descriptors)):
        index = key % len(chain.descriptors)
        if index == 0:
            dead = {b for b in dead if chain.spaces[b[0]].kind != SpaceKind.BOUND}
        reads, writes = reads_and_writes(chain, index)
        if any(b in dead for read in reads for b in read):
            return True
        dead -= {b for written in writes for b in written}
        action = chain.descriptors[index].action
        if isinstance(action, Release):
            dead |= set(_slot_bytes(chain, action.slot))
    return False
