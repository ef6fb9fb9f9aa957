"""Prefect's state of a flow run that was asked to stop: Stopped, neither Failed nor Crashed."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from rl_core.errors import Stopped

if TYPE_CHECKING:
    from prefect.client.schemas.objects import FlowRun, State

__all__ = ["name_stopped"]

logger = logging.getLogger(__name__)


def name_stopped(flow: Any, flow_run: FlowRun, state: State[Any]) -> None:
    """Hook of a flow that failed or crashed: one that was stopped becomes Cancelled, under the name Stopped.

    That is the word of the terminal, of the live page and of `posttrain runs` for the same run.
    """
    error = state.data if isinstance(state.data, BaseException) else None
    if error is None:
        found = state.result(raise_on_failure=False)
        error = found if isinstance(found, BaseException) else None
    if not isinstance(error, Stopped | KeyboardInterrupt):
        return
    from prefect.client.orchestration import get_client
    from prefect.states import Cancelled

    message = f"{error}" or "stopped; the same command resumes from the last checkpoint"
    try:
        with get_client(sync_client=True) as client:
            client.set_flow_run_state(flow_run.id, Cancelled(name="Stopped", message=message), force=True)
    except Exception as failure:  # the run has ended as it should; only its page says another word
        logger.debug("Prefect was not told that the run was stopped: %s", failure)
