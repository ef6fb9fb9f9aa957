"""A team's week in one test: a schedule retrains and promotes, so does an event; a kill, a resume, an approval."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
import yaml
from helpers.team import ROOT, Team, wait_for

from tasks.lifecycle.retraining import read_retrainings
from tasks.tracking import ModelVersion, Tracking

TRAIN = {
    "entrypoint": "flows/retrain.py:retrain",
    "work_pool": {"name": "posttrain"},
    "concurrency_limit": 1,
}
AUTOMATION = {
    "name": "retrain on regression",
    "trigger": {
        "type": "event",
        "posture": "Reactive",
        "expect": ["posttrain.champion.regressed"],
        "match": {"prefect.resource.id": "posttrain.model.test"},
        "threshold": 1,
        "within": 0,
    },
    "actions": [
        {
            "type": "run-deployment",
            "source": "selected",
            "deployment_id": "retrain/on-regression",
            "parameters": {},
        }
    ],
}


class TeamWeek(Team):
    """The servers, and deployments of the real retraining flow with a tiny configuration."""

    def __init__(self, folder: Path):
        super().__init__(folder, "")
        (self.project / "flows").symlink_to(ROOT / "flows")
        (self.project / "posttrain").symlink_to(ROOT / "posttrain")
        self.data, self.home = folder / "mine.jsonl", self.output / "test"
        self.append_rows(0, 40)
        settings = str(ROOT / "configs/test.yaml")
        unused_stages = [f"stages.{stage}=null" for stage in ("reward_model", "policy", "analyze")]
        overrides = [
            f"output={self.output}",
            f"stages.prepare_data={{demonstrations: {self.data}}}",
            *unused_stages,
            "stages.sft.max_steps=4",
            "stages.promote.min_gain=-1",
            "stages.promote.min_success=0",
        ]
        # Long enough to be killed in the middle, with checkpoints to resume from.
        slow_overrides = [
            *overrides,
            "stages.sft.max_steps=2000",
            "stages.sft.epochs=100000",
            "stages.sft.checkpoint_every=20",
        ]
        nightly = {
            **TRAIN,
            "name": "nightly",
            "schedules": [{"cron": "* * * * *", "timezone": "UTC"}],
        }
        event = {**TRAIN, "name": "on-regression"}
        self.declare(
            yaml.safe_dump(
                {
                    "name": "week",
                    "pull": None,
                    "deployments": [
                        {**nightly, "parameters": {"settings": settings, "overrides": overrides}},
                        {
                            **event,
                            "parameters": {
                                "settings": settings,
                                "force": True,
                                "overrides": [
                                    *slow_overrides,
                                    "stages.promote.approve=manual",
                                    "run.wait_seconds=600",
                                ],
                            },
                        },
                    ],
                }
            )
        )
        (self.project / "deployments" / "automations.yaml").write_text(
            yaml.safe_dump({"automations": [AUTOMATION]})
        )

    def append_rows(self, start: int, end: int) -> None:
        with self.data.open("a") as file:
            for number in range(start, end):
                file.write(
                    json.dumps(
                        {"prompt": f"{number} plus 1 ?", "completion": f"answer {number + 1}"}
                    )
                    + "\n"
                )

    def find_champion(self) -> ModelVersion | None:
        return Tracking(f"http://127.0.0.1:{self.mlflow}", self.output, "test").find_champion(
            "test"
        )

    def list_runs(self, deployment: str) -> list[dict]:
        """List the flow runs that have begun, oldest first."""
        deployment_id = self.api(f"/deployments/name/retrain/{deployment}")["id"]
        runs = self.api(
            "/flow_runs/filter",
            {"deployments": {"id": {"any_": [deployment_id]}}, "sort": "START_TIME_ASC"},
        )
        return [run for run in runs if run["start_time"]]

    def emit_regression(self, number: int) -> None:
        """Emit the event of the champion check."""
        self.emit("posttrain.champion.regressed", "posttrain.model.test", number)


@pytest.fixture
def week(tmp_path):
    week = TeamWeek(tmp_path)
    yield week
    week.call("down")


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_schedule_event_kill_approval_and_nothing_left(week):
    text = week.up("--detach")
    assert "deployed retrain/nightly" in text and "automation retrain on regression: made" in text

    # The schedule fires; there is no champion yet, so the run trains and promotes.
    wait_for(
        lambda: any(run["state"]["type"] == "COMPLETED" for run in week.list_runs("nightly")),
        "the nightly run",
    )
    first = week.find_champion()
    assert first is not None and first.version == 1 and first.tags["retrain.start"] == "base"
    nightly = week.api("/deployments/name/retrain/nightly")["id"]
    week.api(f"/deployments/{nightly}/pause_deployment", {})
    wait_for(
        lambda: all(run["state"]["type"] == "COMPLETED" for run in week.list_runs("nightly")),
        "the nightly runs' end",
    )
    assert all("nothing is new" in run["state"]["message"] for run in week.list_runs("nightly")[1:])

    # New rows, and the event: the automation starts a retraining, whose process is killed in the middle.
    week.append_rows(40, 50)
    week.emit_regression(1)
    wait_for(
        lambda: list(week.home.glob("stages/sft/*.open/checkpoints/checkpoint-*")), "a checkpoint"
    )
    os.kill(json.loads((week.home / "run.json").read_text())["pid"], signal.SIGKILL)
    wait_for(
        lambda: week.list_runs("on-regression")[0]["state"]["type"] == "CRASHED",
        "Prefect's notice of the kill",
    )
    assert week.find_champion().version == 1 and read_retrainings(week.home)[-1].status == "open"
    text = week.call("doctor", "--repair", code=0)
    assert "marked as killed" in text and "posttrain resume" in text

    # The next event resumes it from its checkpoint, up to the gate, where it waits for approval.
    week.emit_regression(2)
    wait_for(lambda: len(week.list_runs("on-regression")) == 2, "the second run")
    wait_for(lambda: "waits for approval" in week.call("approve", code=0), "the question")
    assert week.find_champion().version == 1
    assert [record.number for record in read_retrainings(week.home)] == [1, 2]
    wait_for(lambda: read_retrainings(week.home)[-1].status == "waiting", "the record of it")
    (stage,) = [
        path for path in week.home.glob("stages/sft/*") if (path / "manifest.json").is_file()
    ][1:]
    logged_steps = [
        json.loads(line)["step"] for line in (stage / "metrics.jsonl").read_text().splitlines()
    ]
    assert sorted(set(logged_steps)) == list(
        range(1, max(logged_steps) + 1)
    )  # no step is missing although it was killed
    assert "promoted" in week.call(
        "approve", "test", "--yes", "--note", "looks right", "--by", "ada", code=0
    )
    second = week.find_champion()
    assert second.version == 2 and second.tags["base_model"] == "models:/test/1"
    assert (second.tags["approval.by"], second.tags["approval.note"]) == ("ada", "looks right")
    wait_for(
        lambda: week.list_runs("on-regression")[1]["state"]["type"] == "COMPLETED",
        "the end of the run",
    )
    assert read_retrainings(week.home)[-1].status == "promoted"

    assert week.call("down").splitlines()[-1] == "stopped"
    assert week.left() == []
