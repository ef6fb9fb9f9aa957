"""Compact rows, which are built when accessed: trainers compute the same bits on them as on lists."""

import numpy as np
import pytest
import torch
from helpers import tiny
from helpers.tiny import PAD, VOCABULARY

from rl_core.api.recipes.reward_model import build_reward_model_recipe
from rl_core.data.pairs import (
    PairSide,
    PreferencePair,
    PreferenceSplit,
    build_mismatched_pairs,
    build_pair_rows,
)
from rl_core.data.training_sequences import TokenRows, build_token_chunk
from rl_core.errors import DataError
from rl_core.models import heads
from rl_core.rollouts.batching import TrainRow, build_batches, build_lazy_batches
from rl_core.settings import PreferenceSettings, RewardModelSettings, SFTSettings
from rl_core.trainers.preference import PreferenceTrainer
from rl_core.trainers.reward_model import RewardModelTrainer, ScoredPair
from rl_core.trainers.sft import SFTTrainer


def build_sides(count, seed=0):
    """Build pairs of ragged sides, the two of a pair after one prompt."""
    generator = torch.Generator().manual_seed(seed)

    def draw_ids(length):
        return torch.randint(1, VOCABULARY, (length,), generator=generator).tolist()

    sides = []
    for index in range(count):
        prompt = draw_ids(1 + index % 3)
        for length in (2 + index % 4, 1 + index % 5):
            sides.append(
                PairSide(
                    prompt,
                    draw_ids(length),
                    [True, *[False, True][: length - 1], *[True] * (length - 3)],
                )
            )
    return sides


def pack_sides(sides):
    chunk = build_token_chunk(
        (n // 2, len(s.prompt_ids), s.ids, [False] * len(s.prompt_ids) + s.loss_mask)
        for n, s in enumerate(sides)
    )
    return TokenRows([chunk])


def build_splits(use, margins=False):
    """Build training and held-out parts, with their rows as in a file, and their sides."""
    created = []
    for count, seed, name in ((9, 0, "training"), (5, 1, "held-out")):
        sides = build_sides(count, seed)
        rows = [
            {"prompt": "p", **({"margin": index / 2} if margins else {})} for index in range(count)
        ]
        created.append((PreferenceSplit.from_rows(pack_sides(sides), rows, use, name), sides))
    return created


def train_steps(trainer):
    """Return the bits of everything that two steps and an evaluation compute."""
    steps = [
        {name: value for name, value in trainer.step().items() if "perf" not in name}
        for _ in range(3)
    ]
    return steps, trainer.evaluate(), tiny.weights_digest(trainer.model)


@pytest.mark.parametrize("packing", [False, True])
def test_sft(packing):
    rows = [(side.ids, [False] * len(side.prompt_ids) + side.loss_mask) for side in build_sides(8)]
    settings = SFTSettings(
        batch_size=5, learning_rate=1e-2, warmup_steps=0, packing=packing, micro_batch_tokens=40
    )
    actual = [
        train_steps(SFTTrainer(tiny.nano(), PAD, some[:12], some[12:], settings, 3))
        for some in (rows, list(TokenRows.from_sequences(rows)))
    ]
    lazy = TokenRows.from_sequences(rows)
    lazily = SFTTrainer(
        tiny.nano(),
        PAD,
        lazy.select_sequences(np.arange(12)),
        lazy.select_sequences(np.arange(12, 16)),
        settings,
        3,
    )
    assert train_steps(lazily) == actual[0] == actual[1]


@pytest.mark.parametrize(
    ("loss", "dropout"), [("dpo", 0.0), ("dpo", 0.3), ("kto", 0.0), ("simpo", 0.0)]
)
def test_preferences(loss, dropout):
    (train, sides), (heldout, others) = build_splits(loss)
    rows = build_pair_rows(train, heldout, loss, 4)
    if loss == "kto":
        labelled = [[(s, n % 2 == 0) for n, s in enumerate(part)] for part in (sides, others)]
        lists = [
            build_mismatched_pairs(labelled[0], 4),
            build_mismatched_pairs(labelled[1], 4, labelled[0]),
        ]
    else:
        lists = [
            [PreferencePair(*part[n : n + 2]) for n in range(0, len(part), 2)]
            for part in (sides, others)
        ]
    assert [list(part) for part in rows] == lists and rows[0][1:3] == lists[0][1:3]
    options = {"batch_size": 4, "learning_rate": 1e-2, "warmup_steps": 0, "dropout": dropout > 0}
    settings = PreferenceSettings(loss=loss, **options)
    actual = [
        train_steps(PreferenceTrainer(tiny.nano(dropout=dropout), PAD, *pairs, settings, 3))
        for pairs in (rows, lists)
    ]
    assert actual[0] == actual[1] and actual[0][1]["eval/loss"] > 0


def test_reward_models_and_margins():
    (train, sides), (heldout, others) = build_splits("reward_model", margins=True)
    rows = build_pair_rows(train, heldout, "reward_model", 0)
    lists = [
        [ScoredPair(part[n].ids, part[n + 1].ids, n / 4) for n in range(0, len(part), 2)]
        for part in (sides, others)
    ]
    settings = RewardModelSettings(batch_size=4, learning_rate=1e-2, warmup_steps=0)

    def build_classifier():
        from transformers import LlamaForSequenceClassification

        return tiny.nano(model_class=LlamaForSequenceClassification, num_labels=1)

    recipe = build_reward_model_recipe(build_classifier(), PAD, *rows, settings, 3)
    by_lists = RewardModelTrainer(build_classifier(), PAD, *lists, settings, 3)
    assert train_steps(recipe.trainer) == train_steps(by_lists)
    assert heads.score_rows(recipe.trainer.model, [sides[0].ids], pad_id=PAD, max_tokens=64)


def test_rows_that_do_not_fit_their_tokens():
    with pytest.raises(DataError, match="training rows have 2 sides, but 4 are tokenised"):
        PreferenceSplit.from_rows(pack_sides(build_sides(2)), [{"prompt": "p"}], "dpo", "training")
    with pytest.raises(DataError, match="training row 1: has a label"):
        PreferenceSplit.from_rows(
            pack_sides(build_sides(1)), [{"prompt": "p", "label": True}], "dpo", "training"
        )


def test_held_out_partners_come_from_training_where_their_prompts_are_all_the_same():
    train = PreferenceSplit.from_rows(
        pack_sides(build_sides(3)), [{"prompt": "p"}] * 3, "kto", "training"
    )
    alone = pack_sides([PairSide([9], [8], [True])])
    heldout = PreferenceSplit.from_rows(
        alone, [{"prompt": "q", "completion": "a", "label": True}], "kto", "held-out"
    )
    (pair,) = build_pair_rows(train, heldout, "kto", 0)[1]
    assert (
        pair.desirable
        and pair.chosen == PairSide([9], [8], [True])
        and pair.rejected.prompt_ids == [9]
    )
    assert pair.rejected.completion_ids in [side.completion_ids for side in build_sides(3)]
    with pytest.raises(DataError, match="all rows have the same prompt"):
        build_pair_rows(
            heldout, PreferenceSplit.from_rows(pack_sides([]), [], "kto", "held-out"), "kto", 0
        )


@pytest.mark.parametrize("packing", [False, True])
def test_lazy_batches_are_the_batches(packing):
    rows = [
        TrainRow(side.prompt_ids, side.completion_ids, side.loss_mask) for side in build_sides(6)
    ]
    requests = []

    class Asked(list):
        def __getitem__(self, index):
            requests.append(index)
            return super().__getitem__(index)

    lazy, full = (
        build_lazy_batches(Asked(rows), 16, PAD, packing=packing),
        build_batches(rows, 16, PAD, packing=packing),
    )
    assert len(lazy) == len(full) > 2 and requests == []
    for lazy_batch, full_batch in zip(lazy, full, strict=True):
        assert lazy_batch.rows == full_batch.rows and torch.equal(
            lazy_batch.input_ids_BS, full_batch.input_ids_BS
        )
        assert torch.equal(lazy_batch.loss_mask_BS, full_batch.loss_mask_BS)
    assert sorted(requests) == list(range(12))
