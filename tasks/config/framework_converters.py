"""Values of TRL's settings as ours, where they do not stay as they are (names: rl_core/settings/peer_names).

A rule takes all values of the peer's file and gives (dotted path of ours, value) pairs, none where ours does the same
anyway; None = it cannot be said from these values alone, so the name is left to the reader with its note.

Values of verl's settings as ours, where they do not stay as they are; rules as in `peer_values`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

ConvertedValues = dict[str, Any] | None


class FrameworkValues(dict[str, Any]):
    """Values of a peer's file by name (verl's dotted), TRL's trainer, and the stage that they are for."""

    def __init__(self, values: Mapping[str, Any], stage: str, trainer: str = "") -> None:
        super().__init__(values)
        self.trainer = trainer
        self.stage = f"stages.{stage}"
        self.is_policy = stage == "policy" or stage == "distill"  # those with rollouts

    def read_number(self, name: str, default: float) -> float:
        """A value that is a number; else `otherwise`."""
        value = self.get(name)
        return value if isinstance(value, int | float) and not isinstance(value, bool) else default


def sanitize_pipeline_name(text: object) -> str:
    """A name that a pipeline can have: other characters become '-'."""
    return re.sub(r"[^A-Za-z0-9._-]+|\.\.+", "-", str(text)).strip("-._")[:64] or "converted"


# What a file leaves out has the peer's default, where ours is another one.
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
LR_SCHEDULES = {
    "constant": "constant",
    "constant_with_warmup": "constant",
    "cosine": "cosine",
    "linear": "linear",
}


# -------------------------------------------------------------------------------------------------------- TRL


def _convert_batch_size(given: FrameworkValues) -> ConvertedValues:
    rows = int(
        given.read_number("per_device_train_batch_size", 8)
        * given.read_number("gradient_accumulation_steps", 1)
    )
    if not given.is_policy:
        return {f"{given.stage}.batch_size": rows}
    rollouts = given.get("generation_batch_size") or given.read_number(
        "per_device_train_batch_size", 8
    ) * given.read_number(
        "steps_per_generation", given.read_number("gradient_accumulation_steps", 1)
    )
    size = given.read_number("num_generations", 1)
    if rollouts % size or rollouts % rows:
        return None
    minibatches = int(rollouts // rows)
    return {
        f"{given.stage}.prompts_per_iteration": int(rollouts // size),
        f"{given.stage}.minibatches": minibatches,
    }


def _convert_max_steps(given: FrameworkValues) -> ConvertedValues:
    steps = given.read_number("max_steps", -1)
    if steps < 1:
        return {}
    if not given.is_policy:
        return {f"{given.stage}.max_steps": int(steps)}
    parts = (_convert_batch_size(given) or {}).get(
        f"{given.stage}.minibatches", 1
    ) * given.read_number("num_iterations", 1)
    return {f"{given.stage}.iterations": math.ceil(steps / parts)}


def _convert_warmup(given: FrameworkValues) -> ConvertedValues:
    share = given.read_number("warmup_ratio", 0.0) or given.read_number("warmup_steps", 0)
    if 0 < share < 1:
        steps = given.read_number("max_steps", -1)
        return {f"{given.stage}.warmup_steps": math.ceil(share * steps)} if steps > 0 else None
    return {f"{given.stage}.warmup_steps": int(share)}


def _convert_schedule(given: FrameworkValues) -> ConvertedValues:
    kind = LR_SCHEDULES.get(str(given["lr_scheduler_type"]))
    if kind is None:
        return None
    return {f"{given.stage}.schedule": kind} | (
        {} if kind == "constant" else {f"{given.stage}.min_lr_ratio": 0.0}
    )


def _convert_algorithm(given: FrameworkValues) -> ConvertedValues:
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
        found["loss_aggregation"] = {"grpo": "sequence_mean", "dr_grpo": "constant"}.get(
            loss, "token_mean"
        )
    if not found or (plain and "loss_aggregation" not in found) or scale == "batch":
        return None
    return {f"{given.stage}.{name}": value for name, value in found.items()}


def _convert_epsilon_high(given: FrameworkValues) -> ConvertedValues:
    value = given["epsilon_high"]
    return {
        f"{given.stage}.clip_eps_high": value - 1 if given.get("loss_type") == "cispo" else value
    }


# Settings of adapters that mean the same.
_LORA_NAMES = {
    "lora_dropout": "dropout",
    "lora_modules_to_save": "modules_to_save",
    "use_rslora": "rank_stabilized",
    "use_dora": "dora",
}


def _convert_lora(given: FrameworkValues) -> ConvertedValues:
    if not given.get("use_peft", "lora_r" in given):
        return {}
    found: dict[str, Any] = {"rank": given.get("lora_r", 16), "alpha": given.get("lora_alpha", 32)}
    if isinstance(modules := given.get("lora_target_modules"), list) or modules == "all-linear":
        found["target_modules"] = modules
    for theirs, ours in _LORA_NAMES.items():
        if given.get(theirs):
            found[ours] = given[theirs]
    if given.get("load_in_4bit") or given.get("load_in_8bit"):
        found["quantize"] = "nf4" if given.get("load_in_4bit") else "int8"
    return {f"model.lora.{name}": value for name, value in found.items()}


def _convert_pair_loss(given: FrameworkValues) -> ConvertedValues:
    value = given["loss_type"]
    value = value[0] if isinstance(value, list) and len(value) == 1 else value
    kind = {"sigmoid": "dpo", "ipo": "ipo", "kto": "kto"}.get(str(value))
    return None if kind is None else {f"{given.stage}.loss": kind}


def _convert_dataset_file(given: FrameworkValues) -> ConvertedValues:
    path = str(given["dataset_name"])
    if given.is_policy or not path.endswith((".jsonl", ".parquet", ".csv")):
        return None
    kind = "demonstrations" if given.stage == "stages.sft" else "preferences"
    return {f"stages.prepare_data.{kind}": path}


def _convert_max_length(given: FrameworkValues) -> ConvertedValues:
    """TRL cuts longer rows, but leaves out pairs of the reward model; null = the model's context."""
    if given["max_length"] is None:
        return {}
    if given.get("truncation_mode", "keep_start") != "keep_start":
        return None
    long_rows = "drop" if given.trainer == "Reward" else "cut"
    data = "stages.prepare_data"
    return {f"{data}.max_tokens": int(given["max_length"]), f"{data}.long_rows": long_rows}


def _convert_rewards(given: FrameworkValues) -> ConvertedValues:
    names, weights = given.get("reward_funcs"), given.get("reward_weights")
    if not isinstance(names, list) or not all("." in str(name) for name in names):
        return None
    pairs = zip(names, weights or [1.0] * len(names), strict=False)
    rewards = {":".join(str(name).rsplit(".", 1)): float(weight) for name, weight in pairs}
    return {f"{given.stage}.rewards": rewards}


def build_value_rule(
    target: str, name: str, convert: Callable[[Any], Any]
) -> Callable[[FrameworkValues], ConvertedValues]:
    """Rule of one value; `change` gives None where there is no equal of it."""

    def rule(given: FrameworkValues) -> ConvertedValues:
        value = convert(given[name])
        path = target.replace("STAGE", given.stage)
        return None if value is None else {path: value}

    return rule


def _convert_count(value: Any) -> Any:
    """A count of at least 1; a share of all steps has no equal."""
    return int(value) if isinstance(value, int | float) and value >= 1 else None


def _convert_dtype(value: Any) -> Any:
    name = str(value).removeprefix("torch.")
    return name if name in ("float32", "bfloat16", "float16") else None


def build_table_lookup(table: Mapping[Any, Any]) -> Callable[[Any], Any]:
    """Change of a value by a table; None where it is not in there."""
    return lambda value: table.get(value)


def build_sampling_rule(
    name: str, disabled_values: tuple[Any, ...]
) -> Callable[[FrameworkValues], ConvertedValues]:
    """A restriction of sampling: nothing to say where it is off; rollouts that train a policy take none."""
    return lambda given: {} if given[name] in disabled_values else None


def build_sinks_rule(name: str) -> Callable[[FrameworkValues], ConvertedValues]:
    """Places of metrics beside MLflow, which has every run: those that are sinks here."""

    def rule(given: FrameworkValues) -> ConvertedValues:
        value = given[name]
        places = set(value if isinstance(value, list) else [value]) - {
            "mlflow",
            "none",
            "console",
            None,
        }
        if not places <= {"wandb", "tensorboard"}:
            return None
        return {"tracking.sinks": sorted(places)} if places else {}

    return rule


TRL_RULES: dict[str, Callable[[FrameworkValues], ConvertedValues]] = {
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
    "adam_beta1": lambda g: {
        f"{g.stage}.betas": [g.read_number("adam_beta1", 0.9), g.read_number("adam_beta2", 0.999)]
    },
    "adam_beta2": lambda g: {
        f"{g.stage}.betas": [g.read_number("adam_beta1", 0.9), g.read_number("adam_beta2", 0.999)]
    },
    "optim": build_value_rule(
        "STAGE.optimizer",
        "optim",
        lambda v: next((n for n in ("adamw", "muon") if n in str(v)), None),
    ),
    "bf16": build_value_rule(
        "STAGE.autocast", "bf16", build_table_lookup({True: "bfloat16", False: "none"})
    ),
    "use_cpu": build_value_rule(
        "model.device", "use_cpu", build_table_lookup({True: "cpu", False: "auto"})
    ),
    "run_name": build_value_rule("name", "run_name", sanitize_pipeline_name),
    "report_to": build_sinks_rule("report_to"),
    "project": build_value_rule("tracking.experiment", "project", str),
    "eval_steps": build_value_rule("STAGE.eval_every", "eval_steps", _convert_count),
    "eval_strategy": lambda g: (
        {f"{g.stage}.eval_every": 0} if g["eval_strategy"] == "no" else _convert_eval_strategy(g)
    ),
    "save_steps": build_value_rule("STAGE.checkpoint_every", "save_steps", _convert_count),
    "save_strategy": lambda g: (
        {f"{g.stage}.checkpoint_every": 0}
        if g["save_strategy"] == "no"
        else _convert_save_strategy(g)
    ),
    "save_total_limit": build_value_rule(
        "STAGE.keep_checkpoints", "save_total_limit", lambda v: max(2, int(v))
    ),
    "dtype": build_value_rule("model.dtype", "dtype", _convert_dtype),
    "torch_dtype": build_value_rule("model.dtype", "torch_dtype", _convert_dtype),
    "disable_dropout": build_value_rule(
        "STAGE.dropout", "disable_dropout", build_table_lookup({True: False, False: True})
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
    "truncation_mode": lambda g: {} if g["truncation_mode"] == "keep_start" else None,
    "epsilon_high": _convert_epsilon_high,
    "importance_sampling_level": _convert_algorithm,
    "scale_rewards": _convert_algorithm,
    "loss_type": lambda g: (
        _convert_algorithm(g)
        if g.is_policy
        else _convert_pair_loss(g)
        if g.stage == "stages.preference"
        else None
    ),
    "reward_clip_range": lambda g: (
        {f"{g.stage}.reward_options.clip": g["reward_clip_range"][1]}
        if isinstance(g["reward_clip_range"], list)
        and g["reward_clip_range"][0] == -g["reward_clip_range"][1]
        else None
    ),
    "reward_funcs": _convert_rewards,
    "reward_weights": _convert_rewards,
    "top_p": build_sampling_rule("top_p", (1, None)),
    "top_k": build_sampling_rule("top_k", (0, -1, None)),
    "min_p": build_sampling_rule("min_p", (0, None)),
    "repetition_penalty": build_sampling_rule("repetition_penalty", (1, None)),
    "max_tool_calling_iterations": build_value_rule(
        "STAGE.sampling.max_turns", "max_tool_calling_iterations", lambda v: int(v) + 1
    ),
    "beta": lambda g: _convert_beta(g),
}


def _convert_beta(given: FrameworkValues) -> ConvertedValues:
    """KL to the reference: its coefficient in on-policy trainers, the losses' own beta on pairs."""
    if given.trainer == "Distillation":
        return None
    if not given.is_policy:
        return {f"{given.stage}.beta": given["beta"]}
    place = {f"{given.stage}.kl_in": "reward"} if given.trainer == "RLOO" and given["beta"] else {}
    return {f"{given.stage}.kl_coef": given["beta"], **place}


def _convert_eval_strategy(given: FrameworkValues) -> ConvertedValues:
    return {} if given["eval_strategy"] == "steps" and "eval_steps" in given else None


def _convert_save_strategy(given: FrameworkValues) -> ConvertedValues:
    return {} if given["save_strategy"] == "steps" else None


# What a file leaves out has verl's default, where ours is another one.
VERL_DEFAULTS: dict[str, Any] = {
    "algorithm.adv_estimator": "gae",
    "algorithm.lam": 1.0,
    "actor_rollout_ref.actor.clip_ratio_c": 3.0,
    "actor_rollout_ref.actor.optim.lr": 1e-6,
    "actor_rollout_ref.actor.optim.lr_warmup_steps": 0,
    "actor_rollout_ref.rollout.n": 1,
    "data.train_batch_size": 1024,
    "data.max_response_length": 512,
    "actor_rollout_ref.actor.ppo_mini_batch_size": 256,
}


_POLICY_PATH = "stages.policy"
_ACTOR_PATH = "actor_rollout_ref.actor"
_ROLLOUT_PATH = "actor_rollout_ref.rollout"


def _convert_estimator(given: FrameworkValues) -> ConvertedValues:
    kind = given.get("algorithm.adv_estimator", "gae")
    name = {"gae": "ppo", "grpo": "grpo", "rloo": "rloo", "reinforce_plus_plus": "reinforce"}.get(
        str(kind)
    )
    if name is None:
        return None
    if kind == "grpo" and given.get("algorithm.norm_adv_by_std_in_grpo") is False:
        name = "dr_grpo"
    if given.get(f"{_ACTOR_PATH}.policy_loss.loss_mode") == "gspo":
        name = "gspo"
    return {f"{_POLICY_PATH}.algorithm": name, **_convert_aggregation(given, name)}


def _convert_aggregation(given: FrameworkValues, algorithm: str) -> dict[str, Any]:
    words = {
        "token-mean": "token_mean",
        "seq-mean-token-mean": "sequence_mean",
        "seq-mean-token-sum-norm": "constant",
    }
    kind = words.get(str(given.get(f"{_ACTOR_PATH}.loss_agg_mode", "token-mean")))
    return {} if kind is None else {f"{_POLICY_PATH}.loss_aggregation": kind}


def _convert_loss_agg_mode(given: FrameworkValues) -> ConvertedValues:
    return _convert_aggregation(given, "") or None


def _convert_kl_term(given: FrameworkValues) -> ConvertedValues:
    """The KL term that is switched on, in the loss or in the reward; {} if neither is."""
    if given.get(f"{_ACTOR_PATH}.use_kl_loss"):
        kind = {
            "kl": "k1",
            "k1": "k1",
            "mse": "k2",
            "k2": "k2",
            "low_var_kl": "k3",
            "k3": "k3",
        }.get(str(given.get(f"{_ACTOR_PATH}.kl_loss_type", "low_var_kl")))
        found = {
            f"{_POLICY_PATH}.kl_in": "loss",
            f"{_POLICY_PATH}.kl_coef": given.get(f"{_ACTOR_PATH}.kl_loss_coef", 0.001),
        }
        return None if kind is None else found | {f"{_POLICY_PATH}.kl_estimator": kind}
    if given.get("algorithm.use_kl_in_reward"):
        return {
            f"{_POLICY_PATH}.kl_in": "reward",
            f"{_POLICY_PATH}.kl_coef": given.get("algorithm.kl_ctrl.kl_coef", 0.001),
            f"{_POLICY_PATH}.kl_controller": given.get("algorithm.kl_ctrl.type", "fixed"),
        }
    return {}


def _convert_minibatches(given: FrameworkValues) -> ConvertedValues:
    whole, part = (
        given.read_number("data.train_batch_size", 1024),
        given.read_number(f"{_ACTOR_PATH}.ppo_mini_batch_size", 256),
    )
    return {f"{_POLICY_PATH}.minibatches": int(whole // part)} if whole % part == 0 else None


def _convert_clip_ratio(given: FrameworkValues) -> ConvertedValues:
    low = given.get(f"{_ACTOR_PATH}.clip_ratio_low", given.get(f"{_ACTOR_PATH}.clip_ratio", 0.2))
    return {
        f"{_POLICY_PATH}.clip_eps": low,
        f"{_POLICY_PATH}.clip_eps_high": given.get(f"{_ACTOR_PATH}.clip_ratio_high", low),
    }


def _convert_launch(given: FrameworkValues) -> ConvertedValues:
    gpus, nodes = (
        int(given.read_number("trainer.n_gpus_per_node", 1)),
        int(given.read_number("trainer.nnodes", 1)),
    )
    if gpus * nodes == 1:
        return {}
    launch = {"kind": "torchrun", "processes": gpus, "nodes": nodes}
    return {f"{_POLICY_PATH}.launch.{name}": value for name, value in launch.items()}


def _build_critic_rule(path: str, name: str) -> Callable[[FrameworkValues], ConvertedValues]:
    """A value of the critic; None where the algorithm has none."""
    return lambda g: {path: g[name]} if g.get("algorithm.adv_estimator", "gae") == "gae" else None


def _convert_verl_lora(given: FrameworkValues) -> ConvertedValues:
    model = "actor_rollout_ref.model"
    if not given.get(f"{model}.lora_rank"):
        return {}
    found = {"rank": given[f"{model}.lora_rank"], "alpha": given.get(f"{model}.lora_alpha", 16)}
    if isinstance(modules := given.get(f"{model}.target_modules"), list) or modules == "all-linear":
        found["target_modules"] = modules
    return {f"model.lora.{name}": value for name, value in found.items()}


def _convert_verl_reward(given: FrameworkValues) -> ConvertedValues:
    path, name = (
        given.get("custom_reward_function.path"),
        given.get("custom_reward_function.name", "compute_score"),
    )
    if not path:
        return {}
    module = str(path).removesuffix(".py").strip("./").replace("/", ".")
    return {f"{_POLICY_PATH}.rewards": {f"{module}:{name}": 1.0}}


def _build_frequency_rule(target: str, name: str) -> Callable[[FrameworkValues], ConvertedValues]:
    return lambda given: {target: max(0, int(given.read_number(name, 0)))}


VERL_RULES: dict[str, Callable[[FrameworkValues], ConvertedValues]] = {
    **dict.fromkeys(
        (
            "algorithm.adv_estimator",
            "algorithm.norm_adv_by_std_in_grpo",
            f"{_ACTOR_PATH}.policy_loss.loss_mode",
        ),
        _convert_estimator,
    ),
    f"{_ACTOR_PATH}.loss_agg_mode": _convert_loss_agg_mode,
    **dict.fromkeys((f"{_ACTOR_PATH}.use_kl_loss", "algorithm.use_kl_in_reward"), _convert_kl_term),
    **dict.fromkeys(
        (f"{_ACTOR_PATH}.kl_loss_coef", f"{_ACTOR_PATH}.kl_loss_type"),
        lambda g: _convert_kl_term(g) if g.get(f"{_ACTOR_PATH}.use_kl_loss") else None,
    ),
    **dict.fromkeys(
        ("algorithm.kl_ctrl.kl_coef", "algorithm.kl_ctrl.type"),
        lambda g: _convert_kl_term(g) if g.get("algorithm.use_kl_in_reward") else None,
    ),
    f"{_ACTOR_PATH}.ppo_mini_batch_size": _convert_minibatches,
    **dict.fromkeys(
        (
            f"{_ACTOR_PATH}.clip_ratio",
            f"{_ACTOR_PATH}.clip_ratio_low",
            f"{_ACTOR_PATH}.clip_ratio_high",
        ),
        _convert_clip_ratio,
    ),
    f"{_ACTOR_PATH}.optim.warmup_style": build_value_rule(
        f"{_POLICY_PATH}.schedule",
        f"{_ACTOR_PATH}.optim.warmup_style",
        build_table_lookup(LR_SCHEDULES),
    ),
    f"{_ACTOR_PATH}.optim.lr_warmup_steps": build_value_rule(
        f"{_POLICY_PATH}.warmup_steps",
        f"{_ACTOR_PATH}.optim.lr_warmup_steps",
        lambda v: int(v) if v >= 0 else None,
    ),
    "critic.optim.lr": _build_critic_rule(
        f"{_POLICY_PATH}.critic.learning_rate", "critic.optim.lr"
    ),
    "critic.cliprange_value": _build_critic_rule(
        f"{_POLICY_PATH}.critic.value_clip_eps", "critic.cliprange_value"
    ),
    "trainer.critic_warmup": _build_critic_rule(
        f"{_POLICY_PATH}.critic.warmup_iterations", "trainer.critic_warmup"
    ),
    f"{_ROLLOUT_PATH}.top_k": build_sampling_rule(f"{_ROLLOUT_PATH}.top_k", (-1, 0, None)),
    f"{_ROLLOUT_PATH}.top_p": build_sampling_rule(f"{_ROLLOUT_PATH}.top_p", (1, None)),
    f"{_ROLLOUT_PATH}.dtype": lambda given: None,
    **dict.fromkeys(
        tuple(
            f"actor_rollout_ref.model.{name}"
            for name in ("lora_rank", "lora_alpha", "target_modules")
        ),
        _convert_verl_lora,
    ),
    **dict.fromkeys(
        ("custom_reward_function.path", "custom_reward_function.name"), _convert_verl_reward
    ),
    **dict.fromkeys(("trainer.nnodes", "trainer.n_gpus_per_node"), _convert_launch),
    "trainer.logger": build_sinks_rule("trainer.logger"),
    "trainer.experiment_name": build_value_rule(
        "name", "trainer.experiment_name", sanitize_pipeline_name
    ),
    "trainer.save_freq": _build_frequency_rule(
        f"{_POLICY_PATH}.checkpoint_every", "trainer.save_freq"
    ),
    "trainer.test_freq": _build_frequency_rule(f"{_POLICY_PATH}.eval_every", "trainer.test_freq"),
    "trainer.max_actor_ckpt_to_keep": build_value_rule(
        f"{_POLICY_PATH}.keep_checkpoints",
        "trainer.max_actor_ckpt_to_keep",
        lambda v: max(2, int(v)),
    ),
    "trainer.device": build_value_rule(
        "model.device", "trainer.device", build_table_lookup({"cuda": "cuda", "cpu": "cpu"})
    ),
}
