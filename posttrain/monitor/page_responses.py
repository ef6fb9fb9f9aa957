"""JSON responses to the page's requests: the selected tab, without charts that the page already shows."""

from __future__ import annotations

import hashlib
import secrets
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
from posttrain.monitor.seed_groups import SEEDS, list_other_seeds
from posttrain.monitor.views import TAB_NAMES, build_view, group_metrics_by_prefix

MAX_SEARCH_CHARACTERS = 200
MAX_WINDOW = 100  # observations of the moving average
MAX_REMEMBERED_VERSIONS = 64  # versions of a tab, over all pages
_LIST_PARAMETERS = ("compare", "groups", "metrics")  # of the address: comma-separated names


@dataclass(frozen=True)
class ListEntries:
    """Entries of the page's selection lists; (label, value) where the two differ."""

    runs: Sequence[tuple[str, str]]  # "" = the newest
    others: Sequence[tuple[str, str]]  # runs to compare with
    stages: Sequence[str]
    groups: Mapping[str, int]  # of all stages, with the number of metrics in the selected stage
    metrics: Sequence[str]  # of the selected stage
    files: Sequence[str]

    @property
    def fingerprint(self) -> str:
        """Digest that changes with any entry."""
        return hashlib.sha256(encode_browser_json(self)).hexdigest()[:16]


def collect_list_entries(reader: RunReader, choice: PageSelection) -> ListEntries:
    """Collect the entries of the lists for a selection; the caller holds the reader's lock."""
    run = reader.load_run(choice.run)
    runs = [(view.title, view.id) for view in reader.list_runs()]
    grouped = group_metrics_by_prefix(run, choice.stage)
    stages, files = [], []
    if run is not None:
        stages = [stage.label for stage in run.stages if stage.table.series]
        files = list(list_episode_files(run))
    return ListEntries(
        runs=[("the newest", ""), *runs],
        others=[
            *_list_seeds_entry(reader, run),
            *(entry for entry in runs if run is None or entry[1] != run.id),
        ],
        stages=stages,
        groups={name: len(grouped.get(name, ())) for name in _list_metric_groups(run)},
        metrics=[name for group in grouped.values() for name in group],
        files=files,
    )


def _list_seeds_entry(reader: RunReader, run: RunView | None) -> list[tuple[str, str]]:
    """List the entry that compares with all other seeds of the selected run; [] if there are none."""
    others = list_other_seeds(run, reader.list_runs()) if run is not None else []
    return [(f"all other seeds of this configuration ({len(others)})", SEEDS)] if others else []


def _list_metric_groups(run: RunView | None) -> list[str]:
    """List the metric groups of all stages: Gradio refuses a pending request that names one no longer offered."""
    if run is None:
        return []
    stages = [stage.label for stage in run.stages]
    return sorted({name for stage in stages for name in group_metrics_by_prefix(run, stage)})


def parse_selection(
    reader: RunReader, query: Mapping[str, str], default: str = ""
) -> PageSelection:
    """Parse the selection in an address or a request of the page; ignore names that do not exist.

    Args:
        query: `run` is a run, or a pipeline for its newest run; `first` marks a page that has just been opened:
            later, a run that no longer exists stays selected.
        default: id of the run to show if none is named; "" = the newest.
    """
    known = [view.id for view in reader.list_runs()]
    run = _find_newest_run(query.get("run", default), known)
    view = reader.load_run(run if run in known else default)
    stage = query.get("stage", "")
    if view is None or view.find_stage(stage) is None:
        stage = ""
    available = {name for names in group_metrics_by_prefix(view, stage).values() for name in names}
    compare, groups, metrics = (
        [part for part in query.get(name, "").split(",") if part] for name in _LIST_PARAMETERS
    )
    outcome = query.get("outcome", "all")
    return PageSelection(
        run=run if run in known or "first" not in query else default,
        compare=tuple(
            name
            for name in (_find_newest_run(part, known) for part in compare)
            if name in known or name == SEEDS
        ),
        stage=stage,
        window=_parse_window(query.get("window", "")),
        by_time=query.get("axis") == "minutes",
        groups=tuple(groups),
        metrics=tuple(name for name in metrics if name in available),
        source=query.get("source", ""),
        outcome=outcome if outcome in OUTCOME_FILTERS else "all",
        search=query.get("search", "")[:MAX_SEARCH_CHARACTERS],
    )


def _find_newest_run(name: str, known: Sequence[str]) -> str:
    """Return the newest run of the pipeline of this name, if there is one; otherwise the name itself."""
    return next((run for run in known if run == name or run.startswith(f"{name}/")), name)


def _parse_window(text: str) -> int:
    if not text.isdecimal() or len(text) >= 10:
        return DEFAULT_WINDOW
    return min(MAX_WINDOW, max(1, int(text)))


def build_address(choice: PageSelection) -> dict[str, Any]:
    """Build the part of the page's address that names the selection, without defaults."""
    parameters = {
        "run": choice.run,
        "compare": ",".join(choice.compare),
        "stage": choice.stage,
        "metrics": ",".join(choice.metrics),
        "search": choice.search,
        "window": str(choice.window) if choice.window != DEFAULT_WINDOW else "",
        "axis": "minutes" if choice.by_time else "",
    }
    return {name: value for name, value in parameters.items() if value}


class PageResponses:
    """Responses for any number of open pages; thread-safe.

    A page names the version of a tab that it has drawn. The digests of that version's charts are remembered, and a
    chart that has not changed since is sent as {"id", "same"}. For a version no longer remembered, everything is sent.
    """

    def __init__(self, reader: RunReader, run: str = "") -> None:
        """Prepare responses. `run`: id of the run to show if none is named; "" = the newest."""
        self._reader, self._run = reader, run
        self.token = secrets.token_urlsafe(16)  # what a page sends when it saves a note
        self._sent_digests: OrderedDict[str, dict[str, bytes]] = OrderedDict()
        self._lock = threading.Lock()

    def build_response(self, query: Mapping[str, str]) -> bytes:
        """Build the JSON of `views.build_view` with the page's address, its token and the fingerprint of its lists.

        Args:
            query: the selection (see `parse_selection`), `tab`, and `seen`: the version that the page has drawn. Blocks
                are left out if that is the current one.
        """
        tab = query.get("tab", "")
        tab = tab if tab in TAB_NAMES else TAB_NAMES[0]
        with self._reader.lock:
            choice = parse_selection(self._reader, query, self._run)
            view = build_view(self._reader, choice, tab)
            entries = collect_list_entries(self._reader, choice)
        view |= {
            "address": build_address(choice),
            "offers": entries.fingerprint,
            "token": self.token,
        }
        seen = query.get("seen", "")
        if seen == view["version"]:
            del view["blocks"]
        else:
            view["blocks"] = self._omit_unchanged_charts(view["blocks"], view["version"], seen)
        return encode_browser_json(view)

    def _omit_unchanged_charts(
        self, blocks: list[dict[str, Any]], version: str, seen: str
    ) -> list[dict[str, Any]]:
        with self._lock:
            seen_digests = self._sent_digests.get(seen, {})
            digests: dict[str, bytes] = {}
            reduced = [_reduce_block(block, seen_digests, digests) for block in blocks]
            self._sent_digests[version] = digests
            self._sent_digests.move_to_end(version)
            while len(self._sent_digests) > MAX_REMEMBERED_VERSIONS:
                self._sent_digests.popitem(last=False)
        return reduced


def _reduce_block(
    block: dict[str, Any], seen_digests: Mapping[str, bytes], digests: dict[str, bytes]
) -> dict[str, Any]:
    """Replace charts that the page has drawn by {"id", "same"}; add the digests of all charts to `digests`."""
    if block["kind"] != "charts":
        return block
    charts: list[Any] = []
    for chart in block["charts"]:
        text, name = encode_browser_json(chart), f"{block['id']} {chart['id']}"
        digests[name] = hashlib.blake2b(text, digest_size=12).digest()
        is_same = seen_digests.get(name) == digests[name]
        charts.append({"id": chart["id"], "same": True} if is_same else orjson.Fragment(text))
    return block | {"charts": charts}
