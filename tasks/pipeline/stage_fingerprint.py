"""Conditions of a stage: what its key is made of, kept beside its files, and compared for people.

    <key>.open/conditions.json     of a stage that is not finished
    <key>/manifest.json            of a finished one, under `conditions`

They hold the plain settings (secrets masked), digests of the inputs with their places, and digests of code: of the
user's modules by function, of those of posttrain's own sources that the stage reaches by file.

Decisions about stages: why one was run, resumed, or taken from an earlier run.

<output>/<pipeline>/stages/<stage>/decisions.jsonl   a line each, the newest last
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_core.errors import CorruptError
from rl_core.storage.atomic_files import write_text_atomic
from rl_core.storage.line_logs import encode_checked_line, read_checked_lines
from rl_core.storage.manifest import read_manifest
from tasks.config.displayed_settings import mask_secrets
from tasks.pipeline.stage_key import StageKey
from tasks.pipeline.stage_result import StageResult

FINGERPRINT_FILE = "conditions.json"
_MAX_SHOWN_FILES = 5  # names of files in a message
_MAX_VALUE_LENGTH = 120  # characters of a value in a message


def build_stage_fingerprint(
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
    plain = {**mask_secrets(key.parts), "stage": name, "key": key.key}
    values = {
        **plain,
        "environment_digest": hashlib.sha256(environment.encode()).hexdigest()[
            :16
        ],  # tells changed secrets
        "places": {part: _describe_input_source(value) for part, value in inputs.items()},
        "modules": {
            module: {"file": str(found.file), "functions": found.digest_functions()}
            for module, found in key.modules.items()
        },
        "sources": key.sources,
        "before": dict(before),
        "time": time.strftime("%Y-%m-%d %H:%M:%S"),
    }
    return dict(json.loads(json.dumps(values, default=str)))


def _describe_input_source(value: StageResult | Path | str) -> str:
    return value.folder if isinstance(value, StageResult) else str(value)


def read_stage_fingerprint(folder: Path) -> dict[str, Any] | None:
    """Conditions of a stage that is not finished; None = they were not noted, or cannot be read."""
    try:
        found = json.loads((folder / FINGERPRINT_FILE).read_text())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and "key" in found else None


def read_finished_fingerprint(folder: Path) -> dict[str, Any] | None:
    """Conditions of a finished stage; None = they were not noted, or its manifest is damaged."""
    try:
        found = read_manifest(folder).get("conditions")
    except CorruptError:
        return None
    return found if isinstance(found, dict) else None


def compare_fingerprints(
    old: Mapping[str, Any], new: Mapping[str, Any], *, with_inputs: bool = True
) -> list[str]:
    """Differences of two stages' conditions, a line each: name, old and new value; [] = the same.

    Args:
        with_inputs: compare the inputs' content as well.
    """
    stage = str(new.get("stage", ""))
    found = [
        *_compare_values(f"stages.{stage}", old.get("settings"), new.get("settings")),
        *_compare_values("environment", old.get("environment"), new.get("environment")),
        *_compare_values("model", old.get("model"), new.get("model")),
        *_compare_values("seed", old.get("seed"), new.get("seed")),
        *_compare_values(f"seeds.{stage}", old.get("stage_seed"), new.get("stage_seed")),
    ]
    if old.get("environment_digest") != new.get("environment_digest") and not any(
        line.startswith("environment") for line in found
    ):
        found.append("environment.options: a secret has another value")
    found += _compare_content(old, new)
    if with_inputs:
        found += _compare_inputs(old, new, listed=found)
    if old.get("code") != new.get("code"):
        found.append(_describe_code_change(old, new))
    return found


def _compare_values(key: str, old: Any, new: Any) -> Iterator[str]:
    one, other = dict(_iter_leaves(key, old)), dict(_iter_leaves(key, new))
    for name in dict.fromkeys([*one, *other]):
        if one.get(name, _ABSENT) != other.get(name, _ABSENT):
            yield f"{name}: {_format_value(one.get(name, _ABSENT))} -> {_format_value(other.get(name, _ABSENT))}"


_ABSENT = object()


def _iter_leaves(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of every leaf; a list of plain values is one."""
    if isinstance(value, Mapping) and value:
        for name, item in value.items():
            yield from _iter_leaves(f"{key}.{name}", item)
    elif isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
        for index, item in enumerate(value):
            yield from _iter_leaves(f"{key}[{index}]", item)
    else:
        yield key, value


def _format_value(value: Any) -> str:
    text = "absent" if value is _ABSENT else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _MAX_VALUE_LENGTH else f"{text[:_MAX_VALUE_LENGTH]}..."


def _compare_content(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[str]:
    """Files and modules of the user's whose content differs; modules with the functions that differ."""
    one, other = old.get("content") or {}, new.get("content") or {}
    for name in dict.fromkeys([*one, *other]):
        if one.get(name) == other.get(name):
            continue
        digests = f"{_shorten_digest(one.get(name))} -> {_shorten_digest(other.get(name))}"
        if not name.startswith("code "):
            place = {
                "path": "environment.options.path",
                "chat_template": "model.chat_template",
            }.get(name, name)
            yield f"{place}: content of the file {digests}"
            continue
        module = name.removeprefix("code ")
        before, now = (side.get("modules", {}).get(module, {}) for side in (old, new))
        file = now.get("file") or before.get("file") or module
        yield f"code {module} ({file}){_describe_changed_functions(before.get('functions'), now.get('functions'))}: {digests}"


def _describe_changed_functions(
    old: Mapping[str, str] | None, new: Mapping[str, str] | None
) -> str:
    """', function score' for a module in which one function differs."""
    if not old or not new:
        return ""
    names = [name for name in dict.fromkeys([*old, *new]) if old.get(name) != new.get(name)]
    functions = [name for name in names if name]
    parts = [f"function{'s' * (len(functions) > 1)} {', '.join(functions)}"] if functions else []
    parts += ["code outside of functions"] if "" in names else []
    return f", {' and '.join(parts)}" if parts else ", comments or layout alone"


def _compare_inputs(
    old: Mapping[str, Any], new: Mapping[str, Any], listed: Iterable[str]
) -> Iterator[str]:
    """Inputs whose content differs; of one that other stages made, what differs there first, unless it is told."""
    known, causes = set(listed), _InputChangeCauses()
    for line, before, now in _list_changed_inputs(old, new):
        yield line
        for cause in causes(before, now):
            if cause not in known:
                known.add(cause)
                yield f"  of it: {cause}"


def _list_changed_inputs(
    old: Mapping[str, Any], new: Mapping[str, Any]
) -> Iterator[tuple[str, str, str]]:
    """(line, place before, place now) of each input whose content differs."""
    one, other = old.get("inputs") or {}, new.get("inputs") or {}
    for name in dict.fromkeys([*one, *other]):
        if one.get(name) == other.get(name):
            continue
        before, now = ((side.get("places") or {}).get(name, "absent") for side in (old, new))
        place = now if now == before else f"{before} -> {now}"
        yield (
            f"input {name} ({place}): {_shorten_digest(one.get(name))} -> {_shorten_digest(other.get(name))}",
            before,
            now,
        )


class _InputChangeCauses:
    """First causes of the difference of two inputs that stages made: not what follows from an earlier stage's."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], list[str]] = {}

    def __call__(self, before: str, now: str) -> list[str]:
        """Lines as of `changes`, each once; [] where one of the two is no finished stage."""
        if (before, now) not in self._known:
            self._known[before, now] = self._find_causes(before, now)
        return self._known[before, now]

    def _find_causes(self, before: str, now: str) -> list[str]:
        old, new = (
            read_finished_fingerprint(_resolve_stage_folder(Path(place))) for place in (before, now)
        )
        if old is None or new is None or before == now:
            return []
        lines = compare_fingerprints(old, new, with_inputs=False)
        for line, *places in _list_changed_inputs(old, new):
            lines += self(*places) or [line]
        return list(dict.fromkeys(lines))


def _resolve_stage_folder(place: Path) -> Path:
    return place.parent if place.name == "model" else place


def _describe_code_change(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    one, other = old.get("sources") or {}, new.get("sources") or {}
    files = [name for name in sorted(one.keys() | other.keys()) if one.get(name) != other.get(name)]
    listed = ", ".join(files[:_MAX_SHOWN_FILES]) + (
        f" and {len(files) - _MAX_SHOWN_FILES} more" if len(files) > _MAX_SHOWN_FILES else ""
    )
    return f"posttrain itself: code {old.get('code')} -> {new.get('code')}" + (
        f" ({listed})" if listed else ""
    )


def _shorten_digest(value: Any) -> str:
    return str(value)[:12] if value is not None else "absent"


DECISIONS_FILE = "decisions.jsonl"
_MAX_DECISIONS = 100  # of a stage


@dataclass(frozen=True)
class StageDecision:
    """Why a stage was run, or was not."""

    time: str
    key: str
    kind: str  # cached, first, changed, resumed, drifted, damaged, fresh
    changes: tuple[str, ...] = ()  # against `compared`
    compared: str = ""  # another key of the stage

    def __str__(self) -> str:
        """The decision as a clause, without its changes."""
        return {
            "cached": "not run again: finished before with the same settings, inputs and code",
            "first": "run for the first time",
            "changed": f"run, since this changed against {self.compared}",
            "resumed": "resumed from its checkpoint",
            "drifted": "resumed from its checkpoint although this changed",
            "damaged": "run again, since the finished folder was damaged (it is set aside)",
            "fresh": "run again, as asked for (--fresh)",
        }.get(self.kind, self.kind)


def record_decision(
    final: Path, kind: str, conditions: Mapping[str, Any], drift: Sequence[str] = ()
) -> StageDecision:
    """Note why a stage is run or taken as it is; of one that is run anew, against the newest finished one."""
    compared, found = "", list(drift)
    if kind == "first":
        earlier = _read_newest_finished(final)
        if earlier is not None:
            kind, compared = "changed", str(earlier.get("key", ""))
            found = compare_fingerprints(earlier, conditions) or ["nothing that was noted"]
    decision = StageDecision(
        time.strftime("%Y-%m-%d %H:%M:%S"), final.name, kind, tuple(found), compared
    )
    lines = [
        encode_checked_line({**vars(kept), "changes": list(kept.changes)})
        for kept in (*read_decisions(final.parent), decision)
    ]
    with contextlib.suppress(OSError):  # for people alone
        write_text_atomic(final.parent / DECISIONS_FILE, b"".join(lines[-_MAX_DECISIONS:]).decode())
    return decision


def _read_newest_finished(final: Path) -> dict[str, Any] | None:
    """Conditions of the stage that was finished last, under another key."""
    folders = [
        path
        for path in final.parent.iterdir()
        if path.is_dir() and "." not in path.name and path != final
    ]
    newest = max(folders, key=lambda path: os.stat(path).st_mtime, default=None)
    return None if newest is None else read_finished_fingerprint(newest)


def read_decisions(folder: Path) -> list[StageDecision]:
    """Decisions about a stage, the oldest first; damaged lines are passed over."""
    found = []
    for line in read_checked_lines(folder / DECISIONS_FILE):
        with contextlib.suppress(ValueError, TypeError, KeyError):
            row: Any = line.record
            found.append(StageDecision(**{**row, "changes": tuple(row["changes"])}))
    return found
