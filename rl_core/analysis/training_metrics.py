"""Rows and groups of the metric reference.

Metrics of training: the optimizer step, rewards, the curriculum, tools.

See `metric_reference`.

Metrics of the policy and what helps it learn: policy, value function, thoughts.

See `metric_reference`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MetricDescription:
    """One metric. `worry` is empty where no value by itself is a bad sign."""

    name: str
    unit: str
    meaning: str
    worry: str = ""


@dataclass(frozen=True, slots=True)
class MetricGroup:
    """Metrics under one heading."""

    title: str
    about: str
    metrics: tuple[MetricDescription, ...]


# One row a metric, so the formatter leaves the table alone.
# fmt: off

TRAINING_METRICS = MetricGroup(
    "Training: `train/`",
    "Logged at every iteration, except where a trainer is named. Means of several optimizer steps are plain means; "
    "names ending in `_max` are maxima.",
    (
        MetricDescription("train/loss", "loss",
               "The total loss of the optimizer step, all terms included (nats per token in SFT).",
               "SFT: rises or stays flat. Policy gradients: its level says nothing; watch success and KL instead."),
        MetricDescription("train/nll", "nats/token", "The loss of SFT without its router term (`router_aux_loss_coef`)."),
        MetricDescription("train/router_aux_loss", "-",
               "Load-balancing loss of a mixture's routers in SFT: experts per token where the load is even.",
               "Grows: a few experts take most tokens; raise `router_aux_loss_coef`."),
        MetricDescription("train/grad_norm", "-", "Global gradient norm before clipping at `max_grad_norm`.",
               "Steadily above `max_grad_norm`, or spikes far above its usual level: lower the learning rate."),
        MetricDescription("train/grokfast_grad_norm", "-", "Global norm after the slow gradients of Grokfast were added."),
        MetricDescription("train/learning_rate", "-", "Learning rate of the step, after warm-up and schedule."),
        MetricDescription("train/skipped_steps", "steps",
               "Optimizer steps skipped so far because loss or gradient was not finite.",
               "Grows: numbers overflow. The log names the first non-finite tensor; the run stops after "
               "`max_nonfinite` in a row."),
        MetricDescription("train/nonfinite_metrics", "values", "Logged values so far that were not finite and were left out.",
               "Above 0: read the warning in the log that names them."),
        MetricDescription("train/loss_sum", "loss", "Sum of a loss over the tokens of a request (training service)."),
        MetricDescription("train/sequences", "sequences", "Sequences of a request with a token that counts (training service)."),
        MetricDescription("train/tokens", "tokens", "Real tokens of the step (SFT, reward model, preference)."),
        MetricDescription("train/epoch", "epochs", "Passes over the training data so far (SFT, reward model, preference)."),
        MetricDescription("train/success_rate", "share", "Rollouts of the iteration that the environment counts as solved.",
               "0 or 1 for many iterations: groups do not differ and nothing is learned; change the level mix."),
        MetricDescription("train/success_rate_by_level/{level}", "share", "The same for one level.",
               "A level stays at 0 while others rise: it is too hard for the present policy."),
        MetricDescription("train/environment_steps", "steps", "Steps of all environments so far (network)."),
        MetricDescription("train/episodes", "episodes", "Episodes that ended so far (network)."),
        MetricDescription("train/episode_return", "reward", "Mean undiscounted return of the newest 100 episodes (network).",
               "Flat: look at `policy/clip_fraction` and `value/explained_variance`."),
        MetricDescription("train/episode_length", "steps", "Their mean length (network)."),
        MetricDescription("train/step_reward", "reward", "Mean reward of the iteration's steps, not scaled (network)."),
        MetricDescription("train/clipped_action_rate", "share",
               "Numbers of continuous actions outside their bounds, which the environment gets clipped (network).",
               "Near 1: the deviation or the means have left the bounds; scale the actions, or add entropy."),
        MetricDescription("train/replayed_steps", "steps", "Steps of earlier iterations in the update (network, `replay`)."),
        MetricDescription("train/completion_tokens", "tokens", "Tokens after the prompt per rollout, observations included.",
               "Near `sampling.max_completion_tokens`: rollouts are cut."),
        MetricDescription("train/action_tokens", "tokens", "Sampled tokens per rollout.",
               "Grows without success growing: the reward pays for length. Falls to a few: collapse."),
        MetricDescription("train/turns", "turns", "Turns per rollout."),
        MetricDescription("train/loop_rate", "share", "Rollouts with a block of tool steps that is immediately repeated.",
               "Rises while success does not: the policy is stuck."),
        MetricDescription("train/exploration_efficiency", "share",
               "Distinct useful tool steps over all of them, mean over the rollouts that have steps."),
        MetricDescription("train/right_action_rate", "share",
               "Right action, right place (RaPR): useful tool steps and right, grounded answers, over turns."),
        MetricDescription("train/coherent_rate", "share", "Rollouts without a repeated action or an answer that is taken back."),
        MetricDescription("train/action_tokens_p10", "tokens", "Tenth percentile of the sampled tokens per rollout."),
        MetricDescription("train/action_tokens_p90", "tokens", "Their 90th percentile.",
               "At `max_completion_tokens`: many are cut."),
        MetricDescription("train/truncation_rate", "share",
               "Rollouts cut by a limit of tokens, turns or context, or truncated by the environment.",
               "Rises: raise the limits or punish length."),
        MetricDescription("train/failed_rate", "share",
               "Episodes whose environment raised, hung or broke its protocol; they are left out of everything else.",
               "Above 0: `posttrain replay` shows the first; above `sampling.max_failed_share` the stage stops."),
        MetricDescription("train/failed_episodes", "episodes",
               "Episodes since the beginning whose environment failed, or on which a reward function did."),
        MetricDescription("train/advantages_mean", "reward", "Mean advantage before whitening."),
        MetricDescription("train/advantages/{name}", "-", "Metrics of an advantage estimator of yours (`advantages`)."),
        MetricDescription("train/advantages_std", "reward", "Standard deviation of the advantages before whitening.",
               "Near 0: the rewards do not tell rollouts apart."),
        MetricDescription("train/zero_advantage_rate", "share", "Samples (tokens, with a critic) whose advantage is exactly 0.",
               "Near 1: most groups are all right or all wrong; use `dapo`, another level mix, larger "
               "groups."),
        MetricDescription("train/filtering_rate", "share", "Samples left out of the loss by `filter_threshold`.",
               "Near 1: the threshold is too high."),
        MetricDescription("train/dropped_group_rate", "share",
               "Groups played whose rewards were all equal, dropped by dynamic sampling.",
               "Near 1: refills do not help; most of the rollout time is wasted."),
        MetricDescription("train/empty_updates", "steps", "Optimizer steps of the iteration that had no token to learn from.",
               "Above 0 in every iteration: no signal reaches the policy."),
        MetricDescription("train/trained_rollouts", "rollouts",
               "Rows run through the policy in the update (others have advantage 0)."),
        MetricDescription("train/masked_truncated", "rollouts",
               "Rollouts without loss since a limit cut them (`mask_truncated`); replayed ones not counted.",
               "Most of them: raise `max_completion_tokens`."),
        MetricDescription("train/nonfinite_sampler_tokens", "tokens",
               "Sampled tokens without loss, since their sampler gave no finite log-probability; there only if there "
               "are some.", "Any: look at the sampler's precision."),
        MetricDescription("train/replayed_rollouts", "rollouts", "Rows of past iterations in the update (`replay`)."),
        MetricDescription("train/entropy_coef", "-", "Weight of the entropy bonus on thought tokens (thoughts)."),
        MetricDescription("train/baseline_loss", "squared reward",
               "Loss of the value head that the thoughts trainer uses as baseline."),
        MetricDescription("train/explained_variance", "-", "Share of the variance of returns that this baseline explains.",
               "Below 0 for long: the baseline is worse than a constant."),
        MetricDescription("train/value_mean", "reward", "Mean prediction of that baseline."),
        MetricDescription("train/answer_nll", "nats/token", "Negative log-likelihood of the right answers (thoughts)."),
        MetricDescription("train/accuracy", "share",
               "Pairs ranked in the right order; a tie counts half (reward model, preference). `kto`: rows on their "
               "label's side of the reference point.",
               "Near 1 while `eval/accuracy` stays low: it memorises the pairs."),
        MetricDescription("train/margin", "score",
               "Mean difference chosen minus rejected: of scores (reward model) or of implicit rewards (preference).",
               "Grows without bound while `eval/accuracy` does not."),
        MetricDescription("train/ranking_loss", "nats", "Bradley-Terry loss without the centring term (reward model)."),
        MetricDescription("train/tie_gap", "score", "Mean distance of the scores (implicit rewards) of tied pairs.",
               "Grows with the margin: ties are not learned as such."),
        MetricDescription("train/absolute_error", "standard deviations", "Mean absolute error of a regression on scores."),
        MetricDescription("train/reward_mean", "score", "Mean score of both sides of the pairs (reward model)."),
        MetricDescription("train/chosen_reward", "nats",
               "Implicit reward of the chosen side: beta times its log-ratio to the reference (preference); `simpo`, "
               "`orpo`: beta times its mean log-prob; `kto`: of the desirable rows.",
               "Falls below 0: the chosen answers lose probability too; set `sft_coef`."),
        MetricDescription("train/chosen_logprob", "nats", "Summed log-prob of the chosen completions (preference).",
               "Falls steadily: set `sft_coef`."),
        MetricDescription("train/rejected_logprob", "nats", "Summed log-prob of the rejected completions (preference)."),
        MetricDescription("train/reference_kl", "nats/token",
               "k1 estimate of KL(reference || policy) on the pairs' tokens (preference).",
               "Keeps growing: raise `beta` or stop earlier."),
        MetricDescription("train/rejected_reward", "nats", "The same for the rejected side."),
        MetricDescription("train/chosen_nll", "nats/token",
               "Cross-entropy of the chosen completions (preference, `sft_coef` above 0; `orpo`)."),
        MetricDescription("train/log_odds", "nats", "Mean log odds ratio of chosen to rejected (`orpo`)."),
        MetricDescription("train/reference_point", "nats",
               "Mean log-ratio of mismatched completions, at least 0 (`kto`).",
               "Keeps growing: the policy leaves the reference; raise `beta`."),
    ),
)

REWARD_METRICS = MetricGroup(
    "Reward: `reward/`",
    "Over the rollouts of an iteration, masked ones excluded.",
    (
        MetricDescription("reward/mean", "reward", "Mean total reward.",
               "Rises while `train/success_rate` falls: the reward is hacked."),
        MetricDescription("reward/std", "reward", "Standard deviation of the total reward.", "Near 0: nothing to learn from."),
        MetricDescription("reward/{component}", "reward", "Mean of one component before its weight."),
        MetricDescription("reward/weighted/{component}", "reward", "Mean of what that component adds to the total.",
               "Larger than the task's own part: the policy optimises this instead."),
        MetricDescription("reward/mean_100_episodes", "reward", "Thoughts: mean reward of a turn over the last 100 episodes."),
        MetricDescription("reward/overlong", "reward", "Mean length penalty of DAPO (`overlong_buffer`)."),
        MetricDescription("reward/alarm", "0 or 1", "1 while, over a full window, the total reward rises and success falls.",
               "1: look at `reward/correlation/...` and read some trajectories."),
        MetricDescription("reward/correlation/{component}", "-",
               "Point-biserial correlation of one component (and of the `total`) with success over the window.",
               "Below 0: this part works against the task."),
        MetricDescription("reward/masked_rate", "share",
               "Rollouts on which a reward function of yours failed; they carry no loss.",
               "Above 0: `posttrain replay` shows the first; above `max_failed_share` the stage stops."),
        MetricDescription("reward/{component}/skipped", "share", "Rollouts for which a reward function of TRL's gave None."),
        MetricDescription("reward/{component}/cached", "share",
               "Rollouts for which a pure function (`reward_options.cache`) was not called: its value was kept.",
               "Near 0: the cache is of no use, the samples are all new."),
        MetricDescription("reward/{component}/right", "share", "Rollouts with score 1 of a verifier."),
        MetricDescription("reward/{component}/timed_out", "rollouts",
               "Answers that a verifier's or a pattern's limit of time ended; they earn 0.",
               "Many: the limit is too short, or the policy writes what never ends."),
        MetricDescription("reward/{component}/failed", "rollouts",
               "Answers at which a verifier's child process died, or rollouts that the judge did not judge."),
        MetricDescription("reward/judge/asked", "judgements", "Asked of the judge's server, in this iteration."),
        MetricDescription("reward/judge/cached", "judgements", "Found on disk."),
        MetricDescription("reward/task/answered", "share", "Rollouts that gave an answer."),
        MetricDescription("reward/learned/score", "score", "Mean raw score of the reward model."),
        MetricDescription("reward/learned/running_mean", "score", "Running mean that normalises it."),
        MetricDescription("reward/learned/running_std", "score", "Running standard deviation that normalises it."),
        MetricDescription("reward/curiosity/transitions", "transitions", "State transitions scored."),
        MetricDescription("reward/curiosity/scale", "-", "Running size of the prediction error, which it is divided by."),
        MetricDescription("reward/curiosity/error", "-", "Mean prediction error of the forward model.",
               "Does not fall: the forward model cannot learn these states."),
        MetricDescription("reward/coherence/repetitions", "turns", "Repeated actions per rollout."),
        MetricDescription("reward/coherence/contradictions", "turns", "Answers taken back per rollout."),
        MetricDescription("reward/coherence/similarity", "-", "Mean cosine similarity of neighbouring turns."),
        MetricDescription("reward/coherence/in_band", "share", "Neighbouring turns whose similarity lies within the band."),
        MetricDescription("reward/tool_use/misused_turns", "turns", "Turns with tool misuse per rollout."),
        MetricDescription("reward/tool_use/excess_calls", "calls", "Calls beyond `max_calls` per rollout."),
        MetricDescription("reward/tool_use/bonus", "reward", "Bonus for different calls that worked, per rollout."),
        MetricDescription("reward/format/malformed_turns", "turns", "Turns per rollout that could not be read."),
        MetricDescription(
            "reward/format/timed_out",
            "turns",
            "Turns of the iteration that were not matched against `pattern` within a second; they count as malformed.",
        ),
        MetricDescription("reward/format/perfect", "share", "Rollouts without such a turn."),
        MetricDescription("reward/length/tokens", "tokens", "Sampled tokens per rollout."),
        MetricDescription("reward/length/punished", "share", "Rollouts beyond the free length."),
    ),
)

CURRICULUM_METRICS = MetricGroup(
    "Curriculum: `curriculum/`",
    "State of the curriculum after each iteration of the policy stage.",
    (
        MetricDescription("curriculum/stage", "index", "Present stage, from 0."),
        MetricDescription("curriculum/stage_iterations", "iterations", "Iterations spent in it.",
               "Grows without end: the exit conditions are out of reach; set `max_iterations`."),
        MetricDescription("curriculum/moves", "moves", "Moves and rollbacks so far."),
        MetricDescription("curriculum/window_filled", "share", "Filling of the windows that exit conditions need."),
        MetricDescription("curriculum/average/{metric}", "as the metric", "Moving average that an exit condition compares."),
        MetricDescription("curriculum/slope/{metric}", "per iteration", "Slope that an exit condition compares."),
        MetricDescription("curriculum/own/{function}", "-", "Value of a function of yours that an exit condition compares."),
        MetricDescription("curriculum/rollbacks", "rollbacks", "Rollbacks so far.",
               "At `max_rollbacks`: the stage is not learnable as it is; lower the learning rate or mix in easier "
               "levels."),
        MetricDescription("curriculum/below_entry", "iterations",
               "Iterations in a row worse than the reference level by more than the margin."),
        MetricDescription("curriculum/cooldown", "iterations", "Iterations left in which nothing is judged."),
        MetricDescription("curriculum/entry_level", "as the metric", "Reference level of the present stage."),
        MetricDescription("curriculum/watched", "as the metric", "Present moving average that is compared with it."),
    ),
)

TOOL_METRICS = MetricGroup(
    "Tools: `tool/`",
    "Over the rollouts of an iteration.",
    (
        MetricDescription("tool/calls", "calls", "Tool calls per rollout.", "Falls to 0 although tasks need tools."),
        MetricDescription("tool/used_rate", "share", "Rollouts with a tool call.", "Falls to 0 although tasks need tools."),
        MetricDescription("tool/share/{tool}", "share",
               "Share of one tool among all calls, 0 for one that was not called; the 20 most used tools."),
        MetricDescription("tool/misuse_rate", "share",
               "Turns that parse as neither call nor answer, name no tool, or make one fail.",
               "Rises during training."),
        MetricDescription("tool/hung_calls", "calls",
               "Calls of tools, rewards and steps that are past their time limit and still run, in this process.",
               "Above 0: something waits without a timeout of its own; at 32 timed tools answer with an error."),
    ),
)
# fmt: on
# fmt: off


# One row a metric, so the formatter leaves the table alone.

POLICY_METRICS = MetricGroup(
    "Policy: `policy/`",
    "Of the policy's update, per loss token that was run unless a unit says otherwise; nats throughout. Metrics of a "
    "loss of yours (`loss`) are named `policy/NAME`.",
    (
        MetricDescription("policy/loss", "loss", "Policy-gradient term alone."),
        MetricDescription("policy/entropy", "nats/token", "Mean entropy of the token distribution.",
               "Falls to near 0 early: exploration is over; raise `entropy_coef`, `clip_eps_high`, or lower the "
               "rate."),
        MetricDescription("policy/router_aux_loss", "-", "Load-balancing loss of a mixture's routers (`router_aux_loss_coef`)."),
        MetricDescription("policy/entropy_coef", "-", "Weight of the entropy bonus."),
        MetricDescription("policy/update_kl", "nats/token",
               "KL(old || current) of the update, k3 estimator. Exactly 0 with one step per rollout, since then old "
               "and current are the same.", "Grows over iterations: steps are too large; use `kl_max`."),
        MetricDescription("policy/update_kl_k1", "nats/token", "The same with the k1 estimator; may be negative."),
        MetricDescription("policy/update_kl_exact", "nats/token",
               "The same over the whole vocabulary (`trust_region_kl: exact`); 0 in the first step on a rollout."),
        MetricDescription("policy/kl_after_max", "nats/token",
               "KL(old || policy) measured after the step, its maximum (`kl_max`)."),
        MetricDescription("policy/refused_steps", "0 or 1", "1 if a step exceeded `kl_max` and was rolled back.",
               "1 in many iterations: lower the learning rate."),
        MetricDescription("policy/ref_kl", "nats/token", "KL to the reference, the stage's starting model.",
               "Grows steadily: the policy leaves the region where a learned reward is valid; raise `kl_coef`."),
        MetricDescription("policy/teacher_kl", "nats/token",
               "`distill`: KL(policy || teacher) on the policy's own rollouts, before the update (k1).",
               "Does not fall: a higher learning rate, or a teacher that is nearer."),
        MetricDescription("policy/kl_coef", "-", "Weight of that KL, as the controller has it."),
        MetricDescription("policy/clip_fraction", "share",
               "Tokens (sequences for `gspo`) whose gradient the clip takes away; for `cispo`, weights that were "
               "cut.", "Large: too many or too large steps on the same rollouts."),
        MetricDescription("policy/clip_fraction_low", "share", "Of these, clipped at the lower bound (advantage below 0)."),
        MetricDescription("policy/clip_fraction_high", "share", "Of these, clipped at the upper bound (advantage above 0)."),
        MetricDescription("policy/clip_fraction_dual", "share",
               "Of these, capped by `dual_clip` (advantage below 0); only where that is set."),
        MetricDescription("policy/gate_mean", "-",
               "`sapo`: mean weight that the soft gate leaves a token's gradient; 1 at ratio 1.",
               "Far below 1: too many or too large steps on the same rollouts."),
        MetricDescription("policy/action_std", "-", "Mean deviation of continuous actions (network).",
               "Falls to 0 early: raise `entropy_coef`. Grows without bound: lower it."),
        MetricDescription("policy/ratio_mean", "-", "Mean probability ratio current over old.", "Far from 1."),
        MetricDescription("policy/ratio_max", "-", "Largest ratio of a token (sequence).",
               "Far above the clip: single tokens have moved a long way."),
        MetricDescription("policy/sampler_kl", "nats/token",
               "KL(sampler || old): mismatch of rollout engine and trainer, or stale rollouts.",
               "Above rounding with fresh rollouts in float32: a bug; in bfloat16 or stale: set `importance`."),
        MetricDescription("policy/sampler_difference_max", "nats",
               "Largest difference of a log-prob between sampler and trainer.",
               "Above 1e-4 in float32 with fresh rollouts."),
        MetricDescription("policy/server_difference", "nats",
               "Largest difference of a token's log-prob between the inference server and the trainer's forward pass, "
               "on fixed prompts, at the newest weights (`rollouts.workers: server`).",
               "Beyond the bound the run ends."),
        MetricDescription("policy/numerics_difference", "nats",
               "Largest difference of a token's log-prob between sampler and trainer on fixed prompts, after an update "
               "(`numerics`).", "Above 1e-4 in float32: it is on its way to `numerics.bound`."),
        MetricDescription("policy/numerics_rollbacks", "count",
               "Rollbacks since the beginning, as sampler and trainer differed (`numerics.action: rollback`).",
               "Above 0: look at `policy/numerics_difference`."),
        MetricDescription("policy/importance_mean", "-", "Mean truncated importance weight, 0 where dropped; V-trace: of rho."),
        MetricDescription("policy/importance_dropped", "share",
               "Loss tokens without policy gradient, since they, or their sequence, left the interval of "
               "`importance_mask`.", "Large: the interval is narrow, or rollouts are too old."),
        MetricDescription("policy/staleness_mean", "versions",
               "Weight updates between the sampling of a token and the update that learns from it, mean over sampled "
               "tokens (`rollouts.max_staleness` above 0)."),
        MetricDescription("policy/staleness_max", "versions", "The largest of them; never above `rollouts.max_staleness`."),
        MetricDescription("policy/effective_sample_share", "share",
               "Effective sample size of those weights over loss tokens (Kish).",
               "Falls: rollouts are too old for the present policy."),
        MetricDescription("policy/mean_logprob", "nats/token", "Mean log-prob of the sampled tokens under the sampler."),
    ),
)

VALUE_METRICS = MetricGroup(
    "Critic: `value/`",
    "With a critic (`ppo`, or `reinforce` with `critic`).",
    (
        MetricDescription("value/loss", "squared reward", "Half the squared error of the values."),
        MetricDescription("value/clip_fraction", "share", "Tokens whose gradient the value clip takes away."),
        MetricDescription("value/explained_variance", "-", "Share of the variance of returns that the values explain.",
               "Below 0 after warm-up: the critic harms; near 0: it adds nothing over the batch mean."),
        MetricDescription("value/returns_mean", "reward", "Mean return at loss tokens."),
        MetricDescription("value/values_mean", "reward", "Mean value at loss tokens.",
               "Far from `value/returns_mean` for long."),
        MetricDescription("value/grad_norm", "-", "Gradient norm of a separate critic."),
        MetricDescription("value/skipped_steps", "steps", "Its optimizer steps skipped for non-finite numbers."),
    ),
)

THOUGHT_METRICS = MetricGroup(
    "Thoughts: `thoughts/`",
    "Of the stage `thoughts`; the last three rows are its final test, gain and drop also with `_low` and `_high` "
    "(bootstrap 95%).",
    (
        MetricDescription("thoughts/gain", "nats", "Gain of the own thought per answered turn, within +-`gain_clip`.",
               "Not above 0: thoughts do not help."),
        MetricDescription("thoughts/logprob", "nats", "Log-probability of the right answer after the thought."),
        MetricDescription("thoughts/logprob_without", "nats", "The same without the thought.",
               "Near 0: the question needs no thought, so there is no gain to learn from."),
        MetricDescription("thoughts/rate", "share", "Turns with a thought."),
        MetricDescription("thoughts/tokens", "tokens", "Thought tokens per turn."),
        MetricDescription("thoughts/unanswered_rate", "share", "Turns without a readable answer.",
               "Large: raise `max_thought_tokens`, or teach the form by SFT."),
        MetricDescription("thoughts/coherence", "cosine",
               "Cosine of the mean last hidden states of consecutive thoughts of an episode.",
               "Near 1: every thought is alike, whatever the question."),
        MetricDescription("thoughts/repetition", "share",
               "Thoughts that stand token by token in an earlier turn of the episode, of those that follow another."),
        MetricDescription("thoughts/check_genuine", "0 or 1",
               "Verdict of a test while training (`check_every_episodes`), on the validation's episodes.",
               "The same episodes are looked at again and again: a curve to read, no proof."),
        MetricDescription("thoughts/check_gain_{condition}", "nats", "Gain in that test; `_low` and `_high` bound it."),
        MetricDescription("thoughts/check_drop_{control}", "nats", "Own gain minus that of the control, in that test."),
        MetricDescription("thoughts/genuine", "0 or 1", "1 if the gain is real and depends on the content of the thoughts.",
               "0: the stage fails unless `require_genuine` is off."),
        MetricDescription("thoughts/gain_{condition}", "nats",
               "Mean gain with the own thoughts (`own`) and with each control (`shuffled`, `filler`, `truncated`)."),
        MetricDescription("thoughts/p_{condition}", "-",
               "One-sided exact tests: `own` of its gain above 0, a control of own gain above the control's.",
               "Above 0.025: not genuine."),
        MetricDescription("thoughts/drop_{control}", "nats", "Own gain minus that of the control, paired by episode.",
               "Interval includes 0: the content of the thoughts does not matter."),
    ),
)
# fmt: on
