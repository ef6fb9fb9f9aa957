"""Trainers: one loop, one optimizer step, and one file for each way of learning."""
