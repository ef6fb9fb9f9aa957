"""Names of trackers beside MLflow, and conditions of alerts, as pipelines and the training service take them."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterable, Mapping

from rl_core.errors import SettingsError, nearest

__all__ = ["ALERTS_DOC", "SINKS", "SINKS_DOC", "check_alerts", "check_installed", "check_sinks", "condition_of"]

SINKS = ("tensorboard", "wandb", "prometheus", "dogstatsd")
SINKS_DOC = (
    "trackers beside MLflow: tensorboard[:FOLDER], wandb[:PROJECT], prometheus[:FOLDER, :PORT or :HOST:PORT], "
    "dogstatsd[:HOST:PORT]; none can fail a step (docs/metrics-out.md)"
)
ALERTS_DOC = (
    "metric -> condition, as policy/ref_kl: '> 0.5'; each time one comes true, the event posttrain.alert is emitted, "
    "which the webhook gets; reward/alarm: '> 0' is always there, unless it is named"
)
_PACKAGES = {"prometheus": ("prometheus_client", "prometheus-client"), "dogstatsd": ("datadog", "datadog")}
_EXTRAS = {"tensorboard": "tensorboard", "wandb": "wandb", "dogstatsd": "datadog"}
_CONDITION = re.compile(r"([<>])\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)")


def check_sinks(sinks: Iterable[str]) -> None:
    """Raises: SettingsError for a name that is no tracker's."""
    for sink in sinks:
        if sink.partition(":")[0] not in SINKS:
            raise SettingsError(f"sinks: {sink!r} is no tracker; {nearest(sink.partition(':')[0], SINKS)}")


def check_installed(sink: str) -> None:
    """Raises: SettingsError where the package of a tracker is missing; nothing is imported."""
    kind = sink.partition(":")[0]
    module, package = _PACKAGES.get(kind, (kind, kind))
    if importlib.util.find_spec(module) is None:
        extra = f", or posttrain[{_EXTRAS[kind]}]" if kind in _EXTRAS else ""
        raise SettingsError(f"{kind} needs the package {package}; install it{extra}")


def check_alerts(alerts: Mapping[str, str]) -> None:
    """Raises: SettingsError for a text that is no condition."""
    for metric, text in alerts.items():
        if _CONDITION.fullmatch(text.strip()) is None:
            raise SettingsError(f"alerts.{metric}: {text!r} is no condition; write '> 0.5' or '< 0.1'")


def condition_of(text: str) -> tuple[str, float]:
    """Sign and bound of a condition that was checked."""
    found = _CONDITION.fullmatch(text.strip())
    assert found is not None
    return found[1], float(found[2])
