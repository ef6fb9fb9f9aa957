"""From a learning service into the registry: consolidation of its snapshot with approval, retraining on its buffer."""

import json
import threading

import pytest
from helpers import ROOT
from helpers.serving import make_folder_of_model
from helpers.waiting import wait_for

from posttrain.cli.main import main
from rl_core.environments import make_environment
from rl_core.inference.serving_requests import ServedAnswer
from rl_core.models.trainable_weights import collect_trainable_weights
from rl_core.online.build_worker import BUFFER_FOLDER, SNAPSHOTS_FOLDER
from rl_core.online.canary_gate import is_canary
from rl_core.online.experience_writer import ExperienceWriter
from rl_core.online.learning_folder import LearningFolder, build_pipeline_settings
from rl_core.online.weight_snapshots import WeightSnapshots
from rl_core.settings import EnvironmentSettings, ModelSettings, OnlineLabelSettings, OnlineSettings
from rl_core.types import Rollout, Trajectory, Turn
from tasks.config import load_settings
from tasks.lifecycle.approval import answer_request, list_approval_requests
from tasks.tracking import Tracking

CONFIG = ROOT / "configs/test.yaml"
GRID = EnvironmentSettings(name="pixel_grid")
TRUSTING = OnlineSettings(labels=OnlineLabelSettings(use_consensus=False, trust_environment=True))


def create_service(tmp_path, online=TRUSTING):
    """Create the folder of a service that began with a model of random weights; return it and its settings."""
    model = make_folder_of_model(tmp_path / "model")
    folder = LearningFolder.open_or_create(
        tmp_path / "out/test/online/model-a", model, {"name": "test"}
    )
    settings = build_pipeline_settings(online, GRID, ModelSettings(device="cpu"), folder.path)
    folder.write_settings(settings)
    return folder, settings


def publish_snapshot(folder, settings, version, scale):
    from rl_core.api.policy import load_policy

    snapshots = WeightSnapshots(folder.path / SNAPSHOTS_FOLDER)
    weights = collect_trainable_weights(load_policy(settings.model).model, copy=True)
    facts = {"updates": version, "first_record": 3, "last_record": 7, "last_digest": "ab"}
    snapshots.publish_snapshot(
        version, {name: tensor * scale for name, tensor in weights.items()}, facts
    )
    snapshots.set_live_version(version)


def record_right_episodes(folder, settings, seeds):
    """Record episodes in the buffer that were answered correctly in one turn."""
    environment = make_environment("pixel_grid", None)
    with ExperienceWriter(folder.path / BUFFER_FOLDER, settings, environment) as writer:
        for seed in seeds:
            answer = environment.episode(seed=seed, level="easy").target
            trajectory = Trajectory(
                "pixel_grid",
                "easy",
                "colour",
                seed,
                "p",
                answer,
                [Turn(f"answer {answer}", num_tokens=2)],
                answer=answer,
                success=True,
                reward=1.0,
                rewards={"task": 1.0},
            )
            writer.record_answers(
                [
                    ServedAnswer(
                        answer_id=f"r{seed}",
                        choice=0,
                        policy_version=0,
                        prompt_ids=[1, 2],
                        completion_ids=[4, 5],
                        text=answer,
                        temperature=1.0,
                        sampler_logprobs=[-0.5, -0.5],
                        finish_reason="stop",
                        rollout=Rollout([1, 2], [4, 5], [True, True], [-0.5, -0.5], trajectory),
                    )
                ]
            )


def list_overrides(tmp_path, *overrides):
    unused_stages = [f"stages.{stage}=null" for stage in ("reward_model", "policy", "analyze")]
    return [f"output={tmp_path / 'out'}", *unused_stages, *overrides]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_consolidation_waits_for_approval_and_registers_lineage(prefect_api, tmp_path):
    from flows.consolidate import run_consolidation

    folder, settings = create_service(tmp_path)
    publish_snapshot(folder, settings, 0, 1.0), publish_snapshot(folder, settings, 10, 0.9)
    tracking = Tracking(None, tmp_path / "out", "test")
    states = []

    def answer_approval(approve):
        (request,) = wait_for(
            lambda: [r for r in list_approval_requests(tracking) if r.is_waiting],
            "a question",
            300,
            every=0.5,
        )
        states.append(
            answer_request(tracking, request, approve=approve, answered_by="ada", note="read").state
        )

    def consolidate(approve=None):
        overrides = list_overrides(
            tmp_path,
            "stages.promote.approve=manual",
            "stages.promote.min_gain=-1",
            "stages.prepare_data.num_demonstrations=40",
        )
        thread = threading.Thread(target=answer_approval, args=(approve,), daemon=True)
        if approve is not None:
            thread.start()
        result = run_consolidation(load_settings(CONFIG, overrides), quiet=True)
        if approve is not None:
            thread.join(30)
        return result

    assert consolidate(approve=True).status == "promoted"
    champion = tracking.find_champion("test")
    assert champion.tags["approval.by"] == "ada" and champion.tags["online.snapshot"] == "10"
    assert champion.tags["online.records"] == "3-7" and champion.tags["online.service"] == str(
        folder.path
    )
    skipped = consolidate()  # approval is not requested twice for the same weights
    assert skipped.status == "skipped" and "registered already" in skipped.message
    publish_snapshot(folder, settings, 20, 0.8)
    refused = consolidate(approve=False)
    assert (refused.status, states) == ("rejected", ["approved", "rejected"])
    assert tracking.find_champion("test").version == champion.version


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_retraining_uses_the_buffer_as_new_data(prefect_api, tmp_path):
    from flows.retrain import run_retraining

    folder, settings = create_service(tmp_path)
    environment = make_environment("pixel_grid", None)
    seeds = [seed for seed in range(400) if not is_canary(environment, "easy", seed)]
    (tmp_path / "data").mkdir()
    file = tmp_path / "data" / "served ü.jsonl"

    def export_rows():
        assert (
            main(["online", "export", str(folder.path / "online.yaml"), "--output", str(file)]) == 0
        )
        return [json.loads(line) for line in file.read_text().splitlines()]

    def retrain(**options):
        data = f"stages.prepare_data={{demonstrations: {tmp_path / 'data'}}}"
        overrides = list_overrides(
            tmp_path, data, "stages.sft.max_steps=2", "stages.promote.min_gain=-1"
        )
        return run_retraining(load_settings(CONFIG, overrides), quiet=True, **options)

    record_right_episodes(folder, settings, seeds[:30])
    assert len(export_rows()) == 30
    assert retrain().status == "promoted"
    assert "nothing is new since champion version 1" in retrain().message
    record_right_episodes(
        folder, settings, seeds[30:40]
    )  # the service learned more, and its buffer is exported again
    rows = export_rows()
    assert len(rows) == 40 and rows[-1]["messages"][-1]["role"] == "assistant"
    assert retrain(reason="served").status == "promoted"
    champion = Tracking(None, tmp_path / "out", "test").find_champion("test")
    assert champion.version == 2 and champion.tags["base_model"] == "models:/test/1"
    assert json.loads(champion.tags["data.demonstrations"])["files"][file.name]["rows"] == 40
