"""Interface of the slots in which one set of weights answers requests: `served_slots` and `served_rows` have it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from rl_core.inference.served_requests import Progress, ServedRequest

__all__ = ["OpenSlots", "RequestSlots"]


class RequestSlots(Protocol):
    """Interface of `ServedSlots` and `ServedRows`: the requests that one set of weights answers."""

    capacity: int
    free: int
    is_empty: bool
    requests: list[ServedRequest]
    can_step: bool

    def held(self) -> list[tuple[ServedRequest, int]]:
        """Requests in slots, with the tokens sampled since they took them."""

    def admit(self, requests: Sequence[ServedRequest]) -> None:
        """Begin requests."""

    def remove(self, request: ServedRequest) -> None:
        """Free a request's slot."""

    def park(self, request: ServedRequest) -> None:
        """Free a request's slot and keep its place."""

    def resume(self, request: ServedRequest) -> None:
        """Take a parked request up again."""

    def may_resume(self, request: ServedRequest) -> bool:
        """False = a slot would be of no use to a parked request."""

    def step(self) -> tuple[list[ServedRequest], list[Progress]]:
        """One decoding step."""

    def release(self) -> None:
        """Let go of memory."""


OpenSlots = Callable[[Callable[[], None]], RequestSlots]  # is given `wake`; opens slots over weights
