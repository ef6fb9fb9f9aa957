"""Settings that differ between runs, also of different pipelines."""

from flows.cli.compare_runs import settings_that_differ
from tasks.tracking import RunRow


def run(number, pipeline, **params):
    return RunRow(str(number), f"run {number}", "FINISHED", 0.0, 1.0, None, "", {"pipeline": pipeline}, {}, params)


def test_runs_of_different_pipelines_are_compared_with_each_other():
    rows = [
        run(1, "one", seed="0", epochs="3"),
        run(2, "two", seed="0", epochs="4"),
        run(3, "two", seed="0", epochs="4"),
    ]
    assert settings_that_differ(rows) == {"1": {"epochs": "3"}, "2": {"epochs": "4"}, "3": {"epochs": "4"}}
    assert rows[0].tags == {"pipeline": "one"}
