"""Answers to the page's questions, from handmade runs; the page's document around Gradio's element."""

import asyncio
import json

from helpers.monitor_runs import EPISODES, journal, make_run

from posttrain.monitor.charts import DEFAULT_WINDOW
from posttrain.monitor.document import PageDocumentMiddleware
from posttrain.monitor.page_responses import PageResponses, parse_selection
from posttrain.monitor.reader import RunReader
from posttrain.monitor.views import TAB_NAMES

RUN = "demo/2027-01-15-08-00-00"


def asked(answers, **named):
    return json.loads(answers.build_response({"tab": "overview", **named}))


def charts(answer):
    return {
        chart["id"]: chart
        for block in answer["blocks"]
        if block["kind"] == "charts"
        for chart in block["charts"]
    }


def test_a_page_gets_the_charts_that_changed_since_the_version_it_has_drawn(tmp_path, monkeypatch):
    monkeypatch.setattr("posttrain.monitor.reader.MIN_REFRESH_SECONDS", 0.0)
    make_run(tmp_path)
    answers = PageResponses(RunReader(tmp_path))
    first = asked(answers)
    assert all(chart["lines"] for chart in charts(first).values()) and len(charts(first)) > 2
    assert "blocks" not in asked(answers, seen=first["version"])
    (policy,) = (tmp_path / "demo/stages/policy").glob("*.tracking")
    with (policy / "metrics.jsonl").open("a") as file:
        file.write(
            '00012000, "metrics": {"reward/mean": 0.75}}\n'
        )  # the rest of the line that was being written
    second = asked(answers, seen=first["version"])
    new = charts(second)
    changed = {name for name, chart in new.items() if not chart.get("same")}
    assert changed and all("reward/mean" in name for name in changed), changed
    assert new.keys() == charts(first).keys() and all(
        new[name]["lines"][0]["y"][-1] == 0.75 for name in changed
    )
    unknown = asked(
        PageResponses(RunReader(tmp_path)), seen=first["version"]
    )  # the server was started again
    assert not any(chart.get("same") for chart in charts(unknown).values())


def test_two_pages_with_different_choices_do_not_get_each_others_charts(tmp_path):
    make_run(tmp_path)
    answers = PageResponses(RunReader(tmp_path))
    one, other = asked(answers), asked(answers, window="1")
    assert one["version"] != other["version"]
    back = charts(asked(answers, seen=other["version"]))
    for name, chart in charts(one).items():
        assert back[name] == (chart if chart != charts(other)[name] else {"id": name, "same": True})
    assert any("lines" in chart for chart in back.values())


def test_what_does_not_exist_counts_as_not_named(tmp_path):
    make_run(tmp_path)
    reader = RunReader(tmp_path)
    named = {
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
    choice = parse_selection(reader, named)
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
    gone = asked(
        PageResponses(reader), run="demo/none"
    )  # the page is open already: the run was removed
    assert "no longer exists" in gone["blocks"][0]["lines"][0]
    assert asked(PageResponses(reader), tab="none")["tab"] == "overview"
    assert asked(PageResponses(RunReader(tmp_path / "nothing")))["head"]["status"] == "no run"


def test_lists_are_asked_for_again_when_they_offer_something_new(tmp_path, monkeypatch):
    monkeypatch.setattr("posttrain.monitor.reader.LISTING_SECONDS", 0.0)
    make_run(tmp_path)
    answers = PageResponses(RunReader(tmp_path))
    before = asked(answers)["offers"]
    assert asked(answers)["offers"] == before
    journal(
        tmp_path / "demo/runs/2027-01-16-08-00-00",
        "demo · 2027-01-16 08:00:00",
        started=1_800_086_400,
    )
    assert asked(answers, run=RUN)["offers"] != before


def test_texts_and_numbers_that_json_has_no_room_for_end_no_page(tmp_path):
    """A folder whose name is not UTF-8, an episode with half a surrogate pair, a number beyond 64 bits."""
    output = tmp_path / "caf\udce9"
    (nothing,) = asked(PageResponses(RunReader(output)))["blocks"]
    assert any("caf?" in line for line in nothing["lines"])
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
    answers = PageResponses(RunReader(output))
    assert all(asked(answers, tab=name)["version"] for name in TAB_NAMES)
    shown = json.dumps(asked(answers, tab="trajectories")["blocks"])
    assert "half ?" in shown and str(2**70) in shown


def answer_of(app, path="/", headers=()):
    sent, scope = [], {"type": "http", "path": path, "headers": list(headers)}

    async def send(message):
        sent.append(message)

    asyncio.run(PageDocumentMiddleware(app)(scope, None, send))
    body = b"".join(message.get("body", b"") for message in sent)
    return scope, {name: value for name, value in sent[0]["headers"]}, body


def page(body, kind=b"text/html; charset=utf-8"):
    async def app(scope, receive, send):
        headers = [(b"content-type", kind), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body[:20], "more_body": True})
        await send({"type": "http.response.body", "body": body[20:]})

    return app


def test_the_document_has_the_page_around_gradios_element():
    body = "<html><head><title>é</title></head><body><gradio-app x></gradio-app><b></b></body></html>".encode()
    scope, headers, found = answer_of(
        page(body), headers=[(b"accept-encoding", b"br"), (b"host", b"here")]
    )
    text = found.decode()
    assert headers[b"content-length"] == str(len(found)).encode() and scope["headers"] == [
        (b"host", b"here")
    ]
    places = [
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
    assert places == sorted(places)
    for other in (answer_of(page(body), "/other"), answer_of(page(body, b"application/json"))):
        assert other[2] == body and other[1][b"content-length"] == str(len(body)).encode()
