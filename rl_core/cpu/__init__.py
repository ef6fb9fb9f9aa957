"""Compiled code for the CPU: products of matrices, a decoding step, and what layers do between products."""
