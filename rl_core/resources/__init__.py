"""Memory, work and time of training and rollouts, estimated from settings and a model's config without its weights."""
