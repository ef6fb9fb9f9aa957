"""Child process of the verifier `math`: one comparison by math-verify a request. See `answer_checks`."""

from __future__ import annotations

from typing import Any


def start(setup: dict[str, Any]) -> None:
    """Import the package, which takes a second."""
    import math_verify  # noqa: F401


def handle(request: dict[str, Any]) -> bool | str:
    """True if the text's answer equals the target; "unreadable target" where nothing is found in that."""
    from math_verify import parse, verify

    target = request["target"]
    # Its own limits are kept by signals and give no answer; the parent's end the process.
    wanted = parse(target, parsing_timeout=None) or parse(f"${target}$", parsing_timeout=None)
    if not wanted:
        return "unreadable target"
    return bool(verify(wanted, parse(request["text"], parsing_timeout=None), timeout_seconds=None))
