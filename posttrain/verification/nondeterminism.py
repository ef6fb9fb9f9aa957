"""Lines of the user's own code that may depend on chance: global random numbers, clocks, sets, listings of folders.

The part of a pipeline that is not deterministic, from the first difference of two runs: where, cause, remedy.
"""

from __future__ import annotations

import ast
import importlib.util
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

from posttrain.verification.run_differences import FileDifference, RunComparison, read_metric_rows
from rl_core.errors import PosttrainError
from rl_core.storage.line_logs import read_checked_lines
from rl_core.user_code import digest_user_code

_CLOCK_FUNCTIONS = ("time", "time_ns", "perf_counter", "monotonic", "now", "utcnow", "today")
_LISTING_FUNCTIONS = ("os.listdir", "os.scandir", "glob.glob", "os.walk")
_MAX_SUSPECTS = 5


@dataclass(frozen=True)
class SuspectLine:
    """A line that may be the reason."""

    file: str
    line: int
    code: str
    reason: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} has `{self.code}`: {self.reason}"


def find_suspect_lines(paths: Sequence[str]) -> list[SuspectLine]:
    """Suspect lines of the modules behind import paths ('package.module:name') and of the user's that those import."""
    try:
        modules = digest_user_code([path for path in paths if ":" in path])
    except PosttrainError:
        return []
    found: list[SuspectLine] = []
    for name in modules:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.origin is not None:
            found += _scan_file(Path(spec.origin))
    return found[:_MAX_SUSPECTS]


def _scan_file(path: Path) -> list[SuspectLine]:
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError):
        return []
    found = []
    sorted_ones = {
        id(arg)
        for node in ast.walk(tree)
        if _format_called_name(node) == "sorted"
        for arg in getattr(node, "args", [])
    }
    for node, why in _iter_suspect_nodes(tree, sorted_ones):
        found.append(
            SuspectLine(path.name, node.lineno, ast.unparse(node).splitlines()[0][:80], why)
        )
    return sorted(found, key=lambda suspect: suspect.line)


def _iter_suspect_nodes(tree: ast.AST, sorted_ones: set[int]) -> Iterator[tuple[ast.expr, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and (
            why := _explain_suspect_call(node, _format_called_name(node), id(node) in sorted_ones)
        ):
            yield node, why
        elif isinstance(node, ast.For | ast.comprehension) and _is_set_expression(node.iter):
            yield (
                node.iter,
                "the order of a set of texts differs from process to process (PYTHONHASHSEED)",
            )


def _explain_suspect_call(node: ast.Call, name: str, is_sorted: bool) -> str:
    module, _, last = name.rpartition(".")
    if module in ("random", "np.random", "numpy.random") and last not in (
        "Random",
        "default_rng",
        "Generator",
    ):
        return "numbers of a generator that is global: unseeded, or moved by whoever else draws from it"
    if last in ("Random", "default_rng", "SystemRandom") and not node.args and not node.keywords:
        return "a generator without a seed"
    if module in ("time", "datetime", "datetime.datetime", "date") and last in _CLOCK_FUNCTIONS:
        return "the time"
    if name in (
        "uuid.uuid4",
        "uuid.uuid1",
        "os.urandom",
        "secrets.token_hex",
        "id",
        "torch.rand",
        "torch.randn",
    ):
        return "differs from process to process"
    if name == "hash":
        return "the hash of a text differs from process to process (PYTHONHASHSEED)"
    if (name in _LISTING_FUNCTIONS or last in ("iterdir", "rglob")) and not is_sorted:
        return "a folder's listing has no order"
    if (
        name in ("list", "tuple", "enumerate", "iter", "next")
        and node.args
        and _is_set_expression(node.args[0])
    ):
        return "the order of a set of texts differs from process to process (PYTHONHASHSEED)"
    return ""


def _is_set_expression(node: ast.expr) -> bool:
    return isinstance(node, ast.Set | ast.SetComp) or _format_called_name(node) in (
        "set",
        "frozenset",
    )


def _format_called_name(node: ast.AST) -> str:
    """'random.random' of a call of it; "" for anything else."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name | ast.Attribute):
        return ""
    return ast.unparse(node.func)


@dataclass(frozen=True)
class NondeterminismCause:
    """A part of the pipeline that may depend on chance: name, usual causes, remedy."""

    name: str
    causes: str
    remedy: str
    code: str = (
        ""  # "environment", or the import path of a reward function: whose source may show why
    )


ENVIRONMENT_CODE = "environment"
_SEED_REMEDY = "draw from random.Random(f'{level}/{seed}') made in the episode, sort what comes from sets and folders"
_PROMPT_ORDER = NondeterminismCause(
    "the order of prompts",
    "the seeds or rows that the environment gives come in another order: iteration over a set, a folder's listing, or "
    "global random numbers",
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
    "the same action in the same episode is answered differently: global random numbers, the time, the order of a set, "
    "a server, or state that episodes share",
    _SEED_REMEDY,
    ENVIRONMENT_CODE,
)
_ENVIRONMENT_REWARD = NondeterminismCause(
    "the environment's reward",
    "the same episode with the same actions earns something else: global random numbers, the time, or a judge that "
    "samples",
    _SEED_REMEDY,
    ENVIRONMENT_CODE,
)
_SAMPLED_TOKENS = NondeterminismCause(
    "the sampled tokens",
    "the weights or the sampler's numbers differ: `sampling.rejoin: ready`, another number of threads, or a model "
    "whose forward pass depends on chance or on state that no checkpoint holds",
    "keep `rejoin: together` and a fixed `threads:`; keep no state in the model outside its parameters and buffers",
)
_UPDATE = NondeterminismCause(
    "the update",
    "the same rollouts or rows gave another loss or gradient: another number of threads, or code of yours in the loss "
    "or the model that depends on chance or on state that no checkpoint holds",
    "fix `threads:`; put state of your own into state_dict and load_state_dict",
)
_PREPARED_DATA = NondeterminismCause(
    "the prepared data",
    "rows are made or ordered by something other than the seed: iteration over a set, a folder's listing, global "
    "random numbers, the time",
    "sort before you draw, and draw from random.Random(seed)",
    ENVIRONMENT_CODE,
)
_UNKNOWN = NondeterminismCause(
    "a published file", "none of the known parts differs before it", "compare the two files"
)


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
    """The first difference, for people."""

    stage: str
    file: str
    location: str  # line, iteration, episode
    difference: str  # both values
    cause: NondeterminismCause
    suspects: Sequence[SuspectLine] = field(default=())
    num_other_files: int = 0  # further files that differ

    def format_text(self) -> str:
        """The finding in a few lines."""
        lines = [
            f"NOT deterministic: {self.cause.name}",
            f"  where     stage {self.stage}, {self.file}{', ' if self.location else ''}{self.location}",
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
    """The finding behind the first difference. A stage's inputs are equal there, as the stages before it are."""
    first = comparison.differences[0]
    same_stage = [d for d in comparison.differences if d.pair == first.pair]
    stage, others = first.pair.stage, len(comparison.differences) - 1
    if not first.file:
        return ResumeFinding(
            stage, "its folder", "", first.problem, _UNKNOWN, num_other_files=others
        )
    names = [difference.file for difference in same_stage]
    for name in names:
        if name == "rewards.jsonl":
            found = _explain_rollouts(same_stage, name)
        elif name.startswith("trajectories_"):
            found = _explain_rows(first, name, _read_evaluation_rollouts)
        elif name.endswith(".jsonl") and stage == "prepare_data" and name != "metrics.jsonl":
            found = _explain_data_rows(first, name)
        else:
            continue
        if found is not None:
            where, what, part = found
            return ResumeFinding(stage, name, where, what, part, num_other_files=others)
    if "metrics.jsonl" in names and (at := _find_first_metric_difference(first)) is not None:
        return ResumeFinding(
            stage,
            "metrics.jsonl",
            f"iteration {at.index}, step {at.step}",
            at.text,
            _UPDATE,
            num_other_files=others,
        )
    return ResumeFinding(
        stage,
        first.file,
        "",
        first.problem,
        _PREPARED_DATA if stage == "prepare_data" else _UNKNOWN,
        num_other_files=others,
    )


_LocatedCause = tuple[str, str, NondeterminismCause]


def _explain_rollouts(differences: Sequence[FileDifference], name: str) -> _LocatedCause | None:
    """First rollout that differs, unless the update before its iteration differed already."""
    found = _explain_rows(differences[0], name, _read_training_rollouts)
    at = _find_first_metric_difference(differences[0])
    if found is not None and at is not None:
        iteration = int(found[0].split()[1].rstrip(","))
        if at.index <= iteration and at.index < iteration:
            return f"iteration {at.index}, step {at.step}", at.text, _UPDATE
    return found


@dataclass(frozen=True)
class _RolloutRecord:
    """Record of one rollout."""

    location: str
    episode: tuple[Any, ...]
    turns: list[str]  # opening, action, observation, action, ...
    rewards: dict[str, Any]
    success: Any


def _explain_rows(difference: FileDifference, name: str, read_rows: Any) -> _LocatedCause | None:
    one, other = (read_rows(folder / name) for folder in difference.pair.folders)
    for mine, its in zip_longest(one, other):
        if mine is None or its is None:
            row = mine or its
            return row.where, "one run has more episodes", _PROMPT_ORDER
        if found := _find_first_cause(mine, its):
            what, part = found
            return mine.where, what, part
    return None


def _find_first_cause(
    mine: _RolloutRecord, its: _RolloutRecord
) -> tuple[str, NondeterminismCause] | None:
    if mine.episode != its.episode:
        return f"episode (level, seed, sample) {mine.episode} and {its.episode}", _PROMPT_ORDER
    for index, (here, there) in enumerate(zip_longest(mine.turns, its.turns)):
        if here == there:
            continue
        if index == 0:
            return f"openings {here} and {there}", _OPENING_MESSAGES
        turn = (index + 1) // 2
        if here is None or there is None or index % 2 == 0:
            return (
                f"after the same action in turn {turn}: {_shorten_repr(here)} and {_shorten_repr(there)}",
                _OBSERVATIONS,
            )
        return (
            f"action of turn {turn}: {_shorten_repr(here)} and {_shorten_repr(there)}",
            _SAMPLED_TOKENS,
        )
    for name in sorted(
        mine.rewards.keys() | its.rewards.keys(),
        key=lambda name: (name.startswith("weighted/"), name),
    ):
        here, there = mine.rewards.get(name), its.rewards.get(name)
        if here != there and not (here != here and there != there):
            part = _ENVIRONMENT_REWARD if name == "task" else _build_reward_cause(name)
            return f"{part.name} gave {here} and {there} for the same trajectory", part
    if mine.success != its.success:
        return (
            f"success {mine.success} and {its.success} after the same actions",
            _ENVIRONMENT_REWARD,
        )
    return None


def _read_training_rollouts(path: Path) -> Iterator[_RolloutRecord]:
    for line in read_checked_lines(path):
        if (row := line.record) is not None:
            episode = row.get("level"), row.get("seed"), row.get("sample")
            where = f"iteration {row.get('iteration')}, level {episode[0]}, seed {episode[1]}, sample {episode[2]}"
            yield _RolloutRecord(
                where,
                episode,
                list(row.get("turns", [])),
                dict(row.get("rewards", {})),
                row.get("success"),
            )


def _read_evaluation_rollouts(path: Path) -> Iterator[_RolloutRecord]:
    with path.open(encoding="utf-8") as file:
        for number, text in enumerate(file, start=1):
            row = json.loads(text)
            episode = row.get("level"), row.get("seed"), row.get("sample")
            turns = [str(row.get("prompt"))]
            for turn in row.get("turns", []):
                turns += [
                    str(turn.get("action")),
                    json.dumps(
                        [turn.get("observation"), turn.get("tool_call"), turn.get("is_error")]
                    ),
                ]
            where = f"line {number}, level {episode[0]}, seed {episode[1]}, sample {episode[2]}"
            yield _RolloutRecord(
                where, episode, turns, dict(row.get("rewards", {})), row.get("success")
            )


def _explain_data_rows(difference: FileDifference, name: str) -> _LocatedCause | None:
    one, other = (
        (folder / name).read_text(encoding="utf-8").splitlines()
        for folder in difference.pair.folders
    )
    for number, (mine, its) in enumerate(zip_longest(one, other), start=1):
        if mine == its:
            continue
        what = f"{_shorten_repr(mine)} and {_shorten_repr(its)}"
        if sorted(one) == sorted(other):
            what = f"the same {len(one)} rows in another order; here {what}"
        return f"line {number}", what, _PREPARED_DATA
    return None


@dataclass(frozen=True)
class _MetricDifference:
    index: int  # iterations before it
    step: int
    text: str


def _find_first_metric_difference(difference: FileDifference) -> _MetricDifference | None:
    """First value of the journals that differs, by iteration (rows with a metric of training)."""
    paths = [folder / "metrics.jsonl" for folder in difference.pair.folders]
    if not all(path.is_file() for path in paths):
        return None
    one, other = (_merge_by_step(read_metric_rows(path)) for path in paths)
    for index, step in enumerate(sorted(one.keys() | other.keys())):
        mine, its = one.get(step, {}), other.get(step, {})
        for name in _sort_loss_first(mine.keys() | its.keys()):
            if mine.get(name) != its.get(name):
                return _MetricDifference(
                    index, step, f"{name} {mine.get(name)} and {its.get(name)}"
                )
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
