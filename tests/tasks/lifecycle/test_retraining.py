"""When a retraining is worth it, where it starts and with which settings."""

import dataclasses
import platform
import subprocess
from types import SimpleNamespace

import pytest

from rl_core.errors import SettingsError
from tasks.config import build_settings
from tasks.lifecycle.data_lineage import format_record_tags, record_sources
from tasks.lifecycle.retraining import (
    plan_retraining,
    read_retrainings,
    record_outcome,
    record_start,
    settle_waiting_retrainings,
)
from tasks.tracking import ModelVersion

STAGES = {"prepare_data": {}, "sft": {}, "policy": {}, "evaluate": {}, "promote": {}}


def settings(file=None, stages=None, retrain=None, **data):
    named = {"demonstrations": str(file)} if file else {}
    values = {
        "name": "x",
        "seed": 7,
        "stages": {**STAGES, "prepare_data": {**named, **data}, **(stages or {})},
        "retrain": retrain or {},
    }
    return build_settings(values, check_files=False)


def champion(version, typed):
    return ModelVersion("x", version, None, None, tags=format_record_tags(record_sources(typed)))


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "mine.jsonl"
    path.write_text('{"a": 1}\n')
    return path


def append(path, count):
    with path.open("a") as stream:
        stream.write('{"a": 2}\n' * count)


def plan(typed, holder, earlier=(), **more):
    return plan_retraining(typed, record_sources(typed), holder, list(earlier), **more)


def test_without_a_champion_the_pipeline_runs_as_it_is(file):
    result = plan(settings(file), None)
    assert result.settings == settings(file)
    assert result.record.start is None and result.record.number == 1
    assert result.reason == "there is no champion yet"


def test_nothing_new_is_skipped_and_says_so(file):
    typed = settings(file)
    result = plan(typed, champion(3, typed))
    assert result.record is None
    assert result.reason == "skipped: nothing is new since champion version 3"


def test_new_rows_start_from_the_champion_with_the_same_seed(file):
    typed = settings(file)
    holder = champion(3, typed)
    append(file, 2)
    result = plan(typed, holder, reason="nightly")
    assert (
        result.reason
        == "nightly: new since champion version 3: demonstrations: mine.jsonl: 2 rows appended"
    )
    assert result.settings.model.path == "models:/x/3"
    assert (
        result.settings.seed == 7
    )  # another one would hold out rows that the champion has learned
    assert result.settings.stages == typed.stages  # there is something new for each of them
    assert result.record.start == 3


def test_base_by_argument_or_setting(file):
    typed = settings(file, retrain={"start": "base"})
    holder = champion(3, typed)
    append(file, 1)
    for found in (plan(typed, holder), plan(settings(file), holder, start="base")):
        assert found.settings.model.path is None
        assert found.record.start is None
    assert plan(typed, holder, start="champion").settings.model.path == "models:/x/3"


def test_too_few_rows_are_skipped(file):
    typed = settings(file, retrain={"min_new_rows": 3})
    holder = champion(1, typed)
    append(file, 2)
    assert plan(typed, holder).reason.startswith(
        "skipped: 2 new rows, fewer than retrain.min_new_rows = 3"
    )
    append(file, 1)
    assert plan(typed, holder).record is not None


def test_data_that_was_tried_and_rejected_is_not_tried_again_but_newer_is(file, tmp_path):
    typed = settings(file)
    holder = champion(1, typed)
    append(file, 1)
    first = plan(typed, holder).record
    rejected = record_outcome(tmp_path, first, status="rejected", version=2, note="no gain")
    result = plan(typed, holder, [rejected])
    assert result.record is None
    assert (
        result.reason
        == "skipped: nothing is new since retraining 1, which made version 2 (rejected: no gain)"
    )
    append(file, 1)
    assert plan(typed, holder, [rejected]).record.number == 2
    # Under another champion the same data may serve.
    assert (
        plan(typed, ModelVersion("x", 5, None, None, tags=holder.tags), [rejected]).record
        is not None
    )


def test_an_interrupted_or_failed_one_is_gone_on_with(file):
    typed = settings(file)
    holder = champion(1, typed)
    append(file, 1)
    first = plan(typed, holder, flow_run_id="a").record
    for status in ("open", "failed"):
        again = plan(typed, holder, [dataclasses.replace(first, status=status)], flow_run_id="b")
        assert (
            again.record.number == 1
            and again.record.status == "open"
            and again.record.flow_run_id == "b"
        )


def test_one_that_was_killed_behind_its_promotion_is_gone_on_with(file):
    """Its own version is champion by then: neither is anything new, nor does another retraining begin."""
    typed = settings(file)
    append(file, 1)
    first = plan(typed, champion(1, typed), force=True).record
    promoted = champion(2, typed)
    ours = dataclasses.replace(promoted, tags={**promoted.tags, "retrain.number": "1"})
    for force in (True, False):
        result = plan(typed, ours, [first], force=force, flow_run_id="b")
        assert result.is_continuation and result.record == dataclasses.replace(
            first, flow_run_id="b"
        )
        assert result.settings.model.path == "models:/x/1"  # what it began with
    ended = dataclasses.replace(first, status="promoted")
    assert plan(typed, ours, [ended], force=True).record.number == 2
    assert plan(typed, promoted, [first], force=True).record.number == 2  # somebody else's champion


def test_one_that_waits_for_approval_is_not_doubled_and_its_own_run_goes_on(file):
    typed = settings(file)
    holder = champion(1, typed)
    append(file, 1)
    waiting = dataclasses.replace(plan(typed, holder, flow_run_id="a").record, status="waiting")
    assert plan(typed, holder, [waiting]).reason.endswith("retraining 1, which waits for approval")
    # champion and data have changed since: the run that was decided on stays the same
    moved_on = champion(4, typed)
    own = plan(typed, moved_on, [waiting], flow_run_id="a")
    assert own.record == waiting
    assert own.settings.model.path == "models:/x/1"


def test_generated_episodes_are_never_new_but_force_plays_others():
    typed = settings()
    holder = champion(2, typed)
    assert "generates its episodes" in plan(typed, holder).reason
    first = plan(typed, holder, force=True)
    assert first.settings.seed != 7
    # a demonstrator writes the same again: copying it would undo the reward
    assert first.settings.stages.sft is None
    assert first.record.dropped == ("sft",)
    rejected = dataclasses.replace(first.record, status="rejected")
    second = plan(typed, holder, [rejected], force=True)
    assert second.record.number == 2 and second.settings.seed not in (7, first.settings.seed)
    resumed = plan(typed, holder, [first.record], force=True)
    assert resumed.settings == first.settings
    assert plan(settings(retrain={"new_episodes": False}), holder, force=True).settings.seed == 7


def test_sft_runs_where_asked_for_or_where_nothing_else_trains():
    typed = settings(retrain={"repeat": "all"})
    assert plan(typed, champion(2, typed), force=True).settings.stages.sft is not None
    alone = settings(stages={"policy": None})
    assert plan(alone, champion(2, alone), force=True).settings.stages.sft is not None


def test_a_champion_that_does_not_say_what_it_learned_from_is_retrained(file):
    result = plan(settings(file), ModelVersion("x", 2, None, None))
    assert result.reason == "version 2 has no record of its training data"


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ({"promote": None}, "stages.promote"),
        ({"sft": None, "policy": None}, "nothing trains a policy"),
    ],
)
def test_a_pipeline_without_gate_or_training_is_refused(stages, message):
    typed = settings(stages={"promote": {}, **stages}) if "policy" not in stages else None
    if typed is None:
        whole = settings()
        typed = object.__new__(type(whole))
        for field in dataclasses.fields(whole):
            object.__setattr__(typed, field.name, getattr(whole, field.name))
        object.__setattr__(typed, "stages", dataclasses.replace(whole.stages, **stages))
    with pytest.raises(SettingsError, match=message):
        plan_retraining(typed, {}, None, [])


def test_records_come_back_and_a_broken_one_is_passed_over(file, tmp_path):
    typed = settings(file)
    holder = champion(1, typed)
    append(file, 1)
    record = plan(typed, holder, flow_run_id="a").record
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
def test_an_answer_that_came_meanwhile_closes_what_waited(file, tmp_path, state, status):
    record = plan(settings(file), None).record
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
            champion(version, settings(file)), version=version, tags=tags if version == 7 else {}
        )
        for version in (7, 8)
    ]
    result = settle_waiting_retrainings(
        SimpleNamespace(versions=lambda name: versions), "m", tmp_path
    )
    assert [entry.status for entry in result] == [status, "rejected"]
    assert read_retrainings(tmp_path) == result
    assert ("ada" in result[0].note) is (state in ("approved", "rejected"))
    assert result[1].note == "no gain"


def test_what_a_killed_record_left_is_removed_by_the_next(file, tmp_path):
    record = plan(settings(file), champion(1, settings(file)), force=True).record
    record_start(tmp_path, record)
    dead = subprocess.Popen(["true"])
    dead.wait()
    left = tmp_path / "retrainings" / f".tmp-0001.json@{platform.node()}-{dead.pid}.0"
    left.write_text("{")
    record_start(tmp_path, record)
    assert [path.name for path in (tmp_path / "retrainings").iterdir()] == ["0001.json"]
