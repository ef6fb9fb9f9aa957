"""A flow in this process whose Prefect API went away: its own outcome counts, not that Prefect could not be told.

Prefect reports the end of a flow to its API, and raises where that does not answer, whatever the flow came to.
"""

from __future__ import annotations

import contextlib
import contextvars
import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

api_unreachable = threading.Event()  # Prefect could not be told how a flow ended

logger = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")


@dataclass
class FlowOutcome:
    """Result or error of a flow's own code."""

    result: Any = None
    error: BaseException | None = None
    has_ended: bool = False


_outcomes: contextvars.ContextVar[list[FlowOutcome] | None] = contextvars.ContextVar(
    "outcomes", default=None
)


@contextlib.contextmanager
def capture_outcome() -> Iterator[FlowOutcome]:
    """Note the outcome of the block, which is the body of a flow, for the `run` that it runs in, if any."""
    outcome, outcomes = FlowOutcome(), _outcomes.get()
    if outcomes is not None:
        outcomes.append(outcome)
    try:
        yield outcome
    except BaseException as error:
        outcome.error = error
        raise
    finally:
        outcome.has_ended = True
        _warn_if_api_silent()


def _warn_if_api_silent() -> None:
    """Say why a flow takes minutes to end: Prefect asks an API that takes connections and is silent several times."""
    from tasks.pipeline.prefect_stages import (  # not for commands that run no flow
        REPEAT_TIMEOUT_SECONDS,
        check_prefect_api,
    )

    try:
        check_prefect_api(REPEAT_TIMEOUT_SECONDS)
    except TimeoutError as error:
        logger.warning(
            "Prefect's API is silent (%s); the run is over, and its end is told for some minutes",
            error,
        )
    except OSError:
        return


def run_flow(flow: Callable[[], ResultT]) -> ResultT:
    """Result of a flow called directly; its own error, where Prefect raises another one after that."""
    outcomes: list[FlowOutcome] = []
    token = _outcomes.set(outcomes)
    try:
        return flow()
    except Exception as error:
        if not outcomes or not outcomes[-1].has_ended or error is outcomes[-1].error:
            raise
        outcome = outcomes[-1]
        api_unreachable.set()
        logger.warning(
            "Prefect's API is away and shows this run as running: %s: %s",
            type(error).__name__,
            error,
        )
        if outcome.error is not None:
            raise outcome.error from None
        result: ResultT = outcome.result
        return result
    finally:
        _outcomes.reset(token)
