"""From files, dumps and text to modules, and what XLA wrote beside them."""
