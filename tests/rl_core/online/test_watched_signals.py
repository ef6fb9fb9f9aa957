"""Signals for the alarms: KL to the champion compared with NumPy, components that misrank by hand."""

import numpy as np
import pytest
from helpers.online_worker import (
    build_answered_request,
    make_worker,
    run_to_end,
    settings,
    write_traffic,
)
from helpers.tiny import PAD, nano

from rl_core.models.logprobs import completion_logprobs
from rl_core.models.trainable_weights import collect_trainable_weights, load_trainable_weights
from rl_core.online import update_worker
from rl_core.online.drift_detection import measure_champion_kl, measure_component_misranking
from rl_core.online.labelled_rewards import RewardTable
from rl_core.online.weight_snapshots import WeightSnapshots
from rl_core.rollouts.batching import build_batches, build_train_row
from rl_core.settings import OnlineDriftSettings, OnlineUpdateSettings
from rl_core.training.optimizer_step import OptimizerStep


def build_table(task, other, success, known=(True,) * 4):
    weighted = np.array([task, other]).T
    return RewardTable(
        ("task", "tool_use"),
        weighted,
        weighted,
        weighted.sum(1),
        np.array(known),
        np.array(success, dtype=bool),
    )


def test_components_that_rank_right_above_wrong_and_those_that_do_not():
    success = (True, False, False, True)
    task = (1.0, 0.0, 0.0, 1.0)
    assert measure_component_misranking(build_table(task, (0.4, 0.1, 0.2, 0.3), success)) == 0.0
    # task does not count
    assert measure_component_misranking(build_table(task, (0.1, 0.4, 0.3, 0.2), success)) == 1.0
    # two ties of four pairs
    assert measure_component_misranking(build_table(task, (0.2, 0.2, 0.1, 0.2), success)) == 0.25
    known = (True, True, False, False)
    assert (
        measure_component_misranking(build_table(task, (0.3, 0.4, 0.0, 0.9), success, known)) == 1.0
    )
    assert (
        measure_component_misranking(build_table(task, (0.1, 0.4, 0.3, 0.2), (True,) * 4)) is None
    )
    both = build_table(task, (0.1, 0.4, 0.3, 0.2), success)
    task_alone = RewardTable(
        ("task",),
        both.raw_RC[:, :1],
        both.weighted_RC[:, :1],
        both.totals_R,
        both.is_known_R,
        both.success_R,
    )
    assert measure_component_misranking(task_alone) is None


@pytest.fixture
def champion_parts(tmp_path):
    """Return a model that has changed, its optimizer step, snapshots, and the champion weights that it started from."""
    model, snapshots = nano(), WeightSnapshots(tmp_path)
    champion = collect_trainable_weights(model, copy=True)
    snapshots.publish_snapshot(0, champion)
    load_trainable_weights(model, {name: tensor * 1.5 for name, tensor in champion.items()})
    return model, OptimizerStep(model, OnlineUpdateSettings(), 10), snapshots, champion


def test_kl_to_the_champion_is_the_mean_of_k3_over_all_answers(champion_parts):
    model, step, snapshots, champion = champion_parts
    experiences = [
        build_answered_request(0),
        build_answered_request(1, version=7),
        build_answered_request(2, version=7),
    ]
    kl = measure_champion_kl(model, step, snapshots, experiences, pad_id=PAD)
    moved = collect_trainable_weights(model, copy=True)
    load_trainable_weights(model, champion)
    total = 0.0
    for experience in experiences[1:]:
        (batch,) = build_batches(
            [build_train_row(rollout) for rollout in experience.rollouts], 1000, PAD
        )
        mask = batch.loss_mask_BS
        champion_logprobs = completion_logprobs(model, batch)[0].detach()
        d = (batch.sampler_logprobs_BS - champion_logprobs)[mask].double().numpy()
        total += float((np.exp(-d) - 1 + d).sum())
    num_tokens = sum(
        len(rollout.completion_ids) for experience in experiences for rollout in experience.rollouts
    )
    assert kl == pytest.approx(total / num_tokens, rel=1e-5)
    assert kl > 0.01
    load_trainable_weights(model, moved)
    measure_champion_kl(model, step, snapshots, experiences, pad_id=PAD)
    assert all((model.state_dict()[name] == value).all() for name, value in moved.items())


def test_without_answers_or_champion_there_is_no_kl(champion_parts, tmp_path):
    model, step, snapshots, _ = champion_parts
    assert measure_champion_kl(model, step, snapshots, [], pad_id=PAD) is None
    none = WeightSnapshots(tmp_path / "none")
    assert (
        measure_champion_kl(model, step, none, [build_answered_request(0, version=3)], pad_id=PAD)
        is None
    )
    assert measure_champion_kl(model, step, none, [build_answered_request(0)], pad_id=PAD) == 0.0


def test_each_request_is_observed_once(tmp_path, monkeypatch):
    drift_settings = settings(
        {"first_update": 4}, drift=OnlineDriftSettings(watched=("components",))
    )
    monkeypatch.setattr(update_worker, "measure_component_misranking", lambda table: 0.5)
    with make_worker(tmp_path, tmp_path / "log", drift_settings) as worker:
        write_traffic(tmp_path / "log", range(12), feedback=10**9)
        drawn = []
        while worker.step():
            drawn += set(worker.last_report.requests) if worker.last_report is not None else []
        assert worker.drift.detectors["components"].count == len(set(drawn)) < len(drawn)


def test_without_components_other_than_the_task_there_is_no_signal(tmp_path):
    drift_settings = settings(
        {"first_update": 4},
        drift=OnlineDriftSettings(watched=("components",)),
        rewards={"task": 1.0},
    )
    with make_worker(tmp_path, tmp_path / "log", drift_settings) as worker:
        write_traffic(tmp_path / "log", range(12), feedback=10**9)
        run_to_end(worker)
        assert worker.drift.detectors["components"].count == 0 and worker.learner.num_taken > 0
