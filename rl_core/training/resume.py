"""Fingerprint of a run: settings, data and runtime that have to be the same when it resumes."""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn

from rl_core.errors import ResumeRefused

__all__ = ["check_fingerprint", "runtime_fingerprint"]

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
    allow_drift: bool | Collection[str] = False,
    besides: Collection[str] = (),
) -> list[str]:
    """Compare key by key; returns what differs, a line each. Raises ResumeRefused naming all of it, unless allowed.

    Args:
        allow_drift: True = everything may differ; or the dotted keys that may. What differs is logged as a warning.
        besides: dotted keys that may differ without a word.
    """
    old, new = _flatten(saved), _flatten(present)
    changed = [key for key in sorted(old.keys() | new.keys()) if old.get(key) != new.get(key) and key not in besides]
    lines = [f"{key}: {old.get(key, 'absent')} in the checkpoint, {new.get(key, 'absent')} now" for key in changed]
    if not changed:
        return lines
    listing = "\n  ".join(lines)
    if allow_drift is True or (allow_drift and all(key in allow_drift for key in changed)):
        logger.warning("resuming although these changed since the checkpoint:\n  %s", listing)
        return lines
    raise ResumeRefused(
        f"the checkpoint belongs to a run that differs from this one:\n  {listing}\n"
        "put the old values back; or resume all the same with --allow-drift (in Python run(allow_drift=True)); or "
        "begin anew with --fresh (run(fresh=True))"
    )
