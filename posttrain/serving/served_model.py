"""Served model: looked up by name, loaded, and run by the serving loop on its thread.

Also the snapshots of a learning service as served models, and the thread that publishes the live snapshot.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import json
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rl_core.api.policy import load_policy, resolve_model_folder
from rl_core.capabilities import decoding
from rl_core.data.chat import ChatRenderer
from rl_core.data.token_ids import find_textless_ids
from rl_core.errors import PosttrainError, SettingsError
from rl_core.inference.continuous_batching import ContinuousBatcher
from rl_core.inference.fallback_batching import FallbackBatcher
from rl_core.inference.server_loop import ServerLoop, ServerLoopLimits
from rl_core.inference.serving_requests import (
    EngineFault,
    RequestEnded,
    RequestProgress,
    ServedRequest,
    SlotsFactory,
)
from rl_core.models import causal_lm
from rl_core.models.rotary import read_model_max_length
from rl_core.models.trainable_weights import load_trainable_weights
from rl_core.online.build_worker import SNAPSHOTS_FOLDER
from rl_core.online.weight_snapshots import WeightSnapshots
from rl_core.settings import ModelSettings, OnlineSettings, ServingSettings
from tasks.tracking import ModelVersion, Tracking, is_registered_reference

log = logging.getLogger(__name__)

SNAPSHOT_POLL_SECONDS = 0.2


class NoChampion(SettingsError):
    """The registered model has no version with the alias yet."""


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model's name, and the store in which its versions are looked up."""

    reference: str  # models:/NAME@ALIAS, a folder, or a hub name
    output: Path  # of the store of registered models
    tracking_uri: str | None = None
    # How to name another model, for the error message if there is none.
    alternative_hint: str = "posttrain serve FOLDER"

    @property
    def is_registered(self) -> bool:
        """True = the model is looked up in the registry, where new versions may appear."""
        return is_registered_reference(self.reference)

    def find_version(self) -> ModelVersion | None:
        """Find the version that the name refers to now; None for folders and hub names.

        Raises: NoChampion with the next step; BackendError if the tracking store is unreachable.
        """
        if not self.is_registered:
            return None
        try:
            return Tracking(self.tracking_uri, self.output).registry.find_version(self.reference)
        except SettingsError as error:
            name = self.reference.removeprefix("models:/").partition("@")[0]
            raise NoChampion(
                f"{error}; there is no model yet: run the pipeline that promotes one, as with `posttrain run {name}`, "
                f"or name an existing model: {self.alternative_hint}"
            ) from None

    def resolve_folder(self, version: ModelVersion | None) -> Path | str:
        """Return the folder or hub name of the model's files. Raises: SettingsError, BackendError."""
        if version is not None:
            return Tracking(self.tracking_uri, self.output).registry.download_version(
                version, self.output / "serving" / "models"
            )
        path = Path(self.reference).expanduser()
        return resolve_model_folder(path if path.is_dir() else self.reference)


@dataclass(frozen=True, slots=True)
class ServedModel:
    """One version of a model in memory."""

    model: Any
    renderer: ChatRenderer
    version: int
    context: int
    # Registered version (0 = a folder) with which a learning service began; `version` then counts its updates.
    base_version: int | None = None

    @property
    def name(self) -> str:
        """Unambiguous name of the weights: 3 = registered version 3, 3+20 = 20 online updates later; 0 = a folder."""
        if self.base_version is None:
            return str(self.version)
        return f"{self.base_version}+{self.version}"

    @property
    def vocab_size(self) -> int:
        """Number of tokens that the model assigns a probability."""
        return int(self.model.config.get_text_config().vocab_size)

    @property
    def text_digest(self) -> str:
        """Digest of tokenizer and chat template: equal for versions that convert text and tokens in the same way."""
        vocabulary = json.dumps(sorted(self.renderer.tokenizer.get_vocab().items()))
        return hashlib.sha256(f"{self.renderer.digest}\n{vocabulary}".encode()).hexdigest()

    def build_slot_opener(self, slots: int) -> SlotsFactory:
        """Build a function that opens slots over these weights: the engine's if it supports the model's family."""
        is_supported = decoding.check_rollout_decoder(self.model).allowed
        batcher: Any = ContinuousBatcher if is_supported else FallbackBatcher
        renderer, context = self.renderer, self.context

        def open_slots(wake: Callable[[], None]) -> Any:
            return batcher(
                self.model,
                slots=slots,
                context=context,
                eos_ids=renderer.eos_ids,
                pad_id=renderer.pad_id,
                textless_ids=find_textless_ids(renderer.tokenizer, self.vocab_size),
                wake=wake,
            )

        return open_slots


def load_served_model(
    source: ModelSource, settings: ServingSettings, model: ModelSettings
) -> ServedModel:
    """Load the model that a name refers to.

    Args:
        model: dtype, device and chat template.
    Raises: SettingsError, ModelError, BackendError; DataError for a tokenizer that cannot represent a conversation.
    """
    version = source.find_version()
    model = dataclasses.replace(model, path=None, lora=None)
    weights, tokenizer = causal_lm.load_model(source.resolve_folder(version), model)
    weights.requires_grad_(False).eval()
    context = min(settings.context, read_model_max_length(weights))
    renderer = ChatRenderer(tokenizer, model)
    return ServedModel(weights, renderer, version.version if version is not None else 0, context)


@dataclass(frozen=True, slots=True)
class SnapshotSource:
    """The model of a learning service, with the weights of any of its snapshots."""

    settings: OnlineSettings
    serving: ServingSettings
    base_version: int  # registered version with which the service began; 0 = a folder

    @property
    def snapshots(self) -> WeightSnapshots:
        """The service's snapshots."""
        return WeightSnapshots(Path(self.settings.folder) / SNAPSHOTS_FOLDER, cached=0)

    def load_snapshot(self, version: int | None) -> ServedModel:
        """Load the model with a snapshot's weights; None = the initial weights, which are snapshot 0.

        Raises: CorruptError for a damaged or missing snapshot; CheckpointError, ModelError for the model.
        """
        policy = load_policy(self.settings.model, seed=self.settings.seed)
        if version:
            load_trainable_weights(policy.model, self.snapshots.load_weights(version))
        policy.model.requires_grad_(False).eval()
        context = min(self.serving.context, read_model_max_length(policy.model))
        return ServedModel(policy.model, policy.renderer, version or 0, context, self.base_version)


class SnapshotWatcher:
    """Watcher that publishes the snapshot named by LIVE to a server."""

    def __init__(
        self,
        source: SnapshotSource,
        publish: Callable[[ServedModel], bool],
        version: int,
        record_event: Callable[[str, str], None],
    ) -> None:
        """Prepare the thread.

        Args:
            version: snapshot that is served now.
            record_event: records an event by kind and sentence.
        """
        self._source, self._publish, self._record_event = source, publish, record_event
        self.version = version
        self._rejected_version: int | None = None
        self._stop_event = threading.Event()
        self._thread = threading.Thread(
            target=self._poll_snapshots, name="serving-snapshots", daemon=True
        )

    def start_thread(self) -> None:
        """Start watching."""
        self._thread.start()

    def request_stop(self) -> None:
        """Stop after the current check."""
        self._stop_event.set()

    def _poll_snapshots(self) -> None:
        while not self._stop_event.wait(SNAPSHOT_POLL_SECONDS):
            try:
                self.check_live_snapshot()
            except Exception:
                log.exception("the live snapshot could not be looked up")

    def check_live_snapshot(self) -> bool:
        """Check once for another live snapshot and publish it. Skip a damaged one and report it once.

        Returns: True = another snapshot was published.
        """
        live = self._source.snapshots.read_live_version()
        if live is None or live in (self.version, self._rejected_version):
            return False
        try:
            is_published = self._publish(self._source.load_snapshot(live))
            reason = "it has another tokenizer, chat template or context"
        except PosttrainError as error:
            is_published, reason = False, str(error)
        if not is_published:
            self._rejected_version = live
            log.error("snapshot %d is not served: %s", live, reason)
            self._record_event("refused", f"snapshot {live} is live but cannot be served: {reason}")
            return False
        previous, self.version, self._rejected_version = self.version, live, None
        log.info("snapshot %d answers new requests", live)
        self._record_event("live", f"snapshot {live} replaces {previous} for new requests")
        return True


@dataclass(eq=False, slots=True)
class PendingAnswers:
    """One HTTP request being answered, seen from the event loop."""

    loop: asyncio.AbstractEventLoop
    requests: list[ServedRequest]
    events: asyncio.Queue[RequestProgress | RequestEnded] | None  # None = it does not stream
    done: asyncio.Event = field(default_factory=asyncio.Event)
    num_open: int = 0  # choices that have not ended

    def take(self, event: RequestProgress | RequestEnded) -> None:
        """Take an event, on the event loop's thread."""
        if isinstance(event, RequestEnded):
            self.num_open -= 1
            if not self.num_open:
                self.done.set()
        if self.events is not None:
            self.events.put_nowait(event)


class EngineThread:
    """The serving loop on its thread."""

    def __init__(self, model: ServedModel, settings: ServingSettings) -> None:
        """Start the thread. Raises: NonFiniteTensor, OutOfMemory if the model cannot be decoded."""
        limits = ServerLoopLimits(
            max_waiting=settings.max_waiting, turn_tokens=settings.turn_tokens
        )
        self._settings = settings
        self._loop = ServerLoop(
            model.build_slot_opener(settings.slots), model.version, self._deliver_events, limits
        )
        self._thread = threading.Thread(target=self._run_loop, name="serving", daemon=True)
        self._thread.start()

    @property
    def loop(self) -> ServerLoop:
        """The serving loop."""
        return self._loop

    @property
    def is_alive(self) -> bool:
        """False = the thread has ended."""
        return self._thread.is_alive()

    def _run_loop(self) -> None:
        if self._settings.threads is not None:
            import torch

            torch.set_num_threads(self._settings.threads)
        try:
            self._loop.serve_until_closed()
        except BaseException:
            log.exception("the serving loop ended")
            self._loop.close()

    def submit_requests(self, requests: Sequence[ServedRequest], streams: bool) -> PendingAnswers:
        """Submit the requests of one HTTP request together. Raises: ServerOverloaded, EngineFault."""
        if not self.is_alive:
            raise EngineFault("the engine has ended; its log says why")
        pending = PendingAnswers(
            asyncio.get_running_loop(),
            list(requests),
            asyncio.Queue() if streams else None,
            num_open=len(requests),
        )
        for request in requests:
            request.owner = pending
        self._loop.submit_requests(requests)
        return pending

    def cancel_requests(self, pending: PendingAnswers) -> None:
        """Cancel the requests that have not ended."""
        for request in pending.requests:
            if not request.has_ended:
                self._loop.cancel_request(request)

    def publish_model(self, model: ServedModel) -> None:
        """Answer new requests with other weights."""
        self._loop.publish_weights(model.build_slot_opener(self._settings.slots), model.version)

    def close_loop(self, seconds: float = 10.0) -> None:
        """Stop the thread; open requests fail."""
        self._loop.close()
        self._thread.join(seconds)

    def _deliver_events(self, events: Sequence[RequestProgress | RequestEnded]) -> None:
        """Deliver the events of a step, with one call per event loop."""
        by_loop: dict[asyncio.AbstractEventLoop, list[RequestProgress | RequestEnded]] = {}
        for event in events:
            by_loop.setdefault(event.request.owner.loop, []).append(event)
        for loop, loop_events in by_loop.items():
            try:
                loop.call_soon_threadsafe(_dispatch_events, loop_events)
            except RuntimeError:  # the event loop is closed: the server has stopped
                continue


def _dispatch_events(events: Sequence[RequestProgress | RequestEnded]) -> None:
    for event in events:
        event.request.owner.take(event)
