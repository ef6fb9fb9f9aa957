"""Weights, rows and pairs that every comparison uses, and a line of the table.

Suffixes: P prompts, G rollouts of a prompt, B rows, S sequence.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch

from rl_core.data.tokenizer import train_tokenizer
from rl_core.models import causal_lm
from rl_core.rollouts.batching import TrainRow, build_batches
from rl_core.settings import ModelSettings

TOLERANCE = 1e-4
P, G, MAX_COMPLETION = 3, 4, 16
SETTINGS = ModelSettings(preset="nano", device="cpu")


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
        self.reference = self._perturb_weights(model, 0.1, generator)
        self.old = self._perturb_weights(self.reference, 0.02, generator)
        self.new = self._perturb_weights(self.old, 0.02, generator)
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
    def _perturb_weights(model: Any, scale: float, generator: torch.Generator) -> Any:
        moved = copy.deepcopy(model)
        with torch.no_grad():
            for weight in moved.parameters():
                weight.add_(scale * torch.randn(weight.shape, generator=generator))
        return moved

    def build_trl_arguments(self, config: Any, **more: Any) -> Any:
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

    def build_batch(self, rows: list[TrainRow]) -> Any:
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
