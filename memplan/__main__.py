"""``python -m memplan``: the command line."""

from memplan.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
