"""Stages of a pipeline, one file each."""
