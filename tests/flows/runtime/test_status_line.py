"""Progress in one line of a terminal, and in occasional lines elsewhere."""

import io

from flows.runtime import terminal
from flows.runtime.terminal import StatusLine


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_has_one_line_that_is_overwritten_and_removed():
    stream = Terminal()
    line = StatusLine(stream)
    line("a")
    line("b")
    line.print_line("stays")
    line("c")
    line.clear_line()
    assert stream.getvalue() == "\r\033[Ka\r\033[Kb\r\033[Kstays\n\r\033[Kc\r\033[K"


def test_elsewhere_a_line_is_printed_occasionally(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(terminal.time, "monotonic", lambda: now[0])
    stream = io.StringIO()
    line = StatusLine(stream)
    for second in range(40):
        now[0] = 100.0 + second
        line(f"second {second}")
    line.print_line("stays")
    line.clear_line()
    assert stream.getvalue().splitlines() == ["second 16", "second 32", "stays"]
