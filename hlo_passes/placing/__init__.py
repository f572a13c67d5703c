"""The planner of weights: what stays, when each transfer starts, which slots and fences."""
