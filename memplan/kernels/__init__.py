"""What the real compilers make of kernels, for hardware that need not be there."""
