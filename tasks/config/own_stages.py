"""Stages of the user's that a config names: found, registered, and their settings read with the usual checks."""

from __future__ import annotations

import dataclasses
import json
import re
from importlib.metadata import entry_points
from typing import Any

from rl_core.errors import SettingsError
from rl_core.importing import import_named
from rl_core.settings import ModelSettings, Settings, resolve_defaults
from tasks import stage_registry
from tasks.config.problems import Key, Problem
from tasks.config.schema import read
from tasks.config.settings import OwnStageSettings, StagesSettings
from tasks.stage_registry import OwnStage

__all__ = ["GROUP", "load_own_stages"]

GROUP = "posttrain.stages"  # entry points of installed packages: name = "package.module:STAGE"
_NAME = re.compile(r"[a-z][a-z0-9_]{0,39}")


def load_own_stages(
    stages: StagesSettings, model: ModelSettings, context: int | None
) -> tuple[StagesSettings, list[Problem]]:
    """Import and register the stages under `own`; their settings are given with all defaults.

    Args:
        model, context: for defaults that depend on the model.
    """
    own, problems = dict(stages.own), []
    for name, block in stages.own.items():
        if block is None:
            continue
        key: Key = ("stages", "own", name)
        try:
            found = _register(name, block)
        except (SettingsError, ValueError) as error:
            problems.append(Problem((*key, "use"), str(error).removeprefix("use: ")))
            continue
        typed, wrong = read(found.settings, block.settings)
        problems += [Problem((*key, "settings", *problem.key), problem.text) for problem in wrong]
        if typed is None or wrong:
            continue
        try:
            typed = resolve_defaults(typed, model, context)
        except SettingsError as error:
            place, _, text = str(error).partition(": ")
            problems.append(Problem((*key, "settings", *place.split(".")), text))
            continue
        own[name] = dataclasses.replace(block, settings=json.loads(json.dumps(dataclasses.asdict(typed))))
    return dataclasses.replace(stages, own=own) if own != stages.own else stages, problems


def _register(name: str, block: OwnStageSettings) -> OwnStage:
    """The stage at its import path, else the installed one, in the registry from now on. Raises: SettingsError."""
    if not _NAME.fullmatch(name):
        raise SettingsError(
            f"a stage cannot be named '{name}': its name is a folder's; use 1 to 40 small letters, digits and _"
        )
    path = block.use
    if path is None:
        installed = next(iter(entry_points(group=GROUP, name=name)), None)
        if installed is None:
            known = ", ".join(sorted(point.name for point in entry_points(group=GROUP))) or "none"
            raise SettingsError(
                f"there is no installed stage '{name}' (entry points {GROUP}: {known}); set use to its import path or "
                "file, as polish.py:STAGE"
            )
        path = installed.value
    found: Any = import_named(path, "use")
    if not isinstance(found, OwnStage):
        raise SettingsError(f"'{path}' is a {type(found).__name__}, expected a tasks.stage_registry.OwnStage")
    if not (isinstance(found.settings, type) and issubclass(found.settings, Settings)):
        raise SettingsError(f"'{path}': its settings are no subclass of rl_core.settings.Settings")
    stage_registry.register_own(name, found, path)
    return found
