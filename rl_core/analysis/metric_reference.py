"""Every metric that the code logs: name, unit, meaning, and the values that call for action.

The metric reference of the documentation is generated from this table, and a test compares it with the names that
training really logs. A name may hold fields: `{level}` stands for a level of the environment, `{model}` for a model of
the run, `{component}` for a component of the reward (of an import path with `.` for `:`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

__all__ = ["GROUPS", "Metric", "MetricGroup", "find_metric"]


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric. `worry` is empty where no value by itself is a bad sign."""

    name: str
    unit: str
    meaning: str
    worry: str = ""

    def matches(self, name: str) -> bool:
        """True for a logged name that this row describes."""
        parts = re.split(r"(\{\w+\})", self.name)
        patterns = (
            ".+" if part == "{metric}" else "[^/]+" if part.startswith("{") else re.escape(part) for part in parts
        )
        return re.fullmatch("".join(patterns), name) is not None


@dataclass(frozen=True, slots=True)
class MetricGroup:
    """Metrics under one heading."""

    title: str
    about: str
    metrics: tuple[Metric, ...]


def find_metric(name: str) -> Metric | None:
    """The row of a logged name: an exact one first, else the one with the longest text outside its fields."""
    rows = [metric for group in GROUPS for metric in group.metrics if metric.matches(name)]
    return max(rows, key=lambda row: len(re.sub(r"\{\w+\}", "", row.name)), default=None)


# One row a metric, so the formatter leaves the table alone.
# fmt: off

_TRAINING = MetricGroup(
    "Training: `train/`",
    "Logged at every iteration, except where a trainer is named. Means of several optimizer steps are plain means; "
    "names ending in `_max` are maxima.",
    (
        Metric("train/loss", "loss",
               "The total loss of the optimizer step, all terms included (nats per token in SFT).",
               "SFT: rises or stays flat. Policy gradients: its level says nothing; watch success and KL instead."),
        Metric("train/nll", "nats/token", "The loss of SFT without its router term (`router_aux_loss_coef`)."),
        Metric("train/router_aux_loss", "-",
               "Load-balancing loss of a mixture's routers in SFT: experts per token where the load is even.",
               "Grows: a few experts take most tokens; raise `router_aux_loss_coef`."),
        Metric("train/grad_norm", "-", "Global gradient norm before clipping at `max_grad_norm`.",
               "Steadily above `max_grad_norm`, or spikes far above its usual level: lower the learning rate."),
        Metric("train/grokfast_grad_norm", "-", "Global norm after the slow gradients of Grokfast were added."),
        Metric("train/learning_rate", "-", "Learning rate of the step, after warm-up and schedule."),
        Metric("train/skipped_steps", "steps",
               "Optimizer steps skipped so far because loss or gradient was not finite.",
               "Grows: numbers overflow. The log names the first non-finite tensor; the run stops after "
               "`max_nonfinite` in a row."),
        Metric("train/nonfinite_metrics", "values", "Logged values so far that were not finite and were left out.",
               "Above 0: read the warning in the log that names them."),
        Metric("train/tokens", "tokens", "Real tokens of the step (SFT, reward model, preference)."),
        Metric("train/epoch", "epochs", "Passes over the training data so far (SFT, reward model, preference)."),
        Metric("train/success_rate", "share", "Rollouts of the iteration that the environment counts as solved.",
               "0 or 1 for many iterations: groups do not differ and nothing is learned; change the level mix."),
        Metric("train/success_rate_by_level/{level}", "share", "The same for one level.",
               "A level stays at 0 while others rise: it is too hard for the present policy."),
        Metric("train/completion_tokens", "tokens", "Tokens after the prompt per rollout, observations included.",
               "Near `sampling.max_completion_tokens`: rollouts are cut."),
        Metric("train/action_tokens", "tokens", "Sampled tokens per rollout.",
               "Grows without success growing: the reward pays for length. Falls to a few: collapse."),
        Metric("train/turns", "turns", "Turns per rollout."),
        Metric("train/truncation_rate", "share",
               "Rollouts cut by a limit of tokens, turns or context, or truncated by the environment.",
               "Rises: raise the limits or punish length."),
        Metric("train/advantages_mean", "reward", "Mean advantage before whitening."),
        Metric("train/advantages_std", "reward", "Standard deviation of the advantages before whitening.",
               "Near 0: the rewards do not tell rollouts apart."),
        Metric("train/zero_advantage_rate", "share", "Samples (tokens, with a critic) whose advantage is exactly 0.",
               "Near 1: most groups are all right or all wrong; use `dapo`, another level mix, larger "
               "groups."),
        Metric("train/filtering_rate", "share", "Samples left out of the loss by `filter_threshold`.",
               "Near 1: the threshold is too high."),
        Metric("train/dropped_group_rate", "share",
               "Groups played whose rewards were all equal, dropped by dynamic sampling.",
               "Near 1: refills do not help; most of the rollout time is wasted."),
        Metric("train/empty_updates", "steps", "Optimizer steps of the iteration that had no token to learn from.",
               "Above 0 in every iteration: no signal reaches the policy."),
        Metric("train/trained_rollouts", "rollouts",
               "Rows run through the policy in the update (others have advantage 0)."),
        Metric("train/replayed_rollouts", "rollouts", "Rows of past iterations in the update (`replay`)."),
        Metric("train/entropy_coef", "-", "Weight of the entropy bonus on thought tokens (thoughts)."),
        Metric("train/baseline_loss", "squared reward",
               "Loss of the value head that the thoughts trainer uses as baseline."),
        Metric("train/explained_variance", "-", "Share of the variance of returns that this baseline explains.",
               "Below 0 for long: the baseline is worse than a constant."),
        Metric("train/value_mean", "reward", "Mean prediction of that baseline."),
        Metric("train/answer_nll", "nats/token", "Negative log-likelihood of the right answers (thoughts)."),
        Metric("train/accuracy", "share",
               "Pairs ranked in the right order; a tie counts half (reward model, preference). `kto`: rows on their "
               "label's side of the reference point.",
               "Near 1 while `eval/accuracy` stays low: it memorises the pairs."),
        Metric("train/margin", "score",
               "Mean difference chosen minus rejected: of scores (reward model) or of implicit rewards (preference).",
               "Grows without bound while `eval/accuracy` does not."),
        Metric("train/ranking_loss", "nats", "Bradley-Terry loss without the centring term (reward model)."),
        Metric("train/reward_mean", "score", "Mean score of both sides of the pairs (reward model)."),
        Metric("train/chosen_reward", "nats",
               "Implicit reward of the chosen side: beta times its log-ratio to the reference (preference); `simpo`, "
               "`orpo`: beta times its mean log-prob; `kto`: of the desirable rows.",
               "Falls below 0: the chosen answers lose probability too; set `sft_coef`."),
        Metric("train/chosen_logprob", "nats", "Summed log-prob of the chosen completions (preference).",
               "Falls steadily: set `sft_coef`."),
        Metric("train/rejected_logprob", "nats", "Summed log-prob of the rejected completions (preference)."),
        Metric("train/reference_kl", "nats/token",
               "k1 estimate of KL(reference || policy) on the pairs' tokens (preference).",
               "Keeps growing: raise `beta` or stop earlier."),
        Metric("train/rejected_reward", "nats", "The same for the rejected side."),
        Metric("train/chosen_nll", "nats/token",
               "Cross-entropy of the chosen completions (preference, `sft_coef` above 0; `orpo`)."),
        Metric("train/log_odds", "nats", "Mean log odds ratio of chosen to rejected (`orpo`)."),
        Metric("train/reference_point", "nats",
               "Mean log-ratio of mismatched completions, at least 0 (`kto`).",
               "Keeps growing: the policy leaves the reference; raise `beta`."),
    ),
)

_EVALUATION = MetricGroup(
    "Evaluation: `eval/`",
    "On held-out data. Within training at every `eval_every`; in the stage `evaluate` once for each model, with "
    "the model's name after `eval/`. Intervals are Wilson 95%.",
    (
        Metric("eval/loss", "loss", "Held-out loss of the stage (nats per token in SFT).",
               "Rises while `train/loss` falls: overfitting; set `patience`, or fewer epochs."),
        Metric("eval/perplexity", "-", "exp of the held-out loss (SFT)."),
        Metric("eval/accuracy", "share", "Held-out pairs ranked in the right order; a tie counts half.",
               "Not above `eval/longer_answer_accuracy`: the reward model has learned length, or nothing."),
        Metric("eval/accuracy_low", "share", "Lower bound of its 95% interval."),
        Metric("eval/accuracy_high", "share", "Upper bound of its 95% interval."),
        Metric("eval/longer_answer_accuracy", "share",
               "Accuracy of the rule that the longer answer wins, on the same pairs."),
        Metric("eval/margin", "score", "Mean held-out difference chosen minus rejected."),
        Metric("eval/ece", "share", "Expected calibration error of the reward model, ten bins.",
               "Far from 0: its margins overstate, or understate, how often it is right."),
        Metric("eval/chosen_reward", "nats", "Held-out implicit reward of the chosen side (preference)."),
        Metric("eval/rejected_reward", "nats", "The same for the rejected side."),
        Metric("eval/chosen_nll", "nats/token", "Held-out cross-entropy of the chosen completions (preference)."),
        Metric("eval/chosen_logprob", "nats", "Summed held-out log-prob of the chosen completions (preference)."),
        Metric("eval/log_odds", "nats", "Mean held-out log odds ratio of chosen to rejected (`orpo`)."),
        Metric("eval/reference_point", "nats", "Mean held-out log-ratio of mismatched completions (`kto`)."),
        Metric("eval/rejected_logprob", "nats", "The same for the rejected completions."),
        Metric("eval/reference_kl", "nats/token",
               "k1 estimate of KL(reference || policy) on the held-out pairs (preference)."),
        Metric("eval/thought_gain", "nats", "Mean reward of a turn on the held-out episodes (thoughts)."),
        Metric("eval/thought_rate", "share", "Turns with a thought on the held-out episodes (thoughts)."),
        Metric("eval/success_rate", "share", "Success on the validation episodes during training (policy, thoughts).",
               "Falls while `train/success_rate` rises: the policy learns its training episodes or a loophole."),
        Metric("eval/success_rate_low", "share", "Lower bound of its 95% interval."),
        Metric("eval/success_rate_high", "share", "Upper bound of its 95% interval."),
        Metric("eval/success_rate_by_level/{level}", "share", "The same for one level."),
        Metric("eval/success_rate_by_kind/{kind}", "share", "The same for one kind of task."),
        Metric("eval/pass_at_{k}", "share", "Chance that at least one of k samples of an episode succeeds."),
        Metric("eval/episodes", "episodes", "Episodes played."),
        Metric("eval/samples", "rollouts", "Rollouts of each episode."),
        Metric("eval/reward_mean", "reward", "Mean reward of the environment."),
        Metric("eval/turns_mean", "turns", "Turns per episode."),
        Metric("eval/tool_calls_mean", "calls", "Tool calls per episode."),
        Metric("eval/action_tokens_mean", "tokens", "Sampled tokens per episode."),
        Metric("eval/misuse_rate", "share", "Turns that misused a tool."),
        Metric("eval/truncated_rate", "share", "Episodes cut by a limit.",
               "Large: the limits decide the result."),
        Metric("eval/tokens_per_second", "tokens/s", "Sampled tokens per second (`rl_core.evaluate`)."),
        Metric("eval/seconds", "s", "Duration (`rl_core.evaluate`)."),
        Metric("eval/{model}/success_rate", "share", "Success of one model on the held-out episodes, sampled."),
        Metric("eval/{model}/success_rate_low", "share", "Lower bound of its 95% interval."),
        Metric("eval/{model}/success_rate_high", "share", "Upper bound of its 95% interval."),
        Metric("eval/{model}/greedy_success_rate", "share", "Success with greedy decoding."),
        Metric("eval/{model}/success_rate_by_level/{level}", "share", "Success of one level."),
        Metric("eval/{model}/success_rate_by_kind/{kind}", "share", "Success of one kind of task."),
        Metric("eval/{model}/pass_at_{k}", "share",
               "Chance that at least one of k samples succeeds (`samples` above 1)."),
        Metric("eval/{model}/episodes", "episodes", "Episodes played."),
        Metric("eval/{model}/samples", "rollouts", "Rollouts of each episode."),
        Metric("eval/{model}/reward_mean", "reward", "Mean reward of the environment."),
        Metric("eval/{model}/turns_mean", "turns", "Turns per episode."),
        Metric("eval/{model}/tool_calls_mean", "calls", "Tool calls per episode."),
        Metric("eval/{model}/action_tokens_mean", "tokens", "Sampled tokens per episode."),
        Metric("eval/{model}/misuse_rate", "share", "Turns that misused a tool."),
        Metric("eval/{model}/truncated_rate", "share", "Episodes cut by a limit."),
        Metric("eval/{model}/tokens_per_second", "tokens/s", "Sampled tokens per second."),
        Metric("eval/{model}/seconds", "s", "Duration of the evaluation."),
    ),
)

_REWARD = MetricGroup(
    "Reward: `reward/`",
    "Over the rollouts of an iteration, masked ones excluded.",
    (
        Metric("reward/mean", "reward", "Mean total reward.",
               "Rises while `train/success_rate` falls: the reward is hacked."),
        Metric("reward/std", "reward", "Standard deviation of the total reward.", "Near 0: nothing to learn from."),
        Metric("reward/{component}", "reward", "Mean of one component before its weight."),
        Metric("reward/weighted/{component}", "reward", "Mean of what that component adds to the total.",
               "Larger than the task's own part: the policy optimises this instead."),
        Metric("reward/overlong", "reward", "Mean length penalty of DAPO (`overlong_buffer`)."),
        Metric("reward/alarm", "0 or 1", "1 while, over a full window, the total reward rises and success falls.",
               "1: look at `reward/correlation/...` and read some trajectories."),
        Metric("reward/correlation/{component}", "-",
               "Point-biserial correlation of one component (and of the `total`) with success over the window.",
               "Below 0: this part works against the task."),
        Metric("reward/masked_rate", "share",
               "Rollouts that could not be scored and carry no loss (`on_error: mask`).",
               "Above 0: your reward function fails; above `max_masked_rate` the stage stops."),
        Metric("reward/task/answered", "share", "Rollouts that gave an answer."),
        Metric("reward/learned/score", "score", "Mean raw score of the reward model."),
        Metric("reward/learned/running_mean", "score", "Running mean that normalises it."),
        Metric("reward/learned/running_std", "score", "Running standard deviation that normalises it."),
        Metric("reward/curiosity/transitions", "transitions", "State transitions scored."),
        Metric("reward/curiosity/scale", "-", "Running size of the prediction error, which it is divided by."),
        Metric("reward/curiosity/error", "-", "Mean prediction error of the forward model.",
               "Does not fall: the forward model cannot learn these states."),
        Metric("reward/coherence/repetitions", "turns", "Repeated actions per rollout."),
        Metric("reward/coherence/contradictions", "turns", "Answers taken back per rollout."),
        Metric("reward/coherence/similarity", "-", "Mean cosine similarity of neighbouring turns."),
        Metric("reward/coherence/in_band", "share", "Neighbouring turns whose similarity lies within the band."),
        Metric("reward/tool_use/misused_turns", "turns", "Turns with tool misuse per rollout."),
        Metric("reward/tool_use/excess_calls", "calls", "Calls beyond `max_calls` per rollout."),
        Metric("reward/tool_use/bonus", "reward", "Bonus for different calls that worked, per rollout."),
        Metric("reward/format/malformed_turns", "turns", "Turns per rollout that could not be read."),
        Metric(
            "reward/format/timed_out",
            "turns",
            "Turns of the iteration that were not matched against `pattern` within a second; they count as malformed.",
        ),
        Metric("reward/format/perfect", "share", "Rollouts without such a turn."),
        Metric("reward/length/tokens", "tokens", "Sampled tokens per rollout."),
        Metric("reward/length/punished", "share", "Rollouts beyond the free length."),
    ),
)

_POLICY = MetricGroup(
    "Policy: `policy/`",
    "Of the policy's update, per loss token that was run unless a unit says otherwise; nats throughout.",
    (
        Metric("policy/loss", "loss", "Policy-gradient term alone."),
        Metric("policy/entropy", "nats/token", "Mean entropy of the token distribution.",
               "Falls to near 0 early: exploration is over; raise `entropy_coef`, `clip_eps_high`, or lower the "
               "rate."),
        Metric("policy/router_aux_loss", "-", "Load-balancing loss of a mixture's routers (`router_aux_loss_coef`)."),
        Metric("policy/entropy_coef", "-", "Weight of the entropy bonus."),
        Metric("policy/kl", "nats/token",
               "KL(old || current) of the update, k3 estimator. Exactly 0 with one step per rollout, since then old "
               "and current are the same.", "Grows over iterations: steps are too large; use `kl_max`."),
        Metric("policy/kl_k1", "nats/token", "The same with the k1 estimator; may be negative."),
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
        Metric("policy/ratio_mean", "-", "Mean probability ratio current over old.", "Far from 1."),
        Metric("policy/ratio_max", "-", "Largest ratio of a token (sequence).",
               "Far above the clip: single tokens have moved a long way."),
        Metric("policy/sampler_kl", "nats/token",
               "KL(sampler || old): mismatch of rollout engine and trainer, or stale rollouts.",
               "Above rounding with fresh rollouts in float32: a bug; in bfloat16 or stale: set `importance`."),
        Metric("policy/sampler_difference_max", "nats",
               "Largest difference of a log-prob between sampler and trainer.",
               "Above 1e-4 in float32 with fresh rollouts."),
        Metric("policy/importance_mean", "-", "Mean truncated importance weight, 0 where dropped; V-trace: of rho."),
        Metric("policy/importance_dropped", "share",
               "Loss tokens without policy gradient, since they, or their sequence, left the interval of "
               "`importance_mask`.", "Large: the interval is narrow, or rollouts are too old."),
        Metric("policy/effective_sample_share", "share",
               "Effective sample size of those weights over loss tokens (Kish).",
               "Falls: rollouts are too old for the present policy."),
        Metric("policy/mean_logprob", "nats/token", "Mean log-prob of the sampled tokens under the sampler."),
    ),
)

_VALUE = MetricGroup(
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

_CURRICULUM = MetricGroup(
    "Curriculum: `curriculum/`",
    "State of the curriculum after each iteration of the policy stage.",
    (
        Metric("curriculum/stage", "index", "Present stage, from 0."),
        Metric("curriculum/stage_iterations", "iterations", "Iterations spent in it.",
               "Grows without end: the exit conditions are out of reach; set `max_iterations`."),
        Metric("curriculum/moves", "moves", "Moves and rollbacks so far."),
        Metric("curriculum/window_filled", "share", "Filling of the windows that exit conditions need."),
        Metric("curriculum/average/{metric}", "as the metric", "Moving average that an exit condition compares."),
        Metric("curriculum/slope/{metric}", "per iteration", "Slope that an exit condition compares."),
        Metric("curriculum/rollbacks", "rollbacks", "Rollbacks so far.",
               "At `max_rollbacks`: the stage is not learnable as it is; lower the learning rate or mix in easier "
               "levels."),
        Metric("curriculum/below_entry", "iterations",
               "Iterations in a row below the reference level by more than the margin."),
        Metric("curriculum/cooldown", "iterations", "Iterations left in which nothing is judged."),
        Metric("curriculum/entry_level", "as the metric", "Reference level of the present stage."),
        Metric("curriculum/watched", "as the metric", "Present moving average that is compared with it."),
    ),
)

_TOOL = MetricGroup(
    "Tools: `tool/`",
    "Over the rollouts of an iteration.",
    (
        Metric("tool/calls", "calls", "Tool calls per rollout.", "Falls to 0 although tasks need tools."),
        Metric("tool/misuse_rate", "share",
               "Turns that parse as neither call nor answer, name no tool, or make one fail.",
               "Rises during training."),
    ),
)

_THOUGHTS = MetricGroup(
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

_PERF = MetricGroup(
    "Performance: `perf/`",
    "Seconds of one iteration. `environment` lies within `rollout`, `states` within `reward`, and `reference`, "
    "`measure` and `optimizer` within `update`; the others add up to the iteration. `posttrain profile` prints them "
    "as a table.",
    (
        Metric("perf/step_seconds", "s", "The whole iteration."),
        Metric("perf/rollout_seconds", "s", "Playing the rollouts."),
        Metric("perf/environment_seconds", "s", "Waiting for the environment's steps.",
               "Most of `perf/rollout_seconds`: raise `max_concurrent_steps`, or `rejoin: ready`."),
        Metric("perf/reward_seconds", "s", "Computing rewards."),
        Metric("perf/states_seconds", "s", "Forward passes for rewards that look at the policy's states."),
        Metric("perf/update_seconds", "s", "The update, forward passes before it included."),
        Metric("perf/reference_seconds", "s", "Log-probs of the reference model."),
        Metric("perf/teacher_seconds", "s", "Log-probs of the teacher (`distill`)."),
        Metric("perf/measure_seconds", "s", "Old log-probs and values before the update."),
        Metric("perf/optimizer_seconds", "s", "Forward, backward and optimizer steps."),
        Metric("perf/tracking_seconds", "s", "Waiting for the journal of metrics.",
               "More than a few percent of a step."),
        Metric("perf/checkpoint_seconds", "s", "Writing a checkpoint, reported with the iteration after it."),
        Metric("perf/eval_seconds", "s", "One evaluation during training."),
        Metric("perf/tokens_per_second", "tokens/s",
               "Trained tokens (SFT, reward model, preference) or sampled tokens (policy, thoughts) per second of "
               "the iteration."),
        Metric("perf/rollout_tokens_per_second", "tokens/s", "Sampled tokens per second of rollout time."),
        Metric("perf/float_weight_share", "share",
               "Weights that rollouts multiply in float32 because they, or others of their input, are too large for "
               "three digits of 8 bits of their line (CPUs with matrix tiles).",
               "Above a few percent: rollouts are slower; the results are as exact."),
        Metric("perf/update_tflops", "TFLOP/s", "Operations per second of the optimizer steps."),
        Metric("perf/mfu", "share", "The same over the GPU's bfloat16 peak (known GPUs only)."),
        Metric("perf/memory_gb", "GB",
               "Peak memory so far: resident memory of the process on a CPU, allocated by torch on a GPU.",
               "Grows over iterations."),
    ),
)

_SYSTEM = MetricGroup(
    "Machine: `system/`",
    "Sampled every `tracking.system_metrics_seconds`. `{gpu}` is the index of a GPU.",
    (
        Metric("system/cpu_utilization_percentage", "%", "All cores."),
        Metric("system/process_cpu_percentage", "%", "This process; 100 is one core."),
        Metric("system/process_memory_megabytes", "MiB", "Resident memory of the process.", "Grows steadily."),
        Metric("system/system_memory_usage_megabytes", "MiB", "Memory in use on the machine."),
        Metric("system/system_memory_usage_percentage", "%", "The same as a share.",
               "Near 100: the kernel may kill the run."),
        Metric("system/disk_usage_percentage", "%", "Of the output folder's file system.",
               "Near 100: `posttrain gc`."),
        Metric("system/disk_available_megabytes", "MiB", "Free space of that file system."),
        Metric("system/gpu_{gpu}_memory_usage_megabytes", "MiB", "Memory in use on the GPU, by all processes."),
        Metric("system/gpu_{gpu}_memory_usage_percentage", "%", "The same as a share."),
        Metric("system/gpu_{gpu}_memory_reserved_megabytes", "MiB", "Reserved by this process."),
        Metric("system/gpu_{gpu}_utilization_percentage", "%", "Time with a kernel running.",
               "Low: the CPU is the bottleneck."),
        Metric("system/gpu_{gpu}_power_usage_watts", "W", "Power draw."),
    ),
)

_DATA = MetricGroup(
    "Data: `data/`",
    "Logged once by `prepare_data`. `{file}` is `demonstrations` or `preferences`.",
    (
        Metric("data/{file}/num_rows", "rows", "Rows read."),
        Metric("data/{file}/num_train_rows", "rows", "Of these in training."),
        Metric("data/{file}/num_heldout_rows", "rows", "Of these held out."),
        Metric("data/{file}/num_prompts", "prompts", "Different prompts."),
        Metric("data/{file}/num_train_prompts", "prompts", "Of these in training."),
        Metric("data/{file}/num_heldout_prompts", "prompts", "Of these held out."),
        Metric("data/{file}/num_repeated_prompts", "prompts", "Rows beyond the first of their prompt."),
        Metric("data/{file}/num_duplicate_rows", "rows", "Rows beyond the first with the same content.",
               "A large share of the rows."),
        Metric("data/{file}/num_overlap_rows", "rows", "Held-out rows whose prompt is also in training.",
               "Above 0: held-out figures lean to the good side."),
        Metric("data/{file}/num_overlap_prompts", "prompts", "Prompts on both sides of the split.", "Above 0."),
        Metric("data/{file}_file/rows", "rows", "Rows read from files."),
        Metric("data/{file}_file/copies", "rows", "Exact copies of earlier rows; each counts in training."),
        Metric("data/{file}_file/contradictions", "rows",
               "Preferences that an earlier row has the other way round, or completions with both labels.",
               "Above 0: such rows cancel out; the warnings name their lines."),
        Metric("data/{file}_file/skipped", "rows", "Bad rows left out (`on_bad_row: skip`).",
               "Above 0: read the warnings."),
        Metric("data/{file}_tokens", "tokens", "Tokens of all rows that fit."),
        Metric("data/{file}_too_long", "rows", "Rows beyond the model's context, left out.",
               "Above 0: shorten them, or use a model with a longer context."),
        Metric("data/environment/{number}", "as named", "Numbers that the environment reports about its own files."),
        Metric("data/demonstrator_success/{level}", "share", "Right answers of the shipped demonstrator, by level."),
        Metric("data/parameters", "parameters", "Parameters of a model made from a preset."),
    ),
)

_PROMOTION = MetricGroup(
    "Promotion: `promotion/`",
    "Logged once by `promote`; also tags `gate.*` of the model version.",
    (
        Metric("promotion/success_rate", "share", "Success of the challenger."),
        Metric("promotion/champion_success_rate", "share", "Success of the champion on the same episodes."),
        Metric("promotion/gain", "share",
               "Paired difference challenger minus champion, of rewards with `metric: reward`."),
        Metric("promotion/gain_low", "share",
               "Lower bound of its bootstrap interval; promotion needs it above `min_gain`."),
        Metric("promotion/gain_high", "share", "Upper bound of that interval.",
               "Below 0: the challenger is worse for sure."),
        Metric("promotion/p_value", "-", "One-sided exact test that the gain is not above `min_gain`."),
        Metric("promotion/alpha", "-", "Level of this attempt; promotion needs `p_value` at or below it.",
               "Small after many attempts on the same episodes: `repeated_attempts: fresh`, or more episodes."),
        Metric("promotion/alpha_left", "-", "What is left of `alpha` for later attempts on the same episodes."),
        Metric("promotion/attempt", "attempts", "Attempts of this model on the same episodes, this one included."),
        Metric("promotion/episodes", "episodes", "Held-out episodes that both played."),
        Metric("promotion/discordant", "episodes", "Those of them with different outcomes.",
               "Below `min_discordant`: nothing is promoted; play more episodes."),
    ),
)

_ANALYSIS = MetricGroup(
    "Analysis: `analysis/`",
    "Logged once by `analyze`; `{second}_minus_{first}` are paired comparisons on the same episodes.",
    (
        Metric("analysis/{model}/trajectories", "rollouts", "Trajectories read."),
        Metric("analysis/{model}/episodes", "episodes", "Different episodes."),
        Metric("analysis/{model}/success_rate", "share", "Success."),
        Metric("analysis/{model}/success_rate_low", "share", "Lower bound of its 95% interval."),
        Metric("analysis/{model}/success_rate_high", "share", "Upper bound of its 95% interval."),
        Metric("analysis/{model}/success_rate_by_level/{level}", "share", "Success of one level."),
        Metric("analysis/{model}/success_rate_by_kind/{kind}", "share", "Success of one kind of task."),
        Metric("analysis/{model}/pass_at_{k}", "share", "Chance that at least one of k samples succeeds."),
        Metric("analysis/{model}/reward_mean", "reward", "Mean reward."),
        Metric("analysis/{model}/turns_mean", "turns", "Turns per episode."),
        Metric("analysis/{model}/tool_calls_mean", "calls", "Tool calls per episode."),
        Metric("analysis/{model}/action_tokens_mean", "tokens", "Sampled tokens per episode."),
        Metric("analysis/{model}/completion_tokens_mean", "tokens",
               "Tokens after the prompt, observations included."),
        Metric("analysis/{model}/answered_rate", "share", "Episodes with an answer."),
        Metric("analysis/{model}/truncated_rate", "share", "Episodes cut by a limit.",
               "Large: the limits decide the result."),
        Metric("analysis/{model}/looked_rate", "share",
               "Episodes in which a tool showed something before the answer.",
               "Falls while success rises: the policy guesses."),
        Metric("analysis/{model}/misuse_rate", "share", "Turns that misused a tool."),
        Metric("analysis/{model}/trajectories_with_misuse", "share", "Episodes with misuse."),
        Metric("analysis/{model}/loop_rate", "share", "Episodes in which a block of tool steps is repeated at once.",
               "Rises with training."),
        Metric("analysis/{model}/exploration_efficiency", "share", "Different useful observations over steps."),
        Metric("analysis/{model}/coherent_rate", "share",
               "Episodes without a repeated action and without an answer taken back."),
        Metric("analysis/{model}/repetitions_mean", "turns", "Repeated actions per episode."),
        Metric("analysis/{model}/contradictions_mean", "turns", "Answers taken back per episode."),
        Metric("analysis/{model}/coherence", "-",
               "Mean score of the reward component `coherence` in the first model's states."),
        Metric("analysis/{model}/distinct_1", "share", "Different words over all words of the actions."),
        Metric("analysis/{model}/distinct_2", "share", "Different pairs of neighbouring words over all pairs.",
               "Falls steeply from the first model: collapse onto one phrasing."),
        Metric("analysis/{model}/strategy_entropy", "nats", "Entropy of the sequences of tools used."),
        Metric("analysis/{model}/nll_per_token", "nats/token", "Surprise of the model at its own sampled tokens."),
        Metric("analysis/{model}/entropy", "nats/token", "Exact entropy before each sampled token, temperature 1.",
               "Near 0."),
        Metric("analysis/{model}/kl_to_first", "nats/token",
               "Exact KL from the first model, over the model's own episodes."),
        Metric("analysis/{model}/perplexity", "-", "Perplexity of held-out demonstrations.",
               "Much above the first model's: it has forgotten what SFT taught."),
        Metric("analysis/{second}_minus_{first}/success", "share", "Paired difference in success."),
        Metric("analysis/{second}_minus_{first}/success_low", "share", "Lower bound of its bootstrap 95% interval."),
        Metric("analysis/{second}_minus_{first}/success_high", "share", "Upper bound of that interval."),
        Metric("analysis/{second}_minus_{first}/reward", "reward", "Paired difference in reward."),
        Metric("analysis/{second}_minus_{first}/p_value", "-", "Exact sign test of wins against losses."),
        Metric("analysis/{second}_minus_{first}/episodes", "episodes", "Episodes that both played."),
        Metric("analysis/{second}_minus_{first}/wins", "episodes", "Episodes that the second solves more often."),
        Metric("analysis/{second}_minus_{first}/losses", "episodes", "Episodes that the first solves more often."),
        Metric("analysis/reward_model/accuracy", "share",
               "Pairs of a success and a failure at the same episode that its scores put in order.",
               "Near 0.5 on the policy's trajectories: the policy has left its domain."),
        Metric("analysis/reward_model/auc", "share", "Chance that any success outscores any failure."),
        Metric("analysis/reward_model/correlation", "-", "Correlation of the score with success."),
        Metric("analysis/reward_model/ece", "share", "Calibration error on those pairs, up to ten bins."),
        Metric("analysis/reward_model/pairs", "pairs", "Such pairs."),
        Metric("analysis/reward_model/trajectories", "rollouts", "Trajectories scored."),
    ),
)

_PIPELINE = MetricGroup(
    "Pipeline: `pipeline/`",
    "Logged once at the end, in the parent run of the pipeline, for MLflow's table of runs.",
    (
        Metric("pipeline/seconds", "s", "The whole pipeline."),
        Metric("pipeline/tracking_seconds", "s", "Time that stages waited for tracking.", "More than a few percent."),
        Metric("pipeline/tracking_background_seconds", "s", "Work of the shipping threads, beside the stages."),
        Metric("seconds/{stage}", "s", "One stage; left out if its result was reused."),
        Metric("success_rate/{model}", "share", "Success of one model on the held-out episodes."),
        Metric("success_rate/{model}_low", "share", "Lower bound of its 95% interval."),
        Metric("success_rate/{model}_high", "share", "Upper bound of its 95% interval."),
        Metric("reward_model/accuracy", "share", "Held-out accuracy of the reward model."),
    ),
)

GROUPS: tuple[MetricGroup, ...] = (
    _TRAINING, _EVALUATION, _REWARD, _POLICY, _VALUE, _CURRICULUM, _TOOL, _THOUGHTS, _PERF, _SYSTEM, _DATA, _PROMOTION,
    _ANALYSIS, _PIPELINE,
)
# fmt: on
