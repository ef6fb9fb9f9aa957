"""Table at the end of a run: names of the user are text, not rich's markup."""

from types import SimpleNamespace

import pytest

from flows.runtime.run_summary import (
    build_result_rows,
    collect_parent_metrics,
    format_headline,
    format_result_table,
)
from tasks.command_hints import format_posttrain_command
from tasks.tracking import MAX_RESULT_LENGTH


@pytest.mark.parametrize("name", ["/out[br]put", "/a[/b]", "/a[red]b", "/a\\[b"])
def test_names_are_printed_as_they_are(name):
    row = {"stage": "sft", "note": f"model of {name}", "cached": False, "seconds": 1.0}
    facts = {"output": name, "logs": f"{name}/stages/*/*/stage.log"}
    lines = [line.rstrip() for line in format_result_table([row], "", facts, 80).splitlines()]
    assert f"sft: model of {name}" in lines and f"Output      {name}" in lines
    assert f"Logs        {name}/stages/*/*/stage.log" in lines


def test_pages_that_do_not_answer_are_replaced_by_the_command_that_shows_them(tmp_path):
    url = "http://127.0.0.1:5000/#/x"
    facts = {
        "output": "x",
        "pages": format_posttrain_command("ui", tmp_path / "my runs"),
        "runs_url": "http://127.0.0.1:5000/#/all",
        "pages_answer": False,
    }
    text = format_result_table([], url, facts, 80)
    assert f"Web UI      posttrain ui --output '{tmp_path}/my runs'    serves its pages" in text
    assert "http://" not in text
    text = format_result_table([], url, {**facts, "pages_answer": True}, 80)
    assert f"MLflow run  {url}" in text and "All runs    http" in text and "Web UI  " not in text


@pytest.mark.parametrize(("knows_success", "rate"), [(True, "25.0% [10.0%, 50.0%]"), (False, "")])
def test_an_unknown_success_is_not_shown(knows_success, rate):
    evaluation = {
        "success": 0.25,
        "success_low": 0.1,
        "success_high": 0.5,
        "reward": 0.75,
        "knows_success": knows_success,
        "tokens_per_second": 9.0,
    }
    stages = {
        name: SimpleNamespace(summary={"note": name}, seconds=1.0, cached=False, run_id="")
        for name in ("sft", "evaluate")
    }
    stages["evaluate"].summary["models"] = {"sft": evaluation}
    run = SimpleNamespace(
        results=stages,
        postponed_reason="",
        settings=SimpleNamespace(stages=SimpleNamespace(policy=None)),
        tracking=SimpleNamespace(build_run_link=lambda run: run),
    )
    rows = build_result_rows(run)
    assert rows[0]["reward"] == 0.75 and ("success" in rows[0]) == knows_success
    (line,) = [
        line
        for line in format_result_table(rows, "", {}, 90).splitlines()
        if line.startswith("│sft")
    ]
    assert "0.750" in line and (rate in line) and ("%" in line) == knows_success
    assert format_headline(rows) == (f"sft {rate}" if knows_success else "evaluate")


@pytest.mark.parametrize(
    ("interval", "text"),
    [
        ({"accuracy_low": 0.6, "accuracy_high": 0.9}, "ranks 80.0% [60.0%, 90.0%]"),
        ({}, "ranks 80.0%"),  # of a regression on scores (`loss: mse`)
    ],
)
def test_a_reward_model_is_shown_with_its_interval_if_it_has_one(interval, text):
    summary = {"note": "orders", "accuracy": 0.8, **interval}
    run = make_evaluation_run()
    run.results = {
        "reward_model": SimpleNamespace(summary=summary, seconds=1.0, cached=False, run_id="r")
    }
    rows = build_result_rows(run)
    table = format_result_table(rows, "", {}, 120).splitlines()
    (line,) = [line for line in table if "80.0%" in line]
    assert text in line and ("[" in line) == bool(interval)
    assert collect_parent_metrics(run)["reward_model/accuracy"] == 0.8


def make_evaluation_run(*names):
    """Return a run of an evaluation of models that no stage of it trained, one of them by an alias."""
    evaluation = {
        "success": 0.5,
        "success_low": 0.25,
        "success_high": 0.75,
        "reward": 0.4,
        "tokens_per_second": 9.0,
    }
    summary = {"note": "played", "models": dict.fromkeys(names, evaluation)}
    result = SimpleNamespace(summary=summary, seconds=2.0, cached=False, run_id="r")
    return SimpleNamespace(
        results={"evaluate": result},
        postponed_reason="",
        settings=SimpleNamespace(stages=SimpleNamespace(policy=None)),
        options=SimpleNamespace(
            evaluated_models={"demo@champion": "models:/demo@champion", "mine": "folder"}
        ),
        models=SimpleNamespace(find_resolved_version={"models:/demo@champion": "2"}.get),
        tracking=SimpleNamespace(
            build_run_link=lambda run: f"page/{run}" if run else "",
            cost=SimpleNamespace(foreground_seconds=0, background_seconds=0),
        ),
        seconds=3.0,
    )


def test_a_model_that_was_evaluated_is_named_with_its_version_and_its_success():
    run = make_evaluation_run("demo@champion")
    rows = build_result_rows(run)
    (line,) = [
        line
        for line in format_result_table(rows, "", {}, 120).splitlines()
        if line.startswith("│evaluate")
    ]
    assert "evaluate demo@champion (version 2)" in line and "50.0% [25.0%, 75.0%]" in line
    assert format_headline(rows) == "demo@champion (version 2) 50.0% [25.0%, 75.0%]"
    metrics = collect_parent_metrics(run)
    assert metrics["success_rate/demo@champion"] == 0.5 and metrics["seconds/evaluate"] == 2.0


def test_of_several_models_each_has_a_line():
    run = make_evaluation_run("demo@champion", "mine")
    rows = build_result_rows(run)
    assert [row["stage"] for row in rows] == ["evaluate", "demo@champion (version 2)", "mine"]
    assert (
        format_headline(rows)
        == "demo@champion (version 2) 50.0% [25.0%, 75.0%]; mine 50.0% [25.0%, 75.0%]"
    )
    table = format_result_table(rows, "", {}, 120).splitlines()
    assert sum("50.0%" in line for line in table) == 2 and "evaluate: played" in table
    names = list(collect_parent_metrics(run))
    # MLflow lists them in this order: results first, those of the newest model at the top
    assert names[0] == "success_rate/mine" and names[3] == "success_rate/demo@champion"
    assert names[6] == "pipeline/seconds"


def test_a_long_headline_keeps_the_decision():
    rates = [
        {"stage": f"model_{n}", "success": 0.5, "low": 0.25, "high": 0.75, "note": ""}
        for n in range(30)
    ]
    decision = "version 3 of demo promoted: gain over champion version 2 +7.0 points; sign test p = 2.56e-06"
    text = format_headline([*rates, {"stage": "promote", "note": decision}])
    assert text.startswith("model_29 50.0% [25.0%, 75.0%]; model_28") and text.endswith(
        f"; …; {decision}"
    )
    assert len(text) <= MAX_RESULT_LENGTH


def test_notes_are_wrapped_between_words_in_a_terminal_and_unwrapped_in_a_pipe(monkeypatch):
    note = (
        "ranks 94.9% of 903 held-out pairs correctly; " * 3
        + "/a/path/that/is/longer/than/what/is/left/of/a/line/model"
    )
    row = {"stage": "sft", "note": note, "cached": False, "seconds": 1.0}
    monkeypatch.setenv("COLUMNS", "60")
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    assert f"sft: {note}" in format_result_table([row], "", {}, None).splitlines()
    monkeypatch.setenv("FORCE_COLOR", "1")  # what rich takes for a terminal
    lines = format_result_table([row], "", {}, None).splitlines()
    first = next(n for n, line in enumerate(lines) if line.startswith("sft: "))
    wrapped = lines[first : lines.index("", first)]
    assert len(wrapped) > 2 and all(len(line) <= 60 for line in wrapped)
    assert " ".join(line.strip() for line in wrapped) == f"sft: {note}"
