"""Rollouts: sampling backends, multi-turn collection, batching for training."""
