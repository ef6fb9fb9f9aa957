"""Cache of a reward function that its user declared pure: a value by the digest of its code and its inputs.

Pure means that a sample's value follows from its own texts, tools, outcome and data row; not from other samples, nor
from what a policy thought of it (`VARYING`), nor from anything outside. Then values with and without the cache are the
same bits. One value found in each call is computed again, and another one is an error.

Reward component: user-defined function that its user declared pure, so that no value is computed twice.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from rl_core.errors import RewardError, SettingsError
from rl_core.models.hidden_states import TurnEmbeddings
from rl_core.rewards.components import describe_rollout
from rl_core.rewards.user_function import RewardFunction, RewardSignature, UserReward
from rl_core.settings import RewardSettings
from rl_core.storage.manifest import digest_bytes
from rl_core.types import Rollout
from rl_core.user_code.digest import digest_function, digest_user_code

# Fields of a trajectory that a pure function does not read: another policy may play the same episode in another group.
VARYING_FIELDS = ("policy_version", "sample", "mean_logprob", "reward", "rewards", "temperature")
_IMPURE_ARGUMENTS = ("trainer_state", "log_metric", "log_extra")  # arguments of TRL's functions
_KEY_BYTES = 16  # of a key
MISSING = object()


class ValueCache:
    """Values of one function, at most `entries`, oldest dropped first.

    Part of the checkpoint, so it survives a resume.
    """

    def __init__(self, signature: RewardSignature, entries: int) -> None:
        """Digest the function's code. Raises: SettingsError for a function whose arguments vary between calls."""
        self._signature, self.entries = signature, entries
        for name in _IMPURE_ARGUMENTS:
            if name in signature.passed:
                raise SettingsError(
                    f"reward_options.cache: '{signature.name}' asks for `{name}`, so it is not pure; leave it out"
                )
        self._code = _digest_code(signature.name, signature.function)
        self._values: dict[bytes, float | None] = {}

    def compute_keys(self, rollouts: Sequence[Rollout]) -> list[bytes]:
        """Return one key per rollout; it covers the columns of all rows, which decide how a function is called."""
        call = json.dumps([self._code, *self._signature.resolve_call_form(rollouts)]).encode()
        return [
            hashlib.blake2b(call + self._encode_inputs(rollout), digest_size=_KEY_BYTES).digest()
            for rollout in rollouts
        ]

    def _encode_inputs(self, rollout: Rollout) -> bytes:
        inputs = rollout.trajectory.to_json()
        for name in VARYING_FIELDS:
            inputs.pop(name, None)
        if self._signature.takes_ids:
            inputs["completion_ids"] = list(rollout.completion_ids)
        return json.dumps(inputs, sort_keys=True, default=repr).encode()

    def find_value(self, key: bytes) -> Any:
        """Return the value: a number, None where the function returned None; MISSING if there is no entry."""
        return self._values.get(key, MISSING)

    def store_value(self, key: bytes, value: float | None) -> None:
        """Store a value; drop the oldest beyond `entries`."""
        self._values[key] = value
        while len(self._values) > self.entries:
            del self._values[next(iter(self._values))]

    def __len__(self) -> int:
        return len(self._values)

    def state_dict(self) -> dict[str, Any]:
        """Return keys (uint8 [N, 16]) and values (float64 [N], NaN = None), oldest first."""
        values = [float("nan") if value is None else value for value in self._values.values()]
        keys = (
            torch.frombuffer(bytearray(b"".join(self._values)), dtype=torch.uint8)
            if values
            else torch.empty(0)
        )
        return {
            "keys": keys.reshape(-1, _KEY_BYTES).to(torch.uint8),
            "values": torch.tensor(values, dtype=torch.float64),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`; values of other code are never hit, as their keys differ."""
        flat = bytes(state["keys"].reshape(-1).tolist())
        keys = [flat[start : start + _KEY_BYTES] for start in range(0, len(flat), _KEY_BYTES)]
        values = [None if value != value else value for value in state["values"].tolist()]
        self._values = dict(zip(keys, values, strict=True))


def _digest_code(name: str, function: Callable[..., Any]) -> str:
    """Return a digest of the user modules behind an import path, or of a passed function's source."""
    if ":" in name:
        digests = digest_user_code([name])
        return digest_bytes(json.dumps([name, sorted(digests.items())]).encode())
    return digest_function(function)


FailureLimit = Callable[[int, int], bool]


def build_user_reward(
    name: str, options: RewardSettings, function: RewardFunction | None, has_too_many: FailureLimit
) -> UserReward:
    """Build the component of a function, with a cache if the settings name it. Arguments: `UserReward`."""
    return (CachedReward if name in options.cache else UserReward)(
        name, options, function, has_too_many
    )


class CachedReward(UserReward):
    """`UserReward` with a `ValueCache`: returns the same bits and calls the function for new samples only.

    One cached value per call is recomputed; a different result is an error. Metric: cached, the share of the rollouts
    for
    which the function was not called.
    """

    def __init__(
        self,
        name: str,
        options: RewardSettings,
        function: RewardFunction | None,
        has_too_many: FailureLimit,
    ) -> None:
        """Build `UserReward` with a cache. Raises: SettingsError for a function that cannot be pure."""
        super().__init__(name, options, function, has_too_many)
        self.cache = ValueCache(self.signature, options.cache_entries)

    def __call__(
        self, rollouts: Sequence[Rollout], states: Sequence[TurnEmbeddings] = ()
    ) -> list[float | None]:
        """Return one value per rollout, see `UserReward`."""
        self._batch = rollouts
        keys = self.cache.compute_keys(rollouts)
        cached = {key: self.cache.find_value(key) for key in keys}
        cached = {key: value for key, value in cached.items() if value is not MISSING}
        rechecked_key = next((key for key in keys if key in cached), None)
        call_indices: dict[
            bytes, int
        ] = {}  # key -> index of the rollout that the function is called with
        for index, key in enumerate(keys):
            if key not in cached or key == rechecked_key:
                call_indices.setdefault(key, index)
        values = super().__call__([rollouts[index] for index in call_indices.values()])
        if self.signature.logged:
            raise RewardError(
                f"reward '{self.name}' logs metrics, so it is not pure; take it out of reward_options.cache"
            )
        failed = {
            key: self.failed[position]
            for position, key in enumerate(call_indices)
            if position in self.failed
        }
        # None = failed or not tried; keys for which the function returned None are in `none_keys`.
        computed: dict[bytes, float | None] = {}
        none_keys = {key for key, value in cached.items() if value is None}
        for position, (key, value) in enumerate(zip(call_indices, values, strict=True)):
            computed[key] = value
            if value is None:
                continue
            result = None if position in self.skipped else value
            if key == rechecked_key and result != cached[key]:
                rollout = rollouts[call_indices[key]]
                raise RewardError(_describe_impurity(self.name, rollout, cached[key], result))
            self.cache.store_value(key, result)
            if result is None:
                none_keys.add(key)
        self.failed = {index: failed[key] for index, key in enumerate(keys) if key in failed}
        self.skipped = {
            index for index, key in enumerate(keys) if key in none_keys and key not in failed
        }
        if "skipped" in self.metrics:
            self.metrics["skipped"] = len(self.skipped) / max(1, len(keys))
        self.metrics["cached"] = 1 - len(call_indices) / max(1, len(keys))
        values_by_key = {key: 0.0 if value is None else value for key, value in cached.items()}
        values_by_key |= computed
        return [values_by_key[key] for key in keys]

    def state_dict(self) -> dict[str, Any]:
        """Return the cached values."""
        return {"cache": self.cache.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`; a checkpoint made before the function was declared pure has no cache."""
        if "cache" in state:
            self.cache.load_state_dict(state["cache"])


def _describe_impurity(
    name: str, rollout: Rollout, cached: float | None, recomputed: float | None
) -> str:
    return (
        f"reward '{name}' gave {recomputed!r} for {describe_rollout(rollout)}, and {cached!r} before, "
        "so it is not pure; take it out of reward_options.cache"
    )
