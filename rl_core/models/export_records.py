"""Export records: log-probs of a live model on a few tokens, or scores of a live reward model on a few sequences.

They are stored with the model, to verify its export against them.

B rows, S tokens of a sequence.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rl_core.capabilities import reads_images
from rl_core.errors import DataError
from rl_core.models.causal_lm import use_eval_mode
from rl_core.models.heads import score_batch
from rl_core.models.logprobs import completion_logprobs
from rl_core.models.lora import disable_adapter, is_lora, unwrap_model
from rl_core.models.rotary import read_model_max_length
from rl_core.storage.atomic_files import write_json_atomic
from rl_core.storage.faults import inject_fault
from rl_core.types import ImagePixels, Rollout, TrainBatch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from rl_core.settings import SamplingSettings


TRAINED_LOGPROBS_FILE = (
    "trained_logprobs.json"  # in a training stage's folder: {"trained": [...], "base": [...]}
)
EVALUATED_LOGPROBS_FILE = "evaluated_logprobs.json"  # in an evaluation's folder: {model: [...]}
TRAINED_SCORES_FILE = "trained_scores.json"  # in the folder of a stage that trains a reward model
NUM_FIXED_SEQUENCES, NUM_FIXED_TOKENS = 8, 16
MAX_EVALUATED_SEQUENCES, MAX_EVALUATED_TOKENS = 16, 512

TokenRecords = dict[str, list["TokenRecord"]]


@dataclass(frozen=True, slots=True)
class TokenRecord:
    """One token sequence with log-probs of some of its tokens."""

    ids: list[int]
    scored: list[int]  # indices into `ids`, at least 1
    logprobs: list[float]  # of the scored tokens, nats, under softmax(logits / temperature)
    temperature: float = 1.0
    images: list[str] = field(default_factory=list)  # data URLs, in the order of their tokens


def read_vocabulary_size(model: PreTrainedModel) -> int:
    """Return the number of token ids that the model can read."""
    embedding: Any = unwrap_model(model).get_input_embeddings()
    return int(embedding.weight.shape[0])


def build_fixed_ids(model: PreTrainedModel) -> list[list[int]]:
    """Build fixed token sequences, the same for every model with this vocabulary."""
    vocab_size = read_vocabulary_size(model)
    length = min(NUM_FIXED_TOKENS, read_model_max_length(model))
    rows = [
        [(7919 * (number * length + position) + 13) % vocab_size for position in range(length)]
        for number in range(NUM_FIXED_SEQUENCES)
    ]
    # Without an image its token has no meaning.
    image_id = model.config.image_token_id if reads_images(model) else None
    return [[0 if token == image_id else token for token in row] for row in rows]


def record_fixed_logprobs(model: PreTrainedModel) -> list[TokenRecord]:
    """Record the log-probs of the fixed sequences' tokens."""
    return score_records(
        model, [TokenRecord(row, list(range(1, len(row))), []) for row in build_fixed_ids(model)]
    )


def record_trained_logprobs(model: PreTrainedModel) -> TokenRecords:
    """Record fixed log-probs of a trained model, and with adapters also those of its base, for diagnosis."""
    records = {"trained": record_fixed_logprobs(model)}
    if is_lora(model):
        with disable_adapter(model):
            records["base"] = record_fixed_logprobs(model)
    return records


def record_evaluated_logprobs(
    model: PreTrainedModel, rollouts: Iterable[Rollout], sampling: SamplingSettings
) -> list[TokenRecord]:
    """Record the first sampled sequences of an evaluation with the sampler's log-probs.

    If sampling is restricted or penalised, log-probs come from the model's own forward pass, because the sampler then
    drew from another distribution than the model's.
    """
    restriction = (sampling.top_k, sampling.top_p, sampling.min_p, sampling.repetition_penalty)
    is_unrestricted = restriction == (0, 1.0, 0.0, 1.0)
    records, pixels = [], []
    for rollout in rollouts:
        ids = [*rollout.prompt_ids, *rollout.completion_ids][:MAX_EVALUATED_TOKENS]
        start = len(rollout.prompt_ids)
        sampled = [
            i
            for i, is_sampled in enumerate(rollout.loss_mask[: len(ids) - start])
            if is_sampled and start + i > 0
        ]
        if rollout.context_starts or len(ids) <= start or not sampled:
            continue
        logprobs = [float(rollout.sampler_logprobs[i]) for i in sampled]
        scored = [start + i for i in sampled]
        images = [image.source for image in rollout.images]
        if images and len(ids) == MAX_EVALUATED_TOKENS:
            continue  # an image may be cut
        records.append(
            TokenRecord(ids[: scored[-1] + 1], scored, logprobs, rollout.temperature or 1.0, images)
        )
        pixels.append(tuple(rollout.images))
        if len(records) == MAX_EVALUATED_SEQUENCES:
            break
    return records if is_unrestricted else score_records(model, records, pixels)


def score_records(
    model: PreTrainedModel,
    records: Sequence[TokenRecord],
    images: Sequence[tuple[ImagePixels, ...]] = (),
) -> list[TokenRecord]:
    """Replace the records' log-probs by those of this model, one sequence per pass.

    Args:
        images: of each record; () = none has any.
    """
    device = next(model.parameters()).device
    scored_records = []
    with torch.no_grad(), use_eval_mode(model):
        for index, record in enumerate(records):
            ids_BS = torch.tensor([record.ids])
            mask_BS = torch.zeros_like(ids_BS, dtype=torch.bool)
            mask_BS[0, record.scored] = True
            temperatures_BS = torch.full(ids_BS.shape, record.temperature)
            all_BS = torch.ones_like(mask_BS)
            batch = TrainBatch(ids_BS, all_BS, mask_BS, temperatures_BS=temperatures_BS).to(device)
            batch.images = [images[index]] if images else []
            logprobs_BS, _ = completion_logprobs(model, batch)
            logprobs = [float(value) for value in logprobs_BS[0].float().cpu()[record.scored]]
            scored_records.append(dataclasses.replace(record, logprobs=logprobs))
    return scored_records


def write_records(path: Path, records: Mapping[str, Sequence[TokenRecord]]) -> None:
    """Write records by name as JSON."""
    rows = {
        name: [dataclasses.asdict(record) for record in group] for name, group in records.items()
    }
    write_json_atomic(path, rows)
    inject_fault("model.recorded")


def read_records(path: Path) -> TokenRecords:
    """Read the records of `write_records`; return {} if the file does not exist.

    Raises: DataError for an invalid file.
    """
    if not path.is_file():
        return {}
    try:
        rows: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return {name: [TokenRecord(**row) for row in group] for name, group in rows.items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise DataError(
            f"{path}: invalid record of log-probs ({error}); run its stage again"
        ) from error


@dataclass(frozen=True, slots=True)
class ScoreRecord:
    """One token sequence with its score."""

    ids: list[int]
    score: float  # in the reward model's unit


def record_fixed_scores(model: PreTrainedModel) -> list[ScoreRecord]:
    """Record scores of fixed sequences of several lengths, one sequence per pass.

    No sequence ends with the padding token, because transformers' classifiers read the last other token.
    """
    pad_id = model.config.pad_token_id
    records = []
    with use_eval_mode(model):
        for number, row in enumerate(build_fixed_ids(model)):
            ids = row[: max(1, len(row) - number)]
            ids[-1] = ids[-1] if ids[-1] != pad_id else (pad_id + 1) % read_vocabulary_size(model)
            records.append(ScoreRecord(ids, score_batch(model, [ids])[0]))
    return records


def write_scores(path: Path, records: Sequence[ScoreRecord]) -> None:
    """Write records as JSON."""
    write_json_atomic(path, [dataclasses.asdict(record) for record in records])
    inject_fault("model.scored")


def read_scores(path: Path) -> list[ScoreRecord]:
    """Read the records of `write_scores`; return [] if the file does not exist.

    Raises: DataError for an invalid file.
    """
    if not path.is_file():
        return []
    try:
        return [ScoreRecord(**row) for row in json.loads(path.read_text(encoding="utf-8"))]
    except (ValueError, TypeError) as error:
        raise DataError(
            f"{path}: invalid record of scores ({error}); run its stage again"
        ) from error
