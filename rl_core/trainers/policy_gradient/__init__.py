"""Policy gradients: PPO, GRPO and its variants, REINFORCE; the algorithm is a setting.

Read the modules in this order: `trainer` (one iteration), `samples` (rollouts to train on, dynamic sampling, replay),
`rollout_buffer` (log-probs and values), `advantages`, `turn_credit` (advantages by turn), `losses`, `update` (optimizer
steps). `custom_functions` loads the user's loss and advantage estimator; `numerics_gate` compares sampler and trainer.
Distillation: `self_distillation`, `cross_vocabulary` (a teacher with other tokens), `teacher_divergence`.
"""
