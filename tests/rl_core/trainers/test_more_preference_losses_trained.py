"""SimPO, ORPO and KTO in the trainer: figures pair by pair in plain Python, no reference, resume, adapters."""

import math

import pytest
import torch
from helpers import tiny
from helpers.tiny import PAD, VOCABULARY
from torch.nn import functional

from rl_core.data.pairs import PairSide, PreferencePair, build_mismatched_pairs, list_labelled_sides
from rl_core.errors import DataError, SettingsError
from rl_core.models import lora
from rl_core.settings import LoraSettings, PreferenceSettings
from rl_core.storage.checkpoint import CheckpointStore
from rl_core.tracking import MemoryTracker
from rl_core.trainers import preference
from rl_core.trainers.preference import PreferenceTrainer
from rl_core.training.loop import run_loop


def build_nano(seed=0, dropout=0.0):
    model = tiny.nano(seed, dropout, tie_word_embeddings=True)
    model.lm_head.weight.data.mul_(20)
    return model


def build_side(generator, prompt, last):
    observed = int(torch.randint(0, 3, (1,), generator=generator))
    length = int(torch.randint(1, 4, (1,), generator=generator))
    completion = torch.randint(1, VOCABULARY, (length,), generator=generator).tolist()
    return PairSide(
        prompt, [*completion, *[7] * observed, last], [True] * length + [False] * observed + [True]
    )


def build_pairs(count, seed=0):
    """Build ragged pairs with observations; the chosen side ends in a larger token."""
    generator = torch.Generator().manual_seed(seed)
    pairs = []
    for index in range(count):
        prompt = torch.randint(1, VOCABULARY, (2 + index % 3,), generator=generator).tolist()
        low, high = sorted((torch.randperm(VOCABULARY - 1, generator=generator)[:2] + 1).tolist())
        pairs.append(
            PreferencePair(build_side(generator, prompt, high), build_side(generator, prompt, low))
        )
    return pairs


def build_data(loss, count, seed=0):
    pairs = build_pairs(count, seed)
    return build_mismatched_pairs(list_labelled_sides(pairs), 3) if loss == "kto" else pairs


def build_trainer(loss, model=None, train=8, heldout=5, **changes):
    options = {"learning_rate": 5e-3, "warmup_steps": 0, "batch_size": 64, "epochs": 2.0, **changes}
    settings = PreferenceSettings(loss=loss, **options)
    return PreferenceTrainer(
        model or build_nano(),
        PAD,
        build_data(loss, train),
        build_data(loss, heldout, 1),
        settings,
        7,
    )


def compute_logprob(model, row):
    """(sum of log-probs, number) of the tokens that carry loss, by transformers' logits."""
    ids = torch.tensor([row.ids])
    with torch.no_grad():
        log_p = functional.log_softmax(model(ids).logits[0, :-1].double(), -1)
    start = len(row.prompt_ids)
    selected = [start + index for index, counts in enumerate(row.loss_mask) if counts]
    return sum(float(log_p[index - 1, ids[0, index]]) for index in selected), len(selected)


def compute_sigmoid(x):
    return 1 / (1 + math.exp(-x))


def compute_loss_by_hand(loss, model, reference, pairs, settings):
    if loss == "kto":
        gaps = [
            compute_logprob(model, p.rejected)[0] - compute_logprob(reference, p.rejected)[0]
            for p in pairs
        ]
        z, total = max(0.0, sum(gaps) / len(gaps)), 0.0
        for pair in pairs:
            h = compute_logprob(model, pair.chosen)[0] - compute_logprob(reference, pair.chosen)[0]
            if pair.desirable:
                total += settings.desirable_weight * (1 - compute_sigmoid(settings.beta * (h - z)))
            else:
                total += settings.undesirable_weight * (
                    1 - compute_sigmoid(settings.beta * (z - h))
                )
        return total / len(pairs)
    total = 0.0
    for pair in pairs:
        (good, n), (bad, m) = (
            compute_logprob(model, pair.chosen),
            compute_logprob(model, pair.rejected),
        )
        if loss == "simpo":
            total -= math.log(
                compute_sigmoid(settings.beta * (good / n - bad / m) - settings.simpo_gamma)
            )
            total += settings.sft_coef * -good / n
        else:
            p, q = math.exp(good / n), math.exp(bad / m)
            total += -good / n - settings.beta * math.log(
                compute_sigmoid(math.log(p / (1 - p) / (q / (1 - q))))
            )
    return total / len(pairs)


CHOICES = {
    "simpo": {"beta": 1.5, "simpo_gamma": 0.7, "sft_coef": 0.3},
    "orpo": {"beta": 0.4},
    "kto": {"beta": 0.3, "desirable_weight": 1.3, "undesirable_weight": 0.6},
}


@pytest.mark.parametrize("loss", CHOICES)
@pytest.mark.parametrize("micro_batch_tokens", [1, 60, 10_000])
def test_figures_by_hand_of_a_policy_that_has_moved(loss, micro_batch_tokens):
    trainer = build_trainer(loss, micro_batch_tokens=micro_batch_tokens, **CHOICES[loss])
    moved = build_nano(seed=5)
    trainer.model.load_state_dict(
        moved.state_dict()
    )  # as if trained; the references remain those of the start
    heldout = compute_loss_by_hand(
        loss, moved, build_nano(), build_data(loss, 5, 1), trainer.settings
    )
    expected = compute_loss_by_hand(
        loss, moved, build_nano(), build_data(loss, 8), trainer.settings
    )
    assert trainer.evaluate()["eval/loss"] == pytest.approx(heldout, rel=1e-5)
    metrics = trainer.step()
    assert metrics["train/loss"] == pytest.approx(expected, rel=1e-5)
    if loss == "kto":
        pairs = build_data(loss, 8)
        gaps = [
            compute_logprob(moved, p.rejected)[0] - compute_logprob(build_nano(), p.rejected)[0]
            for p in pairs
        ]
        assert metrics["train/reference_point"] == pytest.approx(
            max(0.0, sum(gaps) / len(gaps)), rel=1e-4
        )


def test_the_reference_point_is_that_of_the_whole_step_and_not_clamped_away():
    trainer = build_trainer("kto", model=build_nano(seed=5), micro_batch_tokens=30)
    trainer.model.load_state_dict(build_nano().state_dict())
    pairs = build_data("kto", 8)
    gap = sum(
        compute_logprob(build_nano(), p.rejected)[0]
        - compute_logprob(build_nano(seed=5), p.rejected)[0]
        for p in pairs
    ) / len(pairs)
    other = build_trainer("kto", micro_batch_tokens=30)
    other.model.load_state_dict(build_nano(seed=5).state_dict())
    actual = [each.step()["train/reference_point"] for each in (trainer, other)]
    assert actual == [
        pytest.approx(max(0.0, gap), rel=1e-4),
        pytest.approx(max(0.0, -gap), rel=1e-4),
    ]
    assert max(actual) > 0 == min(actual)  # one of the two is clamped, the other is not


@pytest.mark.parametrize("loss", ["simpo", "orpo"])
def test_losses_without_a_reference_compute_and_store_none(loss, monkeypatch):
    monkeypatch.setattr(
        preference,
        "compute_reference_logprobs",
        lambda *_, **__: pytest.fail("a reference was computed"),
    )
    trainer = build_trainer(loss)
    metrics = trainer.step()
    assert trainer.references == {} and trainer.state_dict()["references"] == {}
    assert "train/reference_kl" not in metrics and "train/chosen_logprob" in metrics


@pytest.mark.parametrize("loss", CHOICES)
def test_it_learns_its_pairs(loss):
    trainer = build_trainer(loss, train=30, epochs=30.0, learning_rate=1e-2, **CHOICES[loss])
    first, *_, last = (trainer.step() for _ in range(30))
    assert last["train/accuracy"] > max(0.85, first["train/accuracy"] + 0.2)
    assert last["train/loss"] < first["train/loss"] and last["train/margin"] > first["train/margin"]


@pytest.mark.parametrize("loss", CHOICES)
def test_stopped_and_resumed_the_numbers_are_the_same(loss, tmp_path):
    def run_training(folder, steps, tracker):
        torch.manual_seed(3)
        trainer = build_trainer(
            loss, build_nano(dropout=0.1), train=12, batch_size=4, eval_every=2, checkpoint_every=1
        )
        store = CheckpointStore(folder) if folder else None
        run_loop(trainer, trainer.settings, iterations=steps, tracker=tracker, checkpoints=store)
        return [weight.clone() for weight in trainer.model.parameters()], trainer.references

    expected, references = run_training(None, 5, MemoryTracker())
    run_training(tmp_path, 2, MemoryTracker())
    actual, resumed = run_training(tmp_path, 5, MemoryTracker())
    assert resumed == references
    assert all(torch.equal(first, second) for first, second in zip(expected, actual, strict=True))


def test_new_adapters_serve_as_the_reference_for_kto():
    adapters = LoraSettings(rank=2, target_modules=("q_proj", "down_proj"))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = lora.add_adapter(build_nano(), adapters)
    trainer = build_trainer("kto", model)
    metrics = trainer.step()
    assert metrics["train/loss"] == pytest.approx(0.5, rel=1e-5)  # 1 - sigmoid(0)
    assert metrics["train/reference_point"] == pytest.approx(0, abs=1e-5)


def test_mismatched_partners_are_the_next_prompt_of_a_seeded_order():
    rows = [(PairSide([n], [n + 10], [True]), n % 2 == 0) for n in range(6)]
    pairs = build_mismatched_pairs(rows, 0)
    assert [pair.chosen for pair in pairs] == [row for row, _ in rows]
    assert [pair.desirable for pair in pairs] == [True, False] * 3
    assert all(pair.rejected.prompt_ids == pair.chosen.prompt_ids for pair in pairs)
    partners = [pair.rejected.completion_ids[0] - 10 for pair in pairs]
    assert sorted(partners) == list(range(6)) and all(
        n != partner for n, partner in enumerate(partners)
    )
    assert pairs == build_mismatched_pairs(rows, 0) != build_mismatched_pairs(rows, 1)


def test_partners_never_share_the_prompt():
    rows = [(PairSide([n // 3], [n], [True]), True) for n in range(9)]
    assert all(
        pair.rejected.completion_ids[0] // 3 != pair.chosen.prompt_ids[0]
        for pair in build_mismatched_pairs(rows, 2)
    )
    alone = [(PairSide([5], [n], [True]), True) for n in range(3)]
    with pytest.raises(DataError, match="all rows have the same prompt"):
        build_mismatched_pairs(alone, 0)
    assert all(
        pair.rejected.completion_ids[0] < 9 for pair in build_mismatched_pairs(alone, 0, rows)
    )


def test_both_sides_of_pairs_are_labelled_once():
    good, bad = PairSide([1], [2], [True]), PairSide([1], [3], [True])
    other = PairSide([1], [4], [True])
    assert list_labelled_sides([PreferencePair(good, bad), PreferencePair(good, other)]) == [
        (good, True),
        (bad, False),
        (other, False),
    ]


def test_pairs_and_labels_go_with_their_losses():
    with pytest.raises(
        DataError, match=r"pairs_train\[0\]: the loss kto needs labelled completions"
    ):
        PreferenceTrainer(build_nano(), PAD, build_pairs(2), [], PreferenceSettings(loss="kto"), 0)
    with pytest.raises(DataError, match=r"pairs_train\[0\]: the loss simpo needs pairs"):
        PreferenceTrainer(
            build_nano(), PAD, build_data("kto", 2), [], PreferenceSettings(loss="simpo"), 0
        )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"loss": "simpo", "label_smoothing": 0.1},
            r"label_smoothing: 0\.1 is not defined for simpo; use loss dpo",
        ),
        (
            {"loss": "orpo", "sft_coef": 0.1},
            r"sft_coef: 0\.1 cannot be used with orpo, which already contains the chosen",
        ),
        ({"loss": "kto", "sft_coef": 0.1}, r"sft_coef: 0\.1 cannot be used with kto"),
        ({"loss": "kto", "batch_size": 1}, "batch_size: kto estimates a divergence"),
        ({"loss": "kto", "desirable_weight": 0.0, "undesirable_weight": 0.0}, "nothing is learned"),
    ],
)
def test_settings_refuse_what_cannot_be(options, message):
    with pytest.raises(SettingsError, match=message):
        PreferenceSettings(**options)
