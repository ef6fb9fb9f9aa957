"""Trainers: one loop, one updater, and one file for each way of learning."""
