"""Flow parameters as typed settings, so that Prefect shows a form and its server validates them."""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flows.main_settings import main_overrides
from flows.runtime.deployed_runs import check_changes, declared_parameters
from rl_core.errors import SettingsError
from rl_core.storage.faults import fault
from tasks.config import PipelineSettings, from_dict, load, pipeline_model, resolve
from tasks.config.masking import MASK, is_secret, masked
from tasks.config.overrides import apply_overrides
from tasks.config.problems import ConfigError, KeyLocations
from tasks.shipped import find_config, shipped

__all__ = ["PipelineForm", "passed_on", "pipeline_name", "read_settings", "told_changes", "told_overrides"]

logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    PipelineForm = dict[str, Any]
else:
    PipelineForm = pipeline_model()  # same fields, ranges and documentation as the settings


_given: ContextVar[PipelineSettings | None] = ContextVar("_given", default=None)
_changed: ContextVar[Sequence[str]] = ContextVar("_changed", default=())


@contextlib.contextmanager
def passed_on(settings: PipelineSettings, changed: Sequence[str] = ()) -> Iterator[dict[str, Any]]:
    """Parameter that stands for settings in a flow called in this process: Prefect stores it, so secrets are masked.

    Within the block `read_settings` puts them back. `changed`: overrides that are in the settings, for the run's name.
    """
    tokens = _given.set(settings), _changed.set(changed)
    try:
        yield masked(resolve(settings))
    finally:
        _given.reset(tokens[0])
        _changed.reset(tokens[1])


def _with_secrets(settings: Mapping[str, Any] | str) -> Mapping[str, Any] | str:
    """A parameter with what `passed_on` masked."""
    given = _given.get()
    if given is None or isinstance(settings, str):
        return settings
    whole = resolve(given)
    same = settings.get("environment") == masked(whole)["environment"]
    return {**settings, "environment": whole["environment"]} if same else settings


def read_settings(
    settings: Mapping[str, Any] | str, overrides: Sequence[str] | None = None, main: Any = None,
    *, ask_servers: bool = True,
) -> PipelineSettings:  # fmt: skip
    """Settings of a flow, from a config file's path or contents, with `--set`-style overrides.

    `main`: the form of the settings that are changed most (`flows/main_settings.py`); `overrides` come after it.
    `ask_servers`: False for flows that sample no rollouts, whose server may be away.

    In a deployment's run they may differ from the declared ones in some keys only (`flows/runtime/deployed_runs.py`),
    which is looked at before anything that they name is imported.
    Raises: ConfigError with every problem; SettingsError for a key that the run may not change.
    """
    settings = _with_secrets(settings)
    declared = declared_parameters()
    overrides = [*main_overrides(main, (declared or {}).get("main")), *(overrides or ())]
    if declared is not None:
        check_changes(_read(settings, overrides, import_code=False), _base(settings, declared))
        fault("deployment.checked")
    return _read(settings, overrides, import_code=True, ask_servers=ask_servers)


def _base(settings: Mapping[str, Any] | str, declared: Mapping[str, Any]) -> PipelineSettings:
    """Settings to compare a deployment's run with: a shipped config that it names, else the declared ones."""
    base = declared.get("settings")
    if isinstance(settings, str) and find_config(settings) == shipped("configs") / f"{settings}.yaml":
        base = settings
    if base is None:
        raise SettingsError("settings: the deployment declares none, so its runs can only name a shipped config")
    return _read(base, declared.get("overrides"), import_code=False)


def _read(
    settings: Mapping[str, Any] | str, overrides: Sequence[str] | None, *, import_code: bool, ask_servers: bool = False
) -> PipelineSettings:
    if isinstance(settings, str):
        return load(settings, overrides or (), import_code=import_code, ask_servers=ask_servers, warn=logger.warning)
    values = copy.deepcopy(dict(settings))
    if overrides:
        places = KeyLocations("settings")
        problems = apply_overrides(values, overrides, places)
        if problems:
            raise ConfigError(problems, places)
    return from_dict(values, import_code=import_code, ask_servers=ask_servers)


def pipeline_name(settings: Mapping[str, Any] | str) -> str:
    """Pipeline name for the flow run's name, else the config file's."""
    return Path(settings).stem if isinstance(settings, str) else str(settings["name"])


_PLACES = ("run.", "output", "tracking.", "threads")  # overrides that decide nothing of what is computed
_TOLD = 3  # overrides in a name


def told_changes(parameters: Mapping[str, Any]) -> str:
    """Changes of a flow run to its config, for its name: the form's changed values, then overrides."""
    declared = declared_parameters() or {}
    changed = [*_changed.get(), *(parameters.get("overrides") or ())]
    return told_overrides([*main_overrides(parameters.get("main"), declared.get("main")), *changed])


def told_overrides(overrides: Sequence[str] | None) -> str:
    """Overrides in a flow run's name: `sft learning_rate=3e-4, seed=1`; "" = none that change what is computed."""
    told = [item for item in overrides or () if not item.startswith(_PLACES)]
    parts = [f"{_short_key(key)}={_shown(key, value)}" for key, _, value in (item.partition("=") for item in told)]
    return ", ".join(parts[:_TOLD]) + (f" and {len(parts) - _TOLD} more" if len(parts) > _TOLD else "")


def _shown(key: str, value: str) -> str:
    """Value in a name; secrets are masked as in the parameters, and a block of the environment may hold some."""
    parts = key.split(".")
    may_be_secret = any(map(is_secret, parts)) or "{" in value
    return MASK if parts[0] == "environment" and may_be_secret else value[:24]


def _short_key(key: str) -> str:
    """Last part of a key, after the stage that it belongs to: several have a learning rate."""
    parts = key.split(".")
    stage = parts[1].replace("_", " ") if parts[0] == "stages" and len(parts) > 2 else ""
    return " ".join(filter(None, (stage, parts[-1])))
