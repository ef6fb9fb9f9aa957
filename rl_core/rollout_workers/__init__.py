"""Rollout workers: separate processes or inference servers that play episodes, with verified weights
(docs/scaling.md).
"""
