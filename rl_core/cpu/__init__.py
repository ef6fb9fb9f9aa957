"""Fast training and decoding on a CPU: the packed forward pass and compiled kernels."""
