"""Child process of the verifier `math`: one comparison by math-verify per request. See `answer_checks`."""

from __future__ import annotations

from typing import Any


def start(setup: dict[str, Any]) -> None:
    """Import the package, which takes a second."""
    import math_verify  # noqa: F401


def handle(request: dict[str, Any]) -> bool | str:
    """Compare the text's answer with the target; "unreadable target" if math-verify finds nothing in the target."""
    from math_verify import parse, verify

    target = request["target"]
    # The package's time limits use signals and give no answer; the parent's limit ends the process.
    expected = parse(target, parsing_timeout=None) or parse(f"${target}$", parsing_timeout=None)
    if not expected:
        return "unreadable target"
    return bool(
        verify(expected, parse(request["text"], parsing_timeout=None), timeout_seconds=None)
    )
