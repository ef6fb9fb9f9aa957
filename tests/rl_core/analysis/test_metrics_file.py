"""The metric reference's data file: complete rows, no duplicate, plain text."""

import json

from rl_core.analysis.metric_reference import METRIC_GROUPS, METRICS_FILE


def test_rows_are_complete_and_unique():
    groups = json.loads(METRICS_FILE.read_text(encoding="utf-8"))
    assert [sorted(group) for group in groups] == [["about", "metrics", "title"]] * len(groups)
    rows = [row for group in groups for row in group["metrics"]]
    names = [row["name"] for row in rows]
    assert len(rows) > 350 and len(set(names)) == len(names)
    for row in rows:
        assert {"name", "unit", "meaning"} <= set(row) <= {"name", "unit", "meaning", "worry"}, row
        assert all(isinstance(text, str) and text == text.strip() and text for text in row.values())
        assert row["meaning"].endswith(".") and "\n" not in row["meaning"], row


def test_every_row_is_loaded_in_order():
    loaded = [metric.name for group in METRIC_GROUPS for metric in group.metrics]
    groups = json.loads(METRICS_FILE.read_text(encoding="utf-8"))
    assert loaded == [row["name"] for group in groups for row in group["metrics"]]
