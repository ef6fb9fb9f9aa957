"""Links to pages of MLflow: relative within MLflow, elsewhere to the page that is served, else the command for it."""

import json

from tasks.mlflow_environment import find_served_page, record_served_page
from tasks.tracking import Tracking
from tasks.tracking.store import TrackingStore

LINK = "#/experiments/3/runs/r/traces?workflowType=machine_learning"


def test_links_follow_a_page_that_is_served(tmp_path, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    store = Tracking(None, tmp_path, "x").store
    assert store.build_run_link("r", "3", tab="traces") == LINK
    assert (
        store.resolve_link(LINK) == ""
    )  # nobody serves it: no address of a server that may be another team's
    record_served_page(tmp_path, "mlflow", "http://127.0.0.1:5003")
    assert store.resolve_link(LINK) == f"http://127.0.0.1:5003/{LINK}"
    assert find_served_page(tmp_path, "prefect") == ""
    record_path = tmp_path / "mlflow" / "page.json"
    record = json.loads(record_path.read_text())
    for stale in (
        {**record, "created": record["created"] - 1},
        {**record, "pid": 2**30},
        {"url": "x"},
        [],
        None,
    ):
        # another process with its number, no process, another version's file
        record_path.write_text(json.dumps(stale))
        assert find_served_page(tmp_path, "mlflow") == ""
    record_path.write_text("{")
    assert store.resolve_link(LINK) == ""


def test_a_remote_server_keeps_its_address(tmp_path):
    record_served_page(tmp_path, "mlflow", "http://127.0.0.1:5003")
    tracking = Tracking("http://user:word@team:80/", tmp_path, "x")
    assert tracking.serves_pages and tracking.store.resolve_link(LINK) == f"http://team:80/{LINK}"


def test_other_pages_get_the_command_while_nobody_serves_the_run(tmp_path, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setattr(TrackingStore, "experiment_id", "3")
    tracking = Tracking(None, tmp_path / "my runs", "x")
    text = f"[Traces]({LINK}) · [Prefect](http://p/runs) ![a](#/b)"
    assert tracking.store.resolve_links(text) == "Traces · [Prefect](http://p/runs) ![a](#/b)"
    command = f"posttrain ui --output '{tmp_path}/my runs'"
    assert tracking.format_run_reference("r") == f"MLflow run: `{command}` shows it"
    assert tracking.build_run_url("r") == "" == tracking.build_runs_url()
    assert tracking.format_run_reference("") == ""
    record_served_page(tmp_path / "my runs", "mlflow", "http://127.0.0.1:5003")
    assert tracking.store.resolve_links(text).startswith(f"[Traces](http://127.0.0.1:5003/{LINK})")
    assert tracking.format_run_reference("r", "Traces", tab="traces") == (
        f"[Traces](http://127.0.0.1:5003/{LINK})"
    )
