"""Page of the experiment in MLflow: columns of its table of runs, and its charts in the order in which people look.

MLflow keeps a view that someone shares in a tag of the experiment, found by the link's `viewStateShareKey`. What a run
does not have is left out by the page. All metrics have a chart in a section of their prefix as well: folded, with
bookkeeping last. Written for the page of MLflow 3.17; another one that reads these fields no more shows its own order.
"""

from __future__ import annotations

import base64
import json
import re
import zlib
from collections.abc import Mapping
from typing import Any

from tasks.stage_registry import list_policy_stages, list_training_stages

VIEW_KEY = "posttrain"
_PREFIX = "mlflow.sharedViewState."
VIEW_TAG = f"{_PREFIX}{VIEW_KEY}"
_PACKED_PREFIX = "deflate;"  # with which the page marks a view that it has packed; older stores keep 5,000 characters of a tag

_RESULT = "tags.`result`"
_CHANGED = "tags.`changed`"
_SETTINGS = "tags.`settings`"
_NAME = "attributes.`Run Name`"
_DECISION = "tags.`gate.decision`"

# Charts of what stages learn by section, in the order in which people look: a chart of one metric has the name of that,
# so that names for people stand above.
_LEARNING_CHARTS = {
    "Success and reward": (("train/success_rate",), ("eval/success_rate",), ("reward/mean",)),
    "KL and entropy, nats per token": (
        ("policy/update_kl",),
        ("policy/ref_kl",),
        ("policy/entropy",),
    ),
    "Length in tokens, and loss": (("train/completion_tokens",), ("train/loss", "eval/loss")),
}
_ENDED = "attributes.end_time"  # of runs sorted by their start the page shows the parents, folded
_RESULTS_SECTION = "success_rate"  # of a pipeline's run
_UNFOLD_HINT = " (of stages: unfold a run with +)"
_FOLDED_SECTIONS = (
    "reward",
    "reward/task",
    "reward/learned",
    "eval",
    "policy",
    "value",
    "tool",
    "train",
    "perf",
    "curriculum",
    "data",
    "pipeline",
    "seconds",
    "Model metrics",
    "System metrics",
)


def build_experiment_view() -> dict[str, Any]:
    """The view; stages of the user's, once a config named them, have a column as well."""
    success = [
        f"metrics.`success_rate/{name}`" for name in ("base", *list_policy_stages(), "champion")
    ]
    names = (_RESULTS_SECTION, *(f"{name}{_UNFOLD_HINT}" for name in _LEARNING_CHARTS))
    sections = [_build_section(name, is_shown=True) for name in names] + [
        _build_section(name, is_shown=False) for name in _FOLDED_SECTIONS
    ]
    charts = [
        _build_line_chart(list(metrics), _build_section_id(f"{name}{_UNFOLD_HINT}"))
        for name in _LEARNING_CHARTS
        for metrics in _LEARNING_CHARTS[name]
    ]
    return {
        "selectedColumns": [_DECISION, _RESULT, _CHANGED, *success, _SETTINGS],
        "columnOrder": [
            _NAME,
            "attributes.`Created`",
            _DECISION,
            _RESULT,
            _CHANGED,
            *success,
            _SETTINGS,
        ],
        "columnWidths": {
            _NAME: 250,
            _DECISION: 115,
            _RESULT: 380,
            _CHANGED: 240,
            _SETTINGS: 640,
            **dict.fromkeys(success, 150),
        },  # the first five fit beside the menu at 1,400 px
        "compareRunSections": sections,
        "compareRunCharts": charts,
        "isAccordionReordered": True,  # else the page sorts sections by name
        "hideEmptyCharts": True,
    }


def build_stage_view_key(stage: str) -> str:
    """`viewStateShareKey` of the view of a stage's runs."""
    return f"{VIEW_KEY}-{stage}"


def build_shared_views() -> dict[str, dict[str, Any]]:
    """Every view by the experiment's tag that keeps it."""
    return {VIEW_TAG: build_experiment_view()} | {
        f"{_PREFIX}{build_stage_view_key(stage)}": _build_stage_view(stage)
        for stage in list_training_stages()
    }


def _build_stage_view(stage: str) -> dict[str, Any]:
    """Runs of one stage, the newest first; charts of what it learns before those of pipelines."""
    whole = build_experiment_view()
    results, *others = whole["compareRunSections"]
    sections = [{**one, "name": one["name"].removesuffix(_UNFOLD_HINT)} for one in others]
    newest = {"searchFilter": f"tags.stage = '{stage}'", "orderByKey": _ENDED, "orderByAsc": False}
    return whole | newest | {"compareRunSections": [*sections, results]}


def _build_section(name: str, *, is_shown: bool) -> dict[str, Any]:
    return {
        "uuid": _build_section_id(name),
        "name": name,
        "display": is_shown,
        "isReordered": is_shown and name != _RESULTS_SECTION,
    }


def _build_section_id(name: str) -> str:
    return f"{VIEW_KEY}-{re.sub(r'[^a-z]+', '-', name.lower())}"


def _build_line_chart(metrics: list[str], section: str) -> dict[str, Any]:
    """A card of the page that draws these metrics of each run over steps."""
    return {
        "uuid": _build_section_id(" ".join(metrics)),
        "type": "LINE",
        "runsCountToCompare": 10,
        "metricSectionId": section,
        "deleted": False,
        "isGenerated": False,
        "displayName": metrics[0],
        "metricKey": metrics[0],
        "selectedMetricKeys": metrics,
        "lineSmoothness": 0,
        "xAxisScaleType": "linear",
        "scaleType": "linear",
        "range": {},
        "xAxisKey": "step",
        "selectedXAxisMetricKey": "",
        "yAxisKey": "metric",
        "yAxisExpressions": [],
        "ignoreOutliers": False,
        "useGlobalXaxisKey": True,
        "useGlobalLineSmoothing": True,
    }


def pack_view(view: Mapping[str, Any]) -> str:
    """A view as the tag's value."""
    return _PACKED_PREFIX + base64.b64encode(zlib.compress(json.dumps(view).encode(), 9)).decode()


def unpack_view(tag: str) -> Any:
    """The view of a tag's value, packed or not. Raises: ValueError where it is none."""
    if not tag.startswith(_PACKED_PREFIX):
        return json.loads(tag)
    try:
        return json.loads(zlib.decompress(base64.b64decode(tag.removeprefix(_PACKED_PREFIX))))
    except zlib.error as error:
        raise ValueError(f"not a packed view: {error}") from error


def contains_view(tag: str | None, view: Mapping[str, Any]) -> bool:
    """True = a stored view has all columns and charts of this one."""
    try:
        stored = unpack_view(tag or "{}")
        charts = [
            {chart["uuid"] for chart in found["compareRunCharts"]} for found in (view, stored)
        ]
        return (
            set(view["selectedColumns"]) <= set(stored["selectedColumns"])
            and charts[0] <= charts[1]
        )
    except (ValueError, KeyError, TypeError):
        return False
