"""RunTracker with a real sqlite store: MLflow shows what was recorded."""

from __future__ import annotations

import dataclasses
import json
import sqlite3
import threading
import time

import pytest

from rl_core.errors import SettingsError, Stopped
from rl_core.storage import faults
from rl_core.types import ToolCall, Trajectory, Turn
from tasks.tracking import Tracking, list_runs, read_metrics
from tasks.tracking.experiment_view import build_experiment_view, contains_view, unpack_view
from tasks.tracking.journal import (
    DeliveryCursor,
    build_cursor_path,
    build_events_path,
    build_progress_path,
)
from tasks.tracking.replay import UndeliveredCounts, count_undelivered
from tasks.tracking.store import TrackingStore


def read_history(tracking, run_id, name):
    return [
        (metric.step, metric.value)
        for metric in tracking.store.client.get_metric_history(run_id, name)
    ]


def list_artifacts(tracking, run_id, path=None):
    paths = []
    for entry in tracking.store.client.list_artifacts(run_id, path):
        paths += list_artifacts(tracking, run_id, entry.path) if entry.is_dir else [entry.path]
    return sorted(paths)


def test_a_tag_with_a_name_that_the_store_does_not_take_loses_none_of_the_others(
    tracking, tmp_path
):
    """For example input.model.demo@champion, of an evaluated champion; retention follows these tags."""
    with tracking.start_run(
        "e", tmp_path / "run", tags={"pipeline": "demo", "input.model.demo@champion": "ab"}
    ) as run:
        run.set_tag("more@one", "x")
    tags = tracking.store.client.get_run(run.run_id).data.tags
    assert (tags["pipeline"], tags["input.model.demo_champion"], tags["more_one"]) == (
        "demo",
        "ab",
        "x",
    )


def test_everything_arrives(tracking, tmp_path):
    story = f"[story]({tracking.store.build_version_link('demo', 2)})"
    with tracking.start_run(
        "demo",
        tmp_path / "run",
        tags={"pipeline": "demo", "git_commit": "abc", "absent": None},
        params={"sft": {"learning_rate": 1e-3}},
        description=story,
        system_metrics_seconds=0.05,
    ) as parent:
        assert parent.run_id
        with tracking.start_run(
            "sft", tmp_path / "run" / "sft", parent_run_id=parent.run_id
        ) as stage:
            for step in range(3):
                stage.log_metrics({"train/loss": 1 / (step + 1), "pass@4": 0.5}, step)
            (tmp_path / "figure.png").write_bytes(b"png")
            (tmp_path / "tree" / "inner").mkdir(parents=True)
            (tmp_path / "tree" / "inner" / "a.txt").write_text("a")
            stage.log_artifact(tmp_path / "figure.png", "figures")
            stage.log_artifact(tmp_path / "tree", "data")
            # as a stage's folder is, while files still wait
            (tmp_path / "tree").rename(tmp_path / "published")
            (tmp_path / "figure.png").unlink()
            stage.log_text("hello\u2028é", "notes/a.txt")
            stage.log_dict({"a": [1]}, "a.json")
            stage.log_environment()
            stage.log_dataset(
                tmp_path / "d.jsonl",
                "ab" * 32,
                "demonstrations",
                "training",
                profile={"num_rows": 5},
            )
        time.sleep(0.2)
    client = tracking.store.client
    run, outer = client.get_run(stage.run_id), client.get_run(parent.run_id)
    assert read_history(tracking, stage.run_id, "train/loss") == [(0, 1.0), (1, 0.5), (2, 1 / 3)]
    assert read_history(tracking, stage.run_id, "pass_4") == [(0, 0.5), (1, 0.5), (2, 0.5)]
    assert run.data.tags["mlflow.parentRunId"] == parent.run_id and run.info.status == "FINISHED"
    assert outer.data.params == {"sft.learning_rate": "0.001"}
    tags = outer.data.tags
    # on whatever port the page is shown
    assert (
        tags["mlflow.note.content"]
        == "[story](#/models/demo/versions/2?workflowType=machine_learning)"
    )
    assert tags["pipeline"] == "demo" and "absent" not in tags
    assert tags["mlflow.source.git.commit"] == "abc"
    assert outer.data.metrics["system/process_memory_megabytes"] > 10
    assert list_artifacts(tracking, stage.run_id) == [
        "a.json",
        "data/tree/inner/a.txt",
        "environment/requirements.txt",
        "figures/figure.png",
        "notes/a.txt",
    ]
    ((dataset,)) = [entry for entry in run.inputs.dataset_inputs]
    assert dataset.dataset.name == "demonstrations" and dataset.dataset.digest == ("ab" * 32)[:36]
    assert json.loads(dataset.dataset.profile) == {"num_rows": 5, "digest": "ab" * 32}
    assert dataset.tags[0].value == "training"
    # sent copies are removed
    assert not list((build_events_path(stage.folder).parent / "files").iterdir())
    assert tracking.cost.foreground_seconds > 0 and tracking.cost.background_seconds > 0


def test_readings_of_the_machine_may_stay_local(tracking, tmp_path):
    for _ in range(2):  # the second run resumes the first
        with tracking.start_run(
            "r", tmp_path, system_metrics_seconds=0.05, delivers_system_metrics=False
        ) as run:
            run.log_metrics({"success_rate/policy": 0.5}, 0)
            time.sleep(0.4)
    names = [name for _, metrics in read_metrics(tmp_path) for name in metrics]
    assert names.count("system/process_cpu_percentage") > 1
    assert tracking.store.client.get_run(run.run_id).data.metrics == {"success_rate/policy": 0.5}
    assert count_undelivered(tmp_path) == UndeliveredCounts()


def test_a_resumed_run_is_the_same_run_without_gap_or_duplicate(tracking, tmp_path):
    first = tracking.start_run("r", tmp_path, params={"a": 1, "b": 2})
    for step in range(5):
        first.log_metrics({"train/loss": float(step)}, step)
    first.close("KILLED")
    assert tracking.store.client.get_run(first.run_id).info.status == "KILLED"
    again = tracking.start_run("r", tmp_path, params={"a": 1, "b": 3, "c": 4})
    assert again.resumed and again.run_id == first.run_id
    for step in range(3, 8):
        again.log_metrics({"train/loss": float(step)}, step)
    assert again.close()
    assert read_history(tracking, first.run_id, "train/loss") == [
        (step, float(step)) for step in range(8)
    ]
    run = tracking.store.client.get_run(first.run_id)
    assert run.info.status == "FINISHED"
    # the first value stays, and the change is reported
    assert run.data.params == {
        "a": "1",
        "b": "2",
        "c": "4",
    }
    assert json.loads(run.data.tags["changed_params"]) == {"b": "3"}


def test_a_run_whose_id_was_never_recorded_is_resumed(tracking, tmp_path):
    first = tracking.start_run("r", tmp_path)
    first.log_metrics({"a": 1.0}, 0)
    first.log_traces(make_trajectories())
    first.close("KILLED")
    build_cursor_path(tmp_path).unlink()  # killed between the store's answer and the record of it
    again = tracking.start_run("r", tmp_path)
    again.close()
    assert again.run_id == first.run_id
    # all was sent twice and is stored once
    assert read_history(tracking, first.run_id, "a") == [(0, 1.0)]
    result = tracking.store.client.search_traces(
        locations=[tracking.experiment_id], run_id=first.run_id
    )
    assert len(result) == 3 and sum(len(trace.data.spans) for trace in result) == 11


@pytest.mark.slow
def test_a_locked_database_delays_delivery_alone(tracking, tmp_path):
    with tracking.start_run("locked", tmp_path, interval_s=0.05) as run:
        other = sqlite3.connect(tracking.store.uri.removeprefix("sqlite:///"), isolation_level=None)
        other.execute("BEGIN EXCLUSIVE")
        for step in range(70):  # longer than sqlite's own patience
            run.log_metrics({"a": float(step)}, step)
            time.sleep(0.1)
        assert not run.flush()
        other.execute("ROLLBACK")
        other.close()
        assert run.flush(timeout_s=60)
    assert read_history(tracking, run.run_id, "a") == [(step, float(step)) for step in range(70)]


def test_how_a_run_ended(tracking, tmp_path):
    endings = {"FAILED": ValueError("no good"), "KILLED": Stopped("stop", 15)}
    for status, error in endings.items():
        with pytest.raises(type(error)), tracking.start_run(status, tmp_path / status) as run:
            raise error
        result = tracking.store.client.get_run(run.run_id)
        assert result.info.status == status
        assert result.data.tags.get("error") == (
            "ValueError: no good" if status == "FAILED" else None
        )


def test_an_unreachable_store_does_not_stop_a_run_and_is_caught_up_later(tracking, tmp_path):
    """No server listens: the run continues, closes in time, and a later delivery sends everything, the parent first."""
    dead = Tracking("http://127.0.0.1:9", tmp_path, "tests")
    parent = dead.start_run("parent", tmp_path / "p", wait_s=20)
    child = dead.start_run(
        "child", tmp_path / "p" / "c", parent_run_id=parent.run_id, parent_folder=tmp_path / "p"
    )
    assert parent.run_id is None and parent.url is None
    for step in range(10):
        child.log_metrics({"train/loss": float(step)}, step)
    child.log_text("x", "x.txt")
    assert not child.close(timeout_s=0.2) and not parent.close(timeout_s=0.2)
    assert len(read_metrics(tmp_path / "p" / "c")) == 10
    assert tracking.deliver_all_journals(tmp_path) == 0
    state, outer = DeliveryCursor.load(tmp_path / "p" / "c"), DeliveryCursor.load(tmp_path / "p")
    run = tracking.store.client.get_run(state.run_id)
    assert run.data.tags["mlflow.parentRunId"] == outer.run_id and run.info.status == "FINISHED"
    assert read_history(tracking, state.run_id, "train/loss") == [
        (step, float(step)) for step in range(10)
    ]
    assert list_artifacts(tracking, state.run_id) == ["x.txt"]
    # once more changes nothing
    assert (
        tracking.deliver_all_journals(tmp_path) == 0
        and DeliveryCursor.load(tmp_path / "p") == outer
    )


def test_threads_share_a_tracker(tracking, tmp_path):
    with tracking.start_run("threads", tmp_path) as run:
        threads = [
            threading.Thread(
                target=lambda t=t: [run.log_metrics({f"m/{t}": s}, s) for s in range(100)]
            )
            for t in range(4)
        ]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
    assert [len(read_history(tracking, run.run_id, f"m/{t}")) for t in range(4)] == [100] * 4


def test_progress_is_recorded_but_not_at_every_step(tracking, tmp_path, monkeypatch):
    monkeypatch.setattr("tasks.tracking.run_tracker.PROGRESS_SECONDS", 3600.0)
    run = tracking.start_run("p", tmp_path)
    for done in (1, 2, 3, 4):
        run.progress(done, 4, f"step {done}")
        progress = json.loads(build_progress_path(tmp_path).read_text())
        # the first and the end always are
        assert (progress["done"], progress["total"]) == (
            4 if done == 4 else 1,
            4,
        )
    assert progress["message"] == "step 4"
    run.close()
    assert [
        path.name
        for path in build_progress_path(tmp_path).parent.iterdir()
        if path.name.startswith(".tmp")
    ] == []


def test_progress_calls_the_callbacks_and_survives_one_that_fails(tracking, tmp_path):
    seen = []
    run = tracking.start_run(
        "p", tmp_path, on_progress=[lambda *_: 1 / 0, lambda *arguments: seen.append(arguments)]
    )
    run.progress(1, 4, "half way")
    run.progress(2, 4)
    run.close()
    assert seen == [(1, 4, "half way"), (2, 4, "")] and (run.done, run.total, run.message) == (
        2,
        4,
        "",
    )


@pytest.mark.parametrize("name", ["../x", "/etc/x", "a/../../x", "\\x"])
def test_artifact_names_stay_inside(tracking, tmp_path, name):
    with (
        tracking.start_run("names", tmp_path) as run,
        pytest.raises(SettingsError, match="must be relative"),
    ):
        run.log_text("x", name)


def make_trajectories():
    look = Turn("zoom 1 2", ToolCall("zoom", {"row": 1, "col": 2}), "red 4", False, 5)
    typo = Turn("zom", None, "no such tool", True, 2)
    right = Trajectory(
        "pixel_grid",
        "easy",
        "colour",
        2**30,
        "what colour?",
        "red",
        [look, Turn("red")],
        "red",
        True,
        1.0,
    )
    wrong = Trajectory(
        "pixel_grid",
        "hard",
        "count",
        2**30 + 1,
        "how many?",
        "3",
        [typo, Turn("2")],
        "2",
        False,
        0.0,
    )
    return [right, wrong, right]


def test_episodes_are_readable_as_traces(tracking, tmp_path):
    with tracking.start_run("traces", tmp_path) as run:
        assert run.log_traces(make_trajectories(), limit=2, model="policy") == 2
    client = tracking.store.client
    result = client.search_traces(
        locations=[tracking.experiment_id], run_id=run.run_id, order_by=["timestamp ASC"]
    )
    assert len(result) == 2
    right, wrong = result
    assert right.info.tags["level"] == "easy" and right.info.tags["model"] == "policy"
    assert {entry.name: entry.value for entry in wrong.info.assessments} == {
        "model": "policy",
        "level": "hard",
        "success": False,
        "reward": 0.0,
    }
    names = [span.name for span in right.data.spans]
    assert names == ["episode", "turn 1: zoom", "zoom", "turn 2: answer"]
    episode, turn, call, _ = right.data.spans
    assert episode.inputs == "what colour?" and episode.outputs == "red (right)"
    # episodes of a batch have no separate duration
    assert right.info.execution_duration in (
        None,
        0,
    )
    assert [span.start_time_ns for span in right.data.spans] == sorted(
        span.start_time_ns for span in right.data.spans
    )
    assert episode.attributes["seed"] == 2**30 and episode.attributes["reward"] == 1.0
    assert (
        turn.outputs == {"action": "zoom 1 2", "observation": "red 4"}
        and turn.parent_id == episode.span_id
    )
    assert (
        call.inputs == {"row": 1, "col": 2}
        and call.outputs == "red 4"
        and call.parent_id == turn.span_id
    )
    assert (
        wrong.data.spans[1].status.status_code.value == "ERROR"
        and wrong.data.spans[1].name == "turn 1: misuse"
    )
    assert wrong.data.spans[0].outputs == "2 (wrong; right is 3)"
    hard = client.search_traces(
        locations=[tracking.experiment_id], run_id=run.run_id, filter_string="tags.level = 'hard'"
    )
    assert [trace.info.trace_id for trace in hard] == [wrong.info.trace_id]


def test_a_trace_of_unknown_success_tells_none(tracking, tmp_path):
    episodes = [dataclasses.replace(row, success=None) for row in make_trajectories()[:2]]
    with tracking.start_run("unknown", tmp_path) as run:
        assert run.log_traces(episodes, model="policy") == 2
    client = tracking.store.client
    first, second = client.search_traces(
        locations=[tracking.experiment_id], run_id=run.run_id, order_by=["timestamp ASC"]
    )
    for trace, reward, answer in ((first, 1.0, "red"), (second, 0.0, "2")):
        assert {entry.name: entry.value for entry in trace.info.assessments} == {
            "model": "policy",
            "level": trace.info.tags["level"],
            "reward": reward,
        }
        assert "success" not in trace.info.tags
        episode = trace.data.spans[0]
        assert episode.outputs == answer and episode.attributes["success"] is None
        assert episode.status.status_code.value == "OK"


@pytest.mark.parametrize("point", ["trace.started", "trace.sent"])
def test_traces_that_are_sent_again_are_there_once(tracking, tmp_path, point):
    """The delivery fails after the first episode's trace, or after all spans, and is retried."""
    faults.configure_faults(f"{point}:1:raise=EIO")
    try:
        with tracking.start_run(f"twice {point}", tmp_path, interval_s=0.05) as run:
            run.log_traces(make_trajectories(), limit=2, model="policy")
    finally:
        faults.configure_faults(None)
    result = tracking.store.client.search_traces(
        locations=[tracking.experiment_id], run_id=run.run_id
    )
    assert sorted(len(trace.data.spans) for trace in result) == [3, 4]
    for trace in result:
        assert sorted(judgement.name for judgement in trace.info.assessments) == [
            "level",
            "model",
            "reward",
            "success",
        ]


def test_what_a_policy_wrote_arrives_as_a_trace(tracking, tmp_path):
    """Files of older versions, and of other programs, may contain unpaired surrogates and NUL."""
    hostile = "\ud800\0</script>"
    turns = [
        Turn(hostile, ToolCall("zoom", {"why": hostile, hostile: [hostile]}), hostile, True, 2),
        Turn(hostile),
    ]
    row = Trajectory(
        "pixel_grid", "easy", "colour", 3, hostile, hostile, turns, hostile, False, 0.0
    )
    with tracking.start_run("hostile-traces", tmp_path) as run:
        assert run.log_traces([row], model="policy") == 1
    (trace,) = tracking.store.client.search_traces(
        locations=[tracking.experiment_id], run_id=run.run_id
    )
    assert trace.info.request_preview == "?\ufffd</script>"
    assert trace.data.spans[1].outputs == {
        "action": "?\ufffd</script>",
        "observation": "?\ufffd</script>",
    }


def test_the_list_of_runs(tracking, output, tmp_path):
    with tracking.start_run("outer-listed", tmp_path) as outer:
        outer.set_tag("result", "94% success")
        with tracking.start_run("sft", tmp_path / "s", parent_run_id=outer.run_id) as stage:
            stage.log_metrics({"eval/success_rate": 0.44}, 3)
    rows = list_runs(output, tracking.store.uri)
    index = [row["run"] for row in rows].index("outer-listed")
    assert rows[index]["result"] == "94% success" and rows[index]["status"] == "finished"
    assert (
        rows[index + 1]["run"] == "  sft" and rows[index + 1]["result"] == "eval/success_rate 0.44"
    )


def test_listing_creates_nothing(tmp_path, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert list_runs(tmp_path / "none") == [] and not (tmp_path / "none").exists()


def test_a_deleted_run_is_recorded_again(tracking, tmp_path):
    first = tracking.start_run("gone", tmp_path)
    first.log_metrics({"a": 1.0}, 0)
    first.close("KILLED")
    tracking.store.client.delete_run(first.run_id)
    again = tracking.start_run("gone", tmp_path)
    again.close()
    assert again.run_id != first.run_id
    assert read_history(tracking, again.run_id, "a") == [(0, 1.0)]


def test_the_table_of_runs_has_columns_about_results(tracking, output):
    """The page reads its columns from a tag of the experiment that the link names; a missing tag is added."""
    store = tracking.store
    client, other = store.client, TrackingStore(store.uri, output, "by hand")
    client.create_experiment("by hand")
    for link, experiment_id in (
        (store.build_runs_link(), tracking.experiment_id),
        (other.build_runs_link(), other.experiment_id),
    ):
        assert link.startswith(f"#/experiments/{experiment_id}/runs?viewStateShareKey=posttrain&")
        tags = client.get_experiment(experiment_id).tags
        of_stage = unpack_view(tags["mlflow.sharedViewState.posttrain-policy"])
        assert of_stage["searchFilter"] == "tags.stage = 'policy'"
        tag = tags["mlflow.sharedViewState.posttrain"]
        view = unpack_view(tag)
        assert (
            len(tag) < 5000 and contains_view(tag, view) and contains_view(json.dumps(view), view)
        )
        assert {"metrics.`success_rate/policy`", "tags.`result`"} <= set(view["selectedColumns"])
        assert set(view["selectedColumns"]) < set(view["columnOrder"])
        assert set(view["columnWidths"]) <= set(view["columnOrder"])
        sections, charts = view["compareRunSections"], view["compareRunCharts"]
        places = {section["uuid"]: number for number, section in enumerate(sections)}
        order = [places[chart["metricSectionId"]] for chart in charts]
        assert (
            order == sorted(order)
            and set(order) == {1, 2, 3}
            and all(sections[at]["display"] for at in order)
        )
        assert [chart["metricKey"] for chart in charts] == [
            "train/success_rate",
            "eval/success_rate",
            "reward/mean",
            "policy/entropy",
            "policy/ref_kl",
            "policy/update_kl",
            "train/completion_tokens",
            "train/loss",
        ]
        assert sections[1]["name"].startswith("Success and reward") and not sections[4]["display"]


@pytest.mark.parametrize(
    "tag", [None, "", "{", "[]", "deflate;", "deflate;eJw", '{"selectedColumns": 3}', "deflate;%%"]
)
def test_a_view_that_cannot_be_read_is_none(tag):
    assert not contains_view(tag, build_experiment_view())
