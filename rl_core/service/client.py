"""Client of the training service's own interface: runs, requests, queue, evaluations, metrics.

It needs httpx alone. Training and sampling are the public tinker SDK's; this is for what that has no names for.

    with ServiceClient() as client:
        found = client.evaluate(run, model="tinker://.../weights/a", against="small", texts=["..."])
        print(found.text_comparison.kl.value)
"""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Final, TypeVar, Unpack

import httpx

from rl_core.errors import BackendError, DataError, ServiceError, SettingsError
from rl_core.service import client_calls
from rl_core.service.client_calls import EvaluationQuestion, Sampling, ServiceCall, ServiceMetric
from rl_core.service.evaluation_answers import ModelEvaluation
from rl_core.service.status_answers import EvaluationPromise, QueueStats, RequestStatus, RunList, RunStatus, SavedPath

__all__ = ["AsyncServiceClient", "ServiceMetric", "EvaluationQuestion", "Sampling", "ServiceClient"]

T = TypeVar("T")

ADDRESS: Final = "http://127.0.0.1:8123"
HOLD_SECONDS: Final = 20.0  # of one question for a result
_AGAIN: Final = (408, 429, 503)


class _Connection:
    """Address, key and patience of a client; headers and errors of its calls."""

    def __init__(self, address: str | None, key: str | None, timeout: float, patience: float) -> None:
        self.address = (address or os.environ.get("TINKER_BASE_URL") or ADDRESS).rstrip("/")
        secret = key or os.environ.get("TINKER_API_KEY") or ""
        if not secret:
            raise SettingsError(
                "no API key: give key, or set TINKER_API_KEY; posttrain service key create NAME makes one"
            )
        if not self.address.startswith(("http://", "https://")):
            raise SettingsError(f"address: {self.address!r} is no http address, such as {ADDRESS}")
        self.options: dict[str, Any] = {
            "base_url": self.address, "headers": {"X-API-Key": secret}, "timeout": timeout, "trust_env": False,
        }  # fmt: skip
        self.timeout, self.patience = timeout, patience

    def sent(self, call: ServiceCall[Any]) -> dict[str, Any]:
        """Arguments of httpx's request."""
        return {
            "method": call.method, "url": call.path, "json": call.body, "params": dict(call.params),
            "timeout": self.timeout + call.held,
        }  # fmt: skip

    def attempts(self) -> Iterator[float]:
        """Waits before the next attempt, until the patience is over."""
        end, wait = time.monotonic() + self.patience, 0.2
        while time.monotonic() + wait < end:
            yield wait
            wait = min(5.0, 2 * wait)

    def answer(self, call: ServiceCall[T], response: httpx.Response) -> T:
        """The answer to a call. Raises: ServiceError for a refusal, BackendError, DataError for an unknown answer."""
        if response.is_success:
            is_json = "json" in response.headers.get("content-type", "")
            return call.read(response.json() if is_json else response.text)
        try:
            detail = str(response.json()["detail"])
        except (ValueError, KeyError, TypeError):
            detail = response.text.strip()[:300] or f"HTTP status {response.status_code}"
        if response.status_code in _AGAIN:
            raise BackendError(f"{self.address}: {detail}")
        raise ServiceError(detail, "user" if response.status_code < 500 else "server")

    def unreachable(self, error: httpx.TransportError) -> BackendError:
        """The error of a server that does not answer."""
        reason = str(error) or type(error).__name__
        return BackendError(f"{self.address} does not answer ({reason}); is `posttrain service up` running there?")


def _is_worth_another(response: httpx.Response) -> bool:
    return response.status_code in _AGAIN


def _deadline(timeout: float | None) -> float:
    return math.inf if timeout is None else time.monotonic() + timeout


def _hold(deadline: float) -> float:
    return max(0.0, min(HOLD_SECONDS, deadline - time.monotonic()))


def _late(promise: EvaluationPromise, timeout: float | None) -> BackendError:
    return BackendError(
        f"the evaluation {promise.request_id} is not finished after {timeout} s; it goes on, and "
        "evaluation(run, request_id) asks for it again"
    )


class ServiceClient:
    """Calls that return when the answer is there. Connection errors and 408, 429, 503 are tried again.

    Raised by every call: ServiceError where the server refuses (its category says whose fault it is), BackendError
    where it does not answer for `patience` seconds.
    """

    def __init__(
        self,
        address: str | None = None,
        key: str | None = None,
        *,
        timeout: float = 30.0,
        patience: float = 60.0,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        """Left out, address and key are TINKER_BASE_URL and TINKER_API_KEY, as the tinker SDK takes them.

        Raises: SettingsError without a key, or for an address that is none.
        """
        self._connection = _Connection(address, key, timeout, patience)
        self._http = httpx.Client(**self._connection.options, transport=transport)

    def __enter__(self) -> ServiceClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def _ask(self, call: ServiceCall[T]) -> T:
        waits = self._connection.attempts()
        while True:
            response: httpx.Response | None = None
            try:
                response = self._http.request(**self._connection.sent(call))
            except httpx.TransportError as error:
                failure = self._connection.unreachable(error)
            if response is not None and not _is_worth_another(response):
                return self._connection.answer(call, response)
            wait = next(waits, None)
            if wait is None:
                if response is None:
                    raise failure
                return self._connection.answer(call, response)
            time.sleep(wait)

    def is_up(self) -> bool:
        """True where the server answers."""
        try:
            return self._connection.answer(healthy := client_calls.healthy(), self._http.get(healthy.path))
        except (httpx.TransportError, BackendError, ServiceError, DataError):
            return False

    def runs(self, limit: int = 100, offset: int = 0) -> RunList:
        """Training runs of the key, the newest first."""
        return self._ask(client_calls.runs(limit, offset))

    def run(self, run_id: str) -> RunStatus:
        """A training run."""
        return self._ask(client_calls.run(run_id))

    def checkpoints(self, run_id: str) -> list[SavedPath]:
        """Saved weights of a run, the newest first, with their versions in the model registry."""
        return self._ask(client_calls.checkpoints(run_id))

    def requests(self, run_id: str, limit: int = 100, offset: int = 0) -> list[RequestStatus]:
        """Requests of a run, the newest first."""
        return self._ask(client_calls.requests(run_id, limit, offset))

    def status(self, run_id: str, request_id: str) -> RequestStatus:
        """State of a request."""
        return self._ask(client_calls.status(run_id, request_id))

    def cancel(self, run_id: str, request_id: str) -> bool:
        """Cancel a request that waits. False = it runs, or is final."""
        return self._ask(client_calls.cancel(run_id, request_id))

    def queue_stats(self, run_id: str) -> QueueStats:
        """Depth of a run's queue, and quantiles of waiting and service times, by kind."""
        return self._ask(client_calls.queue_stats(run_id))

    def metrics(self) -> list[ServiceMetric]:
        """Metrics of the service as a whole."""
        return self._ask(client_calls.metrics())

    def submit_evaluation(self, run_id: str, **question: Unpack[EvaluationQuestion]) -> EvaluationPromise:
        """Queue an evaluation and return at once; it is computed although this program ends. Args: see `evaluate`."""
        return self._ask(client_calls.submit(run_id, question))

    def evaluation(self, run_id: str, request_id: str, wait: float = 0.0) -> ModelEvaluation | None:
        """The result of an evaluation; None = not finished within `wait` seconds (at most 40)."""
        return self._ask(client_calls.evaluation(run_id, request_id, wait))

    def evaluate(
        self, run_id: str, *, timeout: float | None = None, **question: Unpack[EvaluationQuestion]
    ) -> ModelEvaluation:
        """Evaluate a model on texts and on samples to prompts, and another beside it; waits for the result.

        Args:
            run_id: an own run, whose queue the evaluation stands in; it is not changed.
            timeout: seconds to wait at most; None = until it is there.
            question: see `EvaluationQuestion`.
        Raises: as every call; BackendError after `timeout`.
        """
        promise = self.submit_evaluation(run_id, **question)
        deadline = _deadline(timeout)
        while True:
            found = self.evaluation(run_id, promise.request_id, _hold(deadline))
            if found is not None:
                return found
            if time.monotonic() >= deadline:
                raise _late(promise, timeout)


class AsyncServiceClient:
    """`ServiceClient` for asyncio: the same calls and errors."""

    def __init__(
        self,
        address: str | None = None,
        key: str | None = None,
        *,
        timeout: float = 30.0,
        patience: float = 60.0,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """Args, Raises: as `ServiceClient`."""
        self._connection = _Connection(address, key, timeout, patience)
        self._http = httpx.AsyncClient(**self._connection.options, transport=transport)

    async def __aenter__(self) -> AsyncServiceClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def _ask(self, call: ServiceCall[T]) -> T:
        waits = self._connection.attempts()
        while True:
            response: httpx.Response | None = None
            try:
                response = await self._http.request(**self._connection.sent(call))
            except httpx.TransportError as error:
                failure = self._connection.unreachable(error)
            if response is not None and not _is_worth_another(response):
                return self._connection.answer(call, response)
            wait = next(waits, None)
            if wait is None:
                if response is None:
                    raise failure
                return self._connection.answer(call, response)
            await asyncio.sleep(wait)

    async def is_up(self) -> bool:
        """True where the server answers."""
        try:
            return self._connection.answer(healthy := client_calls.healthy(), await self._http.get(healthy.path))
        except (httpx.TransportError, BackendError, ServiceError, DataError):
            return False

    async def runs(self, limit: int = 100, offset: int = 0) -> RunList:
        """Training runs of the key, the newest first."""
        return await self._ask(client_calls.runs(limit, offset))

    async def run(self, run_id: str) -> RunStatus:
        """A training run."""
        return await self._ask(client_calls.run(run_id))

    async def checkpoints(self, run_id: str) -> list[SavedPath]:
        """Saved weights of a run, the newest first, with their versions in the model registry."""
        return await self._ask(client_calls.checkpoints(run_id))

    async def requests(self, run_id: str, limit: int = 100, offset: int = 0) -> list[RequestStatus]:
        """Requests of a run, the newest first."""
        return await self._ask(client_calls.requests(run_id, limit, offset))

    async def status(self, run_id: str, request_id: str) -> RequestStatus:
        """State of a request."""
        return await self._ask(client_calls.status(run_id, request_id))

    async def cancel(self, run_id: str, request_id: str) -> bool:
        """Cancel a request that waits. False = it runs, or is final."""
        return await self._ask(client_calls.cancel(run_id, request_id))

    async def queue_stats(self, run_id: str) -> QueueStats:
        """Depth of a run's queue, and quantiles of waiting and service times, by kind."""
        return await self._ask(client_calls.queue_stats(run_id))

    async def metrics(self) -> list[ServiceMetric]:
        """Metrics of the service as a whole."""
        return await self._ask(client_calls.metrics())

    async def submit_evaluation(self, run_id: str, **question: Unpack[EvaluationQuestion]) -> EvaluationPromise:
        """Queue an evaluation and return at once; it is computed although this program ends. Args: see `evaluate`."""
        return await self._ask(client_calls.submit(run_id, question))

    async def evaluation(self, run_id: str, request_id: str, wait: float = 0.0) -> ModelEvaluation | None:
        """The result of an evaluation; None = not finished within `wait` seconds (at most 40)."""
        return await self._ask(client_calls.evaluation(run_id, request_id, wait))

    async def evaluate(
        self, run_id: str, *, timeout: float | None = None, **question: Unpack[EvaluationQuestion]
    ) -> ModelEvaluation:
        """Evaluate a model, and another beside it; waits for the result. Args, Raises: see `ServiceClient.evaluate`."""
        promise = await self.submit_evaluation(run_id, **question)
        deadline = _deadline(timeout)
        while True:
            found = await self.evaluation(run_id, promise.request_id, _hold(deadline))
            if found is not None:
                return found
            if time.monotonic() >= deadline:
                raise _late(promise, timeout)
