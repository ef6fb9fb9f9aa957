"""Memory, work and time of training and rollouts, from settings and a model's config alone: nothing is loaded."""
