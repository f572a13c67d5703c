"""Where memory schedulers are learned, and compared with the planner.

An environment with the interface of Gymnasium (`SchedulingEnv`; with Gymnasium itself
`memplan.dojo.gymnasium_env`), agents, and a leaderboard of the plans that they make. See
`memplan.dojo.environment`.
"""

from memplan.dojo.agents import AGENTS, WEIGHTS, Agent, Scoring, Weighted, make_agent
from memplan.dojo.environment import (
    FEATURES,
    INFEASIBLE,
    Episode,
    IllegalActionError,
    ScenarioError,
    SchedulingEnv,
)
from memplan.dojo.leaderboard import Played, Standing, played, standings
from memplan.dojo.plans import plan_of
from memplan.dojo.scenarios import Program, drawn_near

__all__ = [
    "AGENTS",
    "FEATURES",
    "INFEASIBLE",
    "WEIGHTS",
    "Agent",
    "Episode",
    "IllegalActionError",
    "Played",
    "Program",
    "ScenarioError",
    "SchedulingEnv",
    "Scoring",
    "Standing",
    "Weighted",
    "drawn_near",
    "make_agent",
    "plan_of",
    "played",
    "standings",
]
