"""The ten settings that people change most, as a form of their own before all others.

A deployment declares their values as its config has them, so that the form opens with them; what a run has instead of a
declared value is applied to the config, as an override. All other settings are left to `overrides`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import pydantic

from tasks.config import PipelineSettings, resolve
from tasks.config.schema import model_of

__all__ = ["MAIN", "MainForm", "main_overrides", "main_values"]

MAIN = {  # field of the form -> key
    "seed": "seed",
    "sft_epochs": "stages.sft.epochs",
    "sft_learning_rate": "stages.sft.learning_rate",
    "algorithm": "stages.policy.algorithm",
    "iterations": "stages.policy.iterations",
    "prompts_per_iteration": "stages.policy.prompts_per_iteration",
    "group_size": "stages.policy.group_size",
    "learning_rate": "stages.policy.learning_rate",
    "kl_coef": "stages.policy.kl_coef",
    "episodes": "stages.evaluate.episodes",
}


def _field(key: str) -> tuple[Any, Any]:
    """Type and description of a setting, as a field that may be left out."""
    model: Any = model_of(PipelineSettings)
    *blocks, name = key.split(".")
    for block in blocks:
        found = model.model_fields[block].annotation
        model = next(kind for kind in (*getattr(found, "__args__", ()), found) if hasattr(kind, "model_fields"))
    field = model.model_fields[name]
    kind = Annotated[(field.annotation, *field.metadata)] if field.metadata else field.annotation
    return kind | None, pydantic.Field(default=None, description=f"{key}: {field.description}")


if TYPE_CHECKING:
    MainForm = dict[str, Any]
else:
    MainForm = pydantic.create_model(
        "MainSettings",
        __config__=pydantic.ConfigDict(extra="forbid"),
        __doc__="The settings that are changed most; empty: as the config has them.",
        **{name: _field(key) for name, key in MAIN.items()},
    )


def main_values(settings: PipelineSettings) -> dict[str, Any]:
    """Values of the form's fields in these settings; those of stages that they lack are left out."""
    values = {}
    for name, key in MAIN.items():
        found: Any = resolve(settings)
        for part in key.split("."):
            found = found.get(part) if isinstance(found, Mapping) else None
        if found is not None:
            values[name] = found
    return values


def main_overrides(given: Any, declared: Any = None) -> list[str]:
    """Overrides that a run's form asks for: its values that are not the declared ones.

    Args:
        given: the form, or a mapping of its fields. declared: that of the deployment; None = all values count.
    Raises: pydantic.ValidationError for an unknown field, a wrong type or a value out of range.
    """
    values, known = _plain(given), _plain(declared)
    return [
        f"{MAIN[name]}={json.dumps(value)}"
        for name, value in values.items()
        if value is not None and value != known[name]
    ]


def _plain(form: Any) -> dict[str, Any]:
    model: Any = MainForm
    return dict(model.model_validate(form if isinstance(form, Mapping) else dict(form or {})).model_dump())
