"""What XLA's buffer assignment will make of a module: its buffers, and where they lie."""
