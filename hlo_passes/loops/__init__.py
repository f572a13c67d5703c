"""The planner of loops: their transfers' ticks, and bodies planned as the entry is."""
