"""Who decides in an episode: baselines, the planner itself, and policies that score each action."""

from __future__ import annotations

import importlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol, cast

import numpy as np
import numpy.typing as npt

from hlo_passes.edits.choice import work_on
from hlo_passes.errors import MemplanError
from hlo_passes.fitting import fit
from hlo_passes.fitting.solution import Solution
from hlo_passes.garbage import collection_paused
from memplan.dojo.environment import FEATURES, FINISH, GIVE_BACK, ORDERS, Board, SchedulingEnv
from memplan.dojo.plans import order_in, posed_with

_KIND = {name: k for k, name in enumerate(FEATURES)}

type Observation = npt.NDArray[np.float32]


class Agent(Protocol):
    """Chooses actions, one after the other."""

    def begin(self, env: SchedulingEnv, seed: int) -> None:
        """Is told of an episode that begins; all that is random follows from `seed`."""
        ...

    def act(self, observation: Observation, mask: npt.NDArray[np.bool_]) -> int:
        """Returns a legal action."""
        ...


class UnknownAgentError(MemplanError, LookupError):
    """An agent that there is none of."""

    def __init__(self, name: str, problem: str) -> None:
        super().__init__(
            f"agent {name}: {problem}. Expected one of {', '.join(AGENTS)}, or MODULE:NAME, which "
            "returns an agent when it is called without arguments."
        )


class Scoring:
    """Takes the action with the highest score: frees memory in another order where there is one,
    goes on until the budget is kept, and keeps after all what it has room for.

    The order is decided first. Only actions that lower what is too much are scored; of equals the
    first is taken.
    """

    def begin(self, env: SchedulingEnv, seed: int) -> None:
        self._orders = list(range(ORDERS + 1, ORDERS + len(env.situation.orders)))
        self._may_give_back = True

    def act(self, observation: Observation, mask: npt.NDArray[np.bool_]) -> int:
        if self._orders and mask[self._orders[-1]] and self.reorders(observation):
            return self._orders.pop()
        self._orders.clear()
        if observation[FINISH, _KIND["fits"]]:
            if self._may_give_back and mask[GIVE_BACK]:
                self._may_give_back = False
                return GIVE_BACK
            return FINISH
        helps = np.flatnonzero(mask & (observation[:, _KIND["covers"]] > 0))
        if not helps.size:
            return FINISH
        return int(helps[np.argmax(self.scores(observation[helps]))])

    def scores(self, rows: Observation) -> npt.NDArray[np.float64]:
        """float64[rows], of actions that move something or compute it again."""
        raise NotImplementedError

    def reorders(self, observation: Observation) -> bool:
        """Whether another order is taken at first."""
        return True


class Greedy(Scoring):
    """Bytes and ticks that are too many, for a second of links or of compute."""

    def scores(self, rows: Observation) -> npt.NDArray[np.float64]:
        return rows[:, _KIND["worth"]].astype(np.float64)


class LongestIdle(Scoring):
    """Moves what is idle for longest, and computes again only what cannot be moved, as a cache that
    knows what comes (Belady, "A study of replacement algorithms for a virtual-storage computer",
    IBM Systems Journal 5, 1966)."""

    def scores(self, rows: Observation) -> npt.NDArray[np.float64]:
        return rows[:, _KIND["idle"]].astype(np.float64) - rows[:, _KIND["recompute"]]


class Chance(Scoring):
    """Any of those that help."""

    def begin(self, env: SchedulingEnv, seed: int) -> None:
        super().begin(env, seed)
        self._draws = np.random.default_rng(seed)

    def scores(self, rows: Observation) -> npt.NDArray[np.float64]:
        return self._draws.random(len(rows))


class Weighted(Scoring):
    """Greedy, corrected by a sum over what a row says, weighted: few numbers, that can be evolved.

    Args:
      weights: float64[`WEIGHTS`]: of each feature, and of the links' seconds so far (``moving``)
        for what is streamed and for what is evicted. With zeros it is greedy.
    """

    def __init__(self, weights: npt.NDArray[np.float64]) -> None:
        if weights.shape != (WEIGHTS,):
            raise ValueError(f"weights {weights.shape}: expected {WEIGHTS} of them")
        self._weights = weights

    def scores(self, rows: Observation) -> npt.NDArray[np.float64]:
        return rows[:, _KIND["worth"]] + self._corrections(rows)

    def reorders(self, observation: Observation) -> bool:
        return bool(self._corrections(observation[ORDERS : ORDERS + 1])[0] >= 0)

    def _corrections(self, rows: Observation) -> npt.NDArray[np.float64]:
        of_features, of_moving = np.split(self._weights, [len(FEATURES)])
        kinds = rows[:, [_KIND["stream"], _KIND["evict"]]]
        return rows @ of_features + rows[:, _KIND["moving"]] * (kinds @ of_moving)


WEIGHTS = len(FEATURES) + 2
"""How many numbers a `Weighted` agent is."""


class Planner:
    """The planner itself, offered the orders of the environment: what it chooses is done again, one
    action after the other.

    Attributes:
      solution: of the episode; None where it found none.
    """

    def begin(self, env: SchedulingEnv, seed: int) -> None:
        board = env.board
        with collection_paused():
            self.solution, stay = _planned(board)
        self._wanted = deque[tuple[str, str, int]]()
        if self.solution is not None:
            self._wanted.extend(_wanted(board, self.solution, stay))
        self._board = board

    def act(self, observation: Observation, mask: npt.NDArray[np.bool_]) -> int:
        while self._wanted:
            action = self._board.action_of(*self._wanted.popleft())
            # What had to be taken for another one is taken already.
            if action is not None and mask[action]:
                return action
        return FINISH


def _planned(board: Board) -> tuple[Solution | None, frozenset[str]]:
    """The planner's solution, and which arguments stay for it."""
    situation = board.situation
    stays = [frozenset[str]()]
    if situation.movables:
        among = frozenset(m.buffer for m in situation.movables)
        choices = fit.choose_stay(situation.orders[0].posed, board.budget, None)
        stays = [choice.names & among for choice in choices]
    for stay in stays:
        posed = posed_with(situation, stay)
        orders = [order_in(posed, ordered.order) for ordered in situation.orders[1:]]
        if (found := fit.fit(posed, board.budget, None, orders=orders)) is not None:
            return found, stay
    return None, frozenset()


def _wanted(
    board: Board, solution: Solution, stay: frozenset[str]
) -> Iterator[tuple[str, str, int]]:
    """What a solution is made of: kind, name, and the access that a gap starts with. What is
    evicted comes first, then what runs again, in the order of time: each needs what runs before."""
    posed = posed_with(board.situation, stay)
    orders = [order_in(posed, ordered.order).order for ordered in board.situation.orders]
    chosen = orders.index(solution.edited.order)
    yield "order", str(chosen), -1
    for m in board.situation.movables:
        if m.buffer not in stay:
            yield "stream", m.buffer, -1
    if solution.selection is None:
        return
    temporaries = work_on(solution.kept).temporaries
    gaps = sorted(solution.selection.gaps, key=lambda gap: (gap[2] == "recompute", gap[3], gap[:2]))
    for n, start, action, _ in gaps:
        yield action, temporaries[n].name, start


AGENTS: Mapping[str, Callable[[], Agent]] = {
    "planner": Planner,
    "greedy": Greedy,
    "longest-idle": LongestIdle,
    "random": Chance,
}
"""Those that come with memplan."""


def make_agent(name: str) -> Agent:
    """Returns one of `AGENTS`, or what ``module:name`` gives.

    Raises:
      UnknownAgentError: for a name of neither kind, or of nothing that can be called.
    """
    if name in AGENTS:
        return AGENTS[name]()
    module, colon, attribute = name.partition(":")
    if not colon:
        raise UnknownAgentError(name, "there is none of that name")
    try:
        found: Any = getattr(importlib.import_module(module), attribute, None)
    except ModuleNotFoundError as error:
        raise UnknownAgentError(name, f"there is no module {error.name}") from error
    if not callable(found):
        raise UnknownAgentError(name, f"{module} has no {attribute} that can be called")
    agent = found()
    if not (hasattr(agent, "begin") and hasattr(agent, "act")):
        raise UnknownAgentError(name, "what it returns has no begin() and act()")
    return cast("Agent", agent)
