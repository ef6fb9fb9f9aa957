"""Flow parameters as typed settings, so that Prefect shows a form and its server validates them."""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.config import PipelineSettings, from_dict, load, pipeline_model
from tasks.config.overrides import apply_overrides
from tasks.config.problems import ConfigError, KeyLocations

__all__ = ["PipelineForm", "pipeline_name", "read_settings"]

logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    PipelineForm = dict[str, Any]
else:
    PipelineForm = pipeline_model()  # same fields, ranges and documentation as the settings


def read_settings(settings: Mapping[str, Any] | str, overrides: Sequence[str] | None = None) -> PipelineSettings:
    """Settings of a flow, from a config file's path or contents, with `--set`-style overrides.

    Raises: ConfigError with every problem.
    """
    if isinstance(settings, str):
        return load(settings, overrides or (), warn=logger.warning)
    values = copy.deepcopy(dict(settings))
    if overrides:
        places = KeyLocations("settings")
        problems = apply_overrides(values, overrides, places)
        if problems:
            raise ConfigError(problems, places)
    return from_dict(values)


def pipeline_name(settings: Mapping[str, Any] | str) -> str:
    """Pipeline name for the flow run's name, else the config file's."""
    return Path(settings).stem if isinstance(settings, str) else str(settings["name"])
