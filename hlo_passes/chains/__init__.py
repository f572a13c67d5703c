"""Descriptor chains: a plan of memory traffic and synchronisation, as a runtime replays it."""
