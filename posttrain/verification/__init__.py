"""Verification that a user's pipeline, killed and restarted, publishes the same bytes as an uninterrupted run."""
