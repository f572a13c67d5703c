"""What the real compilers make of kernels, on a machine without their hardware."""
