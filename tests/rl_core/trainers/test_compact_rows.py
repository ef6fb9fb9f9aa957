"""Trainers compute the same bits on compact rows, which are made where they are asked for, as on lists."""

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


def sides_of(count, seed=0):
    """Pairs of ragged sides, the two of a pair after one prompt."""
    generator = torch.Generator().manual_seed(seed)

    def ids(length):
        return torch.randint(1, VOCABULARY, (length,), generator=generator).tolist()

    sides = []
    for index in range(count):
        prompt = ids(1 + index % 3)
        for length in (2 + index % 4, 1 + index % 5):
            sides.append(
                PairSide(
                    prompt,
                    ids(length),
                    [True, *[False, True][: length - 1], *[True] * (length - 3)],
                )
            )
    return sides


def compact(sides):
    chunk = build_token_chunk(
        (n // 2, len(s.prompt_ids), s.ids, [False] * len(s.prompt_ids) + s.loss_mask)
        for n, s in enumerate(sides)
    )
    return TokenRows([chunk])


def parts_of(use, margins=False):
    """Training and held-out parts, their rows as a file has them, and their sides."""
    made = []
    for count, seed, name in ((9, 0, "training"), (5, 1, "held-out")):
        sides = sides_of(count, seed)
        rows = [
            {"prompt": "p", **({"margin": place / 2} if margins else {})} for place in range(count)
        ]
        made.append((PreferenceSplit.from_rows(compact(sides), rows, use, name), sides))
    return made


def trained(trainer):
    """Bits of everything that two steps and an evaluation give."""
    steps = [
        {name: value for name, value in trainer.step().items() if "perf" not in name}
        for _ in range(3)
    ]
    return steps, trainer.evaluate(), tiny.weights_digest(trainer.model)


@pytest.mark.parametrize("packing", [False, True])
def test_sft(packing):
    rows = [(side.ids, [False] * len(side.prompt_ids) + side.loss_mask) for side in sides_of(8)]
    settings = SFTSettings(
        batch_size=5, learning_rate=1e-2, warmup_steps=0, packing=packing, micro_batch_tokens=40
    )
    found = [
        trained(SFTTrainer(tiny.nano(), PAD, some[:12], some[12:], settings, 3))
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
    assert trained(lazily) == found[0] == found[1]


@pytest.mark.parametrize(
    ("loss", "dropout"), [("dpo", 0.0), ("dpo", 0.3), ("kto", 0.0), ("simpo", 0.0)]
)
def test_preferences(loss, dropout):
    (train, sides), (heldout, others) = parts_of(loss)
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
    found = [
        trained(PreferenceTrainer(tiny.nano(dropout=dropout), PAD, *pairs, settings, 3))
        for pairs in (rows, lists)
    ]
    assert found[0] == found[1] and found[0][1]["eval/loss"] > 0


def test_reward_models_and_margins():
    (train, sides), (heldout, others) = parts_of("reward_model", margins=True)
    rows = build_pair_rows(train, heldout, "reward_model", 0)
    lists = [
        [ScoredPair(part[n].ids, part[n + 1].ids, n / 4) for n in range(0, len(part), 2)]
        for part in (sides, others)
    ]
    settings = RewardModelSettings(batch_size=4, learning_rate=1e-2, warmup_steps=0)

    def classifier():
        from transformers import LlamaForSequenceClassification

        return tiny.nano(model_class=LlamaForSequenceClassification, num_labels=1)

    recipe = build_reward_model_recipe(classifier(), PAD, *rows, settings, 3)
    by_lists = RewardModelTrainer(classifier(), PAD, *lists, settings, 3)
    assert trained(recipe.trainer) == trained(by_lists)
    assert heads.score_rows(recipe.trainer.model, [sides[0].ids], pad_id=PAD, max_tokens=64)


def test_rows_that_do_not_fit_their_tokens():
    with pytest.raises(DataError, match="training rows have 2 sides, but 4 are tokenised"):
        PreferenceSplit.from_rows(compact(sides_of(2)), [{"prompt": "p"}], "dpo", "training")
    with pytest.raises(DataError, match="training row 1: has a label"):
        PreferenceSplit.from_rows(
            compact(sides_of(1)), [{"prompt": "p", "label": True}], "dpo", "training"
        )


def test_held_out_partners_come_from_training_where_their_prompts_are_all_the_same():
    train = PreferenceSplit.from_rows(
        compact(sides_of(3)), [{"prompt": "p"}] * 3, "kto", "training"
    )
    alone = compact([PairSide([9], [8], [True])])
    heldout = PreferenceSplit.from_rows(
        alone, [{"prompt": "q", "completion": "a", "label": True}], "kto", "held-out"
    )
    (pair,) = build_pair_rows(train, heldout, "kto", 0)[1]
    assert (
        pair.desirable
        and pair.chosen == PairSide([9], [8], [True])
        and pair.rejected.prompt_ids == [9]
    )
    assert pair.rejected.completion_ids in [side.completion_ids for side in sides_of(3)]
    with pytest.raises(DataError, match="all rows have the same prompt"):
        build_pair_rows(
            heldout, PreferenceSplit.from_rows(compact([]), [], "kto", "held-out"), "kto", 0
        )


@pytest.mark.parametrize("packing", [False, True])
def test_lazy_batches_are_the_batches(packing):
    rows = [TrainRow(side.prompt_ids, side.completion_ids, side.loss_mask) for side in sides_of(6)]
    asked = []

    class Asked(list):
        def __getitem__(self, index):
            asked.append(index)
            return super().__getitem__(index)

    lazy, whole = (
        build_lazy_batches(Asked(rows), 16, PAD, packing=packing),
        build_batches(rows, 16, PAD, packing=packing),
    )
    assert len(lazy) == len(whole) > 2 and asked == []
    for one, other in zip(lazy, whole, strict=True):
        assert one.rows == other.rows and torch.equal(one.input_ids_BS, other.input_ids_BS)
        assert torch.equal(one.loss_mask_BS, other.loss_mask_BS)
    assert sorted(asked) == list(range(12))
