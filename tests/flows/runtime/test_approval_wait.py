"""A run that waits for a person: in its process, suspended as a deployment, and if the champion changes meanwhile."""

import dataclasses
import time
from types import SimpleNamespace

import pytest
from prefect.exceptions import Pause

from flows.runtime import approval_wait as waiting
from flows.runtime.run_summary import PipelineResult, format_approval_instructions
from tasks.lifecycle.approval import ApprovalRequest
from tasks.pipeline.stage_result import StageResult

REQUEST = ApprovalRequest(
    name="demo",
    version=2,
    state="waiting",
    key="k" * 16,
    champion=1,
    deadline=0.0,
    asked="2026-01-01 10:00:00 UTC",
    run="demo · 1",
    flow_run_id="here",
)


def test_the_terminal_names_the_page_of_the_form_where_a_server_has_one():
    settings = SimpleNamespace(output="outputs", name="demo", tracking=SimpleNamespace(uri=None))
    served = dataclasses.replace(REQUEST, prefect_api="http://127.0.0.1:4310/api")
    lines = format_approval_instructions(settings, served).splitlines()
    assert lines[1] == "form      http://127.0.0.1:4310/runs/flow-run/here" and lines[2].startswith(
        "approve   "
    )
    for api in ("", "https://elsewhere/api/accounts/1/workspaces/2"):
        assert "form" not in format_approval_instructions(
            settings, dataclasses.replace(REQUEST, prefect_api=api)
        )


class World:
    """Tracking store and Prefect as far as waiting uses them."""

    def __init__(self, monkeypatch, tmp_path):
        self.request = dataclasses.replace(REQUEST, deadline=time.time() + 60)
        self.settings = SimpleNamespace(
            output=str(tmp_path), name="demo", experiment="demo", tracking=SimpleNamespace(uri=None)
        )
        self.outcomes = []  # states of the next answers; [] = as answered
        self.forms = []  # returned by pausing or suspending; an exception is raised
        self.keys, self.lines, self.runs = [], [], 0
        self.events = []
        monkeypatch.setattr(waiting, "emit_event", lambda **event: self.events.append(event))
        for name in ("reload_request", "answer_request", "expire_requests"):
            monkeypatch.setattr(waiting, name, getattr(self, name))
        store = SimpleNamespace(
            format_run_reference=lambda run, words, tab: (
                f"[{words}](http://mlflow/{run}/{tab})" if run else ""
            )
        )
        monkeypatch.setattr(waiting, "Tracking", lambda *_: store)
        monkeypatch.setattr(waiting, "pause_flow_run", self.wait_for_signal)
        monkeypatch.setattr(waiting, "suspend_flow_run", self.wait_for_signal)
        monkeypatch.setattr(waiting, "resume_waiting_flow_run", lambda *_, **__: None)
        monkeypatch.setattr(waiting, "POLL_SECONDS", 0.01)
        self.deploy(monkeypatch, None)

    def deploy(self, monkeypatch, deployment, flow_run="here"):
        monkeypatch.setattr(waiting, "deployment", SimpleNamespace(id=deployment))
        monkeypatch.setattr(
            waiting, "flow_run", SimpleNamespace(id=flow_run, parent_flow_run_id=None)
        )

    def reload_request(self, tracking, request):
        return self.request

    def answer_request(self, tracking, request, *, approve, answered_by, note, in_time=False):
        state = self.outcomes.pop(0) if self.outcomes else "approved" if approve else "rejected"
        self.request = dataclasses.replace(
            self.request, state=state, by=answered_by, when="then", note=note
        )

    def expire_requests(self, tracking, name):
        self.request = dataclasses.replace(self.request, state="timed out")
        return [self.request]

    def wait_for_signal(self, *, wait_for_input, timeout, key, poll_interval=0):
        self.keys.append(key)
        self.form_class = wait_for_input
        make_form = self.forms.pop(0)
        if isinstance(make_form, BaseException):
            raise make_form
        return make_form

    def run_once(self):
        self.runs += 1
        if self.runs > 1:  # compared again, and requested again
            self.request = dataclasses.replace(
                self.request, state="waiting", asked=f"run {self.runs}", champion=5
            )
        summary = {"decision": "awaiting approval", "note": self.request.summary}
        stage = StageResult("promote", "f", "d", "k", False, 1.0, "", summary)
        rows = [
            {"stage": "sft", "note": "trained"},
            {"stage": "promote", "note": self.request.summary},
        ]
        return PipelineResult({"promote": stage}, rows, "url", 1.0, waiting=self.request)

    def decide_candidate(self):
        return waiting.run_with_approval(self.settings, self.run_once, self.lines.append)


@pytest.fixture
def world(monkeypatch, tmp_path):
    return World(monkeypatch, tmp_path)


def make_form(decision="approve"):
    return waiting.Approval(decision=decision, reviewer="ada", note="fine")


@pytest.mark.parametrize(
    ("decision", "state", "became"),
    [("approve", "approved", "promoted"), ("reject", "rejected", "rejected")],
)
def test_the_form_decides_and_the_result_says_it(world, decision, state, became):
    world.forms = [make_form(decision)]
    result = world.decide_candidate()
    assert (
        world.request.state == state
        and world.request.by == "ada (Prefect form)"
        and world.runs == 1
    )
    assert result.waiting is None and result.results["promote"].summary["decision"] == became
    assert [row["note"] for row in result.rows] == ["trained", world.request.summary]
    assert (
        "--approve 'demo · 1' --note" in world.lines[0]
        and world.lines[-1] == f"promote: {world.request.summary}"
    )


@pytest.mark.parametrize(
    ("run", "evidence"),
    [("stage", "[the files in MLflow](http://mlflow/stage/artifacts)."), ("", "the files in the ")],
)
def test_the_form_links_its_evidence(world, run, evidence):
    world.request = dataclasses.replace(world.request, stage_run_id=run)
    world.forms = [make_form()]
    world.decide_candidate()
    assert evidence in world.form_class._description


def test_nothing_to_decide(world):
    world.run_once = lambda: PipelineResult({}, [], "", 1.0)
    assert world.decide_candidate().waiting is None and world.keys == [] and world.lines == []


def test_a_new_champion_runs_it_again_under_another_key(world):
    world.forms, world.outcomes = [make_form(), make_form()], ["superseded"]
    result = world.decide_candidate()
    assert world.runs == 2 and world.request.state == "approved"
    assert len(set(world.keys)) == 2  # Prefect pauses once for each
    assert result.results["promote"].summary["decision"] == "promoted"


def test_an_answer_from_elsewhere_ends_the_pause_if_prefect_fails(world):
    class Unreachable(Exception):
        pass

    def answered_meanwhile(*, key, **_):
        world.request = dataclasses.replace(world.request, state="rejected", by="bob")
        raise Unreachable("no API")

    waiting.pause_flow_run = answered_meanwhile  # restored by the fixture's monkeypatch
    assert world.decide_candidate().results["promote"].summary["decision"] == "rejected"
    assert world.request.by == "bob"


def test_the_deadline_ends_the_wait(world):
    world.request = dataclasses.replace(world.request, deadline=time.time() - 1)
    assert world.decide_candidate().results["promote"].summary["decision"] == "rejected"
    assert world.keys == [] and "nobody approved it" in world.lines[-1]


def test_a_deployment_is_suspended_and_comes_back_without_running_again(world, monkeypatch):
    world.deploy(monkeypatch, "deployment")
    world.forms = [Pause(), make_form()]
    with pytest.raises(Pause):
        world.decide_candidate()
    # After the last heartbeat, so that the run is not taken for one whose process has died.
    assert world.events == [
        {
            "event": waiting.WAITING_EVENT,
            "resource": {"prefect.resource.id": "prefect.flow-run.here"},
        }
    ]
    world.request = dataclasses.replace(
        world.request, deadline=time.time() - 1
    )  # a worker was free only later
    result = world.decide_candidate()
    assert world.runs == 1 and world.request.state == "approved" and result.waiting is None
    assert result.rows[1]["note"] == world.request.summary and world.keys[0] == world.keys[1]
    assert list(waiting.Path(world.settings.output).rglob("*.json")) == []


def test_a_deployments_second_run_leaves_the_question_to_the_first(world, monkeypatch):
    world.deploy(monkeypatch, "deployment", "another")
    assert world.decide_candidate().waiting == world.request and world.keys == []
