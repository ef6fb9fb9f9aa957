"""Requests of the event loop to the serving loop, and what comes back."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from flows.serving.served_model import ServedModel
from rl_core.inference.served_requests import Ended, Progress, ServedRequest, ServingFault
from rl_core.inference.server_loop import LoopLimits, ServerLoop
from rl_core.settings import ServingSettings

__all__ = ["Answering", "Pending"]

log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class Pending:
    """One request that is being answered, on the side of the event loop."""

    loop: asyncio.AbstractEventLoop
    requests: list[ServedRequest]
    events: asyncio.Queue[Progress | Ended] | None  # of one that streams
    done: asyncio.Event = field(default_factory=asyncio.Event)
    left: int = 0  # choices that have not ended

    def take(self, event: Progress | Ended) -> None:
        """Note an event; on the event loop's thread."""
        if isinstance(event, Ended):
            self.left -= 1
            if not self.left:
                self.done.set()
        if self.events is not None:
            self.events.put_nowait(event)


class Answering:
    """The serving loop on a thread of its own."""

    def __init__(self, model: ServedModel, settings: ServingSettings) -> None:
        """Raises: NonFiniteTensor, OutOfMemory where the model cannot be decoded."""
        limits = LoopLimits(max_waiting=settings.max_waiting, turn_tokens=settings.turn_tokens)
        self._settings = settings
        self._loop = ServerLoop(model.opener(settings.slots), model.version, self._deliver, limits)
        self._thread = threading.Thread(target=self._run, name="serving", daemon=True)
        self._thread.start()

    @property
    def loop(self) -> ServerLoop:
        """The serving loop."""
        return self._loop

    @property
    def is_alive(self) -> bool:
        """False = its thread has ended."""
        return self._thread.is_alive()

    def _run(self) -> None:
        if self._settings.threads is not None:
            import torch

            torch.set_num_threads(self._settings.threads)
        try:
            self._loop.run()
        except BaseException:
            log.exception("the serving loop ended")
            self._loop.close()

    def submit(self, requests: Sequence[ServedRequest], streams: bool) -> Pending:
        """Have requests answered together. Raises: Overloaded, ServingFault."""
        if not self.is_alive:
            raise ServingFault("the engine has ended; its log says why")
        pending = Pending(
            asyncio.get_running_loop(), list(requests), asyncio.Queue() if streams else None, left=len(requests)
        )
        for request in requests:
            request.owner = pending
        self._loop.submit(requests)
        return pending

    def cancel(self, pending: Pending) -> None:
        """Take requests back that have not ended."""
        for request in pending.requests:
            if not request.has_ended:
                self._loop.cancel(request)

    def publish(self, model: ServedModel) -> None:
        """Answer requests that begin from now on with other weights."""
        self._loop.publish(model.opener(self._settings.slots), model.version)

    def close(self, seconds: float = 10.0) -> None:
        """End the thread; what has not ended fails."""
        self._loop.close()
        self._thread.join(seconds)

    def _deliver(self, events: Sequence[Progress | Ended]) -> None:
        """Hand events of a step over, in one call for each event loop."""
        by_loop: dict[asyncio.AbstractEventLoop, list[Progress | Ended]] = {}
        for event in events:
            by_loop.setdefault(event.request.owner.loop, []).append(event)
        for loop, own in by_loop.items():
            try:
                loop.call_soon_threadsafe(_hand_out, own)
            except RuntimeError:  # the event loop is closed: the server has stopped
                continue


def _hand_out(events: Sequence[Progress | Ended]) -> None:
    for event in events:
        event.request.owner.take(event)
