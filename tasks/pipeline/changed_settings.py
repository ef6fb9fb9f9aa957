"""Settings in which a run differs from the one before it, for the table of runs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tasks.tracking.journal import events_path, read_lines
from tasks.tracking.values import flatten

__all__ = ["changed_settings", "told_settings"]

_PLACES = ("output", "name", "tracking.", "run.")  # beginnings of settings that decide nothing of what is computed
_TOLD = 5  # settings in the text
_SET = 12  # settings that differ from their defaults
# Of a setting's last part: what people ask for first. Others follow in the config's order.
_FIRST = ("algorithm", "loss", "learning_rate", "iterations", "epochs", "group_size", "kl_coef", "rewards", "seed")
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


def told_settings(given: Mapping[str, Any]) -> str:
    """Settings that are not their defaults, for the table of runs: `policy.algorithm=grpo, policy.iterations=400`.

    Args:
        given: nested, as in a config.
    """
    flat = {key: text for key, text in flatten(given).items() if not key.startswith(_PLACES) and text != "{}"}
    places = {name: place for place, name in enumerate(_FIRST)}
    ordered = sorted(flat, key=lambda key: places.get(key.rpartition(".")[2], len(places)))
    told = [f"{key.removeprefix('stages.')}={_short(flat[key])}" for key in ordered]
    more = f" and {len(told) - _SET} more" if len(told) > _SET else ""
    return ", ".join(told[:_SET]) + more or "defaults"


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
