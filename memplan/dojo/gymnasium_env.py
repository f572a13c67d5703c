"""The environment as one of Gymnasium's, which has to be installed for this module alone."""

# Gymnasium need not be installed where this is checked.
# pyright: basic, reportMissingImports=false

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import gymnasium
import numpy as np
import numpy.typing as npt
from gymnasium import spaces

from memplan.dojo.environment import FINISH, SchedulingEnv


class GymnasiumEnv(gymnasium.Env[npt.NDArray[np.float32], np.int64]):
    """Episodes of a `SchedulingEnv`, for libraries that take a ``gymnasium.Env``.

    What is ruled out by the mask ends the episode as `FINISH` does: many libraries know of no
    masks.
    """

    metadata: ClassVar[dict[str, Any]] = {"render_modes": []}

    def __init__(self, env: SchedulingEnv) -> None:
        self.env = env
        box = env.observation_space
        self.action_space = spaces.Discrete(env.action_space.n)
        self.observation_space = spaces.Box(box.low, box.high, box.shape, np.float32)
        self._mask = np.zeros(env.action_space.n, np.bool_)

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[npt.NDArray[np.float32], dict[str, Any]]:
        super().reset(seed=seed)
        observation, info = self.env.reset(seed=seed, options=options)
        self._mask = info["action_mask"]
        return observation, info

    def step(
        self, action: np.int64
    ) -> tuple[npt.NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        legal = int(action) if self._mask[int(action)] else FINISH
        found = self.env.step(legal)
        self._mask = found[-1]["action_mask"]
        return found

    def action_masks(self) -> npt.NDArray[np.bool_]:
        """bool[actions], as the libraries that know of masks ask for it."""
        return self._mask
