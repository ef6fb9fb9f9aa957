"""Names of TRL's trainers, configurations and arguments, for the errors of people who bring a script of TRL."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from rl_core.errors import suggest_name

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")

# Name of TRL's class without Trainer or Config: our function and its settings.
_FUNCTIONS = {
    "SFT": ("sft", "SFTSettings"),
    "DPO": ("dpo", "PreferenceSettings"),
    "KTO": ("dpo", "PreferenceSettings(loss='kto')"),
    "ORPO": ("dpo", "PreferenceSettings(loss='orpo')"),
    "CPO": ("dpo", "PreferenceSettings(loss='simpo')"),
    "Reward": ("reward_model", "RewardModelSettings"),
    "GRPO": ("grpo", "PolicySettings"),
    "RLOO": ("grpo", "PolicySettings(algorithm='rloo')"),
    "PPO": ("ppo", "PolicySettings(algorithm='ppo')"),
    "GKD": ("distill", "DistillationSettings(divergence='gold')"),
    "GOLD": ("distill", "DistillationSettings(divergence='gold')"),
    "Distillation": ("distill", "DistillationSettings"),
}
_ARGUMENTS = {
    "args": "settings, as in settings={{'learning_rate': 1e-5}}; `posttrain convert` translates names of TRL",
    "config": "settings, as in settings={{'learning_rate': 1e-5}}",
    "train_dataset": "{data}: rows, or a JSONL, CSV or Parquet file",
    "eval_dataset": "{heldout}: rows, a file, or a share of the prompts",
    "reward_funcs": "reward: a function, or several as {{function: weight}}; TRL's signature is accepted",
    "processing_class": "model=(model, tokenizer)",
    "tokenizer": "model=(model, tokenizer)",
    "peft_config": "model=rl_core.ModelSettings(path=..., lora={{'rank': 16}})",
    "ref_model": "nothing: the initial model is the reference, if settings.kl_coef or a preference loss needs one",
    "rollout_func": "environment, or agent for a function that plays whole episodes",
    "environment_factory": "environment",
}


def explain_trl_class(name: str) -> str:
    """Return what to use instead of a trainer or configuration of TRL; "" for another name."""
    for suffix in ("Trainer", "Config"):
        function, settings = _FUNCTIONS.get(name.removesuffix(suffix), ("", ""))
        if function and name.endswith(suffix):
            wanted = (
                f"rl_core.{function}(model, ...)" if suffix == "Trainer" else f"rl_core.{settings}"
            )
            return f"'{name}' is a class of TRL; here it is {wanted}"
    return ""


def explain_unknown_arguments(
    function: Callable[_Parameters, _Result],
) -> Callable[_Parameters, _Result]:
    """Decorate a function so that an unknown argument is answered with its name here. Raises: TypeError."""
    known = list(inspect.signature(function).parameters)

    @functools.wraps(function)
    def call(*arguments: _Parameters.args, **options: _Parameters.kwargs) -> _Result:
        for name in options:
            if name not in known:
                raise TypeError(f"{function.__name__}(): {_explain_argument(name, known)}")
        return function(*arguments, **options)

    return call


def _explain_argument(name: str, known: list[str]) -> str:
    if name not in _ARGUMENTS:
        return f"there is no argument '{name}'; {suggest_name(name, known)}"
    data, heldout = (
        next((option for option in options if option in known), options[0])
        for options in (("data", "pairs", "prompts"), ("heldout", "heldout_prompts"))
    )
    return f"'{name}' is an argument of TRL; here it is {_ARGUMENTS[name].format(data=data, heldout=heldout)}"
