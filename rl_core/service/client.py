"""Client of the training service's own interface: runs, requests, queue, evaluations, metrics.

It needs httpx alone. Training and sampling are the public tinker SDK's; this is for what that has no names for.

    with ServiceClient() as client:
        found = client.evaluate(run, model="tinker://.../weights/a", against="small", texts=["..."])
        print(found.text_comparison.kl.value)

Calls are described once (`client_calls`), attempts and waits are (`_Endpoint.exchange`, `client_calls.evaluate`).
The two clients only send, wait, and hand over what came.
"""

from __future__ import annotations

import asyncio
import functools
import os
import time
from collections.abc import Awaitable, Callable, Generator
from types import TracebackType
from typing import Any, Final, Generic, ParamSpec, TypeVar, Unpack, overload

import httpx

from rl_core.errors import BackendError, DataError, ServiceError, SettingsError
from rl_core.service import client_calls
from rl_core.service.client_calls import EvaluationArguments, ServiceCall
from rl_core.service.client_calls import Sampling as Sampling
from rl_core.service.client_calls import ServiceMetric as ServiceMetric
from rl_core.service.responses import ModelEvaluation

P = ParamSpec("P")
T = TypeVar("T")

DEFAULT_ADDRESS: Final = "http://127.0.0.1:8123"
_RETRIED_STATUS_CODES: Final = (408, 429, 503)
_AttemptOutcome = httpx.Response | httpx.TransportError  # of one attempt


class _Endpoint:
    """Address, key and patience of a client; headers and errors of its calls."""

    def __init__(
        self, address: str | None, key: str | None, timeout: float, patience: float
    ) -> None:
        self.address = (address or os.environ.get("TINKER_BASE_URL") or DEFAULT_ADDRESS).rstrip("/")
        secret = key or os.environ.get("TINKER_API_KEY") or ""
        if not secret:
            raise SettingsError(
                "no API key: give key, or set TINKER_API_KEY; posttrain service key create NAME makes one"
            )
        if not self.address.startswith(("http://", "https://")):
            raise SettingsError(
                f"address: {self.address!r} is no http address, such as {DEFAULT_ADDRESS}"
            )
        self.client_options: dict[str, Any] = {
            "base_url": self.address,
            "headers": {"X-API-Key": secret},
            "timeout": timeout,
            "trust_env": False,
        }
        self.timeout, self.patience = timeout, patience

    def build_request_arguments(self, call: ServiceCall[Any]) -> dict[str, Any]:
        """Arguments of httpx's request."""
        return {
            "method": call.method,
            "url": call.path,
            "json": call.body,
            "params": dict(call.params),
            "timeout": self.timeout + call.server_wait_seconds,
        }

    def retry_until_response(
        self, call: ServiceCall[T]
    ) -> Generator[float, _AttemptOutcome | None, T]:
        """One call until it has an answer: gives the seconds to wait before each attempt, and takes its outcome.

        Raises: as `answer`; BackendError of a server that does not answer.
        """
        end, pause, wait = time.monotonic() + self.patience, 0.0, 0.2
        while True:
            outcome = yield pause
            assert outcome is not None
            is_final = (
                isinstance(outcome, httpx.Response)
                and outcome.status_code not in _RETRIED_STATUS_CODES
            )
            if is_final or time.monotonic() + wait >= end:
                break
            pause, wait = wait, min(5.0, 2 * wait)
        if isinstance(outcome, httpx.TransportError):
            raise self._describe_unreachable_server(outcome) from outcome
        return self.parse_response(call, outcome)

    def parse_response(self, call: ServiceCall[T], response: httpx.Response) -> T:
        """The answer to a call. Raises: ServiceError for a refusal, BackendError, DataError for an unknown answer."""
        if response.is_success:
            is_json = "json" in response.headers.get("content-type", "")
            return call.parse_response(response.json() if is_json else response.text)
        try:
            detail = str(response.json()["detail"])
        except (ValueError, KeyError, TypeError):
            detail = response.text.strip()[:300] or f"HTTP status {response.status_code}"
        if response.status_code in _RETRIED_STATUS_CODES:
            raise BackendError(f"{self.address}: {detail}")
        raise ServiceError(detail, "user" if response.status_code < 500 else "server")

    def is_healthy(self, outcome: _AttemptOutcome) -> bool:
        """True for the answer of a server that works."""
        try:
            return isinstance(outcome, httpx.Response) and self.parse_response(
                client_calls.check_health(), outcome
            )
        except (BackendError, ServiceError, DataError):
            return False

    def _describe_unreachable_server(self, error: httpx.TransportError) -> BackendError:
        """The error of a server that does not answer."""
        reason = str(error) or type(error).__name__
        return BackendError(
            f"{self.address} does not answer ({reason}); is `posttrain service up` running there?"
        )


class _CallMethod(Generic[P, T]):
    """A call as a method of both clients, with the arguments of its description."""

    def __init__(self, describe: Callable[P, ServiceCall[T]]) -> None:
        self._describe = describe

    @overload
    def __get__(self, client: None, kind: type) -> Callable[P, ServiceCall[T]]: ...
    @overload
    def __get__(self, client: ServiceClient, kind: type) -> Callable[P, T]: ...
    @overload
    def __get__(self, client: AsyncServiceClient, kind: type) -> Callable[P, Awaitable[T]]: ...
    def __get__(
        self, client: ServiceClient | AsyncServiceClient | None, kind: type
    ) -> Callable[P, Any]:
        if client is None:
            return self._describe
        asked = client

        @functools.wraps(self._describe)
        def call(*args: P.args, **kwargs: P.kwargs) -> Any:
            return asked._perform_call(self._describe(*args, **kwargs))

        return call


class _SharedCalls:
    """Calls that both clients have."""

    runs = _CallMethod(client_calls.list_runs)
    run = _CallMethod(client_calls.fetch_run)
    checkpoints = _CallMethod(client_calls.list_checkpoints)
    requests = _CallMethod(client_calls.list_requests)
    status = _CallMethod(client_calls.fetch_request_status)
    cancel = _CallMethod(client_calls.cancel_request)
    queue_stats = _CallMethod(client_calls.fetch_queue_stats)
    metrics = _CallMethod(client_calls.list_metrics)
    submit_evaluation = _CallMethod(client_calls.submit_evaluation)
    evaluation = _CallMethod(client_calls.fetch_evaluation)


class ServiceClient(_SharedCalls):
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
        self._connection = _Endpoint(address, key, timeout, patience)
        self._http = httpx.Client(**self._connection.client_options, transport=transport)

    def __enter__(self) -> ServiceClient:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def _perform_call(self, call: ServiceCall[T]) -> T:
        exchange, outcome = self._connection.retry_until_response(call), None
        while True:
            try:
                time.sleep(exchange.send(outcome))
            except StopIteration as end:
                found: T = end.value
                return found
            outcome = self._attempt_call(call)

    def _attempt_call(self, call: ServiceCall[Any]) -> _AttemptOutcome:
        try:
            return self._http.request(**self._connection.build_request_arguments(call))
        except httpx.TransportError as error:
            return error

    def is_up(self) -> bool:
        """True where the server answers."""
        return self._connection.is_healthy(self._attempt_call(client_calls.check_health()))

    def evaluate(
        self, run_id: str, *, timeout: float | None = None, **arguments: Unpack[EvaluationArguments]
    ) -> ModelEvaluation:
        """Evaluate a model on texts and on samples to prompts, and another beside it; waits for the result.

        Args:
            run_id: an own run, whose queue the evaluation stands in; it is not changed.
            timeout: seconds to wait at most; None = until it is there.
            question: see `EvaluationArguments`.
        Raises: as every call; BackendError after `timeout`.
        """
        calls, answer = client_calls.run_evaluation(run_id, timeout, arguments), None
        while True:
            try:
                call = calls.send(answer)
            except StopIteration as end:
                found: ModelEvaluation = end.value
                return found
            answer = self._perform_call(call)


class AsyncServiceClient(_SharedCalls):
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
        self._connection = _Endpoint(address, key, timeout, patience)
        self._http = httpx.AsyncClient(**self._connection.client_options, transport=transport)

    async def __aenter__(self) -> AsyncServiceClient:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def _perform_call(self, call: ServiceCall[T]) -> T:
        exchange, outcome = self._connection.retry_until_response(call), None
        while True:
            try:
                await asyncio.sleep(exchange.send(outcome))
            except StopIteration as end:
                found: T = end.value
                return found
            outcome = await self._attempt_call(call)

    async def _attempt_call(self, call: ServiceCall[Any]) -> _AttemptOutcome:
        try:
            return await self._http.request(**self._connection.build_request_arguments(call))
        except httpx.TransportError as error:
            return error

    async def is_up(self) -> bool:
        """True where the server answers."""
        return self._connection.is_healthy(await self._attempt_call(client_calls.check_health()))

    async def evaluate(
        self, run_id: str, *, timeout: float | None = None, **arguments: Unpack[EvaluationArguments]
    ) -> ModelEvaluation:
        """Evaluate a model, and another beside it; waits for the result. Args, Raises: see `ServiceClient.evaluate`."""
        calls, answer = client_calls.run_evaluation(run_id, timeout, arguments), None
        while True:
            try:
                call = calls.send(answer)
            except StopIteration as end:
                found: ModelEvaluation = end.value
                return found
            answer = await self._perform_call(call)
