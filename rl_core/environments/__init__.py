"""Environments; `make_environment` builds one from the name and options in a config."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rl_core.environments.environment import Demonstration, Environment, Episode, Step
from rl_core.environments.tools import Tool, Toolset
from rl_core.errors import SettingsError, suggest_name
from rl_core.settings.base import describe_type, is_valid_value
from rl_core.user_code.load import import_subclass

__all__ = [
    "SHIPPED_ENVIRONMENTS",
    "Demonstration",
    "Environment",
    "Episode",
    "Step",
    "Tool",
    "Toolset",
    "make_environment",
    "list_environment_code",
]

SHIPPED_ENVIRONMENTS = {
    "pixel_grid": "rl_core.environments.pixel_grid:PixelGrid",
    "arithmetic": "rl_core.environments.arithmetic:Arithmetic",
    "reckoning": "rl_core.environments.reckoning:Reckoning",
    "maze": "rl_core.environments.maze:Maze",
    "gsm8k": "rl_core.environments.gsm8k:GSM8K",
    "gymnasium": "rl_core.environments.gymnasium_text:GymnasiumText",
    "instructions": "rl_core.environments.instructions:Instructions",
    "reasoning_gym": "rl_core.environments.reasoning_gym_tasks:ReasoningGym",
    "prompts": "rl_core.environments.prompts:Prompts",
    "verifiers": "rl_core.environments.verifiers_tasks:Verifiers",
    "agent": "rl_core.environments.agent:Agent",
    "mixture": "rl_core.environments.mixture:MixtureEnvironment",
    "openenv": "rl_core.environments.openenv_tasks:OpenEnv",
    "textarena": "rl_core.environments.textarena_tasks:TextArena",
    "kuhn_poker": "rl_core.environments.kuhn_poker:KuhnPoker",
    "nemo_gym": "rl_core.environments.nemo_gym_tasks:NemoGym",
    "harbor": "rl_core.environments.harbor_trials:Harbor",
}


def make_environment(
    name: str, options: Mapping[str, Any] | None = None, data: Path | None = None
) -> Environment:
    """Build an environment by name with `options`.

    Args:
        name: a key of SHIPPED_ENVIRONMENTS, or the import path of an Environment subclass: 'package.module:Class' or
            'file.py:Class'.
        options: keyword arguments without `data`, checked against the constructor's signature and type hints.
        data: folder prepared by the data stage.
    Raises: SettingsError for an unknown name or option, or an invalid value.
    """
    cls = _import_environment_class(name)
    parameters = dict(inspect.signature(cls).parameters)
    hints = typing.get_type_hints(cls.__init__)
    options = dict(options or {})
    takes_data = parameters.pop("data", None) is not None
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    for key, value in options.items():
        if key not in parameters:
            if takes_any and key != "data":
                continue
            raise SettingsError(
                f"options.{key}: environment '{name}' has no such option; {suggest_name(key, parameters)}"
            )
        if not is_valid_value(value, hints.get(key, Any)):
            raise SettingsError(f"options.{key}: {value!r} is not {describe_type(hints[key])}")
    for key, parameter in parameters.items():
        named = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        if named and parameter.default is parameter.empty and key not in options:
            raise SettingsError(f"options.{key}: environment '{name}' needs it")
    environment = cls(**options, **({"data": data} if takes_data or takes_any else {}))
    _check_held_out_questions(environment)
    return environment


def list_environment_code(name: str, options: Mapping[str, Any] | None = None) -> tuple[str, ...]:
    """List import paths of code outside this project that `make_environment` would run, without importing it."""
    if name not in SHIPPED_ENVIRONMENTS:
        return (name,) if ":" in name and name not in SHIPPED_ENVIRONMENTS.values() else ()
    return _import_environment_class(name).named_code(options or {})


def _check_held_out_questions(environment: Environment) -> None:
    """Warn about levels whose held-out questions overlap with training; only where that takes milliseconds."""
    generated = type(environment).prepare is Environment.prepare
    if generated and not environment.blocking and not environment.splits_itself:
        for level in environment.levels:
            environment.held_out(level)


def _import_environment_class(name: str) -> type[Environment]:
    path = SHIPPED_ENVIRONMENTS.get(name, name)
    if ":" not in path:
        hint = suggest_name(name, SHIPPED_ENVIRONMENTS)
        raise SettingsError(
            f"name: no environment '{name}'; {hint} Name your class by its import path or file: "
            "'package.module:Class' or 'file.py:Class'"
        )
    cls: type[Environment] = import_subclass(
        path, "name", Environment, "rl_core.environments.Environment"
    )
    if inspect.isabstract(cls):
        missing = ", ".join(sorted(cls.__abstractmethods__))
        raise SettingsError(f"name: environment '{name}' does not define {missing}")
    return cls
