"""Values of verl's settings as ours, where they do not stay as they are; rules as in `peer_values`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tasks.config.peer_values import SCHEDULES, Found, Given, chosen, one, pipeline_name, restriction, sinks

__all__ = ["VERL_DEFAULTS", "VERL_RULES"]

# What a file leaves out has verl's default, where ours is another one.
VERL_DEFAULTS: dict[str, Any] = {
    "algorithm.adv_estimator": "gae", "algorithm.lam": 1.0, "actor_rollout_ref.actor.clip_ratio_c": 3.0,
    "actor_rollout_ref.actor.optim.lr": 1e-6, "actor_rollout_ref.actor.optim.lr_warmup_steps": 0,
    "actor_rollout_ref.rollout.n": 1, "data.train_batch_size": 1024, "data.max_response_length": 512,
    "actor_rollout_ref.actor.ppo_mini_batch_size": 256,
}  # fmt: skip


_P = "stages.policy"
_A = "actor_rollout_ref.actor"
_R = "actor_rollout_ref.rollout"


def _estimator(given: Given) -> Found:
    kind = given.get("algorithm.adv_estimator", "gae")
    name = {"gae": "ppo", "grpo": "grpo", "rloo": "rloo", "reinforce_plus_plus": "reinforce"}.get(str(kind))
    if name is None:
        return None
    if kind == "grpo" and given.get("algorithm.norm_adv_by_std_in_grpo") is False:
        name = "dr_grpo"
    if given.get(f"{_A}.policy_loss.loss_mode") == "gspo":
        name = "gspo"
    return {f"{_P}.algorithm": name, **_aggregation(given, name)}


def _aggregation(given: Given, algorithm: str) -> dict[str, Any]:
    words = {"token-mean": "token_mean", "seq-mean-token-mean": "sequence_mean", "seq-mean-token-sum-norm": "constant"}
    kind = words.get(str(given.get(f"{_A}.loss_agg_mode", "token-mean")))
    return {} if kind is None else {f"{_P}.loss_aggregation": kind}


def _agg_mode(given: Given) -> Found:
    return _aggregation(given, "") or None


def _kl(given: Given) -> Found:
    """The KL term that is switched on, in the loss or in the reward; {} if neither is."""
    if given.get(f"{_A}.use_kl_loss"):
        kind = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}.get(
            str(given.get(f"{_A}.kl_loss_type", "low_var_kl"))
        )
        found = {f"{_P}.kl_in": "loss", f"{_P}.kl_coef": given.get(f"{_A}.kl_loss_coef", 0.001)}
        return None if kind is None else found | {f"{_P}.kl_estimator": kind}
    if given.get("algorithm.use_kl_in_reward"):
        return {
            f"{_P}.kl_in": "reward",
            f"{_P}.kl_coef": given.get("algorithm.kl_ctrl.kl_coef", 0.001),
            f"{_P}.kl_controller": given.get("algorithm.kl_ctrl.type", "fixed"),
        }
    return {}


def _minibatches(given: Given) -> Found:
    whole, part = given.number("data.train_batch_size", 1024), given.number(f"{_A}.ppo_mini_batch_size", 256)
    return {f"{_P}.minibatches": int(whole // part)} if whole % part == 0 else None


def _clip(given: Given) -> Found:
    low = given.get(f"{_A}.clip_ratio_low", given.get(f"{_A}.clip_ratio", 0.2))
    return {f"{_P}.clip_eps": low, f"{_P}.clip_eps_high": given.get(f"{_A}.clip_ratio_high", low)}


def _launch(given: Given) -> Found:
    gpus, nodes = int(given.number("trainer.n_gpus_per_node", 1)), int(given.number("trainer.nnodes", 1))
    if gpus * nodes == 1:
        return {}
    launch = {"kind": "torchrun", "processes": gpus, "nodes": nodes}
    return {f"{_P}.launch.{name}": value for name, value in launch.items()}


def _with_critic(path: str, name: str) -> Callable[[Given], Found]:
    """A value of the critic; None where the algorithm has none."""
    return lambda g: {path: g[name]} if g.get("algorithm.adv_estimator", "gae") == "gae" else None


def _verl_lora(given: Given) -> Found:
    model = "actor_rollout_ref.model"
    if not given.get(f"{model}.lora_rank"):
        return {}
    found = {"rank": given[f"{model}.lora_rank"], "alpha": given.get(f"{model}.lora_alpha", 16)}
    if isinstance(modules := given.get(f"{model}.target_modules"), list) or modules == "all-linear":
        found["target_modules"] = modules
    return {f"model.lora.{name}": value for name, value in found.items()}


def _verl_reward(given: Given) -> Found:
    path, name = given.get("custom_reward_function.path"), given.get("custom_reward_function.name", "compute_score")
    if not path:
        return {}
    module = str(path).removesuffix(".py").strip("./").replace("/", ".")
    return {f"{_P}.rewards": {f"{module}:{name}": 1.0}}


def _frequency(target: str, name: str) -> Callable[[Given], Found]:
    return lambda given: {target: max(0, int(given.number(name, 0)))}


VERL_RULES: dict[str, Callable[[Given], Found]] = {
    **dict.fromkeys(
        ("algorithm.adv_estimator", "algorithm.norm_adv_by_std_in_grpo", f"{_A}.policy_loss.loss_mode"), _estimator
    ),
    f"{_A}.loss_agg_mode": _agg_mode,
    **dict.fromkeys((f"{_A}.use_kl_loss", "algorithm.use_kl_in_reward"), _kl),
    **dict.fromkeys(
        (f"{_A}.kl_loss_coef", f"{_A}.kl_loss_type"), lambda g: _kl(g) if g.get(f"{_A}.use_kl_loss") else None
    ),
    **dict.fromkeys(
        ("algorithm.kl_ctrl.kl_coef", "algorithm.kl_ctrl.type"),
        lambda g: _kl(g) if g.get("algorithm.use_kl_in_reward") else None,
    ),
    f"{_A}.ppo_mini_batch_size": _minibatches,
    **dict.fromkeys((f"{_A}.clip_ratio", f"{_A}.clip_ratio_low", f"{_A}.clip_ratio_high"), _clip),
    f"{_A}.optim.warmup_style": one(f"{_P}.schedule", f"{_A}.optim.warmup_style", chosen(SCHEDULES)),
    f"{_A}.optim.lr_warmup_steps": one(
        f"{_P}.warmup_steps", f"{_A}.optim.lr_warmup_steps", lambda v: int(v) if v >= 0 else None
    ),
    "critic.optim.lr": _with_critic(f"{_P}.critic.learning_rate", "critic.optim.lr"),
    "critic.cliprange_value": _with_critic(f"{_P}.critic.value_clip_eps", "critic.cliprange_value"),
    "trainer.critic_warmup": _with_critic(f"{_P}.critic.warmup_iterations", "trainer.critic_warmup"),
    f"{_R}.top_k": restriction(f"{_R}.top_k", (-1, 0, None)),
    f"{_R}.top_p": restriction(f"{_R}.top_p", (1, None)),
    f"{_R}.dtype": lambda given: None,
    **dict.fromkeys(
        tuple(f"actor_rollout_ref.model.{name}" for name in ("lora_rank", "lora_alpha", "target_modules")), _verl_lora
    ),
    **dict.fromkeys(("custom_reward_function.path", "custom_reward_function.name"), _verl_reward),
    **dict.fromkeys(("trainer.nnodes", "trainer.n_gpus_per_node"), _launch),
    "trainer.logger": sinks("trainer.logger"),
    "trainer.experiment_name": one("name", "trainer.experiment_name", pipeline_name),
    "trainer.save_freq": _frequency(f"{_P}.checkpoint_every", "trainer.save_freq"),
    "trainer.test_freq": _frequency(f"{_P}.eval_every", "trainer.test_freq"),
    "trainer.max_actor_ckpt_to_keep": one(
        f"{_P}.keep_checkpoints", "trainer.max_actor_ckpt_to_keep", lambda v: max(2, int(v))
    ),
    "trainer.device": one("model.device", "trainer.device", chosen({"cuda": "cuda", "cpu": "cpu"})),
}  # fmt: skip
