"""Training: the loop, the optimizer step, optimizers, micro-batches, resume, signals."""
