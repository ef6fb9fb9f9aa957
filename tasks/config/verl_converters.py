"""Rules that convert values of verl's settings to ours where they differ (names: rl_core/settings/verl_aliases.csv)."""

from __future__ import annotations

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

_POLICY_PATH = "stages.policy"
_ACTOR_PATH = "actor_rollout_ref.actor"
_ROLLOUT_PATH = "actor_rollout_ref.rollout"

# verl's defaults that differ from ours, for settings that a file leaves out.
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

_KL_ESTIMATORS = {
    "kl": "k1",
    "k1": "k1",
    "mse": "k2",
    "k2": "k2",
    "low_var_kl": "k3",
    "k3": "k3",
}


def _convert_estimator(values: FrameworkValues) -> ConvertedValues:
    kind = values.get("algorithm.adv_estimator", "gae")
    name = {
        "gae": "ppo",
        "grpo": "grpo",
        "rloo": "rloo",
        "gdpo": "gdpo",
        "reinforce_plus_plus": "reinforce",
    }.get(str(kind))
    if name is None:
        return None
    if kind == "grpo" and values.get("algorithm.norm_adv_by_std_in_grpo") is False:
        name = "dr_grpo"
    if values.get(f"{_ACTOR_PATH}.policy_loss.loss_mode") == "gspo":
        name = "gspo"
    settings = {f"{_POLICY_PATH}.algorithm": name, **_convert_aggregation(values)}
    divergence = {"dppo_tv": "binary_tv", "dppo_kl": "binary_kl"}.get(
        str(values.get(f"{_ACTOR_PATH}.policy_loss.loss_mode"))
    )
    if divergence is None:
        return settings
    if name != "grpo":  # only grpo's advantages are those of dppo here
        return None
    return {
        **settings,
        f"{_POLICY_PATH}.algorithm": "dppo",
        f"{_POLICY_PATH}.dppo_divergence": divergence,
    }


def _convert_aggregation(values: FrameworkValues) -> dict[str, Any]:
    modes = {
        "token-mean": "token_mean",
        "seq-mean-token-mean": "sequence_mean",
        "seq-mean-token-sum-norm": "constant",
    }
    mode = modes.get(str(values.get(f"{_ACTOR_PATH}.loss_agg_mode", "token-mean")))
    return {} if mode is None else {f"{_POLICY_PATH}.loss_aggregation": mode}


def _convert_loss_agg_mode(values: FrameworkValues) -> ConvertedValues:
    return _convert_aggregation(values) or None


def _convert_kl_term(values: FrameworkValues) -> ConvertedValues:
    """Convert the KL term that is switched on, in the loss or in the reward; {} if neither is."""
    if values.get(f"{_ACTOR_PATH}.use_kl_loss"):
        kind = str(values.get(f"{_ACTOR_PATH}.kl_loss_type", "low_var_kl"))
        if kind not in _KL_ESTIMATORS:
            return None
        return {
            f"{_POLICY_PATH}.kl_in": "loss",
            f"{_POLICY_PATH}.kl_coef": values.get(f"{_ACTOR_PATH}.kl_loss_coef", 0.001),
            f"{_POLICY_PATH}.kl_estimator": _KL_ESTIMATORS[kind],
        }
    if values.get("algorithm.use_kl_in_reward"):
        return {
            f"{_POLICY_PATH}.kl_in": "reward",
            f"{_POLICY_PATH}.kl_coef": values.get("algorithm.kl_ctrl.kl_coef", 0.001),
            f"{_POLICY_PATH}.kl_controller": values.get("algorithm.kl_ctrl.type", "fixed"),
        }
    return {}


def _convert_minibatches(values: FrameworkValues) -> ConvertedValues:
    batch_size = values.read_number("data.train_batch_size", 1024)
    minibatch_size = values.read_number(f"{_ACTOR_PATH}.ppo_mini_batch_size", 256)
    if batch_size % minibatch_size:
        return None
    return {f"{_POLICY_PATH}.minibatches": int(batch_size // minibatch_size)}


def _convert_clip_ratio(values: FrameworkValues) -> ConvertedValues:
    low = values.get(f"{_ACTOR_PATH}.clip_ratio_low", values.get(f"{_ACTOR_PATH}.clip_ratio", 0.2))
    return {
        f"{_POLICY_PATH}.clip_eps": low,
        f"{_POLICY_PATH}.clip_eps_high": values.get(f"{_ACTOR_PATH}.clip_ratio_high", low),
    }


def _convert_launch(values: FrameworkValues) -> ConvertedValues:
    gpus = int(values.read_number("trainer.n_gpus_per_node", 1))
    nodes = int(values.read_number("trainer.nnodes", 1))
    if gpus * nodes == 1:
        return {}
    launch = {"kind": "torchrun", "processes": gpus, "nodes": nodes}
    return {f"{_POLICY_PATH}.launch.{name}": value for name, value in launch.items()}


def _build_critic_rule(path: str, name: str) -> ConversionRule:
    """Build the rule of a critic's value; None if the algorithm has no critic."""

    def rule(values: FrameworkValues) -> ConvertedValues:
        has_critic = values.get("algorithm.adv_estimator", "gae") == "gae"
        return {path: values[name]} if has_critic else None

    return rule


def _convert_verl_lora(values: FrameworkValues) -> ConvertedValues:
    model = "actor_rollout_ref.model"
    if not values.get(f"{model}.lora_rank"):
        return {}
    settings = {
        "rank": values[f"{model}.lora_rank"],
        "alpha": values.get(f"{model}.lora_alpha", 16),
    }
    if (
        isinstance(modules := values.get(f"{model}.target_modules"), list)
        or modules == "all-linear"
    ):
        settings["target_modules"] = modules
    return {f"model.lora.{name}": value for name, value in settings.items()}


def _convert_verl_reward(values: FrameworkValues) -> ConvertedValues:
    path = values.get("custom_reward_function.path")
    name = values.get("custom_reward_function.name", "compute_score")
    if not path:
        return {}
    module = str(path).removesuffix(".py").strip("./").replace("/", ".")
    return {f"{_POLICY_PATH}.rewards": {f"{module}:{name}": 1.0}}


def _convert_train_files(values: FrameworkValues) -> ConvertedValues:
    """Convert one local file of prompts, in verl's columns."""
    files = values.get("data.train_files")
    path = files[0] if isinstance(files, list) and len(files) == 1 else files
    if not isinstance(path, str) or not path.endswith((".jsonl", ".parquet", ".csv", ".json")):
        return None
    options = {"path": path, "target": "reward_model.ground_truth"}
    prompt = values.get("data.prompt_key", "prompt")
    if prompt != "prompt":
        options["prompt"] = str(prompt)
    return {"environment.name": "prompts", "environment.options": options}


def _build_frequency_rule(target: str, name: str) -> ConversionRule:
    return lambda values: {target: max(0, int(values.read_number(name, 0)))}


def _convert_loss_kl(values: FrameworkValues) -> ConvertedValues:
    return _convert_kl_term(values) if values.get(f"{_ACTOR_PATH}.use_kl_loss") else None


def _convert_reward_kl(values: FrameworkValues) -> ConvertedValues:
    return _convert_kl_term(values) if values.get("algorithm.use_kl_in_reward") else None


VERL_RULES: dict[str, ConversionRule] = {
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
        (f"{_ACTOR_PATH}.kl_loss_coef", f"{_ACTOR_PATH}.kl_loss_type"), _convert_loss_kl
    ),
    **dict.fromkeys(("algorithm.kl_ctrl.kl_coef", "algorithm.kl_ctrl.type"), _convert_reward_kl),
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
        LR_SCHEDULES.get,
    ),
    f"{_ACTOR_PATH}.optim.lr_warmup_steps": build_value_rule(
        f"{_POLICY_PATH}.warmup_steps",
        f"{_ACTOR_PATH}.optim.lr_warmup_steps",
        lambda value: int(value) if value >= 0 else None,
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
    f"{_ROLLOUT_PATH}.dtype": lambda values: None,
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
    **dict.fromkeys(("data.train_files", "data.prompt_key"), _convert_train_files),
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
        convert_checkpoint_limit,
    ),
    "trainer.device": build_value_rule(
        "model.device", "trainer.device", {"cuda": "cuda", "cpu": "cpu"}.get
    ),
}
