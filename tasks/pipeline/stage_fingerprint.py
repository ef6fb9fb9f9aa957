"""Fingerprint of a stage: the readable content of its key, stored with its files; and the decisions about stages.

    <key>.open/conditions.json     of an unfinished stage
    <key>/manifest.json            of a finished one, under `conditions`
    <output>/<pipeline>/stages/<stage>/decisions.jsonl   why it was run, resumed or reused; one line each, newest last

A fingerprint holds plain settings (secrets masked), digests of the inputs with their paths, and digests of code: of the
user's modules by function, of the posttrain sources that the stage reaches by file.
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
from rl_core.settings.deprecated_keys import rename_recorded_keys
from rl_core.storage.append_log import encode_checked_line, read_records
from rl_core.storage.atomic_files import write_text_atomic
from rl_core.storage.manifest import read_manifest
from tasks.config.displayed_settings import mask_secrets
from tasks.pipeline.stage_key import StageKey
from tasks.pipeline.stage_result import StageResult
from tasks.stage_registry import START_MODEL

FINGERPRINT_FILE = "conditions.json"
DECISIONS_FILE = "decisions.jsonl"
SIDE_MODELS = {START_MODEL, "champion", "challenger"}  # names that no training stage has
_MAX_DECISIONS = 100  # per stage
_MAX_SHOWN_FILES = 5  # names of files in a message
_MAX_VALUE_LENGTH = 120  # characters of a value in a message
_ABSENT = object()


def build_stage_fingerprint(
    name: str,
    key: StageKey,
    inputs: Mapping[str, StageResult | Path | str],
    before: Mapping[str, str],
) -> dict[str, Any]:
    """Build the fingerprint of a stage as plain JSON values.

    Args:
        before: keys of the stages that ran earlier in the same pipeline run, by stage.
    """
    environment = json.dumps(key.parts["environment"], sort_keys=True, default=str)
    environment_digest = hashlib.sha256(environment.encode()).hexdigest()[:16]
    values = {
        **mask_secrets(key.parts),
        "stage": name,
        "key": key.key,
        "environment_digest": environment_digest,  # reveals changed secrets
        "places": {part: _describe_input_source(value) for part, value in inputs.items()},
        "modules": {
            module: {"file": str(source.file), "functions": source.digest_functions()}
            for module, source in key.modules.items()
        },
        "sources": key.sources,
        "before": dict(before),
        "time": time.strftime("%Y-%m-%d %H:%M:%S"),
    }
    return dict(json.loads(json.dumps(values, default=str)))


def _describe_input_source(value: StageResult | Path | str) -> str:
    return value.folder if isinstance(value, StageResult) else str(value)


def read_stage_fingerprint(folder: Path) -> dict[str, Any] | None:
    """Read the fingerprint of an unfinished stage; None = it was not recorded, or cannot be read."""
    try:
        fingerprint = json.loads((folder / FINGERPRINT_FILE).read_text())
    except (OSError, ValueError):
        return None
    return fingerprint if isinstance(fingerprint, dict) and "key" in fingerprint else None


def read_finished_fingerprint(folder: Path) -> dict[str, Any] | None:
    """Read the fingerprint of a finished stage; None = it was not recorded, or its manifest is damaged."""
    try:
        fingerprint = read_manifest(folder).get("conditions")
    except CorruptError:
        return None
    return fingerprint if isinstance(fingerprint, dict) else None


def compare_fingerprints(
    old: Mapping[str, Any], new: Mapping[str, Any], *, with_inputs: bool = True
) -> list[str]:
    """List the differences of two fingerprints, one line each: name, old and new value; [] = none.

    Args:
        with_inputs: also compare the inputs' content.
    """
    stage = str(new.get("stage", ""))
    differences = [
        *_compare_values(f"stages.{stage}", old.get("settings"), new.get("settings")),
        *_compare_values("environment", old.get("environment"), new.get("environment")),
        *_compare_values("model", old.get("model"), new.get("model")),
        *_compare_values("seed", old.get("seed"), new.get("seed")),
        *_compare_values(f"seeds.{stage}", old.get("stage_seed"), new.get("stage_seed")),
    ]
    if old.get("environment_digest") != new.get("environment_digest") and not any(
        line.startswith("environment") for line in differences
    ):
        differences.append("environment.options: a secret has another value")
    differences += _compare_content(old, new)
    if with_inputs:
        differences += _compare_inputs(old, new, listed=differences)
    if old.get("code") != new.get("code"):
        differences.append(_describe_code_change(old, new))
    return differences


def _compare_values(key: str, old: Any, new: Any) -> Iterator[str]:
    new_leaves = dict(_iter_leaves(key, new))
    old_leaves = rename_recorded_keys(dict(_iter_leaves(key, old)), new_leaves)
    for name in dict.fromkeys([*old_leaves, *new_leaves]):
        before, after = old_leaves.get(name, _ABSENT), new_leaves.get(name, _ABSENT)
        if before != after:
            yield f"{name}: {_format_value(before)} -> {_format_value(after)}"


def _iter_leaves(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) of every leaf; a list of plain values is one leaf."""
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
    """List the user's files and modules whose content differs; for modules, the functions that differ."""
    old_content, new_content = old.get("content") or {}, new.get("content") or {}
    settings = {"path": "environment.options.path", "chat_template": "model.chat_template"}
    for name in dict.fromkeys([*old_content, *new_content]):
        before, after = old_content.get(name), new_content.get(name)
        if before == after:
            continue
        digests = f"{_shorten_digest(before)} -> {_shorten_digest(after)}"
        if not name.startswith("code "):
            yield f"{settings.get(name, name)}: content of the file {digests}"
            continue
        module = name.removeprefix("code ")
        old_module, new_module = (side.get("modules", {}).get(module, {}) for side in (old, new))
        file = new_module.get("file") or old_module.get("file") or module
        functions = _describe_changed_functions(
            old_module.get("functions"), new_module.get("functions")
        )
        yield f"code {module} ({file}){functions}: {digests}"


def _describe_changed_functions(
    old: Mapping[str, str] | None, new: Mapping[str, str] | None
) -> str:
    """Return ', function score' for a module in which one function differs."""
    if not old or not new:
        return ""
    names = [name for name in dict.fromkeys([*old, *new]) if old.get(name) != new.get(name)]
    functions = [name for name in names if name]
    parts = [f"function{'s' * (len(functions) > 1)} {', '.join(functions)}"] if functions else []
    parts += ["code outside of functions"] if "" in names else []
    return f", {' and '.join(parts)}" if parts else ", only comments or layout"


def _compare_inputs(
    old: Mapping[str, Any], new: Mapping[str, Any], listed: Iterable[str]
) -> Iterator[str]:
    """List the inputs whose content differs.

    Under an input from another stage, add what changed there, unless it is listed already.
    """
    known, causes = set(listed), _InputChangeCauses()
    for line, before, now in _list_changed_inputs(old, new):
        yield line
        for cause in causes(before, now):
            if cause not in known:
                known.add(cause)
                yield f"  because of: {cause}"


def _list_changed_inputs(
    old: Mapping[str, Any], new: Mapping[str, Any]
) -> Iterator[tuple[str, str, str]]:
    """Yield (line, old path, new path) of each input whose content differs."""
    old_inputs, new_inputs = old.get("inputs") or {}, new.get("inputs") or {}
    for name in dict.fromkeys([*old_inputs, *new_inputs]):
        old_digest, new_digest = old_inputs.get(name), new_inputs.get(name)
        if old_digest == new_digest:
            continue
        old_path, new_path = ((side.get("places") or {}).get(name, "absent") for side in (old, new))
        path = new_path if new_path == old_path else f"{old_path} -> {new_path}"
        digests = f"{_shorten_digest(old_digest)} -> {_shorten_digest(new_digest)}"
        yield f"input {name} ({path}): {digests}", old_path, new_path


class _InputChangeCauses:
    """Root causes of differences of inputs that stages produced, without consequences of earlier stages' changes."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], list[str]] = {}

    def __call__(self, before: str, now: str) -> list[str]:
        """Return lines as of `compare_fingerprints`, each once; [] if one of the two is no finished stage."""
        if (before, now) not in self._known:
            self._known[before, now] = self._find_causes(before, now)
        return self._known[before, now]

    def _find_causes(self, before: str, now: str) -> list[str]:
        old, new = (
            read_finished_fingerprint(_resolve_stage_folder(Path(path))) for path in (before, now)
        )
        if old is None or new is None or before == now:
            return []
        lines = compare_fingerprints(old, new, with_inputs=False)
        for line, *paths in _list_changed_inputs(old, new):
            lines += self(*paths) or [line]
        return list(dict.fromkeys(lines))


def _resolve_stage_folder(path: Path) -> Path:
    return path.parent if path.name == "model" else path


def _describe_code_change(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    old_sources, new_sources = old.get("sources") or {}, new.get("sources") or {}
    names = sorted(old_sources.keys() | new_sources.keys())
    files = [name for name in names if old_sources.get(name) != new_sources.get(name)]
    listed = ", ".join(files[:_MAX_SHOWN_FILES])
    if len(files) > _MAX_SHOWN_FILES:
        listed += f" and {len(files) - _MAX_SHOWN_FILES} more"
    change = f"posttrain itself: code {old.get('code')} -> {new.get('code')}"
    return f"{change} ({listed})" if listed else change


def _shorten_digest(value: Any) -> str:
    return str(value)[:12] if value is not None else "absent"


@dataclass(frozen=True)
class StageDecision:
    """Why a stage was run or skipped."""

    time: str
    key: str
    kind: str  # cached, first, changed, resumed, drifted, damaged, fresh
    changes: tuple[str, ...] = ()  # relative to `compared`
    compared: str = ""  # another key of the stage

    def __str__(self) -> str:
        """The decision as a clause, without its changes."""
        return {
            "cached": "not run again: already finished with the same settings, inputs and code",
            "first": "run for the first time",
            "changed": f"run because this changed since {self.compared}",
            "resumed": "resumed from its checkpoint",
            "incomplete": "run again because a later stage needs what the finished folder lacks",
            "drifted": "resumed from its checkpoint although this changed",
            "damaged": "run again because the finished folder was damaged (it was moved aside)",
            "fresh": "run again as requested (--fresh)",
        }.get(self.kind, self.kind)


def record_decision(
    final: Path, kind: str, fingerprint: Mapping[str, Any], drift: Sequence[str] = ()
) -> StageDecision:
    """Record why a stage is run or reused; compare a changed one with the newest finished one."""
    compared, changes = "", list(drift)
    if kind == "first":
        earlier = _read_newest_finished(final, fingerprint)
        if earlier is not None:
            kind, compared = "changed", str(earlier.get("key", ""))
            changes = compare_fingerprints(earlier, fingerprint) or ["nothing that was recorded"]
    decision = StageDecision(
        time.strftime("%Y-%m-%d %H:%M:%S"), final.name, kind, tuple(changes), compared
    )
    lines = [
        encode_checked_line({**vars(entry), "changes": list(entry.changes)})
        for entry in (*read_decisions(final.parent), decision)
    ]
    with contextlib.suppress(OSError):  # the file is only for people
        write_text_atomic(final.parent / DECISIONS_FILE, b"".join(lines[-_MAX_DECISIONS:]).decode())
    return decision


def _read_newest_finished(final: Path, fingerprint: Mapping[str, Any]) -> dict[str, Any] | None:
    """Read the fingerprint of the stage that finished last under another key.

    An evaluation of only the start model, or of a champion, is compared with its kind alone.
    """
    folders = [
        path
        for path in final.parent.iterdir()
        if path.is_dir() and "." not in path.name and path != final
    ]
    side_models = list_side_models(fingerprint)
    for folder in sorted(folders, key=lambda path: os.stat(path).st_mtime, reverse=True):
        finished = read_finished_fingerprint(folder)
        if finished is None or list_side_models(finished) == side_models:
            return finished
    return None


def list_side_models(fingerprint: Mapping[str, Any]) -> set[str]:
    """List the models of an evaluation that plays no trained model, such as the start model; empty for other stages."""
    if fingerprint.get("stage") not in ("evaluate", "suites"):
        return set()
    inputs = fingerprint.get("inputs") or {}
    models = {name.removeprefix("model.") for name in inputs if name.startswith("model.")}
    return models if models <= SIDE_MODELS else set()


def read_decisions(folder: Path) -> list[StageDecision]:
    """Read the decisions about a stage, oldest first; skip damaged lines."""
    decisions = []
    for row in read_records(folder / DECISIONS_FILE):
        with contextlib.suppress(ValueError, TypeError, KeyError):
            decisions.append(StageDecision(**{**row, "changes": tuple(row["changes"])}))
    return decisions
