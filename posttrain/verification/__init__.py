"""Proof for a user's own pipeline: runs that are killed and restarted publish the same bytes as one in one piece."""
