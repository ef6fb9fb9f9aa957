"""Callbacks of the training loop: called after every iteration and every evaluation, may ask for a stop.

    def stop_when_solved(event):
        if event.kind == "evaluation" and event.metrics["eval/success_rate"] > 0.95:
            event.stop("solved")

A callback is a callable that takes every event, or an object with `on_iteration(event)`, `on_evaluation(event)`, or
both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from rl_core.errors import CallbackError, PosttrainError, SettingsError

if TYPE_CHECKING:
    from rl_core.training.trainer_protocol import Trainer

__all__ = ["Callback", "TrainingEvent", "call_all", "check_callbacks"]

Callback = Callable[["TrainingEvent"], Any] | Any  # or an object with on_iteration and on_evaluation
METHODS = {"iteration": "on_iteration", "evaluation": "on_evaluation"}


@dataclass
class TrainingEvent:
    """The state of training when a callback is called."""

    kind: Literal["iteration", "evaluation"]
    iteration: int  # iterations done
    iterations: int  # iterations at most
    step: int  # optimizer steps done; the x axis of the metrics
    metrics: dict[str, float]  # of this iteration (`train/...`) or evaluation (`eval/...`), finite values only
    trainer: Trainer  # its `model` may be read; weights change in place
    stop_reason: str | None = field(default=None, init=False)

    def stop(self, reason: str) -> None:
        """Ask the loop to end after this event, as if it had done all iterations; `reason` stands in the outcome."""
        self.stop_reason = str(reason) or "callback"


def check_callbacks(callbacks: Sequence[Callback]) -> tuple[Callback, ...]:
    """The callbacks. Raises: SettingsError for an object that cannot be called with an event."""
    for callback in callbacks:
        if not callable(callback) and not any(hasattr(callback, method) for method in METHODS.values()):
            raise SettingsError(
                f"callbacks: {callback!r} is neither a function nor an object with on_iteration or on_evaluation"
            )
    return tuple(callbacks)


def call_all(callbacks: Sequence[Callback], event: TrainingEvent) -> None:
    """Call each one that takes the event. Raises: CallbackError naming the one that raised; PosttrainErrors as is."""
    for callback in callbacks:
        function = getattr(callback, METHODS[event.kind], callback if callable(callback) else None)
        if function is None:
            continue
        try:
            function(event)
        except PosttrainError:
            raise
        except (Exception, SystemExit) as error:  # SystemExit: a callback must not end the run unnoticed
            raise CallbackError(
                f"callback '{_name(callback)}' raised {type(error).__name__}: {error} "
                f"(after the {event.kind} of iteration {event.iteration})"
            ) from error


def _name(callback: Callback) -> str:
    name: Mapping[str, Any] | str | None = getattr(callback, "__qualname__", None)
    return str(name or type(callback).__name__)
