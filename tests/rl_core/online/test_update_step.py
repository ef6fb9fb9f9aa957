"""The guarded update: loss and KL against numpy, guardrails one by one, resume to the last bit."""

import copy
import dataclasses
import json
import math

import numpy as np
import pytest
import torch
from helpers.online import experience, recorded
from helpers.tiny import PAD, nano, weights_digest

from rl_core.errors import CheckpointError, CorruptError, DataError, NonFiniteError
from rl_core.losses.kl import banded_kl_coef
from rl_core.models.logprobs import completion_logprobs, compute_vocabulary_logprobs
from rl_core.models.lora import add_adapter
from rl_core.models.trainable_weights import collect_trainable_weights, load_trainable_weights
from rl_core.online.experience_buffer import BufferedExperience
from rl_core.online.labelled_rewards import RewardTable
from rl_core.online.labels import Label
from rl_core.online.update_step import (
    GuardedLearner,
    RunningRewardBaseline,
    ScoredExperience,
    UpdateTask,
    compute_adaptive_learning_rate,
    compute_request_advantages,
)
from rl_core.online.weight_snapshots import WeightSnapshots
from rl_core.rollouts.batching import TrainRow, build_batches
from rl_core.settings import LoraSettings, OnlineUpdateSettings
from rl_core.storage.manifest import digest_bytes

LABEL = Label("answer", "feedback", text="a")


def table(rewards, known=None):
    values = np.array(rewards, dtype=np.float64)
    known = np.ones(len(values), bool) if known is None else np.array(known)
    return RewardTable(("task",), values[:, None], values[:, None], values, known, values >= 0.5)


def item(made, rewards, *, weight=1.0, known=None, method="dr_grpo"):
    found = table(rewards, known)
    advantages, errors = compute_request_advantages(found.totals_R, found.is_known_R, 0.5, method)
    return ScoredExperience(
        BufferedExperience(1, made, label=LABEL), made, LABEL, weight, found, advantages, errors
    )


def task(*items, number=1, learning_rate=1e-2, kl_coef=0.1):
    return UpdateTask(number, items, learning_rate, kl_coef)


def learner(tmp_path, model=None, **options):
    options = {
        "learning_rate": 1e-2,
        "max_learning_rate": 1.0,
        "kl_coef": 0.1,
        "kl_limit": 10.0,
        "ema_decay": 0.9,
        **options,
    }
    model = model or nano()
    snapshots = WeightSnapshots(tmp_path / "snapshots")
    made = GuardedLearner(model, OnlineUpdateSettings(**options), snapshots, pad_id=PAD)
    if 0 not in snapshots.list_versions():
        snapshots.publish_snapshot(0, made.copy_served_weights())
    return made


# ------------------------------------------------------------------------------------------------------ pure functions


def test_the_learning_rate_follows_the_error_within_its_bounds():
    options = {"base": 1e-4, "reference": 0.5, "low": 2e-5, "high": 3e-4}
    found = [
        compute_adaptive_learning_rate(error, **options)
        for error in (0.0, 0.1, 0.25, 0.5, 1.0, 9.0)
    ]
    assert found == pytest.approx([2e-5, 2e-5, 5e-5, 1e-4, 2e-4, 3e-4])
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
    found = RunningRewardBaseline(0.5)
    assert found.read_mean(("e", "l")) == 0.0
    for reward in (1.0, 0.0, 1.0):
        found.add_reward(("e", "l"), reward)
    assert found.read_mean(("e", "l")) == pytest.approx((0.25 * 1 + 0.5 * 0 + 1 * 1) / 1.75)
    other = RunningRewardBaseline(0.5)
    other.load_state_dict(found.state_dict())
    assert (
        other.read_mean(("e", "l")) == found.read_mean(("e", "l"))
        and other.read_mean(("e", "other")) == 0.0
    )


# ---------------------------------------------------------------------------------------------------------- the update


def row(temperature=1.0):
    return TrainRow([1, 2, 5], [3, 4, 7], [True, False, True], [-1.0, 0.0, -2.0], temperature)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_distributions_over_the_vocabulary_are_those_of_the_trainer(temperature):
    model = nano()
    (batch,) = build_batches(
        [row(temperature), dataclasses.replace(row(temperature), prompt_ids=[1])], 100, PAD
    )
    found = compute_vocabulary_logprobs(model, batch)
    assert found.shape == (4, 11)
    assert torch.allclose(found.exp().sum(1), torch.ones(4), atol=1e-6)
    ids = batch.input_ids_BS[batch.loss_mask_BS]
    expected = completion_logprobs(model, batch)[0][batch.loss_mask_BS]
    assert torch.allclose(found.gather(1, ids[:, None])[:, 0], expected, atol=1e-6)


def numpy_loss(model, old, items):
    """(rl, mean KL) of an update in float64, from logits of whole sequences."""

    def logprobs(network, rollout):
        ids = torch.tensor([[*rollout.prompt_ids, *rollout.completion_ids]])
        logits = (
            network(ids).logits[0, len(rollout.prompt_ids) - 1 : -1].detach().double().numpy()
            / rollout.temperature
        )
        return logits - np.log(np.exp(logits).sum(1, keepdims=True))

    rl = kl = count = 0.0
    for one in items:
        for index, rollout in enumerate(one.buffered.experience.rollouts):
            new, before = logprobs(model, rollout), logprobs(old, rollout)
            advantage = one.weight * one.advantages_R[index]
            for place, token in enumerate(rollout.completion_ids):
                ratio = np.exp(new[place, token] - rollout.sampler_logprobs[place])
                rl += max(-ratio * advantage, -np.clip(ratio, 0.8, 1.2) * advantage)
                kl += (np.exp(before[place]) * (before[place] - new[place])).sum()
                count += 1
    return rl / count, kl / count


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_losses_against_numpy(tmp_path, temperature):
    model, old = nano(seed=1), nano(seed=0)
    made = learner(tmp_path, model)
    made.snapshots.publish_snapshot(7, collect_trainable_weights(old, copy=True))
    items = [
        item(experience("r1", version=7, temperature=temperature), [1.0, 0.0, 0.0], weight=0.5),
        item(experience("r2", ("a", "b"), version=7, temperature=temperature), [0.0, 1.0]),
    ]
    before = copy.deepcopy(model)
    report = made.apply_update(task(*items))
    rl, kl = numpy_loss(before, old, items)
    assert report.refused == "" and not report.is_lower_bound
    assert (report.num_rollouts, report.num_tokens) == (5, 10)
    assert report.losses["rl"] == pytest.approx(rl, rel=1e-5)
    assert report.kl_control["before"] == pytest.approx(kl, rel=1e-5)
    assert report.losses["total"] == pytest.approx(rl + 0.1 * kl, rel=1e-5)
    assert report.kl_control["mean_kl"] == pytest.approx(numpy_loss(model, old, items)[1], rel=1e-4)
    assert report.error == pytest.approx(math.sqrt((4 / 9 + 2 / 9 + 0.5) / 5))


def test_it_learns_what_is_rewarded(tmp_path):
    """Three answers of one token each to one prompt, the second is right."""
    made = learner(tmp_path)

    def distribution():
        (batch,) = build_batches([TrainRow([1, 2], [3], [True])], 100, PAD)
        with torch.no_grad():
            return compute_vocabulary_logprobs(made.model, batch)[0]

    before, whole = distribution(), experience("r1")
    rollouts = [
        dataclasses.replace(
            one, completion_ids=[3 + i], loss_mask=[True], sampler_logprobs=[float(before[3 + i])]
        )
        for i, one in enumerate(whole.rollouts)
    ]
    group = item(dataclasses.replace(whole, rollouts=tuple(rollouts)), [0.0, 1.0, 0.0])
    for number in range(1, 11):
        assert made.apply_update(task(group, number=number, learning_rate=2e-3)).refused == ""
    moved = distribution() - before
    assert moved[4] > 0.1 and moved[3] < 0 and moved[5] < 0


def test_micro_batches_change_nothing(tmp_path):
    reports = []
    for tokens in (4, 4096):
        made = learner(tmp_path / str(tokens), micro_batch_tokens=tokens)
        reports.append(
            made.apply_update(
                task(item(experience("r1"), [1.0, 0.0, 0.0]), item(experience("r2", ("a",)), [1.0]))
            )
        )
    for name in ("losses", "gradients", "kl_control"):
        assert getattr(reports[0], name) == pytest.approx(
            getattr(reports[1], name), rel=1e-4, abs=1e-7
        )


def test_without_a_snapshot_the_recorded_tokens_give_a_lower_bound(tmp_path):
    made = learner(tmp_path)
    exact = item(experience("r1"), [1.0, 0.0, 0.0])
    only_recorded = item(experience("r2", version=99, top=True), [1.0, 0.0, 0.0])
    nothing = item(experience("r3", version=98), [1.0, 0.0, 0.0])
    report = made.apply_update(task(exact, only_recorded, nothing))
    assert report.is_lower_bound and report.without_old == 3 and report.num_rollouts == 6
    assert (
        made.apply_update(task(nothing, number=2)).refused == "empty" and made.refused["empty"] == 1
    )


def test_what_is_not_known_is_not_learned_from(tmp_path):
    made = learner(tmp_path)
    report = made.apply_update(
        task(item(experience("r1"), [1.0, 0.0, 5.0], known=[True, True, False]))
    )
    assert report.num_rollouts == 2 and report.num_tokens == 4


# ----------------------------------------------------------------------------------------------------------- guardrails


def state_bits(made):
    state = made.state_dict()["optimizer_step"]
    tensors = [
        t
        for part in state["optimizer"]["state"].values()
        for t in part.values()
        if isinstance(t, torch.Tensor)
    ]
    tensors += list((state["ema"] or {}).get("averages", {}).values())
    return digest_bytes(b"".join(t.detach().numpy().tobytes() for t in tensors)), weights_digest(
        made.model
    )


def test_a_step_beyond_the_kl_limit_is_taken_back_to_the_last_bit(tmp_path):
    made = learner(tmp_path, kl_limit=0.0601, kl_tolerance=0.01, max_grad_norm=100.0)
    made.apply_update(task(item(experience("r1"), [1.0, 0.0, 0.0]), learning_rate=1e-4))
    before, coefficient = state_bits(made), made.kl_coef
    report = made.apply_update(
        task(item(experience("r2"), [1.0, 0.0, 0.0]), number=2, learning_rate=1.0)
    )
    assert report.refused == "kl" and report.kl_control["mean_kl"] > 0.0601
    assert state_bits(made) == before
    assert made.kl_coef == pytest.approx(coefficient * 1.2)  # it was steered all the same
    assert (made.refused["kl"], made.refused_in_row, made.num_taken) == (1, 1, 1)
    made.apply_update(task(item(experience("r3"), [1.0, 0.0, 0.0]), number=3, learning_rate=1e-4))
    assert made.refused_in_row == 0 and made.optimizer_step.num_steps == 3
    assert made.collect_metrics()["online/update_success_rate"] == pytest.approx(2 / 3)


def test_the_coefficient_moves_by_its_factor_within_its_bounds(tmp_path):
    made = learner(tmp_path, kl_coef=1e-4)
    coefficients = [made.kl_coef]
    for number in range(1, 6):
        report = made.apply_update(
            task(
                item(experience(f"r{number}"), [1.0, 0.0, 0.0]),
                number=number,
                learning_rate=3e-2 if number < 4 else 1e-5,
            )
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
        coefficients.append(made.kl_coef)
        assert made.kl_coef == expected and report.kl_control["coefficient"] == coefficients[-2]
    assert min(coefficients) == 1e-4 and len(set(coefficients)) > 1


def test_the_coefficient_follows_where_the_kl_is_heading(tmp_path):
    made = learner(tmp_path, kl_coef=0.01)
    # (KL before the step, after it) -> factor: the level 4 steps on is above the band, in it, below it
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
        assert made._compute_next_kl_coef(after, before) == pytest.approx(0.01 * factor), (
            before,
            after,
        )


def test_an_update_with_nothing_to_learn_from_does_not_steer(tmp_path):
    made = learner(tmp_path, kl_coef=0.01)
    for number in range(1, 4):
        report = made.apply_update(task(item(experience("r1"), [1.0, 1.0, 1.0]), number=number))
        assert report.error == 0 and report.kl_control["mean_kl"] < 0.04 and made.kl_coef == 0.01
    assert (
        made.apply_update(
            task(item(experience("r1"), [1.0, 0.0, 0.0]), number=4, learning_rate=1e-6)
        ).refused
        == ""
    )
    assert made.kl_coef == pytest.approx(0.01 / 1.2)


def test_the_gradient_norm_is_clipped(tmp_path):
    made = learner(tmp_path, max_grad_norm=1e-3)
    report = made.apply_update(task(item(experience("r1"), [1.0, 0.0, 0.0])))
    assert report.gradients["norm"] > 1e-3 and report.gradients["clipped"] == 1e-3


def test_a_step_that_is_not_finite_is_refused_and_counted(tmp_path):
    made = learner(tmp_path)
    before = weights_digest(made.model)
    handle = made.model.model.norm.weight.register_hook(lambda gradient: gradient * math.nan)
    report = made.apply_update(task(item(experience("r1"), [1.0, 0.0, 0.0])))
    handle.remove()
    assert report.refused == "nonfinite" and weights_digest(made.model) == before
    assert made.refused_in_row == 1 and made.optimizer_step.ema.updates == 0
    assert '"nan"' in json.dumps(report.to_json(), allow_nan=False)
    assert made.apply_update(task(item(experience("r1"), [1.0, 0.0, 0.0]), number=2)).refused == ""


def test_weights_that_a_finite_step_broke_are_taken_back(tmp_path):
    made = learner(tmp_path, max_grad_norm=1e9, max_learning_rate=1.0)
    before = weights_digest(made.model)
    report = made.apply_update(task(item(experience("r1"), [1.0, 0.0, 0.0]), learning_rate=1e38))
    assert report.refused == "nonfinite" and weights_digest(made.model) == before
    assert made.optimizer_step.skipped_steps == 0 and made.kl_coef == made.settings.kl_coef


def test_the_average_alone_is_served_and_its_start_is_corrected(tmp_path):
    made = learner(tmp_path, ema_decay=0.5)
    seen = []
    for number in range(1, 4):
        made.apply_update(task(item(experience(f"r{number}"), [1.0, 0.0, 0.0]), number=number))
        seen.append(collect_trainable_weights(made.model, copy=True))
    now = weights_digest(made.model)
    served = made.copy_served_weights()
    assert weights_digest(made.model) == now
    for name, value in served.items():
        expected = (0.25 * seen[0][name] + 0.5 * seen[1][name] + seen[2][name]) / 1.75
        assert torch.allclose(value, expected, atol=1e-6), name


def steps(made, numbers):
    reports = []
    for number in numbers:
        reports.append(
            made.apply_update(
                task(item(experience(f"r{number}"), [1.0, 0.0, float(number % 2)]), number=number)
            )
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
def test_resumed_it_goes_on_to_the_last_bit(tmp_path, kind):
    def model():
        made = nano(dropout=0.2 if kind == "dropout" else 0.0)
        if kind == "bfloat16":
            made = made.bfloat16()
        if kind == "lora":
            torch.manual_seed(0)
            made = add_adapter(made, LoraSettings(rank=2, target_modules=("q_proj", "v_proj")))
        return made

    options = (
        {"dropout": True}
        if kind == "dropout"
        else {"autocast": "bfloat16"}
        if kind == "autocast"
        else {}
    )
    whole = learner(tmp_path, model(), **options)
    steps(whole, range(1, 3))
    state = copy.deepcopy(whole.state_dict())
    weights = collect_trainable_weights(whole.model, copy=True)
    torch.manual_seed(99)  # the rest of the process draws what it likes
    expected = [report.to_json() for report in steps(whole, range(3, 5))]
    resumed = learner(tmp_path, model(), **options)
    load_trainable_weights(resumed.model, weights)
    resumed.load_state_dict(state)
    torch.manual_seed(5)
    assert [report.to_json() for report in steps(resumed, range(3, 5))] == expected
    assert weights_digest(resumed.model) == weights_digest(whole.model)


# ------------------------------------------------------------------------------------------------------------ snapshots


def test_snapshots_are_whole_and_verified_and_equal_when_made_again(tmp_path):
    found, model = WeightSnapshots(tmp_path / "snap shots"), nano(tie_word_embeddings=True)
    weights = collect_trainable_weights(model, copy=True)
    assert found.publish_snapshot(3, weights) == found.publish_snapshot(3, weights)
    back = WeightSnapshots(tmp_path / "snap shots").load_weights(3)
    assert back.keys() == weights.keys() and all(
        (back[name] == weights[name]).all() for name in weights
    )
    other = collect_trainable_weights(nano(seed=1, tie_word_embeddings=True), copy=True)
    with pytest.raises(CheckpointError, match="other weights"):
        found.publish_snapshot(3, other)
    bad = {**weights, "lm_head.weight": torch.full((2,), math.nan)}
    with pytest.raises(NonFiniteError, match="lm_head"):
        found.publish_snapshot(4, bad)
    assert found.list_versions() == [3]
    file = found.build_path(3) / "weights.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(bytes(data))
    fresh = WeightSnapshots(tmp_path / "snap shots")
    assert fresh.load_weights_if_valid(3) is None and fresh.load_weights_if_valid(8) is None
    with pytest.raises(CorruptError):
        fresh.load_weights(3)
    fresh.publish_snapshot(3, weights)  # set aside, and made again
    assert fresh.load_weights(3).keys() == weights.keys()


def test_the_pointer_and_what_is_kept(tmp_path):
    found, weights = WeightSnapshots(tmp_path), {"w": torch.ones(2)}
    assert found.read_live_version() is None and found.list_versions() == []
    for version in (0, 10, 20, 30, 40):
        found.publish_snapshot(version, weights)
    found.set_live_version(10)
    assert found.read_live_version() == 10
    with pytest.raises(CorruptError):
        found.set_live_version(15)
    assert found.prune_snapshots(2, {20}) == [0]
    assert found.list_versions() == [10, 20, 30, 40]
    found.set_live_version(40)
    assert found.prune_snapshots(1, set()) == [10, 20, 30]
    (tmp_path / "LIVE").write_text("../../etc/passwd\n")
    assert found.read_live_version() is None


def test_recorded_tokens_of_a_rollout_stand_at_its_loss_tokens(tmp_path):
    from rl_core.online.update_step import build_recorded_distribution

    one = experience(top=True).rollouts[0]
    found = build_recorded_distribution(recorded(one), [False, True])
    assert found.top_ids_NK.shape == (1, 3) and not found.is_exact
    assert found.rest_N.tolist() == pytest.approx([float(recorded(one).rest_T[1])])
