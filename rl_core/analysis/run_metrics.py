"""Metrics of a run beside its learning: time and memory, the machine, data, the pipeline.

See `metric_reference`.
"""

from __future__ import annotations

from rl_core.analysis.metric_rows import Metric, MetricGroup

__all__ = ["DATA", "PERF", "PIPELINE", "RUN", "SYSTEM"]

# One row a metric, so the formatter leaves the table alone.
# fmt: off

PERF = MetricGroup(
    "Performance: `perf/`",
    "Seconds of one iteration. `environment` lies within `rollout`, `states` within `reward`, and `reference`, "
    "`measure` and `optimizer` within `update`; the others add up to the iteration. `posttrain profile` prints them "
    "as a table.",
    (
        Metric("perf/step_seconds", "s", "The whole iteration."),
        Metric("perf/rollout_seconds", "s", "Playing the rollouts."),
        Metric("perf/environment_seconds", "s", "Waiting for the environment's steps.",
               "Most of `perf/rollout_seconds`: raise `max_concurrent_steps`, or `rejoin: ready`."),
        Metric("perf/numerics_seconds", "s", "Comparison of sampler and trainer after an update (`numerics`)."),
        Metric("perf/weight_sync_seconds", "s", "Sending weights to rollout workers, and verifying them (`rollouts`)."),
        Metric("perf/rollout_workers", "processes", "Rollout workers that play."),
        Metric("perf/weight_bytes", "bytes", "Weights sent by the newest transfer: changed tensors alone."),
        Metric("perf/lost_workers", "processes", "Rollout workers lost since the start, each replaced by another.",
               "It grows: look at the memory of their machine, and at what the environment does."),
        Metric("perf/late_workers", "processes", "Rollout workers whose task another one has played meanwhile.",
               "Often above 0: their machine is slower than the others."),
        Metric("perf/replayed_groups", "groups", "Groups played again since the start because their worker was lost."),
        Metric("perf/stale_groups", "groups",
               "Groups played again since the start because they were older than `rollouts.max_staleness`.",
               "It grows with every iteration: raise `max_staleness`, or play more (`count`)."),
        Metric("perf/dropped_rollouts", "rollouts",
               "Rollouts begun anew since the start because new weights arrived (`rollouts.partial: drop`)."),
        Metric("perf/queued_groups", "groups", "Groups that are played or wait to be learned from."),
        Metric("perf/server_recoveries", "times",
               "Losses of the inference server since the start, each waited for (`rollouts.server.patience_s`).",
               "It grows: look at the server's log."),
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
        Metric("perf/check_seconds", "s", "One test of the thoughts during training (`check_every_episodes`)."),
        Metric("perf/environment_steps_per_second", "steps/s", "Environment steps per second (network)."),
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
        Metric("perf/forward_backward_seconds", "s",
               "Training service: the passes behind an update, those of other runs beside them included."),
        Metric("perf/optim_step_seconds", "s", "Training service: the update."),
        Metric("perf/queue_depth", "requests", "Training service: requests that wait, or are computed."),
        Metric("perf/memory_gb", "GB",
               "Peak memory so far: resident memory of the process on a CPU, allocated by torch on a GPU.",
               "Grows over iterations."),
        Metric("perf/out_of_memory", "times",
               "Times that memory ran out in the iteration (at step 0: in the stage outside of training), and a batch "
               "or the slots of the rollout engine were halved; absent where it did not.",
               "In every iteration: lower micro_batch_tokens or sampling.slots to what the log says."),
        Metric("perf/eval_out_of_memory", "times", "The same of one evaluation during training."),
    ),
)

SYSTEM = MetricGroup(
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

DATA = MetricGroup(
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

RUN = MetricGroup(
    "State of a run: `run/`",
    "Only where the newest values are kept, in Prometheus and Datadog (`tracking.sinks`).",
    (
        Metric("run/active", "0 or 1", "1 while the run is under way.", "1 for long while `run/step` stands still."),
        Metric("run/step", "steps", "Step of the newest metrics."),
        Metric("run/progress", "share", "Part of the run that is done, where it is known."),
    ),
)

PIPELINE = MetricGroup(
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
# fmt: on
