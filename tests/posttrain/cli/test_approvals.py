"""`posttrain promote --approve` while Prefect or MLflow do not answer: no dead links, the step that helps."""

from types import SimpleNamespace

import pytest

from flows.runtime import approval_wait
from posttrain.cli import approvals
from posttrain.cli.main import main
from tasks.lifecycle import promotion
from tasks.tracking import Tracking


@pytest.mark.parametrize(
    ("problem", "step"),
    [
        ("no answer", "repeat this command once Prefect's server answers again"),
        ("", "resume it on its page: http://127.0.0.1:4/runs/flow-run/f1"),
    ],
)
def test_a_flow_run_that_cannot_be_resumed_has_a_link_only_if_its_server_answers(
    tmp_path, monkeypatch, problem, step
):
    def refuse(*_, **__):
        raise ConnectionError("refused")

    asked = []
    monkeypatch.setattr(approval_wait, "resume_waiting_flow_run", refuse)
    monkeypatch.setattr(approvals, "find_health_problem", lambda url: asked.append(url) or problem)
    request = SimpleNamespace(
        prefect_api="http://127.0.0.1:4/api", flow_run_id="f1", by="me", note=""
    )
    (line,) = approvals._resume_waiting_flow(request, True, tmp_path)
    assert line.endswith(f"(ConnectionError: refused); {step}")
    assert line.count("http://") == (not problem) and asked == ["http://127.0.0.1:4/api/health"]


@pytest.mark.parametrize("served", [True, False])
def test_the_evidence_is_a_page_that_is_served_or_the_command_that_shows_it(
    tmp_path, monkeypatch, served
):
    request = SimpleNamespace(run="demo · 1", summary="a question", stage_run_id="r")
    page = "http://mlflow/#/r"
    monkeypatch.setattr(Tracking, "find_run_page", lambda *_: page if served else "")
    monkeypatch.setattr(approvals, "find_pending_request", lambda *_: request)
    text = approvals.decide_approval(tmp_path, None, "demo", approve=None)
    command = f"`posttrain ui --output {tmp_path}` shows it"
    assert text.startswith(
        f"a question\n\nevidence  {page if served else command}\napprove   posttrain"
    )


@pytest.mark.parametrize("decision", ["--approve", "--reject"])
def test_a_decision_without_a_run_moves_no_alias(decision, monkeypatch, tmp_path, capsys):
    """An unset variable of a script, as in `--reject "$RUN"`, once moved the champion back."""
    moved = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(promotion, "promote_version", lambda *arguments: moved.append(arguments))
    assert main(["promote", "demo", decision, "", "--note", "worse"]) == 2
    assert moved == [] and "the name of the run is empty" in capsys.readouterr().err
