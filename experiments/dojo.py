"""How near do other schedulers come to the planner, on machines that they have not seen?

    python -m experiments.dojo [--episodes 24] [--json FILE [--resume]]

Agents of `memplan.dojo` play the same episodes: programs of `experiments.dojo_capture` on machines
of the library on which none of them was trained, with drawn budgets. What counts is the step of the
plan that an episode ends with, as the simulator has it and the checker accepts it; nothing is run.
And how many episodes two processes play in a minute of a processor each, once all is posed.
"""

from __future__ import annotations

import itertools
import multiprocessing
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict

from absl import flags

from experiments.dojo_agent import evolved
from experiments.dojo_evolve import captured_program
from experiments.running import FLAGS, Experiment, Row, Rows
from hlo_passes.garbage import collection_paused
from hlo_passes.hardware.machine import load_machine
from memplan.dojo import Agent, Played, SchedulingEnv, make_agent, played, standings
from memplan.report.tables import Column, Table

HELD_OUT = {
    "gpu": ("b200", "h200", "l40s", "rtx-5090"),
    "tpu": ("tpu-v5p", "tpu-v6e"),
}
"""Machines that the evolved agent was not trained on, or near."""

SEEN = ("llama-prefill.h200", "llama-train.h200", "vit-train.h200", "llama-prefill.v5e")
UNSEEN = ("moe-prefill.h200", "dit-train.h200", "moe-prefill.v5e")
"""Programs that it was trained on, and others."""

AGENTS = ("planner", "evolved", "greedy", "longest-idle", "random")

_RATE = "rate"

# Of the rate: programs and machines, and for how many seconds of each processor it is measured.
_FAST_PROGRAMS = ("llama-prefill.h200", "moe-prefill.h200", "llama-train.h200", "vit-train.h200")
_FAST_MACHINES, _SECONDS = ("h100", "l4"), 30.0


def _define() -> None:
    flags.DEFINE_integer("episodes", 24, "on held-out machines")


def agent_of(name: str) -> Agent:
    return evolved() if name == "evolved" else make_agent(name)


def environment(programs: Sequence[str], machines: Sequence[str]) -> SchedulingEnv:
    pairs = [
        (program, machine)
        for program in map(captured_program, programs)
        for machine in map(load_machine, machines)
        if machine.platform == program.platform
    ]
    return SchedulingEnv(pairs)


def _rows(rows: Rows) -> Iterator[Row]:
    yield rows.of({"what": _RATE, "agent": "greedy"}, lambda: _rate("greedy"))
    env = environment((*SEEN, *UNSEEN), tuple(itertools.chain(*HELD_OUT.values())))
    for seed in range(FLAGS.episodes):
        for name in AGENTS:
            yield rows.of(
                {"what": "episode", "seed": seed, "agent": name},
                lambda n=name, s=seed: _episode(env, n, s),
            )


def _episode(env: SchedulingEnv, name: str, seed: int) -> Row:
    with collection_paused():
        found = asdict(played(env, name, agent_of(name), seed))
    del found["agent"]
    return found


def _rate(name: str) -> Row:
    """Episodes of two processes in so much time of a processor each: what else the machine does
    makes no difference. All is posed before."""
    env = environment(_FAST_PROGRAMS, _FAST_MACHINES)
    for program, machine in itertools.product(_FAST_PROGRAMS, _FAST_MACHINES):
        env.reset(options={"program": program, "machine": machine})
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()

    def play(first: int) -> None:
        end, counts = time.process_time() + _SECONDS, [0, 0]
        agent = make_agent(name)
        for seed in itertools.count(first, 2):
            observation, info = env.reset(seed=seed)
            agent.begin(env, seed)
            is_over = False
            while not is_over:
                action = agent.act(observation, info["action_mask"])
                observation, _, terminated, truncated, info = env.step(action)
                is_over = terminated or truncated
                counts[1] += 1
            if time.process_time() > end:
                break
            counts[0] += 1
        queue.put(counts)

    processes = [context.Process(target=play, args=(first,)) for first in range(2)]
    for process in processes:
        process.start()
    counts = [queue.get() for _ in processes]
    for process in processes:
        process.join()
    episodes, actions = map(sum, zip(*counts, strict=True))
    return {"episodes": episodes, "actions": actions, "seconds": _SECONDS, "processes": 2}


def _tables(rows: Sequence[Row]) -> list[Table]:
    found = [row for row in rows if row["what"] == "episode"]
    fields = [f for f in Played.__dataclass_fields__]
    all_of_them = [Played(**{f: row[f] for f in fields}) for row in found]
    tables = [
        Table(
            title,
            (
                Column("agent"),
                *(
                    Column(heading, right=True)
                    for heading in ("episodes", "within the budget", "slowdown", "fastest plan")
                ),
            ),
            tuple(
                (s.agent, str(s.episodes), str(s.kept), f"{s.slowdown:.3f}", str(s.best))
                for s in standings([p for p in all_of_them if p.program in programs])
            ),
        )
        for title, programs in (
            ("Schedulers on machines that they have not seen", SEEN),
            ("Schedulers on machines and programs that they have not seen", UNSEEN),
        )
        if any(p.program in programs for p in all_of_them)
    ]
    rates = [row for row in rows if row["what"] == _RATE]
    tables.append(
        Table(
            "Episodes of the dojo in a minute",
            (
                Column("agent"),
                *(Column(h, right=True) for h in ("processes", "episodes", "actions of one")),
            ),
            tuple(
                (
                    row["agent"],
                    str(row["processes"]),
                    f"{60 * row['episodes'] / row['seconds']:,.0f}",
                    f"{row['actions'] / max(1, row['episodes']):.0f}",
                )
                for row in rates
            ),
        )
    )
    return tables


EXPERIMENT = Experiment(_rows, _tables, _define)

if __name__ == "__main__":
    EXPERIMENT.main()
