"""Trainers: SFT, reward model, preference optimisation, policy gradients, and their shared skeletons."""
