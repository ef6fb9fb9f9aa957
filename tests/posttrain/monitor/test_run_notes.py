"""Notes and tags of runs: stored with the run, never overwritten by a page that has not seen them."""

import importlib.util
import json
import threading

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from helpers.monitor_runs import make_run

from posttrain.monitor.charts import PageSelection
from posttrain.monitor.page_responses import PageResponses
from posttrain.monitor.reader import RunReader
from posttrain.monitor.run_notes import (
    MAX_BODY_BYTES,
    handle_notes_request,
    read_run_notes,
    save_run_notes,
)
from posttrain.monitor.server import _add_view_routes
from posttrain.monitor.views import build_view
from posttrain.web.errors import HTTPError


def send(folder, note="text", tags=(), revision=0):
    body = json.dumps({"note": note, "tags": list(tags), "revision": revision}).encode()
    return handle_notes_request(folder, body)


def test_a_note_is_stored_with_the_run_and_shown(tmp_path):
    home = make_run(tmp_path, status="FINISHED")
    run_folder = home / "runs" / "2027-01-15-08-00-00"
    status, stored = send(run_folder, "first\nsecond <b>", [" base  line ", "", "good", "good"])
    assert status == 200
    assert (stored["revision"], stored["tags"]) == (1, ["base line", "good"])
    on_disk = json.loads((run_folder / "notes/notes.json").read_text())
    assert on_disk == stored
    view = build_view(RunReader(tmp_path), PageSelection(), "overview")
    (block,) = [block for block in view["blocks"] if block["kind"] == "notes"]
    assert block["note"] == "first\nsecond <b>" and block["run"] == "demo/2027-01-15-08-00-00"
    assert RunReader(tmp_path).list_runs()[0].title.endswith("finished #base line #good")


def test_a_page_that_has_not_seen_the_newest_note_overwrites_nothing(tmp_path):
    assert send(tmp_path, "first tab")[0] == 200
    status, stored = send(tmp_path, "second tab")  # still shows revision 0
    assert status == 409 and stored["note"] == "first tab"
    assert read_run_notes(tmp_path).note == "first tab"
    # The same text with other tags is a conflict, too.
    assert send(tmp_path, "first tab", ["mine"])[0] == 409
    assert send(tmp_path, "second tab", revision=1)[0] == 200
    assert read_run_notes(tmp_path).revision == 2


def test_of_many_simultaneous_saves_one_wins(tmp_path):
    results = []

    def save(number):
        results.append((save_run_notes(tmp_path, f"note {number}", [], 0)[0], f"note {number}"))

    threads = [threading.Thread(target=save, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    winners = [note for is_saved, note in results if is_saved]
    assert winners == [read_run_notes(tmp_path).note]
    assert read_run_notes(tmp_path).revision == 1


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        (b"no json", 400, "expected a JSON object"),
        (b"[" * 100_000, 400, "expected a JSON object"),
        (b'{"note": 3, "tags": [], "revision": 0}', 400, "note must be text"),
        (b'{"note": "", "tags": "a", "revision": 0}', 400, "note must be text"),
        (b'{"note": "", "tags": [], "revision": -1}', 400, "note must be text"),
        (b'{"note": "", "tags": [], "revision": true}', 400, "note must be text"),
        (b" " * (MAX_BODY_BYTES + 1), 413, "more than 200,000 bytes"),
    ],
)
def test_bad_requests_are_refused_in_words(tmp_path, body, status, words):
    actual, answer = handle_notes_request(tmp_path, body)
    assert actual == status and words in answer["error"]
    assert list(tmp_path.iterdir()) == []


def test_long_notes_and_tags_are_refused(tmp_path):
    with pytest.raises(HTTPError, match="20,001 characters; up to 20,000 fit"):
        save_run_notes(tmp_path, "x" * 20_001, [], 0)
    with pytest.raises(HTTPError, match="21 tags; up to 20 fit"):
        save_run_notes(tmp_path, "", [str(n) for n in range(21)], 0)
    with pytest.raises(HTTPError, match="has 41 characters"):
        save_run_notes(tmp_path, "", ["x" * 41], 0)
    assert handle_notes_request(None, b"{}")[0] == 404


def test_lone_surrogates_do_not_break_later_answers(tmp_path):
    status, stored = send(tmp_path, "bad \ud800", ["\udfff"])
    assert status == 200 and (stored["note"], stored["tags"]) == ("bad ?", ["?"])


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"note": "a"}',
        '{"note":"a","tags":1,"revision":1,"time":1}',
        '{"note":"a","tags":[],"revision":1e400,"time":1}',
        '{"note":"a","tags":[],"revision":Infinity,"time":1}',
        '{"note":"a","tags":[],"revision":-3,"time":1}',
        '{"note":"a","tags":[],"revision":1,"time":1e400}',
    ],
)
def test_an_unreadable_file_counts_as_no_note(tmp_path, text):
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes/notes.json").write_text(text)
    assert read_run_notes(tmp_path).revision == 0
    assert send(tmp_path, "new")[0] == 200
    assert read_run_notes(tmp_path).note == "new"
    (damaged,) = (tmp_path / "notes").glob("notes.damaged-*.json")
    assert damaged.read_text() == text


def test_a_removed_run_is_not_created_again(tmp_path):
    status, answer = send(tmp_path / "removed")
    assert status == 404 and "were removed" in answer["error"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(importlib.util.find_spec("gradio") is None, reason="needs posttrain[monitor]")
def test_the_server_saves_for_its_page_alone(tmp_path):
    from posttrain.monitor.server import build_app

    make_run(tmp_path, status="FINISHED")
    client = TestClient(build_app(RunReader(tmp_path)), base_url="http://127.0.0.1:7860")
    values = {"note": "hello", "tags": [], "revision": 0}
    address = "/notes?run=demo/2027-01-15-08-00-00"
    client.headers["Authorization"] = f"Bearer {client.get('/view').json()['token']}"
    foreign = client.post(address, json=values, headers={"Origin": "http://evil.example"})
    assert foreign.status_code == 403
    assert client.post("/notes?run=../../etc", json=values).status_code == 404
    assert client.get(address).status_code != 200 or "hello" not in client.get(address).text
    answer = client.post(address, json=values, headers={"Origin": "http://127.0.0.1:7860"})
    assert answer.status_code == 200 and answer.json()["revision"] == 1
    assert client.post(address, json=values).status_code == 409


def test_a_save_needs_the_token_that_the_page_received(tmp_path):
    make_run(tmp_path, status="FINISHED")
    reader = RunReader(tmp_path)
    app = FastAPI()
    _add_view_routes(app, PageResponses(reader), reader)
    client = TestClient(app)
    values = {"note": "hello", "tags": [], "revision": 0}
    address = "/notes?run=demo/2027-01-15-08-00-00"
    old_token = PageResponses(reader).token  # of an earlier start
    for headers in ({}, {"Authorization": "Bearer "}, {"Authorization": f"Bearer {old_token}"}):
        answer = client.post(address, json=values, headers=headers)
        assert answer.status_code == 403 and "was restarted" in answer.json()["error"]
    run_folder = tmp_path / "demo/runs/2027-01-15-08-00-00"
    assert not (run_folder / "notes").exists()
    first = client.get("/view").json()
    again = client.get("/view", params={"seen": first["version"]}).json()
    assert again["token"] == first["token"] and "blocks" not in again
    headers = {"Authorization": f"Bearer {first['token']}"}
    assert client.post(address, json=values, headers=headers).status_code == 200
    assert read_run_notes(run_folder).note == "hello"
