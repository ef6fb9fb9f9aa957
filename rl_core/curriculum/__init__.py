"""Curriculum: which levels the policy practises, and when it moves on."""
