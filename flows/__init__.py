"""What runs, in which order, on which schedule."""
