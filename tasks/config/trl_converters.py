"""Rules that convert values of TRL's settings to ours where they differ (names: rl_core/settings/trl_aliases.csv)."""

from __future__ import annotations

import math
from typing import Any

from tasks.config.conversion_rules import (
    LR_SCHEDULES,
    ConversionRule,
    ConvertedValues,
    FrameworkValues,
    build_sampling_rule,
    build_sinks_rule,
    build_value_rule,
    convert_checkpoint_limit,
    sanitize_pipeline_name,
)

# The framework's defaults that differ from ours, for settings that a file leaves out.
TRL_DEFAULTS: dict[str, dict[str, Any]] = {
    "": {"lr_scheduler_type": "linear", "warmup_steps": 0, "adam_beta1": 0.9, "adam_beta2": 0.999},
    "GRPO": {
        "learning_rate": 1e-6,
        "num_generations": 8,
        "max_completion_length": 512,
        "loss_type": "dapo",
        "beta": 0.0,
    },
    "RLOO": {
        "learning_rate": 1e-6,
        "num_generations": 2,
        "max_completion_length": 512,
        "beta": 0.05,
    },
    "Distillation": {"learning_rate": 1e-6, "max_completion_length": 512},
    "SFT": {"learning_rate": 2e-5, "num_train_epochs": 3.0, "per_device_train_batch_size": 8},
    "DPO": {
        "learning_rate": 1e-6,
        "num_train_epochs": 3.0,
        "loss_type": "sigmoid",
        "per_device_train_batch_size": 8,
    },
    "KTO": {
        "learning_rate": 1e-6,
        "num_train_epochs": 3.0,
        "loss_type": "kto",
        "per_device_train_batch_size": 8,
    },
    "Reward": {
        "learning_rate": 1e-4,
        "num_train_epochs": 3.0,
        "per_device_train_batch_size": 8,
        "center_rewards_coefficient": 0.0,
    },
}


def _convert_batch_size(values: FrameworkValues) -> ConvertedValues:
    device_batch = values.read_number("per_device_train_batch_size", 8)
    accumulation = values.read_number("gradient_accumulation_steps", 1)
    batch_size = int(device_batch * accumulation)
    if not values.is_policy:
        return {f"{values.stage}.batch_size": batch_size}
    steps = values.read_number("steps_per_generation", accumulation)
    num_rollouts = values.get("generation_batch_size") or device_batch * steps
    group_size = values.read_number("num_generations", 1)
    if num_rollouts % group_size or num_rollouts % batch_size:
        return None
    return {
        f"{values.stage}.prompts_per_iteration": int(num_rollouts // group_size),
        f"{values.stage}.minibatches": int(num_rollouts // batch_size),
    }


def _convert_max_steps(values: FrameworkValues) -> ConvertedValues:
    steps = values.read_number("max_steps", -1)
    if steps < 1:
        return {}
    if not values.is_policy:
        return {f"{values.stage}.max_steps": int(steps)}
    batch = _convert_batch_size(values) or {}
    minibatches = batch.get(f"{values.stage}.minibatches", 1)
    steps_per_iteration = minibatches * values.read_number("num_iterations", 1)
    return {f"{values.stage}.iterations": math.ceil(steps / steps_per_iteration)}


def _convert_warmup(values: FrameworkValues) -> ConvertedValues:
    share = values.read_number("warmup_ratio", 0.0) or values.read_number("warmup_steps", 0)
    if 0 < share < 1:
        steps = values.read_number("max_steps", -1)
        return {f"{values.stage}.warmup_steps": math.ceil(share * steps)} if steps > 0 else None
    return {f"{values.stage}.warmup_steps": int(share)}


def _convert_schedule(values: FrameworkValues) -> ConvertedValues:
    kind = LR_SCHEDULES.get(str(values["lr_scheduler_type"]))
    if kind is None:
        return None
    settings: dict[str, Any] = {f"{values.stage}.schedule": kind}
    if kind != "constant":
        settings[f"{values.stage}.min_lr_ratio"] = 0.0
    return settings


def _convert_algorithm(values: FrameworkValues) -> ConvertedValues:
    """Convert TRL's loss_type, importance_sampling_level and scale_rewards, which are one choice here."""
    loss, scale = values.get("loss_type", "dapo"), values.get("scale_rewards", "group")
    is_unscaled = scale in ("none", False)
    settings: dict[str, Any] = {}
    if values.get("importance_sampling_level") == "sequence":
        settings["algorithm"] = "gspo"
    elif loss in ("cispo", "sapo"):
        settings["algorithm"] = loss
    elif loss in ("dapo", "bnpo", "grpo", "dr_grpo"):
        settings["algorithm"] = "dr_grpo" if is_unscaled else "grpo"
        aggregations = {"grpo": "sequence_mean", "dr_grpo": "constant"}
        settings["loss_aggregation"] = aggregations.get(loss, "token_mean")
    if values.get("multi_objective_aggregation") == "normalize_then_sum":
        if settings.get("algorithm") != "grpo":
            return None
        settings["algorithm"] = "gdpo"
    if not settings or (is_unscaled and "loss_aggregation" not in settings) or scale == "batch":
        return None
    return {f"{values.stage}.{name}": value for name, value in settings.items()}


def _convert_epsilon_high(values: FrameworkValues) -> ConvertedValues:
    value = values["epsilon_high"]
    if values.get("loss_type") == "cispo":
        value -= 1
    return {f"{values.stage}.clip_eps_high": value}


# Settings of adapters with the same meaning.
_LORA_NAMES = {
    "lora_dropout": "dropout",
    "lora_modules_to_save": "modules_to_save",
    "use_rslora": "rank_stabilized",
    "use_dora": "dora",
}


def _convert_lora(values: FrameworkValues) -> ConvertedValues:
    if not values.get("use_peft", "lora_r" in values):
        return {}
    settings: dict[str, Any] = {
        "rank": values.get("lora_r", 16),
        "alpha": values.get("lora_alpha", 32),
    }
    if isinstance(modules := values.get("lora_target_modules"), list) or modules == "all-linear":
        settings["target_modules"] = modules
    for trl_name, our_name in _LORA_NAMES.items():
        if values.get(trl_name):
            settings[our_name] = values[trl_name]
    if values.get("load_in_4bit") or values.get("load_in_8bit"):
        settings["quantize"] = "nf4" if values.get("load_in_4bit") else "int8"
    return {f"model.lora.{name}": value for name, value in settings.items()}


def _convert_pair_loss(values: FrameworkValues) -> ConvertedValues:
    value = values["loss_type"]
    value = value[0] if isinstance(value, list) and len(value) == 1 else value
    kind = {"sigmoid": "dpo", "ipo": "ipo", "kto": "kto"}.get(str(value))
    return None if kind is None else {f"{values.stage}.loss": kind}


def _convert_dataset_file(values: FrameworkValues) -> ConvertedValues:
    path = str(values["dataset_name"])
    if not path.endswith((".jsonl", ".parquet", ".csv")):
        return None
    if values.is_policy:
        return {"environment.name": "prompts", "environment.options": {"path": path}}
    kind = "demonstrations" if values.stage == "stages.sft" else "preferences"
    return {f"stages.prepare_data.{kind}": path}


def _convert_max_length(values: FrameworkValues) -> ConvertedValues:
    """Convert the limit of tokens. TRL cuts longer rows but leaves out pairs of the reward model; null = context."""
    if values["max_length"] is None:
        return {}
    if values.get("truncation_mode", "keep_start") != "keep_start":
        return None
    long_rows = "drop" if values.trainer == "Reward" else "cut"
    data = "stages.prepare_data"
    return {f"{data}.max_tokens": int(values["max_length"]), f"{data}.long_rows": long_rows}


def _convert_rewards(values: FrameworkValues) -> ConvertedValues:
    names, weights = values.get("reward_funcs"), values.get("reward_weights")
    if not isinstance(names, list) or not all("." in str(name) for name in names):
        return None
    pairs = zip(names, weights or [1.0] * len(names), strict=False)
    rewards = {":".join(str(name).rsplit(".", 1)): float(weight) for name, weight in pairs}
    return {f"{values.stage}.rewards": rewards}


def _convert_count(value: Any) -> Any:
    """Return a count of at least 1; a share of all steps has no equivalent."""
    return int(value) if isinstance(value, int | float) and value >= 1 else None


def _convert_dtype(value: Any) -> Any:
    name = str(value).removeprefix("torch.")
    return name if name in ("float32", "bfloat16", "float16") else None


def _convert_betas(values: FrameworkValues) -> ConvertedValues:
    betas = [values.read_number("adam_beta1", 0.9), values.read_number("adam_beta2", 0.999)]
    return {f"{values.stage}.betas": betas}


def _convert_optimizer(value: Any) -> Any:
    return next((name for name in ("adamw", "muon") if name in str(value)), None)


def _convert_loss_type(values: FrameworkValues) -> ConvertedValues:
    if values.is_policy:
        return _convert_algorithm(values)
    return _convert_pair_loss(values) if values.stage == "stages.preference" else None


def _convert_reward_clip(values: FrameworkValues) -> ConvertedValues:
    limits = values["reward_clip_range"]
    if not isinstance(limits, list) or limits[0] != -limits[1]:
        return None
    return {f"{values.stage}.reward_options.clip": limits[1]}


def _convert_beta(values: FrameworkValues) -> ConvertedValues:
    """Convert the KL to the reference: its coefficient in on-policy trainers, the loss's beta on pairs."""
    if values.trainer == "Distillation":
        return None
    if not values.is_policy:
        return {f"{values.stage}.beta": values["beta"]}
    settings = {f"{values.stage}.kl_coef": values["beta"]}
    if values.trainer == "RLOO" and values["beta"]:
        settings[f"{values.stage}.kl_in"] = "reward"
    return settings


def _convert_eval_strategy(values: FrameworkValues) -> ConvertedValues:
    if values["eval_strategy"] == "no":
        return {f"{values.stage}.eval_every": 0}
    return {} if values["eval_strategy"] == "steps" and "eval_steps" in values else None


def _convert_save_strategy(values: FrameworkValues) -> ConvertedValues:
    if values["save_strategy"] == "no":
        return {f"{values.stage}.checkpoint_every": 0}
    return {} if values["save_strategy"] == "steps" else None


TRL_RULES: dict[str, ConversionRule] = {
    **dict.fromkeys(
        (
            "per_device_train_batch_size",
            "gradient_accumulation_steps",
            "generation_batch_size",
            "steps_per_generation",
        ),
        _convert_batch_size,
    ),
    "max_steps": _convert_max_steps,
    "warmup_steps": _convert_warmup,
    "warmup_ratio": _convert_warmup,
    "lr_scheduler_type": _convert_schedule,
    "adam_beta1": _convert_betas,
    "adam_beta2": _convert_betas,
    "optim": build_value_rule("STAGE.optimizer", "optim", _convert_optimizer),
    "bf16": build_value_rule("STAGE.autocast", "bf16", {True: "bfloat16", False: "none"}.get),
    "use_cpu": build_value_rule("model.device", "use_cpu", {True: "cpu", False: "auto"}.get),
    "run_name": build_value_rule("name", "run_name", sanitize_pipeline_name),
    "report_to": build_sinks_rule("report_to"),
    "project": build_value_rule("tracking.experiment", "project", str),
    "eval_steps": build_value_rule("STAGE.eval_every", "eval_steps", _convert_count),
    "eval_strategy": _convert_eval_strategy,
    "save_steps": build_value_rule("STAGE.checkpoint_every", "save_steps", _convert_count),
    "save_strategy": _convert_save_strategy,
    "save_total_limit": build_value_rule(
        "STAGE.keep_checkpoints", "save_total_limit", convert_checkpoint_limit
    ),
    "dtype": build_value_rule("model.dtype", "dtype", _convert_dtype),
    "torch_dtype": build_value_rule("model.dtype", "torch_dtype", _convert_dtype),
    "disable_dropout": build_value_rule(
        "STAGE.dropout", "disable_dropout", {True: False, False: True}.get
    ),
    **dict.fromkeys(
        (
            "use_peft",
            "lora_r",
            "lora_alpha",
            "lora_target_modules",
            "load_in_4bit",
            "load_in_8bit",
            *_LORA_NAMES,
        ),
        _convert_lora,
    ),
    "dataset_name": _convert_dataset_file,
    "max_length": _convert_max_length,
    "truncation_mode": lambda values: {} if values["truncation_mode"] == "keep_start" else None,
    "epsilon_high": _convert_epsilon_high,
    "importance_sampling_level": _convert_algorithm,
    "multi_objective_aggregation": _convert_algorithm,
    "scale_rewards": _convert_algorithm,
    "loss_type": _convert_loss_type,
    "reward_clip_range": _convert_reward_clip,
    "reward_funcs": _convert_rewards,
    "reward_weights": _convert_rewards,
    "top_p": build_sampling_rule("top_p", (1, None)),
    "top_k": build_sampling_rule("top_k", (0, -1, None)),
    "min_p": build_sampling_rule("min_p", (0, None)),
    "repetition_penalty": build_sampling_rule("repetition_penalty", (1, None)),
    "max_tool_calling_iterations": build_value_rule(
        "STAGE.sampling.max_turns", "max_tool_calling_iterations", lambda value: int(value) + 1
    ),
    "beta": _convert_beta,
}
