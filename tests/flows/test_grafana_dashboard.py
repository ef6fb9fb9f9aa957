"""deployments/grafana-dashboard.json queries exported metrics by labels that they have."""

import json
import re
from pathlib import Path

from rl_core.analysis.metric_reference import METRIC_GROUPS, resolve_exported_metric
from rl_core.trackers.prometheus import format_prometheus_name

DASHBOARD = json.loads(
    (Path(__file__).parents[2] / "deployments" / "grafana-dashboard.json").read_text()
)
LABELS = {"pipeline", "stage", "kind", "state", "quantile", "gpu"}


def list_queries():
    """Return the queries of panels and variables."""
    panels = [
        target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", ())
    ]
    return panels + [
        item["query"] for item in DASHBOARD["templating"]["list"] if item["type"] == "query"
    ]


def list_exported_names():
    names = [
        re.sub(r"\{(\w+)\}", "x", row.name) for group in METRIC_GROUPS for row in group.metrics
    ]
    return {format_prometheus_name(resolve_exported_metric(name).name) for name in names}


def test_every_query_asks_for_a_metric_that_is_exported():
    """Compare all but the service's /metrics, which tests/posttrain/training_service/test_http_access.py compares."""
    queried = {
        name for text in list_queries() for name in re.findall(r"posttrain_(?!service_)\w+", text)
    }
    assert len(queried) >= 25
    assert sorted(queried - list_exported_names()) == []


def test_commonly_watched_metrics_are_shown():
    text = " ".join(list_queries())
    for name in (
        "train_loss",
        "train_grad_norm",
        "train_learning_rate",
        "run_step",
        "policy_loss",
        "value_loss",
        "policy_entropy",
        "policy_ref_kl",
        "policy_clip_fraction",
        "train_advantages_mean",
        "train_advantages_std",
        "value_explained_variance",
        "reward_mean",
        "reward_alarm",
        "perf_forward_backward_seconds",
        "service_requests",
        "system_gpu_utilization_ratio",
        "system_gpu_memory_usage_bytes",
    ):
        assert f"posttrain_{name}" in text, name


def test_only_existing_labels_are_used():
    used = {label for text in list_queries() for label in re.findall(r"(\w+)=~", text)}
    legends = [
        target["legendFormat"]
        for panel in DASHBOARD["panels"]
        for target in panel.get("targets", ())
    ]
    used |= {label for text in legends for label in re.findall(r"\{\{(\w+)\}\}", text)}
    assert {"pipeline", "stage", "kind", "quantile"} <= used and used <= LABELS


def test_panels_do_not_overlap_and_have_unique_ids():
    positions = [panel["gridPos"] for panel in DASHBOARD["panels"]]
    cells = [
        (x, y)
        for p in positions
        for x in range(p["x"], p["x"] + p["w"])
        for y in range(p["y"], p["y"] + p["h"])
    ]
    assert len(cells) == len(set(cells)) and max(x for x, _ in cells) < 24
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(positions)
