"""Past versions of a policy as opponents in self-play: snapshots of its trainable weights, and their choice.

    <folder>/snapshot-00000010.safetensors    weights (of adapters alone, with LoRA) before iteration 10

A checkpoint holds the names and SHA-256 digests of the snapshots, not their weights. A file is removed only when
neither the pool nor a checkpoint that the run keeps names it, so a run that was killed at any point finds the files of
every checkpoint that it may resume from. Without a folder the weights stay in memory, and in the checkpoint.

Which snapshots stay: `newest`, or a uniform sample of all past ones (`reservoir`, Vitter 1985, algorithm R). The first
one is stored in addition, as a fixed opponent for measuring progress. All choices follow from the seed.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.torch
import torch
from torch import nn

from rl_core.errors import CheckpointError
from rl_core.inference.sampling import compute_sequence_seed
from rl_core.models.trainable_weights import collect_trainable_weights, swap_weights
from rl_core.settings import SelfPlaySettings
from rl_core.storage.atomic_files import make_folder, replace_file
from rl_core.storage.faults import inject_fault
from rl_core.storage.folders import clear_leftovers
from rl_core.storage.manifest import digest_bytes

OPPONENTS_FOLDER = "opponents"  # in the folder of the checkpoints, which it is archived with
_FILE_NAME = re.compile(r"snapshot-\d{8}\.safetensors")
_MAX_LOADED = 2  # snapshots of a folder in memory at the same time


@dataclass(frozen=True, slots=True)
class PolicySnapshot:
    """One past version of the policy."""

    iteration: int  # before which it was taken
    digest: str  # SHA-256 of its file

    @property
    def name(self) -> str:
        """Name of the snapshot in games and records."""
        return f"snapshot-{self.iteration:08d}"

    @property
    def file_name(self) -> str:
        """Name of its file."""
        return f"{self.name}.safetensors"

    def to_json(self) -> dict[str, Any]:
        """Return a plain dict."""
        return {"iteration": self.iteration, "digest": self.digest}


class OpponentPool:
    """Snapshots of one policy, at most `settings.pool_size` and the first one."""

    def __init__(
        self,
        model: nn.Module,
        settings: SelfPlaySettings,
        seed: int,
        *,
        folder: Path | None,
        keep_checkpoints: int,
    ) -> None:
        """Start empty.

        Args:
            folder: of the snapshots' files; None = in memory.
            keep_checkpoints: number of newest checkpoints that the run may resume from.
        """
        self.settings, self.folder = settings, folder
        self._model, self._seed = model, seed
        self.snapshots: list[PolicySnapshot] = []  # the pool
        self.first: PolicySnapshot | None = None
        self.num_taken = 0
        self._newest_iteration = -1
        self._keep_checkpoints = keep_checkpoints
        # File names that the newest saved states name, by iteration of the state.
        self._named_by_checkpoints: dict[int, list[str]] = {}
        self._weights: dict[str, dict[str, torch.Tensor]] = {}  # by name, if there is no folder
        self._loaded: dict[str, dict[str, torch.Tensor]] = {}  # of a folder, the newest ones used

    def take_snapshot_when_due(self, iteration: int) -> bool:
        """Take a snapshot of the current weights before every `snapshot_every`-th iteration; return whether it did."""
        if iteration % self.settings.snapshot_every:
            return False
        if iteration <= self._newest_iteration:  # taken already
            return False
        self._add_snapshot(iteration)
        return True

    def _add_snapshot(self, iteration: int) -> None:
        data = _serialize_weights(collect_trainable_weights(self._model))
        snapshot = PolicySnapshot(iteration, digest_bytes(data))
        if self.folder is None:
            self._weights[snapshot.name] = _parse_weights(data, snapshot.name)
        else:
            make_folder(self.folder)
            if self.num_taken == 0:  # what a killed run left
                clear_leftovers(self.folder)
            path = self.folder / snapshot.file_name
            with replace_file(path, binary=True, point="opponent.written") as file:
                file.write(data)
        inject_fault("opponent.stored")
        self.num_taken += 1
        self._newest_iteration = iteration
        if self.first is None:
            self.first = snapshot
        self._keep_snapshot(snapshot)
        self._remove_unnamed()

    def _keep_snapshot(self, snapshot: PolicySnapshot) -> None:
        """Add a snapshot to the pool; in a full reservoir it replaces a random one, or is dropped."""
        size = self.settings.pool_size
        self.snapshots.append(snapshot)
        if len(self.snapshots) <= size:
            return
        removed = 0
        if self.settings.retention == "reservoir":
            place = int(self._draw("reservoir", self.num_taken).integers(self.num_taken))
            removed = place if place < size else size  # the new one stands last
        del self.snapshots[removed]

    def _draw(self, *purpose: object) -> np.random.Generator:
        return np.random.default_rng(compute_sequence_seed(self._seed, "opponents", *purpose))

    def draw_opponents(self, iteration: int, count: int) -> list[PolicySnapshot]:
        """Draw `count` opponents of an iteration, with at most `opponents_per_iteration` different ones.

        The distinct ones are drawn without replacement, each with the same probability.
        Raises: CheckpointError for an empty pool.
        """
        if not self.snapshots:
            raise CheckpointError("self_play: the pool has no snapshot to play against")
        rng = self._draw("games", iteration)
        num_distinct = min(self.settings.opponents_per_iteration, len(self.snapshots), count)
        chosen = sorted(rng.choice(len(self.snapshots), size=num_distinct, replace=False).tolist())
        # Equal shares, in random order, so that the number of games does not depend on luck.
        places = rng.permutation([chosen[index % num_distinct] for index in range(count)])
        return [self.snapshots[place] for place in places.tolist()]

    @contextlib.contextmanager
    def use_snapshot(self, name: str) -> Iterator[None]:
        """Give the policy the weights of a snapshot; restore its own bit for bit afterwards.

        Raises: CheckpointError for a file that is missing or differs from the digest.
        """
        with swap_weights(self._model, self._load_weights(name)):
            yield

    def _load_weights(self, name: str) -> Mapping[str, torch.Tensor]:
        """Load and verify a snapshot; the newest ones used stay in memory."""
        if self.folder is None:
            return self._weights[name]
        if name in self._loaded:
            return self._loaded[name]
        known = {snapshot.name: snapshot for snapshot in self._list_snapshots()}
        weights = self._read_file(known[name])
        while len(self._loaded) >= _MAX_LOADED:
            self._loaded.pop(next(iter(self._loaded)))
        self._loaded[name] = weights
        return weights

    def _read_file(self, snapshot: PolicySnapshot) -> dict[str, torch.Tensor]:
        assert self.folder is not None
        path = self.folder / snapshot.file_name
        remedy = (
            "restore the file from a copy, or start over with --fresh (in Python run(fresh=True))"
        )
        try:
            data = path.read_bytes()
        except OSError as error:
            raise CheckpointError(
                f"{path}: the opponent of iteration {snapshot.iteration}, which the checkpoint names, cannot be read: "
                f"{error.strerror or error}; {remedy}"
            ) from error
        digest = digest_bytes(data)
        if digest != snapshot.digest:
            raise CheckpointError(
                f"{path}: the opponent of iteration {snapshot.iteration} is not the file that the checkpoint names "
                f"(SHA-256 {digest[:12]}... instead of {snapshot.digest[:12]}...): it was changed or damaged; {remedy}"
            )
        return _parse_weights(data, str(path))

    def _list_snapshots(self) -> list[PolicySnapshot]:
        first = [] if self.first is None else [self.first]
        return [*first, *(snapshot for snapshot in self.snapshots if snapshot != self.first)]

    def _remove_unnamed(self) -> None:
        """Remove weights that neither the pool nor a checkpoint names; what the disk refuses stays."""
        used = self._list_snapshots()
        self._weights = {
            snapshot.name: self._weights[snapshot.name]
            for snapshot in used
            if snapshot.name in self._weights
        }
        if self.folder is None:
            return
        named = {snapshot.file_name for snapshot in used}
        named.update(name for names in self._named_by_checkpoints.values() for name in names)
        for path in sorted(self.folder.iterdir()):
            if _FILE_NAME.fullmatch(path.name) and path.name not in named:
                inject_fault("opponent.removing")
                with contextlib.suppress(OSError):
                    path.unlink()

    def state_dict(self, iteration: int) -> dict[str, Any]:
        """Return names and digests, and the files that checkpoints need; without a folder also the weights.

        Args:
            iteration: of the trainer, whose checkpoint holds this state.
        """
        named = {
            number: names
            for number, names in self._named_by_checkpoints.items()
            if number != iteration
        }
        named[iteration] = [snapshot.file_name for snapshot in self._list_snapshots()]
        # One more than the run keeps: an old checkpoint is removed after the new one is written.
        newest = sorted(named)[-(self._keep_checkpoints + 1) :]
        self._named_by_checkpoints = {number: named[number] for number in newest}
        return {
            "snapshots": [snapshot.to_json() for snapshot in self.snapshots],
            "first": None if self.first is None else self.first.to_json(),
            "num_taken": self.num_taken,
            "newest_iteration": self._newest_iteration,
            "named": {
                str(number): list(names) for number, names in self._named_by_checkpoints.items()
            },
            "weights": {name: dict(weights) for name, weights in self._weights.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a `state_dict`, and verify every file that it names.

        Raises: CheckpointError for a file that is missing or differs from its digest.
        """
        self.snapshots = [PolicySnapshot(**row) for row in state["snapshots"]]
        self.first = None if state["first"] is None else PolicySnapshot(**state["first"])
        self.num_taken = int(state["num_taken"])
        self._newest_iteration = int(state["newest_iteration"])
        self._named_by_checkpoints = {
            int(number): list(names) for number, names in state["named"].items()
        }
        self._weights = {name: dict(weights) for name, weights in state["weights"].items()}
        self._loaded.clear()
        if self.folder is not None:
            clear_leftovers(self.folder)
            for snapshot in self._list_snapshots():
                self._read_file(snapshot)

    def compute_mean_age(self, names: Sequence[str], iteration: int) -> float:
        """Return the mean number of iterations since the snapshots of these names were taken."""
        ages = [iteration - int(name.rpartition("-")[2]) for name in names]
        return sum(ages) / len(ages)


def _serialize_weights(weights: Mapping[str, torch.Tensor]) -> bytes:
    """Return a safetensors file; a tied weight is stored once, and its other names in the metadata."""
    owners: dict[tuple[Any, ...], str] = {}
    tensors: dict[str, torch.Tensor] = {}
    aliases: dict[str, str] = {}
    for name, tensor in weights.items():
        memory = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if tensor.numel() and memory in owners:
            aliases[name] = owners[memory]
            continue
        owners[memory] = name
        tensors[name] = tensor.detach().to("cpu", copy=True).contiguous()
    metadata = {"aliases": json.dumps(aliases, sort_keys=True)}
    return safetensors.torch.save(tensors, metadata=metadata)


def _parse_weights(data: bytes, source: str) -> dict[str, torch.Tensor]:
    """Read a file of `_serialize_weights`. Raises: CheckpointError for any other."""
    try:
        header_size = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + header_size])
        weights = safetensors.torch.load(data)
        aliases = json.loads(header["__metadata__"]["aliases"])
        return weights | {name: weights[owner] for name, owner in aliases.items()}
    except (ValueError, KeyError, TypeError, safetensors.SafetensorError) as error:
        raise CheckpointError(f"{source}: not a snapshot of a policy: {error}") from error
