"""Scores of a live reward model on a few sequences, kept beside the model for the proof of its export."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rl_core.errors import DataError
from rl_core.models.causal_lm import evaluating
from rl_core.models.heads import score_batch
from rl_core.models.logprob_record import fixed_ids, vocabulary_size
from rl_core.storage.faults import fault
from rl_core.storage.single_files import write_json_atomic

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["SCORES", "ScoreRecord", "fixed_scores", "read_scores", "write_scores"]

SCORES = "trained_scores.json"  # in the folder of a stage that trains a reward model


@dataclass(frozen=True, slots=True)
class ScoreRecord:
    """One token sequence and its score."""

    ids: list[int]
    score: float  # in the reward model's own unit


def fixed_scores(model: PreTrainedModel) -> list[ScoreRecord]:
    """Scores of fixed sequences of several lengths, one sequence a pass.

    None ends in the padding token: transformers' classifiers read the last token that is another.
    """
    pad_id, found = model.config.pad_token_id, []
    with evaluating(model):
        for number, row in enumerate(fixed_ids(model)):
            ids = row[: max(1, len(row) - number)]
            ids[-1] = ids[-1] if ids[-1] != pad_id else (pad_id + 1) % vocabulary_size(model)
            found.append(ScoreRecord(ids, score_batch(model, [ids])[0]))
    return found


def write_scores(path: Path, records: Sequence[ScoreRecord]) -> None:
    """Write records as JSON."""
    write_json_atomic(path, [dataclasses.asdict(record) for record in records])
    fault("model.scored")


def read_scores(path: Path) -> list[ScoreRecord]:
    """Inverse of `write_scores`; [] where there is no such file. Raises: DataError for a file of another kind."""
    if not path.is_file():
        return []
    try:
        return [ScoreRecord(**row) for row in json.loads(path.read_text(encoding="utf-8"))]
    except (ValueError, TypeError) as error:
        raise DataError(f"{path}: is no record of scores ({error}); run its stage again") from error
