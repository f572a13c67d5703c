"""Every benchmark that ``make bench`` runs, one table each: `python -m experiments.bench`."""

from __future__ import annotations

from experiments import dispatch, dumps, planning_time

if __name__ == "__main__":
    for module in (dispatch, planning_time, dumps):
        module.EXPERIMENT.run()
