"""Registered games, as in the package."""
