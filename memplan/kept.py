"""Plans that were made before: whether one still holds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice, zip_longest

from hlo_passes.plan import Plan
from memplan.lowering import Lowering

# So many arguments that changed are named.
_NAMED = 5


class PlanWarning(UserWarning):
    """A plan that was made before does not hold any more, and another one was made."""


def changes(plan: Plan, lowering: Lowering) -> tuple[str, ...]:
    """What is not as it was when the plan was made, a clause each; nothing where the plan holds,
    as far as can be seen before XLA schedules the program."""
    made, target = plan.preparation, lowering.target
    if made is None:
        return ("it was made of a module, not of a function",)
    found: list[str] = []
    if plan.machine != target.machine.name:
        found.append(f"made for {plan.machine}, here is {target.machine.name}")
    count = lowering.program.arguments.device_count
    if made.devices != count:
        found.append(f"made for {made.devices} devices, here are {count}")
    found += islice(_arguments(made.signature, lowering.signature), _NAMED)
    asked = lowering.function.options.objective
    if asked is not None and made.objective != str(asked):
        found.append(f"made for objective={made.objective}, asked for is {asked}")
    if lowering.jitter is not None and made.jitter != lowering.jitter.variation:
        here = lowering.jitter.variation
        found.append(f"made for jitter={made.jitter}, asked for is {here}")
    if not found and made.fingerprint != lowering.fingerprint:
        found.append(f"its program is not that of {made.function} when the plan was made")
        found += other_versions(made.versions, target.versions)
    return tuple(found)


def other_versions(made: Mapping[str, str], here: Mapping[str, str]) -> tuple[str, ...]:
    """The packages that are not as they were, a clause each."""
    return tuple(
        f"made with {package} {made.get(package, 'absent')}, here is {here.get(package, 'none')}"
        for package in sorted(made.keys() | here.keys())
        if made.get(package) != here.get(package)
    )


def _arguments(made: Sequence[str], here: Sequence[str]) -> Iterator[str]:
    for before, now in zip_longest(made, here):
        if before != now:
            yield f"argument made for {before or 'none'}, here is {now or 'none'}"
