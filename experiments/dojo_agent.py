"""The agent that was evolved, as `memplan dojo --agents experiments.dojo_agent:evolved` takes it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from memplan.dojo import Network

PARAMETERS = Path(__file__).parent / "dojo_agent.json"


def evolved() -> Network:
    """Returns it, with the parameters that `experiments.dojo_evolve` wrote."""
    kept = json.loads(PARAMETERS.read_text())
    return Network(np.array(kept["parameters"]), kept["hidden"])
