"""What the compilers say of kernels, for hardware that need not be there."""
