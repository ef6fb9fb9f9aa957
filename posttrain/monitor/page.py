"""The page's controls, by Gradio: they say what is chosen, and `live_script` asks for it and draws it.

Gradio's server is asked only for what the lists offer, when the page opens and when that has changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gradio as gr

from posttrain.monitor.agent_views import OUTCOME_FILTERS
from posttrain.monitor.charts import DEFAULT_WINDOW, PageSelection
from posttrain.monitor.page_responses import MAX_WINDOW, collect_list_entries, parse_selection
from posttrain.monitor.reader import RunReader

REFRESH_SECONDS = 3.0
_AUTOMATIC = ""  # choice that follows the newest run, or the training stage
_REFRESH_CHOICES = [("1 s", 1.0), ("3 s", 3.0), ("10 s", 10.0), ("60 s", 60.0), ("paused", 0.0)]
_SILENT_EVENT_OPTIONS: dict[str, Any] = {
    "show_progress": "hidden",
    "queue": False,
    "api_visibility": "private",
}
# What the address names may come before the list that offers it; an unknown name counts as none.
_ALLOW_UNLISTED: dict[str, Any] = {"allow_custom_value": True}
_DEFAULT_GROUPS = ("train", "reward", "policy")  # shown unless others are chosen


def build_page(reader: RunReader, run: str = _AUTOMATIC) -> gr.Blocks:
    """The controls; `run`: initially selected, "" = follow the newest."""
    with gr.Blocks(title="posttrain monitor", analytics_enabled=False, fill_width=True) as page:
        listed = collect_list_entries(reader, PageSelection(run=run))
        with gr.Row(equal_height=True, elem_id="pt-controls"):
            runs = gr.Dropdown(
                listed.runs, value=run, label="Run", scale=3, min_width=260, **_ALLOW_UNLISTED
            )
            compare = gr.Dropdown(
                [],
                value=[],
                label="Compare with",
                multiselect=True,
                scale=3,
                min_width=220,
                **_ALLOW_UNLISTED,
            )
            stage = gr.Dropdown(
                _list_stage_choices([]),
                value=_AUTOMATIC,
                label="Stage",
                scale=1,
                min_width=165,
                **_ALLOW_UNLISTED,
            )
            window = gr.Slider(
                1,
                MAX_WINDOW,
                value=DEFAULT_WINDOW,
                step=1,
                label="Average over",
                scale=2,
                min_width=210,
            )
            axis = gr.Dropdown(
                [("step", False), ("minutes", True)],
                value=False,
                label="X axis",
                scale=1,
                min_width=125,
            )
            pause = gr.Dropdown(
                _REFRESH_CHOICES,
                value=REFRESH_SECONDS,
                label="Refresh every",
                scale=1,
                min_width=140,
            )
        with gr.Row(elem_id="pt-of-curves"):
            groups = gr.CheckboxGroup([], label="Groups of metrics (by prefix)", scale=2)
            metrics = gr.Dropdown(
                [],
                value=[],
                multiselect=True,
                label="or single metrics (then groups do not count)",
                scale=3,
                **_ALLOW_UNLISTED,
            )
        with gr.Row(elem_id="pt-of-trajectories"):
            source = gr.Dropdown(
                [], value=None, label="Trajectories of", scale=3, **_ALLOW_UNLISTED
            )
            outcome = gr.Radio(list(OUTCOME_FILTERS), value="all", label="Show", scale=2)
        asks = gr.Button(
            "lists", elem_id="pt-lists"
        )  # pressed by the script where a list offers something new

        settings: list[Any] = [runs, compare, stage, window, axis, groups, metrics, source, outcome]
        lists = [runs, compare, stage, groups, metrics, source]
        # Without a function: the browser alone handles it.
        chosen: dict[str, Any] = {
            "fn": None,
            "inputs": settings,
            "js": "(...values) => { posttrain.choose(values); return []; }",
        }

        def offered(*values: Any) -> list[Any]:
            with reader.lock:
                return _update_lists(reader, _build_selection(*values))

        addressed = [runs, compare, stage, window, axis, metrics]
        page.load(
            _build_address_handler(reader, run), None, addressed, **_SILENT_EVENT_OPTIONS
        ).then(**chosen)
        asks.click(offered, settings, lists, **_SILENT_EVENT_OPTIONS).then(**chosen)
        for control in settings:
            control.input(**chosen)
        pause.input(None, pause, None, js="seconds => { posttrain.every(seconds); return []; }")
    _slow_queue_polling(page)
    return page


def _build_address_handler(reader: RunReader, default: str) -> Any:
    """Event handler that chooses what the page's address names: run, comparison, stage, average, axis, metrics."""

    def asked(request: gr.Request) -> list[Any]:
        with reader.lock:
            return named_by(
                {name: str(value) for name, value in dict(request.query_params).items()}
            )

    def named_by(named: Mapping[str, str]) -> list[Any]:
        choice = parse_selection(reader, {"first": "1", **named}, default)
        listed = collect_list_entries(reader, choice)
        return [
            gr.Dropdown(choices=list(listed.runs), value=choice.run),
            gr.Dropdown(choices=list(listed.others), value=list(choice.compare)),
            gr.Dropdown(choices=_list_stage_choices(listed.stages), value=choice.stage),
            gr.Slider(value=choice.window),
            gr.Dropdown(value=choice.by_time),
            gr.Dropdown(choices=list(listed.metrics), value=list(choice.metrics)),
        ]

    return asked


def _slow_queue_polling(page: gr.Blocks) -> None:
    """Slow down polling of Gradio's unused queue, which costs 2.5 CPU seconds per minute at its default of 1 ms."""
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
    """Updates of the selection lists that keep the current choices."""
    listed = collect_list_entries(reader, choice)
    runs, files = list(listed.runs), list(listed.files)
    if choice.run not in [value for _, value in runs]:
        runs.append((f"{choice.run} (gone)", choice.run))
    groups = [name for name in choice.groups if listed.groups.get(name)]
    groups = groups or [name for name in _DEFAULT_GROUPS if listed.groups.get(name)]
    compared = [name for name in choice.compare if name in {value for _, value in listed.others}]
    pinned = [name for name in choice.metrics if name in listed.metrics]
    stage = choice.stage if choice.stage in listed.stages else _AUTOMATIC
    return [
        gr.Dropdown(choices=runs),
        _update_list(list(listed.others), compared, list(choice.compare)),
        _update_list(_list_stage_choices(listed.stages), stage, choice.stage),
        gr.CheckboxGroup(
            choices=[(f"{name}/ ({count})", name) for name, count in listed.groups.items()],
            value=groups,
        ),
        _update_list(list(listed.metrics), pinned, list(choice.metrics)),
        gr.Dropdown(
            choices=files,
            value=choice.source if choice.source in files else next(iter(files), None),
        ),
    ]


def _update_list(choices: list[Any], value: Any, present: Any) -> Any:
    """Update of a list. What stands in it is touched only where it is not offered any more.

    An answer to an earlier question may arrive after the page's address has chosen something else.
    """
    return (
        gr.Dropdown(choices=choices)
        if value == present
        else gr.Dropdown(choices=choices, value=value)
    )
