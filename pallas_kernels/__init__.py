"""Fused attention and streaming kernels in Pallas, one folder an op."""
