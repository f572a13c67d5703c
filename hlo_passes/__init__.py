"""The compiler: HLO in, a `Plan` out, and the plan written back into the HLO."""
