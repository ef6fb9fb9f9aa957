"""Text in a terminal is wrapped between words; elsewhere it is not wrapped."""

import pytest

from flows.runtime.progress import wrap_to_terminal


@pytest.fixture
def terminal(monkeypatch):
    for name in ("TTY_COMPATIBLE", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("FORCE_COLOR", "1")  # what rich takes for a terminal


def test_long_lines_are_wrapped_below_their_indent(terminal):
    text = "short\n    posttrain itself: code 684844bd953e -> 4182712bb9a1\n\nend"
    assert (
        wrap_to_terminal(text)
        == "short\n    posttrain itself: code 684844bd953e\n      -> 4182712bb9a1\n\nend"
    )


def test_text_without_spaces_is_not_wrapped(terminal):
    link = "http://127.0.0.1:5000/#/experiments/1/runs/0123456789abcdef"
    assert wrap_to_terminal(f"page of the newest: {link}").splitlines() == [
        "page of the newest:",
        f"  {link}",
    ]


def test_a_pipe_gets_the_lines_unwrapped(monkeypatch):
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    monkeypatch.setenv("COLUMNS", "40")
    assert wrap_to_terminal("a " * 60) == "a " * 60
