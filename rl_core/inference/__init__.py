"""Inference: the rollout engine, its decoder, and the transformers fallback."""
