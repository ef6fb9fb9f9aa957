"""Ids of a model's tokens: those that end a turn in addition to the template's, and those that stand for no text."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_core.data.images import list_image_ids
from rl_core.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


GENERATION_CONFIG = "generation_config.json"
_ATTRIBUTE = "posttrain_end_ids"  # of a tokenizer; copied and pickled with it, never written by it


def list_end_ids(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Return the end tokens that the model's generation settings name; () = none, or unknown."""
    return tuple(getattr(tokenizer, _ATTRIBUTE, ()))


def find_end_texts(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    """Return the texts of those end tokens that the tokenizer has as added tokens, with their ids."""
    added = tokenizer.added_tokens_decoder
    return {added[token].content: token for token in list_end_ids(tokenizer) if token in added}


def set_end_ids(tokenizer: PreTrainedTokenizerBase, configured: Mapping[str, Any]) -> None:
    """Give a tokenizer the end tokens (`eos_token_id`, one or a list) of generation settings.

    A single token that transformers copied from the model's config (`_from_model_config`) may be the default of the
    model's family, which says nothing about this tokenizer.
    Raises: ModelError if they are no token ids.
    """
    ids = configured.get("eos_token_id")
    if ids is None or (configured.get("_from_model_config") and not isinstance(ids, list | tuple)):
        ids = []
    ids = list(ids) if isinstance(ids, list | tuple) else [ids]
    if not all(
        isinstance(token, int) and not isinstance(token, bool) and token >= 0 for token in ids
    ):
        raise ModelError(
            f"{GENERATION_CONFIG}: eos_token_id is {str(ids)[:100]}; it must be a token id or a list of them"
        )
    setattr(tokenizer, _ATTRIBUTE, tuple(dict.fromkeys(ids)))


def read_generation_settings(generation_config: Path | None, config: Path) -> dict[str, Any]:
    """Return a model's generation settings from its files; those of config.json if it has no others.

    Raises: ModelError if a file cannot be read.
    """
    path = config if generation_config is None else generation_config
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"'{path}' cannot be read: {type(error).__name__}: {error}") from error
    if not isinstance(settings, dict):
        raise ModelError(f"'{path}' is not a JSON object")
    return settings if generation_config is not None else {**settings, "_from_model_config": True}


def find_textless_ids(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> tuple[int, ...]:
    """Return the ids below `vocab_size` that the tokenizer does not have, and those of images, in ascending order.

    Embeddings are often padded to a multiple of 64 rows or more; a sampled id without text could not be decoded, shown
    or tokenised again.
    """
    known_ids = set(tokenizer.get_vocab().values()) - list_image_ids(tokenizer)
    return tuple(token for token in range(vocab_size) if token not in known_ids)
