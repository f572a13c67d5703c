"""Simulated steps beside published ones."""

import pytest

from experiments.simulate import EXPERIMENT, PUBLISHED
from hlo_passes.hardware.machine import machine_names
from models.configs import CONFIGS


def test_what_was_published_is_of_machines_and_models_that_are_there():
    assert {machine for machine, *_ in PUBLISHED} <= set(machine_names())
    assert {model for _, model, *_ in PUBLISHED} <= CONFIGS.keys()


def test_each_source_has_a_line_of_its_own():
    found = {"machine": "a100", "model": "llama2-7b", "step_s": 0.008, "launch_s": 1e-5}
    (table,) = EXPERIMENT.tables([found])
    assert [cells[4:6] for cells in table.rows] == [("13.5 ms", "0.59"), ("9.51 ms", "0.84")]


@pytest.mark.parametrize("failure", ["too slow"])
def test_a_failure_is_a_line_without_a_step(failure: str):
    (table,) = EXPERIMENT.tables([{"machine": "l40s", "model": "llama3-8b", "failure": failure}])
    ((*_, said, _),) = table.rows
    assert said == failure
