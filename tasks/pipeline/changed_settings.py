"""Settings in which a run differs from the one before it, for the table of runs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tasks.tracking.journal import events_path, read_lines
from tasks.tracking.values import flatten

__all__ = ["changed_settings"]

_PLACES = ("output", "name", "tracking.", "run.")  # beginnings of settings that decide nothing of what is computed
_TOLD = 5  # settings in the text
_LONGEST = 32  # characters of a value


def changed_settings(runs: Path, started: str, settings: Mapping[str, Any]) -> str:
    """Differences from the newest earlier run, such as `learning_rate 0.001 → 0.0003`; "" where there is no such run.

    Args:
        runs: folder of the pipeline's runs. started: folder of this one in it. settings: of this one, resolved.
    """
    earlier = sorted(path.name for path in runs.glob("*") if path.name < started)
    if not earlier or (before := _recorded(runs / earlier[-1])) is None:
        return ""
    then, now = flatten(before), flatten(settings)
    changed = [
        f"{key.rpartition('.')[2]} {_short(then.get(key))} → {_short(now.get(key))}"
        for key in dict.fromkeys([*now, *then])
        if then.get(key) != now.get(key) and not key.startswith(_PLACES)
    ]
    more = f" and {len(changed) - _TOLD} more" if len(changed) > _TOLD else ""
    return "; ".join(changed[:_TOLD]) + more or "nothing: settings as in the run before"


def _short(value: Any) -> str:
    text = "-" if value is None else str(value)
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"


def _recorded(run: Path) -> dict[str, Any] | None:
    """Settings that a run recorded; None = it ended before."""
    found = None
    for event, _ in read_lines(events_path(run)):
        if event.get("op") == "text" and event.get("name") == "config.json":
            text = event.get("text")
            found = _object(text)
    return found


def _object(text: Any) -> dict[str, Any] | None:
    import json

    try:
        value = json.loads(str(text))
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
