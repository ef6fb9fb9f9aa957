"""Links follow the page that `posttrain ui` serves, and fall back to its default port when it has ended."""

import json

from tasks.mlflow_environment import find_served_page, record_served_page
from tasks.tracking import Tracking


def test_links_follow_a_page_that_is_served(tmp_path, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    store = Tracking(None, tmp_path, "x").store
    assert store.build_ui_url("models/demo") == "http://127.0.0.1:5000/#/models/demo"
    record_served_page(tmp_path, "mlflow", "http://127.0.0.1:5003")
    assert store.build_ui_url("models/demo") == "http://127.0.0.1:5003/#/models/demo"
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
    assert store.build_ui_url("models/demo").startswith("http://127.0.0.1:5000/")


def test_a_remote_server_keeps_its_address(tmp_path):
    record_served_page(tmp_path, "mlflow", "http://127.0.0.1:5003")
    assert Tracking("http://team:80", tmp_path, "x").store.build_ui_url("a") == "http://team:80/#/a"
