"""Writes the generated pages of the documentation: configuration and metric references.

`python docs/tools/generate.py` writes them, `--check` only names the stale ones. The pages are committed, so that they
can be read and reviewed without building the site; a test runs the check.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import sys
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Union

DOCS = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(DOCS.parent))  # called as a file, from a checkout

from rl_core.analysis.metric_reference import GROUPS, MetricGroup  # noqa: E402
from rl_core.settings import Settings  # noqa: E402
from tasks.config.settings import PipelineSettings  # noqa: E402

__all__ = ["configuration_page", "main", "metrics_page", "pages"]

NOTE = "<!-- Written by docs/tools/generate.py; edit the source named below instead. -->\n\n"

_LIMITS = {"gt": "above", "ge": "at least", "lt": "below", "le": "at most"}
_TYPES = {int: "int", float: "float", str: "text", bool: "bool"}

_CONFIGURATION = """\
# Configuration reference

Every key of a pipeline's YAML file, with its type, default and range. Generated from the settings classes
(`rl_core/settings/`, `tasks/config/settings.py`), from which the loader, the error messages and the Prefect form are
built as well.

- A key that is left out takes its default; a stage that is left out (or `null`) does not run; `{}` means its defaults.
- An unknown key, a wrong type or a value out of range stops before anything runs, with file, line, key and the allowed
  values.
- Any key can be changed on the command line: `--set stages.policy.learning_rate=1e-6`.
- `posttrain validate CONFIG --show` prints all settings of a file, defaults included.

"""

_METRICS = """\
# Metric reference

Every metric that a run logs, in MLflow, in `metrics.jsonl` of a stage's folder and on the monitor's page. Generated
from `rl_core/analysis/metric_reference.py`. Text in braces stands for a name: `{level}` for a level of the environment,
`{model}` for a model of the run, `{component}` for a component of the reward (an import path with `.` for `:`).

The x axis is the number of optimizer steps. Exit conditions, early stopping and rollback of the
[curriculum](curriculum.md#exit-conditions) name some of these.

"""


def pages() -> dict[Path, str]:
    """Path of each generated page -> its text."""
    return {DOCS / "configuration.md": configuration_page(), DOCS / "metrics.md": metrics_page()}


def configuration_page() -> str:
    """Markdown of the configuration reference."""
    parts = [NOTE, _CONFIGURATION]
    blocks = list(_blocks("", PipelineSettings))
    places: dict[type[Settings], list[str]] = {}
    for place, cls in blocks:
        places.setdefault(cls, []).append(place)
    anchors = {cls: re.sub(r"[.\[\]]", "", found[0]) for cls, found in places.items()}
    parts += [_section(cls, found, anchors) for cls, found in places.items()]
    return "\n".join(part.rstrip("\n") + "\n" for part in parts)


def metrics_page() -> str:
    """Markdown of the metric reference."""
    return "\n".join([NOTE + _METRICS.rstrip("\n") + "\n", *(_group(group) for group in GROUPS)])


def _blocks(place: str, cls: type[Settings]) -> Iterator[tuple[str, type[Settings]]]:
    """Dotted place and class of every block of settings, outer ones first."""
    yield place, cls
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        inner, is_list = _inner(hints[field.name])
        if inner is not None:
            name = f"{place}.{field.name}".lstrip(".") + ("[]" if is_list else "")
            yield from _blocks(name, inner)


def _inner(hint: Any) -> tuple[type[Settings] | None, bool]:
    """The settings class in a type, and whether the type is a list of it."""
    if isinstance(hint, type) and issubclass(hint, Settings):
        return hint, False
    arguments = typing.get_args(hint)
    if typing.get_origin(hint) is tuple and arguments:
        return _inner(arguments[0])[0], True
    for argument in arguments if typing.get_origin(hint) in (Union, types.UnionType) else ():
        found = _inner(argument)
        if found[0] is not None:
            return found
    return None, False


def _section(cls: type[Settings], places: Sequence[str], anchors: Mapping[type[Settings], str]) -> str:
    title = f"`{places[0]}`" if places[0] else "Top level"
    lines = [f"## {title}", "", (cls.__doc__ or "").split("\n\n")[0].strip(), ""]
    if len(places) > 1:
        lines += ["Also " + ", ".join(f"`{place}`" for place in places[1:]) + ".", ""]
    lines += ["| key | type | default | meaning |", "|---|---|---|---|"]
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        limits = " and ".join(f"{_LIMITS[name]} {limit}" for name, limit in field.metadata.items() if name in _LIMITS)
        meaning = field.metadata["doc"] + (f"; {limits}" if limits else "")
        row = (f"`{field.name}`", _type(hints[field.name], anchors), _default(field), meaning)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |")
    return "\n".join(lines) + "\n"


def _type(hint: Any, anchors: Mapping[type[Settings], str]) -> str:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        return " or ".join("null" if part is type(None) else _type(part, anchors) for part in arguments)
    if origin is Literal:
        return ", ".join(f"`{argument}`" for argument in arguments)
    if origin is tuple:
        inner = _type(arguments[0], anchors)
        return f"list of {inner}" if arguments[-1] is ... else f"{len(arguments)} x {inner}"
    if origin is dict:
        return f"name: {'any value' if arguments[1] is Any else _type(arguments[1], anchors)}"
    block, _ = _inner(hint)
    return f"[block](#{anchors[block]})" if block is not None else _TYPES.get(hint, "any value")


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default_factory is not dataclasses.MISSING:
        return f"`{_yaml(field.default_factory())}`"
    if field.default is dataclasses.MISSING:
        return "required"
    return "its defaults" if isinstance(field.default, Settings) else f"`{_yaml(field.default)}`"


def _yaml(value: Any) -> str:
    """A value as one writes it in YAML."""
    if isinstance(value, tuple):
        return f"[{', '.join(map(_yaml, value))}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_yaml(item)}" for key, item in value.items()) + "}"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)


def _group(group: MetricGroup) -> str:
    lines = [f"## {group.title}", "", group.about, "", "| name | unit | meaning | when to worry |", "|---|---|---|---|"]
    for metric in group.metrics:
        row = (f"`{metric.name}`", metric.unit, metric.meaning, metric.worry)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |")
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the pages, or with --check name the stale ones; exit code 1 if there are any."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a page is stale")
    check = parser.parse_args(arguments).check
    stale = [path for path, text in pages().items() if not path.is_file() or path.read_text(encoding="utf-8") != text]
    for path in stale:
        if not check:
            path.write_text(pages()[path], encoding="utf-8")
        print(f"{path.relative_to(DOCS.parent)}: {'stale; run docs/tools/generate.py' if check else 'written'}")
    return int(bool(stale) and check)


if __name__ == "__main__":
    sys.exit(main())
