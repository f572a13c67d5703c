"""Agents side by side: the plans that their episodes end with, and what a step takes in each."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hlo_passes.units import format_bytes, format_seconds
from memplan.dojo.agents import Agent
from memplan.dojo.environment import INFEASIBLE, SchedulingEnv
from memplan.dojo.plans import plan_of
from memplan.report.tables import Column, Table


@dataclass(frozen=True)
class Played:
    """An episode that an agent has played.

    Attributes:
      agent: its name.
      program, machine, variant, budget: of the episode; the last in bytes.
      base_s: seconds of a step with everything on the device.
      reward: the environment's.
      step_s: seconds of a step of the plan that it ended with, by the simulator; None where XLA
        would not pack that within the budget.
      actions: how many it took.
    """

    agent: str
    program: str
    machine: str
    variant: int
    budget: int
    base_s: float
    reward: float
    step_s: float | None
    actions: int

    @property
    def cost(self) -> float:
        """The step in parts of that with everything there; without a plan `-INFEASIBLE`, and no
        plan counts for more."""
        if self.step_s is None:
            return -INFEASIBLE
        return min(-INFEASIBLE, self.step_s / self.base_s)


def played(
    env: SchedulingEnv,
    name: str,
    agent: Agent,
    seed: int,
    options: Mapping[str, Any] | None = None,
) -> Played:
    """Has an agent play an episode, and writes the plan that it ends with.

    Args:
      seed: of the episode, the same one for all agents.
      options: as `SchedulingEnv.reset` takes them.
    """
    observation, info = env.reset(seed=seed, options=options)
    agent.begin(env, seed)
    actions, reward, is_over = 0, 0.0, False
    while not is_over:
        action = agent.act(observation, info["action_mask"])
        observation, reward, terminated, truncated, info = env.step(action)
        is_over = terminated or truncated
        actions += 1
    plan = plan_of(env.board)
    step_s = None if plan is None else plan.prediction.step_time_s
    e = env.episode
    return Played(
        name, e.program, e.machine, e.variant, e.budget, e.base_s, reward, step_s, actions
    )


@dataclass(frozen=True)
class Standing:
    """How an agent did.

    Attributes:
      episodes, kept: how many, and in how many its plan was within the budget.
      slowdown: the geometric mean of `Played.cost`.
      best: in how many episodes no other agent's plan was faster, by more than a thousandth.
    """

    agent: str
    episodes: int
    kept: int
    slowdown: float
    best: int


def standings(rows: Sequence[Played]) -> list[Standing]:
    """Returns the agents, the least slowdown first."""
    least: dict[tuple[str, str, int, int], float] = {}
    for row in rows:
        of = row.program, row.machine, row.variant, row.budget
        least[of] = min(row.cost, least.get(of, math.inf))
    found: list[Standing] = []
    for agent in dict.fromkeys(row.agent for row in rows):
        own = [row for row in rows if row.agent == agent]
        mean = math.exp(sum(math.log(row.cost) for row in own) / len(own))
        best = sum(
            row.step_s is not None
            and row.cost <= 1.001 * least[row.program, row.machine, row.variant, row.budget]
            for row in own
        )
        kept = sum(row.step_s is not None for row in own)
        found.append(Standing(agent, len(own), kept, mean, best))
    return sorted(found, key=lambda s: s.slowdown)


def leaderboard_tables(rows: Sequence[Played]) -> Iterator[Table]:
    """Yields the agents, and their episodes."""
    headings = ("episodes", "within the budget", "slowdown", "fastest plan")
    yield Table(
        "agents, predicted",
        (Column("agent"), *(Column(heading, right=True) for heading in headings)),
        tuple(
            (s.agent, str(s.episodes), str(s.kept), f"{s.slowdown:.3f}", str(s.best))
            for s in standings(rows)
        ),
        "slowdown: the step of an agent's plan over that with everything on the device, the "
        f"geometric mean; {-INFEASIBLE:g} without a plan",
    )
    agents = list(dict.fromkeys(row.agent for row in rows))
    of: dict[tuple[str, str, int, int], dict[str, Played]] = {}
    for row in rows:
        of.setdefault((row.program, row.machine, row.variant, row.budget), {})[row.agent] = row
    yield Table(
        "episodes, predicted",
        (
            Column("program"),
            Column("machine"),
            Column("budget", right=True),
            Column("all there", right=True),
            *(Column(agent, right=True) for agent in agents),
        ),
        tuple(
            (
                program,
                machine + (f"~{variant}" if variant else ""),
                format_bytes(budget),
                format_seconds(next(iter(found.values())).base_s),
                *(_step(found.get(agent)) for agent in agents),
            )
            for (program, machine, variant, budget), found in of.items()
        ),
    )


def _step(row: Played | None) -> str:
    return "–" if row is None or row.step_s is None else format_seconds(row.step_s)


def summarize_leaderboard(rows: Sequence[Played], version: str) -> dict[str, Any]:
    """Returns the same as JSON-ready data, with the names of the dataclasses.

    Args:
      version: memplan's.
    """
    return {
        "format": "memplan.dojo",
        "version": 1,
        "memplan": version,
        "agents": [asdict(s) for s in standings(rows)],
        "episodes": [asdict(row) for row in rows],
    }
