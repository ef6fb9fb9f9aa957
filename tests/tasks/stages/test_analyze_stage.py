"""Trajectory files of an analysis, and their order."""

import pytest

from rl_core.errors import DataError
from tasks.stages.analyze import find_trajectories
from tasks.tracking.journal import LineLog, build_events_path


def touch(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    return path


def test_a_folder_s_own_files_come_in_the_pipeline_s_order(tmp_path):
    for name in ("champion", "policy", "base", "sft"):
        touch(tmp_path / f"trajectories_{name}.jsonl")
    touch(tmp_path / "metrics.jsonl")
    touch(
        tmp_path / "0123" / "trajectories_policy.jsonl"
    )  # its own files win over those of folders in it
    found = find_trajectories([tmp_path])
    assert list(found.items()) == [
        (name, tmp_path / f"trajectories_{name}.jsonl")
        for name in ("base", "sft", "policy", "champion")
    ]


def test_of_a_stage_s_folder_the_finished_keys_are_read(tmp_path):
    finished = touch(tmp_path / "0123" / "trajectories_sft.jsonl")
    for name in ("4567.open", "0123.tracking", "89ab.corrupt-1", ".trash-1-cdef"):
        touch(tmp_path / name / "trajectories_policy.jsonl")
    touch(tmp_path / "0123.lock")
    assert find_trajectories([tmp_path]) == {"sft": finished}


def test_files_are_taken_as_they_are_given(tmp_path):
    first = touch(tmp_path / "one" / "trajectories.jsonl")
    second = touch(tmp_path / "4567.open" / "trajectories_sft.jsonl")
    third = touch(tmp_path / "mine.jsonl")
    found = find_trajectories([first, third, second])
    assert list(found.items()) == [("sft", second), ("one", first), ("mine", third)]


def test_the_same_model_twice_keeps_both_and_the_order_given(tmp_path):
    runs = [touch(tmp_path / run / "trajectories_policy.jsonl").parent for run in ("late", "early")]
    base = touch(tmp_path / "base.jsonl")
    found = find_trajectories([*runs, base])
    assert list(found) == ["base", "policy late", "policy early"]
    assert [found["policy late"].parent, found["policy early"].parent] == runs


def test_of_several_evaluations_each_model_names_its_run(tmp_path):
    for key, started in (("0123", "2026-11-20-09-00-01"), ("4567", "2026-11-21-10-30-00")):
        touch(tmp_path / key / "trajectories_policy.jsonl")
        log = LineLog(build_events_path(tmp_path / f"{key}.tracking"))
        log.append_record(
            {
                "op": "start",
                "time": 0,
                "name": "evaluate",
                "parent_folder": str(tmp_path / "runs" / started),
            }
        )
        log.close()
    touch(tmp_path / "89ab" / "trajectories_sft.jsonl")
    found = find_trajectories([tmp_path])
    assert list(found) == ["sft", "policy 2026-11-20 09:00:01", "policy 2026-11-21 10:30:00"]
    assert found["policy 2026-11-21 10:30:00"].parent.name == "4567"


def test_none_is_an_error_that_says_where_it_looked(tmp_path):
    touch(tmp_path / "4567.open" / "trajectories_sft.jsonl")
    touch(tmp_path / "0123" / "evaluation.json")
    with pytest.raises(DataError, match=rf"{tmp_path}: no trajectories\*\.jsonl there"):
        find_trajectories([tmp_path])
