"""Which parts of two modules are the same."""
