"""What to plan for, from what XLA reported of plans before."""

from memplan.aiming import aim_for


def test_one_plan_says_how_far_all_are_off():
    assert aim_for(100, {90: 60}) == 130
    assert aim_for(100, {90: 110}) == 80


def test_an_exact_plan_asks_for_no_more():
    assert aim_for(100, {90: 90}) == 100


def test_between_two_plans_the_report_is_on_their_line():
    assert aim_for(100, {90: 60, 130: 140}) == 110
    assert aim_for(60, {90: 60, 130: 140}) == 90


def test_of_plans_on_one_side_the_nearest_counts():
    assert aim_for(100, {90: 60, 50: 10}) == 130
    assert aim_for(10, {90: 60, 50: 30}) == 30


def test_more_bytes_planned_for_less_reported_make_no_line():
    assert aim_for(100, {130: 90, 90: 140}) == 140


def test_where_none_kept_to_it_the_worst_counts():
    assert aim_for(100, {100: 110, 90: 150}) == 40
