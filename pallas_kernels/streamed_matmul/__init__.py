"""A matrix product whose weights stay in host memory or HBM and come tile by tile."""
