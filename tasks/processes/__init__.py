"""Processes of a stage: launch under torchrun, event channel of rank 0."""
