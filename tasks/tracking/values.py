"""Values as MLflow accepts them: names, flat parameters, tags, and a description of the machine."""

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

SECONDS_TAG = "seconds"  # tag: time spent on a run in all its processes; MLflow's own duration counts the gaps as well


class VersionByContent(NamedTuple):
    """A model version by its content, whose number the store has not given yet."""

    name: str  # of the registered model
    sha256: str  # the version's tag model_sha256


MAX_VALUE_LENGTH = 6000  # characters of a parameter's value that MLflow keeps
MAX_NAME_LENGTH = 250
# characters of the tag `result`, which the runs table and the live page show
MAX_RESULT_LENGTH = 600
ELLIPSIS = " …"
_CLAUSE_ENDS = ("; ", ". ")
_MIN_SENTENCE_LENGTH = 12  # characters by which a sentence is known that was cut off


def shorten_result(text: str, limit: int = MAX_RESULT_LENGTH) -> str:
    """The text as the tag `result`: where it is too long, it is cut behind a clause, a long clause behind a word."""
    if len(text) <= limit:
        return text
    kept = text[: max(0, limit - len(ELLIPSIS))].rpartition(" ")[0]
    clause = max(f"{kept} ".rfind(mark) for mark in _CLAUSE_ENDS) + 1
    return kept[: clause if clause > len(kept) // 3 else None] + ELLIPSIS


def sanitize_metric_name(name: str) -> str:
    """The nearest name that the store accepts: letters, digits, _ - . : space, and / between parts."""
    clean = re.sub(r"[^\w.\- :/]", "_", name)
    parts = [part for part in clean.split("/") if part.strip(". ")]
    return "/".join(parts)[:MAX_NAME_LENGTH] or "_"


def sanitize_param_name(name: str) -> str:
    """As `metric_name`, for parameters."""
    return sanitize_metric_name(name)


def sanitize_tag_name(name: str) -> str:
    """As `metric_name`, for tags: one that the store refuses would take the others along."""
    return sanitize_metric_name(name)


def flatten_settings(values: Any, prefix: str = "") -> dict[str, str]:
    """Nested settings as dotted keys and texts: {"policy": {"levels": {"easy": 1}}} -> {"policy.levels.easy": "1"}.

    Lists of plain values stay one JSON text; lists of mappings get an index. Numbers, true, false and null are
    written as in YAML. Values are cut at what the store keeps.
    """
    if dataclasses.is_dataclass(values) and not isinstance(values, type):
        values = {field.name: getattr(values, field.name) for field in dataclasses.fields(values)}
    if isinstance(values, Mapping):
        items = [(str(key), value) for key, value in values.items()]
    elif isinstance(values, list | tuple) and any(_is_nested(value) for value in values):
        items = [(str(index), value) for index, value in enumerate(values)]
    else:
        return {sanitize_param_name(prefix): _format_param(values)}
    if not items and prefix:
        return {sanitize_param_name(prefix): "{}"}
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
    """Python, platform and every installed distribution with its version, as `pip freeze` would list them."""
    lines = set(filter(None, map(_format_distribution, metadata.distributions())))
    head = f"# Python {sys.version.split()[0]} on {platform.platform()}\n"
    return head + "\n".join(sorted(lines, key=str.lower)) + "\n"


def _format_distribution(distribution: metadata.Distribution) -> str:
    """`name==version`; "" where there is no name. `distribution.metadata` parses the whole description for it."""
    # the last: an .egg-info that is a file
    texts = map(distribution.read_text, ("METADATA", "PKG-INFO", ""))
    text = next(filter(None, texts), "")
    head = text.partition("\n\n")[0]
    found = {
        key: re.search(rf"^{key}:[ \t]*(.*?)[ \t\r]*$", head, re.M) for key in ("Name", "Version")
    }
    name, version = ((one[1] if one else "") for one in found.values())
    return f"{name}=={version}" if name else ""


def list_pinned_versions(*names: str) -> list[str]:
    """`name==version` of the installed ones among `names`; local build labels such as +cpu are left out."""
    pins = []
    for name in names:
        try:
            pins.append(f"{name}=={metadata.version(name).split('+')[0]}")
        except metadata.PackageNotFoundError:
            continue
    return pins


def replace_sentence(text: str, old: str, new: str, default: str) -> str:
    """The text with `new` in place of `old`; as it is, if it says `new`; `otherwise` if it says neither."""
    if (place := _find_sentence(text, old)) >= 0:
        return text[:place] + new + text[place + len(old) :]
    return text if _find_sentence(text, new) >= 0 else default


def _find_sentence(text: str, sentence: str) -> int:
    """Place of a sentence of which the end may have been cut off with the text's; -1 = it is not there."""
    if (found := text.find(sentence)) >= 0:
        return found
    text = text.removesuffix(ELLIPSIS)
    return next(
        (
            place
            for place in range(len(text) - _MIN_SENTENCE_LENGTH + 1)
            if sentence.startswith(text[place:])
        ),
        -1,
    )
