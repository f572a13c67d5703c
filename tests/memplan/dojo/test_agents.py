"""Agents, and the leaderboard of their plans."""

import json

import numpy as np
import pytest

from experiments.synthetic import training_step_text
from memplan.dojo import WEIGHTS, Played, Weighted, make_agent, plan_of, played, standings
from memplan.dojo.agents import Planner, UnknownAgentError
from memplan.dojo.plans import plan_for
from tests.memplan.dojo.programs import env
from tests.memplan.dojo.test_environment import play


@pytest.mark.parametrize(("program", "share"), [("short", 0.6), ("long", 0.8)])
def test_the_planners_choice_played_again_is_its_plan(program, share):
    of, agent = env(), Planner()
    row = played(of, "planner", agent, 0, {"program": program, "machine": "h100", "share": share})
    assert agent.solution is not None
    plan = plan_for(agent.solution, of.episode.budget)
    assert row.step_s == pytest.approx(plan.prediction.step_time_s, rel=1e-9)
    assert -row.reward * row.base_s == pytest.approx(plan.prediction.step_time_s, rel=1e-6)
    again = plan_of(of.board)
    assert again is not None
    assert {(t.kind, t.buffer, t.start, t.done) for t in again.transfers} == {
        (t.kind, t.buffer, t.start, t.done) for t in plan.transfers
    }


@pytest.mark.parametrize("seed", range(3))
def test_no_agent_is_rewarded_for_nothing(seed):
    for name in ("greedy", "longest-idle", "random"):
        seen, info = play(env(), seed, name, share=0.6)
        assert seen[-1][2] <= -0.999999
        assert info["step_s"] < np.inf


def test_weights_of_zero_are_greedy():
    of = env()
    greedy = played(of, "x", make_agent("greedy"), 4)
    assert played(of, "x", Weighted(np.zeros(WEIGHTS)), 4) == greedy
    other = Weighted(np.random.default_rng(0).normal(0, 3, WEIGHTS))
    assert played(of, "x", other, 4) != greedy
    with pytest.raises(ValueError, match="expected 20 of them"):
        Weighted(np.zeros(7))


def test_an_agent_by_module_and_name():
    assert isinstance(make_agent("memplan.dojo.agents:Planner"), Planner)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("clever", "there is none of that name"),
        ("no_such_module:agent", "there is no module no_such_module"),
        ("memplan.dojo:nothing", "has no nothing that can be called"),
        ("builtins:dict", r"no begin\(\) and act\(\)"),
    ],
)
def test_an_agent_that_there_is_not(name, said):
    with pytest.raises(UnknownAgentError, match=said):
        make_agent(name)


def test_standings_compare_what_all_have_played():
    def row(agent: str, budget: int, step_s: float | None) -> Played:
        return Played(agent, "p", "m", 0, budget, 1.0, 0.0, step_s, 1)

    rows = [row("a", 1, 2.0), row("b", 1, 4.0), row("a", 2, None), row("b", 2, 1.0)]
    b, a = standings(rows)
    assert (b.agent, b.kept, b.best, b.slowdown) == ("b", 2, 1, pytest.approx(2.0))
    assert (a.agent, a.kept, a.best, a.slowdown) == ("a", 1, 1, pytest.approx(20**0.5))


def test_the_command_line(run, refused, tmp_path):
    # As XLA names it: which says what it was compiled for.
    path = tmp_path / "module_0001.step.sm_9.0a_gpu_after_optimizations.txt"
    path.write_text(training_step_text(60, "gpu"))
    words = "dojo", path, "--machines", "h100", "l4", "--episodes", "2", "--agents"
    shown = json.loads(run(*words, "greedy", "random", "--json"))
    assert (shown["format"], shown["version"]) == ("memplan.dojo", 1)
    assert len(shown["episodes"]) == 4
    assert {s["agent"] for s in shown["agents"]} == {"greedy", "random"}
    assert shown == json.loads(run(*words, "greedy", "random", "--json"))
    table = run(*words, "greedy")
    assert "slowdown" in table
    assert "step" in table
    said = "none of the programs was compiled for tpu: module_0001.step"
    assert said in refused("dojo", path, "--machines", "tpu-v5e")
    assert "--episodes 0: expected at least 1" in refused(*words[:4], "--episodes", "0")
    assert "--budgets 'x': expected LOW:HIGH" in refused(*words[:4], "--budgets", "x")
