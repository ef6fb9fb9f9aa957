"""Group-relative losses against TRL's: with the same meaning on both sides, and with another one.

Suffixes: P prompts, G rollouts of a prompt, B rows, S sequence.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
import trl
from datasets import Dataset

from rl_core.losses import policy
from rl_core.losses.advantages import batch_advantages, group_advantages
from rl_core.losses.aggregation import token_weights
from rl_core.losses.kl import kl_k3, kl_penalty
from rl_core.losses.supervised import entropy_bonus
from rl_core.models.logprobs import completion_logprobs
from rl_core.rollouts.batching import TrainRow
from trl_losses.bench import MAX_COMPLETION, Bench, G, Line, P, compute_logprobs, detach_loss

REWARDS_PG = torch.tensor([[1.0, 0.0, 0.5, 0.25], [0.0, 1.0, 1.0, 0.0], [0.5, 0.5, 0.5, 0.5]])


class GroupRelativeStep:
    """Both sides' losses of one group-relative step; TRL makes advantages and old log-probs itself."""

    def __init__(self, bench: Bench, temperature: float = 1.0) -> None:
        self.bench = bench
        self.temperature = temperature
        rows = [
            TrainRow(p, c, [True] * len(c), temperature=temperature)
            for p, c in zip(bench.prompts, bench.completions, strict=True)
        ]
        self.batch = bench.build_batch(rows)
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

    def compute_trl_loss(self, rewards_PG: torch.Tensor = REWARDS_PG, **more: Any) -> float:
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
            args=bench.build_trl_arguments(
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

    def compute_advantages(
        self, rewards_PG: torch.Tensor = REWARDS_PG, method: Any = "grpo"
    ) -> torch.Tensor:
        """Compute our advantages, [B, S]."""
        return self.spread_tokens(group_advantages(rewards_PG, method=method))

    def spread_tokens(self, advantages_PG: torch.Tensor) -> torch.Tensor:
        return advantages_PG.reshape(-1, 1) * self.mask_BS

    def compute_clipped_loss(self, advantages_BS: torch.Tensor | None = None, **more: Any) -> float:
        """Compute our clipped loss."""
        advantages_BS = self.compute_advantages() if advantages_BS is None else advantages_BS
        arguments = {"num_loss_tokens": self.tokens, **more}
        return detach_loss(
            policy.clipped_policy_loss(
                self.new_BS, self.old_BS, advantages_BS, self.mask_BS, **arguments
            )[0]
        )

    def compute_kl(self, **more: Any) -> float:
        """Compute our k3 KL, per loss token unless weights are passed."""
        return detach_loss(
            kl_penalty(self.new_BS, self.ref_BS, self.mask_BS, num_loss_tokens=self.tokens, **more)[
                0
            ]
        )

    def compute_weights(self, aggregation: Any, denominator: float) -> dict[str, torch.Tensor]:
        """Compute our weights of each token, as the argument of a loss."""
        return {
            "loss_weights_BT": token_weights(
                self.mask_BS, aggregation=aggregation, denominator=denominator
            )
        }

    def compute_by_token(
        self, advantages: list[float], denominator: float, *, kl_coef: float = 0.0
    ) -> float:
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
    it = GroupRelativeStep(bench)
    advantages_B = group_advantages(REWARDS_PG).flatten()
    sequence = {"loss_type": "grpo", "importance_sampling_level": "sequence"}
    pair = it.new_BS, it.old_BS

    def compute_gspo(low: float, high: float) -> float:
        loss, _ = policy.gspo_loss(
            *pair, advantages_B, it.mask_BS, num_sequences=P * G, clip_eps=low, clip_eps_high=high
        )
        return detach_loss(loss)

    cispo = detach_loss(
        policy.cispo_loss(
            *pair, it.compute_advantages(), it.mask_BS, num_loss_tokens=it.tokens, clip_eps_high=0.2
        )[0]
    )
    entropy = detach_loss(entropy_bonus(it.entropy_BS, it.mask_BS, num_loss_tokens=it.tokens)[0])
    fixed, by_sequence = (
        it.compute_weights("constant", P * G * MAX_COMPLETION),
        it.compute_weights("sequence_mean", P * G),
    )
    uncorrected = {"beta": 0.1, "use_bias_correction_kl": False}
    k3_alone = {"loss_type": "dapo", **uncorrected}
    sapo = detach_loss(
        policy.sapo_loss(
            *pair, it.compute_advantages(), it.mask_BS, num_loss_tokens=it.tokens, **by_sequence
        )[0]
    )
    dr_BS = it.compute_advantages(method="dr_grpo")
    drawn = [GroupRelativeStep(bench, temperature) for temperature in (0.5, 2.0)]
    at_temperatures = [
        Line(
            "GRPO",
            f"dapo, beta=0.1, no correction, temperature={at.temperature:g}",
            f"kl_coef=0.1 (k3), temperature {at.temperature:g}",
            at.compute_trl_loss(**k3_alone),
            at.compute_clipped_loss() + 0.1 * at.compute_kl(),
        )
        for at in drawn
    ]
    return [
        *at_temperatures,
        Line(
            "GRPO",
            "dapo, epsilon=0.2",
            "grpo, clip_eps=0.2",
            it.compute_trl_loss(loss_type="dapo"),
            it.compute_clipped_loss(),
        ),
        Line(
            "GRPO",
            "dapo, epsilon_high=0.28",
            "clip_eps_high=0.28",
            it.compute_trl_loss(loss_type="dapo", epsilon_high=0.28),
            it.compute_clipped_loss(clip_eps_high=0.28),
        ),
        Line(
            "GRPO",
            "dapo, delta=1.4",
            "dual_clip=1.4",
            it.compute_trl_loss(loss_type="dapo", delta=1.4),
            it.compute_clipped_loss(dual_clip=1.4),
        ),
        Line(
            "GRPO",
            "dapo, beta=0.1, use_bias_correction_kl=False",
            "kl_coef=0.1 (k3)",
            it.compute_trl_loss(loss_type="dapo", beta=0.1, use_bias_correction_kl=False),
            it.compute_clipped_loss() + 0.1 * it.compute_kl(),
        ),
        Line(
            "GRPO",
            "dapo, entropy_coef=0.05",
            "entropy_coef=0.05",
            it.compute_trl_loss(loss_type="dapo", entropy_coef=0.05),
            it.compute_clipped_loss() + 0.05 * entropy,
        ),
        Line(
            "GRPO",
            "bnpo (the step is one micro-batch)",
            "grpo",
            it.compute_trl_loss(loss_type="bnpo"),
            it.compute_clipped_loss(),
        ),
        Line(
            "GRPO",
            "grpo",
            "grpo, sequence_mean",
            it.compute_trl_loss(loss_type="grpo"),
            it.compute_clipped_loss(**by_sequence),
        ),
        Line(
            "GRPO",
            "grpo, beta=0.1, no correction",
            "grpo, sequence_mean, kl_coef=0.1",
            it.compute_trl_loss(loss_type="grpo", **uncorrected),
            it.compute_clipped_loss(**by_sequence) + 0.1 * it.compute_kl(**by_sequence),
        ),
        Line(
            "GRPO",
            "dr_grpo, scale_rewards=none",
            "dr_grpo",
            it.compute_trl_loss(loss_type="dr_grpo", scale_rewards="none"),
            it.compute_clipped_loss(dr_BS, **fixed),
        ),
        Line(
            "GRPO",
            "dr_grpo, scale_rewards=none, beta=0.1, no correction",
            "dr_grpo, kl_coef=0.1",
            it.compute_trl_loss(loss_type="dr_grpo", scale_rewards="none", **uncorrected),
            it.compute_clipped_loss(dr_BS, **fixed) + 0.1 * it.compute_kl(**fixed),
        ),
        Line(
            "GRPO",
            "dr_grpo, scale_rewards=group",
            "grpo, constant",
            it.compute_trl_loss(loss_type="dr_grpo"),
            it.compute_clipped_loss(**fixed),
        ),
        Line("GRPO", "sapo", "sapo", it.compute_trl_loss(loss_type="sapo"), sapo),
        Line(
            "GRPO",
            "cispo, epsilon_high=1.2 (the cap itself)",
            "cispo_loss, clip_eps_high=0.2 (cap 1.2)",
            it.compute_trl_loss(loss_type="cispo", epsilon_high=1.2),
            cispo,
        ),
        Line(
            "GRPO",
            "grpo, sequence level, 3e-4/4e-4",
            "gspo_loss, the same (GSPO)",
            it.compute_trl_loss(**sequence, epsilon=3e-4, epsilon_high=4e-4),
            compute_gspo(3e-4, 4e-4),
        ),
        Line(
            "GRPO",
            "grpo, sequence level, 0.01/0.02",
            "gspo_loss, the same (GSPO)",
            it.compute_trl_loss(**sequence, epsilon=0.01, epsilon_high=0.02),
            compute_gspo(0.01, 0.02),
        ),
    ]


def compare_grpo_choices(bench: Bench) -> list[Line]:
    """Compare settings with another meaning in TRL."""
    it = GroupRelativeStep(bench)
    grpo = it.compute_trl_loss(loss_type="grpo")
    corrected, ratio_BS = (
        it.compute_trl_loss(loss_type="dapo", beta=0.1),
        (it.new_BS - it.old_BS).exp(),
    )
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
            it.compute_clipped_loss(),
            it.compute_by_token(usual, it.tokens),
            "it takes each sequence's mean, then the mean over sequences, so that a token of a short answer weighs "
            "more; ours divides by the loss tokens of the step unless loss_aggregation says sequence_mean",
        ),
        Line(
            "GRPO",
            "dapo, beta=0.1 (use_bias_correction_kl)",
            "grpo, kl_coef=0.1",
            corrected,
            it.compute_clipped_loss() + 0.1 * it.compute_kl(),
            it.compute_by_token(usual, it.tokens, kl_coef=0.1),
            "by default it multiplies each token's k3 by the ratio to the old policy (arXiv:2512.02556); ours is k3 "
            "alone (arXiv:2402.03300)",
        ),
        Line(
            "GRPO",
            "dapo, beta=0.1 (use_bias_correction_kl)",
            "grpo + 0.1 mean of ratio kl_k3",
            corrected,
            it.compute_clipped_loss()
            + 0.1 * float((ratio_BS * kl_k3(it.new_BS, it.ref_BS) * it.mask_BS).sum() / it.tokens),
        ),
        Line(
            "GRPO",
            "dapo, a group whose rewards differ by 5e-4",
            "grpo, the same rewards",
            it.compute_trl_loss(close_PG, loss_type="dapo"),
            it.compute_clipped_loss(it.compute_advantages(close_PG)),
            it.compute_by_token(close, it.tokens),
            "both add 1e-4 to the std, but it scales up any spread; ours takes a std below 1e-3 for rounding: 0",
        ),
        Line(
            "GRPO",
            "dapo, scale_rewards=batch",
            "batch_advantages(subtract_group_mean)",
            it.compute_trl_loss(loss_type="dapo", scale_rewards="batch"),
            it.compute_clipped_loss(it.spread_tokens(batch_PG)),
            it.compute_by_token(by_batch, it.tokens),
            "it divides by the std of the raw rewards; ours by that of what is left when the groups' means are off",
        ),
    ]
