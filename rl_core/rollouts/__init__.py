"""Rollouts: multi-turn collection, metrics, token files, and micro-batches for training."""
