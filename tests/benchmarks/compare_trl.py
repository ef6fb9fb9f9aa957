"""Our SFT, reward, DPO and GRPO losses against TRL's: the same weights, token ids and rewards, float32, on the CPU.

python -m venv trl_venv
trl_venv/bin/pip install -c constraints.txt torch transformers accelerate trl==1.16.0 datasets
PYTHONPATH=. trl_venv/bin/python tests/benchmarks/compare_trl.py    # seconds

Nothing is downloaded: the model is a random Llama with a tokenizer made here. TRL's trainers collate the ids and
compute their losses themselves; ours come from rl_core's trainers and pure losses. A line is PASS when both are within
1e-4. Where TRL means something else by choice, the line is CHOICE: TRL's value stands there with the reason, and ours
has to equal the formula written out plainly from the model's logits. The exit code is 1 if any line fails. One file,
longer than most, so that whoever doubts a line finds all of it here.

Suffixes: P prompts, G rollouts of a prompt, B rows, S sequence.
"""

from __future__ import annotations

import copy
import math
import platform
import sys
import tempfile
import warnings
from dataclasses import dataclass
from typing import Any

import torch
import transformers
import trl
from datasets import Dataset, disable_progress_bars
from torch.nn.functional import logsigmoid

from rl_core.data.tokenizer import train_tokenizer
from rl_core.losses import policy
from rl_core.losses.advantages import batch_advantages, group_advantages
from rl_core.losses.aggregation import token_weights
from rl_core.losses.kl import kl_k3, kl_penalty
from rl_core.losses.preference import bradley_terry_loss, dpo_loss, ipo_loss
from rl_core.losses.supervised import entropy_bonus
from rl_core.models import causal_lm, heads
from rl_core.models.logprobs import completion_logprobs
from rl_core.rollouts.batching import TrainRow, build_batches
from rl_core.settings import ModelSettings, RewardModelSettings, SFTSettings
from rl_core.trainers.reward_model import RewardModelTrainer
from rl_core.trainers.sft import SFTTrainer

TOLERANCE = 1e-4
P, G, MAX_COMPLETION = 3, 4, 16
SETTINGS = ModelSettings(preset="nano", device="cpu")
REWARDS_PG = torch.tensor([[1.0, 0.0, 0.5, 0.25], [0.0, 1.0, 1.0, 0.0], [0.5, 0.5, 0.5, 0.5]])


@dataclass
class Line:
    """One comparison; `formula` and `reason` where TRL means something else by choice."""

    loss: str
    theirs: str
    ours: str
    trl_value: float
    our_value: float
    formula: float | None = None
    reason: str = ""

    @property
    def difference(self) -> float:
        """Return the difference of ours to TRL's, or to the written-out formula."""
        return abs(self.our_value - (self.trl_value if self.formula is None else self.formula))

    @property
    def verdict(self) -> str:
        """PASS, CHOICE or FAIL; NaN fails."""
        if not self.difference <= TOLERANCE:
            return "FAIL"
        return "PASS" if self.formula is None else "CHOICE"


class Bench:
    """The weights (reference, old, new), rows and pairs that every comparison uses."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.tokenizer = train_tokenizer(["a small text"] * 4, 300)
        self.pad_id: int = self.tokenizer.pad_token_id
        model = causal_lm.create_model(SETTINGS, self.tokenizer, seed=0)
        generator = torch.Generator().manual_seed(1)
        # far enough from each other that ratios leave the clip range on both sides
        self.reference = self._moved(model, 0.1, generator)
        self.old = self._moved(self.reference, 0.02, generator)
        self.new = self._moved(self.old, 0.02, generator)
        causal_lm.save(self.reference, self.tokenizer, folder)

        def ids(count: int) -> list[int]:
            return torch.randint(6, len(self.tokenizer), (count,), generator=generator).tolist()

        prompts = [ids(count) for count in (3, 7, 5)]
        self.prompts = [prompt for prompt in prompts for _ in range(G)]
        self.completions = [ids(count) for count in (2, 9, 5, 16, 7, 3, 11, 4, 6, 13, 8, 5)]
        self.pairs = [
            (prompt, ids(chosen), ids(rejected))
            for prompt, chosen, rejected in zip(prompts, (4, 9, 6), (7, 3, 12), strict=True)
        ]

    @staticmethod
    def _moved(model: Any, scale: float, generator: torch.Generator) -> Any:
        moved = copy.deepcopy(model)
        with torch.no_grad():
            for weight in moved.parameters():
                weight.add_(scale * torch.randn(weight.shape, generator=generator))
        return moved

    def arguments(self, config: Any, **more: Any) -> Any:
        """Return a TRL config for a float32 run on the CPU that writes nothing."""
        return config(
            output_dir=self.folder + "/out",
            use_cpu=True,
            bf16=False,
            fp16=False,
            gradient_checkpointing=False,
            report_to="none",
            disable_tqdm=True,
            **more,
        )

    def batch(self, rows: list[TrainRow]) -> Any:
        """Return all rows as one of our micro-batches, in the same order."""
        (batch,) = build_batches(rows, 10**6, self.pad_id)
        order = torch.tensor(batch.rows).argsort()
        for name in ("input_ids_BS", "attention_mask_BS", "loss_mask_BS", "temperatures_BS"):
            if getattr(batch, name) is not None:
                setattr(batch, name, getattr(batch, name)[order])
        return batch


def compute_logprobs(model: Any, prompt: list[int], completion: list[int]) -> torch.Tensor:
    """Return log p of each completion token, from all logits of one unpadded row."""
    with torch.no_grad():
        log_p = model(torch.tensor([prompt + completion])).logits[0].log_softmax(-1)
    return torch.stack([log_p[len(prompt) - 1 + i, token] for i, token in enumerate(completion)])


def detach_loss(loss: Any) -> float:
    return float(loss.detach())


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
            args=bench.arguments(
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
            args=bench.arguments(
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
    batch = bench.batch(sides)
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
            args=bench.arguments(trl.DPOConfig, beta=beta, max_length=None, **more),
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


class Grpo:
    """Both sides' losses of one group-relative step; TRL makes advantages and old log-probs itself."""

    def __init__(self, bench: Bench, temperature: float = 1.0) -> None:
        self.bench = bench
        self.temperature = temperature
        rows = [
            TrainRow(p, c, [True] * len(c), temperature=temperature)
            for p, c in zip(bench.prompts, bench.completions, strict=True)
        ]
        self.batch = bench.batch(rows)
        self.mask_BS = self.batch.loss_mask_BS
        self.tokens = int(self.mask_BS.sum())
        with torch.no_grad():
            self.ref_BS, self.old_BS, self.new_BS = (
                completion_logprobs(m, self.batch)[0]
                for m in (bench.reference, bench.old, bench.new)
            )
            entropy_BS = completion_logprobs(bench.new, self.batch, with_entropy=True)[1]
        assert entropy_BS is not None
        self.entropy_BS = entropy_BS

    def theirs(self, rewards_PG: torch.Tensor = REWARDS_PG, **more: Any) -> float:
        """Compute TRL's loss: its rollout hook returns the ids; its advantages and old log-probs follow."""
        bench = self.bench
        model = copy.deepcopy(bench.old)
        model.config._name_or_path = bench.folder  # where TRL loads the reference from
        trainer = trl.GRPOTrainer(
            model=model,
            processing_class=bench.tokenizer,
            reward_funcs=lambda completions, **_: rewards_PG.flatten().tolist(),
            rollout_func=lambda prompts, _: {
                "prompt_ids": bench.prompts,
                "completion_ids": bench.completions,
                "logprobs": None,
            },
            train_dataset=Dataset.from_list([{"prompt": "a"}] * P),
            args=bench.arguments(
                trl.GRPOConfig,
                per_device_train_batch_size=P * G,
                num_generations=G,
                num_iterations=2,
                max_completion_length=MAX_COMPLETION,
                temperature=self.temperature,
                **more,
            ),
        )
        inputs = trainer._generate_and_score_completions([{"prompt": "a"}] * (P * G))
        trainer.model.load_state_dict(bench.new.state_dict())
        trainer.current_gradient_accumulation_steps = 1  # what its training loop sets before a step
        return detach_loss(trainer.compute_loss(trainer.model, inputs))

    def advantages(
        self, rewards_PG: torch.Tensor = REWARDS_PG, method: Any = "grpo"
    ) -> torch.Tensor:
        """Compute our advantages, [B, S]."""
        return self.spread_tokens(group_advantages(rewards_PG, method=method))

    def spread_tokens(self, advantages_PG: torch.Tensor) -> torch.Tensor:
        return advantages_PG.reshape(-1, 1) * self.mask_BS

    def clipped(self, advantages_BS: torch.Tensor | None = None, **more: Any) -> float:
        """Compute our clipped loss."""
        advantages_BS = self.advantages() if advantages_BS is None else advantages_BS
        arguments = {"num_loss_tokens": self.tokens, **more}
        return detach_loss(
            policy.clipped_policy_loss(
                self.new_BS, self.old_BS, advantages_BS, self.mask_BS, **arguments
            )[0]
        )

    def kl(self, **more: Any) -> float:
        """Compute our k3 KL, per loss token unless weights are passed."""
        return detach_loss(
            kl_penalty(self.new_BS, self.ref_BS, self.mask_BS, num_loss_tokens=self.tokens, **more)[
                0
            ]
        )

    def weights(self, aggregation: Any, denominator: float) -> dict[str, torch.Tensor]:
        """Compute our weights of each token, as the argument of a loss."""
        return {
            "loss_weights_BT": token_weights(
                self.mask_BS, aggregation=aggregation, denominator=denominator
            )
        }

    def plain(self, advantages: list[float], denominator: float, *, kl_coef: float = 0.0) -> float:
        """Compute the clipped loss (0.2) token by token over a denominator; KL over the loss tokens."""
        bench, clipped, kl = self.bench, 0.0, 0.0
        for prompt, completion, advantage in zip(
            bench.prompts, bench.completions, advantages, strict=True
        ):
            new, old, ref = (
                compute_logprobs(m, prompt, completion)
                for m in (bench.new, bench.old, bench.reference)
            )
            for now, before, base in zip(new.tolist(), old.tolist(), ref.tolist(), strict=True):
                ratio = math.exp(now - before)
                clipped -= min(ratio * advantage, min(max(ratio, 0.8), 1.2) * advantage)
                kl += math.exp(base - now) - (base - now) - 1
        return clipped / denominator + kl_coef * kl / self.tokens


def compare_grpo(bench: Bench) -> list[Line]:
    """Compare settings with the same meaning on both sides."""
    it = Grpo(bench)
    advantages_B = group_advantages(REWARDS_PG).flatten()
    sequence = {"loss_type": "grpo", "importance_sampling_level": "sequence"}
    pair = it.new_BS, it.old_BS

    def gspo(low: float, high: float) -> float:
        loss, _ = policy.gspo_loss(
            *pair, advantages_B, it.mask_BS, num_sequences=P * G, clip_eps=low, clip_eps_high=high
        )
        return detach_loss(loss)

    cispo = detach_loss(
        policy.cispo_loss(
            *pair, it.advantages(), it.mask_BS, num_loss_tokens=it.tokens, clip_eps_high=0.2
        )[0]
    )
    entropy = detach_loss(entropy_bonus(it.entropy_BS, it.mask_BS, num_loss_tokens=it.tokens)[0])
    fixed, by_sequence = (
        it.weights("constant", P * G * MAX_COMPLETION),
        it.weights("sequence_mean", P * G),
    )
    uncorrected = {"beta": 0.1, "use_bias_correction_kl": False}
    plain_kl = {"loss_type": "dapo", **uncorrected}
    sapo = detach_loss(
        policy.sapo_loss(
            *pair, it.advantages(), it.mask_BS, num_loss_tokens=it.tokens, **by_sequence
        )[0]
    )
    dr_BS = it.advantages(method="dr_grpo")
    drawn = [Grpo(bench, temperature) for temperature in (0.5, 2.0)]
    at_temperatures = [
        Line(
            "GRPO",
            f"dapo, beta=0.1, no correction, temperature={at.temperature:g}",
            f"kl_coef=0.1 (k3), temperature {at.temperature:g}",
            at.theirs(**plain_kl),
            at.clipped() + 0.1 * at.kl(),
        )
        for at in drawn
    ]
    return [
        *at_temperatures,
        Line(
            "GRPO",
            "dapo, epsilon=0.2",
            "grpo, clip_eps=0.2",
            it.theirs(loss_type="dapo"),
            it.clipped(),
        ),
        Line(
            "GRPO",
            "dapo, epsilon_high=0.28",
            "clip_eps_high=0.28",
            it.theirs(loss_type="dapo", epsilon_high=0.28),
            it.clipped(clip_eps_high=0.28),
        ),
        Line(
            "GRPO",
            "dapo, delta=1.4",
            "dual_clip=1.4",
            it.theirs(loss_type="dapo", delta=1.4),
            it.clipped(dual_clip=1.4),
        ),
        Line(
            "GRPO",
            "dapo, beta=0.1, use_bias_correction_kl=False",
            "kl_coef=0.1 (k3)",
            it.theirs(loss_type="dapo", beta=0.1, use_bias_correction_kl=False),
            it.clipped() + 0.1 * it.kl(),
        ),
        Line(
            "GRPO",
            "dapo, entropy_coef=0.05",
            "entropy_coef=0.05",
            it.theirs(loss_type="dapo", entropy_coef=0.05),
            it.clipped() + 0.05 * entropy,
        ),
        Line(
            "GRPO",
            "bnpo (the step is one micro-batch)",
            "grpo",
            it.theirs(loss_type="bnpo"),
            it.clipped(),
        ),
        Line(
            "GRPO",
            "grpo",
            "grpo, sequence_mean",
            it.theirs(loss_type="grpo"),
            it.clipped(**by_sequence),
        ),
        Line(
            "GRPO",
            "grpo, beta=0.1, no correction",
            "grpo, sequence_mean, kl_coef=0.1",
            it.theirs(loss_type="grpo", **uncorrected),
            it.clipped(**by_sequence) + 0.1 * it.kl(**by_sequence),
        ),
        Line(
            "GRPO",
            "dr_grpo, scale_rewards=none",
            "dr_grpo",
            it.theirs(loss_type="dr_grpo", scale_rewards="none"),
            it.clipped(dr_BS, **fixed),
        ),
        Line(
            "GRPO",
            "dr_grpo, scale_rewards=none, beta=0.1, no correction",
            "dr_grpo, kl_coef=0.1",
            it.theirs(loss_type="dr_grpo", scale_rewards="none", **uncorrected),
            it.clipped(dr_BS, **fixed) + 0.1 * it.kl(**fixed),
        ),
        Line(
            "GRPO",
            "dr_grpo, scale_rewards=group",
            "grpo, constant",
            it.theirs(loss_type="dr_grpo"),
            it.clipped(**fixed),
        ),
        Line("GRPO", "sapo", "sapo", it.theirs(loss_type="sapo"), sapo),
        Line(
            "GRPO",
            "cispo, epsilon_high=1.2 (the cap itself)",
            "cispo_loss, clip_eps_high=0.2 (cap 1.2)",
            it.theirs(loss_type="cispo", epsilon_high=1.2),
            cispo,
        ),
        Line(
            "GRPO",
            "grpo, sequence level, 3e-4/4e-4",
            "gspo_loss, the same (GSPO)",
            it.theirs(**sequence, epsilon=3e-4, epsilon_high=4e-4),
            gspo(3e-4, 4e-4),
        ),
        Line(
            "GRPO",
            "grpo, sequence level, 0.01/0.02",
            "gspo_loss, the same (GSPO)",
            it.theirs(**sequence, epsilon=0.01, epsilon_high=0.02),
            gspo(0.01, 0.02),
        ),
    ]


def compare_grpo_choices(bench: Bench) -> list[Line]:
    """Compare settings with another meaning in TRL."""
    it = Grpo(bench)
    grpo = it.theirs(loss_type="grpo")
    corrected, ratio_BS = it.theirs(loss_type="dapo", beta=0.1), (it.new_BS - it.old_BS).exp()
    usual = group_advantages(REWARDS_PG).flatten().tolist()
    close_PG = REWARDS_PG.clone()
    close_PG[2] = torch.tensor([0.5, 0.5005, 0.5, 0.5005])
    close = [*usual[: 2 * G], *[0.0] * G]
    batch_PG = batch_advantages(REWARDS_PG, subtract_group_mean=True)
    centered = (REWARDS_PG - REWARDS_PG.mean(1, keepdim=True)).double()
    by_batch = (centered / (centered.std() + 1e-4)).flatten().tolist()
    return [
        Line(
            "GRPO",
            "grpo",
            "grpo",
            grpo,
            it.clipped(),
            it.plain(usual, it.tokens),
            "it takes each sequence's mean, then the mean over sequences, so that a token of a short answer weighs "
            "more; ours divides by the loss tokens of the step unless loss_aggregation says sequence_mean",
        ),
        Line(
            "GRPO",
            "dapo, beta=0.1 (use_bias_correction_kl)",
            "grpo, kl_coef=0.1",
            corrected,
            it.clipped() + 0.1 * it.kl(),
            it.plain(usual, it.tokens, kl_coef=0.1),
            "by default it multiplies each token's k3 by the ratio to the old policy (arXiv:2512.02556); ours is k3 "
            "alone (arXiv:2402.03300)",
        ),
        Line(
            "GRPO",
            "dapo, beta=0.1 (use_bias_correction_kl)",
            "grpo + 0.1 mean of ratio kl_k3",
            corrected,
            it.clipped()
            + 0.1 * float((ratio_BS * kl_k3(it.new_BS, it.ref_BS) * it.mask_BS).sum() / it.tokens),
        ),
        Line(
            "GRPO",
            "dapo, a group whose rewards differ by 5e-4",
            "grpo, the same rewards",
            it.theirs(close_PG, loss_type="dapo"),
            it.clipped(it.advantages(close_PG)),
            it.plain(close, it.tokens),
            "both add 1e-4 to the std, but it scales up any spread; ours takes a std below 1e-3 for rounding: 0",
        ),
        Line(
            "GRPO",
            "dapo, scale_rewards=batch",
            "batch_advantages(subtract_group_mean)",
            it.theirs(loss_type="dapo", scale_rewards="batch"),
            it.clipped(it.spread_tokens(batch_PG)),
            it.plain(by_batch, it.tokens),
            "it divides by the std of the raw rewards; ours by that of what is left when the groups' means are off",
        ),
    ]


def report(lines: list[Line], bench: Bench) -> int:
    """Prints the table and the reasons; 1 if a line failed."""
    it = Grpo(bench)
    _, shares = policy.clipped_policy_loss(
        it.new_BS, it.old_BS, it.advantages(), it.mask_BS, num_loss_tokens=it.tokens
    )
    print(
        f"trl {trl.__version__}, torch {torch.__version__}, transformers {transformers.__version__}, Python "
        f"{platform.python_version()}; float32, CPU; tolerance {TOLERANCE:g}"
    )
    print(
        f"GRPO batch: {P} x {G} rollouts, {it.tokens} loss tokens; clipped below "
        f"{float(shares['clip_fraction_low']):.0%} (A < 0), above {float(shares['clip_fraction_high']):.0%} (A > 0); "
        f"largest ratio {float(shares['ratio_max']):.2f}\n"
    )
    widths = [
        max(len(str(getattr(line, name))) for line in lines) for name in ("loss", "theirs", "ours")
    ]
    print(
        "{:{}}  {:{}}  {:{}}".format("loss", widths[0], "TRL", widths[1], "here", widths[2])
        + f"  {'TRL value':>11}  {'ours':>11}  {'|difference|':>12}"
    )
    for line in lines:
        print(
            f"{line.loss:{widths[0]}}  {line.theirs:{widths[1]}}  {line.ours:{widths[2]}}  {line.trl_value:11.6f}  "
            f"{line.our_value:11.6f}  {line.difference:12.1e}  {line.verdict}"
        )
        if line.reason:
            print(
                f"{'':{widths[0]}}    the plain formula of ours gives {line.formula:.6f}; TRL: {line.reason}"
            )
    failed = sum(line.verdict == "FAIL" for line in lines)
    choices = sum(line.verdict == "CHOICE" for line in lines)
    print(f"\n{len(lines) - failed - choices} agree, {choices} differ by choice, {failed} fail")
    return int(failed > 0)


def main() -> int:
    warnings.simplefilter(
        "ignore"
    )  # TRL's and transformers' notices of experiments and renamed options
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    disable_progress_bars()
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(folder)
        compared = (compare_sft, compare_reward, compare_dpo, compare_grpo, compare_grpo_choices)
        return report([line for compare in compared for line in compare(bench)], bench)


if __name__ == "__main__":
    sys.exit(main())
