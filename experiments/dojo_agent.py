"""The agent that was evolved: `memplan dojo --agents experiments.dojo_agent:evolved`."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from memplan.dojo import Weighted

PARAMETERS = Path(__file__).parent / "dojo_agent.json"


def evolved() -> Weighted:
    """Returns it, with the weights that `experiments.dojo_evolve` wrote."""
    return Weighted(np.array(json.loads(PARAMETERS.read_text())["weights"]))
