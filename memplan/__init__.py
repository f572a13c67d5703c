"""memplan makes XLA plan every byte: where each buffer lives and when it moves."""

__version__ = "0.1.0"
