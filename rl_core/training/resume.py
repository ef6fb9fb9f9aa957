"""Parts of a resumable state: trainable weights, random generators, and the run's fingerprint."""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn

from rl_core.errors import ResumeRefused
from rl_core.models.trainable_weights import load_trainable_weights, trainable_weights
from rl_core.storage.rng_state import restore_rng, rng_state

__all__ = [
    "check_fingerprint",
    "load_trainable_weights",
    "restore_rng",
    "rng_state",
    "runtime_fingerprint",
    "trainable_weights",
]

logger = logging.getLogger(__name__)


def runtime_fingerprint(model: nn.Module) -> dict[str, Any]:
    """Properties of the runtime that change float sums: threads, torch version, device."""
    device = next(model.parameters()).device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return {"threads": torch.get_num_threads(), "torch": torch.__version__, "device": name}


def _flatten(tree: Any, path: str = "") -> dict[str, str]:
    """Dotted path -> canonical JSON of each leaf, so that tuples equal lists after a round trip."""
    if isinstance(tree, Mapping) and tree:
        leaves: dict[str, str] = {}
        for key, value in tree.items():
            leaves |= _flatten(value, f"{path}.{key}" if path else str(key))
        return leaves
    return {path: json.dumps(tree, sort_keys=True, default=str)}


def check_fingerprint(
    saved: Mapping[str, Any],
    present: Mapping[str, Any],
    *,
    allow_changed: bool = False,
    besides: Collection[str] = (),
) -> None:
    """Compare key by key. Raises ResumeRefused naming every differing key with both values, unless allowed.

    besides: dotted keys that may differ.
    """
    old, new = _flatten(saved), _flatten(present)
    changed = [
        f"{key}: {old.get(key, 'absent')} in the checkpoint, {new.get(key, 'absent')} now"
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key) and key not in besides
    ]
    if not changed:
        return
    listing = "\n  ".join(changed)
    if allow_changed:
        logger.warning("resuming although these changed since the checkpoint:\n  %s", listing)
        return
    raise ResumeRefused(
        f"the checkpoint belongs to a run that differs from this one:\n  {listing}\n"
        "start afresh in another folder, put the old values back, or allow the change explicitly"
    )
