"""Retraining and the champion's check as flows: skipped, promoted, rejected, overlapping, announced."""

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


def write(path, start, end):
    with path.open("a") as file:
        for n in range(start, end):
            file.write(
                json.dumps({"prompt": f"{n} plus 1 ?", "completion": f"answer {n + 1}"}) + "\n"
            )


def overrides(tmp_path, *more):
    null = [f"stages.{stage}=null" for stage in ("reward_model", "policy", "analyze")]
    data = tmp_path / "data"
    return [
        f"output={tmp_path / 'out'}",
        *null,
        f"stages.prepare_data={{demonstrations: {data}}}",
        "stages.sft.max_steps=2",
        "stages.promote.min_gain=-1",
        *more,
    ]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_from_nothing_to_a_rejected_retraining_and_a_champion_that_got_worse(
    prefect_api, tmp_path, monkeypatch
):
    import flows.evaluate_champion
    from flows.evaluate_champion import evaluate_champion
    from flows.retrain import run_retraining

    (tmp_path / "data").mkdir()
    data, home = tmp_path / "data/mine.jsonl", tmp_path / "out/test"
    write(data, 0, 30)

    def once(*more, **named):
        return run_retraining(
            load_settings(CONFIG, overrides(tmp_path, *more)), quiet=True, **named
        )

    def champion():
        return Tracking(None, tmp_path / "out", "test").find_champion("test")

    # The first champion: from the base model, with the pipeline as it is.
    assert once().status == "promoted"
    assert champion().version == 1 and champion().tags["retrain.start"] == "base"

    assert "nothing is new since champion version 1" in once().message
    # One run name a retraining; none for what was skipped.
    assert (
        len(Tracking(None, tmp_path / "out", "test").list_runs()) == 5
    )  # the pipeline and its four stages

    write(data, 30, 36)
    result = once(reason="more rows")
    assert result.status == "promoted"
    assert champion().version == 2
    assert champion().tags["base_model"] == "models:/test/1"
    assert champion().tags["retrain.reason"].startswith("more rows: new since champion version 1")
    assert json.loads(champion().tags["data.demonstrations"])["files"]["mine.jsonl"]["rows"] == 36
    assert "nothing is new since champion version 2" in once().message

    write(tmp_path / "data/more.jsonl", 36, 40)  # a new file this time
    assert once("stages.promote.min_gain=1").status == "rejected"
    assert champion().version == 2
    assert (
        "nothing is new since retraining 3, which made version 3 (rejected"
        in once("stages.promote.min_gain=1").message
    )
    assert [record.status for record in read_retrainings(home)] == [
        "promoted",
        "promoted",
        "rejected",
    ]

    # Two at once: the second one is refused, or waits.
    with FolderLock(home / ".lock"), pytest.raises(FolderBusy):
        once(force=True)

    # The champion's figure is raised by hand, so that it has to look worse.
    events = []
    monkeypatch.setattr(flows.evaluate_champion, "emit_event", lambda **event: events.append(event))
    check = overrides(tmp_path, "stages.evaluate.episodes=20")
    calm = evaluate_champion(str(CONFIG), check)
    assert not calm.regressed and events == []
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
        for path in (home / "stages/evaluate").glob("*")
        if (path / "manifest.json").is_file()
    ]
    assert (
        len({seed for seed in seeds if seed is not None}) == 2
    )  # each check drew its own episodes


def test_the_event_says_what_was_found(monkeypatch):
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


def test_the_command_refuses_what_it_cannot_do(tmp_path):
    def command(*arguments):
        done = subprocess.run(
            [sys.executable, "-m", "posttrain.cli.main", "retrain", *arguments],
            cwd=ROOT,
            capture_output=True,
            text=True,
        )
        assert "Traceback" not in done.stderr
        return done.returncode, done.stderr

    assert command(str(tmp_path / "none.yaml"))[0] == 2
    assert command(str(CONFIG), "--start", "somewhere")[0] == 2
