"""The part of a pipeline that is not deterministic, from the first difference of two runs: where, cause, remedy."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

from flows.verification.differences import FileDifference, RunComparison, metric_rows
from flows.verification.suspects import Suspect
from rl_core.storage.checked_lines import read_checked

__all__ = ["ResumeFinding", "PipelinePart", "explain"]


@dataclass(frozen=True)
class PipelinePart:
    """A part of the pipeline that may depend on chance: name, usual causes, remedy."""

    name: str
    causes: str
    remedy: str
    code: str = ""  # "environment", or the import path of a reward function: whose source may show why


ENVIRONMENT = "environment"
_SEEDED = "draw from random.Random(f'{level}/{seed}') made in the episode, sort what comes from sets and folders"
_DRAWN = PipelinePart(
    "the order of prompts",
    "the seeds or rows that the environment gives come in another order: iteration over a set, a folder's listing, or "
    "global random numbers",
    "sort the rows before their index becomes a seed",
    ENVIRONMENT,
)
_OPENING = PipelinePart(
    "the environment's opening messages",
    "the episode of one seed begins differently: global random numbers, the time, the order of a set, or state that "
    "episodes share",
    _SEEDED,
    ENVIRONMENT,
)
_OBSERVATION = PipelinePart(
    "the environment's observations",
    "the same action in the same episode is answered differently: global random numbers, the time, the order of a set, "
    "a server, or state that episodes share",
    _SEEDED,
    ENVIRONMENT,
)
_TASK = PipelinePart(
    "the environment's reward",
    "the same episode with the same actions earns something else: global random numbers, the time, or a judge that "
    "samples",
    _SEEDED,
    ENVIRONMENT,
)
_TOKENS = PipelinePart(
    "the sampled tokens",
    "the weights or the sampler's numbers differ: `sampling.rejoin: ready`, another number of threads, or a model "
    "whose forward pass depends on chance or on state that no checkpoint holds",
    "keep `rejoin: together` and a fixed `threads:`; keep no state in the model outside its parameters and buffers",
)
_UPDATE = PipelinePart(
    "the update",
    "the same rollouts or rows gave another loss or gradient: another number of threads, or code of yours in the loss "
    "or the model that depends on chance or on state that no checkpoint holds",
    "fix `threads:`; put state of your own into state_dict and load_state_dict",
)
_ROWS = PipelinePart(
    "the prepared data",
    "rows are made or ordered by something other than the seed: iteration over a set, a folder's listing, global "
    "random numbers, the time",
    "sort before you draw, and draw from random.Random(seed)",
    ENVIRONMENT,
)
_UNKNOWN = PipelinePart("a published file", "none of the known parts differs before it", "compare the two files")


def _reward(name: str) -> PipelinePart:
    if ":" not in name:
        return PipelinePart(
            f"the reward component '{name}'", "its inputs differ, or its state is not restored", "report it"
        )
    return PipelinePart(
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
    where: str  # line, iteration, episode
    what: str  # both values
    part: PipelinePart
    suspects: Sequence[Suspect] = field(default=())
    others: int = 0  # further files that differ

    def text(self) -> str:
        """The finding in a few lines."""
        lines = [
            f"NOT deterministic: {self.part.name}",
            f"  where     stage {self.stage}, {self.file}{', ' if self.where else ''}{self.where}",
            f"  what      {self.what}",
            f"  cause     likely: {self.part.causes}",
            *(f"            {suspect}" for suspect in self.suspects),
            f"  remedy    {self.part.remedy}",
        ]
        if self.others:
            lines.append(f"  besides   {self.others} other files differ, of this stage or later ones")
        return "\n".join(lines)


def explain(comparison: RunComparison) -> ResumeFinding:
    """The finding behind the first difference. A stage's inputs are equal there, as the stages before it are."""
    first = comparison.differences[0]
    same_stage = [d for d in comparison.differences if d.pair == first.pair]
    stage, others = first.pair.stage, len(comparison.differences) - 1
    if not first.file:
        return ResumeFinding(stage, "its folder", "", first.problem, _UNKNOWN, others=others)
    names = [difference.file for difference in same_stage]
    for name in names:
        if name == "rewards.jsonl":
            found = _of_rollouts(same_stage, name)
        elif name.startswith("trajectories_"):
            found = _of_rows(first, name, _evaluated_rows)
        elif name.endswith(".jsonl") and stage == "prepare_data" and name != "metrics.jsonl":
            found = _of_data(first, name)
        else:
            continue
        if found is not None:
            where, what, part = found
            return ResumeFinding(stage, name, where, what, part, others=others)
    if "metrics.jsonl" in names and (at := _first_metric(first)) is not None:
        return ResumeFinding(
            stage, "metrics.jsonl", f"iteration {at.index}, step {at.step}", at.text, _UPDATE, others=others
        )
    return ResumeFinding(
        stage, first.file, "", first.problem, _ROWS if stage == "prepare_data" else _UNKNOWN, others=others
    )


_Found = tuple[str, str, PipelinePart]


def _of_rollouts(differences: Sequence[FileDifference], name: str) -> _Found | None:
    """First rollout that differs, unless the update before its iteration differed already."""
    found = _of_rows(differences[0], name, _trained_rows)
    at = _first_metric(differences[0])
    if found is not None and at is not None:
        iteration = int(found[0].split()[1].rstrip(","))
        if at.index <= iteration and at.index < iteration:
            return f"iteration {at.index}, step {at.step}", at.text, _UPDATE
    return found


@dataclass(frozen=True)
class _Row:
    """Record of one rollout."""

    where: str
    episode: tuple[Any, ...]
    turns: list[str]  # opening, action, observation, action, ...
    rewards: dict[str, Any]
    success: Any


def _of_rows(difference: FileDifference, name: str, read: Any) -> _Found | None:
    one, other = (read(folder / name) for folder in difference.pair.folders)
    for mine, its in zip_longest(one, other):
        if mine is None or its is None:
            row = mine or its
            return row.where, "one run has more episodes", _DRAWN
        if found := _first_part(mine, its):
            what, part = found
            return mine.where, what, part
    return None


def _first_part(mine: _Row, its: _Row) -> tuple[str, PipelinePart] | None:
    if mine.episode != its.episode:
        return f"episode (level, seed, sample) {mine.episode} and {its.episode}", _DRAWN
    for index, (here, there) in enumerate(zip_longest(mine.turns, its.turns)):
        if here == there:
            continue
        if index == 0:
            return f"openings {here} and {there}", _OPENING
        turn = (index + 1) // 2
        if here is None or there is None or index % 2 == 0:
            return f"after the same action in turn {turn}: {_cut(here)} and {_cut(there)}", _OBSERVATION
        return f"action of turn {turn}: {_cut(here)} and {_cut(there)}", _TOKENS
    for name in sorted(mine.rewards.keys() | its.rewards.keys(), key=lambda name: (name.startswith("weighted/"), name)):
        here, there = mine.rewards.get(name), its.rewards.get(name)
        if here != there and not (here != here and there != there):
            part = _TASK if name == "task" else _reward(name)
            return f"{part.name} gave {here} and {there} for the same trajectory", part
    if mine.success != its.success:
        return f"success {mine.success} and {its.success} after the same actions", _TASK
    return None


def _trained_rows(path: Path) -> Iterator[_Row]:
    for line in read_checked(path):
        if (row := line.record) is not None:
            episode = row.get("level"), row.get("seed"), row.get("sample")
            where = f"iteration {row.get('iteration')}, level {episode[0]}, seed {episode[1]}, sample {episode[2]}"
            yield _Row(where, episode, list(row.get("turns", [])), dict(row.get("rewards", {})), row.get("success"))


def _evaluated_rows(path: Path) -> Iterator[_Row]:
    with path.open(encoding="utf-8") as file:
        for number, text in enumerate(file, start=1):
            row = json.loads(text)
            episode = row.get("level"), row.get("seed"), row.get("sample")
            turns = [str(row.get("prompt"))]
            for turn in row.get("turns", []):
                turns += [
                    str(turn.get("action")),
                    json.dumps([turn.get("observation"), turn.get("tool_call"), turn.get("is_error")]),
                ]
            where = f"line {number}, level {episode[0]}, seed {episode[1]}, sample {episode[2]}"
            yield _Row(where, episode, turns, dict(row.get("rewards", {})), row.get("success"))


def _of_data(difference: FileDifference, name: str) -> _Found | None:
    one, other = ((folder / name).read_text(encoding="utf-8").splitlines() for folder in difference.pair.folders)
    for number, (mine, its) in enumerate(zip_longest(one, other), start=1):
        if mine == its:
            continue
        what = f"{_cut(mine)} and {_cut(its)}"
        if sorted(one) == sorted(other):
            what = f"the same {len(one)} rows in another order; here {what}"
        return f"line {number}", what, _ROWS
    return None


@dataclass(frozen=True)
class _MetricPlace:
    index: int  # iterations before it
    step: int
    text: str


def _first_metric(difference: FileDifference) -> _MetricPlace | None:
    """First value of the journals that differs, by iteration (rows with a metric of training)."""
    paths = [folder / "metrics.jsonl" for folder in difference.pair.folders]
    if not all(path.is_file() for path in paths):
        return None
    one, other = (_by_step(metric_rows(path)) for path in paths)
    for index, step in enumerate(sorted(one.keys() | other.keys())):
        mine, its = one.get(step, {}), other.get(step, {})
        for name in _loss_first(mine.keys() | its.keys()):
            if mine.get(name) != its.get(name):
                return _MetricPlace(index, step, f"{name} {mine.get(name)} and {its.get(name)}")
    return None


def _by_step(rows: Iterable[tuple[int, dict[str, Any]]]) -> dict[int, dict[str, Any]]:
    merged: dict[int, dict[str, Any]] = {}
    for step, row in rows:
        merged.setdefault(step, {}).update(row)
    return merged


def _loss_first(names: Iterable[str]) -> list[str]:
    return sorted(names, key=lambda name: (name != "train/loss", not name.startswith("train/"), name))


def _cut(text: object) -> str:
    shown = repr(text) if text is not None else "nothing (the episode ended)"
    return shown if len(shown) <= 160 else f"{shown[:160]}..."
