"""Request of a command to the flow that it calls in this process, in addition to the flow's parameters.

Prefect stores the parameters as JSON. Settings with secrets, the terminal's display, and what concerns only this call
therefore reach the flow through one context variable, which also works in the threads and tasks of the flow.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flows.runtime.progress import ProgressDisplay
    from tasks.config import PipelineSettings
    from tasks.pipeline.stage_key import StageKeys


@dataclass
class FlowOutcome:
    """Result or error of a flow's own code."""

    result: Any = None
    error: BaseException | None = None
    has_ended: bool = False


@dataclass(kw_only=True)
class RunRequest:
    """Request of a command to the flow that it calls, and the outcome that the flow reports besides its result."""

    # Checked, with secrets; the flow does not check them again.
    settings: PipelineSettings | None = None
    keys: StageKeys | None = None  # of these settings, as far as the command has collected them
    overrides: Sequence[str] = ()  # that the settings already contain, for the flow run's name
    started: str = ""  # start time of the run of this pipeline to resume
    restart: bool = False  # restart its unfinished stage
    sweep: Any = None  # the request of a sweep's flow
    display: ProgressDisplay | None = None  # on the terminal
    outcome: FlowOutcome | None = None  # of the flow that began last


_request: ContextVar[RunRequest | None] = ContextVar("_request", default=None)


def find_request() -> RunRequest:
    """Return the request of the command that called the flow; an empty one in a deployment's run."""
    return _request.get() or RunRequest()


@contextlib.contextmanager
def use_request(request: RunRequest) -> Iterator[None]:
    """Let flows called within the block receive the request."""
    token = _request.set(request)
    try:
        yield
    finally:
        _request.reset(token)
