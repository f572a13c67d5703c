"""The planner of temporaries: which leave the device for a while, and which are computed again."""
