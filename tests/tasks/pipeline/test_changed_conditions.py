"""An unfinished stage whose conditions changed is refused, resumed on request, or started over; never silently."""

import dataclasses
import json
import logging

import pytest
from helpers.stage_doubles import PipelineRun

from rl_core.errors import ResumeRefused, Stopped
from rl_core.settings import SFTSettings
from rl_core.storage.checkpoint import CheckpointStore
from tasks.pipeline import stage_key as keys
from tasks.pipeline.changed_conditions import check_unfinished_stages, list_unfinished_stages
from tasks.pipeline.run_options import RunOptions
from tasks.pipeline.stage import run_stage
from tasks.pipeline.stage_fingerprint import (
    compare_fingerprints,
    read_decisions,
    read_finished_fingerprint,
)

ALLOW, START_OVER = RunOptions(on_drift="resume"), RunOptions(on_drift="anew")


def run_sft(pipeline_run, body, inputs=None, **changes):
    settings = dataclasses.replace(SFTSettings(), **changes)
    return run_stage(
        pipeline_run, "sft", body, settings=settings, inputs=inputs or {"model": "org/name"}
    )


def make_stopping_body(iteration, seen=None):
    """Build a body that saves a checkpoint and is stopped."""

    def body(context):
        if seen is not None:
            seen.append(context)
        CheckpointStore(context.checkpoints).save_version({"loop": {"iteration": iteration}})
        raise Stopped("asked", 15)

    return body


def make_finishing_body(seen):
    """Build a body that records what it can resume from, and finishes."""

    def body(context):
        state = CheckpointStore(context.checkpoints).load_latest()
        seen.append((context.allow_drift, state and state["loop"]["iteration"]))
        return {}

    return body


def interrupt_stage(tmp_path, iteration=40, **changes):
    with pytest.raises(Stopped):
        run_sft(PipelineRun(tmp_path), make_stopping_body(iteration), **changes)


def list_open_folders(tmp_path):
    return sorted(path.name for path in (tmp_path / "sft").glob("*.open"))


def test_a_changed_setting_is_refused_with_both_values_and_the_remedies(tmp_path):
    interrupt_stage(tmp_path, learning_rate=1e-3)
    before, seen = list_open_folders(tmp_path), []
    with pytest.raises(ResumeRefused) as refused:
        run_sft(PipelineRun(tmp_path), make_finishing_body(seen), learning_rate=2e-3)
    text = str(refused.value)
    assert "stage 'sft' is not finished" in text and "iteration 40" in text
    assert "\n  stages.sft.learning_rate: 0.001 -> 0.002\n" in text
    assert "--allow-drift" in text and "--fresh" in text
    assert "batch_size" not in text and "seed" not in text  # unchanged settings are not listed
    assert seen == [] and list_open_folders(tmp_path) == before
    run_sft(PipelineRun(tmp_path), make_finishing_body(seen), learning_rate=1e-3)
    assert seen == [(False, 40)]  # under the old conditions as usual


def test_a_permitted_drift_resumes_under_the_new_settings_and_is_recorded(tmp_path, caplog):
    interrupt_stage(tmp_path, learning_rate=1e-3)
    pipeline_run, seen = PipelineRun(tmp_path, ALLOW), []
    with caplog.at_level(logging.WARNING):
        done = run_sft(pipeline_run, make_finishing_body(seen), learning_rate=2e-3)
    line = "stages.sft.learning_rate: 0.001 -> 0.002"
    assert seen == [(True, 40)] and list_open_folders(tmp_path) == []
    assert line in caplog.text and pipeline_run.trackers[0].tags["drift"] == line
    assert done.summary["drift"] == [line] and read_finished_fingerprint(done.path)["drift"] == [
        line
    ]
    assert [(decision.kind, decision.changes) for decision in read_decisions(tmp_path / "sft")] == [
        ("first", ()),
        ("drifted", (line,)),
    ]
    journals = sorted(path.name for path in (tmp_path / "sft").glob("*.tracking"))
    assert journals == [f"{done.key}.tracking"]  # the same tracked run


def test_a_permission_survives_a_kill_and_covers_no_other_change(tmp_path):
    interrupt_stage(tmp_path, learning_rate=1e-3)
    with pytest.raises(Stopped):
        run_sft(PipelineRun(tmp_path, ALLOW), make_stopping_body(41), learning_rate=2e-3)
    seen = []
    with pytest.raises(ResumeRefused, match=r"0\.002 -> 0\.003"):
        run_sft(PipelineRun(tmp_path), make_finishing_body(seen), learning_rate=3e-3)
    again = PipelineRun(tmp_path)
    run_sft(again, make_finishing_body(seen), learning_rate=2e-3)
    assert seen == [(("stage key",), 41)]  # only the stage's key of the fingerprint
    assert again.trackers[0].tags["drift"] == "stages.sft.learning_rate: 0.001 -> 0.002"


@pytest.mark.parametrize(
    "options", [START_OVER, RunOptions(fresh=True), RunOptions(restart=True, on_drift="anew")]
)
def test_starting_over_archives_the_checkpoint_and_the_old_settings_resume_it(tmp_path, options):
    interrupt_stage(tmp_path, learning_rate=1e-3)
    seen = []
    run_sft(PipelineRun(tmp_path, options), make_finishing_body(seen), learning_rate=2e-3)
    assert seen == [(False, None)]
    assert len(list_open_folders(tmp_path)) == 1 and list_unfinished_stages(tmp_path / "sft") == []
    run_sft(
        PipelineRun(tmp_path), make_finishing_body(seen), learning_rate=3e-3
    )  # no second refusal
    run_sft(PipelineRun(tmp_path), make_finishing_body(seen), learning_rate=1e-3)
    assert seen[1:] == [(False, None), (False, 40)]


def test_restart_ignores_a_checkpoint_of_the_same_conditions(tmp_path):
    interrupt_stage(tmp_path)
    seen = []
    run_sft(
        PipelineRun(tmp_path, RunOptions(restart=True, on_drift="anew")), make_finishing_body(seen)
    )
    assert seen == [(False, None)]


def test_a_finished_stage_with_changed_settings_runs_again_and_logs_why(tmp_path, caplog):
    seen = []
    first = run_sft(PipelineRun(tmp_path), make_finishing_body(seen), learning_rate=1e-3)
    run_sft(PipelineRun(tmp_path), make_finishing_body(seen), learning_rate=1e-3)
    with caplog.at_level(logging.INFO):
        run_sft(PipelineRun(tmp_path), make_finishing_body(seen), learning_rate=2e-3)
    assert len(seen) == 2
    assert (
        "sft runs again because this changed:\n  stages.sft.learning_rate: 0.001 -> 0.002"
        in caplog.text
    )
    kinds = [(decision.kind, decision.compared) for decision in read_decisions(tmp_path / "sft")]
    assert kinds == [("first", ""), ("cached", ""), ("changed", first.key)]
    # `posttrain evaluate MODEL`: that the model differs from the run's is no news
    options = RunOptions(evaluated_models={"mine": "folder"})
    with caplog.at_level(logging.INFO):
        run_sft(PipelineRun(tmp_path, options), make_finishing_body(seen), learning_rate=3e-3)
    messages = [record for record in caplog.records if "runs again" in record.getMessage()]
    assert [record.for_people for record in messages] == [True, False]


def test_changed_data_is_reported_by_file_and_digest(tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("1")
    stages = tmp_path / "stages"
    with pytest.raises(Stopped):
        run_sft(PipelineRun(stages), make_stopping_body(2), inputs={"demonstrations": rows})
    rows.write_text("2")
    with pytest.raises(ResumeRefused) as refused:
        run_sft(PipelineRun(stages), make_finishing_body([]), inputs={"demonstrations": rows})
    # SHA-256 of "1" and of "2"
    assert f"input demonstrations ({rows}): 6b86b273ff34 -> d4735e3a265e" in str(refused.value)


def test_an_input_from_a_stage_reports_what_changed_in_that_stage(tmp_path):
    def data(number):
        settings = dataclasses.replace(SFTSettings(), batch_size=number)

        def body(context):
            (context.folder / "rows").write_text(str(number))
            return {}

        return run_stage(PipelineRun(tmp_path), "prepare_data", body, settings=settings, inputs={})

    with pytest.raises(Stopped):
        run_sft(PipelineRun(tmp_path), make_stopping_body(2), inputs={"data": data(3)})
    with pytest.raises(ResumeRefused) as refused:
        run_sft(PipelineRun(tmp_path), make_finishing_body([]), inputs={"data": data(4)})
    assert "  because of: stages.prepare_data.batch_size: 3 -> 4" in str(refused.value)


def test_consequences_of_a_change_are_reported_once_by_their_first_cause(tmp_path):
    """Regression: a retraining listed the lines of every earlier stage again for every input, 200 in total."""

    def stage(name, content, **inputs):
        def body(context):
            (context.folder / "made").write_text(str(content))
            return {}

        settings = dataclasses.replace(
            SFTSettings(), batch_size=content if name == "prepare_data" else 2
        )
        return run_stage(PipelineRun(tmp_path), name, body, settings=settings, inputs=inputs)

    def pipeline(number):
        data = stage("prepare_data", number)
        model = stage("sft", number, data=data)
        judged = stage("reward_model", number, data=data, model=model)
        return stage("policy", number, data=data, model=model, judged=judged)

    old, new = (read_finished_fingerprint(pipeline(number).folder) for number in (3, 4))
    lines = compare_fingerprints(old, new)
    assert [line.partition(" (")[0] for line in lines] == [
        "input data",
        "  because of: stages.prepare_data.batch_size: 3 -> 4",
        "input model",
        "input judged",
    ]


def test_changed_code_names_file_and_function(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    module = tmp_path / "judged_by.py"
    source = (
        "LIMIT = 3\n\n\ndef score(rows):\n    return 1.0\n\n\ndef other(rows):\n    return 2.0\n"
    )
    module.write_text(source)

    def run(body):
        options = {"judge": "judged_by:score"}
        return run_sft(PipelineRun(tmp_path / "stages", environment_options=options), body)

    with pytest.raises(Stopped):
        run(make_stopping_body(2))
    module.write_text(source.replace("return 1.0", "return -1.0"))
    with pytest.raises(ResumeRefused) as refused:
        run(make_finishing_body([]))
    assert f"code judged_by ({module}), function score: " in str(refused.value)
    module.write_text(source.replace("return 1.0", "return 1.0  # yes"))
    with pytest.raises(ResumeRefused, match="only comments or layout"):
        run(make_finishing_body([]))
    module.write_text(source.replace("LIMIT = 3", "LIMIT = 4"))
    with pytest.raises(ResumeRefused, match="code outside of functions"):
        run(make_finishing_body([]))


def test_an_upgrade_during_a_run_counts_as_a_change(tmp_path, monkeypatch):
    interrupt_stage(tmp_path)
    monkeypatch.setattr(keys, "digest_stage_code", lambda *_: "0123456789ab")
    digest = keys.digest_source_file
    monkeypatch.setattr(
        keys,
        "digest_source_file",
        lambda path: "other" if path == "rl_core/losses/supervised.py" else digest(path),
    )
    with pytest.raises(ResumeRefused) as refused:
        run_sft(PipelineRun(tmp_path), make_finishing_body([]))
    assert "-> 0123456789ab (rl_core/losses/supervised.py)" in str(refused.value)
    assert "an upgrade of posttrain counts as a change" in str(refused.value)


def test_a_checkpoint_without_recorded_conditions_is_refused(tmp_path):
    interrupt_stage(tmp_path, learning_rate=1e-3)
    (unfinished,) = list_unfinished_stages(tmp_path / "sft")
    (unfinished.folder / "conditions.json").unlink()
    with pytest.raises(ResumeRefused, match="did not record its conditions"):
        run_sft(PipelineRun(tmp_path), make_finishing_body([]), learning_rate=2e-3)


def test_secrets_are_compared_but_never_stored(tmp_path):
    def run(value, body):
        return run_sft(PipelineRun(tmp_path, environment_options={"api_key": value}), body)

    with pytest.raises(Stopped):
        run("first secret", make_stopping_body(1))
    (unfinished,) = list_unfinished_stages(tmp_path / "sft")
    assert "first secret" not in (unfinished.folder / "conditions.json").read_text()
    with pytest.raises(
        ResumeRefused, match=r"environment\.options: a secret has another value"
    ) as refused:
        run("second secret", make_finishing_body([]))
    assert "second" not in str(refused.value)


def run_chain(tmp_path, epochs=1.0, body=None, **changes):
    """Finish sft with these epochs, then interrupt a preference stage that starts from it."""
    stages = {"sft": {"epochs": epochs}, "preference": {"loss": "dpo", **changes}}
    pipeline_run = PipelineRun(tmp_path, stages=stages)
    settings = pipeline_run.settings.stages
    first = run_stage(
        pipeline_run, "sft", lambda context: {}, settings=settings.sft, inputs={"model": "org/name"}
    )
    pipeline_run.results = {"sft": first}
    with pytest.raises(Stopped):
        run_stage(
            pipeline_run,
            "preference",
            body or make_stopping_body(7),
            settings=settings.preference,
            inputs={"model": first.path},
        )
    return pipeline_run


def check_chain(tmp_path, epochs=1.0, options=RunOptions(), **changes):  # noqa: B008 frozen
    stages = {"sft": {"epochs": epochs}, "preference": {"loss": "dpo", **changes}}
    check_unfinished_stages(tmp_path, PipelineRun(tmp_path, stages=stages).stage_keys, options)


def test_drift_is_detected_before_anything_runs_including_earlier_stages(tmp_path):
    run_chain(tmp_path, beta=0.1)
    check_chain(tmp_path, beta=0.1)
    with pytest.raises(ResumeRefused, match=r"stages\.preference\.beta: 0\.1 -> 0\.2"):
        check_chain(tmp_path, beta=0.2)
    with pytest.raises(ResumeRefused) as refused:
        check_chain(tmp_path, epochs=2.0, beta=0.1)
    assert "stages.sft.epochs: 1.0 -> 2.0" in str(refused.value)  # before SFT runs for hours
    for options in (
        ALLOW,
        START_OVER,
        RunOptions(fresh=True),
        RunOptions(only="sft"),
        RunOptions(fresh=True, only="preference"),
    ):
        check_chain(tmp_path, beta=0.2, options=options)


def test_returning_to_finished_conditions_needs_no_permission(tmp_path):
    seen = []
    stages = {"sft": {"learning_rate": 3e-3}}
    done = PipelineRun(tmp_path, stages={"sft": {"learning_rate": 1e-3}})
    run_stage(
        done,
        "sft",
        make_finishing_body(seen),
        settings=done.settings.stages.sft,
        inputs={"model": "org/name"},
    )
    other = PipelineRun(tmp_path, stages={"sft": {"learning_rate": 2e-3}})
    with pytest.raises(Stopped):
        run_stage(
            other,
            "sft",
            make_stopping_body(3),
            settings=other.settings.stages.sft,
            inputs={"model": "org/name"},
        )
    check_unfinished_stages(tmp_path, done.stage_keys, RunOptions())
    assert run_stage(
        done,
        "sft",
        make_finishing_body(seen),
        settings=done.settings.stages.sft,
        inputs={"model": "org/name"},
    ).cached
    with pytest.raises(ResumeRefused):
        check_unfinished_stages(
            tmp_path, PipelineRun(tmp_path, stages=stages).stage_keys, RunOptions()
        )


def test_decisions_survive_a_damaged_line(tmp_path):
    run_sft(PipelineRun(tmp_path), make_finishing_body([]))
    path = tmp_path / "sft" / "decisions.jsonl"
    path.write_text(path.read_text() + "{half\n" + json.dumps({"kind": "x"}) + "\n")
    assert [decision.kind for decision in read_decisions(tmp_path / "sft")] == ["first"]
