"""The page's controls, by Gradio: they say what is chosen, and `live_script` asks for it and draws it.

Gradio's server is asked only for what the lists offer, when the page opens and when that has changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gradio as gr

from flows.monitor.agent_views import OUTCOMES
from flows.monitor.choice import WINDOW, Choice
from flows.monitor.offers import MAX_WINDOW, choice_of, offers
from flows.monitor.reader import Reader

__all__ = ["REFRESH_SECONDS", "build_page"]

REFRESH_SECONDS = 3.0
_FOLLOW = ""  # choice that follows the newest run, or the training stage
_REFRESH = [("1 s", 1.0), ("3 s", 3.0), ("10 s", 10.0), ("60 s", 60.0), ("paused", 0.0)]
_QUIET: dict[str, Any] = {"show_progress": "hidden", "queue": False, "api_visibility": "private"}
# What the address names may come before the list that offers it; an unknown name counts as none.
_ANY: dict[str, Any] = {"allow_custom_value": True}
_GROUPS = ("train", "reward", "policy")  # shown unless others are chosen


def build_page(reader: Reader, run: str = _FOLLOW) -> gr.Blocks:
    """The controls; `run`: initially selected, "" = follow the newest."""
    with gr.Blocks(title="posttrain monitor", analytics_enabled=False, fill_width=True) as page:
        listed = offers(reader, Choice(run=run))
        with gr.Row(equal_height=True, elem_id="pt-controls"):
            runs = gr.Dropdown(listed.runs, value=run, label="Run", scale=3, min_width=260, **_ANY)
            compare = gr.Dropdown([], value=[], label="Compare with", multiselect=True, scale=3, min_width=220, **_ANY)
            stage = gr.Dropdown(_stages([]), value=_FOLLOW, label="Stage", scale=1, min_width=165, **_ANY)
            window = gr.Slider(1, MAX_WINDOW, value=WINDOW, step=1, label="Average over", scale=2, min_width=210)
            axis = gr.Dropdown(
                [("step", False), ("minutes", True)], value=False, label="X axis", scale=1, min_width=125
            )
            pause = gr.Dropdown(_REFRESH, value=REFRESH_SECONDS, label="Refresh every", scale=1, min_width=140)
        with gr.Row(elem_id="pt-of-curves"):
            groups = gr.CheckboxGroup([], label="Groups of metrics (by prefix)", scale=2)
            metrics = gr.Dropdown(
                [], value=[], multiselect=True, label="or single metrics (then groups do not count)", scale=3, **_ANY
            )
        with gr.Row(elem_id="pt-of-trajectories"):
            source = gr.Dropdown([], value=None, label="Trajectories of", scale=3, **_ANY)
            outcome = gr.Radio(list(OUTCOMES), value="all", label="Show", scale=2)
        asks = gr.Button("lists", elem_id="pt-lists")  # pressed by the script where a list offers something new

        settings: list[Any] = [runs, compare, stage, window, axis, groups, metrics, source, outcome]
        lists = [runs, compare, stage, groups, metrics, source]
        # Without a function: the browser alone handles it.
        chosen: dict[str, Any] = {
            "fn": None, "inputs": settings, "js": "(...values) => { posttrain.choose(values); return []; }"
        }  # fmt: skip

        def offered(*values: Any) -> list[Any]:
            with reader.lock:
                return _offers(reader, _choice(*values))

        addressed = [runs, compare, stage, window, axis, metrics]
        page.load(_asked(reader, run), None, addressed, **_QUIET).then(**chosen)
        asks.click(offered, settings, lists, **_QUIET).then(**chosen)
        for control in settings:
            control.input(**chosen)
        pause.input(None, pause, None, js="seconds => { posttrain.every(seconds); return []; }")
    _calm(page)
    return page


def _asked(reader: Reader, default: str) -> Any:
    """Event handler that chooses what the page's address names: run, comparison, stage, average, axis, metrics."""

    def asked(request: gr.Request) -> list[Any]:
        with reader.lock:
            return named_by({name: str(value) for name, value in dict(request.query_params).items()})

    def named_by(named: Mapping[str, str]) -> list[Any]:
        choice = choice_of(reader, {"first": "1", **named}, default)
        listed = offers(reader, choice)
        return [
            gr.Dropdown(choices=list(listed.runs), value=choice.run),
            gr.Dropdown(choices=list(listed.others), value=list(choice.compare)),
            gr.Dropdown(choices=_stages(listed.stages), value=choice.stage),
            gr.Slider(value=choice.window),
            gr.Dropdown(value=choice.by_time),
            gr.Dropdown(choices=list(listed.metrics), value=list(choice.metrics)),
        ]

    return asked


def _calm(page: gr.Blocks) -> None:
    """Slow down polling of Gradio's unused queue, which costs 2.5 CPU seconds per minute at its default of 1 ms."""
    queue = getattr(page, "_queue", None)
    for name in ("sleep_when_free", "progress_update_sleep_when_free"):
        if hasattr(queue, name):
            setattr(queue, name, 0.5)


def _choice(
    run: str, compare: list[str], stage: str, window: float, by_time: bool, groups: list[str], metrics: list[str],
    source: str | None, outcome: str,
) -> Choice:  # fmt: skip
    return Choice(
        run=run or "",
        compare=tuple(compare or ()),
        stage=stage or "",
        window=max(1, int(window or WINDOW)),
        by_time=bool(by_time),
        groups=tuple(groups or ()),
        metrics=tuple(metrics or ()),
        source=source or "",
        outcome=outcome or "all",
    )


def _stages(labels: Any) -> list[tuple[str, str]]:
    return [("automatic", _FOLLOW), *((label.replace("_", " "), label) for label in labels)]


def _offers(reader: Reader, choice: Choice) -> list[Any]:
    """Updates of the selection lists that keep the current choices."""
    listed = offers(reader, choice)
    runs, files = list(listed.runs), list(listed.files)
    if choice.run not in [value for _, value in runs]:
        runs.append((f"{choice.run} (gone)", choice.run))
    groups = [name for name in choice.groups if listed.groups.get(name)]
    groups = groups or [name for name in _GROUPS if listed.groups.get(name)]
    compared = [name for name in choice.compare if name in {value for _, value in listed.others}]
    pinned = [name for name in choice.metrics if name in listed.metrics]
    stage = choice.stage if choice.stage in listed.stages else _FOLLOW
    return [
        gr.Dropdown(choices=runs),
        _offered(list(listed.others), compared, list(choice.compare)),
        _offered(_stages(listed.stages), stage, choice.stage),
        gr.CheckboxGroup(choices=[(f"{name}/ ({count})", name) for name, count in listed.groups.items()], value=groups),
        _offered(list(listed.metrics), pinned, list(choice.metrics)),
        gr.Dropdown(choices=files, value=choice.source if choice.source in files else next(iter(files), None)),
    ]


def _offered(choices: list[Any], value: Any, present: Any) -> Any:
    """Update of a list. What stands in it is touched only where it is not offered any more.

    An answer to an earlier question may arrive after the page's address has chosen something else.
    """
    return gr.Dropdown(choices=choices) if value == present else gr.Dropdown(choices=choices, value=value)
