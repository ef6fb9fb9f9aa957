"""Choices that the page's lists offer for a run: runs, stages, metrics and their groups, files of trajectories.

Answers to the page's questions: what is chosen, as JSON, without the charts that the page shows already.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from posttrain.monitor.agent_views import OUTCOME_FILTERS
from posttrain.monitor.charts import DEFAULT_WINDOW, PageSelection, encode_browser_json
from posttrain.monitor.episodes import list_episode_files
from posttrain.monitor.reader import RunReader
from posttrain.monitor.runs import RunView
from posttrain.monitor.views import TAB_NAMES, build_view, group_metrics_by_prefix

MAX_WINDOW = 100  # observations of the moving average
_LIST_PARAMETERS = ("compare", "groups", "metrics")  # of the address: names with commas between


@dataclass(frozen=True)
class ListEntries:
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
        return hashlib.sha256(encode_browser_json(self)).hexdigest()[:16]


def collect_list_entries(reader: RunReader, choice: PageSelection) -> ListEntries:
    """Entries for this choice, under the reader's lock."""
    run = reader.load_run(choice.run)
    listed = [(found.title, found.id) for found in reader.list_runs()]
    grouped = group_metrics_by_prefix(run, choice.stage)
    return ListEntries(
        runs=[("the newest", ""), *listed],
        others=[item for item in listed if run is None or item[1] != run.id],
        stages=[stage.label for stage in run.stages if stage.table.series]
        if run is not None
        else [],
        groups={name: len(grouped.get(name, ())) for name in _list_metric_groups(run)},
        metrics=[name for group in grouped.values() for name in group],
        files=list(list_episode_files(run)) if run is not None else [],
    )


def _list_metric_groups(run: RunView | None) -> list[str]:
    """Groups of metrics of all stages: Gradio refuses a question under way that names one no longer offered."""
    return (
        sorted({name for stage in run.stages for name in group_metrics_by_prefix(run, stage.label)})
        if run is not None
        else []
    )


def parse_selection(
    reader: RunReader, query: Mapping[str, str], default: str = ""
) -> PageSelection:
    """Choice that an address or a question of the page names; what does not exist counts as not named.

    Args:
        named: `first` marks a page that has just been opened; later, a run that has gone stays chosen.
        default: id of the run that is shown where none is named; "" = the newest.
    """
    run = query.get("run", default)
    known = [found.id for found in reader.list_runs()]
    view = reader.load_run(run if run in known else default)
    stage = query.get("stage", "")
    stage = stage if view is not None and view.find_stage(stage) is not None else ""
    metrics = {name for names in group_metrics_by_prefix(view, stage).values() for name in names}
    compare, groups, singly = (
        [part for part in query.get(name, "").split(",") if part] for name in _LIST_PARAMETERS
    )
    window = query.get("window", "")
    return PageSelection(
        run=run if run in known or "first" not in query else default,
        compare=tuple(name for name in compare if name in known),
        stage=stage,
        window=min(MAX_WINDOW, max(1, int(window)))
        if window.isdecimal() and len(window) < 10
        else DEFAULT_WINDOW,
        by_time=query.get("axis") == "minutes",
        groups=tuple(groups),
        metrics=tuple(name for name in singly if name in metrics),
        source=query.get("source", ""),
        outcome=outcome if (outcome := query.get("outcome", "all")) in OUTCOME_FILTERS else "all",
    )


def build_address(choice: PageSelection) -> dict[str, Any]:
    """The part of the page's address that names what is chosen, without what is chosen by itself."""
    named = {
        "run": choice.run,
        "compare": ",".join(choice.compare),
        "stage": choice.stage,
        "metrics": ",".join(choice.metrics),
        "window": str(choice.window) if choice.window != DEFAULT_WINDOW else "",
        "axis": "minutes" if choice.by_time else "",
    }
    return {name: value for name, value in named.items() if value}


MAX_REMEMBERED_VERSIONS = 64  # versions of a tab, over all pages


class PageResponses:
    """Answers for any number of open pages; thread-safe.

    A page names the version of a tab that it has drawn. Of that version the digests of its charts are remembered, and a
    chart that has not changed since is sent as {"id", "same"}; a version that is no longer remembered gets everything.
    """

    def __init__(self, reader: RunReader, run: str = "") -> None:
        """`run`: id of the run that is shown where none is named; "" = the newest."""
        self._reader, self._run = reader, run
        self._sent_digests: OrderedDict[str, dict[str, bytes]] = OrderedDict()
        self._lock = threading.Lock()

    def build_response(self, query: Mapping[str, str]) -> bytes:
        """JSON of `views.view` with the page's address and the fingerprint of what its lists offer.

        Args:
            named: what is chosen (`offers.parse_selection`), `tab`, and `seen`: the version that the page has drawn. Blocks
                are left out where that is the present one.
        """
        tab = query.get("tab", "")
        tab = tab if tab in TAB_NAMES else TAB_NAMES[0]
        with self._reader.lock:
            choice = parse_selection(self._reader, query, self._run)
            found = build_view(self._reader, choice, tab)
            listed = collect_list_entries(self._reader, choice)
        found |= {"address": build_address(choice), "offers": listed.fingerprint}
        seen = query.get("seen", "")
        if seen == found["version"]:
            del found["blocks"]
        else:
            found["blocks"] = self._omit_unchanged_charts(found["blocks"], found["version"], seen)
        return encode_browser_json(found)

    def _omit_unchanged_charts(
        self, blocks: list[dict[str, Any]], version: str, seen: str
    ) -> list[dict[str, Any]]:
        with self._lock:
            known = self._sent_digests.get(seen, {})
            kept: dict[str, bytes] = {}
            reduced = [self._reduce_block(block, known, kept) for block in blocks]
            self._sent_digests[version] = kept
            self._sent_digests.move_to_end(version)
            while len(self._sent_digests) > MAX_REMEMBERED_VERSIONS:
                self._sent_digests.popitem(last=False)
        return reduced

    def _reduce_block(
        self, block: dict[str, Any], known: Mapping[str, bytes], kept: dict[str, bytes]
    ) -> dict[str, Any]:
        if block["kind"] != "charts":
            return block
        charts: list[Any] = []
        for chart in block["charts"]:
            text, name = encode_browser_json(chart), f"{block['id']} {chart['id']}"
            kept[name] = hashlib.blake2b(text, digest_size=12).digest()
            same = known.get(name) == kept[name]
            charts.append({"id": chart["id"], "same": True} if same else orjson.Fragment(text))
        return block | {"charts": charts}
