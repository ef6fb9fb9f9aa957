"""Command `python -m crash`: the crash test, also in parts: trials of an earlier call are not repeated.

`--jobs 2` distributes the trials over two processes, each with a separate folder, warm process and Prefect server.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from crash import jobs, report
from crash.forks import Forks
from crash.pipelines import KINDS, write_agent, write_inputs
from crash.servers import end_by_sigterm, environment, prefect_server
from crash.trials import Bench, Trial, append, chains, kills_at_points, random_kills, walks


def main(argv: list[str] | None = None) -> int:
    """Run all requested jobs that have not been run, within the budget."""
    arguments = _build_parser().parse_args(argv)
    folder = Path(arguments.output).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    if not arguments.keep:
        jobs.forget(folder)
    if arguments.jobs > 1:
        ended = jobs.run(folder, arguments.jobs, sys.argv[1:] if argv is None else argv)
        return max(ended, _report(folder))
    deadline = time.monotonic() + arguments.seconds
    config = write_inputs(folder)
    write_agent(folder)
    with prefect_server() as api, Forks(environment(api)) as forks:
        bench = Bench(folder, config, forks)
        bench.prepare_data(arguments.kinds, times=1 if arguments.keep else 2)
        _write_facts(folder / "facts.json", bench, arguments.keep)
        for kind, hits in bench.hits.items():
            print(
                f"{kind}: {bench.seconds[kind]:.1f} s undisturbed, {len(hits)} points, {sum(hits.values())} hits"
            )
        if missing := report.unreached(bench.hits, arguments.kinds):
            print(f"not reached: {', '.join(missing)}")
        _run_jobs(bench, list(_list_jobs(arguments, bench)), folder, deadline)
    return _report(folder)


def _report(folder: Path) -> int:
    """Print and write the figures of all recorded trials; return 1 if one of them failed."""
    rows, facts = jobs.trials(folder), jobs.facts(folder)
    print(report.table(rows, facts))
    (folder / "crash.json").write_text(json.dumps(report.figures(rows, facts), indent=1) + "\n")
    (folder / "crash.md").write_text(report.markdown(rows, facts))
    print(f"figures: {folder / 'crash.json'}, {folder / 'crash.md'}")
    return int(any(row["failures"] for row in rows))


def _write_facts(path: Path, bench: Bench, keep: bool) -> None:
    """Write seconds and hits of the undisturbed runs, including those of earlier calls."""
    facts = json.loads(path.read_text()) if keep and path.exists() else {"seconds": {}, "hits": {}}
    facts = {"seconds": facts["seconds"] | bench.seconds, "hits": facts["hits"] | bench.hits}
    path.write_text(json.dumps(facts))


@dataclass(frozen=True)
class Job:
    """Trials that belong together."""

    name: str
    trials: Callable[[], Iterator[Trial]]


def _run_jobs(bench: Bench, wanted: list[Job], folder: Path, deadline: float) -> None:
    """Run jobs until the budget is used up, except those that another call or process has run."""
    known = {row["job"] for row in jobs.trials(jobs.whole(folder))}
    remaining = [job for job in wanted if job.name not in known]
    print(f"{len(wanted)} jobs, {len(remaining)} to run", flush=True)
    started_at = time.monotonic()
    for number, job in enumerate(remaining, 1):
        if time.monotonic() > deadline:
            print(
                f"the time is over with {len(remaining) - number + 1} jobs left; use --keep to continue"
            )
            return
        if not jobs.claim(folder, job.name):
            continue
        trials = list(job.trials())
        append(folder / jobs.TRIALS, job.name, trials)
        kills = sum(trial.killed for trial in trials)
        print(
            f"{time.monotonic() - started_at:6.0f} s  {number:4} of {len(remaining)}  {kills:4} kills  {job.name}",
            flush=True,
        )
        for trial in trials:
            if trial.failures:
                print(f"FAILED {trial.name}\n    " + "\n    ".join(trial.failures[:8]), flush=True)


def _list_jobs(arguments: argparse.Namespace, bench: Bench) -> Iterator[Job]:
    """Yield, in this order: every point in chains, single kills in fresh processes, random times, and every hit."""
    for kind in arguments.kinds:
        yield Job(f"{kind}: every point in turn", lambda kind=kind: chains(bench, kind))
    first = arguments.kinds[0]
    single = [
        kill for kill in kills_at_points(bench.hits[first], 1, arguments.action, arguments.only)
    ]
    for number in range(min(arguments.fresh, len(single))):
        trial = Trial(first, [single[number * len(single) // arguments.fresh]], fresh=True)
        yield Job(trial.name, lambda trial=trial: iter([bench.run(trial)]))
    for index, kills in enumerate(random_kills(arguments.random, arguments.seed)):
        trial = Trial(arguments.kinds[index % len(arguments.kinds)], kills)
        yield Job(f"random {index}: {trial.name}", lambda trial=trial: iter([bench.run(trial)]))
    walked: set[str] = set()
    for kind in arguments.kinds if arguments.walk else ():
        points = [point for point in bench.order[kind] if re.fullmatch(arguments.only, point)]
        for point in [
            point for point in points if point not in walked and bench.hits[kind][point] > 1
        ]:
            walked.add(point)
            yield Job(
                f"{kind}: every hit of {point}",
                lambda kind=kind, point=point: walks(bench, kind, [point]),
            )
    for kind in arguments.kinds if arguments.single else ():
        for kill in kills_at_points(
            bench.hits[kind], arguments.single, arguments.action, arguments.only
        ):
            trial = Trial(kind, [kill])
            yield Job(trial.name, lambda trial=trial: iter([bench.run(trial)]))


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m crash", description=__doc__)
    parser.add_argument("--output", default="outputs/crash-test", help="folder of runs and figures")
    parser.add_argument(
        "--seconds",
        type=float,
        default=3600,
        help="budget; no trial starts after it (default: 3600)",
    )
    parser.add_argument(
        "--kinds",
        nargs="+",
        choices=KINDS,
        default=[kind for kind in KINDS if kind not in ("pipeline", "first", "third", "asked")],
    )
    parser.add_argument("--walk", action="store_true", help="also kill at every hit of every point")
    parser.add_argument(
        "--single", type=int, default=0, metavar="N", help="also N runs a point with a single kill"
    )
    parser.add_argument(
        "--random", type=int, default=300, help="runs that are killed at random times"
    )
    parser.add_argument("--fresh", type=int, default=6, help="runs in fresh processes, not forked")
    parser.add_argument("--only", default=".*", help="points whose name matches this pattern")
    parser.add_argument(
        "--action", default="kill", help="what happens at the points: kill, exit, term"
    )
    parser.add_argument(
        "--jobs", type=int, default=1, help="processes that share the trials (default: 1)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the random times")
    parser.add_argument("--keep", action="store_true", help="continue with the recorded trials")
    return parser


if __name__ == "__main__":
    end_by_sigterm()
    sys.exit(main())
