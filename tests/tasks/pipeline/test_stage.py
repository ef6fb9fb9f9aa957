"""The contract of a stage: content of its key, exclusions from its content digest, arguments of training."""

import dataclasses
import os
import threading
from pathlib import Path

import pytest
import torch
from helpers.stage_doubles import PipelineRun, pipeline

from rl_core.api.recipes import Recipe
from rl_core.errors import DataError, SettingsError, Stopped
from rl_core.out_of_memory import record_out_of_memory
from rl_core.settings import PreferenceSettings, SFTSettings
from rl_core.storage.append_log import encode_checked_line
from rl_core.training import loop
from tasks.pipeline import stage_key as keys
from tasks.pipeline import stage_key as stage_code
from tasks.pipeline.run_options import RunOptions
from tasks.pipeline.stage import StageContext, run_stage
from tasks.pipeline.stage_fingerprint import read_decisions
from tasks.pipeline.stage_folder import keep_checkpoints
from tasks.pipeline.stage_key import collect_stage_key, compute_stage_seed, digest_input
from tasks.pipeline.stage_result import compute_content_digest


def compute_key(name="sft", settings=SFTSettings(), pipeline_settings=None, digests=None):  # noqa: B008 frozen
    return collect_stage_key(
        name, settings, pipeline_settings or pipeline(), digests or {"data": "a"}
    ).key


def test_the_key_changes_with_everything_that_affects_the_result(monkeypatch):
    changed = {
        "stage": compute_key("preference"),
        "settings": compute_key(settings=dataclasses.replace(SFTSettings(), batch_size=7)),
        "environment": compute_key(
            pipeline_settings=pipeline(
                environment={"name": "arithmetic", "options": {"max_number": 9}}
            )
        ),
        "model": compute_key(pipeline_settings=pipeline(model={"preset": "nano"})),
        "content of an input": compute_key(digests={"data": "b"}),
        "name of an input": compute_key(digests={"model": "a"}),
        "seed": compute_key(pipeline_settings=pipeline(seed=1)),
    }
    same = compute_key()
    assert len({same, *changed.values()}) == 1 + len(changed), "each one counts"
    assert (
        compute_key(pipeline_settings=pipeline(name="other", output="elsewhere")) == same
    )  # its location changes no numbers
    monkeypatch.setattr(keys, "digest_stage_code", lambda *_: "other")
    assert compute_key() != same


def test_the_key_changes_with_what_a_chat_template_prints(tmp_path):
    template = tmp_path / "chat.jinja"
    template.write_text("one")
    named = {"path": "org/model", "chat_template": str(template)}
    models = [
        {"path": "org/model"},
        {"path": "org/model", "chat_template_date": "2025-01-01"},
        {"path": "org/model", "chat_template_kwargs": {"enable_thinking": False}},
        {"path": "org/model", "history_thoughts": "template"},
        {"path": "org/model", "native_tools": True},
        named,
    ]

    def key_of(model):
        return compute_key(
            pipeline_settings=pipeline(model=model, stages={"prepare_data": {}, "sft": {}})
        )

    distinct_keys = [key_of(model) for model in models]
    assert len(set(distinct_keys)) == len(models)
    moved = tmp_path / "moved.jinja"
    moved.write_text("one")
    assert key_of({**named, "chat_template": str(moved)}) == distinct_keys[-1], "its text decides"
    template.write_text("two")
    assert key_of(named) not in distinct_keys


def test_the_code_version_is_that_of_every_source():
    root = Path(stage_code.__file__).resolve().parents[2]
    files = [
        path
        for package in ("rl_core", "tasks")
        for path in (root / package).rglob("*")
        if path.is_file()
    ]
    files = [
        path
        for path in files
        if "__pycache__" not in path.parts and path.name not in ("py.typed", "metrics.json")
    ]
    sources = [
        path for path in files if "shipped" not in path.parts
    ]  # files in `shipped` are copied, not run
    assert {path.suffix for path in sources} == set(stage_code._SOURCES)
    assert {
        root / path for path in stage_code.list_project_sources() if "/shipped/" not in path
    } == set(sources)


def test_the_key_changes_with_the_content_of_the_environment_s_data(tmp_path):
    data = tmp_path / "problems.jsonl"
    pipeline_settings = pipeline()
    pipeline_settings = dataclasses.replace(
        pipeline_settings,
        environment=dataclasses.replace(
            pipeline_settings.environment, name="gsm8k", options={"path": str(data)}
        ),
    )
    absent = compute_key(pipeline_settings=pipeline_settings)
    data.write_text("1")
    first = compute_key(pipeline_settings=pipeline_settings)
    data.write_text("2")
    assert len({absent, first, compute_key(pipeline_settings=pipeline_settings)}) == 3
    data.write_text("1")
    assert compute_key(pipeline_settings=pipeline_settings) == first


def test_timings_are_not_part_of_the_content_digest():
    def digest(**changes):
        files = {
            "model/w": "1",
            "summary.json": "2",
            "metrics.jsonl": "3",
            "metrics_history.json": "4",
            "recent_rollouts.jsonl": "5",
            "stage.log": "6",
            **changes,
        }
        return compute_content_digest(
            {"files": {name: {"sha256": value} for name, value in files.items()}}
        )

    timed = (
        "summary.json",
        "metrics.jsonl",
        "metrics_history.json",
        "recent_rollouts.jsonl",
        "stage.log",
    )
    assert {digest(**{name: "x"}) for name in timed} == {digest()}
    assert (
        digest(**{"epochs/1/w": "x"}) == digest() != digest(**{"epochs.json": "x"})
    )  # not part of the result
    assert digest(**{"model/w": "x"}) != digest() != digest(**{"trajectories_policy.jsonl": "x"})


def test_inputs_by_their_content(tmp_path):
    (tmp_path / "a").write_text("1")
    (tmp_path / "b").write_text("1")
    assert digest_input(tmp_path / "a") == digest_input(str(tmp_path / "b"))
    assert digest_input("org/name") == "org/name"  # a hub name is used as written
    with pytest.raises(SettingsError, match="does not exist"):
        digest_input(tmp_path / "c")
    assert (
        compute_stage_seed(0, "sft") != compute_stage_seed(0, "policy")
        and 0 <= compute_stage_seed(5, "sft") < 2**31
    )


def test_training_receives_all_arguments(tmp_path, monkeypatch):
    arguments = {}
    monkeypatch.setattr(
        loop, "run_loop", lambda trainer, settings, **rest: arguments.update(rest) or "outcome"
    )
    settings, tracker, stop = PreferenceSettings(keep_checkpoints=5), object(), threading.Event()
    context = StageContext(
        name="preference",
        folder=tmp_path,
        settings=settings,
        pipeline=pipeline(),
        inputs={},
        tracker=tracker,
        pipeline_run=None,
        seed=1,
        fingerprint={"stage key": "k", "threads": "1"},
        stop=stop,
    )
    recipe = Recipe(object(), 7, best_metric="eval/loss", larger_is_better=False)
    assert context.train(recipe) == "outcome"
    store = arguments.pop("checkpoints")
    assert (store.folder, store.keep) == (tmp_path / "checkpoints", 5)
    assert arguments == {
        "iterations": 7,
        "tracker": tracker,
        "best_metric": "eval/loss",
        "larger_is_better": False,
        "fingerprint": {"stage key": "k", "threads": "1"},
        "stop_event": stop,
        "history": tmp_path / "metrics_history.json",
        "allow_drift": False,
        "callbacks": (),
        "memory": None,
        "after_iteration": None,
    }


def run_sft(pipeline_run, body, number=1):
    settings = dataclasses.replace(SFTSettings(), batch_size=number)
    return run_stage(
        pipeline_run,
        "sft",
        body,
        settings=settings,
        inputs={"model": "org/name"},
        label="first sft",
    )


def test_a_stage_runs_once_and_hands_over_a_verified_folder(tmp_path):
    pipeline_run, seen = PipelineRun(tmp_path), []

    def body(context):
        seen.append(context)
        (context.folder / "words").write_text("w")
        return {"note": "good"}

    first = run_sft(pipeline_run, body)
    (context,) = seen
    assert context.fingerprint == {"stage key": first.key, "threads": "3"}
    assert context.seed == compute_stage_seed(0, "sft") and context.inputs == {"model": "org/name"}
    assert (
        not first.cached
        and first.path == tmp_path / "sft" / first.key
        and (first.path / "words").read_text() == "w"
    )
    assert pipeline_run.trackers[0].closed == ["FINISHED"]
    assert pipeline_run.trackers[0].tags == {
        "threads": "3",
        "parent_model_version": "org/name",
        "result": "good",
    }
    again = run_sft(pipeline_run, body)
    assert again.cached and len(seen) == 1 and pipeline_run.cached == [("first sft", "r")]
    assert (again.digest, again.summary["note"]) == (first.digest, "good")
    (first.path / "words").write_text(
        "x"
    )  # damaged: moved aside, and run again to the same content
    assert run_sft(pipeline_run, body).digest == first.digest and len(seen) == 2
    assert [path.name.partition(".")[2][:7] for path in (tmp_path / "sft").glob("*.corrupt-*")] == [
        "corrupt"
    ]
    assert run_sft(pipeline_run, body, number=2).key != first.key and len(seen) == 3
    (first.path / "words").write_text("x")
    run_sft(pipeline_run, body)
    kinds = [decision.kind for decision in read_decisions(tmp_path / "sft")]
    assert kinds == ["first", "cached", "damaged", "changed", "damaged"], (
        "not changed against the other key"
    )


def test_damaged_lines_are_counted_and_left_out(tmp_path):
    lines = [
        encode_checked_line({"step": step, "metrics": {"train/loss": 0.5}, "iteration": step})
        for step in range(4)
    ]

    def damaged(bad):
        return b"".join(
            line.replace(b"0.5", b"0.7") if step in bad else line for step, line in enumerate(lines)
        )

    def body(context):
        (context.folder / "rewards.jsonl").write_bytes(damaged([1]))
        (
            context.folder.parent / f"{context.fingerprint['stage key']}.tracking/metrics.jsonl"
        ).write_bytes(damaged([0, 2]))
        return {}

    pipeline_run = PipelineRun(tmp_path)
    result = run_sft(pipeline_run, body)
    assert (result.path / "rewards.jsonl").read_bytes() == lines[0] + lines[2] + lines[3]
    assert (result.path / "metrics.jsonl").read_bytes() == lines[1] + lines[3]
    assert result.summary["damaged_lines"] == {"metrics.jsonl": 2, "rewards.jsonl": 1}
    assert pipeline_run.trackers[0].tags["damaged_lines"] == "metrics.jsonl: 2, rewards.jsonl: 1"
    assert sorted(path.name for path in result.path.iterdir())[1:] == [
        "metrics.jsonl",
        "rewards.jsonl",
        "stage.log",
        "summary.json",
    ]


def test_fresh_runs_a_finished_stage_again_but_not_twice_in_one_run(tmp_path):
    seen = []

    def body(context):
        seen.append(context.name)
        return {}

    run_sft(PipelineRun(tmp_path), body)
    (tmp_path / "sft" / ".trash-0123-7-1").mkdir()  # from a run killed during a removal
    again = PipelineRun(tmp_path, RunOptions(fresh=True))
    assert not run_sft(again, body).cached and run_sft(again, body).cached
    assert seen == ["sft", "sft"]
    assert [path.name for path in (tmp_path / "sft").glob(".*")] == []


def test_no_stage_begins_after_a_request_to_stop(tmp_path):
    pipeline_run = PipelineRun(tmp_path)
    pipeline_run.stop.set()
    with pytest.raises(Stopped, match="between two stages") as stopped:
        run_sft(pipeline_run, lambda context: {})
    assert stopped.value.signum == 15 and os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("error", "status", "remaining"),
    [
        (DataError("bad row"), "FAILED", []),
        (
            Stopped("asked", 15),
            "KILLED",
            ["checkpoints", "conditions.json", "half", "threads.json"],
        ),
    ],
)
def test_a_stage_that_ends_early_keeps_what_a_resume_needs(tmp_path, error, status, remaining):
    pipeline_run = PipelineRun(tmp_path)

    def body(context):
        (context.folder / "half").write_text("")
        if isinstance(error, Stopped):
            context.checkpoints.mkdir()
        raise error

    with pytest.raises(type(error)):
        run_sft(pipeline_run, body)
    assert pipeline_run.trackers[0].closed == [status]
    assert pipeline_run.trackers[0].tags.get("error") == (
        "DataError: bad row" if status == "FAILED" else None
    )
    opened = list((tmp_path / "sft").glob("*.open"))
    assert sorted(path.name for folder in opened for path in folder.iterdir()) == remaining


@pytest.mark.parametrize(
    ("setting", "has_checkpoints", "second"),
    [
        ("auto", True, 3),
        ("auto", False, 2),
        (2, True, 2),
    ],  # with a configured number the checkpoint itself reports a difference
)
def test_a_stage_resumes_with_the_threads_of_its_checkpoints(
    tmp_path, setting, has_checkpoints, second
):
    before, seen = torch.get_num_threads(), []

    def body(context):
        seen.append((context.threads, torch.get_num_threads(), context.fingerprint["threads"]))
        if has_checkpoints:
            context.checkpoints.mkdir(exist_ok=True)
        if len(seen) == 1:
            raise Stopped("asked", 15)
        return {}

    with pytest.raises(Stopped):
        run_sft(PipelineRun(tmp_path, threads=setting), body)
    later = PipelineRun(tmp_path, threads=setting)
    later.threads = 2
    done = run_sft(later, body)
    assert seen == [(3, 3, "3"), (second, second, str(second))]
    assert (done.summary["threads"], later.trackers[0].tags["threads"]) == (second, str(second))
    assert not (done.path / "threads.json").exists() and torch.get_num_threads() == before
    other = PipelineRun(tmp_path / "elsewhere", threads=setting)
    assert (
        run_sft(other, body).digest == done.digest
    )  # the number of threads is not part of the content


def test_recent_rollouts_and_the_schedule_survive_a_kill(tmp_path):
    """A resumed process could not write again what was there before its checkpoint; without checkpoints it does."""
    names = (
        "recent_rollouts.jsonl",
        "schedule.jsonl",
        "summary.json",
        "model/config.json",
        "checkpoints/LATEST",
        "epochs/2/config.json",
        "epochs/.tmp-3@elsewhere-7.0/3/config.json",
    )
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text("{}")
    keep_checkpoints(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "checkpoints",
        "epochs",
        "recent_rollouts.jsonl",
        "schedule.jsonl",
    ]
    assert [path.name for path in (tmp_path / "epochs").iterdir()] == ["2"]
    (tmp_path / "checkpoints" / "LATEST").unlink()
    (tmp_path / "checkpoints").rmdir()
    keep_checkpoints(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_models_of_epochs_are_named_and_do_not_count_for_the_digest(tmp_path):
    def body(context, epochs=()):
        for name in ("words", *epochs):
            (context.folder / name).mkdir(parents=True)
            (context.folder / name / "weights").write_text("w")
        return {}

    without_epochs = run_sft(PipelineRun(tmp_path / "without"), body)
    with_epochs = run_sft(
        PipelineRun(tmp_path / "with"), lambda context: body(context, ("epochs/10", "epochs/9"))
    )
    assert with_epochs.digest == without_epochs.digest and "epochs" not in without_epochs.summary
    assert (
        with_epochs.summary["epochs"] == [9, 10]
        and (with_epochs.path / "epochs/9/weights").is_file()
    )


def test_out_of_memory_outside_training_is_counted(tmp_path):
    def body(context):
        record_out_of_memory("scores", 3, "rows")
        record_out_of_memory("scores", 1, "rows")
        return {}

    pipeline_run = PipelineRun(tmp_path)
    assert run_sft(pipeline_run, body).summary["out_of_memory"] == 2
    assert pipeline_run.trackers[0].metrics == [(0, {"perf/out_of_memory": 2.0})]
    assert (
        "out_of_memory" not in run_sft(PipelineRun(tmp_path), lambda context: {}, number=2).summary
    )
