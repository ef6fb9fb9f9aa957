"""Names of TRL's trainers, configurations and arguments, for the errors of people who bring a script of TRL."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from rl_core.errors import SettingsError, suggest_name

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
    "resume_from_checkpoint": "nothing: with the output folder of an earlier run, train() resumes it",
}
# Attributes of TRL's trainers.
_ATTRIBUTES = {
    "save_model": "save(folder)",
    "save_pretrained": "save(folder)",
    "push_to_hub": "save(folder), then `hf upload NAME FOLDER`",
    "state": "metrics(), a DataFrame with one row per step",
    "predict": "generate(prompts)",
    "log_metrics": "tracker= and metrics()",
    "log": "tracker= and metrics()",
    "add_callback": "callbacks=[function], an argument of the function that made this training",
    "args": "settings",
    "processing_class": "tokenizer",
    "train_dataset": "what the function that made this training was called with",
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
                advice = _explain_argument(name, known) or _explain_setting(name, function)
                advice = advice or f"there is no argument '{name}'; {suggest_name(name, known)}"
                raise TypeError(f"{function.__name__}(): {advice}")
        return function(*arguments, **options)

    return call


def explain_training_attribute(name: str) -> str:
    """Return what to use instead of an attribute of TRL's trainers; "" for another name."""
    advice = _ATTRIBUTES.get(name, "")
    return f"'{name}' is a name of TRL; here it is {advice}" if advice else ""


def _explain_setting(name: str, function: Callable[..., Any]) -> str:
    """Say that a name is a setting of `function`, or the name of one in TRL or verl; "" = it is none."""
    parameter = inspect.signature(function).parameters.get("settings")
    if parameter is None:
        return ""
    class_name = str(parameter.annotation).partition(" ")[0]  # PolicySettings | Mapping | None
    settings = getattr(importlib.import_module("rl_core.settings"), class_name)
    if name in {field.name for field in dataclasses.fields(settings)}:
        return f"'{name}' is a setting: pass settings={{'{name}': ...}}"
    try:
        settings(**{name: None})
    except SettingsError as error:
        _, _, advice = str(error).partition("; ")
        is_explained = " here (" in advice or "has no equivalent here" in advice
        return (
            f"'{name}' is no argument, and settings name it otherwise: {advice}"
            if is_explained
            else ""
        )
    return ""


def _explain_argument(name: str, known: list[str]) -> str:
    """Explain an argument of TRL's trainers; "" = it is none."""
    if name not in _ARGUMENTS:
        return ""
    data, heldout = (
        next((option for option in options if option in known), options[0])
        for options in (("data", "pairs", "prompts"), ("heldout", "heldout_prompts"))
    )
    return f"'{name}' is an argument of TRL; here it is {_ARGUMENTS[name].format(data=data, heldout=heldout)}"
