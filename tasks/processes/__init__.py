"""A stage in several processes: launch, torchrun, events of rank 0."""
