"""SFT, the reward model, and DPO with its relatives, against TRL's."""

from __future__ import annotations

import copy
from typing import Any

import torch
import trl
from datasets import Dataset
from torch.nn.functional import logsigmoid

from rl_core.losses.preference import bradley_terry_loss, dpo_loss, ipo_loss
from rl_core.models import heads
from rl_core.models.logprobs import completion_logprobs
from rl_core.rollouts.batching import TrainRow
from rl_core.settings import RewardModelSettings, SFTSettings
from rl_core.trainers.reward_model import RewardModelTrainer
from rl_core.trainers.sft import SFTTrainer
from trl_losses.bench import SETTINGS, Bench, Line, compute_logprobs, detach_loss


def compare_sft(bench: Bench) -> list[Line]:
    """Compare SFT: completion-only, over two micro-batches, and over all tokens."""
    rows = list(zip(bench.prompts, bench.completions, strict=True))
    lines = []
    for completion_only, parts in ((True, 1), (True, 2), (False, 1)):
        examples = [
            {
                "input_ids": p + c,
                "completion_mask": [int(not completion_only)] * len(p) + [1] * len(c),
            }
            for p, c in rows
        ]
        trainer = trl.SFTTrainer(
            model=copy.deepcopy(bench.new),
            processing_class=bench.tokenizer,
            train_dataset=Dataset.from_list(examples),
            args=bench.build_trl_arguments(
                trl.SFTConfig, completion_only_loss=completion_only, max_length=None
            ),
        )
        prepared = list(trainer.train_dataset)
        size = len(prepared) // parts
        count = sum(sum(label != -100 for label in row["labels"][1:]) for row in prepared)
        theirs = sum(
            detach_loss(
                trainer.compute_loss(
                    trainer.model,
                    trainer.data_collator(prepared[i : i + size]),
                    num_items_in_batch=torch.tensor(count) if parts > 1 else None,
                )
            )
            for i in range(0, len(prepared), size)
        )
        ours_rows = [
            (p + c, [False] + [not completion_only] * (len(p) - 1) + [True] * len(c))
            for p, c in rows
        ]
        micro = 10**6 if parts == 1 else 100
        settings = SFTSettings(batch_size=len(rows), micro_batch_tokens=micro, learning_rate=1e-9)
        ours = SFTTrainer(
            copy.deepcopy(bench.new), bench.pad_id, ours_rows, [], settings, 0
        ).step()["train/loss"]
        lines.append(
            Line(
                "SFT",
                f"completion_only_loss={completion_only}"
                + (", num_items_in_batch" if parts > 1 else ""),
                f"loss mask: {'completion' if completion_only else 'all but the first'}, micro_batch_tokens={micro}",
                theirs,
                ours,
            )
        )
    return lines


def compare_reward(bench: Bench) -> list[Line]:
    """Compare Bradley-Terry with and without centring, and with a margin."""
    model, _ = heads.create_reward_model(bench.folder, SETTINGS)
    pairs = [(p + c, p + r) for p, c, r in bench.pairs]
    lines = []
    for center, margins in ((0.0, None), (0.01, None), (0.0, [0.5, -0.25, 1.0])):
        examples: list[dict[str, Any]] = [{"chosen_ids": c, "rejected_ids": r} for c, r in pairs]
        trainer = trl.RewardTrainer(
            model=copy.deepcopy(model),
            processing_class=bench.tokenizer,
            train_dataset=Dataset.from_list(examples),
            args=bench.build_trl_arguments(
                trl.RewardConfig, center_rewards_coefficient=center or None, max_length=None
            ),
        )
        for example, margin in zip(examples, margins or [], strict=False):
            example["margin"] = margin
        theirs = detach_loss(trainer.compute_loss(trainer.model, trainer.data_collator(examples)))
        if margins is None:
            settings = RewardModelSettings(batch_size=3, center_coef=center, learning_rate=1e-9)
            ours = RewardModelTrainer(
                copy.deepcopy(model), bench.pad_id, pairs, [], settings, 0
            ).step()["train/loss"]
        else:
            scores = torch.tensor(
                heads.score_rows(
                    model, [row for pair in pairs for row in pair], pad_id=bench.pad_id
                )
            )
            margin_B = torch.tensor(margins)
            loss, _ = bradley_terry_loss(
                scores[0::2], scores[1::2], num_pairs=3, margin_B=margin_B, center_coef=center
            )
            ours = detach_loss(loss)
        lines.append(
            Line(
                "reward",
                f"center_rewards_coefficient={center or None}" + (", margin" if margins else ""),
                f"center_coef={center}" + (", margin_B" if margins else ""),
                theirs,
                ours,
            )
        )
    return lines


def compare_dpo(bench: Bench) -> list[Line]:
    """Compare sigmoid, label smoothing and IPO; the reference has other weights than the policy."""
    sides = [
        TrainRow(p, side, [True] * len(side))
        for k in (1, 2)
        for p, side in ((x[0], x[k]) for x in bench.pairs)
    ]
    batch = bench.build_batch(sides)
    lengths_B = batch.loss_mask_BS.sum(1)
    with torch.no_grad():
        sums = [completion_logprobs(m, batch)[0].sum(1) for m in (bench.new, bench.reference)]
    summed = [part for total in sums for part in total.chunk(2)]
    means = [part for total in sums for part in (total / lengths_B).chunk(2)]
    flipped = [summed[1], summed[0], summed[3], summed[2]]
    beta, e = 0.5, 0.1

    def theirs(pairs: list[Any] = bench.pairs, **more: Any) -> float:
        trainer = trl.DPOTrainer(
            model=copy.deepcopy(bench.new),
            ref_model=copy.deepcopy(bench.reference),
            processing_class=bench.tokenizer,
            train_dataset=Dataset.from_list([{"prompt": "a", "chosen": "b", "rejected": "c"}]),
            args=bench.build_trl_arguments(trl.DPOConfig, beta=beta, max_length=None, **more),
        )
        examples = [{"prompt_ids": p, "chosen_ids": c, "rejected_ids": r} for p, c, r in pairs]
        return detach_loss(trainer.compute_loss(trainer.model, trainer.data_collator(examples)))

    sigmoid = detach_loss(dpo_loss(*summed, num_pairs=3, beta=beta)[0])
    smooth = detach_loss(dpo_loss(*summed, num_pairs=3, beta=beta, label_smoothing=e)[0])
    robust = (
        (1 - e) * sigmoid - e * detach_loss(dpo_loss(*flipped, num_pairs=3, beta=beta)[0])
    ) / (1 - 2 * e)
    aot = sum(theirs([pair], loss_type=["aot"], label_smoothing=e) for pair in bench.pairs) / 3
    h = [
        float(
            sum(
                sign
                * (
                    compute_logprobs(bench.new, p, side)
                    - compute_logprobs(bench.reference, p, side)
                ).sum()
                for sign, side in ((1, c), (-1, r))
            )
        )
        for p, c, r in bench.pairs
    ]
    h_beta = beta * torch.tensor(h)
    cdpo = float((-(1 - e) * logsigmoid(h_beta) - e * logsigmoid(-h_beta)).mean())
    their_robust = theirs(loss_type=["robust"], label_smoothing=e)
    return [
        Line("DPO", "loss_type=sigmoid", "dpo_loss", theirs(loss_type=["sigmoid"]), sigmoid),
        Line(
            "DPO",
            "loss_type=aot, one pair a batch, label_smoothing",
            "dpo_loss, label_smoothing (cDPO)",
            aot,
            smooth,
        ),
        Line(
            "DPO",
            "loss_type=robust, label_smoothing",
            "dpo_loss, label_smoothing (cDPO)",
            their_robust,
            smooth,
            cdpo,
            "its smoothed loss is rDPO, which takes the flipped loss away and divides by 1 - 2e; ours, cDPO, adds it",
        ),
        Line(
            "DPO",
            "loss_type=robust, label_smoothing",
            "((1-e) dpo_loss - e dpo_loss of flipped pairs)/(1-2e)",
            their_robust,
            robust,
        ),
        Line(
            "DPO",
            "loss_type=ipo (means over completion tokens)",
            "ipo_loss of mean log-probs",
            theirs(loss_type=["ipo"]),
            detach_loss(ipo_loss(*means, num_pairs=3, beta=beta)[0]),
        ),
    ]
