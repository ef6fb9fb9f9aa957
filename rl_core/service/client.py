"""Client of the training service's management API: runs, requests, queue, evaluations, reference scores, metrics.

Needs only httpx. For training and sampling use the public tinker SDK; this client covers what that SDK lacks.

    with ServiceClient() as client:
        result = client.evaluate(run, model="tinker://.../weights/a", against="small", texts=["..."])
        print(result.text_comparison.kl.value)

Each call is described once, in `client_calls`; retries and waits are in `_Endpoint.retry_until_response` and
`client_calls.run_evaluation`. The two clients only send, wait and return results.
"""

from __future__ import annotations

import asyncio
import functools
import os
import time
from collections.abc import Awaitable, Callable, Generator, Sequence
from types import TracebackType
from typing import Any, Final, Generic, ParamSpec, TypeVar, Unpack, overload

import httpx

from rl_core.errors import BackendError, DataError, ServiceError, SettingsError
from rl_core.service import client_calls
from rl_core.service.client_calls import EvaluationArguments, ServiceCall
from rl_core.service.client_calls import Sampling as Sampling
from rl_core.service.client_calls import ServiceMetric as ServiceMetric
from rl_core.service.responses import ModelEvaluation, ReferenceScores

P = ParamSpec("P")
T = TypeVar("T")

DEFAULT_ADDRESS: Final = "http://127.0.0.1:8123"
_RETRIED_STATUS_CODES: Final = (408, 429, 503)
_AttemptOutcome = httpx.Response | httpx.TransportError


class _Endpoint:
    """Address, key and retry limit of a client; headers and errors of its calls."""

    def __init__(
        self, address: str | None, key: str | None, timeout: float, patience: float
    ) -> None:
        self.address = (address or os.environ.get("TINKER_BASE_URL") or DEFAULT_ADDRESS).rstrip("/")
        secret = key or os.environ.get("TINKER_API_KEY") or ""
        if not secret:
            raise SettingsError(
                "no API key: pass key or set TINKER_API_KEY; posttrain service key create NAME creates one"
            )
        if not self.address.startswith(("http://", "https://")):
            raise SettingsError(
                f"address: {self.address!r} is not an http address such as {DEFAULT_ADDRESS}"
            )
        self.client_options: dict[str, Any] = {
            "base_url": self.address,
            "headers": {"X-API-Key": secret},
            "timeout": timeout,
            "trust_env": False,
        }
        self.timeout, self.patience = timeout, patience

    def build_request_arguments(self, call: ServiceCall[Any]) -> dict[str, Any]:
        """Return the arguments of httpx's request."""
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
        """Retry a call until it has a response: yield the seconds to wait before each attempt, receive its outcome.

        Raises: as `parse_response`; BackendError if the server does not answer.
        """
        deadline, pause_s, next_pause_s = time.monotonic() + self.patience, 0.0, 0.2
        while True:
            outcome = yield pause_s
            assert outcome is not None
            is_final = (
                isinstance(outcome, httpx.Response)
                and outcome.status_code not in _RETRIED_STATUS_CODES
            )
            if is_final or time.monotonic() + next_pause_s >= deadline:
                break
            pause_s, next_pause_s = next_pause_s, min(5.0, 2 * next_pause_s)
        if isinstance(outcome, httpx.TransportError):
            raise self._describe_unreachable_server(outcome) from outcome
        return self.parse_response(call, outcome)

    def parse_response(self, call: ServiceCall[T], response: httpx.Response) -> T:
        """Return the result of a call.

        Raises: ServiceError if the server refuses; BackendError; DataError for an unknown response.
        """
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
        """Return whether the outcome is a response of a working server."""
        try:
            return isinstance(outcome, httpx.Response) and self.parse_response(
                client_calls.check_health(), outcome
            )
        except (BackendError, ServiceError, DataError):
            return False

    def _describe_unreachable_server(self, error: httpx.TransportError) -> BackendError:
        """Build the error for a server that does not answer."""
        reason = str(error) or type(error).__name__
        return BackendError(
            f"{self.address} does not answer ({reason}); is `posttrain service up` running there?"
        )


class _CallMethod(Generic[P, T]):
    """Method of both clients that performs a call; takes the arguments of its description."""

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
        caller = client

        @functools.wraps(self._describe)
        def call(*args: P.args, **kwargs: P.kwargs) -> Any:
            return caller._perform_call(self._describe(*args, **kwargs))

        return call


class _SharedCalls:
    """Calls of both clients."""

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
    references = _CallMethod(client_calls.list_references)
    submit_scores = _CallMethod(client_calls.submit_scores)
    scores = _CallMethod(client_calls.fetch_scores)


class ServiceClient(_SharedCalls):
    """Blocking client. Connection errors and statuses 408, 429 and 503 are retried.

    Every call raises ServiceError if the server refuses (its category says whose fault it is), and BackendError if the
    server does not answer for `patience` seconds.
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
        """Configure the client. Address and key default to TINKER_BASE_URL and TINKER_API_KEY, as in the tinker SDK.

        Raises: SettingsError without a key, or for an invalid address.
        """
        self._endpoint = _Endpoint(address, key, timeout, patience)
        self._http = httpx.Client(**self._endpoint.client_options, transport=transport)

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
        attempts, outcome = self._endpoint.retry_until_response(call), None
        while True:
            try:
                time.sleep(attempts.send(outcome))
            except StopIteration as end:
                result: T = end.value
                return result
            outcome = self._attempt_call(call)

    def _attempt_call(self, call: ServiceCall[Any]) -> _AttemptOutcome:
        try:
            return self._http.request(**self._endpoint.build_request_arguments(call))
        except httpx.TransportError as error:
            return error

    def is_up(self) -> bool:
        """Return whether the server answers."""
        return self._endpoint.is_healthy(self._attempt_call(client_calls.check_health()))

    def evaluate(
        self, run_id: str, *, timeout: float | None = None, **arguments: Unpack[EvaluationArguments]
    ) -> ModelEvaluation:
        """Evaluate a model on texts and on samples to prompts, optionally against another; wait for the result.

        Args:
            run_id: a run of this key in whose queue the evaluation waits; the run does not change.
            timeout: seconds to wait at most; None = no limit.
            arguments: see `EvaluationArguments`.
        Raises: as every call; BackendError after `timeout`.
        """
        return self._perform_calls(client_calls.run_evaluation(run_id, timeout, arguments))

    def score(
        self,
        model: str,
        rows: Sequence[Sequence[int]],
        *,
        temperature: float = 1.0,
        scores_id: str | None = None,
        timeout: float | None = None,
    ) -> ReferenceScores:
        """Score token rows by a frozen model of the service; wait for the result.

        Args:
            model: name of a reference model (log-probabilities of all tokens but the first) or reward model (scores).
            rows: token ids of its tokenizer; all rows are computed in one request.
            temperature: of log-probabilities.
            scores_id: a repeated id is the same request, computed once.
            timeout: seconds to wait at most; None = no limit.
        Raises: as every call; BackendError after `timeout`.
        """
        return self._perform_calls(
            client_calls.run_scores(model, rows, temperature, scores_id, timeout)
        )

    def _perform_calls(self, calls: Generator[ServiceCall[Any], Any, T]) -> T:
        response = None
        while True:
            try:
                call = calls.send(response)
            except StopIteration as end:
                result: T = end.value
                return result
            response = self._perform_call(call)


class AsyncServiceClient(_SharedCalls):
    """Client for asyncio with the calls and errors of `ServiceClient`."""

    def __init__(
        self,
        address: str | None = None,
        key: str | None = None,
        *,
        timeout: float = 30.0,
        patience: float = 60.0,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """Configure the client. Args, Raises: as `ServiceClient`."""
        self._endpoint = _Endpoint(address, key, timeout, patience)
        self._http = httpx.AsyncClient(**self._endpoint.client_options, transport=transport)

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
        attempts, outcome = self._endpoint.retry_until_response(call), None
        while True:
            try:
                await asyncio.sleep(attempts.send(outcome))
            except StopIteration as end:
                result: T = end.value
                return result
            outcome = await self._attempt_call(call)

    async def _attempt_call(self, call: ServiceCall[Any]) -> _AttemptOutcome:
        try:
            return await self._http.request(**self._endpoint.build_request_arguments(call))
        except httpx.TransportError as error:
            return error

    async def is_up(self) -> bool:
        """Return whether the server answers."""
        return self._endpoint.is_healthy(await self._attempt_call(client_calls.check_health()))

    async def evaluate(
        self, run_id: str, *, timeout: float | None = None, **arguments: Unpack[EvaluationArguments]
    ) -> ModelEvaluation:
        """Evaluate a model, optionally against another, and wait for the result. See `ServiceClient.evaluate`."""
        return await self._perform_calls(client_calls.run_evaluation(run_id, timeout, arguments))

    async def score(
        self,
        model: str,
        rows: Sequence[Sequence[int]],
        *,
        temperature: float = 1.0,
        scores_id: str | None = None,
        timeout: float | None = None,
    ) -> ReferenceScores:
        """Score token rows by a frozen model of the service; wait for the result. See `ServiceClient.score`."""
        return await self._perform_calls(
            client_calls.run_scores(model, rows, temperature, scores_id, timeout)
        )

    async def _perform_calls(self, calls: Generator[ServiceCall[Any], Any, T]) -> T:
        response = None
        while True:
            try:
                call = calls.send(response)
            except StopIteration as end:
                result: T = end.value
                return result
            response = await self._perform_call(call)
