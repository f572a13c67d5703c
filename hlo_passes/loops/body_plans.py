"""Plans of loops' bodies, made as the entry's is.

    budget   │ arguments, outputs │ weights that stay │ temporaries around the loop │ its body │

Between two iterations nothing of the body is there, so one that brings weights from the host takes
at least what its readers need at once. With that in each such body the module is posed, and what
the budget leaves beside the loop's tick is room for its weights to stay in, and to come early;
where an iteration waits for them, its temporaries make room, too, if that is faster.

Where no edit of the entry makes up for what a body takes, its own temporaries are evicted and
computed again, too, within an iteration. It gets what the budget leaves beside its loop when the
entry does all that it can; then less, for packing; and at last the least that it can take. So do
the loops in it. What fits as XLA scheduled it stays as it is, and so do what a loop carries, and a
body that moves slices of stacks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property

import numpy as np

from hlo_passes import verify
from hlo_passes.analysis.call_graph import call_graph
from hlo_passes.edits import choice as edit_choice
from hlo_passes.errors import MemoryBudgetError, PlanMismatchError
from hlo_passes.fitting import assembling, fit, solution
from hlo_passes.hardware.machine import Machine
from hlo_passes.ir import Module
from hlo_passes.loops.bodies import Body, fetching_bodies, loop_bodies, with_body
from hlo_passes.loops.host_transfers import host_transfers, nests
from hlo_passes.normalize.barriers import remove_barriers
from hlo_passes.normalize.sink import sink_weight_work
from hlo_passes.placing import placement
from hlo_passes.placing.prices import Prices
from hlo_passes.placing.problem import Problem, pose
from hlo_passes.plan import BodyPlan, Edits
from hlo_passes.rewrite import edits
from hlo_passes.rewrite import transfers as rewrite

# What of the room beside a loop its body gets, one after the other, until the module fits.
_SHARES = (1.0, 0.75, 0.5, 0.25)

# What of the budget is left free, one after the other, when bodies are edited, and when weights are
# chosen to stay for them: how bodies and entry are packed together is known only then.
_LEFT_FREE = (0, 1 / 32, 1 / 8, 1 / 4)
_WITHHELD = (0, 1 / 64, 1 / 16, 1 / 8, 1 / 4, 1 / 2)

# How often the least that a body takes is raised by what its packing takes more; by what part of it
# where that is not known.
_LEAST_ROUNDS = 8
_PACKING = 32

type _Planned = tuple[Module, tuple[BodyPlan, ...]]


class _NoPlanError(Exception):
    """A body does not come within the bytes that it may take."""


class Bodies:
    """The bodies of a module.

    Attributes:
      streamed: the module with the least on the device in each body that brings weights; the
        others are as they were.
    """

    def __init__(
        self,
        module: Module,
        machine: Machine,
        slots: int | None,
        pose_module: Callable[[Module], Problem],
        prices: Prices,
    ) -> None:
        """
        Args:
          module: scheduled; the other transfers of its loops have their places.
          pose_module: poses it, with its bodies written.
          prices: what plans of bodies are charged for beside seconds.

        Raises:
          MemoryBudgetError: when `slots` rule out every plan of a body that brings weights.
        """
        self._module = module
        self._machine = machine
        self._slots = slots
        self._pose_module = pose_module
        self._prices = prices
        self._fetching = fetching_bodies(module)
        self._least: dict[int, int] = {}
        self._posed: dict[int, Problem] = {}
        self._whole: dict[int, Problem] = {}
        self.streamed, self._streamed_plans = self._planned({}, {})

    @property
    def lowest(self) -> Module:
        """The module with the least that is known, whatever it takes, in each body that holds more
        than the entry has to hold outside of loops; `streamed` where there is none."""
        return self._lowest[0]

    @cached_property
    def _lowest(self) -> _Planned:
        posed = self._pose_module(self.streamed)
        ticks = {tick for _, tick in self._loops(posed)}
        least = edit_choice.least_load(posed) if ticks else np.zeros(0, np.int64)
        outside = max((int(least[t]) for t in range(least.size) if t not in ticks), default=0)
        targets = dict.fromkeys(self._targets(posed, outside))
        try:
            return self._planned({}, targets) if targets else (self.streamed, self._streamed_plans)
        except _NoPlanError:
            return self.streamed, self._streamed_plans

    def fetching_within(self, budget: int) -> Iterator[tuple[Problem, tuple[BodyPlan, ...]]]:
        """Yields the module posed, with the bodies that bring weights planned for a budget of all,
        and their plans, the last time with the least in each; nothing where the entry cannot make
        up for what a body takes."""
        posed = self._pose_module(self.streamed)
        if self._targets(posed, _capacity(posed, budget)):
            return
        slack = self._slacks(budget, posed)
        for share in _SHARES if any(slack.values()) else ():
            module, plans = self._planned({n: int(share * room) for n, room in slack.items()}, {})
            yield self._pose_module(module), plans
        yield posed, self._streamed_plans

    def edited_within(self, budget: int) -> Iterator[tuple[Problem, tuple[BodyPlan, ...]]]:
        """Yields the module posed, with what is evicted and computed again in its bodies for a
        budget of all, and the plans of bodies; the last time with the least in each."""
        posed = self._pose_module(self.streamed)
        slack = self._slacks(budget, posed)
        for free in _LEFT_FREE:
            targets = self._targets(posed, int(_capacity(posed, budget) * (1 - free)))
            try:
                found = self._planned(slack, targets) if targets else None
            except _NoPlanError:
                break
            if found is not None:
                yield self._pose_module(found[0]), found[1]
        module, plans = self._lowest
        if module is not self.streamed:
            yield self._pose_module(module), plans

    def budget_error(self, budget: int) -> MemoryBudgetError:
        """Says what stands where most is needed with the least in each body; where that is a loop,
        in its body."""
        bodies = {b.caller.name: b for b in loop_bodies(self._module)}

        def posed(loop: str) -> Problem | None:
            return self._as_it_is(bodies[loop]) if loop in bodies else None

        return fit.budget_error(self._pose_module(self.lowest), budget, self._slots, posed)

    def bounding(self, kept: Problem, plans: tuple[BodyPlan, ...]) -> Problem:
        """Returns a posed module with loops in which something is edited as if nothing were, and
        their bodies took no bytes: another plan might do without the one or the other."""
        loops = {b.loop for b in plans if b.plan.edits}
        loops = {self._outermost(loop) for loop in loops}
        if not loops:
            return kept
        posed = self._pose_module(self.streamed)
        seconds = {i.name: s for i, s in zip(posed.ticks.instructions, posed.costs, strict=True)}
        costs, load = kept.costs.copy(), kept.load.copy()
        for tick, i in enumerate(kept.ticks.instructions):
            if i.name in loops:
                costs[tick] = min(costs[tick], seconds[i.name])
                load[tick] -= inside(kept, tick)
        return replace(
            kept,
            costs=costs,
            clock=np.concatenate([[0.0], np.cumsum(costs)]),
            load=load,
            link_floor_s=min(kept.link_floor_s, posed.link_floor_s),
        )

    def _outermost(self, loop: str) -> str:
        """The instruction of the entry that runs a loop."""
        callers = call_graph(self._module).callers
        (i,) = (b.caller for b in loop_bodies(self._module) if b.caller.name == loop)
        while i.computation_id != self._module.entry.id:
            i = callers[i.computation_id][0]
        return i.name

    def stay(self, budget: int) -> Iterator[tuple[frozenset[int], int]]:
        """Yields choices of arguments that stay, by number, each with the most bytes that a body
        takes beyond its least when the others are fetched, which may be less than none. What the
        bodies are to share gets less from one to the next, and is nothing at last. Nothing is
        yielded where the entry cannot make up for what a body takes with nothing of it edited.
        """
        posed = self._pose_module(self.streamed)
        if self._targets(posed, _capacity(posed, budget)):
            return
        for withheld in _WITHHELD if self._fetching else ():
            yield self._stay(int(budget * (1 - withheld)), posed)
        yield frozenset(), 0

    def _planned(self, rooms: Mapping[int, int], targets: Mapping[int, int | None]) -> _Planned:
        """Returns the module with its bodies planned, and their plans.

        Args:
          rooms: id of a computation to the bytes that it may take beyond the least with which it
            streams its weights.
          targets: id of a computation that is edited to the bytes that it may take; None for the
            least.

        Raises:
          _NoPlanError: when one does not come within its target.
        """
        module, plans = self._module, list[BodyPlan]()
        fetching = {b.computation.id for b in self._fetching}
        for number in [b.computation.id for b in loop_bodies(module)]:
            if number in targets:
                found = self._edited(_of(module, number), targets[number])
            elif number in fetching:
                found = self._streaming(_of(module, number), rooms.get(number))
            else:
                continue
            if found is not None:
                plans.append(found)
                module = write_body(module, found)
        return module, tuple(plans)

    def _targets(self, posed: Problem, capacity: int) -> dict[int, int]:
        """The most bytes that each body may take for which the computation around its loop cannot
        make up, whatever is done to that, by the body's id; bodies inside of it are among them.

        Args:
          posed: the entry, or a body.
          capacity: the bytes that its temporaries may take.
        """
        found: dict[int, int] = {}
        loops = [
            (number, tick) for number, tick in self._loops(posed) if posed.load[tick] > capacity
        ]
        least = edit_choice.least_load(posed) if loops else np.zeros(0, np.int64)
        for number, tick in loops:
            if least[tick] <= capacity:
                continue
            found[number] = capacity - (int(least[tick]) - inside(posed, tick))
            whole = self._as_it_is(_of(self._module, number))
            found |= self._targets(whole, found[number] - whole.arena.tables)
        return found

    def _loops(self, posed: Problem) -> list[tuple[int, int]]:
        """The loops of a posed entry or body whose own bodies may be edited: ids of those, and the
        ticks of the loops."""
        moving = host_transfers(self._module, self._machine)
        ticks = {i.id: tick for tick, i in enumerate(posed.ticks.instructions)}
        return [
            (b.computation.id, ticks[b.caller.id])
            for b in loop_bodies(self._module)
            if b.caller.id in ticks and b.computation.id not in moving
        ]

    def _slacks(self, budget: int, posed: Problem) -> dict[int, int]:
        return {b.computation.id: self._slack(b, budget, posed) for b in self._fetching}

    def _slack(self, body: Body, budget: int, posed: Problem) -> int:
        """What the budget leaves beside a loop when its body takes the least."""
        tick = posed.ticks.tick_of[body.computation.root.id]
        taken = posed.fixed_bytes + posed.arena.base + int(posed.load[tick])
        return max(0, budget - taken)

    def _stay(self, budget: int, posed: Problem) -> tuple[frozenset[int], int]:
        """First for the body that takes longest."""
        sizes = {p.parameter_number: p.shape.byte_size for p in posed.module.entry.parameters}
        stay, beyond = frozenset[int](), list[int]()
        for body in sorted(self._fetching, key=self._seconds, reverse=True):
            least = self._least[body.computation.id]
            problem = self._posed[body.computation.id]
            free = tuple(
                m for m in problem.movables if body.arguments.get(m.parameter, -1) not in stay
            )
            slack = self._slack(body, budget - sum(sizes[n] for n in stay), posed)
            choice = placement.choose_placement(
                replace(problem, movables=free), problem.fixed_bytes + least + slack, self._slots
            )
            if choice is None:
                continue
            number = {m.buffer: m.parameter for m in free}
            chosen = (number[name] for name in choice.stay)
            stay |= {body.arguments[k] for k in chosen if k in body.arguments}
            beyond.append(choice.packing.total - least)
        return stay, max(beyond, default=0)

    def _seconds(self, body: Body) -> float:
        problem = self._posed[body.computation.id]
        moved = sum(m.size for m in problem.movables) / problem.link.bytes_per_s
        runs = nests(self._module)[body.computation.id].executions
        return runs * max(float(problem.clock[-1]), moved)

    def _as_it_is(self, body: Body) -> Problem:
        """A body of the module, posed with nothing of it planned."""
        number = body.computation.id
        if number not in self._whole:
            self._whole[number] = self._pose(body)
        return self._whole[number]

    def _pose(self, body: Body) -> Problem:
        return pose(_prepared(body), self._machine, (), prices=self._prices)

    def _streaming(self, body: Body, room: int | None) -> BodyPlan:
        """With the bytes beyond the least in which its weights are streamed; for None, with nothing
        but weights moved."""
        number = body.computation.id
        posed = self._pose(body)
        is_first = number not in self._least
        if is_first:
            least, _ = placement.least_budget(posed, self._slots)
        else:
            least = posed.fixed_bytes + self._least[number]
        budget = least + (room or 0)
        for _ in range(_LEAST_ROUNDS):
            choice = solution.placed(posed, budget, self._slots)
            if isinstance(choice, placement.Choice):
                break
            budget += max(choice, posed.arena.alignment)
        else:
            raise fit.budget_error(posed, budget, self._slots)
        if is_first:
            self._posed[number], self._least[number] = posed, budget - posed.fixed_bytes
        streamed = solution.Solution(posed, choice, Edits(), posed)
        if room is not None and number not in host_transfers(self._module, self._machine):
            streamed = fit.fit(posed, budget, self._slots) or streamed
        return self._assembled(body, streamed, budget)

    def _edited(self, body: Body, target: int | None) -> BodyPlan | None:
        """None where nothing has to be done to it."""
        posed = self._pose(body)
        if target is None:
            budget = fit.least_budget(posed, self._slots)[0]
        else:
            budget = posed.fixed_bytes + target
        found = fit.fit(posed, budget, self._slots)
        for _ in range(_LEAST_ROUNDS if target is None else 0):
            if found is not None:
                break
            budget += max((budget - posed.fixed_bytes) // _PACKING, posed.arena.alignment)
            found = fit.fit(posed, budget, self._slots)
        if found is None:
            raise _NoPlanError
        is_left = not found.edited and not found.posed.ticks.transfers
        return None if is_left else self._assembled(body, found, budget)

    def _assembled(self, body: Body, found: solution.Solution, budget: int) -> BodyPlan:
        plan = assembling.assemble(found, budget, {}, ())
        verify.verify_plan(found.posed.module, plan, self._machine)
        return BodyPlan(
            body.computation.name,
            body.caller.name,
            nests(self._module)[body.computation.id].executions,
            tuple(sorted(body.arguments.items())),
            plan,
        )


def labelled(module: Module, planned: BodyPlan, labels: Mapping[str, str]) -> BodyPlan:
    """Returns the plan of a body with the user's names for what it brings.

    Args:
      labels: HLO names of the parameters of the module's entry to those.
    """
    names = {p.parameter_number: p.name for p in module.entry.parameters}
    of_number = {n: labels[names[k]] for n, k in planned.arguments if names[k] in labels}
    placements = planned.plan.placements
    known = {p.buffer: of_number[p.parameter] for p in placements if p.parameter in of_number}
    return replace(planned, plan=replace(planned.plan, labels=known))


def write_bodies(module: Module, plans: tuple[BodyPlan, ...]) -> Module:
    """Returns `module` with its bodies as planned.

    Raises:
      PlanMismatchError: when a plan was made for another module.
      VerificationError: when the transfers do not stand where a plan has them.
    """
    for plan in plans:
        module = write_body(module, plan)
    return module


def write_body(module: Module, planned: BodyPlan) -> Module:
    named = {b.computation.name: b for b in loop_bodies(module)}
    if planned.computation not in named:
        raise PlanMismatchError(module.name, f"a loop's body %{planned.computation}", "none")
    body = named[planned.computation]
    edited = edits.apply(_prepared(body), planned.plan.edits)
    rewritten = rewrite.rewrite(edited, planned.plan, "copies")
    verify.verify_schedule(edited, planned.plan, rewritten)
    return with_body(module, body, rewritten)


def _prepared(body: Body) -> Module:
    """The body as a program, in the form in which it is planned."""
    return sink_weight_work(remove_barriers(body.program))


def _of(module: Module, number: int) -> Body:
    return next(b for b in loop_bodies(module) if b.computation.id == number)


def inside(posed: Problem, tick: int) -> int:
    """The bytes that what runs at a tick has for itself."""
    return sum(
        r.size
        for r in posed.arena.temporaries
        if r.kind == "workspace" and r.live_range.start <= tick < r.live_range.end
    )


def _capacity(posed: Problem, budget: int) -> int:
    """The bytes that temporaries may take within a budget of all."""
    return budget - posed.fixed_bytes - posed.arena.tables
