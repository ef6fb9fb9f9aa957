"""Requests for evaluations, and their checks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rl_core.errors import ServiceError
from rl_core.service.input_checks import ModelLimits, refuse
from rl_core.service.requests import SampleParameters
from rl_core.settings import ServiceEngineSettings

__all__ = ["EvaluateRequest", "checked_rows"]

MOST_TOKENS = 1 << 18  # scored or sampled by one evaluation: training waits meanwhile
MOST_RESAMPLES = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluateRequest:
    """Scores of a model on texts and of samples to prompts, and those of another model beside them."""

    model: str  # name of a base model or reference model, or a key of `folders`
    against: str | None = None
    texts: tuple[str | np.ndarray, ...] = ()  # texts, or integers [S]
    prompts: tuple[str | np.ndarray, ...] = ()
    num_samples: int = 8  # of each prompt
    parameters: SampleParameters = field(default_factory=lambda: SampleParameters(max_tokens=64))
    seed: int = 0  # of samples and intervals
    confidence: float = 0.95
    resamples: int = 2000
    folders: Mapping[str, str] = field(default_factory=dict)  # saved weights by the names above

    def check(self, settings: ServiceEngineSettings) -> None:
        """Raises: ServiceError (user) for anything that can be refused without a model."""
        if not self.texts and not self.prompts:
            refuse("evaluate: neither texts nor prompts are given")
        for name, found in (("texts", self.texts), ("prompts", self.prompts)):
            if len(found) > settings.max_data:
                refuse(f"{name}: {len(found)}; at most {settings.max_data} in one request (max_data)")
        if not 1 <= self.num_samples <= settings.max_samples:
            refuse(f"num_samples: {self.num_samples}, expected 1 to {settings.max_samples} (max_samples)")
        if not (math.isfinite(self.confidence) and 0 < self.confidence < 1):
            refuse(f"confidence: {self.confidence}, expected a number between 0 and 1")
        if not 1 <= self.resamples <= MOST_RESAMPLES:
            refuse(f"resamples: {self.resamples}, expected 1 to {MOST_RESAMPLES}")
        sampled = len(self.prompts) * self.num_samples * (self.parameters.max_tokens or 0)
        if self.prompts and self.parameters.max_tokens is None:
            refuse("max_tokens: is missing; samples of an evaluation need a limit")
        if sampled > MOST_TOKENS:
            refuse(
                f"prompts: {len(self.prompts)} x {self.num_samples} samples of up to {self.parameters.max_tokens} "
                f"tokens; at most {MOST_TOKENS} tokens in one evaluation"
            )


def checked_rows(
    given: Sequence[str | np.ndarray], name: str, tokenizer: Any, limits: ModelLimits, least: int
) -> list[list[int]]:
    """Token rows of texts; a text is encoded as the tokenizer does it by default.

    Raises: ServiceError (user) with the place of the first row that is too short or long, or outside the vocabulary.
    """
    rows = []
    for index, one in enumerate(given):
        if isinstance(one, str):
            row = [int(token) for token in tokenizer(one)["input_ids"]]
        elif isinstance(one, np.ndarray) and one.dtype.kind in "iu" and one.ndim == 1:
            row = one.tolist()
        else:
            refuse(f"{name}[{index}]: expected a text, or token ids in one dimension")
        if not least <= len(row) <= limits.context:
            refuse(f"{name}[{index}]: {len(row)} tokens, expected {least} to {limits.context} (the model's context)")
        wrong = next((token for token in row if not 0 <= token < limits.vocab_size), None)
        if wrong is not None:
            refuse(f"{name}[{index}]: token {wrong} is outside the vocabulary, 0..{limits.vocab_size - 1}")
        rows.append(row)
    if (total := sum(map(len, rows))) > MOST_TOKENS:
        raise ServiceError(f"{name}: {total} tokens; at most {MOST_TOKENS} in one evaluation", "user")
    return rows
