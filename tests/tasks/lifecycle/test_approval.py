"""Approval requests and answers with a real store: tags, aliases, deadlines, and a champion that moved meanwhile."""

import dataclasses
import json
import time

import pytest
from helpers.waiting import delivered_run_id

from rl_core.errors import BackendError, DataError, SettingsError
from rl_core.storage import faults
from tasks.lifecycle import approval
from tasks.lifecycle.approval import (
    ApprovalRequest,
    answer_request,
    expire_requests,
    list_approval_requests,
    read_approval_request,
    reload_request,
    request_approval,
)
from tasks.tracking import Tracking


@pytest.fixture(scope="module")
def tracking(tmp_path_factory):
    output = tmp_path_factory.mktemp("approval")
    return Tracking(f"sqlite:///{output / 'mlflow.db'}", output, "approval")


@pytest.fixture
def model(tracking, request):
    """Create a registered model for the test with versions 1 to 3; 1 is champion."""
    name = request.node.name.replace("[", "-").replace("]", "")
    client = tracking.store.client
    client.create_registered_model(name)
    for _ in range(3):
        client.create_model_version(name, "file:///nowhere")
    tracking.set_champion(name, 1)
    return name


def request_approval_of(tracking, name, version=2, champion=1, seconds=60.0, **origin):
    request = ApprovalRequest(
        name=name,
        version=version,
        state="waiting",
        key=f"key{version}",
        champion=champion,
        deadline=float(int(time.time() + seconds)),
        reason="gain +5",
        **origin,
    )
    tracking.tag_version(name, version, {"gate.reason": "gain +5"})
    return request_approval(tracking, request)


def read_tags(tracking, name, version=2):
    return tracking.registry.fetch_version(name, version).tags


def test_a_request_is_tagged_on_the_version(tracking, model):
    request = request_approval_of(tracking, model, run="demo · 1", run_id="abcdef", flow_run_id="f")
    result = read_tags(tracking, model)
    assert result["approval.state"] == "waiting" and result["gate.decision"] == "awaiting approval"
    assert (
        result["approval.champion"] == "1" and result["approval.deadline"] == request.deadline_text
    )
    assert read_approval_request(tracking.registry.fetch_version(model, 2)) == dataclasses.replace(
        request, reason="gain +5"
    )
    assert tracking.list_versions(model)[1].aliases == ("challenger",)
    assert [
        request.name for request in list_approval_requests(tracking) if request.name == model
    ] == [model]


def test_approval_moves_the_champion_and_records_who_when_why(tracking, model):
    request = request_approval_of(tracking, model)
    done = answer_request(tracking, request, approve=True, answered_by="ada", note="fine")
    assert tracking.find_champion(model).version == 2
    result = read_tags(tracking, model)
    assert (result["approval.state"], result["approval.by"], result["approval.note"]) == (
        "approved",
        "ada",
        "fine",
    )
    assert result["gate.decision"] == "promoted" and result["approval.when"].endswith(" UTC")
    assert (
        done.summary
        == f"version 2 of {model} promoted: approved by ada on {done.when}: fine; gain +5"
    )
    assert tracking.list_versions(model)[1].aliases == ("champion",)


def test_no_leaves_the_champion(tracking, model):
    done = answer_request(
        tracking, request_approval_of(tracking, model), approve=False, answered_by="ada"
    )
    assert tracking.find_champion(model).version == 1 and done.state == "rejected"
    assert read_tags(tracking, model)["gate.decision"] == "rejected by hand"


def test_a_second_answer_is_refused(tracking, model):
    request = request_approval_of(tracking, model)
    answer_request(tracking, request, approve=False, answered_by="ada", note="worse")
    with pytest.raises(
        SettingsError,
        match=r"nothing to decide any more: version 2 of .* rejected by ada on .*: worse",
    ):
        answer_request(tracking, request, approve=True, answered_by="bob")
    assert tracking.find_champion(model).version == 1


def test_a_champion_that_moved_meanwhile_is_not_overtaken(tracking, model):
    request = request_approval_of(tracking, model)
    tracking.set_champion(model, 3)
    done = answer_request(tracking, request, approve=True, answered_by="ada")
    assert tracking.find_champion(model).version == 3 and done.state == "superseded"
    assert "version 3 is champion now, and the comparison was with version 1" in done.summary
    assert reload_request(tracking, request).state == "superseded"


def test_no_champion_then_and_one_now(tracking, model):
    request = request_approval_of(tracking, model, champion=None)
    assert answer_request(tracking, request, approve=True, answered_by="ada").state == "superseded"
    assert tracking.find_champion(model).version == 1


@pytest.mark.parametrize("how", ["answer", "expire"])
def test_the_deadline_rejects(tracking, model, how, monkeypatch):
    request = request_approval_of(tracking, model, seconds=30)
    monkeypatch.setattr(approval.time, "time", lambda: request.deadline + 1)
    if how == "answer":
        with pytest.raises(SettingsError, match=r"nobody approved it until .*asks again"):
            answer_request(tracking, request, approve=True, answered_by="ada")
    else:
        assert [late.state for late in expire_requests(tracking, model)] == ["timed out"]
        assert expire_requests(tracking, model) == []
    assert tracking.find_champion(model).version == 1
    assert read_tags(tracking, model)["gate.decision"] == "approval timed out"


def test_a_form_submitted_in_time_counts_though_it_arrives_late(tracking, model, monkeypatch):
    request = request_approval_of(tracking, model)
    monkeypatch.setattr(approval.time, "time", lambda: request.deadline + 1)
    assert (
        answer_request(tracking, request, approve=True, answered_by="ada", in_time=True).state
        == "approved"
    )


def test_asking_again_forgets_the_old_answer(tracking, model):
    answer_request(
        tracking, request_approval_of(tracking, model), approve=False, answered_by="ada", note="no"
    )
    request_approval_of(tracking, model)
    result = read_tags(tracking, model)
    assert (
        result["approval.state"] == "waiting"
        and not result["approval.by"]
        and not result["approval.note"]
    )


def test_requesting_runs_record_the_decision(tracking, model, tmp_path):
    with tracking.start_run("demo", tmp_path / "run") as run:
        run_id = delivered_run_id(run)
        record = tracking.output / model / "runs" / "1" / "run.json"
        record.parent.mkdir(parents=True)
        record.write_text(json.dumps({"run_id": run_id, "status": "waiting", "only": None}))
        request = request_approval_of(tracking, model, run="demo", run_id=run_id)
        run.set_tags({"result": f"policy 50%; {request.summary}"})
        run.set_description(f"| promote | {request.summary} |")
        run.flush(20)
    done = answer_request(
        tracking, reload_request(tracking, request), approve=True, answered_by="ada"
    )
    result = tracking.store.client.get_run(run_id).data.tags
    assert (
        result["result"] == f"policy 50%; {done.summary}"[:250] and result["approval"] == "approved"
    )
    assert result["mlflow.note.content"] == f"| promote | {done.summary} |"
    answer_of_page = {"before": request.summary, "now": done.summary}
    left = {"run_id": run_id, "status": "finished", "only": None, "answer": answer_of_page}
    assert json.loads(record.read_text()) == left


@pytest.mark.parametrize("written", [0, 1, 4])
def test_an_interrupted_answer_does_not_count(tracking, model, monkeypatch, written):
    """The state is the last of five tags: once it is written, all others are there."""
    request = request_approval_of(tracking, model)
    tag, done = tracking.store.client.set_model_version_tag, []

    def cut(*arguments):
        if len(done) == written:
            raise KeyboardInterrupt
        done.append(tag(*arguments))

    with monkeypatch.context() as patch:
        patch.setattr(tracking.store.client, "set_model_version_tag", cut)
        with pytest.raises(KeyboardInterrupt):
            answer_request(tracking, request, approve=False, answered_by="ada")
    assert reload_request(tracking, request).is_waiting
    answer_request(tracking, request, approve=False, answered_by="ada")
    result = read_tags(tracking, model)
    assert (result["approval.by"], result["gate.decision"]) == ("ada", "rejected by hand")


@pytest.mark.parametrize("end", ["", " …"], ids=["cut", "ellipsis"])
def test_an_answer_is_recorded_on_the_run_later(tracking, model, tmp_path, end):
    """Also on a truncated result, and repeatedly."""
    with tracking.start_run("demo", tmp_path / "run") as run:
        run_id = delivered_run_id(run)
        request = request_approval_of(tracking, model, run="demo", run_id=run_id)
        run.set_tags({"result": f"policy 50%; {request.summary}"[:40].rstrip() + end})
        run.set_description(f"| promote | {request.summary} |")
        run.flush(20)
    faults.configure_faults("approval.settled:1:raise")
    try:
        with pytest.raises(faults.InjectedFault):
            answer_request(
                tracking, reload_request(tracking, request), approve=False, answered_by="ada"
            )
    finally:
        faults.configure_faults(None)
    done = reload_request(tracking, request)
    assert (
        done.state == "rejected"
        and "approval" not in tracking.store.client.get_run(run_id).data.tags
    )
    for _ in range(2):
        approval.record_answer(tracking, done)
        result = tracking.store.client.get_run(run_id).data.tags
        assert (
            result["result"] == f"policy 50%; {done.summary}"[:250]
            and result["approval"] == "rejected"
        )
        assert result["mlflow.note.content"] == f"| promote | {done.summary} |"


def test_repeating_the_answer_finishes_one_that_was_killed(tracking, model, tmp_path):
    from posttrain.cli.approvals import decide_approval

    with tracking.start_run(f"{model} · 1", tmp_path / "run") as run:
        run_id = delivered_run_id(run)
        request = request_approval_of(tracking, model, run=f"{model} · 1", run_id=run_id)
    faults.configure_faults("approval.settled:1:raise")
    try:
        with pytest.raises(faults.InjectedFault):
            answer_request(tracking, request, approve=True, answered_by="ada")
    finally:
        faults.configure_faults(None)
    moved, uri = [], tracking.store.uri
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            type(tracking),
            "record_alias_move",
            lambda self, version, *rest: moved.append(version.version),
        )
        assert "answered before" in decide_approval(
            tracking.output, uri, model, approve=True, by="bob"
        )
        assert tracking.store.client.get_run(run_id).data.tags[
            "approval"
        ] == "approved" and moved == [2]
        tracking.set_champion(model, 3)
        decide_approval(tracking.output, uri, model, approve=True)
    # not moved back to the version approved before
    assert tracking.find_champion(model).version == 3 and moved == [2]


def test_a_missing_run_does_not_prevent_the_answer(tracking, model):
    done = answer_request(
        tracking,
        request_approval_of(tracking, model, run_id="0" * 32),
        approve=True,
        answered_by="ada",
    )
    assert done.state == "approved" and tracking.find_champion(model).version == 2


def test_the_same_comparison_with_another_version_of_the_champions_model(tracking, model):
    summary = {
        "registered_model": model,
        "model_version": 3,
        "key": "k",
        "champion_before": 1,
        "approval_timeout_seconds": 9,
        "reason": "gain over champion version 1 +5.0 points",
    }
    request = approval.build_approval_request(summary, 2, run="r")
    assert request.champion == 2 and request.reason == "gain over champion version 2 +5.0 points"
    assert request.run == "r" and approval.build_approval_request(summary, None).champion is None


def test_a_run_is_selected_by_name_pipeline_or_id(tracking, model):
    from posttrain.cli.approvals import find_pending_request

    request = request_approval_of(tracking, model, run=f"{model} · 2026", run_id="0123456789")
    known = list_approval_requests(tracking)
    for text in (f"{model} · 2026", model, "012345", "0123456789"):
        assert find_pending_request(tracking, known, text).run_id == request.run_id
    with pytest.raises(DataError, match="no run"):
        find_pending_request(tracking, known, "01234")  # too short to mean an id
    request_approval_of(tracking, model, version=3, run=f"{model} · 2027", run_id="9876543210")
    with pytest.raises(SettingsError, match="matches several pending runs"):
        find_pending_request(tracking, list_approval_requests(tracking), model)


def test_undecidable_requests_are_refused(tracking, model, tmp_path):
    from posttrain.cli.approvals import decide_approval, find_pending_request

    with tracking.start_run("unasked · 1", tmp_path / "run") as run:
        delivered_run_id(run)
    with pytest.raises(SettingsError, match="'unasked' asked for no approval"):
        find_pending_request(tracking, [], "unasked")
    request = request_approval_of(tracking, model, run=f"{model} · 2026", run_id="a" * 32)
    answer_request(tracking, request, approve=False, answered_by="ada")
    with pytest.raises(
        SettingsError, match=f"'{model}' is not pending: version 2 .* rejected by ada"
    ):
        find_pending_request(tracking, list_approval_requests(tracking), model)
    uri = tracking.store.uri
    with pytest.raises(SettingsError, match=r"is not pending: version 2 .* rejected by ada"):
        # another answer than the recorded one
        decide_approval(tracking.output, uri, model, approve=True)
    assert "answered before: version 2" in decide_approval(
        tracking.output, uri, model, approve=False, by="ada"
    )
    with pytest.raises(SettingsError, match="name the run"):
        decide_approval(tracking.output, uri, None, approve=True)
    with pytest.raises(
        DataError, match=r"no runs in sqlite:.*name the run's output folder with --output"
    ):
        decide_approval(tmp_path, None, "demo", approve=True)
    assert not (tmp_path / "mlflow").exists()


def test_the_command_shows_then_decides(tracking, model):
    from posttrain.cli.approvals import decide_approval

    request_approval_of(tracking, model, run=f"{model} · 2026", run_id="b" * 32)
    uri = tracking.store.uri
    assert f"{model} · 2026" in decide_approval(tracking.output, uri, None, approve=None)
    shown = decide_approval(tracking.output, uri, model, approve=None, store_options=" --output x")
    assert (
        "waits for approval until" in shown
        and f"posttrain promote --output x --approve '{model} · 2026' --note 'WHY'" in shown
    )
    assert tracking.find_champion(model).version == 1
    assert "promoted: approved by me on" in decide_approval(
        tracking.output, uri, model, approve=True, by="me"
    )
    assert tracking.find_champion(model).version == 2


@pytest.mark.parametrize(
    ("known", "asks", "decision"),
    [
        (None, True, "awaiting approval"),
        ({"key": "k1", "state": "waiting"}, False, "awaiting approval"),
        ({"key": "k1", "state": "approved"}, False, "promoted"),
        ({"key": "k1", "state": "rejected"}, False, "rejected"),
        ({"key": "k1", "state": "timed out"}, False, "rejected"),
        (
            {"key": "k1", "state": "superseded"},
            True,
            "awaiting approval",
        ),  # the champion of then is back
        ({"key": "k2", "state": "rejected"}, True, "awaiting approval"),  # of another comparison
    ],
)
def test_a_finished_gate_asks_once_and_takes_the_answer(monkeypatch, known, asks, decision):
    from types import SimpleNamespace

    from flows.post_training import _describe_decision
    from tasks.pipeline.run_options import FlowRunAddress, RunOptions
    from tasks.pipeline.stage_result import StageResult
    from tasks.stages import promote

    summary = {
        "decision": "awaiting approval",
        "registered_model": "m",
        "model_version": 2,
        "champion_before": 1,
        "key": "k1",
        "reason": "better",
        "approval_timeout_seconds": 60.0,
        "note": "",
    }
    result = StageResult("promote", "f", "d", "k1", True, 0.0, "stage-run", summary)
    before = (
        ApprovalRequest(name="m", version=2, champion=1, deadline=0.0, **known) if known else None
    )
    calls, tags, waiting = [], {}, []
    monkeypatch.setattr(promote, "read_approval_request", lambda version: before)
    monkeypatch.setattr(
        promote, "request_approval", lambda tracking, request: calls.append(request) or request
    )
    pipeline_run = SimpleNamespace(
        tracking=SimpleNamespace(registry=SimpleNamespace(fetch_version=lambda name, number: None)),
        parent=SimpleNamespace(name="run", run_id="id", set_tag=tags.__setitem__),
        await_approval=waiting.append,
        resumed=False,
        options=RunOptions(flow_run=FlowRunAddress(id="f", api="http://x")),
    )
    results = promote._attach_approval_request(pipeline_run, result, 1)
    assert len(calls) == asks and results.summary["decision"] == decision
    waits = decision == "awaiting approval"
    assert (waiting[0] is not None) is waits and (tags["approval"] == "waiting") is waits
    if asks:
        assert (calls[0].flow_run_id, calls[0].prefect_api) == ("f", "http://x")
        assert (calls[0].run, calls[0].run_id, calls[0].stage_run_id, calls[0].key) == (
            "run",
            "id",
            "stage-run",
            "k1",
        )
    promoted = dataclasses.replace(result, summary={**summary, "decision": "promoted"})
    assert promote._attach_approval_request(pipeline_run, promoted, 1) is promoted
    # The run's own tag is in the words of the answer, as whoever answered has written it on the run.
    words = {
        "approved": "promoted",
        "rejected": "rejected by hand",
        "timed out": "approval timed out",
    }
    description = _describe_decision(
        SimpleNamespace(postponed_reason="", results={"promote": results})
    )
    assert description == words.get(results.summary["approval"], "awaiting approval")
    assert (
        _describe_decision(SimpleNamespace(postponed_reason="", results={"promote": promoted}))
        == "promoted"
    )


KILLED = ["approval.given", "alias.timed", "alias.moved"]


def kill_approval(point, tracking, request):
    """End the process of an approval at a fault point."""
    faults.configure_faults(f"{point}:1:raise")
    try:
        with pytest.raises((BackendError, faults.InjectedFault)):
            answer_request(tracking, request, approve=True, answered_by="ada", note="fine")
    finally:
        faults.configure_faults(None)
    assert reload_request(tracking, request).is_waiting


def is_approved(tracking, name):
    """Return whether the version is champion with its approver recorded."""
    result = read_tags(tracking, name)
    assert tracking.list_versions(name)[1].aliases == ("champion",)  # no longer challenger
    return (result["approval.state"], result["approval.by"], result["approval.note"]) == (
        "approved",
        "ada",
        "fine",
    )


@pytest.mark.parametrize("point", KILLED)
def test_an_approval_that_was_killed_is_applied_by_the_next_who_approves(tracking, model, point):
    request = request_approval_of(tracking, model)
    kill_approval(point, tracking, request)
    assert answer_request(tracking, request, approve=True, answered_by="bob").by == "ada"
    assert is_approved(tracking, model)


@pytest.mark.parametrize("point", KILLED)
def test_nobody_can_reject_what_was_approved_before_a_kill(tracking, model, point):
    request = request_approval_of(tracking, model)
    kill_approval(point, tracking, request)
    with pytest.raises(SettingsError, match=r"nothing to decide any more.*approved by ada"):
        answer_request(tracking, request, approve=False, answered_by="bob")
    assert is_approved(tracking, model)


@pytest.mark.parametrize("seconds", [60.0, -5.0])
def test_the_clock_applies_an_approval_that_was_killed(tracking, model, monkeypatch, seconds):
    """Also after the deadline: the answer was in time, and the alias may have moved."""
    request = request_approval_of(tracking, model)
    kill_approval("alias.moved", tracking, request)
    now = request.deadline - seconds
    monkeypatch.setattr(approval.time, "time", lambda: now)
    assert [expired.state for expired in expire_requests(tracking, model)] == ["approved"]
    assert is_approved(tracking, model) and expire_requests(tracking, model) == []


def test_an_approval_that_was_killed_does_not_overtake_another_champion(tracking, model):
    request = request_approval_of(tracking, model)
    kill_approval("approval.given", tracking, request)
    tracking.set_champion(model, 3)
    assert [expired.state for expired in expire_requests(tracking, model)] == ["superseded"]
    assert tracking.find_champion(model).version == 3


def test_asking_again_forgets_an_approval_that_was_killed(tracking, model):
    request = request_approval_of(tracking, model)
    kill_approval("approval.given", tracking, request)
    again = request_approval_of(tracking, model)
    assert (
        again.given == ""
        and not read_tags(tracking, model)["approval.given"]
        and expire_requests(tracking, model) == []
    )
