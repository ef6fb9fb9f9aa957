"""A loss that clients ask for by name: its inputs, options, formula and metrics.

Suffixes: B rows of one pass, T tokens, K targets at one position.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch

__all__ = ["LossFunction", "LossInput", "LossInputs", "LossOption", "TokenTable"]

Need = Literal["entropy", "values", "scores"]
TokenTable = Mapping[str, np.ndarray]  # columns over all tokens of a request; `rows` says of which datum


@dataclass(frozen=True, slots=True)
class LossInput:
    """An array that comes with every datum."""

    doc: str
    kind: Literal["float", "int"] = "float"
    shape: Literal["tokens", "targets", "one"] = "tokens"  # [T]; that of target_tokens, [T] or [T, K]; [1]
    required: bool = True


@dataclass(frozen=True, slots=True)
class LossOption:
    """A number of `loss_fn_config`, within its limits."""

    default: float
    low: float
    high: float
    doc: str


@dataclass(slots=True)
class LossInputs:
    """Rows of one run as its loss sees them. All [B, T], right-padded with 0, unless said otherwise."""

    mask_BT: torch.Tensor  # bool, True = a position of the datum
    options: Mapping[str, float]
    inputs: Mapping[str, torch.Tensor]  # optional ones that were not given are left out; of shape "one": [B]
    logprobs: torch.Tensor | None = None  # [B, T] or [B, T, K], nats, with gradient; None = no target_tokens
    entropy_BT: torch.Tensor | None = None
    values_BT: torch.Tensor | None = None  # by the run's value head, with gradient
    scores_B: torch.Tensor | None = None  # by the run's score head at the last position, with gradient
    outputs: dict[str, torch.Tensor] = field(default_factory=dict)  # what the loss adds to outputs and metrics

    @property
    def single_logprobs(self) -> torch.Tensor:
        """Log-probabilities [B, T] of losses with one target a position."""
        assert self.logprobs is not None
        return self.logprobs

    def given(self, name: str, default: float) -> torch.Tensor:
        """An optional input, or a tensor full of its default."""
        found = self.inputs.get(name)
        dtype = torch.float32 if self.logprobs is None else self.logprobs.dtype
        return found if found is not None else torch.full_like(self.mask_BT, default, dtype=dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class LossFunction:
    """A loss that sums over tokens."""

    name: str
    formula: str  # for the documentation
    inputs: Mapping[str, LossInput]
    options: Mapping[str, LossOption]
    loss: Callable[[LossInputs], torch.Tensor]
    metrics: Callable[[TokenTable, Mapping[str, float]], dict[str, float]]
    needs: frozenset[Need] = frozenset()
    is_paired: bool = False  # True = datums come in pairs, which stay together
    kl_limit: str = ""  # the option that limits the KL of the next update; "" = none
