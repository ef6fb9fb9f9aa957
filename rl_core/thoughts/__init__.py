"""Thoughts before answers (REINFORCE on their gain): episodes, controls, trainer, verdict."""
