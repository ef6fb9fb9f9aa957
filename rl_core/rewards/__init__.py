"""Rewards: components by name, weighed into one number per rollout."""
