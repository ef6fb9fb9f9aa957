"""Explanation of nondeterminism: the part of a pipeline behind the first difference of two runs, and suspect code.

Suspect lines of the user's code use global random numbers, clocks, sets or directory listings.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

from posttrain.verification.run_differences import FileDifference, RunComparison, read_metric_rows
from rl_core.errors import PosttrainError
from rl_core.storage.line_logs import read_checked_lines
from rl_core.user_code.digest import find_user_modules

_CLOCK_FUNCTIONS = ("time", "time_ns", "perf_counter", "monotonic", "now", "utcnow", "today")
_LISTING_FUNCTIONS = ("os.listdir", "os.scandir", "glob.glob", "os.walk")
_RANDOM_MODULES = ("random", "np.random", "numpy.random")
_SEEDED_GENERATORS = ("Random", "default_rng", "Generator")
_RANDOM_FUNCTIONS = (
    "uuid.uuid4",
    "uuid.uuid1",
    "os.urandom",
    "secrets.token_hex",
    "id",
    "torch.rand",
    "torch.randn",
)
_SET_ORDER = "the order of a set of texts differs from process to process (PYTHONHASHSEED)"
_MAX_SUSPECTS = 5


@dataclass(frozen=True)
class SuspectLine:
    """Line of code that may be nondeterministic."""

    file: str
    line: int
    code: str
    reason: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} has `{self.code}`: {self.reason}"


@dataclass(frozen=True)
class NondeterminismCause:
    """Part of the pipeline that may be nondeterministic: name, usual causes, remedy."""

    name: str
    causes: str
    remedy: str
    code: str = ""  # source to search: "environment", or the import path of a reward function


ENVIRONMENT_CODE = "environment"
_SEED_REMEDY = "draw from random.Random(f'{level}/{seed}') created in the episode; sort values of sets and listings"
_PROMPT_ORDER = NondeterminismCause(
    "the order of prompts",
    "the environment yields seeds or rows in another order: iteration over a set, a directory listing, or global "
    "random numbers",
    "sort the rows before their index becomes a seed",
    ENVIRONMENT_CODE,
)
_OPENING_MESSAGES = NondeterminismCause(
    "the environment's opening messages",
    "the episode of one seed begins differently: global random numbers, the time, the order of a set, or state that "
    "episodes share",
    _SEED_REMEDY,
    ENVIRONMENT_CODE,
)
_OBSERVATIONS = NondeterminismCause(
    "the environment's observations",
    "the same action in the same episode gives another observation: global random numbers, the time, the order of a "
    "set, a server, or state that episodes share",
    _SEED_REMEDY,
    ENVIRONMENT_CODE,
)
_ENVIRONMENT_REWARD = NondeterminismCause(
    "the environment's reward",
    "the same episode with the same actions gives another reward: global random numbers, the time, or a judge that "
    "samples",
    _SEED_REMEDY,
    ENVIRONMENT_CODE,
)
_SAMPLED_TOKENS = NondeterminismCause(
    "the sampled tokens",
    "the weights or the sampler's numbers differ: `sampling.rejoin: ready`, another number of threads, or a model "
    "whose forward pass is random or depends on state that no checkpoint holds",
    "keep `rejoin: together` and a fixed `threads:`; keep no state in the model outside its parameters and buffers",
)
_UPDATE = NondeterminismCause(
    "the update",
    "the same rollouts or rows gave another loss or gradient: another number of threads, or your code in the loss or "
    "the model is random or depends on state that no checkpoint holds",
    "fix `threads:`; put your state into state_dict and load_state_dict",
)
_PREPARED_DATA = NondeterminismCause(
    "the prepared data",
    "rows are created or ordered by something other than the seed: iteration over a set, a directory listing, global "
    "random numbers, the time",
    "sort before you draw, and draw from random.Random(seed)",
    ENVIRONMENT_CODE,
)
_UNKNOWN = NondeterminismCause(
    "a published file", "no known part differs before it", "compare the two files"
)

_LocatedCause = tuple[str, str, NondeterminismCause]  # location, difference, cause


def _build_reward_cause(name: str) -> NondeterminismCause:
    if ":" not in name:
        return NondeterminismCause(
            f"the reward component '{name}'",
            "its inputs differ, or its state is not restored",
            "report it",
        )
    return NondeterminismCause(
        f"the reward function {name}",
        "it uses random numbers, the time, a server, or state that it keeps between calls",
        "compute it from the trajectory alone, or seed it from the trajectory: "
        "random.Random(f'{t.level}/{t.seed}/{t.sample}')",
        name,
    )


@dataclass(frozen=True)
class ResumeFinding:
    """First difference of two runs, with its likely cause."""

    stage: str
    file: str
    location: str  # line, iteration, episode
    difference: str  # both values
    cause: NondeterminismCause
    suspects: Sequence[SuspectLine] = field(default=())
    num_other_files: int = 0  # further files that differ

    def format_text(self) -> str:
        """Format the finding in a few lines."""
        lines = [
            f"NOT deterministic: {self.cause.name}",
            f"  where     {', '.join(filter(None, (f'stage {self.stage}', self.file, self.location)))}",
            f"  what      {self.difference}",
            f"  cause     likely: {self.cause.causes}",
            *(f"            {suspect}" for suspect in self.suspects),
            f"  remedy    {self.cause.remedy}",
        ]
        if self.num_other_files:
            lines.append(
                f"  besides   {self.num_other_files} other files differ, of this stage or later ones"
            )
        return "\n".join(lines)


def explain_differences(comparison: RunComparison) -> ResumeFinding:
    """Explain the first difference. Its stage has equal inputs, because the earlier stages are equal."""
    first = comparison.differences[0]
    in_stage = [
        difference for difference in comparison.differences if difference.pair == first.pair
    ]
    located = _locate_cause(first, in_stage)
    return ResumeFinding(
        first.pair.stage, *located, num_other_files=len(comparison.differences) - 1
    )


def _locate_cause(
    first: FileDifference, in_stage: Sequence[FileDifference]
) -> tuple[str, str, str, NondeterminismCause]:
    """Return file, location, difference and cause of the first difference of a stage."""
    stage = first.pair.stage
    if not first.file:
        return "its folder", "", first.problem, _UNKNOWN
    names = [difference.file for difference in in_stage]
    for name in names:
        if name == "rewards.jsonl":
            explanation = _explain_rollouts(first, name)
        elif name.startswith("trajectories_"):
            explanation = _explain_rows(first, name, _read_evaluation_rollouts)
        elif name.endswith(".jsonl") and stage == "prepare_data" and name != "metrics.jsonl":
            explanation = _explain_data_rows(first, name)
        else:
            continue
        if explanation is not None:
            return name, *explanation
    if "metrics.jsonl" in names:
        metric = _find_first_metric_difference(first)
        if metric is not None:
            return "metrics.jsonl", metric.location, metric.text, _UPDATE
    cause = _PREPARED_DATA if stage == "prepare_data" else _UNKNOWN
    return first.file, "", first.problem, cause


def _explain_rollouts(difference: FileDifference, name: str) -> _LocatedCause | None:
    """Explain the first rollout that differs, unless an earlier update differs already."""
    explanation = _explain_rows(difference, name, _read_training_rollouts)
    metric = _find_first_metric_difference(difference)
    if explanation is not None and metric is not None:
        iteration = int(explanation[0].split()[1].rstrip(","))
        if metric.index < iteration:
            return metric.location, metric.text, _UPDATE
    return explanation


@dataclass(frozen=True)
class _RolloutRecord:
    """Record of one rollout."""

    location: str
    episode: tuple[Any, ...]
    turns: list[str]  # opening, action, observation, action, ...
    rewards: dict[str, Any]
    success: Any


_RolloutReader = Callable[[Path], Iterator[_RolloutRecord]]


def _explain_rows(
    difference: FileDifference, name: str, read_rollouts: _RolloutReader
) -> _LocatedCause | None:
    first_rollouts, other_rollouts = (
        read_rollouts(folder / name) for folder in difference.pair.folders
    )
    for first, other in zip_longest(first_rollouts, other_rollouts):
        if first is None or other is None:
            return (first or other).location, "one run has more episodes", _PROMPT_ORDER
        explanation = _find_first_cause(first, other)
        if explanation is not None:
            return first.location, *explanation
    return None


def _find_first_cause(
    first: _RolloutRecord, other: _RolloutRecord
) -> tuple[str, NondeterminismCause] | None:
    if first.episode != other.episode:
        text = f"episode (level, seed, sample) {first.episode} and {other.episode}"
        return text, _PROMPT_ORDER
    for index, (first_text, other_text) in enumerate(zip_longest(first.turns, other.turns)):
        if first_text == other_text:
            continue
        if index == 0:
            return f"openings {first_text} and {other_text}", _OPENING_MESSAGES
        turn = (index + 1) // 2
        texts = f"{_shorten_repr(first_text)} and {_shorten_repr(other_text)}"
        if first_text is None or other_text is None or index % 2 == 0:
            return f"after the same action in turn {turn}: {texts}", _OBSERVATIONS
        return f"action of turn {turn}: {texts}", _SAMPLED_TOKENS
    names = first.rewards.keys() | other.rewards.keys()
    for name in sorted(names, key=lambda name: (name.startswith("weighted/"), name)):
        first_value, other_value = first.rewards.get(name), other.rewards.get(name)
        are_both_nan = first_value != first_value and other_value != other_value
        if first_value != other_value and not are_both_nan:
            cause = _ENVIRONMENT_REWARD if name == "task" else _build_reward_cause(name)
            text = f"{cause.name} gave {first_value} and {other_value} for the same trajectory"
            return text, cause
    if first.success != other.success:
        text = f"success {first.success} and {other.success} after the same actions"
        return text, _ENVIRONMENT_REWARD
    return None


def _read_training_rollouts(path: Path) -> Iterator[_RolloutRecord]:
    for line in read_checked_lines(path):
        if line.record is not None:
            where = f"iteration {line.record.get('iteration')}"
            yield _build_rollout_record(line.record, where, list(line.record.get("turns", [])))


def _read_evaluation_rollouts(path: Path) -> Iterator[_RolloutRecord]:
    with path.open(encoding="utf-8") as file:
        for number, text in enumerate(file, start=1):
            row = json.loads(text)
            turns = [str(row.get("prompt"))]
            for turn in row.get("turns", []):
                answer = [turn.get("observation"), turn.get("tool_call"), turn.get("is_error")]
                turns += [str(turn.get("action")), json.dumps(answer)]
            yield _build_rollout_record(row, f"line {number}", turns)


def _build_rollout_record(row: dict[str, Any], where: str, turns: list[str]) -> _RolloutRecord:
    level, seed, sample = row.get("level"), row.get("seed"), row.get("sample")
    location = f"{where}, level {level}, seed {seed}, sample {sample}"
    rewards = dict(row.get("rewards", {}))
    return _RolloutRecord(location, (level, seed, sample), turns, rewards, row.get("success"))


def _explain_data_rows(difference: FileDifference, name: str) -> _LocatedCause | None:
    first_lines, other_lines = (
        (folder / name).read_text(encoding="utf-8").splitlines()
        for folder in difference.pair.folders
    )
    for number, (first, other) in enumerate(zip_longest(first_lines, other_lines), start=1):
        if first == other:
            continue
        text = f"{_shorten_repr(first)} and {_shorten_repr(other)}"
        if sorted(first_lines) == sorted(other_lines):
            text = f"the same {len(first_lines)} rows in another order; here {text}"
        return f"line {number}", text, _PREPARED_DATA
    return None


@dataclass(frozen=True)
class _MetricDifference:
    """First metric that differs."""

    index: int  # number of earlier iterations
    step: int
    text: str

    @property
    def location(self) -> str:
        return f"iteration {self.index}, step {self.step}"


def _find_first_metric_difference(difference: FileDifference) -> _MetricDifference | None:
    """Return the first metric of the journals that differs, in the order of iterations."""
    paths = [folder / "metrics.jsonl" for folder in difference.pair.folders]
    if not all(path.is_file() for path in paths):
        return None
    first_rows, other_rows = (_merge_by_step(read_metric_rows(path)) for path in paths)
    for index, step in enumerate(sorted(first_rows.keys() | other_rows.keys())):
        first, other = first_rows.get(step, {}), other_rows.get(step, {})
        for name in _sort_loss_first(first.keys() | other.keys()):
            if first.get(name) != other.get(name):
                text = f"{name} {first.get(name)} and {other.get(name)}"
                return _MetricDifference(index, step, text)
    return None


def _merge_by_step(rows: Iterable[tuple[int, dict[str, Any]]]) -> dict[int, dict[str, Any]]:
    merged: dict[int, dict[str, Any]] = {}
    for step, row in rows:
        merged.setdefault(step, {}).update(row)
    return merged


def _sort_loss_first(names: Iterable[str]) -> list[str]:
    return sorted(
        names, key=lambda name: (name != "train/loss", not name.startswith("train/"), name)
    )


def _shorten_repr(text: object) -> str:
    shown = repr(text) if text is not None else "nothing (the episode ended)"
    return shown if len(shown) <= 160 else f"{shown[:160]}..."


def find_suspect_lines(paths: Sequence[str]) -> list[SuspectLine]:
    """Return suspect lines of the modules behind import paths, and of the user modules that those import.

    Args:
        paths: 'package.module:name' each.
    """
    try:
        modules = find_user_modules([path for path in paths if ":" in path])
    except PosttrainError:
        return []
    suspects = [suspect for module in modules.values() for suspect in _scan_file(module.file)]
    return suspects[:_MAX_SUSPECTS]


def _scan_file(path: Path) -> list[SuspectLine]:
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError):
        return []
    sorted_nodes = {
        id(argument)
        for node in ast.walk(tree)
        if _format_called_name(node) == "sorted"
        for argument in getattr(node, "args", [])
    }
    suspects = []
    for node, reason in _iter_suspect_nodes(tree, sorted_nodes):
        code = ast.unparse(node).splitlines()[0][:80]
        suspects.append(SuspectLine(path.name, node.lineno, code, reason))
    return sorted(suspects, key=lambda suspect: suspect.line)


def _iter_suspect_nodes(tree: ast.AST, sorted_nodes: set[int]) -> Iterator[tuple[ast.expr, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = _format_called_name(node)
            reason = _explain_suspect_call(node, name, id(node) in sorted_nodes)
            if reason:
                yield node, reason
        elif isinstance(node, ast.For | ast.comprehension) and _is_set_expression(node.iter):
            yield node.iter, _SET_ORDER


def _explain_suspect_call(node: ast.Call, name: str, is_sorted: bool) -> str:
    """Return why a call may be nondeterministic; "" if it is not suspect."""
    module, _, last = name.rpartition(".")
    if module in _RANDOM_MODULES and last not in _SEEDED_GENERATORS:
        return (
            "numbers of a global generator: unseeded, or shared with other code that draws from it"
        )
    if last in ("Random", "default_rng", "SystemRandom") and not node.args and not node.keywords:
        return "a generator without a seed"
    if module in ("time", "datetime", "datetime.datetime", "date") and last in _CLOCK_FUNCTIONS:
        return "the time"
    if name in _RANDOM_FUNCTIONS:
        return "differs from process to process"
    if name == "hash":
        return "the hash of a text differs from process to process (PYTHONHASHSEED)"
    if (name in _LISTING_FUNCTIONS or last in ("iterdir", "rglob")) and not is_sorted:
        return "a directory listing has no order"
    is_iteration = name in ("list", "tuple", "enumerate", "iter", "next")
    if is_iteration and node.args and _is_set_expression(node.args[0]):
        return _SET_ORDER
    return ""


def _is_set_expression(node: ast.expr) -> bool:
    if isinstance(node, ast.Set | ast.SetComp):
        return True
    return _format_called_name(node) in ("set", "frozenset")


def _format_called_name(node: ast.AST) -> str:
    """Return the name of a called function, such as 'random.random'; "" for anything else."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name | ast.Attribute):
        return ""
    return ast.unparse(node.func)
