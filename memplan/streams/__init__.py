"""Streaming of stacked arrays: what is done to a traced program before it is lowered."""
