"""Recorded episodes as demonstrations: token ids as they were sampled, each sequence with the runs that carry loss.

`posttrain serve --record` writes one row an episode (`rl_core/rollouts/agent_recorder.py`):

    {"reward": 1.0, "task": "17", "messages": [...], "tokenizer": digest, "sequences": [
        {"ids": [...], "runs": [lengths of observed, sampled, observed, ... tokens], ...}]}

Nothing is tokenised: the sequences are trained on as they are, with loss on the sampled tokens alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, Literal

from rl_core.data.files import BadRow, describe_value
from rl_core.data.messages import wrap_in_list
from rl_core.errors import DataError

if TYPE_CHECKING:
    from rl_core.data.training_sequences import TrainingSequence

RECORDED = "recorded episode"  # name of the format
# Columns of a row besides `messages` and `sequences`; `crc` is the checksum of its line.
RECORDED_COLUMNS = (
    "reward",
    "success",
    "info",
    "session",
    "task",
    "tenant",
    "model",
    "tokenizer",
    "opened",
    "scored",
    "crc",
)
_MAX_ID = 2**31


def validate_recorded_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns of a recorded episode that training needs.

    Raises: BadRow naming the field.
    """
    reward = row.get("reward")
    if isinstance(reward, bool) or not isinstance(reward, int | float) or not math.isfinite(reward):
        raise BadRow("reward", f"must be a finite number, found {describe_value(reward)}")
    tokenizer = row.get("tokenizer")
    if tokenizer is not None and not isinstance(tokenizer, str):
        raise BadRow("tokenizer", f"must be text, found {describe_value(tokenizer)}")
    sequences = row.get("sequences")
    if not isinstance(sequences, list) or not sequences:
        raise BadRow("sequences", f"must be a list of sequences, found {describe_value(sequences)}")
    messages = [_read_message(m, i) for i, m in enumerate(wrap_in_list(row["messages"]))]
    question = {} if row.get("task") is None else {"question": f"task {row['task']}"}
    return {
        "messages": messages,
        "sequences": [_read_sequence(s, i) for i, s in enumerate(sequences)],
        "tokenizer": tokenizer,
        "reward": float(reward),
        **question,
    }


def _read_message(message: Any, index: int) -> dict[str, str]:
    """Read role and text; they name the episode and are not trained on."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise BadRow(f"messages[{index}]", f"must be a message, found {describe_value(message)}")
    content = message.get("content")
    return {"role": message["role"], "content": content if isinstance(content, str) else ""}


def _read_sequence(sequence: Any, index: int) -> dict[str, list[int]]:
    place = f"sequences[{index}]"
    if not isinstance(sequence, Mapping):
        raise BadRow(place, f"must be an object, found {describe_value(sequence)}")
    lists: dict[str, list[int]] = {}
    for name in ("ids", "runs"):
        values = sequence.get(name)
        if not isinstance(values, list) or not values:
            raise BadRow(f"{place}.{name}", f"must be a list, found {describe_value(values)}")
        if not all(type(value) is int and 0 <= value < _MAX_ID for value in values):
            raise BadRow(f"{place}.{name}", "must hold integers from 0 to below 2^31")
        lists[name] = values
    if sum(lists["runs"]) != len(lists["ids"]):
        raise BadRow(
            f"{place}.runs", f"sum to {sum(lists['runs'])}, but there are {len(lists['ids'])} ids"
        )
    if not any(lists["runs"][1::2]):
        raise BadRow(f"{place}.runs", "hold no sampled token")
    return lists


def build_recorded_sequences(
    row: Mapping[str, Any],
    tokenizer: str | None,
    num_tokens: int,
    loss_on: Literal["all", "last"] = "all",
    max_tokens: int | None = None,
) -> list[TrainingSequence]:
    """Build the training sequences of a recorded episode.

    Args:
        tokenizer: digest of the model's tokenizer; None = unknown.
        num_tokens: size of its vocabulary.
        loss_on: answers of each sequence with loss, all or the last one.
        max_tokens: see `build_training_sequences`.
    Raises: DataError if another tokenizer recorded the episode, or no loss is left.
    """
    from rl_core.data.training_sequences import truncate_sequences  # with numpy, for training alone

    recorded = row["tokenizer"]
    if recorded is not None and tokenizer is not None and recorded != tokenizer:
        raise DataError(
            "was recorded with another tokenizer, so its token ids mean other texts here; start from the model that "
            "was served"
        )
    sequences: list[TrainingSequence] = []
    for sequence in row["sequences"]:
        ids, edges = sequence["ids"], [0, *accumulate(sequence["runs"])]
        if max(ids) >= num_tokens:
            raise DataError(
                f"holds the token id {max(ids)}, but the tokenizer has {num_tokens} tokens; start from the model that "
                "was served"
            )
        mask = [False] * len(ids)
        sampled = list(pairwise(edges))[1::2]
        for start, end in sampled if loss_on == "all" else sampled[-1:]:
            mask[start:end] = [True] * (end - start)
        sequences.append((ids, mask))
    return truncate_sequences(sequences, max_tokens)
