"""Main program of a child process: JSON-lines requests on standard input, replies on standard output.

    python -P subprocess_main.py <file that defines start(setup) and handle(request)> <setup and limits as JSON>

Standard library only, without imports from this package, so that it starts quickly and loads no model.
"""

from __future__ import annotations

import faulthandler
import json
import os
import runpy
import sys
from typing import Any


def _limit_memory(gib: float | None) -> None:
    if gib is None:
        return
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (int(gib * 2**30), int(gib * 2**30)))
    except (ImportError, ValueError, OSError):  # not available on every system; the time limit still applies
        pass


def _answer(handle: Any, request: Any) -> dict[str, Any]:
    try:
        return {"value": handle(request)}
    except (Exception, SystemExit) as error:
        return {"error": f"{type(error).__name__}: {error}"[:2000]}


def main(script: str, options: dict[str, Any]) -> None:
    """Serve requests until standard input ends."""
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # output printed by a scorer must not be parsed as a reply
    _limit_memory(options["memory_gib"])

    def send(reply: dict[str, Any]) -> None:
        try:
            line = json.dumps(reply)
        except (TypeError, ValueError) as error:
            line = json.dumps({"error": f"{type(error).__name__}: {error}"})
        channel.write(line + "\n")
        channel.flush()

    try:
        names = runpy.run_path(script)
        names["start"](options["setup"])  # imports and loads data; not counted against the first request
        handle = names["handle"]
    except Exception as error:
        send({"error": f"{type(error).__name__}: {error}"})
        return
    send({"value": "ready"})
    with open(os.devnull, "w") as nowhere:
        for line in sys.stdin:
            # The parent kills a child on timeout; this ends the child if the parent itself was killed.
            faulthandler.dump_traceback_later(options["last_resort_s"], exit=True, file=nowhere)
            send(_answer(handle, json.loads(line)))
            faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
