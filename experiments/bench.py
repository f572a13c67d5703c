"""Every benchmark that ``make bench`` runs, one table each: `python -m experiments.bench`."""

from __future__ import annotations

from experiments import planning_time


def main() -> None:
    planning_time.main([])


if __name__ == "__main__":
    main()
