"""Rules of one request about its tokens: a grammar, biases of tokens, penalties for repeated ones.

They change the logits before temperature, min_p, top_k and top_p. Log-probabilities of such a request are those of the
changed distribution, which its tokens were drawn from.

V vocabulary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from rl_core.errors import PosttrainError


class RulesFailed(PosttrainError):
    """Error: the next token of a request could not be restricted, because its grammar became too complex."""


class GrammarState(Protocol):
    """The state of a grammar within one answer."""

    def read_tokens(self, tokens: Sequence[int]) -> None:
        """Advance over sampled tokens. Raises: RulesFailed."""

    def compute_mask(self) -> np.ndarray:
        """Compute bool [V], True = the token may come next. Raises: RulesFailed."""


class Grammar(Protocol):
    """A compiled grammar, shared by requests."""

    def start_answer(self) -> GrammarState:
        """Return the state in front of the first token."""


@dataclass(frozen=True, slots=True)
class TokenRules:
    """Restrictions of one request on its tokens.

    Penalties change the logit z of token j, sampled c times before in this answer, to z - c * frequency_penalty -
    (c > 0) * presence_penalty.
    Source: OpenAI, API reference, "Frequency and presence penalties".
    """

    grammar: Grammar | None = None
    bias: tuple[tuple[int, float], ...] = ()  # token and what is added to its logit
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0

    @property
    def is_empty(self) -> bool:
        """True = the logits stay as they are."""
        has_penalty = self.presence_penalty != 0 or self.frequency_penalty != 0
        return self.grammar is None and not self.bias and not has_penalty


class LogitsEditor:
    """Application of `TokenRules` to the steps of one answer; depends on the answer's own tokens alone."""

    def __init__(self, rules: TokenRules) -> None:
        self._rules = rules
        self._has_penalty = rules.presence_penalty != 0 or rules.frequency_penalty != 0
        self._grammar: Any = None if rules.grammar is None else rules.grammar.start_answer()
        self._counts: Counter[int] = Counter()
        self._num_read = 0

    def edit_logits(
        self, logits_1V: torch.Tensor, sampled: np.ndarray | Sequence[int]
    ) -> torch.Tensor:
        """Return changed logits, float32 [1, V].

        Args:
            logits_1V: any float type.
            sampled: all tokens of the answer so far; those of earlier steps must not change.
        Raises: RulesFailed.
        """
        new_tokens = [int(token) for token in sampled[self._num_read :]]
        self._num_read += len(new_tokens)
        edited_1V = logits_1V.float().clone()
        if self._has_penalty:
            self._counts.update(new_tokens)
            self._subtract_penalties(edited_1V)
        if self._rules.bias:
            tokens, values = zip(*self._rules.bias, strict=True)
            _add_to_logits(edited_1V, tokens, values)
        if self._grammar is not None:
            self._grammar.read_tokens(new_tokens)
            self._mask_logits(edited_1V)
        return edited_1V

    def _subtract_penalties(self, logits_1V: torch.Tensor) -> None:
        if not self._counts:
            return
        rules = self._rules
        tokens, counts = zip(*self._counts.items(), strict=True)
        penalties = [
            -(count * rules.frequency_penalty + rules.presence_penalty) for count in counts
        ]
        _add_to_logits(logits_1V, tokens, penalties)

    def _mask_logits(self, logits_1V: torch.Tensor) -> None:
        allowed_V = self._grammar.compute_mask()
        vocab_size = logits_1V.shape[1]
        is_allowed_V = np.zeros(vocab_size, dtype=bool)
        is_allowed_V[: len(allowed_V)] = allowed_V[:vocab_size]
        if not is_allowed_V.any():
            raise RulesFailed("no token of the vocabulary continues the answer as it was demanded")
        mask_1V = torch.from_numpy(~is_allowed_V)[None].to(logits_1V.device)
        logits_1V.masked_fill_(mask_1V, -torch.inf)


def _add_to_logits(logits_1V: torch.Tensor, tokens: Sequence[int], values: Sequence[float]) -> None:
    """Add values to the logits of distinct tokens, in place."""
    device = logits_1V.device
    ids = torch.tensor(tokens, dtype=torch.int64, device=device)
    logits_1V[0, ids] += torch.tensor(values, dtype=torch.float32, device=device)
