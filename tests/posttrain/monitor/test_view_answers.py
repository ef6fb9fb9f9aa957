"""Responses to the page's requests, from handmade runs; the page's document around Gradio's element."""

import asyncio
import json

from helpers.monitor_runs import EPISODES, make_run, write_journal

from posttrain.monitor.charts import DEFAULT_WINDOW
from posttrain.monitor.document import PageDocumentMiddleware
from posttrain.monitor.page_responses import PageResponses, parse_selection
from posttrain.monitor.reader import RunReader
from posttrain.monitor.views import TAB_NAMES

RUN = "demo/2027-01-15-08-00-00"


def request_view(responses, **query):
    return json.loads(responses.build_response({"tab": "overview", **query}))


def collect_charts(view):
    return {
        chart["id"]: chart
        for block in view["blocks"]
        if block["kind"] == "charts"
        for chart in block["charts"]
    }


def test_page_gets_only_changed_charts(tmp_path, monkeypatch):
    monkeypatch.setattr("posttrain.monitor.reader.MIN_REFRESH_SECONDS", 0.0)
    make_run(tmp_path)
    responses = PageResponses(RunReader(tmp_path))
    first = request_view(responses)
    assert (
        all(chart["lines"] for chart in collect_charts(first).values())
        and len(collect_charts(first)) > 2
    )
    assert "blocks" not in request_view(responses, seen=first["version"])
    (policy,) = (tmp_path / "demo/stages/policy").glob("*.tracking")
    with (policy / "metrics.jsonl").open("a") as file:
        file.write('00012000, "metrics": {"reward/mean": 0.75}}\n')  # the rest of the torn line
    second = request_view(responses, seen=first["version"])
    new_charts = collect_charts(second)
    changed = {name for name, chart in new_charts.items() if not chart.get("same")}
    assert changed and all("reward/mean" in name for name in changed), changed
    assert new_charts.keys() == collect_charts(first).keys() and all(
        new_charts[name]["lines"][0]["y"][-1] == 0.75 for name in changed
    )
    view_of_new_server = request_view(
        PageResponses(RunReader(tmp_path)), seen=first["version"]
    )  # the server was restarted
    assert not any(chart.get("same") for chart in collect_charts(view_of_new_server).values())


def test_pages_with_different_selections_do_not_share_charts(tmp_path):
    make_run(tmp_path)
    responses = PageResponses(RunReader(tmp_path))
    first, second = request_view(responses), request_view(responses, window="1")
    assert first["version"] != second["version"]
    first_again = collect_charts(request_view(responses, seen=second["version"]))
    for name, chart in collect_charts(first).items():
        assert first_again[name] == (
            chart if chart != collect_charts(second)[name] else {"id": name, "same": True}
        )
    assert any("lines" in chart for chart in first_again.values())


def test_an_address_may_name_a_pipeline_for_its_newest_run(tmp_path):
    for name in ("demo", "demolition", "other"):
        make_run(tmp_path, name=name)
    reader = RunReader(tmp_path)
    for first in ({"first": "1"}, {}):
        chosen = parse_selection(reader, {"run": "demo", "compare": "other,demo/x,nobody", **first})
        assert chosen.run == RUN and chosen.compare == (RUN.replace("demo", "other"),)
    assert parse_selection(reader, {"run": "dem", "first": "1"}).run == ""
    assert parse_selection(reader, {"run": "other"}, RUN).run == RUN.replace("demo", "other")


def test_unknown_names_are_ignored(tmp_path):
    make_run(tmp_path)
    reader = RunReader(tmp_path)
    query = {
        "first": "1",
        "run": "demo/none",
        "compare": f"none,{RUN}",
        "stage": "none",
        "metrics": "none,reward/mean",
        "window": "1e9",
        "axis": "weeks",
        "outcome": "none",
        "groups": "train,,",
    }
    choice = parse_selection(reader, query)
    assert (choice.run, choice.stage, choice.window, choice.by_time) == (
        "",
        "",
        DEFAULT_WINDOW,
        False,
    )
    assert (choice.compare, choice.metrics, choice.groups, choice.outcome) == (
        (RUN,),
        ("reward/mean",),
        ("train",),
        "all",
    )
    assert [
        parse_selection(reader, {"window": text}).window for text in ("999999", "9" * 5000)
    ] == [100, DEFAULT_WINDOW]
    assert parse_selection(reader, {"first": "1"}, RUN).run == RUN
    missing_run = request_view(
        PageResponses(reader), run="demo/none"
    )  # the page is open already, and the run was removed
    assert "no longer exists" in missing_run["blocks"][0]["lines"][0]
    assert request_view(PageResponses(reader), tab="none")["tab"] == "overview"
    assert (
        request_view(PageResponses(RunReader(tmp_path / "nothing")))["head"]["status"] == "no run"
    )


def test_fingerprint_of_lists_changes_with_their_entries(tmp_path, monkeypatch):
    monkeypatch.setattr("posttrain.monitor.reader.LISTING_SECONDS", 0.0)
    make_run(tmp_path)
    responses = PageResponses(RunReader(tmp_path))
    offers_before = request_view(responses)["offers"]
    assert request_view(responses)["offers"] == offers_before
    write_journal(
        tmp_path / "demo/runs/2027-01-16-08-00-00",
        "demo · 2027-01-16 08:00:00",
        started=1_800_086_400,
    )
    assert request_view(responses, run=RUN)["offers"] != offers_before


def test_values_that_json_cannot_encode(tmp_path):
    """A folder name that is not UTF-8, an episode with half a surrogate pair, a number beyond 64 bits."""
    output = tmp_path / "caf\udce9"
    (note,) = request_view(PageResponses(RunReader(output)))["blocks"]
    assert any("caf?" in line for line in note["lines"])
    home = make_run(output)
    rows = home / "stages/policy/bbbb.open/recent_rollouts.jsonl"
    rows.write_text(
        json.dumps(
            {
                **EPISODES[0],
                "prompt": "half \ud83d",
                "turns": [{"action": "a", "observation": 2**70}],
            }
        )
        + "\n"
    )
    responses = PageResponses(RunReader(output))
    assert all(request_view(responses, tab=name)["version"] for name in TAB_NAMES)
    text = json.dumps(request_view(responses, tab="trajectories")["blocks"])
    assert "half ?" in text and str(2**70) in text


def send_request(app, path="/", headers=()):
    messages, scope = [], {"type": "http", "path": path, "headers": list(headers)}

    async def send(message):
        messages.append(message)

    asyncio.run(PageDocumentMiddleware(app)(scope, None, send))
    body = b"".join(message.get("body", b"") for message in messages)
    return scope, {name: value for name, value in messages[0]["headers"]}, body


def build_page_app(body, kind=b"text/html; charset=utf-8"):
    async def app(scope, receive, send):
        headers = [(b"content-type", kind), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body[:20], "more_body": True})
        await send({"type": "http.response.body", "body": body[20:]})

    return app


def test_document_has_the_page_around_gradios_element():
    body = "<html><head><title>é</title></head><body><gradio-app x></gradio-app><b></b></body></html>".encode()
    scope, headers, document = send_request(
        build_page_app(body), headers=[(b"accept-encoding", b"br"), (b"host", b"here")]
    )
    text = document.decode()
    assert headers[b"content-length"] == str(len(document)).encode() and scope["headers"] == [
        (b"host", b"here")
    ]
    positions = [
        text.index(part)
        for part in (
            "<style>",
            "é",
            'class="pt-header"',
            "<gradio-app x></gradio-app>",
            'data-tab="overview"',
            "window.posttrain",
            "<b></b>",
        )
    ]
    assert positions == sorted(positions)
    for other in (
        send_request(build_page_app(body), "/other"),
        send_request(build_page_app(body, b"application/json")),
    ):
        assert other[2] == body and other[1][b"content-length"] == str(len(body)).encode()
