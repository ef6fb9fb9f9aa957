"""Page of the experiment in MLflow: columns of its table of runs, and its charts, most important first.

MLflow stores a shared view in a tag of the experiment and finds it by the link's `viewStateShareKey`. The page hides
what a run does not have. Every metric also has a chart in a section of its prefix; these sections are collapsed, with
bookkeeping last. Written for the page of MLflow 3.17; a version that does not read these fields shows its default
order.
"""

from __future__ import annotations

import base64
import json
import re
import zlib
from collections.abc import Mapping
from typing import Any

from tasks.stage_registry import START_MODEL, list_policy_stages, list_training_stages

VIEW_KEY = "posttrain"
_PREFIX = "mlflow.sharedViewState."
VIEW_TAG = f"{_PREFIX}{VIEW_KEY}"
# MLflow's page marks a compressed view with this prefix. Older stores keep 5,000 characters of a tag.
_PACKED_PREFIX = "deflate;"

_RESULT = "tags.`result`"
_CHANGED = "tags.`changed`"
_SETTINGS = "tags.`settings`"
_NAME = "attributes.`Run Name`"
_DECISION = "tags.`gate.decision`"

# Charts of learning progress by section, most important first. A chart of one metric is titled with the metric's name,
# so the readable titles are those of the sections.
_LEARNING_CHARTS = {
    "Success and reward": (("train/success_rate",), ("eval/success_rate",), ("reward/mean",)),
    "KL and entropy, nats per token": (
        ("policy/entropy",),
        ("policy/ref_kl",),
        ("policy/update_kl",),  # last: 0 throughout with one step per rollout
    ),
    "Length in tokens, and loss": (("train/completion_tokens",), ("train/loss", "eval/loss")),
}
# By name, equal names newest first: sorted by start time, the page would show collapsed parent runs instead of the
# stages' runs. The key is one that the page's menu offers; it names any other "undefined".
_RUN_NAME_SORT_KEY = "tags.`mlflow.runName`"
_RESULTS_SECTION = "success_rate"  # metrics of a pipeline's run
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
    """Build the view. Custom stages that a config has named have a column as well."""
    stages = (START_MODEL, *list_policy_stages(), "champion")
    success_rates = [f"metrics.`success_rate/{name}`" for name in stages]
    shown = (_RESULTS_SECTION, *(f"{name}{_UNFOLD_HINT}" for name in _LEARNING_CHARTS))
    sections = [_build_section(name, is_shown=True) for name in shown]
    sections += [_build_section(name, is_shown=False) for name in _FOLDED_SECTIONS]
    charts = [
        _build_line_chart(list(metrics), _build_section_id(f"{name}{_UNFOLD_HINT}"))
        for name, section_charts in _LEARNING_CHARTS.items()
        for metrics in section_charts
    ]
    columns = [_DECISION, _RESULT, _CHANGED, *success_rates, _SETTINGS]
    return {
        "selectedColumns": columns,
        "columnOrder": [_NAME, "attributes.`Created`", *columns],
        # At 1,400 px the success of two models is visible next to the menu.
        "columnWidths": {
            _NAME: 225,
            _DECISION: 105,
            _RESULT: 310,
            _CHANGED: 240,
            _SETTINGS: 640,
            **dict.fromkeys(success_rates, 125),
        },
        "compareRunSections": sections,
        "compareRunCharts": charts,
        "isAccordionReordered": True,  # otherwise the page sorts sections by name
        "hideEmptyCharts": True,
    }


def build_stage_view_key(stage: str) -> str:
    """Return the `viewStateShareKey` of the view of a stage's runs."""
    return f"{VIEW_KEY}-{stage}"


def build_shared_views() -> dict[str, dict[str, Any]]:
    """Build every view, by the experiment's tag that stores it."""
    return {VIEW_TAG: build_experiment_view()} | {
        f"{_PREFIX}{build_stage_view_key(stage)}": _build_stage_view(stage)
        for stage in list_training_stages()
    }


def _build_stage_view(stage: str) -> dict[str, Any]:
    """Build the view of one stage's runs, newest first, with its learning charts before those of pipelines."""
    view = build_experiment_view()
    results, *others = view["compareRunSections"]
    sections = [
        {**section, "name": section["name"].removesuffix(_UNFOLD_HINT)} for section in others
    ]
    newest = {
        "searchFilter": f"tags.stage = '{stage}'",
        "orderByKey": _RUN_NAME_SORT_KEY,
        "orderByAsc": True,
    }
    return view | newest | {"compareRunSections": [*sections, results]}


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
    """Build a chart of these metrics of each run over steps."""
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
    """Encode a view as a tag value."""
    return _PACKED_PREFIX + base64.b64encode(zlib.compress(json.dumps(view).encode(), 9)).decode()


def unpack_view(tag: str) -> Any:
    """Decode a tag value, compressed or not. Raises: ValueError for anything else."""
    if not tag.startswith(_PACKED_PREFIX):
        return json.loads(tag)
    try:
        return json.loads(zlib.decompress(base64.b64decode(tag.removeprefix(_PACKED_PREFIX))))
    except zlib.error as error:
        raise ValueError(f"not a packed view: {error}") from error


def contains_view(tag: str | None, view: Mapping[str, Any]) -> bool:
    """Return whether a stored view has all columns and charts of `view`, and its order."""
    try:
        stored = unpack_view(tag or "{}")
        charts = {chart["uuid"] for chart in view["compareRunCharts"]}
        stored_charts = {chart["uuid"] for chart in stored["compareRunCharts"]}
        has_columns = set(view["selectedColumns"]) <= set(stored["selectedColumns"])
        has_order = stored.get("orderByKey") == view.get("orderByKey")
        return has_columns and has_order and charts <= stored_charts
    except (ValueError, KeyError, TypeError):
        return False
