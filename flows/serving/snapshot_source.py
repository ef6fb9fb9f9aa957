"""Snapshots of a learning service as models that can be served, and the thread that takes over the live one."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from flows.serving.served_model import ServedModel
from rl_core.api.policy import load_policy
from rl_core.errors import PosttrainError
from rl_core.models.rotary import longest_sequence
from rl_core.models.trainable_weights import load_trainable_weights
from rl_core.online.assembly import SNAPSHOTS
from rl_core.online.weight_snapshots import WeightSnapshots
from rl_core.settings import OnlineSettings, ServingSettings

__all__ = ["SnapshotSource", "SnapshotWatch"]

log = logging.getLogger(__name__)

LOOK_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class SnapshotSource:
    """The model of a service, with the weights of any of its snapshots."""

    settings: OnlineSettings
    serving: ServingSettings
    base: int  # registered version that the service began with; 0 = a folder

    @property
    def snapshots(self) -> WeightSnapshots:
        """The service's snapshots."""
        return WeightSnapshots(Path(self.settings.folder) / SNAPSHOTS, cached=0)

    def load(self, version: int | None) -> ServedModel:
        """The model with a snapshot's weights; None = as the service began, which is snapshot 0.

        Raises: CorruptError for a snapshot that is damaged or gone; CheckpointError, ModelError for the model.
        """
        policy = load_policy(self.settings.model, seed=self.settings.seed)
        if version:
            load_trainable_weights(policy.model, self.snapshots.weights(version))
        policy.model.requires_grad_(False).eval()
        context = min(self.serving.context, longest_sequence(policy.model))
        return ServedModel(policy.model, policy.renderer, version or 0, context, self.base)


class SnapshotWatch:
    """Hands the snapshot that LIVE names to a server."""

    def __init__(self, source: SnapshotSource, publish: Callable[[ServedModel], bool], version: int,
                 tell: Callable[[str, str], None]) -> None:  # fmt: skip
        """version: served by now. tell: takes a kind of event and a sentence."""
        self._source, self._publish, self._tell = source, publish, tell
        self.version = version
        self._refused: int | None = None
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="serving-snapshots", daemon=True)

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def stop(self) -> None:
        """End, after the present look."""
        self._is_over.set()

    def _run(self) -> None:
        while not self._is_over.wait(LOOK_SECONDS):
            try:
                self.look()
            except Exception:
                log.exception("the live snapshot could not be looked up")

    def look(self) -> bool:
        """One look; True = another snapshot was taken over. A damaged one is left alone, and said once."""
        live = self._source.snapshots.live()
        if live is None or live in (self.version, self._refused):
            return False
        try:
            is_taken = self._publish(self._source.load(live))
        except PosttrainError as error:
            is_taken, why = False, str(error)
        else:
            why = "it reads and writes other tokens"
        if not is_taken:
            self._refused = live
            log.error("snapshot %d is not taken over: %s", live, why)
            self._tell("refused", f"snapshot {live} is live, and cannot be served: {why}")
            return False
        before, self.version, self._refused = self.version, live, None
        log.info("snapshot %d answers new requests", live)
        self._tell("live", f"snapshot {live} answers new requests, in place of {before}")
        return True
