"""Preference training: first values, direction, one step in plain Python, micro-batches, references, resume."""

import copy
import math

import numpy as np
import pytest
import torch
from helpers import tiny
from helpers.tiny import PAD, VOCABULARY
from torch.nn import functional

from rl_core.data.pairs import PairSide, PreferencePair
from rl_core.errors import DataError, SettingsError
from rl_core.models import lora
from rl_core.out_of_memory import halve_batch
from rl_core.settings import LoraSettings, PreferenceSettings
from rl_core.storage import faults
from rl_core.storage.checkpoint import CheckpointStore
from rl_core.storage.faults import InjectedFault
from rl_core.storage.manifest import digest_bytes
from rl_core.tracking import MemoryTracker
from rl_core.trainers.preference import PreferenceTrainer, compute_reference_logprobs
from rl_core.training.loop import run_loop


def build_nano(seed=0, dropout=0.0):
    model = tiny.nano(seed, dropout, tie_word_embeddings=True)
    model.lm_head.weight.data.mul_(20)  # log-probs far enough apart for the figures below to differ
    return model


def build_pairs(count, seed=0):
    """Build ragged pairs; the chosen side has a larger last token, every second side an observation."""
    generator = torch.Generator().manual_seed(seed)
    pairs = []
    for index in range(count):
        prompt = torch.randint(1, VOCABULARY, (2 + index % 3,), generator=generator).tolist()
        low, high = sorted(torch.randperm(VOCABULARY - 1, generator=generator)[:2].tolist())

        def build_side(last, observed, prompt=prompt):
            ids = [3, *[7] * observed, last + 1]
            return PairSide(prompt, ids, [True, *[False] * observed, True])

        pairs.append(PreferencePair(build_side(high, index % 2 * 2), build_side(low, index % 4)))
    return pairs


def build_trainer(model=None, train=14, heldout=9, references=None, **changes):
    options = {"learning_rate": 5e-3, "warmup_steps": 2, "batch_size": 4, "epochs": 2.0, **changes}
    settings = PreferenceSettings(**options)
    pairs = build_pairs(train), build_pairs(heldout, seed=1)
    return PreferenceTrainer(model or build_nano(), PAD, *pairs, settings, 7, references)


def compute_sequence_logprob(model, side):
    """Compute (sum of log-probs, number) of the tokens with loss: one row, from transformers' logits."""
    ids = torch.tensor([[*side.prompt_ids, *side.completion_ids]])
    with torch.no_grad():
        log_p = functional.log_softmax(model(ids).logits[0, :-1].double(), -1)
    start = len(side.prompt_ids)
    selected = [start + index for index, counts in enumerate(side.loss_mask) if counts]
    return sum(float(log_p[index - 1, ids[0, index]]) for index in selected), len(selected)


def compute_figures_by_hand(model, reference, pairs, settings):
    """Compute loss, accuracy, margin and the rewards, pair by pair in plain Python."""
    rows = []
    for pair in pairs:
        (chosen, n), (rejected, m) = (
            compute_sequence_logprob(model, pair.chosen),
            compute_sequence_logprob(model, pair.rejected),
        )
        ref_chosen, ref_rejected = (
            compute_sequence_logprob(reference, side)[0] for side in (pair.chosen, pair.rejected)
        )
        if settings.loss == "ipo":
            good, bad = (chosen - ref_chosen) / n, (rejected - ref_rejected) / m
            loss = (good - bad - 1 / (2 * settings.beta)) ** 2
        else:
            good, bad = chosen - ref_chosen, rejected - ref_rejected
            z, e = settings.beta * (good - bad), settings.label_smoothing
            loss = (1 - e) * math.log1p(math.exp(-z)) + e * math.log1p(math.exp(z))
        rows.append(
            (
                loss + settings.sft_coef * -chosen / n,
                good > bad,
                settings.beta * good,
                settings.beta * bad,
            )
        )
    loss, accuracy, good, bad = (sum(column) / len(rows) for column in zip(*rows, strict=True))
    return {
        "loss": loss,
        "accuracy": accuracy,
        "margin": good - bad,
        "chosen_reward": good,
        "rejected_reward": bad,
    }


def select_figures(metrics, prefix="train"):
    names = ("loss", "accuracy", "margin", "chosen_reward", "rejected_reward")
    return {name: metrics[f"{prefix}/{name}"] for name in names}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, math.log(2)),
        ({"label_smoothing": 0.2}, math.log(2)),
        ({"beta": 0.5}, math.log(2)),
        ({"loss": "ipo"}, 25.0),  # 1 / (4 * 0.1^2)
        ({"loss": "ipo", "beta": 0.5}, 1.0),
    ],
)
def test_the_first_loss_is_that_of_no_preference(changes, expected):
    metrics = build_trainer(**changes).step()
    assert metrics["train/loss"] == pytest.approx(expected, rel=1e-5)
    assert metrics["train/margin"] == pytest.approx(0, abs=1e-5)
    assert metrics["train/reference_kl"] == pytest.approx(0, abs=1e-5)


@pytest.mark.parametrize("loss", ["dpo", "ipo"])
def test_a_step_raises_the_chosen_side_and_lowers_the_rejected_one(loss):
    trainer = build_trainer(
        train=1, batch_size=1, loss=loss, warmup_steps=0, learning_rate=1e-3, epochs=5
    )
    (pair,) = build_pairs(1)
    before = [
        compute_sequence_logprob(trainer.model, side)[0] for side in (pair.chosen, pair.rejected)
    ]
    trainer.step()
    after = [
        compute_sequence_logprob(trainer.model, side)[0] for side in (pair.chosen, pair.rejected)
    ]
    assert after[0] > before[0] and after[1] < before[1]
    metrics = trainer.step()
    assert metrics["train/chosen_reward"] > 0 > metrics["train/rejected_reward"]
    assert metrics["train/accuracy"] == 1


@pytest.mark.parametrize(
    "changes",
    [{}, {"label_smoothing": 0.1, "beta": 0.4}, {"loss": "ipo", "beta": 0.3}, {"sft_coef": 0.5}],
    ids=["dpo", "cdpo", "ipo", "rpo"],
)
@pytest.mark.parametrize("micro_batch_tokens", [1, 40, 10_000])
def test_figures_by_hand_of_a_policy_that_has_moved(changes, micro_batch_tokens):
    reference, moved = build_nano(), build_nano(seed=5)
    trainer = build_trainer(
        build_nano(), train=8, batch_size=8, micro_batch_tokens=micro_batch_tokens, **changes
    )
    trainer.model.load_state_dict(
        moved.state_dict()
    )  # as if trained; the references remain those of the start
    pairs = build_pairs(8)
    expected = compute_figures_by_hand(moved, reference, pairs, trainer.settings)
    assert 0 < expected["accuracy"] < 1  # both signs occur
    heldout = compute_figures_by_hand(moved, reference, build_pairs(9, seed=1), trainer.settings)
    evaluated, stepped = trainer.evaluate(), trainer.step()
    assert select_figures(stepped) == pytest.approx(expected, rel=1e-4, abs=1e-5)
    assert select_figures(evaluated, "eval") == pytest.approx(heldout, rel=1e-4, abs=1e-5)
    sides = [side for pair in pairs for side in (pair.chosen, pair.rejected)]
    gap = sum(
        compute_sequence_logprob(reference, side)[0] - compute_sequence_logprob(moved, side)[0]
        for side in sides
    )
    assert stepped["train/reference_kl"] == pytest.approx(
        gap / sum(sum(side.loss_mask) for side in sides), rel=1e-4
    )
    chosen = sum(compute_sequence_logprob(moved, pair.chosen)[0] for pair in pairs) / 8
    assert stepped["train/chosen_logprob"] == pytest.approx(chosen, rel=1e-5)
    assert stepped["train/tokens"] == sum(len(side.ids) for side in sides)


def test_micro_batches_change_neither_loss_nor_gradient():
    losses, gradients = [], []
    for budget in (10_000, 40, 1):
        trainer = build_trainer(
            build_nano(),
            train=8,
            batch_size=8,
            micro_batch_tokens=budget,
            max_grad_norm=1e9,
            sft_coef=0.3,
        )
        trainer.model.load_state_dict(build_nano(seed=5).state_dict())
        trainer.optimizer_step.optimizer.step = lambda t=trainer: gradients.append(
            [weight.grad.clone() for weight in t.model.parameters()]
        )
        losses.append(trainer.step()["train/loss"])
    assert losses[1:] == pytest.approx([losses[0]] * 2, abs=1e-6)
    for cut in gradients[1:]:
        for full_gradient, cut_gradient in zip(gradients[0], cut, strict=True):
            torch.testing.assert_close(full_gradient, cut_gradient, rtol=1e-5, atol=1e-6)


def test_a_batch_that_does_not_fit_is_cut_between_pairs_and_gives_the_same_loss():
    trainer = build_trainer(train=8, batch_size=8)
    trainer.model.load_state_dict(build_nano(seed=5).state_dict())
    (batch,) = trainer._build_local_batches(trainer._train)
    loss_fn = trainer._build_loss_fn(trainer._train)
    uninterrupted = float(loss_fn(batch)[0].detach())
    halves = halve_batch(batch)
    assert [len(half.ref_chosen_B) for half in halves] == [4, 4]
    assert sum(float(loss_fn(half)[0].detach()) for half in halves) == pytest.approx(
        uninterrupted, rel=1e-5
    )


def test_observations_carry_no_loss():
    """Check that only what the policy wrote counts; a tool's response is read, never learnt."""
    pairs = build_pairs(4)
    assert not all(all(pair.rejected.loss_mask) for pair in pairs)
    references = [
        [compute_sequence_logprob(build_nano(), side)[0] for side in (pair.chosen, pair.rejected)]
        for pair in pairs
    ]
    actual = compute_reference_logprobs(build_nano(), pairs, pad_id=PAD, max_tokens=30)
    assert [value for row in actual for value in row] == pytest.approx(
        [v for row in references for v in row], rel=1e-5
    )
    masked = [sum(side.loss_mask) for pair in pairs for side in (pair.chosen, pair.rejected)]
    assert set(masked) == {2}  # of 2 to 5 completion tokens


def test_references_are_computed_without_dropout_and_without_drawing():
    torch.manual_seed(3)
    state = torch.get_rng_state()
    model = build_nano(dropout=0.5).train()
    actual = compute_reference_logprobs(model, build_pairs(3), pad_id=PAD, max_tokens=10_000)
    assert torch.equal(torch.get_rng_state(), state) and model.training
    assert actual == compute_reference_logprobs(
        build_nano(), build_pairs(3), pad_id=PAD, max_tokens=10_000
    )


def test_new_adapters_serve_as_the_reference():
    adapters = LoraSettings(rank=2, target_modules=("q_proj", "down_proj"))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = lora.add_adapter(build_nano(), adapters)
    trainer = build_trainer(model, warmup_steps=0)
    actual, expected = trainer.references["train"], build_trainer(build_nano()).references["train"]
    np.testing.assert_allclose(
        np.array(actual), np.array(expected), rtol=0, atol=1e-5
    )  # other matrix products, other rounding
    assert trainer.step()["train/loss"] == pytest.approx(math.log(2), rel=1e-5)
    assert trainer.step()["train/reference_kl"] != 0


def test_it_learns_an_order_that_it_can_see():
    trainer = build_trainer(train=200, heldout=100, batch_size=50, epochs=8.0, learning_rate=1e-2)
    before = trainer.evaluate()
    assert (before["eval/accuracy"], before["eval/loss"]) == (
        0.5,
        pytest.approx(math.log(2)),
    )  # ties count half
    outcome = run_loop(trainer, trainer.settings, iterations=trainer.total_steps)
    assert outcome.steps == 32
    assert outcome.metrics["eval/accuracy"] > 0.85
    assert outcome.metrics["eval/loss"] < 0.5


def test_bad_input_is_named():
    good = build_pairs(1)[0]

    def build_trainer_on(pair, references=None):
        PreferenceTrainer(build_nano(), PAD, [good, pair], [], PreferenceSettings(), 0, references)

    with pytest.raises(DataError, match=r"pairs_train\[1\].rejected: no token carries loss"):
        build_trainer_on(PreferencePair(good.chosen, PairSide([1], [2], [False])))
    with pytest.raises(
        DataError, match=r"pairs_train\[1\].chosen: 1 completion tokens, but a loss mask of 2"
    ):
        build_trainer_on(PreferencePair(PairSide([1], [2], [True, True]), good.rejected))
    with pytest.raises(DataError, match="has no prompt"):
        build_trainer_on(PreferencePair(PairSide([], [2], [True]), good.rejected))
    with pytest.raises(DataError, match="references of train: 1 rows for 2 pairs"):
        build_trainer_on(good, ([(0.0, 0.0)], []))
    with pytest.raises(DataError, match="references of train: row 1 is"):
        build_trainer_on(good, ([(0.0, 0.0), (0.0, math.nan)], []))
    with pytest.raises(DataError, match="no pair to train on"):
        PreferenceTrainer(build_nano(), PAD, [], [], PreferenceSettings(), 0)
    assert (
        PreferenceTrainer(build_nano(), PAD, [good], [], PreferenceSettings(), 0).evaluate() == {}
    )


def test_settings_refuse_what_cannot_be():
    with pytest.raises(SettingsError, match=r"label_smoothing: 0\.1 is not defined for ipo"):
        PreferenceSettings(loss="ipo", label_smoothing=0.1)
    with pytest.raises(SettingsError, match="beta"):
        PreferenceSettings(beta=0.0)
    with pytest.raises(SettingsError, match="label_smoothing"):
        PreferenceSettings(label_smoothing=0.5)


def run_training(folder, tracker):
    torch.manual_seed(3)
    trainer = build_trainer(build_nano(dropout=0.2), eval_every=3, checkpoint_every=1)
    run_loop(
        trainer,
        trainer.settings,
        iterations=trainer.total_steps,
        tracker=tracker,
        checkpoints=CheckpointStore(folder) if folder else None,
        best_metric="eval/loss",
        larger_is_better=False,
    )
    metrics = {
        (step, name): value.hex()
        for step, row in tracker.metrics
        for name, value in row.items()
        if not name.startswith("perf/")
    }
    weights = digest_bytes(
        b"".join(tensor.numpy().tobytes() for tensor in trainer.model.state_dict().values())
    )
    return weights, metrics, trainer.references


@pytest.mark.parametrize("hit", [1, 4, 8])
def test_killed_and_resumed_the_numbers_are_the_same(tmp_path, hit):
    expected = run_training(None, MemoryTracker())
    start = compute_reference_logprobs(build_nano(), build_pairs(14), pad_id=PAD, max_tokens=16384)
    assert expected[2]["train"] == start
    tracker = MemoryTracker()
    faults.configure_faults(f"loop.stepped:{hit}:raise")
    with pytest.raises(InjectedFault):
        run_training(tmp_path, tracker)
    faults.configure_faults(None)
    assert run_training(tmp_path, tracker) == expected


def test_a_checkpoint_restores_the_references_of_its_start():
    trained = build_trainer()
    start = copy.deepcopy(trained.references)
    trained.step()
    state = trained.state_dict()
    later = build_trainer(trained.model)  # built on weights that have already changed
    assert later.references != start
    later.load_state_dict(state)
    assert later.references == start
