"""Curriculum: stages of level mixes, exit conditions, rollback, and snapshots of stage entries."""
