"""Plans of the loops' bodies that bring whole weights, made as the entry's is.

    budget   │ arguments, outputs │ weights that stay │ temporaries around the loop │ its body │

Between two iterations nothing of the body is there, so it takes at least what its readers need
at once (`_Least`). With that in each body the module is posed, and what the budget leaves beside
the loop's tick is room for its weights to stay in, and to come early.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from hlo_passes import verify
from hlo_passes.fitting import assembling
from hlo_passes.fitting import solution as fitted
from hlo_passes.hardware.machine import Machine
from hlo_passes.ir import Module
from hlo_passes.loops.bodies import Body, fetching_bodies, with_body
from hlo_passes.loops.host_transfers import nests
from hlo_passes.normalize.sink import sink_weight_work
from hlo_passes.placing import placement
from hlo_passes.placing.problem import Problem, pose
from hlo_passes.plan import BodyPlan, Edits
from hlo_passes.rewrite import transfers as rewrite

# What of the room beside a loop its body gets, one after the other, until the module fits.
_SHARES = (1.0, 0.75, 0.5, 0.25)

# What of the budget is left free, one after the other, when weights are chosen to stay for bodies:
# how bodies and entry are packed together is known only then.
_WITHHELD = (0, 1 / 64, 1 / 16, 1 / 8, 1 / 4, 1 / 2)

# How often the least that a body takes is raised by what its packing takes more.
_LEAST_ROUNDS = 8


class Bodies:
    """The bodies of a module.

    Attributes:
      least: the module with the least on the device in each of them.
    """

    def __init__(
        self,
        module: Module,
        machine: Machine,
        slots: int | None,
        labels: Mapping[str, str] | None = None,
    ) -> None:
        """
        Args:
          module: scheduled; the other transfers of its loops have their places.
          labels: HLO names of the entry's parameters to the user's names.
        """
        self._module = module
        self._machine = machine
        self._slots = slots
        self._labels = labels or {}
        self._least: dict[int, int] = {}
        self._posed: dict[int, Problem] = {}
        self.least, self._least_plans = self._planned({})

    def _planned(self, rooms: Mapping[int, int]) -> tuple[Module, tuple[BodyPlan, ...]]:
        """Returns the module with its bodies planned, and their plans.

        Args:
          rooms: id of a computation to the bytes that it may take beyond the least.
        """
        module, plans = self._module, list[BodyPlan]()
        for number in [b.computation.id for b in fetching_bodies(module)]:
            body = _of(module, number)
            made = self._plan(body, rooms.get(number, 0))
            plans.append(made)
            module = write_body(module, made)
        return module, tuple(plans)

    def within(self, budget: int, posed: Problem) -> Iterator[tuple[Module, tuple[BodyPlan, ...]]]:
        """Yields the module with its bodies planned for a budget of all, the last time with the
        least in each.

        Args:
          posed: the module with the least in each.
        """
        slack = {b.computation.id: self._slack(b, budget, posed) for b in self._bodies}
        for share in _SHARES if any(slack.values()) else ():
            yield self._planned({number: int(share * room) for number, room in slack.items()})
        yield self.least, self._least_plans

    def stay(self, budget: int, posed: Problem) -> Iterator[tuple[frozenset[int], int]]:
        """Yields choices of arguments that stay, by number, each with the most bytes that a body
        takes beyond its least when the others are fetched, which may be less than none. What the
        bodies are to share gets less from one to the next, and is nothing at last.

        Args:
          posed: the module with the least in each.
        """
        if self._bodies:
            for withheld in _WITHHELD:
                yield self._stay(int(budget * (1 - withheld)), posed)
        yield frozenset(), 0

    def _stay(self, budget: int, posed: Problem) -> tuple[frozenset[int], int]:
        """First for the body that takes longest."""
        sizes = {p.parameter_number: p.shape.byte_size for p in posed.module.entry.parameters}
        stay, beyond = frozenset[int](), list[int]()
        for body in sorted(self._bodies, key=self._seconds, reverse=True):
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

    @property
    def _bodies(self) -> tuple[Body, ...]:
        return fetching_bodies(self._module)

    def _slack(self, body: Body, budget: int, posed: Problem) -> int:
        """What the budget leaves beside a loop when its body takes the least."""
        tick = posed.ticks.tick_of[body.computation.root.id]
        taken = posed.fixed_bytes + posed.arena.base + int(posed.load[tick])
        return max(0, budget - taken)

    def _plan(self, body: Body, room: int) -> BodyPlan:
        number = body.computation.id
        posed = pose(sink_weight_work(body.program), self._machine, ())
        self._posed[number] = posed
        if number not in self._least:
            self._least[number] = placement.least_budget(posed, self._slots)[0] - posed.fixed_bytes
        budget = posed.fixed_bytes + self._least[number] + room
        for _ in range(_LEAST_ROUNDS):
            choice = fitted.placed(posed, budget, self._slots)
            if isinstance(choice, placement.Choice):
                break
            more = max(int(choice.max(initial=0)), posed.arena.alignment)
            budget += more
            self._least[number] += more
        else:
            raise AssertionError(f"nothing fits in %{body.computation.name}")
        found = fitted.Solution(posed, choice, Edits(), posed)
        names = {p.parameter_number: p.name for p in self._module.entry.parameters}
        known = {k: names[n] for k, n in body.arguments.items()}
        labels = {
            p.name: self._labels[known[p.parameter_number]]
            for p in posed.module.entry.parameters
            if known.get(p.parameter_number) in self._labels
        }
        plan = assembling.assemble(found, budget, labels, ())
        verify.verify_plan(posed.module, plan, self._machine)
        return BodyPlan(
            body.computation.name,
            body.caller.name,
            nests(self._module)[number].executions,
            tuple(sorted(body.arguments.items())),
            plan,
        )


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
    body = next(b for b in fetching_bodies(module) if b.computation.name == planned.computation)
    program = sink_weight_work(body.program)
    rewritten = rewrite.rewrite(program, planned.plan, custom_calls=False)
    verify.verify_schedule(program, planned.plan, rewritten)
    return with_body(module, body, rewritten)


def _of(module: Module, number: int) -> Body:
    return next(b for b in fetching_bodies(module) if b.computation.id == number)
