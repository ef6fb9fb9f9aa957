"""Conditions of a stage: what its key is made of, kept beside its files, and compared for people.

    <key>.open/conditions.json     of a stage that is not finished
    <key>/manifest.json            of a finished one, under `conditions`

They hold the plain settings (secrets masked), digests of the inputs with their places, and digests of code: of the
user's modules by function, of those of posttrain's own sources that the stage reaches by file.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rl_core.errors import CorruptError
from rl_core.storage.manifest import read_manifest
from tasks.config.masking import masked
from tasks.pipeline.key import StageKey
from tasks.pipeline.result import StageResult

__all__ = ["CONDITIONS", "changes", "describe", "finished_conditions", "read_conditions"]

CONDITIONS = "conditions.json"
_SHOWN = 5  # names of files in a message
_WIDEST = 120  # characters of a value in a message


def describe(
    name: str,
    key: StageKey,
    inputs: Mapping[str, StageResult | Path | str],
    before: Mapping[str, str],
) -> dict[str, Any]:
    """Conditions of a stage as plain JSON values.

    Args:
        before: keys of the stages that ran earlier in the same pipeline run, by stage.
    """
    environment = json.dumps(key.parts["environment"], sort_keys=True, default=str)
    plain = {**masked(key.parts), "stage": name, "key": key.key}
    values = {
        **plain,
        "environment_digest": hashlib.sha256(environment.encode()).hexdigest()[:16],  # tells changed secrets
        "places": {part: _place(value) for part, value in inputs.items()},
        "modules": {
            module: {"file": str(found.file), "functions": found.functions()} for module, found in key.modules.items()
        },
        "sources": key.sources,
        "before": dict(before),
        "time": time.strftime("%Y-%m-%d %H:%M:%S"),
    }
    return dict(json.loads(json.dumps(values, default=str)))


def _place(value: StageResult | Path | str) -> str:
    return value.folder if isinstance(value, StageResult) else str(value)


def read_conditions(folder: Path) -> dict[str, Any] | None:
    """Conditions of a stage that is not finished; None = they were not noted, or cannot be read."""
    try:
        found = json.loads((folder / CONDITIONS).read_text())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and "key" in found else None


def finished_conditions(folder: Path) -> dict[str, Any] | None:
    """Conditions of a finished stage; None = they were not noted, or its manifest is damaged."""
    try:
        found = read_manifest(folder).get("conditions")
    except CorruptError:
        return None
    return found if isinstance(found, dict) else None


def changes(old: Mapping[str, Any], new: Mapping[str, Any], *, with_inputs: bool = True) -> list[str]:
    """Differences of two stages' conditions, a line each: name, old and new value; [] = the same.

    Args:
        with_inputs: compare the inputs' content as well.
    """
    stage = str(new.get("stage", ""))
    found = [
        *_plain_changes(f"stages.{stage}", old.get("settings"), new.get("settings")),
        *_plain_changes("environment", old.get("environment"), new.get("environment")),
        *_plain_changes("model", old.get("model"), new.get("model")),
        *_plain_changes("seed", old.get("seed"), new.get("seed")),
        *_plain_changes(f"seeds.{stage}", old.get("stage_seed"), new.get("stage_seed")),
    ]
    if old.get("environment_digest") != new.get("environment_digest") and not any(
        line.startswith("environment") for line in found
    ):
        found.append("environment.options: a secret has another value")
    found += _content_changes(old, new)
    if with_inputs:
        found += _input_changes(old, new, told=found)
    if old.get("code") != new.get("code"):
        found.append(_own_code_change(old, new))
    return found


def _plain_changes(place: str, old: Any, new: Any) -> Iterator[str]:
    one, other = dict(_leaves(place, old)), dict(_leaves(place, new))
    for name in dict.fromkeys([*one, *other]):
        if one.get(name, _ABSENT) != other.get(name, _ABSENT):
            yield f"{name}: {_shown(one.get(name, _ABSENT))} -> {_shown(other.get(name, _ABSENT))}"


_ABSENT = object()


def _leaves(place: str, value: Any) -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of every leaf; a list of plain values is one."""
    if isinstance(value, Mapping) and value:
        for name, item in value.items():
            yield from _leaves(f"{place}.{name}", item)
    elif isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
        for index, item in enumerate(value):
            yield from _leaves(f"{place}[{index}]", item)
    else:
        yield place, value


def _shown(value: Any) -> str:
    text = "absent" if value is _ABSENT else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _WIDEST else f"{text[:_WIDEST]}..."


def _content_changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[str]:
    """Files and modules of the user's whose content differs; modules with the functions that differ."""
    one, other = old.get("content") or {}, new.get("content") or {}
    for name in dict.fromkeys([*one, *other]):
        if one.get(name) == other.get(name):
            continue
        digests = f"{_digest(one.get(name))} -> {_digest(other.get(name))}"
        if not name.startswith("code "):
            place = {"path": "environment.options.path", "chat_template": "model.chat_template"}.get(name, name)
            yield f"{place}: content of the file {digests}"
            continue
        module = name.removeprefix("code ")
        before, now = (side.get("modules", {}).get(module, {}) for side in (old, new))
        file = now.get("file") or before.get("file") or module
        yield f"code {module} ({file}){_functions(before.get('functions'), now.get('functions'))}: {digests}"


def _functions(old: Mapping[str, str] | None, new: Mapping[str, str] | None) -> str:
    """', function score' for a module in which one function differs."""
    if not old or not new:
        return ""
    names = [name for name in dict.fromkeys([*old, *new]) if old.get(name) != new.get(name)]
    functions = [name for name in names if name]
    parts = [f"function{'s' * (len(functions) > 1)} {', '.join(functions)}"] if functions else []
    parts += ["code outside of functions"] if "" in names else []
    return f", {' and '.join(parts)}" if parts else ", comments or layout alone"


def _input_changes(old: Mapping[str, Any], new: Mapping[str, Any], told: Iterable[str]) -> Iterator[str]:
    """Inputs whose content differs; of one that other stages made, what differs there first, unless it is told."""
    known, causes = set(told), _Causes()
    for line, before, now in _changed_inputs(old, new):
        yield line
        for cause in causes(before, now):
            if cause not in known:
                known.add(cause)
                yield f"  of it: {cause}"


def _changed_inputs(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """(line, place before, place now) of each input whose content differs."""
    one, other = old.get("inputs") or {}, new.get("inputs") or {}
    for name in dict.fromkeys([*one, *other]):
        if one.get(name) == other.get(name):
            continue
        before, now = ((side.get("places") or {}).get(name, "absent") for side in (old, new))
        place = now if now == before else f"{before} -> {now}"
        yield f"input {name} ({place}): {_digest(one.get(name))} -> {_digest(other.get(name))}", before, now


class _Causes:
    """First causes of the difference of two inputs that stages made: not what follows from an earlier stage's."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], list[str]] = {}

    def __call__(self, before: str, now: str) -> list[str]:
        """Lines as of `changes`, each once; [] where one of the two is no finished stage."""
        if (before, now) not in self._known:
            self._known[before, now] = self._found(before, now)
        return self._known[before, now]

    def _found(self, before: str, now: str) -> list[str]:
        old, new = (finished_conditions(_stage_folder(Path(place))) for place in (before, now))
        if old is None or new is None or before == now:
            return []
        lines = changes(old, new, with_inputs=False)
        for line, *places in _changed_inputs(old, new):
            lines += self(*places) or [line]
        return list(dict.fromkeys(lines))


def _stage_folder(place: Path) -> Path:
    return place.parent if place.name == "model" else place


def _own_code_change(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    one, other = old.get("sources") or {}, new.get("sources") or {}
    files = [name for name in sorted(one.keys() | other.keys()) if one.get(name) != other.get(name)]
    listed = ", ".join(files[:_SHOWN]) + (f" and {len(files) - _SHOWN} more" if len(files) > _SHOWN else "")
    return f"posttrain itself: code {old.get('code')} -> {new.get('code')}" + (f" ({listed})" if listed else "")


def _digest(value: Any) -> str:
    return str(value)[:12] if value is not None else "absent"
