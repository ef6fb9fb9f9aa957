"""Interface of a trainer, as the training loop uses it.

Callbacks of the training loop: called after every iteration and every evaluation, may ask for a stop.

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


class Trainer(Protocol):
    """Interface of a trainer. The loop itself saves the model's trainable weights, the optimizer step and global RNGs.

    A trainer may also have a property `finished -> str | None`: the reason why it wants no further iteration.
    """

    @property
    def model(self) -> nn.Module:
        """The module whose trainable parameters and buffers are saved, and restored from the best evaluation."""

    @property
    def optimizer_step(self) -> OptimizerStep:
        """Owner of the optimizer; `optimizer_step.num_steps` is the x axis of the metrics."""

    def step(self) -> Mapping[str, float]:
        """One iteration; its metrics, fully named (`train/loss`)."""

    def evaluate(self) -> Mapping[str, float]:
        """Metrics of the present weights on held-out data; changes nothing that training depends on but the RNG.

        With ema_decay the loop has put the averaged weights into the model, in place.
        """

    def state_dict(self) -> dict[str, Any]:
        """Everything else that the next step depends on: data order, curriculum, own generators, histories."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state_dict`."""


Callback = (
    Callable[["TrainingEvent"], Any] | Any
)  # or an object with on_iteration and on_evaluation
EVENT_METHODS = {"iteration": "on_iteration", "evaluation": "on_evaluation"}


@dataclass
class TrainingEvent:
    """The state of training when a callback is called."""

    kind: Literal["iteration", "evaluation"]
    iteration: int  # iterations done
    iterations: int  # iterations at most
    step: int  # optimizer steps done; the x axis of the metrics
    metrics: dict[
        str, float
    ]  # of this iteration (`train/...`) or evaluation (`eval/...`), finite values only
    trainer: Trainer  # its `model` may be read; weights change in place
    stop_reason: str | None = field(default=None, init=False)

    def stop(self, reason: str) -> None:
        """Ask the loop to end after this event, as if it had done all iterations; `reason` stands in the outcome."""
        self.stop_reason = str(reason) or "callback"


def check_callbacks(callbacks: Sequence[Callback]) -> tuple[Callback, ...]:
    """The callbacks. Raises: SettingsError for an object that cannot be called with an event."""
    for callback in callbacks:
        if not callable(callback) and not any(
            hasattr(callback, method) for method in EVENT_METHODS.values()
        ):
            raise SettingsError(
                f"callbacks: {callback!r} is neither a function nor an object with on_iteration or on_evaluation"
            )
    return tuple(callbacks)


def call_callbacks(callbacks: Sequence[Callback], event: TrainingEvent) -> None:
    """Call each one that takes the event. Raises: CallbackError naming the one that raised; PosttrainErrors as is."""
    for callback in callbacks:
        function = getattr(
            callback, EVENT_METHODS[event.kind], callback if callable(callback) else None
        )
        if function is None:
            continue
        try:
            function(event)
        except PosttrainError:
            raise
        except (
            Exception,
            SystemExit,
        ) as error:  # SystemExit: a callback must not end the run unnoticed
            raise CallbackError(
                f"callback '{_describe_callback(callback)}' raised {type(error).__name__}: {error} "
                f"(after the {event.kind} of iteration {event.iteration})"
            ) from error


def _describe_callback(callback: Callback) -> str:
    name: Mapping[str, Any] | str | None = getattr(callback, "__qualname__", None)
    return str(name or type(callback).__name__)
