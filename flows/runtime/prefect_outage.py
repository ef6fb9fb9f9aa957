"""Outcome of a flow whose Prefect API became unreachable: the flow's own result or error is preserved.

Prefect reports the end of a flow to its API and raises if the API does not answer, whatever the flow's outcome.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

from flows.runtime.run_request import FlowOutcome, RunRequest, find_request, use_request

api_unreachable = threading.Event()  # the end of a flow could not be reported to Prefect

logger = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")


@contextlib.contextmanager
def capture_outcome() -> Iterator[FlowOutcome]:
    """Record the outcome of the block, which is the body of a flow, for the enclosing `run_flow`, if any."""
    outcome = FlowOutcome()
    find_request().outcome = outcome
    try:
        yield outcome
    except BaseException as error:
        outcome.error = error
        raise
    finally:
        outcome.has_ended = True
        _warn_if_api_silent()


def _warn_if_api_silent() -> None:
    """Warn that a flow takes minutes to end: Prefect retries an API that accepts connections but does not answer."""
    # Imported here, because not all commands run a flow.
    from tasks.pipeline.prefect_stages import REPEAT_TIMEOUT_SECONDS, check_prefect_api

    try:
        check_prefect_api(REPEAT_TIMEOUT_SECONDS)
    except TimeoutError as error:
        logger.warning(
            "Prefect's API does not answer (%s); the run is over, but reporting its end may take some minutes",
            error,
        )
    except OSError:
        return


def run_flow(flow: Callable[[], ResultT], request: RunRequest | None = None) -> ResultT:
    """Call a flow with a request and return its result; raise its own error if Prefect raises another one after it."""
    request = request or RunRequest()
    try:
        with use_request(request):
            return flow()
    except Exception as error:
        outcome = request.outcome
        if outcome is None or not outcome.has_ended or error is outcome.error:
            raise
        api_unreachable.set()
        logger.warning(
            "Prefect's API is unreachable and shows this run as running: %s: %s",
            type(error).__name__,
            error,
        )
        if outcome.error is not None:
            raise outcome.error from None
        result: ResultT = outcome.result
        return result
