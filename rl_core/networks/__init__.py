"""Networks for plain observations: PPO on Gymnasium's vectorised environments, through the one training loop."""
