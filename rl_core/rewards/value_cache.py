"""Cache of a reward function that its user declared pure: a value by the digest of its code and its inputs.

Pure means that a sample's value follows from its own texts, tools, outcome and data row; not from other samples, nor
from what a policy thought of it (`VARYING`), nor from anything outside. Then values with and without the cache are the
same bits. One value found in each call is computed again, and another one is an error.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from rl_core.errors import SettingsError
from rl_core.rewards.signature import Signature
from rl_core.storage.manifest import digest_bytes
from rl_core.types import Rollout
from rl_core.user_code import user_code_digests

__all__ = ["VARYING", "ValueCache"]

# Of a trajectory, what a pure function does not look at: another policy may play the same episode, beside others.
VARYING = ("policy_version", "sample", "mean_logprob", "reward", "rewards", "temperature")
_NOT_PURE = ("trainer_state", "log_metric", "log_extra")  # arguments of TRL's functions
_BYTES = 16  # of a key
MISSING = object()


class ValueCache:
    """Values of one function; at most `entries`, the oldest go first. In the checkpoint, so it survives a resume."""

    def __init__(self, signature: Signature, entries: int) -> None:
        """Raises: SettingsError for a function that asks for what changes from call to call."""
        self._signature, self.entries = signature, entries
        for name in _NOT_PURE:
            if name in signature.passed:
                raise SettingsError(
                    f"reward_options.cache: '{signature.name}' asks for `{name}`, so it is not pure; leave it out"
                )
        self._code = _code_digest(signature.name, signature.function)
        self._values: dict[bytes, float | None] = {}

    def keys(self, rollouts: Sequence[Rollout]) -> list[bytes]:
        """Key of each rollout; the columns of all rows, which decide how a function is called, are in each."""
        call = json.dumps([self._code, *self._signature.way_of_calling(rollouts)]).encode()
        return [hashlib.blake2b(call + self._inputs(rollout), digest_size=_BYTES).digest() for rollout in rollouts]

    def _inputs(self, rollout: Rollout) -> bytes:
        plain = rollout.trajectory.to_json()
        for name in VARYING:
            plain.pop(name, None)
        if self._signature.takes_ids:
            plain["completion_ids"] = list(rollout.completion_ids)
        return json.dumps(plain, sort_keys=True, default=repr).encode()

    def get(self, key: bytes) -> Any:
        """The value: a number, None where the function gave None; MISSING where there is none."""
        return self._values.get(key, MISSING)

    def put(self, key: bytes, value: float | None) -> None:
        """Keep a value."""
        self._values[key] = value
        while len(self._values) > self.entries:
            del self._values[next(iter(self._values))]

    def __len__(self) -> int:
        return len(self._values)

    def state_dict(self) -> dict[str, Any]:
        """Keys (uint8 [N, 16]) and values (float64 [N], NaN = None), the oldest first."""
        values = [float("nan") if value is None else value for value in self._values.values()]
        keys = torch.frombuffer(bytearray(b"".join(self._values)), dtype=torch.uint8) if values else torch.empty(0)
        return {"keys": keys.reshape(-1, _BYTES).to(torch.uint8), "values": torch.tensor(values, dtype=torch.float64)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state_dict`; values of another code stay unused, as their keys are others."""
        flat = bytes(state["keys"].reshape(-1).tolist())
        keys = [flat[place : place + _BYTES] for place in range(0, len(flat), _BYTES)]
        values = [None if value != value else value for value in state["values"].tolist()]
        self._values = dict(zip(keys, values, strict=True))


def _code_digest(name: str, function: Callable[..., Any]) -> str:
    """Digest of the user's modules behind an import path; of a function that was handed in its source."""
    if ":" in name:
        found = user_code_digests([name])
        return digest_bytes(json.dumps([name, sorted(found.items())]).encode())
    try:
        return digest_bytes(inspect.getsource(function).encode())
    except (OSError, TypeError):  # written in C, a callable object, or typed at a prompt
        return str(getattr(function, "__qualname__", type(function).__qualname__))
