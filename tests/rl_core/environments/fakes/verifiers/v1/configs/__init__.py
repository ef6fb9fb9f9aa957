"""Configs."""
