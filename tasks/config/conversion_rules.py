"""Conversion rules that TRL's and verl's files share: the form of a rule, and rules of values with equal meaning.

A rule takes all values of the framework's file and returns {dotted path of ours: value}. The result is empty if our
default does the same. None means that these values alone do not determine ours, so the reader gets the note.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

ConvertedValues = dict[str, Any] | None
ConversionRule = Callable[["FrameworkValues"], ConvertedValues]

LR_SCHEDULES = {
    "constant": "constant",
    "constant_with_warmup": "constant",
    "cosine": "cosine",
    "linear": "linear",
}


class FrameworkValues(dict[str, Any]):
    """Values of a framework's file by name (verl's dotted), TRL's trainer, and the stage that they are for."""

    def __init__(self, values: Mapping[str, Any], stage: str, trainer: str = "") -> None:
        super().__init__(values)
        self.trainer = trainer
        self.stage = f"stages.{stage}"
        self.is_policy = stage == "policy" or stage == "distill"  # stages with rollouts

    def read_number(self, name: str, default: float) -> float:
        """Return a value if it is a number, else `default`."""
        value = self.get(name)
        return value if isinstance(value, int | float) and not isinstance(value, bool) else default


def sanitize_pipeline_name(text: object) -> str:
    """Return a valid pipeline name: replace other characters by '-'."""
    return re.sub(r"[^A-Za-z0-9._-]+|\.\.+", "-", str(text)).strip("-._")[:64] or "converted"


def build_value_rule(target: str, name: str, convert: Callable[[Any], Any]) -> ConversionRule:
    """Build the rule of one value.

    Args:
        target: dotted path of ours; STAGE stands for the stage's path.
        convert: returns None if the value has no equivalent.
    """

    def rule(values: FrameworkValues) -> ConvertedValues:
        value = convert(values[name])
        path = target.replace("STAGE", values.stage)
        return None if value is None else {path: value}

    return rule


def build_sampling_rule(name: str, disabled_values: tuple[Any, ...]) -> ConversionRule:
    """Build the rule of a sampling restriction: {} if it is off. Rollouts that train a policy accept none."""
    return lambda values: {} if values[name] in disabled_values else None


def build_sinks_rule(name: str) -> ConversionRule:
    """Build the rule of additional sinks of metrics; MLflow has every run anyway."""

    def rule(values: FrameworkValues) -> ConvertedValues:
        value = values[name]
        sinks = set(value if isinstance(value, list) else [value])
        sinks -= {"mlflow", "none", "console", None}
        if not sinks <= {"wandb", "tensorboard"}:
            return None
        return {"tracking.sinks": sorted(sinks)} if sinks else {}

    return rule


def convert_checkpoint_limit(value: Any) -> Any:
    """Return the number of checkpoints to keep, at least 1."""
    return max(1, int(value))
