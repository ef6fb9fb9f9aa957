"""Style sheet of the report, as Python text so that it is part of every installation.

HTML of reports: the page with its style, tables, and text made safe.

Trajectories hold model output, so every text is escaped by `escape_text`, and the page's CSP forbids scripts and
loading.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape

from rl_core.analysis.canvas import select_model_color
from rl_core.analysis.statistics import Difference, Rate

STYLE_SHEET = """
:root{color-scheme:light dark;--ink:#1f2630;--faint:#5d6875;--page:#fbfbfa;--card:#fff;--line:#dde2e8;--tint:#f0f4f8;
--blue:#0060a0;--orange:#b34700;--mark:#fff1d6}
@media (prefers-color-scheme:dark){:root{--ink:#e4e8ed;--faint:#9aa6b3;--page:#15181c;--card:#1d2127;--line:#343b45;
--tint:#262c34;--blue:#6cb8f0;--orange:#ff9d5c;--mark:#463611}}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);font:15px/1.5 system-ui,-apple-system,"Segoe UI",sans-serif}
main{max-width:1080px;margin:0 auto;padding:28px 22px 60px}
h1{font-size:26px;margin:0 0 6px}
h2{font-size:18px;margin:38px 0 10px;padding-bottom:5px;border-bottom:1px solid var(--line)}
h3{font-size:15px;margin:0 0 10px}
h4{font-size:14px;margin:0 0 8px;display:flex;justify-content:space-between;gap:8px}
.lead{font-size:17px;max-width:960px;background:var(--card);border:1px solid var(--line);border-radius:8px;
border-left:5px solid var(--faint);padding:12px 16px}
.is-better{border-left-color:var(--blue)}
.is-worse{border-left-color:var(--orange)}
nav{display:flex;gap:4px 18px;margin:14px -22px 0;padding:8px 22px;font-size:14px;position:sticky;top:0;z-index:3;
background:var(--page);border-bottom:1px solid var(--line);overflow-x:auto;white-space:nowrap;scrollbar-width:thin}
nav a{text-decoration:none}
nav a:hover{text-decoration:underline}
a{color:var(--blue)}
section{scroll-margin-top:46px}
.filters{display:flex;flex-wrap:wrap;gap:8px 20px;margin:0 0 12px}
fieldset{border:0;padding:0;margin:0;display:flex;flex-wrap:wrap;gap:4px 14px;align-items:baseline}
legend{float:left;margin-right:12px;color:var(--faint);font-size:13px}
.filters label{cursor:pointer;font-size:14px}
summary{cursor:pointer}
summary small{margin-left:6px}
details[open]>summary{margin-bottom:10px}
.list{margin:8px 0}
.note{background:var(--mark);padding:8px 12px;border-radius:6px}
.scroll{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums;margin-bottom:12px}
caption{text-align:left;color:var(--faint);padding:4px 0}
th,td{padding:6px 10px;border-bottom:1px solid var(--line);text-align:right;white-space:nowrap}
.text{text-align:left}
thead th{color:var(--faint);font-weight:600;font-size:13px}
tbody tr:hover{background:var(--tint)}
small{color:var(--faint);font-size:12.5px}
.better,.good{color:var(--blue);font-weight:600}
.worse,.bad{color:var(--orange);font-weight:600}
figure{margin:0 0 30px;text-align:center}
figure h3{text-align:left}
figure img{max-width:100%;background:#fff;border:1px solid var(--line);border-radius:8px;padding:8px}
figcaption{color:var(--faint);font-size:13px}
article{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:10px 16px;margin:0 0 10px}
.question{display:flex;gap:16px;align-items:flex-start;margin-bottom:12px}
.question .image{width:180px;max-width:35%;border-radius:6px;image-rendering:pixelated;border:1px solid var(--line)}
.question p{margin:6px 0}
.columns{display:grid;grid-template-columns:repeat(auto-fit,minmax(250px,1fr));gap:14px}
.column{border-left:3px solid var(--line);padding-left:12px;min-width:0}
.dot{display:inline-block;width:10px;height:10px;border-radius:50%;margin-right:7px}
ol{margin:0;padding-left:22px}
li{margin-bottom:8px}
li::marker{color:var(--faint);font-size:12px}
pre{margin:0 0 3px;white-space:pre-wrap;overflow-wrap:anywhere;
font:13px/1.45 ui-monospace,SFMono-Regular,Menlo,monospace}
.action{font-weight:600}
.observation{background:var(--tint);border-radius:5px;padding:4px 8px;max-height:220px;overflow:auto}
.observation.error{border-left:3px solid var(--orange)}
.flag{font-size:12.5px}
.turning{display:inline-block;background:var(--mark);border-radius:4px;padding:0 8px;margin:0 0 4px;font-size:12.5px}
.end{color:var(--faint);font-size:13px;margin:6px 0 0}
dt{font-weight:600}
dd{margin:0 0 8px;color:var(--faint)}
/* the same filter for both: a model has one colour in tables and figures */
@media (prefers-color-scheme:dark){figure img,.dot{filter:invert(.9) hue-rotate(180deg) brightness(1.3)}}
@media (max-width:700px){main{padding:16px 12px 40px}nav{margin:12px -12px 0;padding:8px 12px}
th,td{padding:6px 8px}
tr>:first-child{position:sticky;left:0;background:var(--page);z-index:1;white-space:normal;min-width:104px;
max-width:150px}
.question{flex-direction:column}}
@media print{:root{--ink:#000;--faint:#444;--page:#fff;--card:#fff;--line:#bbb;--tint:#eee;--blue:#00508a;
--orange:#8f3700;color-scheme:light}
body{font-size:11px}main{max-width:none;padding:0}nav,.filters{display:none}
details::details-content{content-visibility:visible;display:block;block-size:auto}
figure img{filter:none;max-height:9cm}.dot{filter:none;print-color-adjust:exact}thead{display:table-header-group}
tr,figure,.column,.lead{break-inside:avoid}h2,h3,summary{break-after:avoid}
.scroll{overflow:visible}th,td{white-space:normal;padding:3px 6px}}
"""


# Titles in the contents, which stay on the screen in one line.
_SHORT_TITLES = {
    "overview": "Measures",
    "comparison": "Pairs",
    "environments": "Environments",
    "levels": "Levels",
    "kinds": "Kinds",
    "reward-model": "Reward model",
    "strategies": "Strategies",
    "episodes": "Episodes",
    "terms": "Terms",
}

MAX_TEXT_CHARACTERS = 4000  # characters shown of one action or observation
MISSING = "&ndash;"

_CONTENT_SECURITY_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


def render_page(title: str, body: str, style: str = "") -> str:
    """Render an HTML page in the report's style; `body` is HTML, `style` further rules."""
    return (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<meta http-equiv='Content-Security-Policy' content=\"{_CONTENT_SECURITY_POLICY}\">"
        f"<title>{escape_text(title)}</title><style>{STYLE_SHEET}{style}</style></head><body><main><h1>{escape_text(title)}</h1>"
        f"{body}</main></body></html>\n"
    )


def escape_text(value: object, limit: int = MAX_TEXT_CHARACTERS) -> str:
    """Escape markup, replace control characters and lone surrogates, cap the length."""
    text = str(value)
    if len(text) > limit:
        text = f"{text[:limit]}… ({len(text) - limit:,} more characters)"
    text = text.encode("utf-8", "replace").decode("utf-8")
    return escape(
        "".join(c if c in "\n\t" or (c >= " " and c != "\x7f") else "�" for c in text), quote=True
    )


def render_text_table(rows: Sequence[Sequence[str]]) -> str:
    """Render a table of texts, the first row as its head; "" without rows."""
    escaped = [[escape_text(cell) for cell in row] for row in rows]
    return render_table(escaped[0], escaped[1:]) if len(escaped) > 1 else ""


def render_table(
    head: Sequence[str], rows: Iterable[Sequence[str]], label: str = "", text_columns: int = 1
) -> str:
    """Render a table of HTML cells; the first `text_columns` columns are text, the others numbers."""

    def cell(tag: str, column: int, content: str) -> str:
        return f"<{tag}{' class=text' if column < text_columns else ''}>{content}</{tag}>"

    heads = "".join(cell("th", column, content) for column, content in enumerate(head))
    body = "".join(
        f"<tr>{''.join(cell('td', column, content) for column, content in enumerate(row))}</tr>"
        for row in rows
    )
    caption = f"<caption>{label}</caption>" if label else ""
    return f"<div class='scroll'><table>{caption}<thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table></div>"


def render_section(identity: str, title: str, body: str, kind: str = "") -> str:
    """Render a section that the contents list links to; "" if it is empty."""
    extra = f" class='{kind}'" if kind else ""
    return f"<section id='{identity}'{extra}><h2>{title}</h2>{body}</section>" if body else ""


def render_contents(titles: Mapping[str, str]) -> str:
    """Render the links to the sections, by identity."""
    links = [
        f"<a href='#{identity}'>{_SHORT_TITLES.get(identity, title)}</a>"
        for identity, title in titles.items()
    ]
    return f"<nav>{''.join(links)}</nav>"


def render_model_name(index: int, name: str) -> str:
    """Render a model's name with a dot in its colour."""
    return f"<span class='dot' style='background:{select_model_color(index)}'></span>{escape_text(name)}"


def format_rate(rate: Rate) -> str:
    """Format a success rate with its interval."""
    return f"{100 * rate.rate:.1f}% <small>[{100 * rate.low:.1f}, {100 * rate.high:.1f}]</small>"


def classify_difference(difference: Difference, direction: int = 1) -> str:
    """Return better or worse if the interval excludes zero, else same.

    direction: 1 = more is better, -1 = less is better; 0 = neither, always same.
    """
    up, down = difference.low > 0, difference.high < 0
    if not direction or not (up or down):
        return "same"
    return "better" if up == (direction > 0) else "worse"


def format_difference(
    difference: Difference, scale: float = 100, digits: int = 1, direction: int = 1
) -> str:
    """Format a difference with its interval and, if that excludes zero, the verdict."""
    d, low, high = (scale * value + 0.0 for value in difference)
    kind = classify_difference(difference, direction)
    word = f" <span class='{kind}'>{kind}</span>" if kind != "same" else ""
    return f"<span class='{kind}'>{d:+.{digits}f}</span> <small>[{low:+.{digits}f}, {high:+.{digits}f}]</small>{word}"
