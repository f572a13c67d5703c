"""One module within one budget: orders, edits and placement together, as XLA will pack them."""
