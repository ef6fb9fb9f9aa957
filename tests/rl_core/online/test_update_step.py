"""The guarded update: loss and KL compared with NumPy, every guardrail, resume to the last bit."""

import copy
import dataclasses
import itertools
import json
import math
import re

import numpy as np
import pytest
import torch
from helpers.online import experience, recorded
from helpers.tiny import PAD, nano, weights_digest

from rl_core.errors import (
    CheckpointError,
    CorruptError,
    DataError,
    NonFiniteError,
    SettingsError,
)
from rl_core.losses.kl import banded_kl_coef
from rl_core.models.logprobs import completion_logprobs, compute_vocabulary_logprobs
from rl_core.models.lora import add_adapter
from rl_core.models.trainable_weights import collect_trainable_weights, load_trainable_weights
from rl_core.online.experience_buffer import BufferedExperience
from rl_core.online.labelled_rewards import RewardTable
from rl_core.online.labels import Label
from rl_core.online.update_audit import (
    MAX_LISTED_EXPERIENCES,
    build_contribution_record,
    format_audit_line,
)
from rl_core.online.update_step import (
    GuardedLearner,
    RunningRewardBaseline,
    ScoredExperience,
    UpdateTask,
    build_recorded_distribution,
    compute_adaptive_learning_rate,
    compute_request_advantages,
)
from rl_core.online.weight_snapshots import WeightSnapshots
from rl_core.rollouts.batching import TrainRow, build_batches
from rl_core.settings import LoraSettings, OnlineUpdateSettings
from rl_core.storage.manifest import digest_bytes

LABEL = Label("answer", "feedback", text="a")


def build_table(rewards, known=None):
    values = np.array(rewards, dtype=np.float64)
    known = np.ones(len(values), bool) if known is None else np.array(known)
    return RewardTable(("task",), values[:, None], values[:, None], values, known, values >= 0.5)


def build_scored(served, rewards, *, weight=1.0, known=None, method="dr_grpo"):
    table = build_table(rewards, known)
    advantages, errors = compute_request_advantages(table.totals_R, table.is_known_R, 0.5, method)
    return ScoredExperience(
        BufferedExperience(1, served, label=LABEL), served, LABEL, weight, table, advantages, errors
    )


def build_task(*items, number=1, learning_rate=1e-2, kl_coef=0.1):
    return UpdateTask(number, items, learning_rate, kl_coef)


def make_learner(tmp_path, model=None, **options):
    options = {
        "learning_rate": 1e-2,
        "max_learning_rate": 1.0,
        "kl_coef": 0.1,
        "kl_max": 10.0,
        "ema_decay": 0.9,
        **options,
    }
    model = model or nano()
    snapshots = WeightSnapshots(tmp_path / "snapshots")
    learner = GuardedLearner(model, OnlineUpdateSettings(**options), snapshots, pad_id=PAD)
    if 0 not in snapshots.list_versions():
        snapshots.publish_snapshot(0, learner.copy_served_weights())
    return learner


def update_from_request(learner, request, rewards=(1.0, 0.0, 0.0), **options):
    """Apply an update from one request with these rewards."""
    return learner.apply_update(build_task(build_scored(experience(request), rewards), **options))


def test_the_learning_rate_follows_the_error_within_its_bounds():
    options = {"base": 1e-4, "reference": 0.5, "low": 2e-5, "high": 3e-4}
    rates = [
        compute_adaptive_learning_rate(error, **options)
        for error in (0.0, 0.1, 0.25, 0.5, 1.0, 9.0)
    ]
    assert rates == pytest.approx([2e-5, 2e-5, 5e-5, 1e-4, 2e-4, 3e-4])
    for bad in (math.nan, -1.0, math.inf):
        with pytest.raises(DataError):
            compute_adaptive_learning_rate(bad, **options)


def test_advantages_of_a_request_by_hand():
    rewards = np.array([1.0, 9.0, 0.0, 0.0])
    known = np.array([True, False, True, True])
    advantages, errors = compute_request_advantages(rewards, known, 0.7, "dr_grpo")
    assert advantages == pytest.approx([2 / 3, 0, -1 / 3, -1 / 3]) and errors == pytest.approx(
        advantages
    )
    alone = compute_request_advantages(rewards, np.array([True, False, False, False]), 0.7, "grpo")
    assert alone[0] == pytest.approx([0.3, 0, 0, 0]) and alone[1] == pytest.approx([0.3, 0, 0, 0])
    assert not compute_request_advantages(rewards, np.zeros(4, bool), 0.7, "grpo")[0].any()


def test_a_running_mean_is_right_from_its_first_value():
    baseline = RunningRewardBaseline(0.5)
    assert baseline.read_mean(("e", "l")) == 0.0
    for reward in (1.0, 0.0, 1.0):
        baseline.add_reward(("e", "l"), reward)
    assert baseline.read_mean(("e", "l")) == pytest.approx((0.25 * 1 + 0.5 * 0 + 1 * 1) / 1.75)
    restored = RunningRewardBaseline(0.5)
    restored.load_state_dict(baseline.state_dict())
    assert (
        restored.read_mean(("e", "l")) == baseline.read_mean(("e", "l"))
        and restored.read_mean(("e", "other")) == 0.0
    )


def build_row(temperature=1.0):
    return TrainRow([1, 2, 5], [3, 4, 7], [True, False, True], [-1.0, 0.0, -2.0], temperature)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_distributions_over_the_vocabulary_are_those_of_the_trainer(temperature):
    model = nano()
    (batch,) = build_batches(
        [build_row(temperature), dataclasses.replace(build_row(temperature), prompt_ids=[1])],
        100,
        PAD,
    )
    logprobs_NV = compute_vocabulary_logprobs(model, batch)
    assert logprobs_NV.shape == (4, 11)
    assert torch.allclose(logprobs_NV.exp().sum(1), torch.ones(4), atol=1e-6)
    ids = batch.input_ids_BS[batch.loss_mask_BS]
    expected = completion_logprobs(model, batch)[0][batch.loss_mask_BS]
    assert torch.allclose(logprobs_NV.gather(1, ids[:, None])[:, 0], expected, atol=1e-6)


def compute_numpy_loss(model, old, items):
    """Compute (rl, mean KL) of an update in float64, from logits of complete sequences."""

    def logprobs(network, rollout):
        ids = torch.tensor([[*rollout.prompt_ids, *rollout.completion_ids]])
        logits = (
            network(ids).logits[0, len(rollout.prompt_ids) - 1 : -1].detach().double().numpy()
            / rollout.temperature
        )
        return logits - np.log(np.exp(logits).sum(1, keepdims=True))

    rl = kl = count = 0.0
    for scored in items:
        for row, rollout in enumerate(scored.buffered.experience.rollouts):
            new, before = logprobs(model, rollout), logprobs(old, rollout)
            advantage = scored.weight * scored.advantages_R[row]
            for index, token in enumerate(rollout.completion_ids):
                ratio = np.exp(new[index, token] - rollout.sampler_logprobs[index])
                rl += max(-ratio * advantage, -np.clip(ratio, 0.8, 1.2) * advantage)
                kl += (np.exp(before[index]) * (before[index] - new[index])).sum()
                count += 1
    return rl / count, kl / count


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_losses_against_numpy(tmp_path, temperature):
    model, old = nano(seed=1), nano(seed=0)
    learner = make_learner(tmp_path, model)
    learner.snapshots.publish_snapshot(7, collect_trainable_weights(old, copy=True))
    items = [
        build_scored(
            experience("r1", version=7, temperature=temperature), [1.0, 0.0, 0.0], weight=0.5
        ),
        build_scored(experience("r2", ("a", "b"), version=7, temperature=temperature), [0.0, 1.0]),
    ]
    before = copy.deepcopy(model)
    report = learner.apply_update(build_task(*items))
    rl, kl = compute_numpy_loss(before, old, items)
    assert report.refused == "" and not report.is_lower_bound
    assert (report.num_rollouts, report.num_tokens) == (5, 10)
    assert report.losses["rl"] == pytest.approx(rl, rel=1e-5)
    assert report.kl_control["before"] == pytest.approx(kl, rel=1e-5)
    assert report.losses["total"] == pytest.approx(rl + 0.1 * kl, rel=1e-5)
    assert report.kl_control["mean_kl"] == pytest.approx(
        compute_numpy_loss(model, old, items)[1], rel=1e-4
    )
    assert report.error == pytest.approx(math.sqrt((4 / 9 + 2 / 9 + 0.5) / 5))


def test_it_learns_what_is_rewarded(tmp_path):
    """Reward the second of three answers of one token each to one prompt."""
    learner = make_learner(tmp_path)

    def distribution():
        (batch,) = build_batches([TrainRow([1, 2], [3], [True])], 100, PAD)
        with torch.no_grad():
            return compute_vocabulary_logprobs(learner.model, batch)[0]

    before, original = distribution(), experience("r1")
    rollouts = [
        dataclasses.replace(
            rollout,
            completion_ids=[3 + i],
            loss_mask=[True],
            sampler_logprobs=[float(before[3 + i])],
        )
        for i, rollout in enumerate(original.rollouts)
    ]
    group = build_scored(dataclasses.replace(original, rollouts=tuple(rollouts)), [0.0, 1.0, 0.0])
    for number in range(1, 11):
        assert (
            learner.apply_update(build_task(group, number=number, learning_rate=2e-3)).refused == ""
        )
    moved = distribution() - before
    assert moved[4] > 0.1 and moved[3] < 0 and moved[5] < 0


def test_micro_batches_change_nothing(tmp_path):
    reports = []
    for tokens in (4, 4096):
        learner = make_learner(tmp_path / str(tokens), micro_batch_tokens=tokens)
        reports.append(
            learner.apply_update(
                build_task(
                    build_scored(experience("r1"), [1.0, 0.0, 0.0]),
                    build_scored(experience("r2", ("a",)), [1.0]),
                )
            )
        )
    for name in ("losses", "gradients", "kl_control"):
        assert getattr(reports[0], name) == pytest.approx(
            getattr(reports[1], name), rel=1e-4, abs=1e-7
        )


def test_without_a_snapshot_the_recorded_tokens_give_a_lower_bound(tmp_path):
    learner = make_learner(tmp_path)
    exact = build_scored(experience("r1"), [1.0, 0.0, 0.0])
    only_recorded = build_scored(experience("r2", version=99, top=True), [1.0, 0.0, 0.0])
    nothing = build_scored(experience("r3", version=98), [1.0, 0.0, 0.0])
    report = learner.apply_update(build_task(exact, only_recorded, nothing))
    assert report.is_lower_bound and report.without_old == 3 and report.num_rollouts == 6
    report = learner.apply_update(build_task(nothing, number=2))
    assert report.refused == "empty" and learner.refused["empty"] == 1


def test_unknown_rewards_are_not_learned_from(tmp_path):
    learner = make_learner(tmp_path)
    report = learner.apply_update(
        build_task(build_scored(experience("r1"), [1.0, 0.0, 5.0], known=[True, True, False]))
    )
    assert report.num_rollouts == 2 and report.num_tokens == 4


def digest_state(learner):
    state = learner.state_dict()["optimizer_step"]
    tensors = [
        tensor
        for part in state["optimizer"]["state"].values()
        for tensor in part.values()
        if isinstance(tensor, torch.Tensor)
    ]
    tensors += list((state["ema"] or {}).get("averages", {}).values())
    return digest_bytes(
        b"".join(tensor.detach().numpy().tobytes() for tensor in tensors)
    ), weights_digest(learner.model)


def test_a_step_beyond_the_kl_limit_is_undone_to_the_last_bit(tmp_path):
    learner = make_learner(tmp_path, kl_max=0.0601, max_grad_norm=100.0)
    update_from_request(learner, "r1", learning_rate=1e-4)
    before, coefficient = digest_state(learner), learner.kl_coef
    report = update_from_request(learner, "r2", number=2, learning_rate=1.0)
    assert report.refused == "kl" and report.kl_control["mean_kl"] > 0.0601
    assert digest_state(learner) == before
    # a refused step still changes the coefficient
    assert learner.kl_coef == pytest.approx(coefficient * 1.2)
    assert (learner.refused["kl"], learner.refused_in_row, learner.num_taken) == (1, 1, 1)
    update_from_request(learner, "r3", number=3, learning_rate=1e-4)
    assert learner.refused_in_row == 0 and learner.optimizer_step.num_steps == 3
    assert learner.collect_metrics()["online/update_success_rate"] == pytest.approx(2 / 3)


def test_the_coefficient_moves_by_its_factor_within_its_bounds(tmp_path):
    learner = make_learner(tmp_path, kl_coef=1e-4)
    coefficients = [learner.kl_coef]
    for number in range(1, 6):
        report = update_from_request(
            learner, f"r{number}", number=number, learning_rate=3e-2 if number < 4 else 1e-5
        )
        after, before = report.kl_control["mean_kl"], report.kl_control["before"]
        expected = banded_kl_coef(
            coefficients[-1],
            max(0.0, after + 4 * (after - before)),
            target=0.05,
            tolerance=0.01,
            increase_factor=1.2,
            decrease_factor=1.2,
        )
        coefficients.append(learner.kl_coef)
        assert learner.kl_coef == expected and report.kl_control["coefficient"] == coefficients[-2]
    assert min(coefficients) == 1e-4 and len(set(coefficients)) > 1


def test_the_coefficient_follows_the_trend_of_the_kl(tmp_path):
    learner = make_learner(tmp_path, kl_coef=0.01)
    # KL before the step, KL after it, factor: the KL extrapolated by 4 steps is above, in or below the band
    for before, after, factor in (
        (0.03, 0.045, 1.2),
        (0.05, 0.055, 1.2),
        (0.05, 0.05, 1),
        (0.1, 0.09, 1),
        (0.1, 0.08, 1 / 1.2),
        (0.0, 0.0, 1 / 1.2),
        (0.02, 0.025, 1),
        (0.09, 0.085, 1.2),
    ):
        assert learner._compute_next_kl_coef(after, before) == pytest.approx(0.01 * factor), (
            before,
            after,
        )


def test_an_update_with_nothing_to_learn_is_null_and_changes_nothing(tmp_path):
    learner = make_learner(tmp_path, kl_coef=0.01)
    update_from_request(learner, "r1", number=1, learning_rate=1e-4)  # leaves moments
    learner.kl_coef = 0.01
    before = digest_state(learner)
    for number in range(2, 5):
        report = update_from_request(learner, "r1", [1.0, 1.0, 1.0], number=number)
        assert report.refused == "null" and report.error == 0 and report.num_rollouts == 3
        assert digest_state(learner) == before and learner.kl_coef == 0.01
    assert "null: no answer of 3 was better or worse" in format_audit_line(report, 0.0)
    assert (learner.num_taken, learner.refused["null"], learner.refused_in_row) == (1, 3, 0)
    assert learner.collect_metrics()["online/update_success_rate"] == 1.0
    state = learner.state_dict()
    del state["refused"]["null"]  # as in checkpoints of earlier releases
    learner.load_state_dict(state)
    assert learner.refused["null"] == 0
    assert update_from_request(learner, "r1", number=4, learning_rate=1e-6).refused == ""
    assert learner.kl_coef == pytest.approx(0.01 / 1.2)


def test_the_gradient_norm_is_clipped(tmp_path):
    learner = make_learner(tmp_path, max_grad_norm=1e-3)
    report = update_from_request(learner, "r1")
    assert report.gradients["norm"] > 1e-3 and report.gradients["clipped"] == 1e-3


def test_a_step_that_is_not_finite_is_refused_and_counted(tmp_path):
    learner = make_learner(tmp_path)
    before = weights_digest(learner.model)
    handle = learner.model.model.norm.weight.register_hook(lambda gradient: gradient * math.nan)
    report = update_from_request(learner, "r1")
    handle.remove()
    assert report.refused == "nonfinite" and weights_digest(learner.model) == before
    assert learner.refused_in_row == 1 and learner.optimizer_step.ema.updates == 0
    assert '"nan"' in json.dumps(report.to_json(), allow_nan=False)
    assert update_from_request(learner, "r1", number=2).refused == ""


def test_a_finite_step_that_breaks_the_weights_is_undone(tmp_path):
    learner = make_learner(tmp_path, max_grad_norm=1e9, max_learning_rate=1.0)
    before = weights_digest(learner.model)
    report = update_from_request(learner, "r1", learning_rate=1e38)
    assert report.refused == "nonfinite" and weights_digest(learner.model) == before
    assert learner.optimizer_step.skipped_steps == 0 and learner.kl_coef == learner.settings.kl_coef


def test_only_the_average_is_served_and_its_bias_is_corrected(tmp_path):
    learner = make_learner(tmp_path, ema_decay=0.5)
    seen = []
    for number in range(1, 4):
        update_from_request(learner, f"r{number}", number=number)
        seen.append(collect_trainable_weights(learner.model, copy=True))
    digest = weights_digest(learner.model)
    served = learner.copy_served_weights()
    assert weights_digest(learner.model) == digest
    for name, value in served.items():
        expected = (0.25 * seen[0][name] + 0.5 * seen[1][name] + seen[2][name]) / 1.75
        assert torch.allclose(value, expected, atol=1e-6), name


def apply_updates(learner, numbers):
    reports = []
    for number in numbers:
        reports.append(
            update_from_request(learner, f"r{number}", [1.0, 0.0, float(number % 2)], number=number)
        )
    return reports


@pytest.mark.parametrize(
    "kind",
    [
        "plain",
        "bfloat16",
        "dropout",
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("lora", "autocast")),
    ],
)
def test_a_resumed_learner_continues_to_the_last_bit(tmp_path, kind):
    def model():
        network = nano(dropout=0.2 if kind == "dropout" else 0.0)
        if kind == "bfloat16":
            network = network.bfloat16()
        if kind == "lora":
            torch.manual_seed(0)
            network = add_adapter(
                network, LoraSettings(rank=2, target_modules=("q_proj", "v_proj"))
            )
        return network

    options = (
        {"dropout": True}
        if kind == "dropout"
        else {"autocast": "bfloat16"}
        if kind == "autocast"
        else {}
    )
    uninterrupted = make_learner(tmp_path, model(), **options)
    apply_updates(uninterrupted, range(1, 3))
    state = copy.deepcopy(uninterrupted.state_dict())
    weights = collect_trainable_weights(uninterrupted.model, copy=True)
    torch.manual_seed(99)  # other code of the process may use the global generator
    expected = [report.to_json() for report in apply_updates(uninterrupted, range(3, 5))]
    resumed = make_learner(tmp_path, model(), **options)
    load_trainable_weights(resumed.model, weights)
    resumed.load_state_dict(state)
    torch.manual_seed(5)
    assert [report.to_json() for report in apply_updates(resumed, range(3, 5))] == expected
    assert weights_digest(resumed.model) == weights_digest(uninterrupted.model)


def build_noisy_model(kind, dropout=0.3):
    """Build a model with dropout in its attention; `lora` adds fresh adapters with dropout."""
    model = nano(dropout=dropout)
    if kind == "full":
        return model
    settings = LoraSettings(rank=2, dropout=dropout, target_modules=("q_proj", "down_proj"))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return add_adapter(model, settings)


@pytest.mark.parametrize("kind", ["full", "lora"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_weights_that_have_not_moved_have_the_kl_0_under_dropout(tmp_path, kind, checkpointing):
    """Check that old and new policy are compared under the same masks: before the step, and after a tiny one."""
    learner = make_learner(
        tmp_path,
        build_noisy_model(kind),
        dropout=True,
        activation_checkpointing=checkpointing,
        min_learning_rate=1e-10,
    )
    rewards = [1.0, 0.0, 0.0]
    for number in (1, 2):
        report = update_from_request(learner, "r1", rewards, number=number, learning_rate=1e-10)
        assert report.kl_control["before"] == pytest.approx(0, abs=1e-7)
        assert report.kl_control["mean_kl"] == pytest.approx(0, abs=1e-7)
        # of a ratio of 1: minus the mean advantage, (2/3 - 1/3 - 1/3) / 3
        assert report.losses["rl"] == pytest.approx(0, abs=1e-6)
        assert report.gradients["norm"] > 1e-3 and report.refused == ""


def test_dropout_is_used_and_differs_by_update_and_row(tmp_path):
    def measure_norm(number, request="r1", **options):
        learner = make_learner(tmp_path, nano(dropout=0.3), max_learning_rate=1.0, **options)
        return update_from_request(learner, request, number=number).gradients["norm"]

    norms = [measure_norm(1), measure_norm(1, dropout=True), measure_norm(2, dropout=True)]
    assert norms == [measure_norm(1), measure_norm(1, dropout=True), measure_norm(2, dropout=True)]
    assert min(abs(a - b) / a for a, b in itertools.combinations(norms, 2)) > 1e-3
    assert measure_norm(1, dropout=True, micro_batch_tokens=4) == norms[1]


def test_answers_without_a_snapshot_are_learned_from_without_dropout(tmp_path):
    """Check that recorded distributions, which were sampled without dropout, are compared with passes without it."""
    recorded_only = build_scored(experience("r2", version=99, top=True), [1.0, 0.0, 0.0])

    def update(dropout, *items, **options):
        learner = make_learner(tmp_path, nano(dropout=0.3), dropout=dropout, **options)
        return learner.apply_update(build_task(*items, learning_rate=1e-9))

    options = {"min_learning_rate": 1e-9}
    without, with_dropout = (update(on, recorded_only, **options) for on in (False, True))
    assert with_dropout.losses == pytest.approx(without.losses, rel=1e-5)
    assert with_dropout.gradients == pytest.approx(without.gradients, rel=1e-5)
    assert with_dropout.kl_control == pytest.approx(without.kl_control, rel=1e-5)
    exact = build_scored(experience("r1"), [1.0, 0.0, 0.0])
    mixed = update(True, exact, recorded_only, **options)
    assert mixed.is_lower_bound and mixed.num_rollouts == 6
    # half of the tokens have a KL of 0
    assert mixed.kl_control["before"] == pytest.approx(without.kl_control["before"] / 2, rel=1e-5)


def test_snapshots_are_complete_verified_and_reproducible(tmp_path):
    snapshots, model = WeightSnapshots(tmp_path / "snap shots"), nano(tie_word_embeddings=True)
    weights = collect_trainable_weights(model, copy=True)
    assert snapshots.publish_snapshot(3, weights) == snapshots.publish_snapshot(3, weights)
    restored = WeightSnapshots(tmp_path / "snap shots").load_weights(3)
    assert restored.keys() == weights.keys() and all(
        (restored[name] == weights[name]).all() for name in weights
    )
    other = collect_trainable_weights(nano(seed=1, tie_word_embeddings=True), copy=True)
    with pytest.raises(CheckpointError, match="its weights differ"):
        snapshots.publish_snapshot(3, other)
    bad = {**weights, "lm_head.weight": torch.full((2,), math.nan)}
    with pytest.raises(NonFiniteError, match="lm_head"):
        snapshots.publish_snapshot(4, bad)
    assert snapshots.list_versions() == [3]
    file = snapshots.build_path(3) / "weights.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(bytes(data))
    fresh = WeightSnapshots(tmp_path / "snap shots")
    assert fresh.load_weights_if_valid(3) is None and fresh.load_weights_if_valid(8) is None
    with pytest.raises(CorruptError):
        fresh.load_weights(3)
    fresh.publish_snapshot(3, weights)  # the damaged snapshot is set aside and recreated
    assert fresh.load_weights(3).keys() == weights.keys()


def test_the_live_pointer_and_pruning(tmp_path):
    snapshots, weights = WeightSnapshots(tmp_path), {"w": torch.ones(2)}
    assert snapshots.read_live_version() is None and snapshots.list_versions() == []
    for version in (0, 10, 20, 30, 40):
        snapshots.publish_snapshot(version, weights)
    snapshots.set_live_version(10)
    assert snapshots.read_live_version() == 10
    with pytest.raises(CorruptError):
        snapshots.set_live_version(15)
    assert snapshots.prune_snapshots(2, {20}) == [0]
    assert snapshots.list_versions() == [10, 20, 30, 40]
    snapshots.set_live_version(40)
    assert snapshots.prune_snapshots(1, set()) == [10, 20, 30]
    (tmp_path / "LIVE").write_text("../../etc/passwd\n")
    assert snapshots.read_live_version() is None


def test_recorded_tokens_are_aligned_with_the_loss_tokens():
    rollout = experience(top=True).rollouts[0]
    distribution = build_recorded_distribution(recorded(rollout), [False, True])
    assert distribution.top_ids_NK.shape == (1, 3) and not distribution.is_exact
    assert distribution.rest_N.tolist() == pytest.approx([float(recorded(rollout).rest_T[1])])


def test_a_fixed_coefficient_stays_and_the_limit_holds(tmp_path):
    fixed = make_learner(tmp_path / "fixed", kl_coef=0.02, kl_control="fixed")
    adaptive = make_learner(tmp_path / "adaptive", kl_coef=0.02)
    for number in range(1, 6):
        for learner in (fixed, adaptive):
            update_from_request(learner, f"r{number}", number=number)
    assert fixed.kl_coef == 0.02 != adaptive.kl_coef
    for learner, text in ((fixed, ", coefficient"), (adaptive, " of 0.05, coefficient")):
        report = update_from_request(learner, "r6", number=6)
        assert re.search(rf"KL [-+.e\d]+{text}", format_audit_line(report, 0.0))
    restored = make_learner(tmp_path / "fixed", kl_coef=0.02, kl_control="fixed")
    restored.load_state_dict(adaptive.state_dict())  # a service that was adaptive until now
    assert restored.kl_coef == 0.02
    strict = make_learner(tmp_path / "strict", kl_control="fixed", kl_max=1e-9)
    assert update_from_request(strict, "r1").refused == "kl"
    free = make_learner(tmp_path / "free", kl_coef=0.0, kl_control="fixed")
    report = update_from_request(free, "r1")
    assert not report.refused and report.losses["kl"] == 0.0
    with pytest.raises(SettingsError, match="kl_coef"):
        OnlineUpdateSettings(kl_coef=0.0)


def test_an_audit_line_names_experiences_and_tasks(tmp_path):
    learner = make_learner(tmp_path)
    items = [
        build_scored(experience(f"r{n}", seed=n, level="hard"), (1.0, 0.0, 0.0)) for n in (7, 8)
    ]
    task = build_task(*items)
    report = learner.apply_update(task)
    line = format_audit_line(report, 0.0, task)
    assert line.endswith(
        "; experiences 1 (r7, task arithmetic/hard/7), 1 (r8, task arithmetic/hard/8)"
    )
    assert "\n" not in line
    record = build_contribution_record(report, task, 0.0)
    assert [item["task"] for item in record["experiences"]] == [
        "arithmetic/hard/7",
        "arithmetic/hard/8",
    ]
    # A mixture's levels name the environment already.
    mixed = build_scored(experience("r9", seed=9, level="arithmetic/hard"), (1.0, 0.0, 0.0))
    assert "(r9, task arithmetic/hard/9)" in format_audit_line(report, 0.0, build_task(mixed))
    many = build_task(*(items * MAX_LISTED_EXPERIENCES))
    line = format_audit_line(report, 0.0, many)
    assert line.count("task ") == MAX_LISTED_EXPERIENCES
    assert line.endswith(f"and {MAX_LISTED_EXPERIENCES} more")
    assert "experiences" not in format_audit_line(report, 0.0)
