"""Gradio controls of the page: they hold the selection, which page.js requests and draws.

Gradio's server is asked only for the entries of the lists, when the page opens and when they have changed.
"""

from __future__ import annotations

from typing import Any

import gradio as gr

from posttrain.monitor.agent_views import OUTCOME_FILTERS
from posttrain.monitor.charts import DEFAULT_WINDOW, PageSelection
from posttrain.monitor.page_responses import MAX_WINDOW, collect_list_entries, parse_selection
from posttrain.monitor.reader import RunReader

REFRESH_SECONDS = 3.0
_AUTOMATIC = ""  # choice that follows the newest run, or the training stage
_REFRESH_CHOICES = [("1 s", 1.0), ("3 s", 3.0), ("10 s", 10.0), ("60 s", 60.0), ("paused", 0.0)]
_AXIS_CHOICES = [("step", False), ("minutes", True)]
_SILENT_EVENT_OPTIONS: dict[str, Any] = {
    "show_progress": "hidden",
    "queue": False,
    "api_visibility": "private",
}
# The address may name an entry before the list offers it; an unknown name counts as none.
_ALLOW_UNLISTED: dict[str, Any] = {"allow_custom_value": True}
_MULTISELECT: dict[str, Any] = {**_ALLOW_UNLISTED, "value": [], "multiselect": True}
_DEFAULT_GROUPS = ("train", "reward", "policy")  # shown unless others are selected


def build_page(reader: RunReader, run: str = _AUTOMATIC) -> gr.Blocks:
    """Build the controls. `run`: initially selected, "" = follow the newest."""
    with gr.Blocks(title="posttrain monitor", analytics_enabled=False, fill_width=True) as page:
        runs, compare, stage, window, axis, pause = _build_main_row(reader, run)
        with gr.Row(elem_id="pt-of-curves"):
            groups = gr.CheckboxGroup([], label="Groups of metrics (by prefix)", scale=2)
            metrics = gr.Dropdown(
                [], label="or single metrics (then groups do not count)", scale=3, **_MULTISELECT
            )
        with gr.Row(elem_id="pt-of-trajectories"):
            source = gr.Dropdown(
                [], value=None, label="Trajectories of", scale=3, **_ALLOW_UNLISTED
            )
            outcome = gr.Radio(list(OUTCOME_FILTERS), value="all", label="Show", scale=2)
        # Pressed by the script when a list offers something new.
        update_button = gr.Button("lists", elem_id="pt-lists")

        controls: list[Any] = [runs, compare, stage, window, axis, groups, metrics, source, outcome]
        lists = [runs, compare, stage, groups, metrics, source]
        addressed = [runs, compare, stage, window, axis, metrics]
        # Without a function: handled by the browser alone.
        apply_selection: dict[str, Any] = {
            "fn": None,
            "inputs": controls,
            "js": "(...values) => { posttrain.choose(values); return []; }",
        }

        def update_lists(*values: Any) -> list[Any]:
            with reader.lock:
                return _update_lists(reader, _build_selection(*values))

        select_addressed = _build_address_handler(reader, run)
        loaded = page.load(select_addressed, None, addressed, **_SILENT_EVENT_OPTIONS)
        loaded.then(**apply_selection)
        updated = update_button.click(update_lists, controls, lists, **_SILENT_EVENT_OPTIONS)
        updated.then(**apply_selection)
        for control in controls:
            control.input(**apply_selection)
        pause.input(None, pause, None, js="seconds => { posttrain.every(seconds); return []; }")
    _slow_queue_polling(page)
    return page


def _build_main_row(reader: RunReader, run: str) -> tuple[Any, ...]:
    """Build the controls for runs, comparison, stage, average, axis and refresh."""
    entries = collect_list_entries(reader, PageSelection(run=run))
    stages = _list_stage_choices([])
    with gr.Row(equal_height=True, elem_id="pt-controls"):
        return (
            gr.Dropdown(
                entries.runs, value=run, label="Run", scale=3, min_width=260, **_ALLOW_UNLISTED
            ),
            gr.Dropdown([], label="Compare with", scale=3, min_width=220, **_MULTISELECT),
            gr.Dropdown(
                stages, value=_AUTOMATIC, label="Stage", scale=1, min_width=165, **_ALLOW_UNLISTED
            ),
            gr.Slider(
                1,
                MAX_WINDOW,
                value=DEFAULT_WINDOW,
                step=1,
                label="Average over",
                scale=2,
                min_width=210,
            ),
            gr.Dropdown(_AXIS_CHOICES, value=False, label="X axis", scale=1, min_width=125),
            gr.Dropdown(
                _REFRESH_CHOICES,
                value=REFRESH_SECONDS,
                label="Refresh every",
                scale=1,
                min_width=140,
            ),
        )


def _build_address_handler(reader: RunReader, default: str) -> Any:
    """Build the event handler that applies the address: run, comparison, stage, average, axis, metrics."""

    def select_addressed(request: gr.Request) -> list[Any]:
        query = {name: str(value) for name, value in dict(request.query_params).items()}
        with reader.lock:
            choice = parse_selection(reader, {"first": "1", **query}, default)
            entries = collect_list_entries(reader, choice)
        return [
            gr.Dropdown(choices=list(entries.runs), value=choice.run),
            gr.Dropdown(choices=list(entries.others), value=list(choice.compare)),
            gr.Dropdown(choices=_list_stage_choices(entries.stages), value=choice.stage),
            gr.Slider(value=choice.window),
            gr.Dropdown(value=choice.by_time),
            gr.Dropdown(choices=list(entries.metrics), value=list(choice.metrics)),
        ]

    return select_addressed


def _slow_queue_polling(page: gr.Blocks) -> None:
    """Slow down the polling of Gradio's unused queue, which costs 2.5 CPU seconds per minute at its default of 1 ms."""
    queue = getattr(page, "_queue", None)
    for name in ("sleep_when_free", "progress_update_sleep_when_free"):
        if hasattr(queue, name):
            setattr(queue, name, 0.5)


def _build_selection(
    run: str,
    compare: list[str],
    stage: str,
    window: float,
    by_time: bool,
    groups: list[str],
    metrics: list[str],
    source: str | None,
    outcome: str,
) -> PageSelection:
    return PageSelection(
        run=run or "",
        compare=tuple(compare or ()),
        stage=stage or "",
        window=max(1, int(window or DEFAULT_WINDOW)),
        by_time=bool(by_time),
        groups=tuple(groups or ()),
        metrics=tuple(metrics or ()),
        source=source or "",
        outcome=outcome or "all",
    )


def _list_stage_choices(labels: Any) -> list[tuple[str, str]]:
    return [("automatic", _AUTOMATIC), *((label.replace("_", " "), label) for label in labels)]


def _update_lists(reader: RunReader, choice: PageSelection) -> list[Any]:
    """Build updates of the selection lists that keep the current choices."""
    entries = collect_list_entries(reader, choice)
    runs, files = list(entries.runs), list(entries.files)
    if choice.run not in [value for _, value in runs]:
        runs.append((f"{choice.run} (no longer exists)", choice.run))
    groups = [name for name in choice.groups if entries.groups.get(name)]
    groups = groups or [name for name in _DEFAULT_GROUPS if entries.groups.get(name)]
    # All are offered, because Gradio refuses a pending request that names one that is not.
    by_presence = sorted(entries.groups.items(), key=lambda group: group[1] == 0)
    group_choices = [
        (f"{name}/ ({count})" if count else f"{name}/ (other stages)", name)
        for name, count in by_presence
    ]
    others = {value for _, value in entries.others}
    compared = [name for name in choice.compare if name in others]
    metrics = [name for name in choice.metrics if name in entries.metrics]
    stage = choice.stage if choice.stage in entries.stages else _AUTOMATIC
    source = choice.source if choice.source in files else next(iter(files), None)
    return [
        gr.Dropdown(choices=runs),
        _update_list(list(entries.others), compared, list(choice.compare)),
        _update_list(_list_stage_choices(entries.stages), stage, choice.stage),
        gr.CheckboxGroup(choices=group_choices, value=groups),
        _update_list(list(entries.metrics), metrics, list(choice.metrics)),
        gr.Dropdown(choices=files, value=source),
    ]


def _update_list(choices: list[Any], value: Any, current: Any) -> Any:
    """Build the update of a list; set its value only if the current one is no longer offered.

    The response to an earlier request may arrive after the page's address has selected something else.
    """
    if value == current:
        return gr.Dropdown(choices=choices)
    return gr.Dropdown(choices=choices, value=value)
