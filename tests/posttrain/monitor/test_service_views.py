"""Tab of the training service, from a handmade store; reading changes nothing."""

import json
import re
from pathlib import Path

import pytest
from helpers.service_clients import create, loss, random_data, sample, update

from posttrain.monitor import service_views
from posttrain.monitor.charts import MISSING_VALUE, PageSelection
from posttrain.monitor.reader import RunReader
from posttrain.monitor.views import TAB_NAMES, build_view
from posttrain.training_service.store import ResultBody, ServiceStore
from posttrain.training_service.store.overview import read_store_overview
from rl_core.errors import BackendError, ServiceError

NOW = 1_800_000_000.0  # a whole minute


class FakeClock:
    now = NOW

    def __call__(self):
        return self.now


def create_store(folder, port=1):
    """Create a store after one run's requests: of 4 finished ones one failed; one runs, two wait."""
    folder.mkdir(parents=True)
    (folder / "settings.json").write_text(json.dumps({"server": {"port": port}, "store": ""}))
    clock = FakeClock()
    store = ServiceStore(f"sqlite:///{folder}/service.db", clock)
    store.create_key("anna")
    requests = [
        create("s:train:0"),
        loss("s:train:0", 1, random_data(1)),
        update("s:train:0", 2),
        update("s:train:0", 3),
    ]
    ids = [store.accept_request(request).request_id for request in requests]
    for number, request_id in enumerate(ids):
        clock.now = NOW + 60 * number + 2
        store.claim_requests([request_id])
        clock.now += 3
        bad = ServiceError("the <b>gradient</b> is not finite", "user")
        store.finish_requests([(request_id, bad if number == 3 else ResultBody(b"{}", "json"))])
    clock.now = NOW + 200
    (running, *_) = [
        store.accept_request(sample("s:sample:0", number)).request_id for number in range(3)
    ]
    store.claim_requests([running])
    return store


@pytest.fixture
def service_blocks(tmp_path, monkeypatch):
    store = create_store(tmp_path / "service")
    monkeypatch.setattr(service_views.time, "time", lambda: NOW + 245.0)
    view = build_view(RunReader(tmp_path), PageSelection(), "service")
    json.dumps(view, allow_nan=False)
    store.close()
    return {block["id"]: block for block in view["blocks"]}


def read_rows(block):
    return [
        [cell["t"] if isinstance(cell, dict) else cell for cell in row] for row in block["rows"]
    ]


def test_queue_waits_rates_runs_and_errors(service_blocks):
    tiles = {
        item["label"]: (item["value"], item["sub"]) for item in service_blocks["service"]["items"]
    }
    assert tiles["server"] == ("no answer", "port 1")
    assert tiles["open requests"] == ("3", "2 wait, 1 run")
    assert tiles["oldest waits"] == ("45 s", "since its acceptance")
    assert tiles["errors"][0] == "1" and tiles["training runs"][0] == "1"
    assert tiles["requests/s"][0] == f"{1 / 65:.2f}"  # that of the previous minute, within 65 s
    kinds = {row[0]: row[1:] for row in read_rows(service_blocks["kinds"])}
    assert kinds["sample"][:2] == ["2", "1"] and kinds["sample"][2] == MISSING_VALUE
    assert kinds["create model"] == ["0", "0", "2.0 s", "2.0 s", "2.0 s", "3.0 s", "3.0 s", "3.0 s"]
    assert kinds["optim step"][2:5] == ["2 min 02 s", "3 min 02 s", "3 min 02 s"]
    (chart,) = service_blocks["rates"]["charts"]
    done, failed = chart["lines"]
    assert done["x"] == [-4.0, -3.0, -2.0, -1.0] and done["y"] == [1 / 60] * 3 + [0.0]
    assert failed["y"] == [0.0, 0.0, 0.0, 1 / 60]
    assert read_rows(service_blocks["runs"]) == [
        ["s:train:0", "key-1", "", "creating", "0", "0", "4 min 05 s ago"]
    ]
    assert read_rows(service_blocks["errors"]) == [
        ["1 min 00 s ago", "optim step", "user", "s:train:0", "the <b>gradient</b> is not finite"]
    ]


def test_missing_service_and_store_are_reported(tmp_path):
    assert "service" in TAB_NAMES
    (note,) = build_view(RunReader(tmp_path), PageSelection(), "service")["blocks"]
    assert re.search(r"posttrain service up service --set folder=.*/service$", note["lines"][-1])
    spaced = tmp_path / "my team"
    (note,) = build_view(RunReader(spaced), PageSelection(), "service")["blocks"]
    assert note["lines"][-1].endswith(f"--set 'folder={spaced}/service'")
    (tmp_path / "service").mkdir()
    (tmp_path / "service" / "settings.json").write_text("{")
    (note,) = build_view(RunReader(tmp_path), PageSelection(), "service")["blocks"]
    assert "there is no store" in note["lines"][0]
    (tmp_path / "service" / "service.db").write_bytes(
        b"no database at all, but long enough to be read as one" * 40
    )
    (note,) = build_view(RunReader(tmp_path), PageSelection(), "service")["blocks"]
    assert "cannot be read" in note["lines"][0]


def test_reading_changes_nothing(tmp_path):
    store = create_store(tmp_path / "a name with ünïcode" / "service")
    url = f"sqlite:///{tmp_path}/a name with ünïcode/service/service.db"
    requests_before, changes_before = store.list_requests("s:train:0"), store.read_change_counter()
    overview = read_store_overview(url, NOW)
    assert (
        sum(minute.done + minute.failed for minute in overview.minutes) == 4
        and overview.errors[0].category == "user"
    )
    assert (
        store.read_change_counter() == changes_before
        and store.list_requests("s:train:0") == requests_before
    )
    store.close()
    files = {path: path.read_bytes() for path in Path(tmp_path).rglob("*.db")}
    assert read_store_overview(url, NOW).num_runs == 1  # of a stopped service
    assert {path: path.read_bytes() for path in Path(tmp_path).rglob("*.db")} == files
    with pytest.raises(BackendError, match="there is no store"):
        read_store_overview(f"sqlite:///{tmp_path}/none.db", NOW)


def test_late_queue_points_at_the_worker(tmp_path, monkeypatch):
    (tmp_path / "service").mkdir()
    (tmp_path / "service" / "settings.json").write_text("{}")
    store = ServiceStore(f"sqlite:///{tmp_path}/service/service.db", FakeClock())
    store.accept_request(sample("s:sample:0", 1))
    store.close()
    monkeypatch.setattr(
        service_views, "time", type("T", (), {"time": staticmethod(lambda: NOW + 31.0)})
    )
    tiles = build_view(RunReader(tmp_path), PageSelection(), "service")["blocks"][0]["items"]
    assert ("31 s", "nothing is computed: is the worker up?") in [
        (item["value"], item["sub"]) for item in tiles
    ]
