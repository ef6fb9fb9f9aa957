"""Retraining and the champion's check as flows: skipped, promoted, rejected, overlapping, reported."""

import json
import subprocess
import sys

import pytest
from helpers import ROOT

from rl_core.analysis.statistics import Rate, compute_rate_difference
from rl_core.errors import FolderBusy
from rl_core.storage.locks import FolderLock
from tasks.config import load_settings
from tasks.lifecycle.promotion import ChampionCheck
from tasks.lifecycle.retraining import read_retrainings
from tasks.tracking import ModelVersion, Tracking

CONFIG = ROOT / "configs/test.yaml"


def append_rows(path, start, end):
    with path.open("a") as file:
        for number in range(start, end):
            file.write(
                json.dumps({"prompt": f"{number} plus 1 ?", "completion": f"answer {number + 1}"})
                + "\n"
            )


def build_overrides(tmp_path, *extra):
    disabled = [f"stages.{stage}=null" for stage in ("reward_model", "policy", "analyze")]
    data = tmp_path / "data"
    return [
        f"output={tmp_path / 'out'}",
        *disabled,
        f"stages.prepare_data={{demonstrations: {data}}}",
        "stages.sft.max_steps=2",
        "stages.promote.min_gain=-1",
        *extra,
    ]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_from_nothing_to_a_rejected_retraining_and_a_champion_that_got_worse(
    prefect_api, tmp_path, monkeypatch
):
    from flows.retrain import run_retraining

    (tmp_path / "data").mkdir()
    data, home = tmp_path / "data/mine.jsonl", tmp_path / "out/test"
    append_rows(data, 0, 30)

    def retrain_once(*extra, **options):
        return run_retraining(
            load_settings(CONFIG, build_overrides(tmp_path, *extra)), quiet=True, **options
        )

    def find_champion():
        return Tracking(None, tmp_path / "out", "test").find_champion("test")

    # The first champion: from the base model, with the unchanged pipeline.
    assert retrain_once().status == "promoted"
    assert find_champion().version == 1 and find_champion().tags["retrain.start"] == "base"

    assert "nothing is new since champion version 1" in retrain_once().message
    # One run for each retraining, none for a skipped one.
    runs = {run.name for run in Tracking(None, tmp_path / "out", "test").list_runs()}
    assert len(runs) == 6, runs  # the pipeline and its five stages

    append_rows(data, 30, 36)
    result = retrain_once(reason="more rows")
    assert result.status == "promoted"
    assert find_champion().version == 2
    assert find_champion().tags["base_model"] == "models:/test/1"
    assert (
        find_champion().tags["retrain.reason"].startswith("more rows: new since champion version 1")
    )
    assert (
        json.loads(find_champion().tags["data.demonstrations"])["files"]["mine.jsonl"]["rows"] == 36
    )
    assert "nothing is new since champion version 2" in retrain_once().message

    append_rows(tmp_path / "data/more.jsonl", 36, 40)  # a new file this time
    assert retrain_once("stages.promote.min_gain=1").status == "rejected"
    assert find_champion().version == 2
    assert (
        "nothing is new since retraining 3, which made version 3 (rejected"
        in retrain_once("stages.promote.min_gain=1").message
    )
    assert [record.status for record in read_retrainings(home)] == [
        "promoted",
        "promoted",
        "rejected",
    ]

    # Two retrainings together: the second one is refused, or waits.
    with FolderLock(home / ".lock"), pytest.raises(FolderBusy):
        retrain_once(force=True)

    check_that_a_regression_is_reported(tmp_path, monkeypatch)


def check_that_a_regression_is_reported(tmp_path, monkeypatch):
    """Check the champion before and after its registered success is raised by hand."""
    import flows.evaluate_champion
    from flows.evaluate_champion import evaluate_champion

    events = []
    monkeypatch.setattr(flows.evaluate_champion, "emit_event", lambda **event: events.append(event))
    check = build_overrides(tmp_path, "stages.evaluate.episodes=20")
    unchanged = evaluate_champion(str(CONFIG), check)
    assert not unchanged.regressed and events == []
    Tracking(None, tmp_path / "out", "test").tag_version(
        "test",
        2,
        {
            "figure.success_rate": 0.9,
            "figure.low": 0.85,
            "figure.high": 0.93,
            "figure.samples": 500,
        },
    )
    worse = evaluate_champion(str(CONFIG), check)
    assert worse.regressed and "got worse" in worse.message
    (event,) = events
    assert event["event"] == "posttrain.champion.regressed"
    assert event["resource"]["prefect.resource.id"] == "posttrain.model.test"
    assert event["payload"]["version"] == 2 and event["payload"]["registered"] == 0.9
    seeds = [
        json.loads((path / "manifest.json").read_text())["settings"]["episodes_seed"]
        for path in (tmp_path / "out/test/stages/evaluate").glob("*")
        if (path / "manifest.json").is_file()
    ]
    assert len({seed for seed in seeds if seed is not None}) == 2  # each check drew other episodes


def test_the_event_describes_the_regression(monkeypatch):
    import flows.evaluate_champion

    events = []
    monkeypatch.setattr(flows.evaluate_champion, "emit_event", lambda **event: events.append(event))
    now, before = Rate(0.5, 0.4, 0.6, 100), Rate(0.8, 0.7, 0.9, 100)
    verdict = ChampionCheck(now, before, compute_rate_difference(now, before), 0.02, True)
    flows.evaluate_champion.emit_regression_event(
        "demo", ModelVersion("demo", 4, None, None), verdict
    )
    payload = events[0]["payload"]
    assert events[0]["resource"] == {
        "prefect.resource.id": "posttrain.model.demo",
        "prefect.resource.name": "demo",
    }
    assert payload["change"] == pytest.approx(-0.3)
    assert payload["change_high"] == pytest.approx(
        -0.3 + 0.1 * 2**0.5
    )  # both intervals are 10 points wide
    json.dumps(payload)


def test_the_command_refuses_wrong_arguments(tmp_path):
    def run_command(*arguments):
        process = subprocess.run(
            [sys.executable, "-m", "posttrain.cli.main", "retrain", *arguments],
            cwd=ROOT,
            capture_output=True,
            text=True,
        )
        assert "Traceback" not in process.stderr
        return process.returncode, process.stderr

    assert run_command(str(tmp_path / "none.yaml"))[0] == 2
    assert run_command(str(CONFIG), "--start", "somewhere")[0] == 2
