"""HTML of reports: the page with its style, tables, and text made safe.

Trajectories hold model output, so every text is escaped by `safe_text`, and the page's CSP forbids scripts and loading.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from rl_core.analysis.report_style import STYLE
from rl_core.analysis.statistics import Difference, Rate

__all__ = ["MISSING", "html_page", "html_table", "percent", "points", "safe_text", "section", "verdict"]

MAX_TEXT = 4000  # characters shown of one action or observation
MISSING = "&ndash;"

_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


def html_page(title: str, body: str, style: str = "") -> str:
    """A page of its own in the report's style; `body` is HTML, `style` further rules."""
    return (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<meta http-equiv='Content-Security-Policy' content=\"{_POLICY}\">"
        f"<title>{safe_text(title)}</title><style>{STYLE}{style}</style></head><body><main><h1>{safe_text(title)}</h1>"
        f"{body}</main></body></html>\n"
    )


def safe_text(value: object, limit: int = MAX_TEXT) -> str:
    """HTML-safe text: markup escaped, control characters and lone surrogates replaced, length capped."""
    text = str(value)
    if len(text) > limit:
        text = f"{text[:limit]}… ({len(text) - limit:,} more characters)"
    text = text.encode("utf-8", "replace").decode("utf-8")
    return escape("".join(c if c in "\n\t" or (c >= " " and c != "\x7f") else "�" for c in text), quote=True)


def html_table(head: Sequence[str], rows: Iterable[Sequence[str]], label: str = "", text_columns: int = 1) -> str:
    """Table of HTML cells; the first `text_columns` columns are text, the others numbers."""

    def cell(tag: str, column: int, content: str) -> str:
        return f"<{tag}{' class=text' if column < text_columns else ''}>{content}</{tag}>"

    heads = "".join(cell("th", column, content) for column, content in enumerate(head))
    body = "".join(
        f"<tr>{''.join(cell('td', column, content) for column, content in enumerate(row))}</tr>" for row in rows
    )
    caption = f"<caption>{label}</caption>" if label else ""
    return f"<div class='scroll'><table>{caption}<thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table></div>"


def section(identity: str, title: str, body: str, kind: str = "") -> str:
    """A section that the contents list links to; "" where there is nothing in it."""
    extra = f" class='{kind}'" if kind else ""
    return f"<section id='{identity}'{extra}><h2>{title}</h2>{body}</section>" if body else ""


def percent(rate: Rate) -> str:
    """Cell of a success rate with its interval."""
    return f"{100 * rate.rate:.1f}% <small>[{100 * rate.low:.1f}, {100 * rate.high:.1f}]</small>"


def verdict(difference: Difference, direction: int = 1) -> str:
    """better or worse where the interval leaves out zero, else same.

    direction: 1 = more is better, -1 = less is; 0 = neither, which is always the same.
    """
    up, down = difference.low > 0, difference.high < 0
    if not direction or not (up or down):
        return "same"
    return "better" if up == (direction > 0) else "worse"


def points(difference: Difference, scale: float = 100, digits: int = 1, direction: int = 1) -> str:
    """Cell of a difference with its interval and, where it leaves out zero, the verdict."""
    d, low, high = (scale * value + 0.0 for value in difference)
    kind = verdict(difference, direction)
    word = f" <span class='{kind}'>{kind}</span>" if kind != "same" else ""
    return f"<span class='{kind}'>{d:+.{digits}f}</span> <small>[{low:+.{digits}f}, {high:+.{digits}f}]</small>{word}"
