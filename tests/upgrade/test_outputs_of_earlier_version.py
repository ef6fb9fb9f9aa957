"""Outputs of an earlier version open with this one: finished and killed runs, services, journals.

`make_fixtures.py` made them. Results stored by stage key may be computed once more, as keys hold digests of
the source; then one line says so, and checkpoints are continued under `--allow-drift`.
"""

from __future__ import annotations

import hashlib
import json
import re
import sqlite3
import subprocess
import tarfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import matplotlib.figure
import pytest
from helpers.frozen_scenes import answer_proofs, run_command, run_stages
from helpers.service import random_data
from helpers.service_http import running_service
from transformers import AutoModelForCausalLM

import rl_core
from posttrain.settings_files import load_online_settings
from rl_core.errors import ResumeRefused
from rl_core.online.build_worker import build_update_worker
from rl_core.online.experience_log import ExperienceLogReader
from rl_core.online.learning_folder import LearningFolder, read_events
from rl_core.online.service_files import read_gate_state
from rl_core.online.weight_snapshots import WeightSnapshots
from rl_core.preferences.rating_journal import RatingJournal
from rl_core.storage import faults
from rl_core.storage.manifest import digest_folder
from tasks.config import load_settings
from tasks.lifecycle.retraining import read_retrainings
from tasks.pipeline.pipeline_run import PipelineRun
from tasks.pipeline.run_options import RunOptions
from tasks.pipeline.stage_fingerprint import read_decisions
from tasks.stage_registry import list_training_stages
from tasks.tracking import Tracking

FIXTURES = Path(__file__).parent / "fixtures"
EXPECTED = json.loads((FIXTURES / "expected.json").read_text())
ORIGINAL_FOLDER = "/tmp/posttrain-earlier-version"  # the folder whose path stands in the outputs
KILLED = ("prepare_data", "sft", "distill", "preference", "reward_model", "policy", "thoughts")
KILLED += ("evaluate", "analyze", "export", "promote")
# How many sampled episodes have an answer depends on the processor: 12 were too few on some.
CHECK_EPISODES = 96
# Reasons for which a stage may run again: another source, a data file that moved, a new setting, the one above.
REASONS = re.compile(
    r"posttrain itself: code .*|stages\.prepare_data\.preferences: .*|.*: absent -> .*"
    r"|.*check_episodes: 12 -> 96"
)


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Unpack all outputs into a folder, and rewrite the paths in them to that folder."""
    folder = tmp_path_factory.mktemp("earlier")
    for archive in FIXTURES.glob("*.tar.gz"):
        with tarfile.open(archive) as packed:
            packed.extractall(folder, filter="data")
    move_paths(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder / "pipelines")
        patch.setattr(subprocess, "run", answer_proofs(subprocess.run))
        patch.setattr(
            matplotlib.figure.Figure, "savefig", lambda figure, file, **_: file.write(b"png")
        )
        yield folder


def move_paths(folder: Path) -> None:
    """Replace the outputs' original path by the folder's; lines with a checksum stay."""
    for name in ("shipped.json", "conditions.json", "online.yaml", "adapter_config.json"):
        for path in folder.rglob(name):
            path.write_text(path.read_text().replace(ORIGINAL_FOLDER, str(folder)))
    with closing(sqlite3.connect(folder / "pipelines/outputs/mlflow/mlflow.db")) as store, store:
        for (table,) in store.execute(
            "select name from sqlite_master where type = 'table'"
        ).fetchall():
            for _, column, kind, *_ in store.execute(f"pragma table_info({table})").fetchall():
                if kind.startswith(("VARCHAR", "TEXT")):
                    change = f"update {table} set {column} = replace({column}, ?, ?)"
                    store.execute(
                        f"{change} where {column} like '%' || ? || '%'",
                        (ORIGINAL_FOLDER, str(folder), ORIGINAL_FOLDER),
                    )


# ------------------------------------------------------------------------------------ pipelines


def test_finished_runs_are_listed_and_compared(outputs: Path) -> None:
    rows = json.loads(run_command(["runs", "--output", "outputs", "--limit", "99", "--json"]))
    finished = [row for row in rows if row["run"].startswith("finished · ")]
    assert len(finished) == EXPECTED["pipelines"]["runs"] == 2
    assert {row["status"] for row in finished} == {"finished"}
    compared = run_command(
        ["compare", *[row["run_id"] for row in finished], "--output", "outputs", "--json"]
    )
    comparison = json.loads(compared)
    assert [run["run"] for run in comparison["runs"]] == [row["run"] for row in finished]
    assert {"sft", "policy", "evaluate"} <= comparison["stages"].keys() and comparison["curves"]
    records = read_retrainings(outputs / "pipelines/outputs/finished")
    assert [record.status for record in records] == EXPECTED["pipelines"]["retrainings"]


def test_the_champion_stays_champion(outputs: Path, tmp_path: Path) -> None:
    expected = EXPECTED["pipelines"]
    tracking = Tracking(None, outputs / "pipelines/outputs", "finished")
    champion = tracking.find_champion("finished")
    assert champion is not None and champion.version == expected["champion"]
    assert len(tracking.list_versions("finished")) == expected["versions"]
    folder = tracking.download_version("finished", champion.version, tmp_path)
    assert digest_folder(Path(folder)) == champion.tags["model_sha256"] == expected["model_sha256"]
    assert AutoModelForCausalLM.from_pretrained(folder).num_parameters() > 10_000


def test_records_of_finished_stages_are_read(outputs: Path) -> None:
    stages = outputs / "pipelines/outputs/finished/stages"
    policy = stages / "policy" / EXPECTED["pipelines"]["policy"]
    assert len(rl_core.read_rewards(policy)) == EXPECTED["pipelines"]["rewards"]
    assert "train/success_rate" in rl_core.read_metrics(policy).columns
    assert "reward/mean" in rl_core.read_history(policy)["metrics"]
    for evaluation in stages.glob("evaluate/*/evaluation.json"):
        frame = rl_core.read_trajectories(evaluation.parent)
        assert set(frame["level"]) == {"easy"} and len(frame) == 6 * frame["model"].nunique()
    for analysis in stages.glob("analyze/*/analysis.csv"):
        assert {"success_rate", "perplexity"} & set(
            rl_core.read_analysis(analysis.parent)["metric"]
        )


def test_a_promotion_that_waited_is_approved(outputs: Path) -> None:
    tracking = Tracking(None, outputs / "pipelines/outputs", "asked")
    (waiting,) = [
        row for row in json.loads(run_command(["approve", "--output", "outputs", "--json"]))
    ]
    assert (waiting["name"], waiting["state"]) == ("asked", "waiting") and tracking.find_champion(
        "asked"
    ) is None
    run_command(["approve", "asked", "--output", "outputs", "--yes", "--by", "ann"])
    champion = tracking.find_champion("asked")
    assert champion is not None and champion.version == waiting["version"]
    assert champion.tags["approval.by"] == "ann"


@pytest.mark.parametrize("stage", KILLED)
def test_a_killed_run_continues_or_says_why_it_restarts(
    stage: str, outputs: Path, tmp_path: Path
) -> None:
    changes = [f"stages.thoughts.check_episodes={CHECK_EPISODES}"] if stage == "thoughts" else []
    config = outputs / "pipelines" / f"killed-{stage.replace('_', '-')}.yaml"
    settings = load_settings(config, changes)
    stages = outputs / "pipelines/outputs" / settings.name / "stages"
    begun = list((stages / stage).glob("*.open"))
    assert len(begun) == 1, "the kill left an open folder"
    faults.log_reached_points(tmp_path / "reached")
    try:
        run, reasons = resume_run(stage, lambda options: run_stages(settings, options))
    finally:
        faults.log_reached_points(None)
    reached = {line.split()[2] for line in (tmp_path / "reached").read_text().splitlines()}
    assert all(map(REASONS.fullmatch, reasons)), reasons
    assert list(run.results) == [*settings.stages.active]
    if stage in list_training_stages():
        assert {"checkpoint.loaded", "loop.resumed"} <= reached, "it begins with its checkpoint"
    for name, result in run.results.items():
        assert result.cached or has_reason(stages / name), f"{name} ran again without a word"
    assert run.resumed or run.crashed_runs, "it continues the killed run, or names it"


def resume_run(stage: str, start: Any) -> tuple[PipelineRun, list[str]]:
    """Return a run of the stages, and the reasons for which it took `--allow-drift`."""
    try:
        return start(RunOptions()), []
    except ResumeRefused as error:
        lines = str(error).splitlines()
        assert f"stage '{stage}'" in lines[0] and any("--allow-drift" in line for line in lines)
        reasons = [line.strip() for line in lines if line.startswith("  ") and "--" not in line]
        assert reasons, str(error)
        return start(RunOptions(on_drift="resume")), reasons


def has_reason(stage: Path) -> bool:
    """Return True where the newest decision about a stage says why it ran, if it is news."""
    decision = read_decisions(stage)[-1]
    if decision.kind in ("first", "resumed"):
        return True
    return any(map(REASONS.fullmatch, decision.changes))


def test_a_user_stage_runs_with_its_documented_imports(outputs: Path) -> None:
    with pytest.warns(FutureWarning, match=r"stages\.own is now stages\.custom"):
        settings = load_settings(outputs / "pipelines/custom.yaml")
    run = run_stages(settings)
    assert list(run.results) == ["prepare_data", "sft", "rounding"]
    assert run.results["rounding"].summary["note"] == "weights rounded to float16"


# --------------------------------------------------------------------- service, online, ratings


def test_a_training_service_has_its_runs_and_weights(outputs: Path) -> None:
    expected, folder = EXPECTED["service"], outputs / "service/folder"
    with running_service(folder, outputs / "service/base", key="reader") as service:
        run = service.store.find_run(expected["run"])
        assert (run.steps, run.next_seq) == (expected["steps"], expected["next_seq"])
        saved = service.store.list_checkpoints(None, 100, 0, expected["run"]).items
        assert {record.path for record in saved} == expected["saved"].keys()
        for record in saved:
            about = expected["saved"][record.path]
            assert record.facts["data_digest"] == about["digest"]
            for name, digest in about["files"].items():
                content = (folder / record.folder / name).read_bytes()
                assert hashlib.sha256(content).hexdigest() == digest, f"{record.path}: {name}"
        check_training_continues(
            service, expected, [record for record in saved if record.kind != "external_weights"]
        )


def check_training_continues(service: Any, expected: dict[str, Any], saved: list[Any]) -> None:
    """Check that saved weights are loaded and trained on, by another key."""
    session = service.session()
    (weights,) = [record.path for record in saved if record.kind == "weights"]
    for record in saved:
        service.store.update_checkpoint(record.path, public=True)
    body = {"session_id": session, "model_seq_id": 0, "path": weights, "optimizer": True}
    run = service.result(service.post("load_weights", body))["model_id"]
    service.result(service.forward_backward(run, 1, random_data(0)))
    service.result(service.post("optim_step", {"model_id": run, "seq_id": 2, "adam_params": {}}))
    assert service.store.find_run(run).steps == expected["steps"] + 1


def test_a_folder_of_online_learning_has_its_records_and_continues(outputs: Path) -> None:
    expected, folder = EXPECTED["online"], outputs / "online/service"
    with pytest.warns(FutureWarning, match=r"update\.\w+ is now update\."):
        settings = load_online_settings(folder / "online.yaml")
    assert LearningFolder.open_or_create(folder, folder / "model", {}).facts["version"] == 3
    assert [event["kind"] for event in read_events(folder)] == ["promoted"]
    assert read_gate_state(folder)["decisions"]
    snapshots = WeightSnapshots(folder / "snapshots")
    assert (snapshots.read_live_version(), snapshots.list_versions()) == (
        expected["live"],
        expected["versions"],
    )
    assert len(list(ExperienceLogReader(folder / "buffer").read_records())) == expected["records"]
    with build_update_worker(settings, folder) as worker:
        assert worker.records == expected["records"]
        assert worker.updates == expected["updates"] and not worker.step()


def test_a_journal_of_ratings_has_its_counts(outputs: Path) -> None:
    journal = RatingJournal(outputs / "ratings/ratings.jsonl")
    assert len(journal) == EXPECTED["ratings"]["count"]
    assert {name: journal.count_ratings_of(name) for name in journal.raters} == EXPECTED["ratings"][
        "raters"
    ]
