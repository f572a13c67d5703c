"""Episodes: what is drawn, what is legal, what it is worth."""

import dataclasses
import math

import numpy as np
import pytest

from hlo_passes.edits.choice import Work
from hlo_passes.hardware.machine import load_machine
from hlo_passes.placing.problem import streamed_load
from memplan.dojo import (
    FEATURES,
    INFEASIBLE,
    IllegalActionError,
    ScenarioError,
    SchedulingEnv,
    drawn_near,
    make_agent,
    plan_of,
)
from memplan.dojo.environment import FINISH, GIVE_BACK, ORDERS
from tests.memplan.dojo.programs import env


def play(of: SchedulingEnv, seed: int, agent: str = "random", **options):
    """Observations, masks and rewards of an episode, and what it ends with."""
    chosen = make_agent(agent)
    observation, info = of.reset(seed=seed, options=options)
    chosen.begin(of, seed)
    seen, is_over = [(observation, info["action_mask"], 0.0)], False
    while not is_over:
        action = chosen.act(observation, info["action_mask"])
        observation, reward, terminated, truncated, info = of.step(action)
        seen.append((observation, info["action_mask"], reward))
        is_over = terminated or truncated
    return seen, info


def test_a_seed_is_an_episode():
    one, other = env(variants=3), env(variants=3)
    episodes = []
    for seed in range(6):
        first, _ = play(one, seed)
        second, _ = play(other, seed)
        assert one.episode == other.episode
        episodes.append(one.episode)
        assert len(first) == len(second)
        for (a, mask, reward), (b, again, same) in zip(first, second, strict=True):
            np.testing.assert_array_equal(a, b)
            np.testing.assert_array_equal(mask, again)
            assert reward == same
    assert len({(e.program, e.machine, e.variant) for e in episodes}) > 3
    assert len({e.budget for e in episodes}) == 6


def test_episodes_go_on_from_a_seed():
    one, other = env(), env()
    one.reset(seed=1)
    other.reset(seed=1)
    assert [one.reset() and one.episode for _ in range(3)] == [
        other.reset() and other.episode for _ in range(3)
    ]


@pytest.mark.parametrize("seed", range(4))
def test_what_the_mask_allows_is_possible_and_nothing_else(seed):
    of = env()
    observation, info = of.reset(seed=seed)
    draws, done = np.random.default_rng(seed), False
    for _ in range(40):
        mask = info["action_mask"]
        assert of.observation_space.contains(observation)
        assert mask.shape == (of.action_space.n,)
        with pytest.raises(IllegalActionError, match=r"info\['action_mask'\] allows"):
            of.step(int(draws.choice(np.flatnonzero(~mask))))
        allowed = np.flatnonzero(mask)
        action = int(draws.choice(allowed[allowed != FINISH]))
        meaning = of.meaning(action)
        observation, reward, done, _, info = of.step(action)
        assert (reward, done) == (0.0, False)
        if meaning.kind in ("evict", "stream"):
            assert not info["action_mask"][action]
    # What is moved or made again is away until then: no tick has more bytes than there were.
    state = of.board.selection
    assert state is not None
    assert state.gaps


def test_a_gap_that_is_taken_can_be_taken_no_more_in_another_way():
    of = env()
    _, info = of.reset(seed=0, options={"program": "long", "share": 0.5})
    first = next(
        a for a in np.flatnonzero(info["action_mask"]) if of.meaning(int(a)).kind == "recompute"
    )
    meaning = of.meaning(int(first))
    *_, info = of.step(int(first))
    assert not info["action_mask"][first]
    evict = of.board.action_of("evict", meaning.name, meaning.start)
    assert of.board.selection is not None
    taken = {(n, start) for n, start, *_ in of.board.selection.gaps}
    name = {t.name: t.number for t in of.board.ordered.temporaries}[meaning.name]
    assert info["action_mask"][evict] == ((name, meaning.start) not in taken)


def test_an_action_has_one_meaning():
    of = env()
    of.reset(seed=3)
    board = of.board
    for action in range(of.action_space.n):
        meaning = of.meaning(action)
        if meaning.name and meaning.name != "nothing" and meaning.kind != "order":
            assert board.action_of(*meaning) in (action, action - 512)


def test_the_state_is_that_of_the_planner_with_these_arguments():
    of = env()
    play(of, 1, "random", program="long", machine="h100", share=0.6)
    board = of.board
    work = Work(board.ordered.posed.staying(board.stay))
    state = work.state(streamed_load(work.posed))
    np.testing.assert_array_equal(board._streamed_load, streamed_load(work.posed))
    for n, start, again in board.taken:
        if start in state.by_temporary.get(n, {}):
            continue
        if again:
            state.recompute(n, start, 0, math.inf)
        else:
            state.evict(n, start)
    assert state.load.max() <= board.capacity
    assert board.selection is not None
    assert board.selection.load.max() <= board.capacity


def test_to_finish_above_the_budget_is_punished():
    of = env()
    of.reset(seed=0, options={"share": 0.5})
    _, reward, terminated, truncated, info = of.step(FINISH)
    assert (reward, terminated, truncated) == (INFEASIBLE, True, False)
    assert info["step_s"] == math.inf
    with pytest.raises(ScenarioError, match="call of reset"):
        of.step(FINISH)


def test_with_everything_there_a_step_takes_what_it_takes():
    of = env()
    of.reset(seed=0, options={"share": 1.3})
    *_, info = of.step(FINISH)
    assert info["step_s"] == pytest.approx(of.episode.base_s)


def test_a_limit_cuts_an_episode_off_and_rewards_it_as_it_is():
    of = env(limit=2)
    _, info = of.reset(seed=0, options={"share": 0.4})
    for last in (False, True):
        allowed = np.flatnonzero(info["action_mask"])
        action = int(allowed[allowed > GIVE_BACK + 3][0])
        _, reward, terminated, truncated, info = of.step(action)
        assert (terminated, truncated) == (False, last)
    assert reward == INFEASIBLE


@pytest.mark.parametrize(
    ("program", "share", "agent"),
    [
        ("short", 0.6, "greedy"),  # streams
        ("short", 0.95, "longest-idle"),  # evicts
        ("long", 0.95, "greedy"),  # computes again
        ("long", 0.6, "random"),  # all of it
    ],
)
def test_a_reward_is_the_simulated_step_of_the_plan(program, share, agent):
    of = env()
    seen, _ = play(of, 1, agent, program=program, machine="h100", share=share)
    plan = plan_of(of.board)
    assert plan is not None
    assert plan.prediction.total_bytes <= of.episode.budget
    simulated = plan.prediction.step_time_s / of.episode.base_s
    assert seen[-1][2] == pytest.approx(max(INFEASIBLE, -simulated), rel=1e-6)


def test_what_is_given_back_makes_no_step_longer():
    of = env()
    seen, _ = play(of, 2, "random", program="long", share=0.6)
    of.reset(seed=2, options={"program": "long", "share": 0.6})
    assert seen[-1][0][FINISH, FEATURES.index("fits")] == 1


def test_orders_are_chosen_at_the_beginning_only():
    of = env()
    _, info = of.reset(seed=0, options={"program": "long", "share": 0.5})
    orders = len(of.board.situation.orders)
    allowed = info["action_mask"][ORDERS : ORDERS + orders]
    assert allowed.tolist() == [False] + [True] * (orders - 1)
    action = next(
        int(a) for a in np.flatnonzero(info["action_mask"]) if of.meaning(int(a)).kind == "evict"
    )
    *_, info = of.step(action)
    assert not info["action_mask"][ORDERS : ORDERS + orders].any()


def test_machines_are_drawn_near_one_and_the_same_for_a_number():
    h100 = load_machine("h100")
    assert drawn_near(h100, 0) is h100
    assert drawn_near(h100, 1) == drawn_near(h100, 1) != drawn_near(h100, 2)
    drawn = drawn_near(h100, 1)
    assert drawn.hbm_bytes_per_s != h100.hbm_bytes_per_s
    assert [t.capacity_bytes for t in drawn.tiers] == [t.capacity_bytes for t in h100.tiers]
    there, back = drawn.link("host", "hbm"), drawn.link("hbm", "host")
    assert there.bytes_per_s == back.bytes_per_s != h100.host_link.bytes_per_s
    kept = {f.name for f in dataclasses.fields(h100)} - {
        "name",
        "hbm_bytes_per_s",
        "peak_flops",
        "links",
    }
    assert all(getattr(drawn, name) == getattr(h100, name) for name in kept)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"program": "none"}, "there is no such episode; expected short on h100"),
        ({"buget": 3}, r"options \['buget'\]: expected program, machine, variant, share or budget"),
    ],
)
def test_an_episode_that_there_is_not(options, said):
    with pytest.raises(ScenarioError, match=said):
        env().reset(seed=0, options=options)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"shares": (0.5, 0.2)}, r"shares \(0.5, 0.2\): expected two numbers"),
        ({"limit": 0}, "limit 0, variants 0: expected at least"),
    ],
)
def test_an_environment_that_makes_no_episodes(options, said):
    with pytest.raises(ScenarioError, match=said):
        env(**options)
    with pytest.raises(ScenarioError, match="no program has a machine"):
        SchedulingEnv([])


def test_gymnasium_finds_nothing_wrong():
    pytest.importorskip("gymnasium", reason="Gymnasium is not installed")
    from gymnasium.utils.env_checker import check_env

    from memplan.dojo.gymnasium_env import GymnasiumEnv

    wrapped = GymnasiumEnv(env())
    check_env(wrapped, skip_render_check=True)
    wrapped.reset(seed=0, options={"share": 0.5})
    masked = int(np.flatnonzero(~wrapped.action_masks())[0])
    _, reward, terminated, *_ = wrapped.step(np.int64(masked))
    assert (reward, terminated) == (INFEASIBLE, True)
