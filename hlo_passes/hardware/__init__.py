"""What the planner has to know of hardware: machines, and GPUs as XLA sees them."""
