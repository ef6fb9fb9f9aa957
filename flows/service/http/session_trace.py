"""Timeline of a session's requests as a trace that ui.perfetto.dev and chrome://tracing open.

Trace Event Format (https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU): nestable
asynchronous events, one group for each request, from its acceptance to its end, with the computation within. Requests
of one run lie beside each other where they overlap, so one sees what was in flight while what was computed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flows.service.store import StoredRequest

__all__ = ["session_trace"]

MICRO = 1e6  # the format counts in microseconds


def session_trace(session_id: str, requests: Mapping[str, Sequence[StoredRequest]], now: float) -> dict[str, Any]:
    """The trace. `requests`: by training run or sampler; what is not finished reaches to `now`."""
    events: list[dict[str, Any]] = []
    for process, (target, found) in enumerate(requests.items(), 1):
        events.append({"ph": "M", "name": "process_name", "pid": process, "args": {"name": target}})
        for one in sorted(found, key=lambda request: request.place):
            events += _events(process, one, now)
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"session_id": session_id}}


def _events(process: int, request: StoredRequest, now: float) -> list[dict[str, Any]]:
    """Beginning and end of a request, and of its computation."""
    end = now if request.finished is None else request.finished
    facts = {"request_id": request.request_id, "seq": request.seq, "state": request.state}
    if request.error:
        facts["error"] = request.error
    spans = [(f"{request.kind} {request.seq}", request.accepted, end, facts)]
    if request.started is not None:
        spans.append(("computing", request.started, end, {}))
    same = {"cat": request.kind, "id": request.request_id, "pid": process, "tid": 0}
    begins = [
        {"ph": "b", "name": name, "ts": round(begin * MICRO), "args": args, **same} for name, begin, _, args in spans
    ]
    ends = [{"ph": "e", "name": name, "ts": round(last * MICRO), **same} for name, _, last, _ in reversed(spans)]
    return [*begins, *ends]
