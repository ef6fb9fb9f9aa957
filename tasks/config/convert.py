"""Conversion of a TRL or verl configuration to ours: `posttrain convert FILE`.

Settings with an equivalent are written with the framework's name in a comment; the others are listed in comments with
the reason. The result is checked like every configuration; a value that our settings refuse moves to the comments with
the message.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
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
from tasks.config.conversion_rules import FrameworkValues, sanitize_pipeline_name
from tasks.config.problems import ConfigError, ConfigProblem, join_key
from tasks.config.trl_converters import TRL_DEFAULTS, TRL_RULES
from tasks.config.verl_converters import VERL_DEFAULTS, VERL_RULES

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
_KEY_ORDER = (
    "name",
    "seed",
    "output",
    "environment",
    "environments",
    "model",
    "tracking",
    "stages",
)
_INLINE_MAPPINGS = (
    ".rewards",
    "chat_template_kwargs",
    "environment.options",
)  # settings whose value is a mapping


class _ConfigDraft:
    """Our values with a remark each, and the values that could not be converted."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.remarks: dict[str, str] = {}
        self.unconverted: list[tuple[str, Any, str]] = []  # name, value, reason
        self.to_do: list[str] = []  # what our settings still lack
        self.stage_blocks: set[str] = set()  # stages that are written even if they are empty

    def set_value(self, path: str, value: Any, remark: str) -> None:
        """Set one of our values; join the remarks if several names of the framework set it."""
        if path in self.values and remark not in self.remarks[path] and self.values[path] == value:
            remark = f"{self.remarks[path]}; {remark}"
        self.values[path], self.remarks[path] = value, remark

    def open_block(self, block: str, remark: str) -> None:
        """Add a block with its defaults."""
        self.stage_blocks.add(block)
        self.set_value(block, {}, remark)

    def reject_value(self, path: str, reason: str) -> None:
        """Move a value that our settings refuse to the unconverted ones."""
        value = self.values.pop(path)
        self.unconverted.append((f"{path} (from {self.remarks.pop(path)})", value, reason))


def convert_config(values: Mapping[str, Any], source: str, trainer: str = "") -> str:
    """Convert a configuration and return the YAML text of ours.

    Args:
        values: the framework's file as plain data.
        source: its name, for the first line, and for the pipeline if the file sets none.
        trainer: of TRL, one of `TRAINERS`; "" = detect it by names that only one trainer has.
    Raises: SettingsError if the file is neither TRL's nor verl's, or if the trainer is ambiguous.
    """
    flat = dict(_flatten_values(values))
    is_verl = any("." in name and name.partition(".")[0] in _VERL_BLOCKS for name in flat)
    draft = _ConfigDraft()
    draft.set_value("name", sanitize_pipeline_name(Path(source).stem), "the file's name")
    if is_verl and not trainer:
        title = "verl's ppo_trainer"
        _convert_verl_values(draft, flat)
    else:
        trainer_class = _detect_trainer(values, source, trainer)
        title = f"TRL's {trainer_class}Config"
        _convert_trl_values(draft, dict(values), trainer_class)
    _reject_invalid_values(draft)
    return _render_config(draft, title, source)


def _flatten_values(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted name, value); an empty block is a value."""
    for key, value in values.items():
        name = f"{prefix}.{key}" if prefix else str(key)
        if isinstance(value, Mapping) and value:
            yield from _flatten_values(value, name)
        else:
            yield name, value


def _detect_trainer(values: Mapping[str, Any], source: str, requested: str) -> str:
    """Return the trainer's name without "Config": the requested one, or the one that the names point to."""
    by_word = {name.lower(): name for name in TRAINER_STAGES}
    if requested:
        return by_word[requested]
    known = [name for name in values if any(name in row.names for row in list_trl_aliases())]
    if not known:
        raise SettingsError(f"{source}: contains no setting of TRL and no block of verl")
    candidates = set(TRAINER_STAGES)
    for row in list_trl_aliases():
        if row.trainers and set(row.trainers) & set(TRAINER_STAGES):
            present = set(row.names) & set(values)
            if present:
                candidates &= {
                    owner
                    for other in list_trl_aliases()
                    if set(other.names) & present
                    for owner in other.trainers
                }
    if len(candidates) == 1:
        return candidates.pop()
    # GRPO has all names of RLOO and Distillation, DPO all names of KTO except its weights.
    if "GRPO" in candidates and candidates <= {"GRPO", "RLOO", "Distillation"}:
        return "GRPO"
    if "DPO" in candidates and candidates <= {"DPO", "KTO"}:
        return "DPO"
    raise SettingsError(
        f"{source}: its settings fit several of TRL's trainers; choose one with --trainer {'|'.join(TRAINERS)}"
    )


def _convert_trl_values(draft: _ConfigDraft, values: dict[str, Any], trainer: str) -> None:
    stage = TRAINER_STAGES[trainer]
    defaults = {**TRL_DEFAULTS[""], **TRL_DEFAULTS.get(trainer, {})}
    if "warmup_ratio" in values:
        defaults.pop("warmup_steps")
    set_values = {name: value for name, value in values.items() if value is not None}
    all_values = FrameworkValues({**defaults, **set_values}, stage, trainer)
    draft.open_block(f"stages.{stage}", f"TRL's {trainer}Config")
    if trainer == "RLOO":
        draft.set_value(f"stages.{stage}.algorithm", "rloo", "RLOOTrainer")
    if trainer == "KTO":
        draft.set_value(f"stages.{stage}.loss", "kto", "KTOTrainer")
    for name in all_values:
        remark = name if name in values else f"{name}, TRL's default"
        _convert_value(
            draft,
            name,
            all_values,
            find_trl_alias(name, trainer),
            TRL_RULES,
            remark,
            stage,
            is_in_file=name in values,
        )


def _convert_verl_values(draft: _ConfigDraft, flat: dict[str, Any]) -> None:
    without_hydra = {
        name: value for name, value in flat.items() if name.rpartition(".")[2] not in _HYDRA_KEYS
    }
    file_values = {
        name: _resolve_interpolation(value, without_hydra)
        for name, value in without_hydra.items()
        if name.partition(".")[0] not in _HYDRA_KEYS
    }
    set_values = {name: value for name, value in file_values.items() if value is not None}
    all_values = FrameworkValues({**VERL_DEFAULTS, **set_values}, "policy")
    if all_values.get("algorithm.adv_estimator") != "gae" and "algorithm.lam" not in file_values:
        all_values.pop("algorithm.lam")
    draft.open_block("stages.policy", "verl's ppo_trainer")
    for name in all_values:
        remark = name if name in file_values else f"{name}, verl's default"
        _convert_value(
            draft,
            name,
            all_values,
            find_verl_alias(name),
            VERL_RULES,
            remark,
            "policy",
            is_in_file=name in file_values,
        )


def _resolve_interpolation(value: Any, flat: Mapping[str, Any]) -> Any:
    """Resolve an OmegaConf reference to another key, `${data.max_prompt_length}`; None if that key is missing."""
    pattern = r"\$\{(?:oc\.select:)?([\w.]+)(?:,\s*([^}]*))?\}"
    for _ in range(4):  # a reference to a reference
        match = re.fullmatch(pattern, value) if isinstance(value, str) else None
        if match is None:
            return value
        is_plain = match[2] and re.fullmatch(r"-?\d+(\.\d+)?|true|false|null", match[2])
        fallback = json.loads(match[2]) if is_plain else None
        value = flat.get(match[1], fallback)
    return None


def _convert_value(
    draft: _ConfigDraft,
    name: str,
    values: FrameworkValues,
    row: FrameworkAlias | None,
    rules: Mapping[str, Any],
    remark: str,
    stage: str,
    *,
    is_in_file: bool,
) -> None:
    """Set our values for one name, or add a comment about it; a framework default without an equivalent is dropped."""
    value = values[name]
    if row is None:
        if is_in_file:
            draft.unconverted.append((name, value, "not a known setting of this version"))
        return
    converted = None
    if name in rules:
        converted = rules[name](values)
    elif row.is_copied:
        converted = {row.resolve_paths(stage)[0]: value}
    if converted is None:
        if is_in_file:
            paths = " and ".join(row.resolve_paths(stage))
            reason = f"see {paths}: {row.difference}" if paths else row.difference
            draft.unconverted.append((name, value, reason))
        return
    for path, converted_value in converted.items():
        draft.set_value(path, converted_value, remark)


def _reject_invalid_values(draft: _ConfigDraft) -> None:
    """Reject the values that our settings refuse; list the problems that remain as still to do."""
    from tasks.config import build_settings

    # Trainers get their model as an argument; checks against the default preset would reject lengths.
    has_model = any(path in draft.values for path in ("model.path", "model.preset"))
    model: dict[str, Any] = {} if has_model else {"model.path": "organization/model"}
    problems: tuple[ConfigProblem, ...] = ()
    for _ in range(len(draft.values) + 1):
        try:
            values = _nest_values({**draft.values, **model})
            build_settings(values, check_files=False, import_code=False)
            problems = ()
            break
        except ConfigError as error:
            problems = error.problems
        rejected = {
            path: problem.text
            for problem in problems
            for path in _find_rejected_paths(draft, problem)
        }
        if not rejected:
            break
        for path, text in rejected.items():
            draft.reject_value(path, text)
    draft.to_do = [f"{join_key(problem.key)}: {problem.text}" for problem in problems]
    samples = any(path.startswith(("stages.policy", "stages.distill")) for path in draft.values)
    if samples and "environment.name" not in draft.values:
        draft.to_do.insert(
            0,
            "environment: the file names no local file of prompts, and without one the demo's environment is played; "
            "write environment: {name: prompts, options: {path: prompts.jsonl}}",
        )
    rewards = [path for path in draft.values if path.endswith(".rewards")]
    if "stages.policy" in draft.stage_blocks and not rewards:
        draft.to_do.insert(
            0,
            "rewards: the framework takes reward functions in Python; name yours in the stage, as in "
            'rewards: {"my_rewards.py:score": 1.0}',
        )
    if not has_model:
        draft.to_do.insert(0, "model.path: the file names no model; set a folder or a hub name")


def _find_rejected_paths(draft: _ConfigDraft, problem: ConfigProblem) -> list[str]:
    """Find the paths that a problem is about: its key's, else those below or next to it that its text names."""
    key = join_key(problem.key)
    exact = [
        path
        for path in draft.values
        if key == path or (key.startswith(f"{path}.") and path not in draft.stage_blocks)
    ]
    nearby = [
        path for path in draft.values if path.startswith((f"{key}.", f"{key.rpartition('.')[0]}."))
    ]
    named = [path for path in nearby if re.search(rf"\b{path.rpartition('.')[2]}\b", problem.text)]
    return [path for path in (exact or named) if path not in (*draft.stage_blocks, "name")]


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
        if isinstance(value, Mapping) and value and not path.endswith(_INLINE_MAPPINGS):
            yield f"{indent}{name}:{remark}"
            yield from _render_block(value, path, remarks, depth + 1)
        else:
            yield f"{indent}{name}: {_format_scalar(value)}{remark}"


def _rank_key(name: str, depth: int) -> int:
    order: Sequence[str] = ()
    if depth == 0:
        order = _KEY_ORDER
    elif depth == 1:
        order = stage_registry.list_stage_names()
    return order.index(name) if name in order else 99


def _format_scalar(value: Any) -> str:
    """Format a value in YAML's flow style, which JSON is."""
    if isinstance(value, str) and re.fullmatch(r"[A-Za-z_][\w./-]*", value):
        return value if value.lower() not in ("null", "true", "false") else json.dumps(value)
    return json.dumps(value, ensure_ascii=False)
