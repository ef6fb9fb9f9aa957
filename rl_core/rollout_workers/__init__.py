"""Rollout workers: processes beside the trainer that play its episodes, with verified weights (docs/scale-out.md)."""
