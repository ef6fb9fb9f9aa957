"""Settings that differ between runs, also across pipelines."""

import pytest

from posttrain.cli.compare import find_setting_differences
from rl_core.errors import DataError
from tasks.tracking import RunRow, find_run


def make_run(number, pipeline, **params):
    return RunRow(
        str(number),
        f"run {number}",
        "FINISHED",
        0.0,
        1.0,
        None,
        "",
        {"pipeline": pipeline},
        {},
        params,
    )


def test_runs_of_different_pipelines_are_compared_with_each_other():
    rows = [
        make_run(1, "one", seed="0", epochs="3"),
        make_run(2, "two", seed="0", epochs="4"),
        make_run(3, "two", seed="0", epochs="4"),
    ]
    assert find_setting_differences(rows) == {
        "1": {"epochs": "3"},
        "2": {"epochs": "4"},
        "3": {"epochs": "4"},
    }
    assert rows[0].tags == {"pipeline": "one"}


def test_a_sweep_and_a_stage_are_no_unknown_runs():
    kinds = [
        ("1", "demo", {"kind": "pipeline"}),
        ("2", "demo · sweep", {"kind": "sweep"}),
        ("3", "sft", {"stage": "sft"}),
    ]
    rows = [
        RunRow(key, name, "FINISHED", 0.0, 1.0, None, "", tags, {}, {}, f"{key}0000abcd")
        for key, name, tags in kinds
    ]
    assert find_run(rows, "demo") is rows[0]
    for name, message in (
        ("2", "'2' is a sweep; name its trials"),
        ("sft", "is a part of a run; name the whole run"),
    ):
        with pytest.raises(DataError, match=message):
            find_run(rows, name)
    with pytest.raises(DataError, match="no run 'dmo' in the tracking store; did you mean 'demo'"):
        find_run(rows, "dmo")
