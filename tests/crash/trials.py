"""Trials: a run is killed at chosen points, resumed until it has ended, and compared with an undisturbed run."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import json
import os
import random
import re
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from crash.content import (
    content,
    count_parents,
    left_in_shared_memory,
    leftovers,
    problems_of_store,
    shared_memory,
)
from crash.forks import Ended, Forks, Request
from crash.pipelines import KINDS, command

__all__ = ["Bench", "Kill", "Trial", "kills_at_points", "random_kills"]

PROGRESS = bool(os.environ.get("CRASH_PROGRESS"))  # print every kill
RESTARTS = 3  # a run that still fails after these is a failure


@dataclass(frozen=True)
class Kill:
    """Unrequested end of a process."""

    fault: str = ""  # point:hit:action
    after: float | None = None  # share of the time of an undisturbed run


@dataclass
class Trial:
    """Run with its kills, and its result."""

    kind: str  # of pipelines.KINDS
    kills: list[Kill]
    fresh: bool = False
    tried: int = 0  # number of kills attempted; the run ended before the rest
    killed: int = 0  # number of these that hit the run before its end
    restarts: int = 0
    seconds: float = 0.0  # of all processes
    back: float | None = None  # seconds until the first restart had reached the point of the kill
    failures: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        """Description of the kills."""
        kills = [kill.fault or f"after {kill.after:.1%} of the time" for kill in self.kills]
        if len(kills) >= 7:
            kills = [*kills[:2], f"{len(kills) - 4} more", *kills[-2:]]
        description = ", then ".join(kills) or "undisturbed"
        return f"{self.kind}{' fresh' if self.fresh else ''}: {description}"


class Bench:
    """Folder in which all trials run, so that their absolute paths are equal too."""

    def __init__(self, folder: Path, config: Path, forks: Forks) -> None:
        self.folder, self.config, self.forks = folder, config, forks
        self.output = folder / "work" / "outputs"
        self.temporary = folder / "work" / "tmp"
        self.log, self.printed = folder / "work" / "reached.txt", folder / "work" / "printed.txt"
        self.templates = folder / "templates"
        self.wanted: dict[str, dict[str, Any]] = {}  # content of an undisturbed run, by kind
        self.hits: dict[str, dict[str, int]] = {}  # by kind and point
        self.order: dict[str, list[str]] = {}  # points by the time of their last hit
        self.seconds: dict[str, float] = {}
        self.parents: dict[str, int] = {}  # number of parent runs after an undisturbed run
        self.left: set[str] = set()  # leftovers of the kill that ended a template
        self.began_with = ""  # start time of the newest run of the template
        self.seen: set[str] = set()  # points that any run reached

    def prepare_data(self, kinds: Sequence[str], times: int = 2) -> None:
        """Run each kind twice. The two may differ only in MAY_DIFFER, because no kill is involved."""
        for kind in kinds:
            for turn in range(times):
                self._begin(kind)
                ended = self._run(kind, Kill())
                assert ended.code == 0, f"{kind}: {ended}\n{self.printed.read_text()}"
                result = content(self.output)
                if turn == 0:
                    self.wanted[kind], self.seconds[kind] = result, ended.seconds
                    self.order[kind] = list(
                        dict.fromkeys(name for _, _, name in reversed(self._reached()))
                    )[::-1]
                    self.hits[kind] = dict(
                        collections.Counter(name for _, _, name in self._reached())
                    )
                assert (odd := differences(self.wanted[kind], result)) == [], (
                    f"two runs differ: {odd}"
                )
                assert (odd := self._odd(kind, ended)) == [], odd

    def _template(self, kind: str) -> Path | None:
        """Return the folder in which a kind starts, created on first use."""
        starts, template = KINDS[kind].starts, self.templates / kind
        if starts == "nothing" or template.is_dir():
            return template if starts != "nothing" else None
        if starts == "database":
            self._clear()
            ended = self._run(kind, Kill("store.experiment:1:kill"))
            shutil.rmtree(self.output / "small")
        else:
            self._begin(starts)
            ended = self._run(starts, Kill(KINDS[starts].ended))
        killed = starts == "database" or KINDS[starts].ended
        assert ended.code == (-9 if killed else 0), self.printed.read_text()
        shutil.copytree(self.output, template, symlinks=True)
        return template

    def _clear(self) -> None:
        shutil.rmtree(self.folder / "work", ignore_errors=True)
        for folder in (self.temporary, self.output):
            folder.mkdir(parents=True)
        self.log.touch()

    def _begin(self, kind: str) -> None:
        template = self._template(kind)
        self._clear()
        if template is not None:
            shutil.copytree(template, self.output, symlinks=True, dirs_exist_ok=True)
        began_killed = (starts := KINDS[kind].starts) in KINDS and KINDS[starts].ended
        self.left = set(leftovers(self.output, self.temporary)) if began_killed else set()
        record = self.output / "small" / "run.json"
        self.began_with = json.loads(record.read_text())["started"] if record.exists() else ""

    def _run(self, kind: str, kill: Kill, fresh: bool = False) -> Ended:
        self.log.write_text("")
        after = None if kill.after is None else kill.after * self.seconds[kind]
        request = Request(
            arguments=command(self.config, kind),
            printed=str(self.printed),
            fault=kill.fault,
            log=str(self.log),
            kill_after=after,
            environment={"TMPDIR": str(self.temporary)},
            fresh=fresh,
        )
        ended = self.forks.run(request)
        self.seen |= {name for _, _, name in self._reached()}
        return ended

    def also(self, *arguments: str, fault: str = "", code: int = 0) -> str:
        """Run another command on the output folder of the last run; return its output. It must end with this code."""
        self.log.write_text("")
        self.printed.write_text("")
        ended = self.forks.run(
            Request(list(arguments), str(self.printed), fault=fault, log=str(self.log))
        )
        self.seen |= {name for _, _, name in self._reached()}
        assert ended.code == code, self.printed.read_text()
        return self.printed.read_text()

    def _reached(self) -> list[tuple[int, float, str]]:
        """List the points that the last process and its children reached: pid, time, name."""
        rows = (line.split() for line in self.log.read_text().splitlines())
        return [(int(pid), float(when), name) for pid, when, name in rows]

    def run(self, trial: Trial) -> Trial:
        """Run a trial and record every problem of its result."""
        before = shared_memory()
        self._begin(trial.kind)
        open_stages: set[str] = set()
        for kill in trial.kills:
            trial.tried += 1
            ended = self._run(trial.kind, kill, trial.fresh)
            trial.seconds += ended.seconds
            trial.failures += [f"outlived its parent: {name}" for name in ended.orphans]
            trial.back = trial.back if trial.back is not None else self._back(ended, open_stages)
            if ended.code == 0:
                break
            if PROGRESS:
                print(
                    f"    {kill.fault or kill.after}: {ended.code} after {ended.seconds:.1f} s",
                    flush=True,
                )
            trial.killed += 1
            if (ended.code > 0 and "kill" in kill.fault) or ended.code not in (-9, 1, 143):
                trial.failures.append(f"ended with {ended.code}: {self._read_last_line()}")
            open_stages = {path.name for path in self.output.glob("small/stages/*/*.open")}
            if self._is_over(trial.kind):
                # the kill came after the end; another command would start a new run
                ended = dataclasses.replace(ended, code=0)
                break
        else:
            ended = self._finish(trial, open_stages)
        if ended.code:
            trial.failures.append(f"does not resume: exit {ended.code}: {self._read_last_line()}")
            return trial
        trial.failures += differences(self.wanted[trial.kind], content(self.output))
        trial.failures += self._odd(trial.kind, ended)
        trial.failures += [f"left in /dev/shm: {name}" for name in left_in_shared_memory(before)]
        return trial

    def _is_over(self, kind: str) -> bool:
        """Return whether the run's record says that it has ended, so that another command would start a new run."""
        if KINDS[kind].what[0] == "retrain":
            records = [
                json.loads(path.read_text())
                for path in self.output.glob("small/retrainings/*.json")
            ]
            return any(record["status"] not in ("open", "failed", "waiting") for record in records)
        if KINDS[kind].what[0] == "evaluate-champion":
            return (self.output / "small" / "champion_checks.jsonl").exists()
        record = self.output / "small" / "run.json"
        if KINDS[kind].what[0] != "run" or not record.exists():
            return False
        data = json.loads(record.read_text())
        return data["status"] == "finished" and data["started"] != self.began_with

    def _finish(self, trial: Trial, open_stages: set[str]) -> Ended:
        for _ in range(RESTARTS):
            ended = self._run(trial.kind, Kill(), trial.fresh)
            trial.restarts += 1
            trial.seconds += ended.seconds
            trial.failures += [f"outlived its parent: {name}" for name in ended.orphans]
            trial.back = trial.back if trial.back is not None else self._back(ended, open_stages)
            if ended.code == 0:
                break
        if trial.restarts > 1:
            trial.failures.append(f"took {trial.restarts} restarts: {self._read_last_line()}")
        return ended

    def _back(self, ended: Ended, open_stages: set[str]) -> float | None:
        """Return the seconds from the start of a restarted process until it resumes the open stage."""
        if not open_stages:
            return None
        names = [(time_, name) for _, time_, name in self._reached()]
        return next((time_ - ended.began for time_, name in names if name == "stage.tracked"), None)

    def _odd(self, kind: str, ended: Ended) -> list[str]:
        results = [
            f"left over: {name}"
            for name in leftovers(self.output, self.temporary)
            if name not in self.left
        ]
        results += [f"outlived its parent: {name}" for name in ended.orphans]
        problems = problems_of_store(
            self.output, self.parents.setdefault(kind, count_parents(self.output))
        )
        began_killed = KINDS[starts].ended if (starts := KINDS[kind].starts) in KINDS else ""
        return results + [
            each for each in problems if not (began_killed and each.endswith("is not finished"))
        ]

    def _read_last_line(self) -> str:
        return " | ".join(self.printed.read_text(errors="replace").strip().splitlines()[-3:])[-600:]


def differences(expected: dict[str, Any], actual: dict[str, Any]) -> list[str]:
    """List the differences; [] = none."""
    problems = [f"missing: {name}" for name in sorted(expected.keys() - actual.keys())]
    problems += [f"too much: {name}" for name in sorted(actual.keys() - expected.keys())]
    for name in sorted(expected.keys() & actual.keys()):
        if expected[name] != actual[name]:
            problems.append(f"differs: {name}{_locate_difference(expected[name], actual[name])}")
    return problems


def _locate_difference(expected: Any, actual: Any) -> str:
    if isinstance(expected, list) and isinstance(actual, list):
        ours, theirs = (collections.Counter(map(repr, rows)) for rows in (expected, actual))
        lost, extra = list((ours - theirs).elements()), list((theirs - ours).elements())
        return f": lost {lost[:3]} ({len(lost)}), extra {extra[:3]} ({len(extra)})"
    if isinstance(expected, dict) and isinstance(actual, dict):
        keys = [key for key in {**expected, **actual} if expected.get(key) != actual.get(key)]
        return "".join(
            f"; {key}: {str(expected.get(key))[:80]} / {str(actual.get(key))[:80]}"
            for key in keys[:3]
        )
    return f": {str(expected)[:80]} / {str(actual)[:80]}"


def kills_at_points(
    hits: dict[str, int], most: int, action: str = "kill", only: str = ".*", seed: int = 0
) -> Iterator[Kill]:
    """Yield a kill at each point: at all of its hits, or at `most` of them, including the first and the last.

    In rounds: the first hits of all points come first.
    """
    draw = random.Random(seed)
    plans = []
    for point, count in sorted(hits.items()):
        if not re.fullmatch(only, point):
            continue
        ends = [1, count] if count > 1 else [1]
        inner = list(range(2, count))
        chosen = draw.sample(inner, min(len(inner), max(0, most - len(ends))))
        plans.append([Kill(f"{point}:{hit}:{action}") for hit in [*ends[:most], *chosen]])
    for turn in itertools.zip_longest(*plans):
        yield from (kill for kill in turn if kill is not None)


def random_kills(count: int, seed: int = 0) -> Iterator[list[Kill]]:
    """Yield kills at random times of a run; every third trial has several in a row."""
    draw = random.Random(seed)
    for index in range(count):
        times = draw.choice((2, 3, 5)) if index % 3 == 2 else 1
        yield [Kill(after=round(draw.random(), 4)) for _ in range(times)]


def as_row(trial: Trial) -> dict[str, Any]:
    """Format the trial for JSON."""
    return {**asdict(trial), "name": trial.name, "when": time.time()}


def append(path: Path, job: str, trials: Sequence[Trial]) -> None:
    """Record the result of a job."""
    with path.open("a") as file:
        for trial in trials:
            file.write(json.dumps({**as_row(trial), "job": job}) + "\n")


def chains(bench: Bench, kind: str, step: int = 1) -> Iterator[Trial]:
    """Yield trials that together kill at every point once, one kill after another in one folder, so little is repeated.

    Args:
        step: 3 = at every third point.
    """
    yield from _run_chains(
        bench, kind, [Kill(f"{point}:1:kill") for point in bench.order[kind][::step]]
    )


def walks(bench: Bench, kind: str, points: Sequence[str]) -> Iterator[Trial]:
    """Yield trials that kill at one point after the other, at every hit.

    A restarted process may reach the point of the kill before anything new, so every second hit counts.
    """
    for point in points:
        count = bench.hits[kind][point]
        hits = [2] * count if count > 2 else [1] * count
        yield bench.run(Trial(kind, [Kill(f"{point}:{hit}:kill") for hit in hits]))


def _run_chains(bench: Bench, kind: str, kills: list[Kill]) -> Iterator[Trial]:
    while kills:
        trial = bench.run(Trial(kind, kills))
        num_done = max(1, trial.tried if trial.killed == trial.tried else trial.tried - 1)
        trial.kills = kills[:num_done]
        yield trial
        kills = kills[num_done:]
