"""Stages of a pipeline, their settings, tracking and lifecycle, on top of rl_core."""
