"""Judges: questions to a model, verdicts in its replies, scores and win rates, and agreement with human labels."""
