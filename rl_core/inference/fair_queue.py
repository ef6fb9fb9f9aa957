"""A bounded queue whose callers take turns."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator

from rl_core.inference.served_requests import ServedRequest

__all__ = ["FairQueue"]


class FairQueue:
    """Requests in the order of their arrival for each caller; one of each caller in turn.

    A caller with a thousand requests delays another's first one by one request, not by a thousand.
    """

    def __init__(self) -> None:
        self._lines: OrderedDict[str, deque[ServedRequest]] = OrderedDict()  # the next caller first
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[ServedRequest]:
        return (request for line in self._lines.values() for request in line)

    def put(self, request: ServedRequest) -> None:
        """Add a request behind its caller's others; a new caller comes behind all callers."""
        self._lines.setdefault(request.caller, deque()).append(request)
        self._size += 1

    def take(self, fits: Callable[[ServedRequest], bool] = lambda request: True) -> ServedRequest | None:
        """The next request, if it `fits`; None without one."""
        if not self._lines:
            return None
        caller, line = next(iter(self._lines.items()))
        if not fits(line[0]):
            return None
        request = line.popleft()
        self._size -= 1
        self._lines.move_to_end(caller)
        if not line:
            del self._lines[caller]
        return request

    def remove(self, request: ServedRequest) -> bool:
        """Take a request out, wherever it stands. Returns: False = it was not there."""
        line = self._lines.get(request.caller)
        if line is None or request not in line:
            return False
        line.remove(request)
        self._size -= 1
        if not line:
            del self._lines[request.caller]
        return True
