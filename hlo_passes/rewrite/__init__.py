"""Edits and transfers written into a module, at the place in XLA's compilation for that."""
