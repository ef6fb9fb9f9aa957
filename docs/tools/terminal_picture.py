"""Animated SVG of a command in a terminal, from the command's own output.

    posttrain run real 2>&1 | tee run.log
    python docs/tools/terminal_picture.py run.log tests/benchmarks/pictures/terminal.svg --command "posttrain run real"

Progress lines of a stage replace each other, as on a terminal; all other lines stay. A viewer that prefers less motion
sees the last picture at rest. No script runs in the file, and it loads nothing.
"""

from __future__ import annotations

import argparse
import html
import re
import sys
from dataclasses import dataclass
from pathlib import Path

ROW_HEIGHT, COLUMN_WIDTH, MARGIN = 19, 7.83, 16  # pixels
COLUMNS = 98
HOLD_SECONDS = 8.0  # the end stays
PROGRESS_SECONDS, LINE_SECONDS = 0.45, 0.12
_PROGRESS = re.compile(r"^(?:stage \d+/\d+ |evaluate )?([\w ]+): \d+/\d+")
_LEFT_OUT = re.compile(
    r"^(?:\S*posttrain run|files|output |results|Files|Output |Logs|Pages|Web UI|real\t|user\t|sys\t)"
)
_FIGURE = re.compile(r"(?<![\d.(])([+-]?\d+(?:\.\d+)?%|[+-]\d+\.\d+ points)")


@dataclass
class Line:
    """Text on a row, visible from `start` to `end` seconds; end None = until the end."""

    text: str
    row: int
    start: float
    end: float | None = None


def main(arguments: list[str] | None = None) -> int:
    """Write the picture."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("log", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--command", required=True, help="shown after the prompt")
    options = parser.parse_args(arguments)
    lines, seconds = place_lines(
        options.log.read_text(encoding="utf-8").splitlines(), options.command
    )
    options.picture.write_text(draw_svg(lines, seconds), encoding="utf-8")
    return 0


def place_lines(output: list[str], command: str) -> tuple[list[Line], float]:
    """Place the command and its output on rows and in time; return them and the total seconds."""
    lines = [Line(f"$ {command}", 0, 0.0)]
    clock, stage = 0.8, ""
    for text in output:
        if not text.strip() or _LEFT_OUT.match(text):
            continue
        progress = _PROGRESS.match(text)
        if progress and progress[1] == stage:
            lines[-1].end = clock
            row = lines[-1].row
        else:
            row = lines[-1].row + 1
        for number, part in enumerate(wrap_text(text)):
            lines.append(Line(part, row + number, clock))
        stage = progress[1] if progress else ""
        clock += PROGRESS_SECONDS if progress else LINE_SECONDS
    return lines, clock + HOLD_SECONDS


def wrap_text(text: str) -> list[str]:
    """Break a text between words at COLUMNS; further lines are indented."""
    if len(text) <= COLUMNS:
        return [text]
    end = text.rfind(" ", 0, COLUMNS)
    return [text[:end], *("    " + part for part in wrap_text(text[end + 1 :]))]


def draw_svg(lines: list[Line], seconds: float) -> str:
    """Draw the lines as an SVG whose style sheet shows each one in its time."""
    rows = max(line.row for line in lines) + 1
    width = round(COLUMNS * COLUMN_WIDTH + 2 * MARGIN)
    height = (rows + 1) * ROW_HEIGHT + 2 * MARGIN
    rules, texts = [], []
    for number, line in enumerate(lines):
        start, end = (100 * moment / seconds for moment in (line.start, line.end or seconds))
        hidden_again = f"{end:.2f}%,100%{{opacity:0}}" if line.end else "100%{opacity:1}"
        before = f"0%,{max(start - 0.01, 0):.2f}%{{opacity:0}}" if line.start else ""
        rules.append(
            f"@keyframes k{number}{{{before}{start:.2f}%{{opacity:1}}"
            + (f"{end - 0.01:.2f}%{{opacity:1}}" if line.end else "")
            + f"{hidden_again}}}#l{number}{{animation:k{number} {seconds:.1f}s infinite step-end}}"
        )
        resting = ' class="past"' if line.end else ""
        y = MARGIN + (line.row + 1) * ROW_HEIGHT
        shown = _FIGURE.sub(
            r'<tspan class="figure">\1</tspan>', html.escape(line.text, quote=False)
        )
        kind = ' class="prompt"' if line.text.startswith("$ ") else resting
        texts.append(
            f'<text id="l{number}" x="{MARGIN}" y="{y}" xml:space="preserve"{kind}>{shown}</text>'
        )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" aria-label="{html.escape(lines[0].text[2:])} in a terminal">\n'
        "<style>text{font:13px ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace;fill:#d4d8de}"
        ".prompt{fill:#8fd18f}.figure{fill:#f0c674}"
        + "".join(rules)
        + "@media(prefers-reduced-motion:reduce){text{animation:none!important}.past{opacity:0}}</style>\n"
        f'<rect width="{width}" height="{height}" rx="8" fill="#1d2026"/>\n'
        + "\n".join(texts)
        + "\n</svg>\n"
    )


if __name__ == "__main__":
    sys.exit(main())
