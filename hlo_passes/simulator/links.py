"""When transfers and collectives move: the queues of the links, alone or sharing memories.

A link moves its queue first in first out, with `engines` transfers at a time; the latency of a
queued transfer passes while the one before it moves. `Links` has each at full speed::

    begin = max(issue + latency, an engine is free)      end = begin + size / bandwidth

`SharingLinks` has memories in common. All that moves asks each memory that it reads or writes
for as many bytes a second as it would move alone, and so does the kernel that runs; what is
less than they ask for is divided evenly, and who asks for less than its part leaves the rest to
the others::

    kernel      u ≤ 1 of HBM   ├────────┼──────────────┼─────┤      slower while w moves
    host→hbm                        ├───w──────────────►            as fast as its link, mostly
                                ▲ who is active changes: all speeds are new

    memory         what asks for it
    device         kernels, copies to and from the host and the chip's own, collectives (what is
                   sent is read, what comes is written)
    host, CXL      transfers that end there, in both directions; twice what passes through

The host's memory is divided first, then the device's; what that takes from a transfer is not
given to others at the host.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Sequence

from hlo_passes.errors import NotOnMachineError
from hlo_passes.hardware.machine import Interconnect, Machine
from hlo_passes.simulator.cost import stream_bytes_per_s
from hlo_passes.simulator.events import Direction, Exchange, Start, Work, queue_of
from hlo_passes.simulator.numbers import Flag, Numbers, Seconds

_Queue = Direction | str


class Moving:
    """A transfer or a collective that has been issued.

    Attributes:
      start: what it is.
      route: the tiers that it is between; of a collective device memory and the interconnect.
      begin, end: on the clock; infinity as long as that is not known.
    """

    __slots__ = ("asks", "begin", "end", "left", "ready", "route", "start")

    def __init__(self, start: Start | Exchange, route: Direction) -> None:
        self.start = start
        self.route = route
        self.begin: Seconds = math.inf
        self.end: Seconds = math.inf
        # Of `SharingLinks`: when it may begin, seconds of it that are left at full speed, and
        # bytes a second of each memory meanwhile.
        self.ready: Seconds = 0.0
        self.left: Seconds = 0.0
        self.asks: Sequence[float] = ()


class Links:
    """Each transfer at its link's speed.

    Args:
      machine: whose links they are.
      numbers: what the clock counts in.
    """

    def __init__(self, machine: Machine, numbers: Numbers) -> None:
        self._machine = machine
        self._numbers = numbers
        # When each engine is free.
        self._free: dict[_Queue, list[Seconds]] = {
            queue: [numbers.zero()] * count for queue, count in self._engines().items()
        }
        self._last = numbers.zero()

    def _engines(self) -> dict[_Queue, int]:
        engines: dict[_Queue, int] = {}
        for link in self._machine.links:
            engines[queue_of(link)] = max(engines.get(queue_of(link), 0), link.engines)
        if self._machine.interconnect is not None:
            engines[self._machine.interconnect.name] = 1
        return engines

    @property
    def _interconnect(self) -> Interconnect:
        found = self._machine.interconnect
        if found is None:
            known = [f"{link.source}->{link.destination}" for link in self._machine.links]
            raise NotOnMachineError(self._machine.name, "link", "interconnect", known)
        return found

    def issue(self, start: Start | Exchange, now: Seconds) -> Moving:
        """Puts a transfer or a collective at the end of its queue.

        Raises:
          NotOnMachineError: when it has no link to take, or no interconnect.
        """
        if isinstance(start, Exchange):
            wires = self._interconnect
            route = self._machine.device_memory.name, wires.name
            return self._queued(Moving(start, route), wires.name, now, start.seconds)
        link = self._machine.link(start.source, start.destination)
        moving = Moving(start, (start.source, start.destination))
        ready = now + link.latency_s
        return self._queued(moving, queue_of(link), ready, start.size / link.bytes_per_s)

    def _queued(self, moving: Moving, queue: _Queue, ready: Seconds, seconds: float) -> Moving:
        numbers, free = self._numbers, self._free[queue]
        moving.begin = numbers.larger(ready, free[0])
        moving.end = carried = moving.begin + seconds * numbers.varied(1)
        self._last = numbers.larger(self._last, carried)
        # In each draw, engines stand in the order in which they are free.
        for n in range(1, len(free)):
            free[n - 1] = numbers.smaller(free[n], carried)
            carried = numbers.larger(free[n], carried)
        free[-1] = carried
        return moving

    def compute(self, now: Seconds, seconds: Seconds, work: Work, alone_s: float) -> Seconds:
        """Returns when a kernel that begins now ends.

        Args:
          seconds: that it takes alone; `alone_s` before they were varied.
        """
        return now + seconds

    def pass_until(self, now: Seconds, until: Seconds) -> None:
        """Lets the time pass in which nothing is computed."""

    def end_of(self, moving: Moving, now: Seconds) -> Seconds:
        """Returns when a transfer has ended, if nothing is computed before that."""
        return moving.end

    def end_of_all(self, now: Seconds) -> Seconds:
        """Returns when all have ended, if nothing more is computed."""
        return self._last


class SharingLinks(Links):
    """Transfers, collectives and kernels that share memories."""

    def __init__(self, machine: Machine, numbers: Numbers) -> None:
        super().__init__(machine, numbers)
        device = machine.device_memory.name
        shared = {
            tier.name: tier.bytes_per_s
            for tier in machine.tiers
            if tier.bytes_per_s is not None and tier.name != device
        }
        # The device's last: see the module.
        self._device_bytes_per_s = stream_bytes_per_s(machine)
        self._capacities = {**shared, device: self._device_bytes_per_s}
        self._counts = self._engines()
        self._waiting: dict[_Queue, deque[Moving]] = defaultdict(deque)
        self._often: dict[Direction, Sequence[int]] = {}
        # What moves, in which draws, and what it asks of each memory, all together; when the next
        # one may begin, behind its latency. Known until one is issued, ends or begins.
        self._active: list[tuple[Moving, Flag]] = []
        self._asked = [0.0] * len(self._capacities)
        self._wakes: Seconds = math.inf
        # Queues all of whose engines are taken, or will be.
        self._taken: set[_Queue] = set()
        # What a kernel can ask device memory for, and all are at full speed.
        self._room = self._device_bytes_per_s
        self._is_known = True
        # What is left of them was true at a moment, and since then they move at full speed; no one
        # ends or begins before another.
        self._since: Seconds = numbers.zero()
        self._until: Seconds = math.inf

    def _queued(self, moving: Moving, queue: _Queue, ready: Seconds, seconds: float) -> Moving:
        moving.ready, moving.left = ready, seconds * self._numbers.varied(1)
        rate = moving.start.size / seconds if seconds else 0.0
        moving.asks = [rate * often for often in self._accesses(moving)]
        self._waiting[queue].append(moving)
        # Behind others it changes nothing.
        if queue not in self._taken:
            self._is_known = False
        return moving

    def _accesses(self, moving: Moving) -> Sequence[int]:
        """How often each of its bytes is read from each memory or written to it."""
        if moving.route not in self._often:
            is_exchange = isinstance(moving.start, Exchange)
            device = self._machine.device_memory.name
            through = device if is_exchange else self._machine.link(*moving.route).through
            ends = () if is_exchange else moving.route
            self._often[moving.route] = [
                ends.count(memory) + 2 * (memory == through) for memory in self._capacities
            ]
        return self._often[moving.route]

    def compute(self, now: Seconds, seconds: Seconds, work: Work, alone_s: float) -> Seconds:
        asked = min(self._device_bytes_per_s, work.device_bytes / alone_s) if alone_s else 0.0
        end = now + seconds
        if self._is_known and asked <= self._room and self._numbers.all(end < self._until):
            return end
        return self._run(now, left=seconds, asked=asked)

    def pass_until(self, now: Seconds, until: Seconds) -> None:
        if not (self._is_known and self._room >= 0 and self._numbers.all(until < self._until)):
            self._run(now, until=until)

    def end_of(self, moving: Moving, now: Seconds) -> Seconds:
        self._run(now, awaited=moving)
        return moving.end

    def end_of_all(self, now: Seconds) -> Seconds:
        for moving in [moving for queue in self._waiting.values() for moving in queue]:
            now = self._numbers.larger(now, self.end_of(moving, now))
        return now

    def _run(
        self,
        now: Seconds,
        *,
        left: Seconds | None = None,
        asked: float = 0.0,
        until: Seconds = math.inf,
        awaited: Moving | None = None,
    ) -> Seconds:
        """Lets each draw's time pass until a kernel with so many seconds left at full speed has
        ended, a moment has come, or a transfer has ended; returns when that is."""
        numbers = self._numbers
        self._catch_up(now)
        while True:
            going: Flag = now < until
            if left is not None:
                going = going & (left > 0)
            if awaited is not None:
                going = going & (awaited.end == math.inf)
            if not numbers.any(going):
                self._settle(now)
                return now
            if not self._is_known or numbers.any(self._wakes <= now):
                self._look(now)
            speeds, own = self._speeds(asked)
            # Until the first of them ends, or another one begins.
            passed = numbers.smaller(until, self._wakes) - now
            if left is not None:
                passed = numbers.smaller(passed, left / own)
            needed: list[Seconds] = []
            for (moving, moves), speed in zip(self._active, speeds, strict=True):
                seconds = numbers.where(moves, moving.left / speed, math.inf)
                passed = numbers.smaller(passed, seconds)
                needed.append(seconds)
            passed = numbers.where(going, passed, 0.0)
            for (moving, moves), speed, seconds in zip(self._active, speeds, needed, strict=True):
                ends = seconds <= passed
                rest = numbers.where(ends, 0.0, moving.left - passed * speed)
                moving.left = numbers.where(moves, rest, moving.left)
                if numbers.any(ends):
                    moving.end = numbers.where(ends, now + passed, moving.end)
                    self._is_known = False
            if left is not None:
                left = numbers.where(left / own <= passed, 0.0, left - passed * own)
            now = now + passed

    def _catch_up(self, now: Seconds) -> None:
        passed = now - self._since
        if self._numbers.any(passed > 0):
            for moving, moves in self._active:
                rest = self._numbers.larger(0.0, moving.left - passed)
                moving.left = self._numbers.where(moves, rest, moving.left)

    def _settle(self, now: Seconds) -> None:
        self._since, self._until = now, self._wakes
        for moving, moves in self._active:
            end = self._numbers.where(moves, now + moving.left, math.inf)
            self._until = self._numbers.smaller(self._until, end)

    def _look(self, now: Seconds) -> None:
        """Sees what moves now."""
        numbers = self._numbers
        self._active.clear()
        self._taken.clear()
        self._wakes = math.inf
        for name, queue in self._waiting.items():
            while queue and numbers.all(queue[0].end < math.inf):
                queue.popleft()
            engines = self._counts[name]
            ahead: Seconds = 0
            for moving in queue:
                is_open = moving.end == math.inf
                has_engine = is_open & (ahead < engines)
                moves = has_engine & (moving.ready <= now)
                if numbers.any(moves):
                    begins = moves & (moving.begin == math.inf)
                    moving.begin = numbers.where(begins, now, moving.begin)
                    self._active.append((moving, moves))
                if numbers.any(moving.ready > now):
                    latent = has_engine & (moving.ready > now)
                    wakes = numbers.where(latent, moving.ready, math.inf)
                    self._wakes = numbers.smaller(self._wakes, wakes)
                ahead = ahead + is_open
                if numbers.all(ahead >= engines):
                    self._taken.add(name)
                    break
        self._asked = [0.0] * len(self._asked)
        for moving, _ in self._active:
            for place, asks in enumerate(moving.asks):
                self._asked[place] += asks
        rooms = [c - a for c, a in zip(self._capacities.values(), self._asked, strict=True)]
        self._room = rooms[-1] if min(rooms) >= 0 else -1.0
        self._is_known = True

    def _speeds(self, asked: float) -> tuple[list[Seconds], Seconds]:
        """The speeds of what moves, and of a kernel that asks device memory for so many bytes a
        second; 1 is full speed."""
        numbers, active = self._numbers, self._active
        speeds: list[Seconds] = [1.0] * len(active)
        own: Seconds = 1.0
        device = self._machine.device_memory.name
        for place, (memory, capacity) in enumerate(self._capacities.items()):
            kernel = asked if memory == device else 0.0
            if kernel + self._asked[place] <= capacity:
                continue
            sharing = [n for n, (moving, _) in enumerate(active) if moving.asks[place]]
            demands = [
                numbers.where(active[n][1], active[n][0].asks[place] * speeds[n], 0.0)
                for n in sharing
            ]
            level = numbers.level(capacity, [*demands, kernel])
            for n in sharing:
                speeds[n] = numbers.smaller(speeds[n], level / active[n][0].asks[place])
            if kernel:
                own = numbers.smaller(1.0, level / kernel)
        return speeds, own
