"""Tables, metrics and files of an analysis by environment, worked by hand."""

import csv
import json

import pytest
from helpers.handmade_trajectories import trajectory

from rl_core.analysis import analyze, write_trajectories
from rl_core.settings import AnalysisSettings

SETTINGS = AnalysisSettings(bootstrap_samples=200, side_by_side=2)


def write(path, **successes):
    """Write episodes of each environment with these successes."""
    rows = []
    for label, outcomes in successes.items():
        for seed, success in enumerate(outcomes):
            row = trajectory(seed=seed, success=bool(success))
            row.environment, row.level = label, f"{label}/easy"
            rows.append(row)
    write_trajectories(path, rows)
    return path


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    folder = tmp_path_factory.mktemp("environments")
    models = {
        "sft": write(folder / "sft.jsonl", sums=[1, 0, 0, 0], grid=[1, 1, 1, 0]),
        "policy": write(folder / "policy.jsonl", sums=[1, 1, 1, 0], grid=[1, 1, 0, 0]),
    }
    return analyze(models, folder / "out", SETTINGS)


def test_rates_and_differences_by_environment(result):
    metrics = result.metrics
    assert metrics["analysis/sft/success_rate_by_environment/sums"] == 0.25
    assert metrics["analysis/policy/success_rate_by_environment/sums"] == 0.75
    assert metrics["analysis/policy/success_rate_by_environment/grid"] == 0.5
    assert metrics["analysis/policy/success_rate_by_level/sums_easy"] == 0.75
    written = json.loads(find_file(result, ".json").read_text())
    (pair,) = written["comparisons"]
    found = {row["name"]: row["success"]["difference"] for row in pair["by_environment"]}
    assert found == {"sums": 0.5, "grid": -0.25}
    wins = {row["name"]: (row["wins"], row["losses"]) for row in pair["by_environment"]}
    assert wins == {"sums": (2, 0), "grid": (0, 1)}


def test_the_report_and_the_table_have_environments(result):
    text = find_file(result, ".html").read_text()
    assert "Success by environment" in text
    section = text[text.index("Success by environment</h2>") :]
    assert section.index("sums") < section.index("grid") < section.index("Success by level")
    with find_file(result, "analysis.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["group"] == "environment"]
    assert [(row["model"], row["name"], float(row["value"])) for row in rows] == [
        ("sft", "sums", 0.25),
        ("sft", "grid", 0.75),
        ("policy", "sums", 0.75),
        ("policy", "grid", 0.5),
    ]


def test_one_environment_has_no_such_table(tmp_path):
    models = {name: write(tmp_path / f"{name}.jsonl", sums=[1, 0]) for name in ("a", "b")}
    result = analyze(models, tmp_path / "out", SETTINGS)
    assert "Success by environment" not in find_file(result, ".html").read_text()
    assert not any("by_environment" in name for name in result.metrics)


def find_file(result, suffix):
    return next(path for path in result.files if str(path).endswith(suffix))
