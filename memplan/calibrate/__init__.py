"""The machine that is here, measured: ``memplan calibrate``.

programs ─ compiled ─► measuring: in turns, quantiles ─► fitting: rates by kind ─┐
copies, the disk ───────────────────────────────────────► links ────────────────┴─► machine file
"""
