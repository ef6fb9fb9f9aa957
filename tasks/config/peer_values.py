"""Values of TRL's settings as ours, where they do not stay as they are (names: rl_core/settings/peer_names).

A rule takes all values of the peer's file and gives (dotted path of ours, value) pairs, none where ours does the same
anyway; None = it cannot be said from these values alone, so the name is left to the reader with its note.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

__all__ = [
    "SCHEDULES",
    "TRL_DEFAULTS",
    "TRL_RULES",
    "Found",
    "Given",
    "chosen",
    "one",
    "pipeline_name",
    "restriction",
    "sinks",
]

Found = dict[str, Any] | None


class Given(dict[str, Any]):
    """Values of a peer's file by name (verl's dotted), TRL's trainer, and the stage that they are for."""

    def __init__(self, values: Mapping[str, Any], stage: str, trainer: str = "") -> None:
        super().__init__(values)
        self.trainer = trainer
        self.stage = f"stages.{stage}"
        self.is_policy = stage == "policy" or stage == "distill"  # those with rollouts

    def number(self, name: str, otherwise: float) -> float:
        """A value that is a number; else `otherwise`."""
        value = self.get(name)
        return value if isinstance(value, int | float) and not isinstance(value, bool) else otherwise


def pipeline_name(text: object) -> str:
    """A name that a pipeline can have: other characters become '-'."""
    return re.sub(r"[^A-Za-z0-9._-]+|\.\.+", "-", str(text)).strip("-._")[:64] or "converted"


# What a file leaves out has the peer's default, where ours is another one.
TRL_DEFAULTS: dict[str, dict[str, Any]] = {
    "": {"lr_scheduler_type": "linear", "warmup_steps": 0, "adam_beta1": 0.9, "adam_beta2": 0.999},
    "GRPO": {
        "learning_rate": 1e-6, "num_generations": 8, "max_completion_length": 512, "loss_type": "dapo", "beta": 0.0,
    },
    "RLOO": {"learning_rate": 1e-6, "num_generations": 2, "max_completion_length": 512, "beta": 0.05},
    "Distillation": {"learning_rate": 1e-6, "max_completion_length": 512},
    "SFT": {"learning_rate": 2e-5, "num_train_epochs": 3.0, "per_device_train_batch_size": 8},
    "DPO": {
        "learning_rate": 1e-6, "num_train_epochs": 3.0, "loss_type": "sigmoid", "per_device_train_batch_size": 8,
    },
    "KTO": {"learning_rate": 1e-6, "num_train_epochs": 3.0, "loss_type": "kto", "per_device_train_batch_size": 8},
    "Reward": {
        "learning_rate": 1e-4, "num_train_epochs": 3.0, "per_device_train_batch_size": 8,
        "center_rewards_coefficient": 0.0,
    },
}  # fmt: skip
SCHEDULES = {"constant": "constant", "constant_with_warmup": "constant", "cosine": "cosine", "linear": "linear"}


# -------------------------------------------------------------------------------------------------------- TRL


def _batch(given: Given) -> Found:
    rows = int(given.number("per_device_train_batch_size", 8) * given.number("gradient_accumulation_steps", 1))
    if not given.is_policy:
        return {f"{given.stage}.batch_size": rows}
    rollouts = given.get("generation_batch_size") or given.number("per_device_train_batch_size", 8) * given.number(
        "steps_per_generation", given.number("gradient_accumulation_steps", 1)
    )
    size = given.number("num_generations", 1)
    if rollouts % size or rollouts % rows:
        return None
    minibatches = int(rollouts // rows)
    return {f"{given.stage}.prompts_per_iteration": int(rollouts // size), f"{given.stage}.minibatches": minibatches}


def _max_steps(given: Given) -> Found:
    steps = given.number("max_steps", -1)
    if steps < 1:
        return {}
    if not given.is_policy:
        return {f"{given.stage}.max_steps": int(steps)}
    parts = (_batch(given) or {}).get(f"{given.stage}.minibatches", 1) * given.number("num_iterations", 1)
    return {f"{given.stage}.iterations": math.ceil(steps / parts)}


def _warmup(given: Given) -> Found:
    share = given.number("warmup_ratio", 0.0) or given.number("warmup_steps", 0)
    if 0 < share < 1:
        steps = given.number("max_steps", -1)
        return {f"{given.stage}.warmup_steps": math.ceil(share * steps)} if steps > 0 else None
    return {f"{given.stage}.warmup_steps": int(share)}


def _schedule(given: Given) -> Found:
    kind = SCHEDULES.get(str(given["lr_scheduler_type"]))
    if kind is None:
        return None
    return {f"{given.stage}.schedule": kind} | ({} if kind == "constant" else {f"{given.stage}.min_lr_ratio": 0.0})


def _algorithm(given: Given) -> Found:
    """TRL's loss_type, importance_sampling_level and scale_rewards are one choice here."""
    loss, scale = given.get("loss_type", "dapo"), given.get("scale_rewards", "group")
    plain = scale in ("none", False)
    found: dict[str, Any] = {}
    if given.get("importance_sampling_level") == "sequence":
        found["algorithm"] = "gspo"
    elif loss in ("cispo", "sapo"):
        found["algorithm"] = loss
    elif loss in ("dapo", "bnpo", "grpo", "dr_grpo"):
        found["algorithm"] = "dr_grpo" if plain else "grpo"
        found["loss_aggregation"] = {"grpo": "sequence_mean", "dr_grpo": "constant"}.get(loss, "token_mean")
    if not found or (plain and "loss_aggregation" not in found) or scale == "batch":
        return None
    return {f"{given.stage}.{name}": value for name, value in found.items()}


def _epsilon_high(given: Given) -> Found:
    value = given["epsilon_high"]
    return {f"{given.stage}.clip_eps_high": value - 1 if given.get("loss_type") == "cispo" else value}


# Settings of adapters that mean the same.
_LORA = {
    "lora_dropout": "dropout", "lora_modules_to_save": "modules_to_save", "use_rslora": "rank_stabilized",
    "use_dora": "dora",
}  # fmt: skip


def _lora(given: Given) -> Found:
    if not given.get("use_peft", "lora_r" in given):
        return {}
    found: dict[str, Any] = {"rank": given.get("lora_r", 16), "alpha": given.get("lora_alpha", 32)}
    if isinstance(modules := given.get("lora_target_modules"), list) or modules == "all-linear":
        found["target_modules"] = modules
    for theirs, ours in _LORA.items():
        if given.get(theirs):
            found[ours] = given[theirs]
    if given.get("load_in_4bit") or given.get("load_in_8bit"):
        found["quantize"] = "nf4" if given.get("load_in_4bit") else "int8"
    return {f"model.lora.{name}": value for name, value in found.items()}


def _pair_loss(given: Given) -> Found:
    value = given["loss_type"]
    value = value[0] if isinstance(value, list) and len(value) == 1 else value
    kind = {"sigmoid": "dpo", "ipo": "ipo", "kto": "kto"}.get(str(value))
    return None if kind is None else {f"{given.stage}.loss": kind}


def _file(given: Given) -> Found:
    path = str(given["dataset_name"])
    if given.is_policy or not path.endswith((".jsonl", ".parquet", ".csv")):
        return None
    kind = "demonstrations" if given.stage == "stages.sft" else "preferences"
    return {f"stages.prepare_data.{kind}": path}


def _longest_row(given: Given) -> Found:
    """TRL cuts longer rows, but leaves out pairs of the reward model; null = the model's context."""
    if given["max_length"] is None:
        return {}
    if given.get("truncation_mode", "keep_start") != "keep_start":
        return None
    long_rows = "drop" if given.trainer == "Reward" else "cut"
    data = "stages.prepare_data"
    return {f"{data}.max_tokens": int(given["max_length"]), f"{data}.long_rows": long_rows}


def _rewards(given: Given) -> Found:
    names, weights = given.get("reward_funcs"), given.get("reward_weights")
    if not isinstance(names, list) or not all("." in str(name) for name in names):
        return None
    pairs = zip(names, weights or [1.0] * len(names), strict=False)
    rewards = {":".join(str(name).rsplit(".", 1)): float(weight) for name, weight in pairs}
    return {f"{given.stage}.rewards": rewards}


def one(target: str, name: str, change: Callable[[Any], Any]) -> Callable[[Given], Found]:
    """Rule of one value; `change` gives None where there is no equal of it."""

    def rule(given: Given) -> Found:
        value = change(given[name])
        path = target.replace("STAGE", given.stage)
        return None if value is None else {path: value}

    return rule


def _whole(value: Any) -> Any:
    """A count of at least 1; a share of all steps has no equal."""
    return int(value) if isinstance(value, int | float) and value >= 1 else None


def _dtype(value: Any) -> Any:
    name = str(value).removeprefix("torch.")
    return name if name in ("float32", "bfloat16", "float16") else None


def chosen(words: Mapping[Any, Any]) -> Callable[[Any], Any]:
    """Change of a value by a table; None where it is not in there."""
    return lambda value: words.get(value)


def restriction(name: str, off: tuple[Any, ...]) -> Callable[[Given], Found]:
    """A restriction of sampling: nothing to say where it is off; rollouts that train a policy take none."""
    return lambda given: {} if given[name] in off else None


def sinks(name: str) -> Callable[[Given], Found]:
    """Places of metrics beside MLflow, which has every run: those that are sinks here."""

    def rule(given: Given) -> Found:
        value = given[name]
        places = set(value if isinstance(value, list) else [value]) - {"mlflow", "none", "console", None}
        if not places <= {"wandb", "tensorboard"}:
            return None
        return {"tracking.sinks": sorted(places)} if places else {}

    return rule


TRL_RULES: dict[str, Callable[[Given], Found]] = {
    **dict.fromkeys(
        ("per_device_train_batch_size", "gradient_accumulation_steps", "generation_batch_size", "steps_per_generation"),
        _batch,
    ),
    "max_steps": _max_steps,
    "warmup_steps": _warmup,
    "warmup_ratio": _warmup,
    "lr_scheduler_type": _schedule,
    "adam_beta1": lambda g: {f"{g.stage}.betas": [g.number("adam_beta1", 0.9), g.number("adam_beta2", 0.999)]},
    "adam_beta2": lambda g: {f"{g.stage}.betas": [g.number("adam_beta1", 0.9), g.number("adam_beta2", 0.999)]},
    "optim": one("STAGE.optimizer", "optim", lambda v: next((n for n in ("adamw", "muon") if n in str(v)), None)),
    "bf16": one("STAGE.autocast", "bf16", chosen({True: "bfloat16", False: "none"})),
    "use_cpu": one("model.device", "use_cpu", chosen({True: "cpu", False: "auto"})),
    "run_name": one("name", "run_name", pipeline_name),
    "report_to": sinks("report_to"),
    "project": one("tracking.experiment", "project", str),
    "eval_steps": one("STAGE.eval_every", "eval_steps", _whole),
    "eval_strategy": lambda g: {f"{g.stage}.eval_every": 0} if g["eval_strategy"] == "no" else _eval_by_steps(g),
    "save_steps": one("STAGE.checkpoint_every", "save_steps", _whole),
    "save_strategy": lambda g: {f"{g.stage}.checkpoint_every": 0} if g["save_strategy"] == "no" else _saved(g),
    "save_total_limit": one("STAGE.keep_checkpoints", "save_total_limit", lambda v: max(2, int(v))),
    "dtype": one("model.dtype", "dtype", _dtype),
    "torch_dtype": one("model.dtype", "torch_dtype", _dtype),
    "disable_dropout": one("STAGE.dropout", "disable_dropout", chosen({True: False, False: True})),
    **dict.fromkeys(
        ("use_peft", "lora_r", "lora_alpha", "lora_target_modules", "load_in_4bit", "load_in_8bit", *_LORA), _lora
    ),
    "dataset_name": _file,
    "max_length": _longest_row,
    "truncation_mode": lambda g: {} if g["truncation_mode"] == "keep_start" else None,
    "epsilon_high": _epsilon_high,
    "importance_sampling_level": _algorithm,
    "scale_rewards": _algorithm,
    "loss_type": lambda g: _algorithm(g) if g.is_policy else _pair_loss(g) if g.stage == "stages.preference" else None,
    "reward_clip_range": lambda g: (
        {f"{g.stage}.reward_options.clip": g["reward_clip_range"][1]}
        if isinstance(g["reward_clip_range"], list) and g["reward_clip_range"][0] == -g["reward_clip_range"][1]
        else None
    ),
    "reward_funcs": _rewards,
    "reward_weights": _rewards,
    "top_p": restriction("top_p", (1, None)),
    "top_k": restriction("top_k", (0, -1, None)),
    "min_p": restriction("min_p", (0, None)),
    "repetition_penalty": restriction("repetition_penalty", (1, None)),
    "max_tool_calling_iterations": one("STAGE.sampling.max_turns", "max_tool_calling_iterations", lambda v: int(v) + 1),
    "beta": lambda g: _beta(g),
}


def _beta(given: Given) -> Found:
    """KL to the reference: its coefficient in on-policy trainers, the losses' own beta on pairs."""
    if given.trainer == "Distillation":
        return None
    if not given.is_policy:
        return {f"{given.stage}.beta": given["beta"]}
    place = {f"{given.stage}.kl_in": "reward"} if given.trainer == "RLOO" and given["beta"] else {}
    return {f"{given.stage}.kl_coef": given["beta"], **place}


def _eval_by_steps(given: Given) -> Found:
    return {} if given["eval_strategy"] == "steps" and "eval_steps" in given else None


def _saved(given: Given) -> Found:
    return {} if given["save_strategy"] == "steps" else None
