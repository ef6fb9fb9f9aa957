"""Choices that the page's lists offer for a run: runs, stages, metrics and their groups, files of trajectories."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flows.monitor.agent_views import OUTCOMES
from flows.monitor.choice import WINDOW, Choice
from flows.monitor.episodes import episode_files
from flows.monitor.plain_json import plain_json
from flows.monitor.reader import Reader
from flows.monitor.runs import RunView
from flows.monitor.views import prefixes

__all__ = ["Offers", "address_of", "choice_of", "offers"]

MAX_WINDOW = 100  # observations of the moving average
_LISTS = ("compare", "groups", "metrics")  # of the address: names with commas between


@dataclass(frozen=True)
class Offers:
    """Entries of each list; (label, value) where they differ."""

    runs: Sequence[tuple[str, str]]  # "" = the newest
    others: Sequence[tuple[str, str]]  # runs to compare with
    stages: Sequence[str]
    groups: Mapping[str, int]  # of all stages, with their metrics of the chosen stage
    metrics: Sequence[str]  # of the chosen stage
    files: Sequence[str]

    @property
    def fingerprint(self) -> str:
        """Changes with any entry."""
        return hashlib.sha256(plain_json(self)).hexdigest()[:16]


def offers(reader: Reader, choice: Choice) -> Offers:
    """Entries for this choice, under the reader's lock."""
    run = reader.run(choice.run)
    listed = [(found.title, found.id) for found in reader.runs()]
    grouped = prefixes(run, choice.stage)
    return Offers(
        runs=[("the newest", ""), *listed],
        others=[item for item in listed if run is None or item[1] != run.id],
        stages=[stage.label for stage in run.stages if stage.table.series] if run is not None else [],
        groups={name: len(grouped.get(name, ())) for name in _groups(run)},
        metrics=[name for group in grouped.values() for name in group],
        files=list(episode_files(run)) if run is not None else [],
    )


def _groups(run: RunView | None) -> list[str]:
    """Groups of metrics of all stages: Gradio refuses a question under way that names one no longer offered."""
    return sorted({name for stage in run.stages for name in prefixes(run, stage.label)}) if run is not None else []


def choice_of(reader: Reader, named: Mapping[str, str], default: str = "") -> Choice:
    """Choice that an address or a question of the page names; what does not exist counts as not named.

    Args:
        named: `first` marks a page that has just been opened; later, a run that has gone stays chosen.
        default: id of the run that is shown where none is named; "" = the newest.
    """
    run = named.get("run", default)
    known = [found.id for found in reader.runs()]
    view = reader.run(run if run in known else default)
    stage = named.get("stage", "")
    stage = stage if view is not None and view.stage(stage) is not None else ""
    metrics = {name for names in prefixes(view, stage).values() for name in names}
    compare, groups, singly = ([part for part in named.get(name, "").split(",") if part] for name in _LISTS)
    window = named.get("window", "")
    return Choice(
        run=run if run in known or "first" not in named else default,
        compare=tuple(name for name in compare if name in known),
        stage=stage,
        window=min(MAX_WINDOW, max(1, int(window))) if window.isdecimal() and len(window) < 10 else WINDOW,
        by_time=named.get("axis") == "minutes",
        groups=tuple(groups),
        metrics=tuple(name for name in singly if name in metrics),
        source=named.get("source", ""),
        outcome=outcome if (outcome := named.get("outcome", "all")) in OUTCOMES else "all",
    )


def address_of(choice: Choice) -> dict[str, Any]:
    """The part of the page's address that names what is chosen, without what is chosen by itself."""
    named = {"run": choice.run, "compare": ",".join(choice.compare), "stage": choice.stage,
             "metrics": ",".join(choice.metrics), "window": str(choice.window) if choice.window != WINDOW else "",
             "axis": "minutes" if choice.by_time else ""}  # fmt: skip
    return {name: value for name, value in named.items() if value}
