"""Putting in the defaults that depend on the model (rl_core/settings/defaults.py)."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

from rl_core.errors import SettingsError
from rl_core.settings.base import Settings
from rl_core.settings.critic import CriticSettings
from rl_core.settings.defaults import DEFAULTS, ModelKind, is_open
from rl_core.settings.parts import ModelSettings
from rl_core.settings.policy import PolicySettings

__all__ = ["model_kind", "resolve_defaults"]

S = TypeVar("S", bound=Settings)


def model_kind(model: ModelSettings) -> ModelKind:
    """Column of the table that a model's settings belong to."""
    if model.path is None:
        return "preset"
    return "full" if model.lora is None else "lora"


def resolve_defaults(settings: S, model: ModelSettings, context: int | None = None) -> S:
    """Settings in which everything that nobody set has the default for this model, blocks within them included.

    Args:
        context: the model's longest sequence, in tokens; None = not known.
    Raises: SettingsError naming the key for values that do not go together with such a default.
    """
    kind = model_kind(model)
    changed: dict[str, Any] = {}
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if isinstance(value, Settings):
            try:
                changed[field.name] = resolve_defaults(value, model, context)
            except SettingsError as error:
                raise SettingsError(f"{field.name}.{error}") from error
        elif is_open(value):
            changed[field.name] = field.metadata["by_model"].value(kind, context)
    if isinstance(settings, PolicySettings) and is_open(settings.learning_rate) and kind != "preset":
        changed |= _critic(settings, kind)
    return dataclasses.replace(settings, **changed) if changed else settings


def _critic(settings: PolicySettings, kind: ModelKind) -> dict[str, CriticSettings]:
    """A separate critic's own rate, where neither its rate nor the policy's was set; ppo has a critic unasked."""
    critic = settings.value_function
    if critic is None or critic.kind != "separate" or critic.learning_rate is not None:
        return {}
    rate = DEFAULTS["CriticSettings.learning_rate"].value(kind)
    return {"critic": dataclasses.replace(critic, learning_rate=rate)}
