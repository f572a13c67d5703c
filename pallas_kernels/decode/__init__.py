"""Attention of the last tokens of each sequence to a cache of keys and values, paged or not."""
