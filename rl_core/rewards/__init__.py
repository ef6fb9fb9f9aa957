"""Rewards: named components, their weighted sum, the reward-hacking monitor, and the rollout log."""
