"""Every benchmark that ``make bench`` runs, one table each: `python -m experiments.bench`."""

from __future__ import annotations

from experiments import dispatch, dumps, planning_time


def main() -> None:
    dispatch.main([])
    planning_time.main([])
    dumps.main([])


if __name__ == "__main__":
    main()
