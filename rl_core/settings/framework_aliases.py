"""Names of settings in TRL and verl and their equivalents here, for error messages, `posttrain convert` and documents.

The rows are in trl_aliases.csv (TRL 1.16: configuration classes and `ModelConfig`; read from the fields of the
dataclasses by reflection) and verl_aliases.csv (verl's `ppo_trainer` configuration). Columns:

    names        the framework's names, separated by spaces. verl's are dotted; `*` stands for any part (none, one or
                 several)
    trainers     TRL's trainers for which the row holds, separated by spaces; empty = all
    settings     ours, separated by ", ", dotted from the root of a configuration; STAGE = the trainer's stage;
                 empty = no equivalent
    copied       yes = the value is the same here, no = it has to be converted
    difference   the difference in meaning, or why there is no equivalent

common_names.csv has names of other RL code, by stage (empty = any place), which no edit distance relates to ours.
common_values.csv has names of papers and other RL code that people write as the value of a setting.
"""

from __future__ import annotations

import csv
import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

TRL_VERSION = "1.16.0"
VERL_VERSION = "035682e (verl/trainer/config/_generated_ppo_trainer.yaml)"

TRAINER_STAGES = {  # class of TRL without "Config" -> stage here
    "GRPO": "policy",
    "RLOO": "policy",
    "SFT": "sft",
    "DPO": "preference",
    "KTO": "preference",
    "Reward": "reward_model",
    "Distillation": "distill",
}

_MAX_SHOWN_LEAVES = 4  # leaves of an unknown block that a message names
_CONVERT_HINT = "`posttrain convert FILE` translates a whole file"


@dataclass(frozen=True, slots=True)
class FrameworkAlias:
    """One or several settings of TRL or verl, and their equivalent here."""

    framework: Literal["TRL", "verl"]
    names: tuple[str, ...]
    settings_paths: tuple[str, ...]
    difference: str
    trainers: tuple[str, ...] = ()
    is_copied: bool = False

    def resolve_paths(self, stage: str | None) -> tuple[str, ...]:
        """Return our settings with the stage filled in; None leaves it open."""
        stage_path = f"stages.{stage or '<stage>'}"
        return tuple(path.replace("STAGE", stage_path) for path in self.settings_paths)


def _read_aliases(framework: Literal["TRL", "verl"]) -> tuple[FrameworkAlias, ...]:
    path = Path(__file__).with_name(f"{framework.lower()}_aliases.csv")
    with path.open(encoding="utf-8", newline="") as file:
        return tuple(
            FrameworkAlias(
                framework,
                tuple(row["names"].split()),
                tuple(filter(None, row["settings"].split(", "))),
                row["difference"],
                tuple(row.get("trainers", "").split()),
                row["copied"] == "yes",
            )
            for row in csv.DictReader(file)
        )


@functools.cache
def list_trl_aliases() -> tuple[FrameworkAlias, ...]:
    """List all rows of TRL's names, sorted by name."""
    return _read_aliases("TRL")


@functools.cache
def list_verl_aliases() -> tuple[FrameworkAlias, ...]:
    """List all rows of verl's names, sorted by name."""
    return _read_aliases("verl")


@functools.cache
def _compile_verl_patterns() -> list[tuple[re.Pattern[str], FrameworkAlias]]:
    """Compile the names of verl as patterns, the most specific first: no `*`, then the longest."""
    named_rows = [(name, row) for row in list_verl_aliases() for name in row.names]
    named_rows.sort(key=lambda item: ("*" in item[0], -len(item[0])))
    return [
        (re.compile(re.escape(name).replace(r"\*\.", r"(?:.+\.)?").replace(r"\*", ".+")), row)
        for name, row in named_rows
    ]


def find_trl_alias(name: str, trainer: str) -> FrameworkAlias | None:
    """Find the row of a name of TRL's class `trainer` + "Config"."""
    rows = [row for row in list_trl_aliases() if name in row.names]
    for row in rows:
        if trainer in row.trainers:
            return row
    return next((row for row in rows if not row.trainers), None)


def find_verl_alias(name: str) -> FrameworkAlias | None:
    """Find the most specific row of a dotted name of verl's configuration."""
    return next((row for pattern, row in _compile_verl_patterns() if pattern.fullmatch(name)), None)


def explain_framework_name(
    name: str, stage: str | None = None, *, omitted_prefix: str = "", block: str = ""
) -> str:
    """Explain an unknown key that TRL or verl has, or that is common in other RL code; "" = none of them has it.

    Args:
        name: the key, a last part or dotted.
        stage: the stage that it was written in, if any.
        omitted_prefix: prefix to leave out of our names, such as "stages.policy.".
        block: the block below the stage that it was written in, if any. There verl's `mode` of rollouts says nothing
            about another block's `mode`, so a row without an equivalent has to be of a block of this name.
    """
    matches = _match_trl_rows(name, stage) or _match_verl_rows(name)
    if block:
        matches = [match for match in matches if _belongs_to_block(match[0], name, block)]
    sentences = []
    for row, row_stage in matches:
        paths = [path.removeprefix(omitted_prefix) for path in row.resolve_paths(row_stage)]
        subject = f"{row.framework}'s {name}"
        if row.trainers and len(matches) > 1:
            subject += f" ({', '.join(row.trainers)})"
        if paths:
            sentences.append(f"{subject} is {' and '.join(paths)} here ({row.difference})")
        else:
            sentences.append(f"{subject} has no equivalent here: {row.difference}")
    return "; ".join(sentences) or _explain_common_name(name, stage, omitted_prefix)


@functools.cache
def list_common_names() -> tuple[dict[str, str], ...]:
    """List the rows of common_names.csv."""
    path = Path(__file__).with_name("common_names.csv")
    with path.open(encoding="utf-8", newline="") as file:
        return tuple(csv.DictReader(file))


def _explain_common_name(name: str, stage: str | None, omitted_prefix: str) -> str:
    """Explain a name of other RL code by the row of its stage, else by the first row; "" = there is none."""
    rows = [row for row in list_common_names() if row["name"] == name]
    in_stage = [row for row in rows if stage in row["stages"].split()]
    if not rows:
        return ""
    row = (in_stage or rows)[0]
    row_stage = stage if in_stage else next(iter(row["stages"].split()), "")
    paths = row["settings"].replace("STAGE", f"stages.{row_stage}").split(", ")
    paths = [path.removeprefix(omitted_prefix) for path in paths]
    if not row["settings"]:
        return f"{name} has no equivalent here: {row['explanation']}"
    return f"{name} is {' and '.join(paths)} here ({row['explanation']})"


@functools.cache
def list_common_values() -> tuple[dict[str, str], ...]:
    """List the rows of common_values.csv."""
    path = Path(__file__).with_name("common_values.csv")
    with path.open(encoding="utf-8", newline="") as file:
        return tuple(csv.DictReader(file))


def explain_common_value(setting: str, value: str) -> str:
    """Explain a value of papers and other RL code by the setting's name; "" = it is none."""
    written = value.strip().casefold().replace("-", "_").replace(" ", "_")
    rows = [row for row in list_common_values() if row["setting"] == setting]
    return next((row["explanation"] for row in rows if row["value"] == written), "")


def explain_framework_block(name: str, value: Any) -> str:
    """Explain a block of verl, such as `actor_rollout_ref`; "" = verl has no such block."""
    leaves = [leaf for leaf in _list_leaves(name, value) if find_verl_alias(leaf) is not None]
    if not leaves:
        return ""
    hints = [explain_framework_name(leaf) for leaf in leaves[:_MAX_SHOWN_LEAVES]]
    if len(leaves) > _MAX_SHOWN_LEAVES:
        hints.append(f"and {len(leaves) - _MAX_SHOWN_LEAVES} more")
    return "; ".join([*hints, _CONVERT_HINT])


def _list_leaves(name: str, value: Any) -> list[str]:
    if not isinstance(value, Mapping):
        return [name]
    return [leaf for key, item in value.items() for leaf in _list_leaves(f"{name}.{key}", item)]


def _match_trl_rows(name: str, stage: str | None) -> list[tuple[FrameworkAlias, str | None]]:
    """Find the rows of a name, each with its stage here; only that of `stage` if one of its trainers has the name."""
    rows = [row for row in list_trl_aliases() if name in row.names]
    if stage in TRAINER_STAGES.values():
        for row in rows:
            if any(TRAINER_STAGES.get(trainer) == stage for trainer in row.trainers):
                return [(row, stage)]
    return [(row, _resolve_stage(row.trainers, stage)) for row in rows]


def _resolve_stage(trainers: Sequence[str], stage: str | None) -> str | None:
    """Return the stage of the first trainer; for a row of all trainers, the stage that the key was written in."""
    return TRAINER_STAGES.get(trainers[0], "preference") if trainers else stage


def _belongs_to_block(row: FrameworkAlias, name: str, block: str) -> bool:
    """Return whether a row can explain a name in a block: it has an equivalent, or the same block in its framework."""
    if row.settings_paths or row.framework == "TRL":
        return True
    parents = {
        known.split(".")[-2]
        for known in row.names
        if known.count(".") and known.endswith(f".{name}")
    }
    return bool(parents & {block, block.removesuffix("s")})


def _match_verl_rows(name: str) -> list[tuple[FrameworkAlias, str | None]]:
    """Find the row of a dotted name, or the most specific one with this last part."""
    row = find_verl_alias(name) if "." in name else None
    if row is None:
        named_rows = [(known, row) for row in list_verl_aliases() for known in row.names]
        candidates = [item for item in named_rows if item[0].rpartition(".")[2] == name]
        candidates.sort(key=lambda item: "*" in item[0])
        row = candidates[0][1] if candidates else None
    return [] if row is None else [(row, None)]
