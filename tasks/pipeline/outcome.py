"""Exceptions that stop a run rather than fail it."""

from __future__ import annotations

import sys

from rl_core.errors import Stopped

__all__ = ["STOP_SECONDS", "is_stop"]

STOP_SECONDS = 1.5  # for the tracking store, of the few that a preempted run has; the rest waits in the journal


def is_stop(error: BaseException | None) -> bool:
    """True = somebody stopped the run: Ctrl-C, SIGTERM in or outside a flow (Prefect has an exception of its own)."""
    prefect = sys.modules.get("prefect.exceptions")  # it can only have raised where it was imported
    kinds = (Stopped, KeyboardInterrupt, SystemExit, *([prefect.TerminationSignal] if prefect else []))
    return isinstance(error, kinds)
