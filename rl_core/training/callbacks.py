"""Interface of a trainer, and callbacks of the training loop.

Callbacks are called after every iteration and every evaluation, and may request a stop.

    def stop_when_solved(event):
        if event.kind == "evaluation" and event.metrics["eval/success_rate"] > 0.95:
            event.stop("solved")

A callback is a callable that takes every event, or an object with `on_iteration(event)`, `on_evaluation(event)`, or
both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from torch import nn

from rl_core.errors import CallbackError, PosttrainError, SettingsError
from rl_core.training.optimizer_step import OptimizerStep
from rl_core.user_code.checks import USER_CODE_ERRORS

# A function of an event, or an object with on_iteration or on_evaluation.
Callback = Callable[["TrainingEvent"], Any] | Any
EVENT_METHODS = {"iteration": "on_iteration", "evaluation": "on_evaluation"}


class Trainer(Protocol):
    """Interface of a trainer. The loop itself saves the model's trainable weights, the optimizer step and global RNGs.

    A trainer may also have a property `finished -> str | None`: the reason to stop training.
    """

    @property
    def model(self) -> nn.Module:
        """The module whose trainable parameters and buffers are saved, and restored from the best evaluation."""

    @property
    def optimizer_step(self) -> OptimizerStep:
        """Owner of the optimizer; `optimizer_step.num_steps` is the x axis of the metrics."""

    def step(self) -> Mapping[str, float]:
        """Run one iteration and return its metrics, fully named (`train/loss`)."""

    def evaluate(self) -> Mapping[str, float]:
        """Return metrics of the current weights on held-out data; nothing that training depends on changes but the RNG.

        With ema_decay the loop has already put the averaged weights into the model, in place.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return everything else that the next step depends on: data order, curriculum, generators, histories."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a `state_dict`."""


@dataclass
class TrainingEvent:
    """The state of training when a callback is called."""

    kind: Literal["iteration", "evaluation"]
    iteration: int  # iterations done
    iterations: int  # maximum number of iterations
    step: int  # optimizer steps done; the x axis of the metrics
    metrics: dict[str, float]  # finite `train/...` values of the iteration, or `eval/...` values
    trainer: Trainer  # its `model` may be read; weights change in place
    stop_reason: str | None = field(default=None, init=False)

    def stop(self, reason: str) -> None:
        """Ask the loop to end after this event, as if it had done all iterations; the outcome reports `reason`."""
        self.stop_reason = str(reason) or "callback"


def check_callbacks(callbacks: Sequence[Callback]) -> tuple[Callback, ...]:
    """Return the callbacks. Raises: SettingsError for an object that cannot be called with an event."""
    for callback in callbacks:
        has_method = any(hasattr(callback, method) for method in EVENT_METHODS.values())
        if not callable(callback) and not has_method:
            raise SettingsError(
                f"callbacks: {callback!r} is neither a function nor an object with on_iteration or on_evaluation"
            )
    return tuple(callbacks)


def call_callbacks(callbacks: Sequence[Callback], event: TrainingEvent) -> None:
    """Call each callback that takes the event.

    Raises: CallbackError naming the callback that raised; a PosttrainError unchanged.
    """
    for callback in callbacks:
        fallback = callback if callable(callback) else None
        function = getattr(callback, EVENT_METHODS[event.kind], fallback)
        if function is None:
            continue
        try:
            function(event)
        except PosttrainError:
            raise
        except USER_CODE_ERRORS as error:  # SystemExit would end the run silently
            raise CallbackError(
                f"callback '{_describe_callback(callback)}' raised {type(error).__name__}: {error} "
                f"(after the {event.kind} of iteration {event.iteration})"
            ) from error


def _describe_callback(callback: Callback) -> str:
    name: Mapping[str, Any] | str | None = getattr(callback, "__qualname__", None)
    return str(name or type(callback).__name__)
