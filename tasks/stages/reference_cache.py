"""Reference log-probabilities kept on disk, so that the same pairs under the same weights are scored once.

    <folder>/<name>/   references.safetensors (train, heldout: float64 [pairs, 2]), manifest.json

The name is a digest of everything that decides the numbers, so a changed weight, pair or batch size is another entry.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import safetensors.torch
import torch

from rl_core.data.pairs import Pair
from rl_core.errors import CheckpointError, CorruptError
from rl_core.models.precision import Autocast
from rl_core.storage.faults import fault
from rl_core.storage.folder_removal import clear_leftovers, remove_folder
from rl_core.storage.folders import publish_folder, put_bytes
from rl_core.storage.manifest import digest_bytes, read_manifest, read_verified
from rl_core.trainers.pair_references import reference_logprobs
from rl_core.training.resume import runtime_fingerprint

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["cached_references", "pairs_digest", "weights_digest"]

logger = logging.getLogger(__name__)

FILE = "references.safetensors"
References = list[tuple[float, float]]


def cached_references(
    folder: Path,
    model: PreTrainedModel,
    parts: tuple[Sequence[Pair], Sequence[Pair]],
    *,
    pad_id: int,
    max_tokens: int,
    precision: Autocast = "none",
    code: str = "",
) -> tuple[References, References]:
    """Log-probabilities of (training, held-out) pairs under `model`: read from `folder`, or computed and kept there.

    An entry is verified before it is used; a damaged one is removed, with a warning, and made again. Where the disk
    refuses to keep one, the numbers are used all the same.
    Args:
        pad_id, max_tokens, precision: as in `reference_logprobs`.
        code: version of the code that computes them.
    """
    name = _entry_name(model, parts, [pad_id, max_tokens, precision], code)
    entry = folder / name
    if folder.is_dir():
        clear_leftovers(folder)  # of a process that died while it wrote
    found = _read(entry, tuple(len(pairs) for pairs in parts))
    if found is not None:
        logger.info("reference log-probabilities: read from %s", entry)
        return found
    train, heldout = (
        reference_logprobs(model, pairs, pad_id=pad_id, max_tokens=max_tokens, precision=precision) for pairs in parts
    )
    fault("references.scored")
    tensors = {"train": _tensor(train), "heldout": _tensor(heldout)}
    data = safetensors.torch.save(tensors)

    def write(temporary: Path) -> dict[str, str]:
        put_bytes(temporary / FILE, data)
        return {FILE: digest_bytes(data)}

    try:
        publish_folder(entry, write, {"kind": "references"})
    except CheckpointError as error:
        logger.warning("reference log-probabilities are not kept: %s", error)
    return train, heldout


def weights_digest(model: torch.nn.Module) -> str:
    """SHA-256 over the names, types, shapes and bytes of all weights and buffers."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\0".encode())
        # as bytes: numpy knows no bfloat16
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def pairs_digest(pairs: Sequence[Pair]) -> str:
    """SHA-256 over token ids and loss masks, in order."""
    digest = hashlib.sha256()
    for pair in pairs:
        for side in (pair.chosen, pair.rejected):
            row = [side.prompt_ids, side.completion_ids, [int(kept) for kept in side.loss_mask]]
            digest.update(json.dumps(row).encode())
    return digest.hexdigest()


def _entry_name(model: PreTrainedModel, parts: Sequence[Sequence[Pair]], batches: list[int | str], code: str) -> str:
    """32 hex digits. Batch size, threads, torch and device are in it, since they decide the last bits."""
    payload = {
        "weights": weights_digest(model),
        "pairs": [pairs_digest(pairs) for pairs in parts],
        "batches": batches,
        "runtime": runtime_fingerprint(model),
        "code": code,
    }
    return hashlib.sha256(json.dumps(payload, sort_keys=True).encode()).hexdigest()[:32]


def _read(entry: Path, counts: tuple[int, ...]) -> tuple[References, References] | None:
    """Content of an entry; None if there is none, or if it was damaged and has been removed."""
    if not entry.is_dir():
        return None
    try:
        data = read_verified(entry, FILE, read_manifest(entry))
        tensors = safetensors.torch.load(data)
        shapes = tuple(tuple(tensors[name].shape) for name in ("train", "heldout"))
        if shapes != tuple((count, 2) for count in counts):
            raise CorruptError(f"{entry / FILE}: holds {shapes} for {counts} pairs")
    except (CorruptError, KeyError, safetensors.SafetensorError) as error:
        logger.warning("reference log-probabilities are damaged and made again: %s", error)
        remove_folder(entry)
        return None
    return _rows(tensors["train"]), _rows(tensors["heldout"])


def _tensor(rows: References) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float64).reshape(-1, 2)


def _rows(tensor: torch.Tensor) -> References:
    return [(float(chosen), float(rejected)) for chosen, rejected in tensor.tolist()]
