"""The Gradio page: controls, timer and tabs around the panels drawn in the browser.

One component carries the view as JSON; `script` draws it into the panel of the open tab. A tick sends nothing else, and
an unchanged panel is not sent at all, which avoids flicker.
"""

from __future__ import annotations

import json
from typing import Any

import gradio as gr

from flows.monitor.agent_views import OUTCOMES
from flows.monitor.choice import Choice
from flows.monitor.episodes import episode_files
from flows.monitor.reader import Reader
from flows.monitor.runs import RunView
from flows.monitor.views import TAB_NAMES, prefixes, view

__all__ = ["REFRESH_SECONDS", "build_page"]

REFRESH_SECONDS = 3.0
WINDOW = 10  # observations of the moving average, unless another number is chosen
_FOLLOW = ""  # choice that follows the newest run, or the training stage
_REFRESH = [("1 s", 1.0), ("3 s", 3.0), ("10 s", 10.0), ("60 s", 60.0), ("paused", 0.0)]
_QUIET: dict[str, Any] = {"show_progress": "hidden", "queue": False, "api_visibility": "private"}
# One view at a time per page: ticks during a slow view are dropped.
_TICK: dict[str, Any] = {**_QUIET, "trigger_mode": "once"}
_ASKED: dict[str, Any] = {**_TICK, "trigger_mode": "always_last"}
# What the address names may come before the list that offers it; an unknown name counts as none.
_ANY: dict[str, Any] = {"allow_custom_value": True}
_PANEL = '<div class="pt-panel" data-tab="{tab}"></div>'


def build_page(reader: Reader, run: str = _FOLLOW) -> gr.Blocks:
    """The page; `run`: initially selected, "" = follow the newest."""
    with gr.Blocks(title="posttrain monitor", analytics_enabled=False, fill_width=True) as page:
        header = gr.HTML(
            "", html_template='<div class="pt-header"></div>', apply_default_css=False, elem_id="pt-view",
            js_on_load="posttrain.show(props.value); watch('value', () => posttrain.show(props.value));",
        )  # fmt: skip
        tab, seen, offered = gr.State("overview"), gr.State(""), gr.State("")
        with gr.Row(equal_height=True, elem_id="pt-controls"):
            runs = gr.Dropdown(_run_choices(reader), value=run, label="Run", scale=3, min_width=260)
            compare = gr.Dropdown([], value=[], label="Compare with", multiselect=True, scale=3, min_width=220, **_ANY)
            stage = gr.Dropdown(_stage_choices(None), value=_FOLLOW, label="Stage", scale=1, min_width=150, **_ANY)
            window = gr.Slider(1, 100, value=WINDOW, step=1, label="Average over", scale=2, min_width=210)
            axis = gr.Dropdown(
                [("step", False), ("minutes", True)], value=False, label="X axis", scale=1, min_width=125
            )
            pause = gr.Dropdown(_REFRESH, value=REFRESH_SECONDS, label="Refresh every", scale=1, min_width=140)
        opened, extra = _tabs()
        timer = gr.Timer(REFRESH_SECONDS, active=False)  # until what the address names has been chosen

        settings = [runs, compare, stage, window, axis, *(extra[n] for n in ("groups", "metrics", "source", "outcome"))]
        lists = [runs, compare, stage, extra["groups"], extra["metrics"], extra["source"]]

        def show(current: str, shown: str, known: str, *values: Any) -> list[Any]:
            choice = _choice(*values)
            with reader.lock:
                changed, fingerprint = _offers(reader, choice, known)
            found = view(reader, choice, current) | {"address": _address(choice)}
            version = f"{found['version']} {choice.run}"
            if version == shown:
                del found["blocks"]
            # A "</script>" in a trajectory must stay text wherever this lands.
            text = json.dumps(found, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
            return [text, version, fingerprint, *changed]

        def ask(current: str, known: str, *values: Any) -> list[Any]:
            """As `show`, with the full panel, as the browser may not have drawn it yet."""
            return show(current, "", known, *values)

        outputs = [header, seen, offered, *lists]
        addressed = [runs, compare, stage, window, axis, extra["metrics"]]
        page.load(_asked(reader, run), None, addressed, **_QUIET).then(
            ask, [tab, offered, *settings], outputs, **_ASKED
        ).then(lambda: gr.Timer(active=True), None, timer, **_QUIET)
        timer.tick(show, [tab, seen, offered, *settings], outputs, **_TICK)
        for name, item in opened.items():
            item.select(_opens(name, ask), [offered, *settings], [tab, *outputs], **_ASKED)
        for control in settings:
            control.input(ask, [tab, offered, *settings], outputs, **_ASKED)
        pause.input(lambda seconds: gr.Timer(seconds or 3600.0, active=seconds > 0), pause, timer, **_QUIET)
    _calm(page)
    return page


def _tabs() -> tuple[dict[str, gr.Tab], dict[str, Any]]:
    """The tabs with their panels, and the controls that single tabs have, by name."""
    extra: dict[str, Any] = {}
    opened: dict[str, gr.Tab] = {}
    with gr.Tabs():
        for name in TAB_NAMES:
            with gr.Tab(name.capitalize(), id=name) as item:
                if name == "curves":
                    with gr.Row():
                        extra["groups"] = gr.CheckboxGroup([], label="Groups of metrics (by prefix)", scale=2)
                        extra["metrics"] = gr.Dropdown(
                            [], value=[], multiselect=True, label="or single metrics (then groups do not count)",
                            scale=3, **_ANY,
                        )  # fmt: skip
                if name == "trajectories":
                    with gr.Row():
                        extra["source"] = gr.Dropdown([], value=None, label="Trajectories of", scale=3, **_ANY)
                        extra["outcome"] = gr.Radio(list(OUTCOMES), value="all", label="Show", scale=2)
                gr.HTML(
                    "", html_template=_PANEL.format(tab=name), apply_default_css=False,
                    js_on_load="posttrain.mount();",
                )  # fmt: skip
            opened[name] = item
    return opened, extra


def _address(choice: Choice) -> dict[str, str]:
    """The part of the page's address that names what is chosen, without what is chosen by itself."""
    named = {"run": choice.run, "compare": ",".join(choice.compare), "stage": choice.stage,
             "metrics": ",".join(choice.metrics), "window": str(choice.window) if choice.window != WINDOW else "",
             "axis": "minutes" if choice.by_time else ""}  # fmt: skip
    return {name: value for name, value in named.items() if value}


def _asked(reader: Reader, default: str) -> Any:
    """Event handler that chooses what the page's address names: run, comparison, stage, average, axis, metrics."""

    def asked(request: gr.Request) -> list[Any]:
        with reader.lock:
            return named_by({name: str(value) for name, value in dict(request.query_params).items()})

    def named_by(named: dict[str, str]) -> list[Any]:
        choices = _run_choices(reader)
        known = [identity for _, identity in choices]
        run = named.get("run", "")
        compared = [name for name in named.get("compare", "").split(",") if name in known and name]
        view = reader.run(run if run in known else default)
        labels = [found.label for found in view.stages] if view is not None else []
        stage = named.get("stage", "") if named.get("stage") in labels else _FOLLOW
        metrics = [name for names in prefixes(view, stage).values() for name in names]
        pinned = [name for name in named.get("metrics", "").split(",") if name in metrics]
        window = int(named["window"]) if named.get("window", "").isdecimal() else WINDOW
        return [
            gr.Dropdown(choices=choices, value=run if run in known else default),
            gr.Dropdown(choices=choices[1:], value=compared),
            gr.Dropdown(choices=_stage_choices(labels), value=stage),
            gr.Slider(value=min(100, max(1, window))),
            gr.Dropdown(value=named.get("axis") == "minutes"),
            gr.Dropdown(choices=metrics, value=pinned),
        ]

    return asked


def _calm(page: gr.Blocks) -> None:
    """Slow down polling of Gradio's unused queue, which costs 2.5 CPU seconds per minute at its default of 1 ms."""
    queue = getattr(page, "_queue", None)
    for name in ("sleep_when_free", "progress_update_sleep_when_free"):
        if hasattr(queue, name):
            setattr(queue, name, 0.5)


def _opens(name: str, ask: Any) -> Any:
    """Event handler for opening a tab."""

    def opened(known: str, *values: Any) -> list[Any]:
        return [name, *ask(name, known, *values)]

    return opened


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


def _run_choices(reader: Reader) -> list[tuple[str, str]]:
    return [("the newest", _FOLLOW), *((run.title, run.id) for run in reader.runs())]


def _stage_choices(labels: list[str] | None) -> list[tuple[str, str]]:
    return [("automatic", _FOLLOW), *((label.replace("_", " "), label) for label in labels or [])]


def _offers(reader: Reader, choice: Choice, known: str) -> tuple[list[Any], str]:
    """Updates of the selection lists that keep the current choices, and their fingerprint; no update where that
    is `known`."""
    run = reader.run(choice.run)
    choices = _run_choices(reader)
    labels = [stage.label for stage in run.stages if stage.table.series] if run is not None else []
    grouped = prefixes(run, choice.stage)
    others = [item for item in choices[1:] if run is None or item[1] != run.id]
    files = list(episode_files(run)) if run is not None else []
    names = [name for group in grouped.values() for name in group]
    fingerprint = json.dumps([choices, labels, names, files, others, choice.run])
    if fingerprint == known:
        return [gr.skip()] * 6, fingerprint
    chosen = choice.source if choice.source in files else files[0] if files else None
    ids = [value for _, value in choices]
    if choice.run not in ids:
        choices.append((f"{choice.run} (gone)", choice.run))
    groups = [name for name in choice.groups if name in grouped]
    if not groups:
        groups = [name for name in ("train", "reward", "policy") if name in grouped]
    compared = [name for name in choice.compare if name in {value for _, value in others}]
    pinned = [name for name in choice.metrics if name in names]
    return [
        gr.Dropdown(choices=choices),
        _offered(others, compared, list(choice.compare)),
        _offered(_stage_choices(labels), choice.stage if choice.stage in labels else _FOLLOW, choice.stage),
        gr.CheckboxGroup(choices=[(f"{n}/ ({len(grouped.get(n, ()))})", n) for n in _groups(run)], value=groups),
        _offered(names, pinned, list(choice.metrics)),
        gr.Dropdown(choices=files, value=chosen),
    ], fingerprint


def _groups(run: RunView | None) -> list[str]:
    """Groups of metrics of all stages: Gradio refuses a question under way that names one no longer offered."""
    return sorted({name for stage in run.stages for name in prefixes(run, stage.label)}) if run is not None else []


def _offered(choices: list[Any], value: Any, present: Any) -> Any:
    """Update of a list. What stands in it is touched only where it is not offered any more.

    An answer to an earlier question may arrive after the page's address has chosen something else.
    """
    return gr.Dropdown(choices=choices) if value == present else gr.Dropdown(choices=choices, value=value)
