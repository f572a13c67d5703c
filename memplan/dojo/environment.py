"""An environment in which memory schedulers are learned, with the interface of Gymnasium.

An episode is a program, a machine and a budget; everything is on the device at first, and one
decision follows the other until enough of it is not::

    order ─► an argument is streamed, a gap of a temporary evicted or computed again, ... ─► finish

When each transfer starts, the planner's own scheduler says, and whether the arena can be packed,
its own prediction (`EditState.fitted`): so an action decides what the planner's search decides,
and its price is that of the planner. Nothing is compiled, and no module is written: a step takes
as long as its features, the end of an episode a few milliseconds.

What an action is, its row of the observation says (`FEATURES`); which are legal, the mask.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hlo_passes.edits.state import EditState
from hlo_passes.errors import MemplanError
from hlo_passes.hardware.machine import Machine
from hlo_passes.placing import placement
from hlo_passes.placing.problem import disjoint
from hlo_passes.plan import LiveRange
from memplan.dojo.scenarios import Gaps, Ordered, Program, Situation, Situations
from memplan.dojo.spaces import Box, Discrete

INFEASIBLE = -10.0
"""The reward of an episode that ends above its budget; one that takes ten times as long as with
everything on the device is no better."""

FINISH, GIVE_BACK, ORDERS = 0, 1, 2
"""The first actions: to end the episode; to keep after all what the budget has room for, the
dearest first; and the first of those that choose an order of the compute, XLA's."""

MOST_ORDERS = 3
"""XLA's, one with what is gathered late, one in which bytes are freed early."""

FEATURES = (
    "finish",
    "give back",
    "order",
    "stream",
    "evict",
    "recompute",
    "fits",
    "size",
    "covers",
    "relieves",
    "price",
    "stalls",
    "idle",
    "worth",
    "over",
    "crowded",
    "moving",
    "away",
)
"""What a row of an observation says of its action, each from −10 to 10.

The first six are 1 of an action of that kind; ``fits`` where the episode could end within its
budget. Of what is moved or made again: ``size`` in parts of the budget; ``covers`` the part of the
ticks with too many bytes at which it would be away; ``relieves`` its bytes there in parts of all
that are too many. In parts of the step with everything on the device: ``price``, the seconds of
links, or of compute, that it takes; ``stalls``, what of them does not fit into the time for which
it is idle; and that time, ``idle``. ``worth`` is the logarithm to base 10 of what it relieves for
its price; ``away`` is 1 where it is on the host already. Of the episode: ``over`` the most bytes
that are too many, in parts of the budget; ``crowded`` the part of the ticks at which that is so;
``moving`` the seconds of links so far, in parts of the step."""

_KIND = {name: k for k, name in enumerate(FEATURES)}
_LIMIT = 10.0


class IllegalActionError(MemplanError, ValueError):
    """An action that the mask of the observation before rules out."""

    def __init__(self, action: int, meaning: str) -> None:
        super().__init__(
            f"action {action} ({meaning}): expected one of those that info['action_mask'] allows"
        )


class ScenarioError(MemplanError, ValueError):
    """An episode that was asked for, and that an environment does not have."""


class Meaning(NamedTuple):
    """What an action stands for.

    Attributes:
      kind: one of the first six features.
      name: of the argument or the temporary, or the number of the order.
      start: the access with which a gap starts; -1 where there is none.
    """

    kind: str
    name: str = ""
    start: int = -1

    def __str__(self) -> str:
        behind = f" from tick {self.start}" if self.start >= 0 else ""
        return f"{self.kind} {self.name}".strip() + behind


@dataclass(frozen=True)
class Episode:
    """What an episode is about.

    Attributes:
      program, machine: names.
      variant: 0 of the machine as it is; else the number of one drawn near it.
      budget: bytes of the device.
      base_s: seconds of a step with everything there.
    """

    program: str
    machine: str
    variant: int
    budget: int
    base_s: float


class SchedulingEnv:
    """Episodes of some programs on some machines.

    Args:
      pairs: of programs and machines of their platform.
      variants: how many machines are drawn near each; episodes have those, or where there are none
        the machine itself.
      shares: between which budgets are drawn, see `Situation.budget`.
      candidates: arguments and gaps among which an agent chooses, the largest of a program.
      limit: actions of an episode; then it is truncated, and rewarded as it is.
      situations: posed already, by another environment of the same pairs.

    Attributes:
      action_space: `FINISH`, `GIVE_BACK`, `MOST_ORDERS` orders, then to move each candidate, then
        to compute each again.
      observation_space: float32[actions, features].

    Raises:
      ScenarioError: without a pair, or with shares or numbers that make no episode.
    """

    metadata: Mapping[str, Any] = {"render_modes": []}

    def __init__(
        self,
        pairs: Sequence[tuple[Program, Machine]],
        *,
        variants: int = 0,
        shares: tuple[float, float] = (0.3, 0.9),
        candidates: int = 512,
        limit: int = 512,
        situations: Situations | None = None,
    ) -> None:
        if not pairs:
            raise ScenarioError("no program has a machine of its platform: expected a pair of them")
        if not 0 <= shares[0] <= shares[1]:
            raise ScenarioError(f"shares {shares}: expected two numbers, 0 <= low <= high")
        if min(candidates, limit) < 1 or variants < 0:
            raise ScenarioError(
                f"candidates {candidates}, limit {limit}, variants {variants}: expected at least "
                "1, 1 and 0"
            )
        self._situations = situations or Situations(pairs)
        self._variants, self._shares, self._limit = variants, shares, limit
        self._candidates = candidates
        actions = ORDERS + MOST_ORDERS + 2 * candidates
        self.action_space = Discrete(actions)
        self.observation_space = Box(-_LIMIT, _LIMIT, (actions, len(FEATURES)))
        self.np_random = np.random.default_rng()

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[npt.NDArray[np.float32], dict[str, Any]]:
        """Begins an episode.

        Args:
          seed: of this episode and those behind it.
          options: what is not drawn: ``"program"`` and ``"machine"`` by name, ``"variant"``,
            ``"share"`` or ``"budget"`` in bytes.

        Raises:
          ScenarioError: for an option that no episode of this environment has.
        """
        if seed is not None:
            self.np_random = np.random.default_rng(seed)
        asked = dict(options or {})
        if unknown := asked.keys() - {"program", "machine", "variant", "share", "budget"}:
            raise ScenarioError(
                f"options {sorted(unknown)}: expected program, machine, variant, share or budget"
            )
        pairs = [
            k
            for k, (program, machine) in enumerate(self._situations.pairs)
            if asked.get("program", program.name) == program.name
            and asked.get("machine", machine.name) == machine.name
        ]
        if not pairs:
            known = ", ".join(f"{p.name} on {m.name}" for p, m in self._situations.pairs)
            raise ScenarioError(f"options {asked}: there is no such episode; expected {known}")
        pair = pairs[int(self.np_random.integers(len(pairs)))]
        variant = int(self.np_random.integers(1, self._variants + 1)) if self._variants else 0
        share = float(self.np_random.uniform(*self._shares))
        variant = int(asked.get("variant", variant))
        self.situation = self._situations.situation(pair, variant)
        budget = int(asked.get("budget", self.situation.budget(float(asked.get("share", share)))))
        program, machine = self._situations.pairs[pair]
        self.episode = Episode(program.name, machine.name, variant, budget, self.situation.base_s)
        self._board = Board(self.situation, budget, self._candidates)
        self._actions, self._is_over = 0, False
        return self._observed()

    def step(
        self, action: int
    ) -> tuple[npt.NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        """Takes an action.

        Returns:
          The observation; the reward, which is 0 until the end and then minus the seconds of the
          step over those with everything on the device, not below `INFEASIBLE`; whether the episode
          has ended; whether it was cut off; and ``info``: the mask, bool[actions]; at the end
          ``"step_s"``, in seconds, infinity above the budget.

        Raises:
          IllegalActionError: for an action that the mask rules out. Whether something can be
            computed again is known when it is tried: where it cannot, nothing changes, and it is
            ruled out from then on, until something else is taken.
          ScenarioError: when the episode is over, or none has begun.
        """
        if getattr(self, "_is_over", True):
            raise ScenarioError("the episode is over: expected a call of reset()")
        action = int(action)
        if not (self.action_space.contains(action) and self._mask[action]):
            raise IllegalActionError(action, str(self.meaning(action)))
        self._actions += 1
        terminated = action == FINISH
        if not terminated:
            self._board.act(action)
        truncated = not terminated and self._actions >= self._limit
        self._is_over = terminated or truncated
        reward = 0.0
        observation, info = self._observed()
        if self._is_over:
            step_s = self._board.step_s
            info["step_s"] = step_s
            reward = max(INFEASIBLE, -step_s / self.situation.base_s)
        return observation, reward, terminated, truncated, info

    def close(self) -> None:
        """There is nothing to be closed."""

    def meaning(self, action: int) -> Meaning:
        """What an action stands for in the episode that is under way."""
        return self._board.meaning(action)

    @property
    def board(self) -> Board:
        """The state of the episode, for agents that look further than observations."""
        return self._board

    def _observed(self) -> tuple[npt.NDArray[np.float32], dict[str, Any]]:
        observation, self._mask = self._board.observed()
        return observation, {"action_mask": self._mask.copy()}


class Board:
    """What has been decided in an episode, and what may be.

    Args:
      budget: bytes of the device.
      candidates: rows for arguments and gaps.

    Attributes:
      order: number of the order of the compute.
      stay: arguments that are on the device.
      taken: gaps in the order in which they were taken: the temporary, the access with which it
        starts, and whether it is computed again.
      aim: bytes of the load that are looked for: those of the arena, and where what came below was
        predicted to be packed above them, half of that less.
    """

    def __init__(self, situation: Situation, budget: int, candidates: int) -> None:
        self.situation, self.budget, self._rows = situation, budget, candidates
        self.stay = frozenset(m.buffer for m in situation.movables)
        # The arguments that are moved with the most bytes first.
        self._weights = sorted(situation.movables, key=lambda m: -m.size)[:candidates]
        self.order = 0
        self._choose_order(0)

    @property
    def ordered(self) -> Ordered:
        """The program in the order that was chosen."""
        return self.situation.orders[self.order]

    @property
    def capacity(self) -> int:
        """Bytes of the arena above its base."""
        return placement.capacity_beside(self.ordered.posed, self.budget, self.stay)

    @property
    def step_s(self) -> float:
        """Seconds of a step as it is; infinity where that is not within the budget."""
        return self._step_s

    @property
    def selection(self) -> EditState | None:
        """The gaps that are taken; None where none were yet."""
        return self._state

    def action_of(self, kind: str, name: str, start: int = -1) -> int | None:
        """The action with this meaning; None where the candidates have none."""
        wanted = Meaning(kind, name, start)
        of = {self.meaning(a): a for a in range(ORDERS + len(self.situation.orders))}
        if wanted in of:
            return of[wanted]
        first = ORDERS + MOST_ORDERS + (self._rows if kind == "recompute" else 0)
        if start < 0:
            names = [m.buffer for m in self._weights]
            return first + names.index(name) if name in names else None
        names = self._names.get((name, start))
        return None if names is None else first + names

    def meaning(self, action: int) -> Meaning:
        """What an action stands for."""
        if action < ORDERS + MOST_ORDERS:
            fixed = (Meaning("finish"), Meaning("give back"))
            return fixed[action] if action < ORDERS else Meaning("order", str(action - ORDERS))
        again, row = divmod(action - ORDERS - MOST_ORDERS, self._rows)
        if row < len(self._weights):
            return Meaning("stream", self._weights[row].buffer)
        gap = row - len(self._weights)
        kind = "recompute" if again else "evict"
        if gap >= self._count:
            return Meaning(kind, "nothing")
        name = self.ordered.temporaries[self._gaps.temporary[gap]].name
        return Meaning(kind, name, int(self._gaps.start[gap]))

    def act(self, action: int) -> None:
        """Takes a legal action other than `FINISH`."""
        if action == GIVE_BACK:
            self._renew()
            self._started().give_back(self.capacity)
            self.taken = [
                (n, start, taken.action == "recompute")
                for n, of in self._started().by_temporary.items()
                for start, taken in of.items()
                if (n, start) in self._gaps.number  # What others need comes with them.
            ]
            self._look_at_all()
        elif action < ORDERS + MOST_ORDERS:
            self._choose_order(action - ORDERS)
            return
        else:
            again, row = divmod(action - ORDERS - MOST_ORDERS, self._rows)
            if row < len(self._weights):
                self._stream(self._weights[row].buffer)
            else:
                self._take(row - len(self._weights), bool(again))
        self._settle()

    def observed(self) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.bool_]]:
        """The observation and the mask."""
        actions = ORDERS + MOST_ORDERS + 2 * self._rows
        seen = np.zeros((actions, len(FEATURES)), np.float32)
        mask = np.zeros(actions, np.bool_)
        mask[FINISH] = True
        mask[GIVE_BACK] = self._state is not None and bool(self._is_taken.any())
        is_new = self._state is None and len(self.stay) == len(self.situation.movables)
        orders = len(self.situation.orders)
        mask[ORDERS : ORDERS + orders] = is_new
        mask[ORDERS + self.order] = False
        seen[FINISH, _KIND["finish"]] = seen[GIVE_BACK, _KIND["give back"]] = 1
        seen[ORDERS : ORDERS + MOST_ORDERS, _KIND["order"]] = 1
        over = np.maximum(self._load() - self.aim, 0)
        before = np.concatenate([[0], np.cumsum(over > 0)])
        short = int(over.sum())
        base_s = self.situation.base_s
        self._see_weights(seen, mask, over, before)
        self._see_gaps(seen, mask, before, short)
        seen[:, _KIND["fits"]] = self._step_s < math.inf
        seen[:, _KIND["over"]] = over.max(initial=0) / self.budget
        seen[:, _KIND["crowded"]] = before[-1] / max(1, len(over))
        seen[:, _KIND["moving"]] = self._moving_s / base_s
        return np.clip(seen, -_LIMIT, _LIMIT, out=seen), mask

    def _see_weights(
        self,
        seen: npt.NDArray[np.float32],
        mask: npt.NDArray[np.bool_],
        over: npt.NDArray[np.int64],
        before: npt.NDArray[np.int64],
    ) -> None:
        if not self._weights:
            return
        first, posed = ORDERS + MOST_ORDERS, self.ordered.posed
        rows = seen[first : first + len(self._weights)]
        is_there = np.array([m.buffer in self.stay for m in self._weights])
        mask[first : first + len(self._weights)] = is_there
        reads = [self._reads[m.buffer] for m in self._weights]
        read = np.array([sum(before[r.end] - before[r.start] for r in of) for of in reads])
        size = np.array([m.size for m in self._weights], np.float64)
        times = np.array([len(of) for of in reads])
        into = posed.link
        price_s = times * (into.latency_s + size / into.bytes_per_s)
        idle_s = posed.clock[[of[0].start for of in reads]]
        covers = before[-1] - read
        self._fill(rows, "stream", size, covers, price_s, idle_s, before, int(over.sum()))

    def _see_gaps(
        self,
        seen: npt.NDArray[np.float32],
        mask: npt.NDArray[np.bool_],
        before: npt.NDArray[np.int64],
        short: int,
    ) -> None:
        gaps, posed, count = self._gaps, self.ordered.posed, self._count
        first = ORDERS + MOST_ORDERS + len(self._weights)
        covers = np.where(
            self._is_taken, 0, before[self._ends[:count]] - before[gaps.start[:count] + 1]
        )
        is_open = ~self._is_taken & (self._ends > gaps.start[:count] + 1)
        size = gaps.size[:count].astype(np.float64)
        into, out = posed.link, posed.link_out
        needed_s = into.latency_s + size / into.bytes_per_s
        needed_s += np.where(self._is_away, 0, out.latency_s + size / out.bytes_per_s)
        begin = np.where(self._is_away, gaps.start[:count], gaps.written[:count]) + 1
        idle_s = posed.clock[self._ends] - posed.clock[begin]
        rows = seen[first : first + count]
        self._fill(rows, "evict", size, covers, needed_s, idle_s, before, short)
        rows[:, _KIND["away"]] = self._is_away
        mask[first : first + count] = is_open & posed.can_evict
        again = first + self._rows
        maker_s = gaps.maker_s[:count]
        can_run = np.isfinite(maker_s)
        rows = seen[again : again + count]
        price_s = np.where(can_run, maker_s, _LIMIT * self.situation.base_s)
        self._fill(rows, "recompute", size, covers, price_s, np.zeros(count), before, short)
        rows[:, _KIND["away"]] = self._is_away
        mask[again : again + count] = is_open & can_run & ~self._is_refused

    def _fill(
        self,
        rows: npt.NDArray[np.float32],
        kind: str,
        size: npt.NDArray[np.float64],
        covers: npt.NDArray[np.int64],
        price_s: npt.NDArray[np.float64],
        idle_s: npt.NDArray[np.float64],
        before: npt.NDArray[np.int64],
        short: int,
    ) -> None:
        base_s = self.situation.base_s
        relieves = size * covers / max(1, short)
        price = price_s / base_s
        stalls = np.maximum(0, price_s - idle_s) / base_s
        # Prices of nothing would be worth anything: a millionth of the step is.
        worth = np.log10(np.maximum(relieves, 1e-9) / np.maximum(price, 1e-6))
        rows[:, _KIND[kind]] = 1
        columns = ("size", "covers", "relieves", "price", "stalls", "idle", "worth")
        values = (
            size / self.budget,
            covers / max(1, int(before[-1])),
            relieves,
            price,
            stalls,
            idle_s / base_s,
            worth,
        )
        for name, value in zip(columns, values, strict=True):
            rows[:, _KIND[name]] = value

    def _choose_order(self, order: int) -> None:
        self.order = order
        self._gaps: Gaps = self.ordered.gaps
        self._count = min(len(self._gaps.size), self._rows - len(self._weights))
        names = [t.name for t in self.ordered.temporaries]
        self._names = {
            (names[n], start): len(self._weights) + k
            for k, (n, start) in enumerate(list(self._gaps.number)[: self._count])
        }
        self._own = {n: len(self.ordered.temporaries[n].accesses) for n in self._gaps.of_temporary}
        self._reads = {m.buffer: list(disjoint(m.reads)) for m in self.ordered.posed.movables}
        self._state: EditState | None = None
        self._is_stale = False
        self.taken: list[tuple[int, int, bool]] = []
        self._ends = self._gaps.end[: self._count].copy()
        self._is_taken = np.zeros(self._count, np.bool_)
        self._is_away = np.zeros(self._count, np.bool_)
        self._is_refused = np.zeros(self._count, np.bool_)
        self._moving_s = 0.0
        self._streamed_load = self.ordered.posed.arena.load.copy()
        for m in self.ordered.posed.movables:
            if m.store is not None:
                for read in self._reads[m.buffer]:
                    self._streamed_load[read.start : read.end] += m.size
        self.aim = self.capacity
        self._settle()

    def _stream(self, buffer: str) -> None:
        self.stay -= {buffer}
        size = next(m.size for m in self._weights if m.buffer == buffer)
        reads: list[LiveRange] = self._reads[buffer]
        for load in (self._streamed_load, *([] if self._state is None else [self._state.load])):
            for read in reads:
                load[read.start : read.end] += size
        link = self.ordered.posed.link
        self._moving_s += len(reads) * (link.latency_s + size / link.bytes_per_s)
        self.aim += size
        self._is_stale = self._state is not None

    def _load(self) -> npt.NDArray[np.int64]:
        return self._streamed_load if self._state is None else self._state.load

    def _started(self) -> EditState:
        """The state in which gaps are taken."""
        if self._state is None:
            self._state = self.ordered.work(self.stay).state(self._streamed_load)
        return self._state

    def _renew(self) -> None:
        """Takes the same gaps again where the arguments that stay are others by now: what brings
        those is part of all that a state counts with."""
        if not self._is_stale:
            return
        self._is_stale = False
        self._state = self.ordered.work(self.stay).state(self._streamed_load)
        for n, start, again in self.taken:
            if start in self._state.by_temporary.get(n, {}):
                continue
            if again:
                self._state.recompute(n, start, self.aim, math.inf)
            else:
                self._state.evict(n, start)
        self._look_at_all()

    def _take(self, gap: int, again: bool) -> None:
        state, gaps = self._started(), self._gaps
        n, start = int(gaps.temporary[gap]), int(gaps.start[gap])
        if not again:
            link, out, size = self.ordered.posed.link, self.ordered.posed.link_out, gaps.size[gap]
            self._moving_s += link.latency_s + size / link.bytes_per_s
            if not self._is_away[gap]:
                self._moving_s += out.latency_s + size / out.bytes_per_s
            state.evict(n, start)
            self._is_taken[gap] = True
            of_it = gaps.of_temporary[n]
            self._is_away[of_it[of_it < self._count]] = True
        elif state.recompute(n, start, self.aim, math.inf):
            self._look_at_all()
        else:
            self._is_refused[gap] = True
            return
        self.taken.append((n, start, again))
        self._is_refused[:] = False

    def _look_at_all(self) -> None:
        """Reads from the state what is taken, and where gaps end, after what may have changed
        others than the one that was asked for."""
        state, gaps = self._started(), self._gaps
        self._is_taken[:] = self._is_away[:] = False
        self._ends[:] = gaps.end[: self._count]
        for n, taken in state.by_temporary.items():
            of_it = gaps.of_temporary.get(n)
            if of_it is None:
                continue
            of_it = of_it[of_it < self._count]
            for start in taken:
                self._is_taken[of_it[gaps.start[of_it] == start]] = True
            self._is_away[of_it] = any(t.action == "evict" for t in taken.values())
        for n in gaps.of_temporary:
            self._see_ends(n)

    def _see_ends(self, n: int) -> None:
        accesses = self._started().accesses(n)
        if len(accesses) == self._own[n]:
            return  # Those of the program are never fewer: they are these.
        of_it = self._gaps.of_temporary[n]
        of_it = of_it[of_it < self._count]
        behind = np.searchsorted(accesses, self._gaps.start[of_it], side="right")
        self._ends[of_it] = np.asarray(accesses)[behind]

    def _settle(self) -> None:
        """Looks whether what is decided is within the budget, and what a step takes then."""
        self._step_s = math.inf
        if self._load().max(initial=0) > self.aim:
            return
        self._renew()
        if (most := int(self._load().max(initial=0))) > self.aim:
            return
        state = self._state or self.ordered.work(self.stay).state(self._streamed_load)
        found = state.fitted(self.capacity, None)
        if found.packed <= self.capacity:
            self._step_s = found.cost_s
        else:
            self.aim = most - max(1, (found.packed - self.capacity) // 2)
