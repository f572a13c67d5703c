"""Evolves a scoring policy for the dojo: `python -m experiments.dojo_evolve`.

An evolution strategy with antithetic draws and ranks for fitness (Salimans, Ho, Chen, Sidor,
Sutskever, "Evolution strategies as a scalable alternative to reinforcement learning", 2017), on
programs and machines of which none is used to judge it. Fitness is the logarithm of the greedy
baseline's cost over the agent's own, the mean over episodes that all agents of a generation play.
Effort is counted: the same command writes the same file.
"""

from __future__ import annotations

import json
import math
import multiprocessing
from collections.abc import Sequence
from functools import cache

import numpy as np
import numpy.typing as npt
from absl import flags

from experiments.dojo_agent import PARAMETERS
from experiments.dojo_capture import MODULES
from experiments.running import FLAGS, command
from hlo_passes.hardware.machine import load_machine
from hlo_passes.reading.reader import read_module
from memplan.dojo import FEATURES, INFEASIBLE, Network, Program, SchedulingEnv, Scoring, make_agent

TRAINING_PROGRAMS = (
    "llama-train.h200",
    "vit-train.h200",
    "llama-prefill.h200",
    "llama-train.v5e",
    "llama-prefill.v5e",
)
TRAINING_MACHINES = ("a100", "h100", "l4", "rtx-4090", "tpu-v4", "tpu-v5e")
VARIANTS = 3
"""Machines drawn near each of these."""

HIDDEN = 4

# Episodes of a generation; agents of one, in pairs; how far they are from its mean, and how far that
# moves along what the ranks say.
_EPISODES, _PAIRS, _SIGMA, _RATE = 24, 12, 0.15, 0.3


def main(_: Sequence[str]) -> None:
    env = environment(TRAINING_PROGRAMS, TRAINING_MACHINES, VARIANTS)
    for program in TRAINING_PROGRAMS:  # Before the processes part, so that it is done once.
        for machine in TRAINING_MACHINES:
            for variant in range(1, VARIANTS + 1):
                if ("tpu" in machine) == ("v5e" in program):
                    env.reset(
                        options={"program": program, "machine": machine, "variant": variant}
                    )
    print("posed", flush=True)
    draws = np.random.default_rng(FLAGS.seed)
    mean = np.zeros((len(FEATURES) + 2) * HIDDEN)
    # The hidden units differ from the beginning on, and say nothing.
    mean[: len(FEATURES) * HIDDEN] = draws.normal(0, 0.5, len(FEATURES) * HIDDEN)
    history: list[float] = []
    context = multiprocessing.get_context("fork")
    with context.Pool(FLAGS.processes) as pool:
        for generation in range(FLAGS.generations):
            noise = draws.normal(size=(_PAIRS, mean.size))
            agents = [mean + _SIGMA * s * n for n in noise for s in (1, -1)]
            seeds = range(generation * _EPISODES, (generation + 1) * _EPISODES)
            jobs = [(seed, agents) for seed in seeds]
            gains = np.mean(pool.map(_gains, jobs, chunksize=1), axis=0)
            ranks = np.argsort(np.argsort(gains)) / (len(gains) - 1) - 0.5
            step = (ranks[::2] - ranks[1::2]) @ noise / (_PAIRS * _SIGMA)
            mean = mean + _RATE * _SIGMA**2 * step / np.std(ranks)
            history.append(float(gains.mean()))
            print(generation, f"{gains.mean():+.4f} {gains.max():+.4f}", flush=True)
    kept = {
        "command": f"python -m experiments.dojo_evolve --seed={FLAGS.seed} "
        f"--generations={FLAGS.generations}",
        "hidden": HIDDEN,
        "features": FEATURES,
        "gains": [round(gain, 5) for gain in history],
        "parameters": [round(float(p), 6) for p in mean],
    }
    PARAMETERS.write_text(json.dumps(kept, indent=1) + "\n")


@cache
def environment(
    programs: tuple[str, ...], machines: tuple[str, ...], variants: int
) -> SchedulingEnv:
    """Captured programs on the machines of their platform."""
    pairs = [
        (program, machine)
        for program in map(captured_program, programs)
        for machine in map(load_machine, machines)
        if machine.platform == program.platform
    ]
    return SchedulingEnv(pairs, variants=variants)


def captured_program(name: str) -> Program:
    """One of those of `experiments.dojo_capture`."""
    module = read_module(MODULES / f"{name}.pb.gz")
    return Program(name, module, "tpu" if name.endswith("v5e") else "gpu")


def _gains(job: tuple[int, Sequence[npt.NDArray[np.float64]]]) -> list[float]:
    """By how much agents are better than greedy in an episode."""
    seed, agents = job
    greedy = cost(make_agent("greedy"), seed)
    return [math.log(greedy / cost(Network(agent, HIDDEN), seed)) for agent in agents]


def cost(agent: Scoring, seed: int) -> float:
    """What the environment predicts of a step, in parts of that with everything on the device."""
    env = environment(TRAINING_PROGRAMS, TRAINING_MACHINES, VARIANTS)
    observation, info = env.reset(seed=seed)
    agent.begin(env, seed)
    reward, is_over = INFEASIBLE, False
    while not is_over:
        action = agent.act(observation, info["action_mask"])
        observation, reward, terminated, truncated, info = env.step(action)
        is_over = terminated or truncated
    return -reward


def _define() -> None:
    flags.DEFINE_integer("seed", 0, "of what is drawn")
    flags.DEFINE_integer("generations", 40, "of agents")
    flags.DEFINE_integer("processes", 2, "that play")


if __name__ == "__main__":
    command(main, _define)
