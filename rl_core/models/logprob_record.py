"""Log-probs of a live model on a few tokens, kept beside the model for the proof of its export.

Suffixes: B rows, S sequence.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rl_core.errors import DataError
from rl_core.models.causal_lm import evaluating
from rl_core.models.logprobs import completion_logprobs
from rl_core.models.lora import is_lora, unwrap, without_adapter
from rl_core.models.rotary import longest_sequence
from rl_core.storage.faults import fault
from rl_core.storage.single_files import write_json_atomic
from rl_core.types import Rollout, TrainBatch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from rl_core.settings import SamplingSettings

__all__ = [
    "EVALUATED",
    "TRAINED",
    "TokenRecord",
    "evaluated_records",
    "fixed_ids",
    "fixed_records",
    "read_records",
    "trained_records",
    "vocabulary_size",
    "write_records",
]

TRAINED = "trained_logprobs.json"  # in the folder of a training stage: {"trained": [...], "base": [...]}
EVALUATED = "evaluated_logprobs.json"  # in the folder of an evaluation: {model: [...]}
SEQUENCES, TOKENS = 8, 16  # of the fixed ones
MAX_SEQUENCES, MAX_TOKENS = 16, 512  # of the evaluated ones

Records = dict[str, list["TokenRecord"]]


@dataclass(frozen=True, slots=True)
class TokenRecord:
    """One token sequence, and log-probs of some of its tokens."""

    ids: list[int]
    scored: list[int]  # indices into `ids`, at least 1
    logprobs: list[float]  # nats, of these, under softmax(logits / temperature)
    temperature: float = 1.0


def vocabulary_size(model: PreTrainedModel) -> int:
    """Token ids that the model can read."""
    embedding: Any = unwrap(model).get_input_embeddings()
    return int(embedding.weight.shape[0])


def fixed_ids(model: PreTrainedModel) -> list[list[int]]:
    """Fixed token sequences: the same ids for every model with this vocabulary."""
    vocab_size = vocabulary_size(model)
    length = min(TOKENS, longest_sequence(model))
    return [
        [(7919 * (number * length + place) + 13) % vocab_size for place in range(length)] for number in range(SEQUENCES)
    ]


def fixed_records(model: PreTrainedModel) -> list[TokenRecord]:
    """Log-probs of the fixed sequences' tokens."""
    return score(model, [TokenRecord(row, list(range(1, len(row))), []) for row in fixed_ids(model)])


def trained_records(model: PreTrainedModel) -> Records:
    """Fixed log-probs of a model that was trained; with adapters also those of its base, for a diagnosis."""
    found = {"trained": fixed_records(model)}
    if is_lora(model):
        with without_adapter(model):
            found["base"] = fixed_records(model)
    return found


def evaluated_records(
    model: PreTrainedModel, rollouts: Iterable[Rollout], sampling: SamplingSettings
) -> list[TokenRecord]:
    """The first sampled sequences of an evaluation with the sampler's log-probs.

    Where the sampling is restricted or penalised, log-probs are those of the model's own forward pass: what the sampler
    drew from is not the model's distribution.
    """
    is_plain = (sampling.top_k, sampling.top_p, sampling.min_p, sampling.repetition_penalty) == (0, 1.0, 0.0, 1.0)
    records = []
    for rollout in rollouts:
        ids = [*rollout.prompt_ids, *rollout.completion_ids][:MAX_TOKENS]
        start = len(rollout.prompt_ids)
        places = [i for i, sampled in enumerate(rollout.loss_mask[: len(ids) - start]) if sampled and start + i > 0]
        if rollout.context_starts or len(ids) <= start or not places:
            continue
        logprobs = [float(rollout.sampler_logprobs[place]) for place in places]
        scored = [start + place for place in places]
        records.append(TokenRecord(ids[: scored[-1] + 1], scored, logprobs, rollout.temperature or 1.0))
        if len(records) == MAX_SEQUENCES:
            break
    return records if is_plain else score(model, records)


def score(model: PreTrainedModel, records: Sequence[TokenRecord]) -> list[TokenRecord]:
    """The same records with the log-probs of this model, one sequence a pass."""
    device, found = next(model.parameters()).device, []
    with torch.no_grad(), evaluating(model):
        for record in records:
            ids_BS = torch.tensor([record.ids])
            mask_BS = torch.zeros_like(ids_BS, dtype=torch.bool)
            mask_BS[0, record.scored] = True
            heat_BS = torch.full(ids_BS.shape, record.temperature)
            whole_BS = torch.ones_like(mask_BS)
            batch = TrainBatch(ids_BS, whole_BS, mask_BS, temperatures_BS=heat_BS).to(device)
            logprobs_BS, _ = completion_logprobs(model, batch)
            logprobs = [float(value) for value in logprobs_BS[0].float().cpu()[record.scored]]
            found.append(dataclasses.replace(record, logprobs=logprobs))
    return found


def write_records(path: Path, records: Mapping[str, Sequence[TokenRecord]]) -> None:
    """Write records by name, as JSON."""
    write_json_atomic(path, {name: [dataclasses.asdict(record) for record in found] for name, found in records.items()})
    fault("model.recorded")


def read_records(path: Path) -> Records:
    """Inverse of `write_records`; {} where there is no such file. Raises: DataError for a file of another kind."""
    if not path.is_file():
        return {}
    try:
        rows: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return {name: [TokenRecord(**row) for row in found] for name, found in rows.items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise DataError(f"{path}: is no record of log-probs ({error}); run its stage again") from error
