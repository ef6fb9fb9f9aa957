"""Scalars that an accelerator hands to the host, and checks that wait for such a read.

Reading a number from an accelerator stops the host until all kernels before it have run, and the accelerator then
waits for the next ones. An optimizer step therefore reads its metrics, its gradient norm and the outcome of all checks
in one transfer (`read_scalars`). Within `defer_checks`, a check of a tensor on an accelerator adds its outcome, still
on the device, to a list; on a CPU, where a read costs nothing, it raises immediately.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

from rl_core.errors import DataError, NonFiniteTensor

_active: ContextVar[DeferredChecks | None] = ContextVar("deferred_checks", default=None)


class DeferredChecks:
    """Outcomes of checks on an accelerator, in the order in which they would have been raised."""

    def __init__(self) -> None:
        self.part = 0  # micro-batch that is being computed; set by the step
        self._outcomes: list[torch.Tensor] = []  # bool [K] each, True = the check holds
        self._checks: list[tuple[int, Callable[[], DataError]]] = []  # (part, error) of each entry

    def add_check(
        self, outcomes_K: torch.Tensor, errors: Sequence[Callable[[], DataError]]
    ) -> None:
        """Add K outcomes (True = it holds) with a function for each that builds the error."""
        self._outcomes.append(outcomes_K)
        self._checks += [(self.part, error) for error in errors]

    def clear_checks(self) -> None:
        """Forget all outcomes: the passes that they belong to are repeated."""
        self.part = 0
        self._outcomes, self._checks = [], []

    def stack_outcomes(self) -> list[torch.Tensor]:
        """Return the outcomes as scalars on the device, one tensor each, for `read_scalars`."""
        return [outcome for outcomes_K in self._outcomes for outcome in outcomes_K.unbind()]

    def find_failure(self, values: Sequence[float]) -> tuple[int, DataError] | None:
        """Return micro-batch and error of the first check that failed, from the values of `stack_outcomes`."""
        for value, (part, build_error) in zip(values, self._checks, strict=True):
            if not value:
                return part, build_error()
        return None

    def raise_failure(self) -> None:
        """Read the outcomes and raise the error of the first check that failed."""
        failure = self.find_failure(read_scalars(self.stack_outcomes()))
        if failure is not None:
            raise failure[1]


@contextmanager
def defer_checks() -> Iterator[DeferredChecks]:
    """Collect the checks of tensors on accelerators inside the context; the caller reads and raises them."""
    checks = DeferredChecks()
    token = _active.set(checks)
    try:
        yield checks
    finally:
        _active.reset(token)


def find_deferred_checks(tensor: torch.Tensor) -> DeferredChecks | None:
    """Return the list that checks of this tensor are added to; None = check it now."""
    return _active.get() if tensor.device.type != "cpu" else None


def check_condition(holds: torch.Tensor, build_error: Callable[[], DataError]) -> None:
    """Raise the error unless the bool scalar is True; on an accelerator within `defer_checks`, later."""
    checks = find_deferred_checks(holds)
    if checks is not None:
        checks.add_check(holds.reshape(1), [build_error])
    elif not bool(holds):
        raise build_error()


def defer_finite_check(tensors: Mapping[str, torch.Tensor]) -> bool:
    """Add a check that all values of these detached tensors are finite; return False if it must be made now.

    A deferred check does not look for the position: the tensors are freed before it is read.
    """
    checks = find_deferred_checks(next(iter(tensors.values()))) if tensors else None
    if checks is None:
        return False
    outcomes = torch.stack([torch.isfinite(tensor).all() for tensor in tensors.values()])
    checks.add_check(outcomes, [_build_finite_error(name) for name in tensors])
    return True


def _build_finite_error(name: str) -> Callable[[], DataError]:
    return lambda: NonFiniteTensor(f"{name}: some values are not finite")


def read_scalars(values: Sequence[Any]) -> list[float]:
    """Return numbers and scalar tensors as floats, with one read for all tensors of an accelerator.

    Every value equals `float(value)`: float64 holds each float32, half and bool exactly.
    """
    floats: list[float] = [0.0] * len(values)
    groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for index, value in enumerate(values):
        if isinstance(value, torch.Tensor) and value.device.type != "cpu":
            groups.setdefault((value.device, value.dtype), []).append(index)
        else:
            floats[index] = float(value)
    for device in dict.fromkeys(device for device, _ in groups):
        indices = [index for key, group in groups.items() if key[0] == device for index in group]
        stacks = [
            torch.stack([values[index].detach().reshape(()) for index in group])
            for key, group in groups.items()
            if key[0] == device
        ]
        if device.type == "cuda":
            numbers = torch.cat([stack.double() for stack in stacks]).tolist()
        else:  # devices without float64
            numbers = [number for stack in stacks for number in stack.tolist()]
        for index, number in zip(indices, numbers, strict=True):
            floats[index] = float(number)
    return floats


def read_nested_scalars(nested: Any) -> Any:
    """Return nested lists, tuples and dicts with every scalar tensor as a float, with one read for all of them."""
    leaves: list[torch.Tensor] = []

    def collect(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            leaves.append(value)
        elif isinstance(value, Mapping):
            for item in value.values():
                collect(item)
        elif isinstance(value, list | tuple):
            for item in value:
                collect(item)

    collect(nested)
    numbers = iter(read_scalars(leaves))

    def replace(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return next(numbers)
        if isinstance(value, Mapping):
            return {name: replace(item) for name, item in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(replace(item) for item in value)
        return value

    return replace(nested)
