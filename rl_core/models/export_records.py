"""Log-probs of a live model on a few tokens, kept beside the model for the proof of its export.

Suffixes: B rows, S sequence.

Scores of a live reward model on a few sequences, kept beside the model for the proof of its export.
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
from rl_core.models.causal_lm import use_eval_mode
from rl_core.models.heads import score_batch
from rl_core.models.logprobs import completion_logprobs
from rl_core.models.lora import disable_adapter, is_lora, unwrap_model
from rl_core.models.rotary import read_model_max_length
from rl_core.storage.atomic_files import write_json_atomic
from rl_core.storage.faults import inject_fault
from rl_core.types import Rollout, TrainBatch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from rl_core.settings import SamplingSettings


# in the folder of a training stage: {"trained": [...], "base": [...]}
TRAINED_LOGPROBS_FILE = "trained_logprobs.json"
# in the folder of an evaluation: {model: [...]}
EVALUATED_LOGPROBS_FILE = "evaluated_logprobs.json"
NUM_FIXED_SEQUENCES, NUM_FIXED_TOKENS = 8, 16  # of the fixed ones
MAX_EVALUATED_SEQUENCES, MAX_EVALUATED_TOKENS = 16, 512  # of the evaluated ones

TokenRecords = dict[str, list["TokenRecord"]]


@dataclass(frozen=True, slots=True)
class TokenRecord:
    """One token sequence, and log-probs of some of its tokens."""

    ids: list[int]
    scored: list[int]  # indices into `ids`, at least 1
    logprobs: list[float]  # nats, of these, under softmax(logits / temperature)
    temperature: float = 1.0


def read_vocabulary_size(model: PreTrainedModel) -> int:
    """Token ids that the model can read."""
    embedding: Any = unwrap_model(model).get_input_embeddings()
    return int(embedding.weight.shape[0])


def build_fixed_ids(model: PreTrainedModel) -> list[list[int]]:
    """Fixed token sequences: the same ids for every model with this vocabulary."""
    vocab_size = read_vocabulary_size(model)
    length = min(NUM_FIXED_TOKENS, read_model_max_length(model))
    return [
        [(7919 * (number * length + place) + 13) % vocab_size for place in range(length)]
        for number in range(NUM_FIXED_SEQUENCES)
    ]


def record_fixed_logprobs(model: PreTrainedModel) -> list[TokenRecord]:
    """Log-probs of the fixed sequences' tokens."""
    return score_records(
        model, [TokenRecord(row, list(range(1, len(row))), []) for row in build_fixed_ids(model)]
    )


def record_trained_logprobs(model: PreTrainedModel) -> TokenRecords:
    """Fixed log-probs of a model that was trained; with adapters also those of its base, for a diagnosis."""
    found = {"trained": record_fixed_logprobs(model)}
    if is_lora(model):
        with disable_adapter(model):
            found["base"] = record_fixed_logprobs(model)
    return found


def record_evaluated_logprobs(
    model: PreTrainedModel, rollouts: Iterable[Rollout], sampling: SamplingSettings
) -> list[TokenRecord]:
    """The first sampled sequences of an evaluation with the sampler's log-probs.

    Where the sampling is restricted or penalised, log-probs are those of the model's own forward pass: what the sampler
    drew from is not the model's distribution.
    """
    is_plain = (sampling.top_k, sampling.top_p, sampling.min_p, sampling.repetition_penalty) == (
        0,
        1.0,
        0.0,
        1.0,
    )
    records = []
    for rollout in rollouts:
        ids = [*rollout.prompt_ids, *rollout.completion_ids][:MAX_EVALUATED_TOKENS]
        start = len(rollout.prompt_ids)
        places = [
            i
            for i, sampled in enumerate(rollout.loss_mask[: len(ids) - start])
            if sampled and start + i > 0
        ]
        if rollout.context_starts or len(ids) <= start or not places:
            continue
        logprobs = [float(rollout.sampler_logprobs[place]) for place in places]
        scored = [start + place for place in places]
        records.append(
            TokenRecord(ids[: scored[-1] + 1], scored, logprobs, rollout.temperature or 1.0)
        )
        if len(records) == MAX_EVALUATED_SEQUENCES:
            break
    return records if is_plain else score_records(model, records)


def score_records(model: PreTrainedModel, records: Sequence[TokenRecord]) -> list[TokenRecord]:
    """The same records with the log-probs of this model, one sequence a pass."""
    device, found = next(model.parameters()).device, []
    with torch.no_grad(), use_eval_mode(model):
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
    write_json_atomic(
        path,
        {name: [dataclasses.asdict(record) for record in found] for name, found in records.items()},
    )
    inject_fault("model.recorded")


def read_records(path: Path) -> TokenRecords:
    """Inverse of `write_records`; {} where there is no such file. Raises: DataError for a file of another kind."""
    if not path.is_file():
        return {}
    try:
        rows: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return {name: [TokenRecord(**row) for row in found] for name, found in rows.items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise DataError(
            f"{path}: is no record of log-probs ({error}); run its stage again"
        ) from error


TRAINED_SCORES_FILE = "trained_scores.json"  # in the folder of a stage that trains a reward model


@dataclass(frozen=True, slots=True)
class ScoreRecord:
    """One token sequence and its score."""

    ids: list[int]
    score: float  # in the reward model's own unit


def record_fixed_scores(model: PreTrainedModel) -> list[ScoreRecord]:
    """Scores of fixed sequences of several lengths, one sequence a pass.

    None ends in the padding token: transformers' classifiers read the last token that is another.
    """
    pad_id, found = model.config.pad_token_id, []
    with use_eval_mode(model):
        for number, row in enumerate(build_fixed_ids(model)):
            ids = row[: max(1, len(row) - number)]
            ids[-1] = ids[-1] if ids[-1] != pad_id else (pad_id + 1) % read_vocabulary_size(model)
            found.append(ScoreRecord(ids, score_batch(model, [ids])[0]))
    return found


def write_scores(path: Path, records: Sequence[ScoreRecord]) -> None:
    """Write records as JSON."""
    write_json_atomic(path, [dataclasses.asdict(record) for record in records])
    inject_fault("model.scored")


def read_scores(path: Path) -> list[ScoreRecord]:
    """Inverse of `write_scores`; [] where there is no such file. Raises: DataError for a file of another kind."""
    if not path.is_file():
        return []
    try:
        return [ScoreRecord(**row) for row in json.loads(path.read_text(encoding="utf-8"))]
    except (ValueError, TypeError) as error:
        raise DataError(f"{path}: is no record of scores ({error}); run its stage again") from error
