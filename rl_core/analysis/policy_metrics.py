"""Metrics of the policy and what helps it learn: policy, value function, thoughts.

See `metric_reference`.
"""

from __future__ import annotations

from rl_core.analysis.metric_rows import Metric, MetricGroup

__all__ = ["POLICY", "THOUGHTS", "VALUE"]

# One row a metric, so the formatter leaves the table alone.
# fmt: off

POLICY = MetricGroup(
    "Policy: `policy/`",
    "Of the policy's update, per loss token that was run unless a unit says otherwise; nats throughout. Metrics of a "
    "loss of yours (`loss`) are named `policy/NAME`.",
    (
        Metric("policy/loss", "loss", "Policy-gradient term alone."),
        Metric("policy/entropy", "nats/token", "Mean entropy of the token distribution.",
               "Falls to near 0 early: exploration is over; raise `entropy_coef`, `clip_eps_high`, or lower the "
               "rate."),
        Metric("policy/router_aux_loss", "-", "Load-balancing loss of a mixture's routers (`router_aux_loss_coef`)."),
        Metric("policy/entropy_coef", "-", "Weight of the entropy bonus."),
        Metric("policy/update_kl", "nats/token",
               "KL(old || current) of the update, k3 estimator. Exactly 0 with one step per rollout, since then old "
               "and current are the same.", "Grows over iterations: steps are too large; use `kl_max`."),
        Metric("policy/update_kl_k1", "nats/token", "The same with the k1 estimator; may be negative."),
        Metric("policy/update_kl_exact", "nats/token",
               "The same over the whole vocabulary (`trust_region_kl: exact`); 0 in the first step on a rollout."),
        Metric("policy/kl_after_max", "nats/token",
               "KL(old || policy) measured after the step, its maximum (`kl_max`)."),
        Metric("policy/refused_steps", "0 or 1", "1 if a step exceeded `kl_max` and was rolled back.",
               "1 in many iterations: lower the learning rate."),
        Metric("policy/ref_kl", "nats/token", "KL to the reference, the stage's starting model.",
               "Grows steadily: the policy leaves the region where a learned reward is valid; raise `kl_coef`."),
        Metric("policy/teacher_kl", "nats/token",
               "`distill`: KL(policy || teacher) on the policy's own rollouts, before the update (k1).",
               "Does not fall: a higher learning rate, or a teacher that is nearer."),
        Metric("policy/kl_coef", "-", "Weight of that KL, as the controller has it."),
        Metric("policy/clip_fraction", "share",
               "Tokens (sequences for `gspo`) whose gradient the clip takes away; for `cispo`, weights that were "
               "cut.", "Large: too many or too large steps on the same rollouts."),
        Metric("policy/clip_fraction_low", "share", "Of these, clipped at the lower bound (advantage below 0)."),
        Metric("policy/clip_fraction_high", "share", "Of these, clipped at the upper bound (advantage above 0)."),
        Metric("policy/clip_fraction_dual", "share",
               "Of these, capped by `dual_clip` (advantage below 0); only where that is set."),
        Metric("policy/gate_mean", "-",
               "`sapo`: mean weight that the soft gate leaves a token's gradient; 1 at ratio 1.",
               "Far below 1: too many or too large steps on the same rollouts."),
        Metric("policy/action_std", "-", "Mean deviation of continuous actions (network).",
               "Falls to 0 early: raise `entropy_coef`. Grows without bound: lower it."),
        Metric("policy/ratio_mean", "-", "Mean probability ratio current over old.", "Far from 1."),
        Metric("policy/ratio_max", "-", "Largest ratio of a token (sequence).",
               "Far above the clip: single tokens have moved a long way."),
        Metric("policy/sampler_kl", "nats/token",
               "KL(sampler || old): mismatch of rollout engine and trainer, or stale rollouts.",
               "Above rounding with fresh rollouts in float32: a bug; in bfloat16 or stale: set `importance`."),
        Metric("policy/sampler_difference_max", "nats",
               "Largest difference of a log-prob between sampler and trainer.",
               "Above 1e-4 in float32 with fresh rollouts."),
        Metric("policy/server_difference", "nats",
               "Largest difference of a token's log-prob between the inference server and the trainer's forward pass, "
               "on fixed prompts, at the newest weights (`rollouts.workers: server`).",
               "Beyond the bound the run ends."),
        Metric("policy/numerics_difference", "nats",
               "Largest difference of a token's log-prob between sampler and trainer on fixed prompts, after an update "
               "(`numerics`).", "Above 1e-4 in float32: it is on its way to `numerics.bound`."),
        Metric("policy/numerics_rollbacks", "count",
               "Rollbacks since the beginning, as sampler and trainer differed (`numerics.action: rollback`).",
               "Above 0: look at `policy/numerics_difference`."),
        Metric("policy/importance_mean", "-", "Mean truncated importance weight, 0 where dropped; V-trace: of rho."),
        Metric("policy/importance_dropped", "share",
               "Loss tokens without policy gradient, since they, or their sequence, left the interval of "
               "`importance_mask`.", "Large: the interval is narrow, or rollouts are too old."),
        Metric("policy/staleness_mean", "versions",
               "Weight updates between the sampling of a token and the update that learns from it, mean over sampled "
               "tokens (`rollouts.max_staleness` above 0)."),
        Metric("policy/staleness_max", "versions", "The largest of them; never above `rollouts.max_staleness`."),
        Metric("policy/effective_sample_share", "share",
               "Effective sample size of those weights over loss tokens (Kish).",
               "Falls: rollouts are too old for the present policy."),
        Metric("policy/mean_logprob", "nats/token", "Mean log-prob of the sampled tokens under the sampler."),
    ),
)

VALUE = MetricGroup(
    "Critic: `value/`",
    "With a critic (`ppo`, or `reinforce` with `critic`).",
    (
        Metric("value/loss", "squared reward", "Half the squared error of the values."),
        Metric("value/clip_fraction", "share", "Tokens whose gradient the value clip takes away."),
        Metric("value/explained_variance", "-", "Share of the variance of returns that the values explain.",
               "Below 0 after warm-up: the critic harms; near 0: it adds nothing over the batch mean."),
        Metric("value/returns_mean", "reward", "Mean return at loss tokens."),
        Metric("value/values_mean", "reward", "Mean value at loss tokens.",
               "Far from `value/returns_mean` for long."),
        Metric("value/grad_norm", "-", "Gradient norm of a separate critic."),
        Metric("value/skipped_steps", "steps", "Its optimizer steps skipped for non-finite numbers."),
    ),
)

THOUGHTS = MetricGroup(
    "Thoughts: `thoughts/`",
    "Of the stage `thoughts`; the last three rows are its final test, gain and drop also with `_low` and `_high` "
    "(bootstrap 95%).",
    (
        Metric("thoughts/gain", "nats", "Gain of the own thought per answered turn, within +-`gain_clip`.",
               "Not above 0: thoughts do not help."),
        Metric("thoughts/logprob", "nats", "Log-probability of the right answer after the thought."),
        Metric("thoughts/logprob_without", "nats", "The same without the thought.",
               "Near 0: the question needs no thought, so there is no gain to learn from."),
        Metric("thoughts/rate", "share", "Turns with a thought."),
        Metric("thoughts/tokens", "tokens", "Thought tokens per turn."),
        Metric("thoughts/unanswered_rate", "share", "Turns without a readable answer.",
               "Large: raise `max_thought_tokens`, or teach the form by SFT."),
        Metric("thoughts/coherence", "cosine",
               "Cosine of the mean last hidden states of consecutive thoughts of an episode.",
               "Near 1: every thought is alike, whatever the question."),
        Metric("thoughts/repetition", "share",
               "Thoughts that stand token by token in an earlier turn of the episode, of those that follow another."),
        Metric("thoughts/check_genuine", "0 or 1",
               "Verdict of a test while training (`check_every_episodes`), on the validation's episodes.",
               "The same episodes are looked at again and again: a curve to read, no proof."),
        Metric("thoughts/check_gain_{condition}", "nats", "Gain in that test; `_low` and `_high` bound it."),
        Metric("thoughts/check_drop_{control}", "nats", "Own gain minus that of the control, in that test."),
        Metric("thoughts/genuine", "0 or 1", "1 if the gain is real and depends on the content of the thoughts.",
               "0: the stage fails unless `require_genuine` is off."),
        Metric("thoughts/gain_{condition}", "nats",
               "Mean gain with the own thoughts (`own`) and with each control (`shuffled`, `filler`, `truncated`)."),
        Metric("thoughts/p_{condition}", "-",
               "One-sided exact tests: `own` of its gain above 0, a control of own gain above the control's.",
               "Above 0.025: not genuine."),
        Metric("thoughts/drop_{control}", "nats", "Own gain minus that of the control, paired by episode.",
               "Interval includes 0: the content of the thoughts does not matter."),
    ),
)
# fmt: on
