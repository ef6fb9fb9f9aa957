"""A pipeline that trains in a second, for sweeps."""

CONFIG = """
name: small
threads: 1
environment: {name: arithmetic}
model: {preset: nano, vocab_size: 320, context: 64}
tracking: {traces: 0, system_metrics_seconds: 0}
stages:
  prepare_data: {num_demonstrations: 60}
  sft: {max_steps: 2, batch_size: 8}
  policy:
    iterations: 4
    prompts_per_iteration: 1
    group_size: 2
    entropy_coef: 0.01  # rewards are equal, and a run must learn something
    sampling: {max_completion_tokens: 4, slots: 4}
    checkpoint_every: 1
  evaluate: {episodes: 6, greedy: false, sampling: {max_completion_tokens: 4, slots: 8}}
  promote: {}
"""
