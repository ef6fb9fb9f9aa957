"""An unfinished stage whose conditions changed: refused by name, resumed on demand, or begun anew; never in silence."""

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

ALLOW, ANEW = RunOptions(on_drift="resume"), RunOptions(on_drift="anew")


def play(pipeline_run, body, inputs=None, **changes):
    settings = dataclasses.replace(SFTSettings(), **changes)
    return run_stage(
        pipeline_run, "sft", body, settings=settings, inputs=inputs or {"model": "org/name"}
    )


def stopped_at(iteration, seen=None):
    """A body that saves a checkpoint and is stopped."""

    def body(context):
        if seen is not None:
            seen.append(context)
        CheckpointStore(context.checkpoints).save_version({"loop": {"iteration": iteration}})
        raise Stopped("asked", 15)

    return body


def finished(seen):
    """A body that notes what it found, and finishes."""

    def body(context):
        found = CheckpointStore(context.checkpoints).load_latest()
        seen.append((context.allow_drift, found and found["loop"]["iteration"]))
        return {}

    return body


def cut(tmp_path, iteration=40, **changes):
    with pytest.raises(Stopped):
        play(PipelineRun(tmp_path), stopped_at(iteration), **changes)


def opened(tmp_path):
    return sorted(path.name for path in (tmp_path / "sft").glob("*.open"))


def test_a_changed_setting_is_refused_with_both_values_and_the_remedies(tmp_path):
    cut(tmp_path, learning_rate=1e-3)
    before, seen = opened(tmp_path), []
    with pytest.raises(ResumeRefused) as refused:
        play(PipelineRun(tmp_path), finished(seen), learning_rate=2e-3)
    text = str(refused.value)
    assert "stage 'sft' is not finished" in text and "iteration 40" in text
    assert "\n  stages.sft.learning_rate: 0.001 -> 0.002\n" in text
    assert "--allow-drift" in text and "--fresh" in text
    assert "batch_size" not in text and "seed" not in text  # nothing that is the same
    assert seen == [] and opened(tmp_path) == before
    play(PipelineRun(tmp_path), finished(seen), learning_rate=1e-3)
    assert seen == [(False, 40)]  # under the old conditions as ever


def test_allowed_it_resumes_under_the_new_settings_and_says_so_everywhere(tmp_path, caplog):
    cut(tmp_path, learning_rate=1e-3)
    pipeline_run, seen = PipelineRun(tmp_path, ALLOW), []
    with caplog.at_level(logging.WARNING):
        done = play(pipeline_run, finished(seen), learning_rate=2e-3)
    line = "stages.sft.learning_rate: 0.001 -> 0.002"
    assert seen == [(True, 40)] and opened(tmp_path) == []
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


def test_a_permission_outlives_a_kill_and_covers_nothing_else(tmp_path):
    cut(tmp_path, learning_rate=1e-3)
    with pytest.raises(Stopped):
        play(PipelineRun(tmp_path, ALLOW), stopped_at(41), learning_rate=2e-3)
    seen = []
    with pytest.raises(ResumeRefused, match=r"0\.002 -> 0\.003"):
        play(PipelineRun(tmp_path), finished(seen), learning_rate=3e-3)
    again = PipelineRun(tmp_path)
    play(again, finished(seen), learning_rate=2e-3)
    assert seen == [(("stage key",), 41)]  # of the fingerprint, the stage's key alone
    assert again.trackers[0].tags["drift"] == "stages.sft.learning_rate: 0.001 -> 0.002"


@pytest.mark.parametrize(
    "options", [ANEW, RunOptions(fresh=True), RunOptions(restart=True, on_drift="anew")]
)
def test_anew_keeps_the_old_checkpoint_aside_and_the_old_settings_resume_from_it(tmp_path, options):
    cut(tmp_path, learning_rate=1e-3)
    seen = []
    play(PipelineRun(tmp_path, options), finished(seen), learning_rate=2e-3)
    assert seen == [(False, None)]
    assert len(opened(tmp_path)) == 1 and list_unfinished_stages(tmp_path / "sft") == []
    play(PipelineRun(tmp_path), finished(seen), learning_rate=3e-3)  # no further question
    play(PipelineRun(tmp_path), finished(seen), learning_rate=1e-3)
    assert seen[1:] == [(False, None), (False, 40)]


def test_restart_passes_over_a_checkpoint_of_the_same_conditions(tmp_path):
    cut(tmp_path)
    seen = []
    play(PipelineRun(tmp_path, RunOptions(restart=True, on_drift="anew")), finished(seen))
    assert seen == [(False, None)]


def test_a_finished_stage_whose_settings_changed_runs_anew_and_says_why(tmp_path, caplog):
    seen = []
    first = play(PipelineRun(tmp_path), finished(seen), learning_rate=1e-3)
    play(PipelineRun(tmp_path), finished(seen), learning_rate=1e-3)
    with caplog.at_level(logging.INFO):
        play(PipelineRun(tmp_path), finished(seen), learning_rate=2e-3)
    assert len(seen) == 2
    assert (
        "sft runs again because this changed:\n  stages.sft.learning_rate: 0.001 -> 0.002"
        in caplog.text
    )
    kinds = [(decision.kind, decision.compared) for decision in read_decisions(tmp_path / "sft")]
    assert kinds == [("first", ""), ("cached", ""), ("changed", first.key)]
    with caplog.at_level(
        logging.INFO
    ):  # `posttrain evaluate MODEL`: another model than the run's is no news
        play(
            PipelineRun(tmp_path, RunOptions(evaluated_models={"mine": "folder"})),
            finished(seen),
            learning_rate=3e-3,
        )
    anew = [record for record in caplog.records if "runs anew" in record.getMessage()]
    assert [record.for_people for record in anew] == [True, False]


def test_changed_data_is_named_by_file_and_digest(tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("1")
    stages = tmp_path / "stages"
    with pytest.raises(Stopped):
        play(PipelineRun(stages), stopped_at(2), inputs={"demonstrations": rows})
    rows.write_text("2")
    with pytest.raises(ResumeRefused) as refused:
        play(PipelineRun(stages), finished([]), inputs={"demonstrations": rows})
    # SHA-256 of "1" and of "2"
    assert f"input demonstrations ({rows}): 6b86b273ff34 -> d4735e3a265e" in str(refused.value)


def test_an_input_of_a_stage_says_what_changed_in_that_stage(tmp_path):
    def data(number):
        settings = dataclasses.replace(SFTSettings(), batch_size=number)

        def body(context):
            (context.folder / "rows").write_text(str(number))
            return {}

        return run_stage(PipelineRun(tmp_path), "prepare_data", body, settings=settings, inputs={})

    with pytest.raises(Stopped):
        play(PipelineRun(tmp_path), stopped_at(2), inputs={"data": data(3)})
    with pytest.raises(ResumeRefused) as refused:
        play(PipelineRun(tmp_path), finished([]), inputs={"data": data(4)})
    assert "  of it: stages.prepare_data.batch_size: 3 -> 4" in str(refused.value)


def test_what_a_change_led_to_is_told_by_its_first_cause_alone_and_once(tmp_path):
    """A retraining's lines were those of every earlier stage again, for every input, 200 in all."""

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
        "  of it: stages.prepare_data.batch_size: 3 -> 4",
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
        return play(PipelineRun(tmp_path / "stages", environment_options=options), body)

    with pytest.raises(Stopped):
        run(stopped_at(2))
    module.write_text(source.replace("return 1.0", "return -1.0"))
    with pytest.raises(ResumeRefused) as refused:
        run(finished([]))
    assert f"code judged_by ({module}), function score: " in str(refused.value)
    module.write_text(source.replace("return 1.0", "return 1.0  # yes"))
    with pytest.raises(ResumeRefused, match="comments or layout alone"):
        run(finished([]))
    module.write_text(source.replace("LIMIT = 3", "LIMIT = 4"))
    with pytest.raises(ResumeRefused, match="code outside of functions"):
        run(finished([]))


def test_an_upgrade_in_the_middle_counts_and_is_said(tmp_path, monkeypatch):
    cut(tmp_path)
    monkeypatch.setattr(keys, "digest_stage_code", lambda *_: "0123456789ab")
    digest = keys.digest_source_file
    monkeypatch.setattr(
        keys,
        "digest_source_file",
        lambda path: "other" if path == "rl_core/losses/supervised.py" else digest(path),
    )
    with pytest.raises(ResumeRefused) as refused:
        play(PipelineRun(tmp_path), finished([]))
    assert "-> 0123456789ab (rl_core/losses/supervised.py)" in str(refused.value)
    assert "an upgrade of posttrain counts as a change" in str(refused.value)


def test_a_checkpoint_of_a_version_that_noted_nothing_is_not_dropped_either(tmp_path):
    cut(tmp_path, learning_rate=1e-3)
    (begun,) = list_unfinished_stages(tmp_path / "sft")
    (begun.folder / "conditions.json").unlink()
    with pytest.raises(ResumeRefused, match="did not record its conditions"):
        play(PipelineRun(tmp_path), finished([]), learning_rate=2e-3)


def test_secrets_are_compared_and_never_kept(tmp_path):
    def run(value, body):
        return play(PipelineRun(tmp_path, environment_options={"api_key": value}), body)

    with pytest.raises(Stopped):
        run("first secret", stopped_at(1))
    (begun,) = list_unfinished_stages(tmp_path / "sft")
    assert "first secret" not in (begun.folder / "conditions.json").read_text()
    with pytest.raises(
        ResumeRefused, match=r"environment\.options: a secret has another value"
    ) as refused:
        run("second secret", finished([]))
    assert "second" not in str(refused.value)


# ------------------------------------------------------------------------------------------ before a pipeline begins


def chain(tmp_path, epochs=1.0, body=None, **changes):
    """sft finished with these epochs, then a preference stage that starts from it."""
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
            body or stopped_at(7),
            settings=settings.preference,
            inputs={"model": first.path},
        )
    return pipeline_run


def wanted(tmp_path, epochs=1.0, options=RunOptions(), **changes):  # noqa: B008 frozen
    stages = {"sft": {"epochs": epochs}, "preference": {"loss": "dpo", **changes}}
    check_unfinished_stages(tmp_path, PipelineRun(tmp_path, stages=stages).settings, options)


def test_drift_is_found_before_anything_runs_and_also_in_the_stages_before(tmp_path):
    chain(tmp_path, beta=0.1)
    wanted(tmp_path, beta=0.1)
    with pytest.raises(ResumeRefused, match=r"stages\.preference\.beta: 0\.1 -> 0\.2"):
        wanted(tmp_path, beta=0.2)
    with pytest.raises(ResumeRefused) as refused:
        wanted(tmp_path, epochs=2.0, beta=0.1)
    assert "stages.sft.epochs: 1.0 -> 2.0" in str(refused.value)  # before SFT has run for hours
    for options in (
        ALLOW,
        ANEW,
        RunOptions(fresh=True),
        RunOptions(only="sft"),
        RunOptions(fresh=True, only="preference"),
    ):
        wanted(tmp_path, beta=0.2, options=options)


def test_going_back_to_what_has_finished_asks_nothing(tmp_path):
    seen = []
    stages = {"sft": {"learning_rate": 3e-3}}
    done = PipelineRun(tmp_path, stages={"sft": {"learning_rate": 1e-3}})
    run_stage(
        done, "sft", finished(seen), settings=done.settings.stages.sft, inputs={"model": "org/name"}
    )
    other = PipelineRun(tmp_path, stages={"sft": {"learning_rate": 2e-3}})
    with pytest.raises(Stopped):
        run_stage(
            other,
            "sft",
            stopped_at(3),
            settings=other.settings.stages.sft,
            inputs={"model": "org/name"},
        )
    check_unfinished_stages(tmp_path, done.settings, RunOptions())
    assert run_stage(
        done, "sft", finished(seen), settings=done.settings.stages.sft, inputs={"model": "org/name"}
    ).cached
    with pytest.raises(ResumeRefused):
        check_unfinished_stages(
            tmp_path, PipelineRun(tmp_path, stages=stages).settings, RunOptions()
        )


def test_decisions_survive_a_damaged_line(tmp_path):
    play(PipelineRun(tmp_path), finished([]))
    path = tmp_path / "sft" / "decisions.jsonl"
    path.write_text(path.read_text() + "{half\n" + json.dumps({"kind": "x"}) + "\n")
    assert [decision.kind for decision in read_decisions(tmp_path / "sft")] == ["first"]
