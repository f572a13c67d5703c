"""The planner of orders: the same compute, with less live at once."""
