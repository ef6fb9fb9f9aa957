"""Networks for plain observations: PPO on Gymnasium's vectorised environments, with the common training loop."""
