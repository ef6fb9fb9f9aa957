"""Retraining: when it is due, where it starts and with which settings."""

import dataclasses
import platform
import subprocess
from types import SimpleNamespace

import pytest

from rl_core.errors import SettingsError
from tasks.config import build_settings
from tasks.lifecycle.data_lineage import format_record_tags, inspect_data_sources
from tasks.lifecycle.retraining import (
    plan_retraining,
    read_retrainings,
    record_outcome,
    record_start,
    settle_waiting_retrainings,
)
from tasks.tracking import ModelVersion

STAGES = {"prepare_data": {}, "sft": {}, "policy": {}, "evaluate": {}, "promote": {}}


def build_test_settings(file=None, stages=None, retrain=None, **data):
    named = {"demonstrations": str(file)} if file else {}
    values = {
        "name": "x",
        "seed": 7,
        "stages": {**STAGES, "prepare_data": {**named, **data}, **(stages or {})},
        "retrain": retrain or {},
    }
    return build_settings(values, check_files=False)


def build_champion(version, typed):
    return ModelVersion(
        "x", version, None, None, tags=format_record_tags(inspect_data_sources(typed))
    )


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "mine.jsonl"
    path.write_text('{"a": 1}\n')
    return path


def append_rows(path, count):
    with path.open("a") as stream:
        stream.write('{"a": 2}\n' * count)


def plan_with(typed, holder, earlier=(), **options):
    return plan_retraining(typed, inspect_data_sources(typed), holder, list(earlier), **options)


def test_without_a_champion_the_pipeline_runs_as_it_is(file):
    result = plan_with(build_test_settings(file), None)
    assert result.settings == build_test_settings(file)
    assert result.record.start is None and result.record.number == 1
    assert result.reason == "there is no champion yet"


def test_nothing_new_is_skipped_with_a_reason(file):
    typed = build_test_settings(file)
    result = plan_with(typed, build_champion(3, typed))
    assert result.record is None
    assert result.reason == "skipped: nothing is new since champion version 3"


def test_new_rows_start_from_the_champion_with_the_same_seed(file):
    typed = build_test_settings(file)
    holder = build_champion(3, typed)
    append_rows(file, 2)
    result = plan_with(typed, holder, reason="nightly")
    assert (
        result.reason
        == "nightly: new since champion version 3: demonstrations: mine.jsonl: 2 rows appended"
    )
    assert result.settings.model.path == "models:/x/3"
    # another seed would hold out rows that the champion has learned
    assert result.settings.seed == 7
    assert result.settings.stages == typed.stages  # there is something new for each of them
    assert result.record.start == 3


def test_base_by_argument_or_setting(file):
    typed = build_test_settings(file, retrain={"start": "base"})
    holder = build_champion(3, typed)
    append_rows(file, 1)
    for result in (
        plan_with(typed, holder),
        plan_with(build_test_settings(file), holder, start="base"),
    ):
        assert result.settings.model.path is None
        assert result.record.start is None
    assert plan_with(typed, holder, start="champion").settings.model.path == "models:/x/3"


def test_too_few_rows_are_skipped(file):
    typed = build_test_settings(file, retrain={"min_new_rows": 3})
    holder = build_champion(1, typed)
    append_rows(file, 2)
    assert plan_with(typed, holder).reason.startswith(
        "skipped: 2 new rows, fewer than retrain.min_new_rows = 3"
    )
    append_rows(file, 1)
    assert plan_with(typed, holder).record is not None


def test_data_that_was_tried_and_rejected_is_not_tried_again_but_newer_is(file, tmp_path):
    typed = build_test_settings(file)
    holder = build_champion(1, typed)
    append_rows(file, 1)
    first = plan_with(typed, holder).record
    rejected = record_outcome(tmp_path, first, status="rejected", version=2, note="no gain")
    result = plan_with(typed, holder, [rejected])
    assert result.record is None
    assert (
        result.reason
        == "skipped: nothing is new since retraining 1, which made version 2 (rejected: no gain)"
    )
    append_rows(file, 1)
    assert plan_with(typed, holder, [rejected]).record.number == 2
    # Under another champion the same data may serve.
    assert (
        plan_with(typed, ModelVersion("x", 5, None, None, tags=holder.tags), [rejected]).record
        is not None
    )


def test_an_interrupted_or_failed_retraining_is_resumed(file):
    typed = build_test_settings(file)
    holder = build_champion(1, typed)
    append_rows(file, 1)
    first = plan_with(typed, holder, flow_run_id="a").record
    for status in ("open", "failed"):
        again = plan_with(
            typed, holder, [dataclasses.replace(first, status=status)], flow_run_id="b"
        )
        assert (
            again.record.number == 1
            and again.record.status == "open"
            and again.record.flow_run_id == "b"
        )


def test_a_retraining_killed_after_its_promotion_is_resumed(file):
    """Its version is champion by then: nothing is new, but no other retraining begins either."""
    typed = build_test_settings(file)
    append_rows(file, 1)
    first = plan_with(typed, build_champion(1, typed), force=True).record
    promoted = build_champion(2, typed)
    retrained_champion = dataclasses.replace(
        promoted, tags={**promoted.tags, "retrain.number": "1"}
    )
    for force in (True, False):
        result = plan_with(typed, retrained_champion, [first], force=force, flow_run_id="b")
        assert result.is_continuation and result.record == dataclasses.replace(
            first, flow_run_id="b"
        )
        assert result.settings.model.path == "models:/x/1"  # what it began with
    ended = dataclasses.replace(first, status="promoted")
    assert plan_with(typed, retrained_champion, [ended], force=True).record.number == 2
    # somebody else's champion
    assert plan_with(typed, promoted, [first], force=True).record.number == 2


def test_a_retraining_that_waits_for_approval_is_not_repeated_and_its_run_resumes(file):
    typed = build_test_settings(file)
    holder = build_champion(1, typed)
    append_rows(file, 1)
    waiting = dataclasses.replace(
        plan_with(typed, holder, flow_run_id="a").record, status="waiting"
    )
    assert plan_with(typed, holder, [waiting]).reason.endswith(
        "retraining 1, which waits for approval"
    )
    # champion and data have changed since, but the planned run stays the same
    moved_on = build_champion(4, typed)
    resumed = plan_with(typed, moved_on, [waiting], flow_run_id="a")
    assert resumed.record == waiting
    assert resumed.settings.model.path == "models:/x/1"


def test_generated_episodes_are_never_new_but_force_plays_others():
    typed = build_test_settings()
    holder = build_champion(2, typed)
    assert "generates its episodes" in plan_with(typed, holder).reason
    first = plan_with(typed, holder, force=True)
    assert first.settings.seed != 7
    # a demonstrator writes the same data again, and imitating it would undo the reward
    assert first.settings.stages.sft is None
    assert first.record.dropped == ("sft",)
    rejected = dataclasses.replace(first.record, status="rejected")
    second = plan_with(typed, holder, [rejected], force=True)
    assert second.record.number == 2 and second.settings.seed not in (7, first.settings.seed)
    resumed = plan_with(typed, holder, [first.record], force=True)
    assert resumed.settings == first.settings
    assert (
        plan_with(
            build_test_settings(retrain={"new_episodes": False}), holder, force=True
        ).settings.seed
        == 7
    )


def test_sft_runs_if_requested_or_if_nothing_else_trains():
    typed = build_test_settings(retrain={"repeat": "all"})
    assert plan_with(typed, build_champion(2, typed), force=True).settings.stages.sft is not None
    alone = build_test_settings(stages={"policy": None})
    assert plan_with(alone, build_champion(2, alone), force=True).settings.stages.sft is not None


def test_a_champion_without_a_data_record_is_retrained(file):
    result = plan_with(build_test_settings(file), ModelVersion("x", 2, None, None))
    assert result.reason == "version 2 has no record of its training data"


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ({"promote": None}, "stages.promote"),
        ({"sft": None, "policy": None}, "nothing trains a policy"),
    ],
)
def test_a_pipeline_without_gate_or_training_is_refused(stages, message):
    typed = (
        build_test_settings(stages={"promote": {}, **stages}) if "policy" not in stages else None
    )
    if typed is None:
        complete = build_test_settings()
        typed = object.__new__(type(complete))
        for field in dataclasses.fields(complete):
            object.__setattr__(typed, field.name, getattr(complete, field.name))
        object.__setattr__(typed, "stages", dataclasses.replace(complete.stages, **stages))
    with pytest.raises(SettingsError, match=message):
        plan_retraining(typed, {}, None, [])


def test_records_are_read_back_and_a_broken_one_is_skipped(file, tmp_path):
    typed = build_test_settings(file)
    holder = build_champion(1, typed)
    append_rows(file, 1)
    record = plan_with(typed, holder, flow_run_id="a").record
    record_start(tmp_path, record)
    (tmp_path / "retrainings" / "0002.json").write_text("{")
    assert read_retrainings(tmp_path) == [record]
    closed = record_outcome(tmp_path, record, status="promoted", version=4, note="better")
    assert read_retrainings(tmp_path) == [closed] and closed.is_decided


@pytest.mark.parametrize(
    ("state", "status"),
    [
        ("approved", "promoted"),
        ("rejected", "rejected"),
        ("timed out", "rejected"),
        ("superseded", "failed"),
        ("waiting", "waiting"),
    ],
)
def test_an_answer_closes_a_waiting_retraining(file, tmp_path, state, status):
    record = plan_with(build_test_settings(file), None).record
    record_outcome(tmp_path, record, status="waiting", version=7)
    other = dataclasses.replace(record, number=record.number + 1)
    record_outcome(tmp_path, other, status="rejected", version=8, note="no gain")
    tags = {
        "approval.state": state,
        "approval.deadline": "2999-01-01 00:00:00 UTC",
        "approval.champion": "none",
    }
    tags |= {"approval.request": "k", "approval.by": "ada", "approval.note": "looks fine"}
    versions = [
        dataclasses.replace(
            build_champion(version, build_test_settings(file)),
            version=version,
            tags=tags if version == 7 else {},
        )
        for version in (7, 8)
    ]
    result = settle_waiting_retrainings(
        SimpleNamespace(list_versions=lambda name: versions), "m", tmp_path
    )
    assert [entry.status for entry in result] == [status, "rejected"]
    assert read_retrainings(tmp_path) == result
    assert ("ada" in result[0].note) is (state in ("approved", "rejected"))
    assert result[1].note == "no gain"


def test_what_a_killed_record_left_is_removed_by_the_next(file, tmp_path):
    record = plan_with(
        build_test_settings(file), build_champion(1, build_test_settings(file)), force=True
    ).record
    record_start(tmp_path, record)
    dead = subprocess.Popen(["true"])
    dead.wait()
    leftover = tmp_path / "retrainings" / f".tmp-0001.json@{platform.node()}-{dead.pid}.0"
    leftover.write_text("{")
    record_start(tmp_path, record)
    assert [path.name for path in (tmp_path / "retrainings").iterdir()] == ["0001.json"]
