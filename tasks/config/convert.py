"""A configuration of TRL or verl as one of ours: `posttrain convert FILE`.

What has an equal is written with the peer's name beside it, what has none stands in comments with the reason. The
result is checked as every configuration is, and a value that ours refuses goes into the comments with the message.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rl_core.errors import SettingsError
from rl_core.settings.framework_aliases import (
    TRAINER_STAGES,
    FrameworkAlias,
    find_trl_alias,
    find_verl_alias,
    list_trl_aliases,
)
from tasks import stage_registry
from tasks.config.framework_converters import (
    TRL_DEFAULTS,
    TRL_RULES,
    VERL_DEFAULTS,
    VERL_RULES,
    FrameworkValues,
    sanitize_pipeline_name,
)
from tasks.config.problems import ConfigError, ConfigProblem, join_key

TRAINERS = tuple(name.lower() for name in TRAINER_STAGES)
_VERL_BLOCKS = {
    "actor_rollout_ref",
    "algorithm",
    "trainer",
    "critic",
    "data",
    "reward_model",
    "custom_reward_function",
}
_HYDRA_KEYS = ("_target_", "defaults", "hydra")
_KEY_ORDER = ("name", "seed", "output", "environment", "model", "tracking", "stages")


class _ConfigDraft:
    """Our values with a remark each, and what could not be said."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.remarks: dict[str, str] = {}
        self.unconverted: list[tuple[str, Any, str]] = []  # name, value, reason
        self.to_do: list[str] = []  # what our settings still miss
        self.stage_blocks: set[str] = set()  # stages that stand there whatever is in them

    def set_value(self, path: str, value: Any, remark: str) -> None:
        """A value of ours; the remarks of several names of the peer are joined."""
        if path in self.values and remark not in self.remarks[path] and self.values[path] == value:
            remark = f"{self.remarks[path]}; {remark}"
        self.values[path], self.remarks[path] = value, remark

    def open_block(self, block: str, remark: str) -> None:
        """A block with its defaults."""
        self.stage_blocks.add(block)
        self.set_value(block, {}, remark)

    def reject_value(self, path: str, reason: str) -> None:
        """Take back a value that our settings refuse."""
        value = self.values.pop(path)
        self.unconverted.append((f"{path} (from {self.remarks.pop(path)})", value, reason))


def convert_config(values: Mapping[str, Any], source: str, trainer: str = "") -> str:
    """YAML text of our configuration.

    Args:
        values: the peer's file as plain data.
        source: its name, for the first line, and for the pipeline where the file gives none.
        trainer: of TRL, one of `TRAINERS`; "" = by names that it alone has.
    Raises: SettingsError where the file is neither TRL's nor verl's, or its trainer is not clear.
    """
    flat = dict(_flatten_values(values))
    of_verl = [name for name in flat if "." in name and name.partition(".")[0] in _VERL_BLOCKS]
    draft = _ConfigDraft()
    draft.set_value("name", sanitize_pipeline_name(Path(source).stem), "the file's name")
    if of_verl and not trainer:
        title = "verl's ppo_trainer"
        _convert_verl_values(draft, flat)
    else:
        chosen = _detect_trainer(values, source, trainer)
        title = f"TRL's {chosen}Config"
        _convert_trl_values(draft, dict(values), chosen)
    _reject_invalid_values(draft)
    return _render_config(draft, title, source)


def _flatten_values(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted name, value); blocks that are empty are values."""
    for key, value in values.items():
        name = f"{prefix}.{key}" if prefix else str(key)
        if isinstance(value, Mapping) and value:
            yield from _flatten_values(value, name)
        else:
            yield name, value


def _detect_trainer(values: Mapping[str, Any], source: str, requested: str) -> str:
    """Trainer's name without "Config", as asked for or by names that belong to few."""
    by_word = {name.lower(): name for name in TRAINER_STAGES}
    if requested:
        return by_word[requested]
    known = [name for name in values if any(name in row.names for row in list_trl_aliases())]
    if not known:
        raise SettingsError(f"{source}: has no name of TRL's configurations and no block of verl's")
    left = set(TRAINER_STAGES)
    for row in list_trl_aliases():
        owners = set(row.trainers) & set(TRAINER_STAGES)
        if owners and any(name in values for name in row.names):
            every = {
                t
                for r in list_trl_aliases()
                if set(r.names) & set(values) & set(row.names)
                for t in r.trainers
            }
            left &= every
    if len(left) == 1:
        return left.pop()
    for name in ("GRPO", "DPO"):  # these have all names of RLOO, and of KTO but its weights
        if (
            name in left
            and left <= {"GRPO": {"GRPO", "RLOO", "Distillation"}, "DPO": {"DPO", "KTO"}}[name]
        ):
            return name
    raise SettingsError(
        f"{source}: its names fit several of TRL's trainers; say which, with --trainer {'|'.join(TRAINERS)}"
    )


def _convert_trl_values(draft: _ConfigDraft, values: dict[str, Any], trainer: str) -> None:
    stage = TRAINER_STAGES[trainer]
    defaults = {**TRL_DEFAULTS[""], **TRL_DEFAULTS.get(trainer, {})}
    if "warmup_ratio" in values:
        defaults.pop("warmup_steps")
    given = FrameworkValues(
        {**defaults, **{name: value for name, value in values.items() if value is not None}},
        stage,
        trainer,
    )
    draft.open_block(f"stages.{stage}", f"TRL's {trainer}Config")
    if trainer == "RLOO":
        draft.set_value(f"stages.{stage}.algorithm", "rloo", "RLOOTrainer")
    if trainer == "KTO":
        draft.set_value(f"stages.{stage}.loss", "kto", "KTOTrainer")
    for name in given:
        remark = name if name in values else f"{name}, TRL's default"
        _convert_value(
            draft,
            name,
            given,
            find_trl_alias(name, trainer),
            TRL_RULES,
            remark,
            stage,
            is_given=name in values,
        )


def _convert_verl_values(draft: _ConfigDraft, flat: dict[str, Any]) -> None:
    own = {
        name: value for name, value in flat.items() if name.rpartition(".")[2] not in _HYDRA_KEYS
    }
    own = {
        name: _resolve_interpolation(value, own)
        for name, value in own.items()
        if name.partition(".")[0] not in _HYDRA_KEYS
    }
    given = FrameworkValues(
        {**VERL_DEFAULTS, **{name: value for name, value in own.items() if value is not None}},
        "policy",
    )
    if given.get("algorithm.adv_estimator") != "gae":
        given.pop("algorithm.lam") if "algorithm.lam" not in own else None
    draft.open_block("stages.policy", "verl's ppo_trainer")
    for name in given:
        remark = name if name in own else f"{name}, verl's default"
        _convert_value(
            draft,
            name,
            given,
            find_verl_alias(name),
            VERL_RULES,
            remark,
            "policy",
            is_given=name in own,
        )


def _resolve_interpolation(value: Any, flat: Mapping[str, Any]) -> Any:
    """A value that OmegaConf takes from another key, as `${data.max_prompt_length}`; None where that is not there."""
    pattern = r"\$\{(?:oc\.select:)?([\w.]+)(?:,\s*([^}]*))?\}"
    for _ in range(4):  # a reference to a reference
        match = re.fullmatch(pattern, value) if isinstance(value, str) else None
        if match is None:
            return value
        otherwise = (
            json.loads(match[2])
            if match[2] and re.fullmatch(r"-?\d+(\.\d+)?|true|false|null", match[2])
            else None
        )
        value = flat.get(match[1], otherwise)
    return None


def _convert_value(
    draft: _ConfigDraft,
    name: str,
    given: FrameworkValues,
    row: FrameworkAlias | None,
    rules: Mapping[str, Any],
    remark: str,
    stage: str,
    *,
    is_given: bool,
) -> None:
    """Our values of one name, or a comment about it; a default that has no equal says nothing."""
    value = given[name]
    if row is None:
        if is_given:
            draft.unconverted.append((name, value, "no setting of this version that we know"))
        return
    found = (
        rules[name](given)
        if name in rules
        else {row.resolve_paths(stage)[0]: value}
        if row.is_copied
        else None
    )
    if found is None:
        if is_given:
            where = " and ".join(row.resolve_paths(stage))
            draft.unconverted.append(
                (name, value, f"see {where}: {row.difference}" if where else row.difference)
            )
        return
    for path, ours in found.items():
        draft.set_value(path, ours, remark)


def _reject_invalid_values(draft: _ConfigDraft) -> None:
    """Take back what our settings refuse; what that does not mend is left to do."""
    from tasks.config import build_settings

    problems: tuple[ConfigProblem, ...] = ()
    for _ in range(len(draft.values) + 1):
        try:
            build_settings(_nest_values(draft.values), check_files=False, import_code=False)
            return
        except ConfigError as error:
            problems = error.problems
        bad = {
            path: problem.text
            for problem in problems
            for path in _find_rejected_paths(draft, problem)
        }
        if not bad:
            break
        for path, text in bad.items():
            draft.reject_value(path, text)
    draft.to_do = [f"{join_key(problem.key)}: {problem.text}" for problem in problems]


def _find_rejected_paths(draft: _ConfigDraft, problem: ConfigProblem) -> list[str]:
    """Paths of our values that a problem is about: its own, else those below or beside it that its text names."""
    key = join_key(problem.key)
    own = [
        path
        for path in draft.values
        if key == path or (key.startswith(f"{path}.") and path not in draft.stage_blocks)
    ]
    near = [
        path for path in draft.values if path.startswith((f"{key}.", f"{key.rpartition('.')[0]}."))
    ]
    named = [path for path in near if re.search(rf"\b{path.rpartition('.')[2]}\b", problem.text)]
    return [path for path in (own or named) if path not in (*draft.stage_blocks, "name")]


def _nest_values(values: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, value in values.items():
        block = tree
        *outer, last = path.split(".")
        for part in outer:
            block = block.setdefault(part, {})
        if not (value == {} and last in block):
            block[last] = dict(value) if isinstance(value, Mapping) else value
    return tree


def _render_config(draft: _ConfigDraft, title: str, source: str) -> str:
    lines = [
        f"# From {Path(source).name} ({title}), written by `posttrain convert`. Check it: posttrain validate FILE"
    ]
    lines += _render_block(_nest_values(draft.values), "", draft.remarks, 0)
    if draft.to_do:
        lines += ["", "# Still to do:", *(f"#   {text}" for text in draft.to_do)]
    if draft.unconverted:
        lines += ["", "# Not taken over:"]
        groups: dict[str, list[str]] = {}
        for name, value, reason in draft.unconverted:
            groups.setdefault(reason, []).append(f"{name}: {_format_scalar(value)}")
        for reason, names in groups.items():
            lines.append(f"#   {'; '.join(names)}")
            lines.append(f"#       {reason}")
    return "\n".join(lines) + "\n"


def _render_block(
    tree: Mapping[str, Any], prefix: str, remarks: Mapping[str, str], depth: int
) -> Iterator[str]:
    for name in sorted(tree, key=lambda name: _rank_key(name, depth)):
        path, value = f"{prefix}.{name}".lstrip("."), tree[name]
        remark = f"  # {remarks[path]}" if path in remarks else ""
        indent = "  " * depth
        if (
            isinstance(value, Mapping)
            and value
            and path not in _INLINE_MAPPINGS
            and not path.endswith(_INLINE_MAPPINGS)
        ):
            yield f"{indent}{name}:{remark}"
            yield from _render_block(value, path, remarks, depth + 1)
        else:
            yield f"{indent}{name}: {_format_scalar(value)}{remark}"


_INLINE_MAPPINGS = (".rewards", "chat_template_kwargs")  # values that are mappings


def _rank_key(name: str, depth: int) -> int:
    order: Iterable[str] = (
        _KEY_ORDER if depth == 0 else stage_registry.list_stage_names() if depth == 1 else ()
    )
    return list(order).index(name) if name in order else 99


def _format_scalar(value: Any) -> str:
    """A value in YAML's flow style, which JSON is."""
    if isinstance(value, str) and re.fullmatch(r"[A-Za-z_][\w./-]*", value):
        return value if value.lower() not in ("null", "true", "false") else json.dumps(value)
    return json.dumps(value, ensure_ascii=False)
