"""Evolves a scoring policy for the dojo: `python -m experiments.dojo_evolve`.

By an evolution strategy, on machines of which none is used to judge it. Fitness is the logarithm of
the greedy baseline's cost over the agent's own, the mean over episodes that all agents of a
generation play. Effort is counted: the same command writes the same file.
"""

from __future__ import annotations

import json
import lzma
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
from memplan.dojo import (
    FEATURES,
    INFEASIBLE,
    WEIGHTS,
    Agent,
    Program,
    SchedulingEnv,
    Weighted,
    make_agent,
)

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

# Episodes, the same ones for all generations; agents of one, and how far those are from their mean
# at first: worth is a logarithm to base 10, so that is a factor of one and a half.
_EPISODES, _AGENTS, _SIGMA = 24, 12, 0.2

# An episode in which an agent finds nothing counts no more than one in which its step is so much
# longer than greedy's, as a logarithm: or a single one decides.
_WORST = -0.25

# Actions of an episode: who takes more has long lost.
_LIMIT = 160


def main(_: Sequence[str]) -> None:
    env = environment(TRAINING_PROGRAMS, TRAINING_MACHINES, VARIANTS)
    for program in TRAINING_PROGRAMS:  # Before the processes part, so that it is done once.
        for machine in TRAINING_MACHINES:
            for variant in range(1, VARIANTS + 1):
                if ("tpu" in machine) == ("v5e" in program):
                    env.reset(options={"program": program, "machine": machine, "variant": variant})
    search, history = Cma(WEIGHTS, _SIGMA, FLAGS.seed), list[float]()
    context = multiprocessing.get_context("fork")
    with context.Pool(FLAGS.processes) as pool:
        for generation in range(FLAGS.generations):
            agents = search.ask(_AGENTS)
            # The last one is their mean, which is what is kept.
            jobs = [(seed, [*agents, search.mean]) for seed in range(_EPISODES)]
            *gains, of_mean = np.mean(pool.map(_gains, jobs, chunksize=1), axis=0)
            search.tell(agents, gains)
            history.append(float(of_mean))
            print(
                generation, f"{of_mean:+.4f} {np.mean(gains):+.4f} {search.sigma:.3f}", flush=True
            )
            kept = {
                "command": f"python -m experiments.dojo_evolve --seed={FLAGS.seed} "
                f"--generations={FLAGS.generations}",
                "features": FEATURES,
                "gains": [round(gain, 5) for gain in history],
                "weights": [round(float(w), 6) for w in search.mean],
            }
            PARAMETERS.write_text(json.dumps(kept, indent=1) + "\n")


class Cma:
    """Evolves vectors with the covariance matrix of what did well (Hansen, "The CMA evolution
    strategy: a tutorial", 2016, with its default parameters; without negative weights).

    Args:
      sigma: the standard deviation of each number at first; their mean is 0.
    """

    def __init__(self, size: int, sigma: float, seed: int) -> None:
        self._draws = np.random.default_rng(seed)
        self.mean, self.sigma = np.zeros(size), sigma
        self._covariance, self._told = np.eye(size), 0
        self._path, self._path_sigma = np.zeros(size), np.zeros(size)

    def ask(self, count: int) -> list[npt.NDArray[np.float64]]:
        """Returns so many vectors."""
        root = np.linalg.cholesky(self._covariance)
        normal = self._draws.normal(size=(count, self.mean.size))
        return list(self.mean + self.sigma * normal @ root.T)

    def tell(self, vectors: Sequence[npt.NDArray[np.float64]], fitness: Sequence[float]) -> None:
        """Learns how vectors did; more is better."""
        n, half = self.mean.size, len(vectors) // 2
        weights = math.log(half + 0.5) - np.log(np.arange(1, half + 1))
        weights /= weights.sum()
        effective = 1 / np.square(weights).sum()
        best = [vectors[k] for k in np.argsort(fitness)[::-1][:half]]
        moves = (np.array(best) - self.mean) / self.sigma
        move = weights @ moves
        self.mean = self.mean + self.sigma * move
        self._told += 1
        # How fast each of the two paths forgets, and step and covariance follow.
        of_sigma = (effective + 2) / (n + effective + 5)
        damping = 1 + 2 * max(0.0, math.sqrt((effective - 1) / (n + 1)) - 1) + of_sigma
        of_path = (4 + effective / n) / (n + 4 + 2 * effective / n)
        of_one = 2 / ((n + 1.3) ** 2 + effective)
        of_all = min(1 - of_one, 2 * (effective - 2 + 1 / effective) / ((n + 2) ** 2 + effective))
        values, vectors_of = np.linalg.eigh(self._covariance)
        whitened = vectors_of @ ((vectors_of.T @ move) / np.sqrt(values))
        self._path_sigma = (1 - of_sigma) * self._path_sigma
        self._path_sigma += math.sqrt(of_sigma * (2 - of_sigma) * effective) * whitened
        expected = math.sqrt(n) * (1 - 1 / (4 * n) + 1 / (21 * n**2))
        length = float(np.linalg.norm(self._path_sigma))
        settled = math.sqrt(1 - (1 - of_sigma) ** (2 * self._told))
        is_slow = length / settled < (1.4 + 2 / (n + 1)) * expected
        self._path = (1 - of_path) * self._path
        if is_slow:
            self._path += math.sqrt(of_path * (2 - of_path) * effective) * move
        self._covariance = (
            (1 - of_one - of_all) * self._covariance
            + of_one * np.outer(self._path, self._path)
            + of_all * (moves.T * weights) @ moves
        )
        self.sigma *= math.exp(of_sigma / damping * (length / expected - 1))


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
    return SchedulingEnv(pairs, variants=variants, limit=_LIMIT)


def captured_program(name: str) -> Program:
    """One of those of `experiments.dojo_capture`."""
    module = read_module(lzma.decompress((MODULES / f"{name}.pb.xz").read_bytes()))
    return Program(name, module, "tpu" if name.endswith("v5e") else "gpu")


def _gains(job: tuple[int, Sequence[npt.NDArray[np.float64]]]) -> list[float]:
    """By how much agents are better than greedy in an episode."""
    seed, agents = job
    greedy = cost(make_agent("greedy"), seed)
    return [max(_WORST, math.log(greedy / cost(Weighted(agent), seed))) for agent in agents]


def cost(agent: Agent, seed: int) -> float:
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
