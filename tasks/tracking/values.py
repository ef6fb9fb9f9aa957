"""Values in the form that MLflow accepts: names, flat parameters, tags, and a description of the environment."""

from __future__ import annotations

import dataclasses
import functools
import json
import platform
import re
import sys
from collections.abc import Mapping
from importlib import metadata
from typing import Any, NamedTuple

from rl_core.tracking import distinguish_name, replace_invalid_characters

# Tag of the time spent on a run in all its processes. MLflow's duration includes the gaps between them.
SECONDS_TAG = "seconds"
MAX_VALUE_LENGTH = 6000  # characters of a parameter's value that MLflow stores
MAX_NAME_LENGTH = 250
# characters of the tag `result`, which the runs table and the live page show
MAX_RESULT_LENGTH = 600
ELLIPSIS = " …"
_PASS_AT = re.compile(r"(pass)@(?=\d)")
_CLAUSE_ENDS = ("; ", ". ")
_MIN_SENTENCE_LENGTH = 12  # characters needed to recognise a truncated sentence


class VersionByContent(NamedTuple):
    """Model version identified by its content, before the store has assigned a number."""

    name: str  # of the registered model
    sha256: str  # the version's tag model_sha256


def shorten_result(text: str, limit: int = MAX_RESULT_LENGTH) -> str:
    """Shorten a text for the tag `result`: truncate after a clause, or a long clause after a word."""
    if len(text) <= limit:
        return text
    start = text[: max(0, limit - len(ELLIPSIS))].rpartition(" ")[0]
    clause_end = max(f"{start} ".rfind(mark) for mark in _CLAUSE_ENDS) + 1
    return start[: clause_end if clause_end > len(start) // 3 else None] + ELLIPSIS


def sanitize_store_name(name: str) -> str:
    """Return the nearest name of a metric, parameter or tag that the store accepts.

    Valid are letters, digits, _ - . : space, and / between parts. One invalid name makes the store refuse all tags of a
    call.
    """
    clean = replace_invalid_characters(name, r"\w.\- :/", merge=False)
    parts = [part for part in clean.split("/") if part.strip(". ")]
    return "/".join(parts)[:MAX_NAME_LENGTH] or "_"


def build_metric_store_name(name: str) -> str:
    """Return a metric's name that the store accepts; names that it would change stay different from each other."""
    known = _PASS_AT.sub(r"\1_", name)  # pass@4 has always been pass_4 there
    return distinguish_name(sanitize_store_name(known), known, MAX_NAME_LENGTH)


def flatten_settings(values: Any, prefix: str = "") -> dict[str, str]:
    """Flatten nested settings to dotted keys and texts, e.g.

    {"policy": {"levels": {"easy": 1}}} -> {"policy.levels.easy": "1"}.

    Lists of scalars become one JSON text; lists of mappings get an index. Numbers, true, false and null are written as
    in
    YAML. Values are truncated to the length that the store accepts.
    """
    if dataclasses.is_dataclass(values) and not isinstance(values, type):
        values = {field.name: getattr(values, field.name) for field in dataclasses.fields(values)}
    if isinstance(values, Mapping):
        items = [(str(key), value) for key, value in values.items()]
    elif isinstance(values, list | tuple) and any(_is_nested(value) for value in values):
        items = [(str(index), value) for index, value in enumerate(values)]
    else:
        return {sanitize_store_name(prefix): _format_param(values)}
    if not items and prefix:
        return {sanitize_store_name(prefix): "{}"}
    flat: dict[str, str] = {}
    for key, value in items:
        flat.update(flatten_settings(value, f"{prefix}.{key}" if prefix else key))
    return flat


def _is_nested(value: Any) -> bool:
    return isinstance(value, Mapping | list | tuple) or (
        dataclasses.is_dataclass(value) and not isinstance(value, type)
    )


def _format_param(value: Any) -> str:
    if isinstance(value, str):
        text = value
    else:
        try:
            text = json.dumps(value)
        except (TypeError, ValueError):
            text = str(value)
    return text if len(text) <= MAX_VALUE_LENGTH else text[: MAX_VALUE_LENGTH - 1] + "…"


@functools.cache
def freeze_environment() -> str:
    """List Python, the platform and every installed distribution with its version, like `pip freeze`."""
    lines = set(filter(None, map(_format_distribution, metadata.distributions())))
    head = f"# Python {sys.version.split()[0]} on {platform.platform()}\n"
    return head + "\n".join(sorted(lines, key=str.lower)) + "\n"


def _format_distribution(distribution: metadata.Distribution) -> str:
    """Format `name==version`, or "" without a name. `distribution.metadata` would parse the whole description."""
    # The last name is that of an .egg-info file.
    texts = map(distribution.read_text, ("METADATA", "PKG-INFO", ""))
    text = next(filter(None, texts), "")
    header = text.partition("\n\n")[0]
    values = []
    for key in ("Name", "Version"):
        match = re.search(rf"^{key}:[ \t]*(.*?)[ \t\r]*$", header, re.M)
        values.append(match[1] if match else "")
    name, version = values
    return f"{name}=={version}" if name else ""


def list_pinned_versions(*names: str) -> list[str]:
    """List `name==version` of the installed packages among `names`, without local build labels such as +cpu."""
    pins = []
    for name in names:
        try:
            pins.append(f"{name}=={metadata.version(name).split('+')[0]}")
        except metadata.PackageNotFoundError:
            continue
    return pins


def replace_sentence(text: str, old: str, new: str, default: str) -> str:
    """Replace the sentence `old` by `new`.

    A text without `old` is returned unchanged if it contains `new`; otherwise `default` is returned.
    """
    position = _find_sentence(text, old)
    if position >= 0:
        return text[:position] + new + text[position + len(old) :]
    return text if _find_sentence(text, new) >= 0 else default


def _find_sentence(text: str, sentence: str) -> int:
    """Return the position of a sentence whose end may be truncated with the text; -1 = not found."""
    position = text.find(sentence)
    if position >= 0:
        return position
    text = text.removesuffix(ELLIPSIS)
    for position in range(len(text) - _MIN_SENTENCE_LENGTH + 1):
        if sentence.startswith(text[position:]):
            return position
    return -1
