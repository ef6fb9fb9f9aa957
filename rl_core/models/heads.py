"""Reward models: a scalar head on the last real token of any causal language model.

B rows, S tokens, H hidden.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rl_core.errors import CheckpointError, DataError
from rl_core.memory import MemoryFit
from rl_core.models.causal_lm import device_of, evaluating, load_pretrained, load_tokenizer
from rl_core.models.hidden_states import hidden_states
from rl_core.settings import ModelSettings
from rl_core.types import TrainBatch

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["load_reward_model", "reward_model_from", "score", "score_batch", "score_batches", "sequence_scores"]


def reward_model_from(
    policy_path: str | Path, settings: ModelSettings, *, seed: int = 0
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A reward model whose trunk is the causal LM in `policy_path` and whose head is new, drawn from `seed`.

    The head starts at N(0, 1 / (H + 1)), the scale of Stiennon et al. 2020, arXiv:2009.01325.
    Raises: CheckpointError when the model cannot be read or its family has no sequence head.
    """
    model, tokenizer = _load(policy_path, settings, may_miss=("score.weight",))
    generator = torch.Generator().manual_seed(seed)
    head: torch.Tensor = model.get_submodule("score").weight  # type: ignore[assignment]
    start_1H = torch.randn(head.shape, generator=generator) * (head.shape[1] + 1) ** -0.5
    with torch.no_grad():
        head.copy_(start_1H)
    return model, tokenizer


def load_reward_model(
    path: str | Path, settings: ModelSettings, *, options: Mapping[str, Any] | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The reward model and tokenizer in a folder, or under a hub name. `options`: as in `causal_lm.load`.

    Raises: CheckpointError when it cannot be read, has no trained head, or its family has no sequence head.
    """
    return _load(path, settings, may_miss=(), options=options)


def _load(
    path: str | Path,
    settings: ModelSettings,
    *,
    may_miss: tuple[str, ...],
    options: Mapping[str, Any] | None = None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    from transformers import AutoModelForSequenceClassification

    tokenizer = load_tokenizer(path, settings)
    # transformers draws the head that a policy folder lacks: under a fork, so that the caller's random state stays
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: Any = load_pretrained(
            AutoModelForSequenceClassification, path, settings, may_miss=may_miss, num_labels=1, **(options or {})
        )
    if not isinstance(getattr(model, "score", None), torch.nn.Linear):
        raise CheckpointError(f"'{path}' ({model.config.model_type}) has no linear sequence head named 'score'")
    if model.config.pad_token_id is None:
        model.config.pad_token_id = tokenizer.pad_token_id
    return (model if options else model.to(device_of(settings))).train(), tokenizer


def sequence_scores(model: PreTrainedModel, input_ids_BS: torch.Tensor, lengths_B: torch.Tensor) -> torch.Tensor:
    """Scalar scores of right-padded rows, read at each row's last real token, with gradient.

    Args:
        input_ids_BS: int64 [B, S], right-padded. Causal attention keeps padding out of every real token, so no mask is
            needed, and a padding token that equals the end-of-sequence token does no harm.
        lengths_B: int64 [B], real tokens of each row, at least 1.
    Returns: float32 [B].
    Raises: DataError when shapes differ or a row is empty.
    """
    if input_ids_BS.ndim != 2 or lengths_B.shape != input_ids_BS.shape[:1]:
        raise DataError(f"input_ids {tuple(input_ids_BS.shape)} and lengths {tuple(lengths_B.shape)} do not match")
    if lengths_B.numel() and not (int(lengths_B.min()) >= 1 and int(lengths_B.max()) <= input_ids_BS.shape[1]):
        raise DataError(f"lengths must lie in 1..{input_ids_BS.shape[1]}, found {lengths_B.tolist()}")
    places_S = torch.arange(input_ids_BS.shape[1], device=input_ids_BS.device)
    lengths_B1 = lengths_B.to(input_ids_BS.device)[:, None]
    batch = TrainBatch(input_ids_BS, places_S < lengths_B1, torch.zeros_like(input_ids_BS, dtype=torch.bool))
    last_BS = places_S == lengths_B1 - 1
    last_BH = hidden_states(model, batch, last_BS)[last_BS]
    return model.get_submodule("score")(last_BH).squeeze(-1).float()


@torch.no_grad()
def score(
    model: PreTrainedModel, rows: Sequence[Sequence[int]], *, pad_id: int | None = None, max_tokens: int = 16384
) -> list[float]:
    """Scores of token rows, in the order given; length-sorted micro-batches of at most `max_tokens` padded tokens.

    Args:
        pad_id: token id on the right of short rows; None = the model configuration's.
    Raises: DataError for an empty row, or where there is no padding token; OutOfMemory for a row that does not fit.
    """
    for index, row in enumerate(rows):
        if not row:
            raise DataError(f"row {index} has no tokens to score")
    scores = [0.0] * len(rows)
    lengths = [len(row) for row in rows]

    def fill(batch: list[int]) -> None:
        values = score_batch(model, [rows[index] for index in batch], pad_id=pad_id)
        for index, value in zip(batch, values, strict=True):
            scores[index] = value

    with evaluating(model):
        MemoryFit("scoring by the reward model").compute(score_batches(lengths, max_tokens), fill, lengths=lengths)
    return scores


def score_batches(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Indices of rows that are scored together: shortest first, at most `max_tokens` padded tokens, or a row alone."""
    order = sorted(range(len(lengths)), key=lambda index: lengths[index])
    batches: list[list[int]] = []
    for index in order:
        if batches and (len(batches[-1]) + 1) * lengths[index] <= max_tokens:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches


@torch.no_grad()
def score_batch(model: PreTrainedModel, rows: Sequence[Sequence[int]], *, pad_id: int | None = None) -> list[float]:
    """Scores of token rows in one pass, in the model's present mode."""
    pad = pad_id if pad_id is not None else model.config.pad_token_id
    if pad is None or pad < 0:
        raise DataError(
            f"pad_id: the model's configuration names no padding token (pad_token_id: {pad}); set it there, "
            "or pass pad_id"
        )
    device = next(model.parameters()).device
    width = max(len(row) for row in rows)
    ids_BS = torch.tensor([list(row) + [pad] * (width - len(row)) for row in rows], device=device)
    lengths_B = torch.tensor([len(row) for row in rows], device=device)
    scores: list[float] = sequence_scores(model, ids_BS, lengths_B).tolist()
    return scores
