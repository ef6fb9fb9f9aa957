"""Policy gradients (PPO, GRPO and its variants, REINFORCE): trainer, rollout buffer, advantages, losses, update."""
