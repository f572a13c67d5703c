"""One plan for a cluster: which chip computes what, and which wire carries which bytes, when."""
