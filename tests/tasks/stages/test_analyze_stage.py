"""Trajectory files of an analysis, and their order."""

import pytest

from rl_core.errors import DataError
from tasks.stages.analyze import describe_text_changes, find_trajectories
from tasks.tracking.journal import LineLog, build_events_path


def touch(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    return path


def test_a_folder_s_files_are_in_pipeline_order(tmp_path):
    for name in ("champion", "policy", "base", "sft"):
        touch(tmp_path / f"trajectories_{name}.jsonl")
    touch(tmp_path / "metrics.jsonl")
    touch(
        tmp_path / "0123" / "trajectories_policy.jsonl"
    )  # its files win over those of its subfolders
    models = find_trajectories([tmp_path])
    assert list(models.items()) == [
        (name, tmp_path / f"trajectories_{name}.jsonl")
        for name in ("base", "sft", "policy", "champion")
    ]


def test_of_a_stage_s_folder_the_finished_keys_are_read(tmp_path):
    finished = touch(tmp_path / "0123" / "trajectories_sft.jsonl")
    for name in ("4567.open", "0123.tracking", "89ab.corrupt-1", ".trash-1-cdef"):
        touch(tmp_path / name / "trajectories_policy.jsonl")
    touch(tmp_path / "0123.lock")
    assert find_trajectories([tmp_path]) == {"sft": finished}


def test_files_can_be_named_directly(tmp_path):
    first = touch(tmp_path / "one" / "trajectories.jsonl")
    second = touch(tmp_path / "4567.open" / "trajectories_sft.jsonl")
    third = touch(tmp_path / "mine.jsonl")
    models = find_trajectories([first, third, second])
    assert list(models.items()) == [("sft", second), ("one", first), ("mine", third)]


def test_the_same_model_twice_keeps_both_in_order(tmp_path):
    runs = [touch(tmp_path / run / "trajectories_policy.jsonl").parent for run in ("late", "early")]
    base = touch(tmp_path / "base.jsonl")
    models = find_trajectories([*runs, base])
    assert list(models) == ["base", "policy late", "policy early"]
    assert [models["policy late"].parent, models["policy early"].parent] == runs


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
    models = find_trajectories([tmp_path])
    assert list(models) == ["sft", "policy 2026-11-20 09:00:01", "policy 2026-11-21 10:30:00"]
    assert models["policy 2026-11-21 10:30:00"].parent.name == "4567"


def test_none_is_an_error_that_says_where_it_looked(tmp_path):
    touch(tmp_path / "4567.open" / "trajectories_sft.jsonl")
    touch(tmp_path / "0123" / "evaluation.json")
    with pytest.raises(DataError, match=rf"{tmp_path}: contains no trajectories\*\.jsonl"):
        find_trajectories([tmp_path])


def test_the_note_compares_texts_with_those_of_the_start_model():
    start = {"perplexity_under_first": 5.892, "distinct_2": 0.81, "same_opening_rate": 0.07}
    policy = {"perplexity_under_first": 9.429, "distinct_2": 0.739, "same_opening_rate": 0.15}
    rows = [{"model": "base", **start}, {"model": "policy", **policy}]
    assert describe_text_changes(rows) == [
        "text of policy (of base): perplexity under base 9.43 (5.89), distinct-2 0.739 (0.810), "
        "most frequent opening 15.0% (7.0%)"
    ]
    del rows[1]["perplexity_under_first"]  # the model could not be read
    assert describe_text_changes(rows) == [
        "text of policy (of base): distinct-2 0.739 (0.810), most frequent opening 15.0% (7.0%)"
    ]
    assert describe_text_changes([{"model": "sft", **start}, rows[1]]) == []  # no start model
    assert describe_text_changes([]) == []
