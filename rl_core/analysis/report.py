"""Self-contained HTML report, with light and dark colour schemes.

Trajectories hold model output, so every text is escaped by `_text`, and the page's CSP forbids scripts and loading.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from rl_core.analysis.canvas import color_of
from rl_core.analysis.comparison import Comparison
from rl_core.analysis.glossary import GLOSSARY, MEASURES
from rl_core.analysis.report_style import STYLE
from rl_core.analysis.results import Analysis, Case, ModelResult
from rl_core.analysis.statistics import Difference, Rate
from rl_core.analysis.summary import NO_CALL
from rl_core.types import Trajectory, Turn

__all__ = ["html_page", "html_table", "render", "safe_text"]

MAX_TEXT = 4000  # characters shown of one action or observation

_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


def render(analysis: Analysis, figures: Sequence[tuple[Path, str]], title: str = "Trajectory analysis") -> str:
    """HTML page.

    Args:
        figures: (PNG file, caption) in order; the images are embedded.
    """
    parts = [
        _headline(analysis),
        "".join(f"<p class='note'>{_text(note)}</p>" for note in analysis.notes),
        _overview(analysis.models),
        _comparisons(analysis.comparisons),
        _reward_model(analysis),
        _pictures(figures),
        _rates("Success by level", [(m.name, m.by_level) for m in analysis.models], "Level"),
        _rates("Success by kind of question", [(m.name, m.by_kind) for m in analysis.models], "Kind"),
        _tools(analysis.models),
        _loops(analysis.models),
        _regressions(analysis.comparisons),
        _cases(analysis),
        "<section><h2>How to read this</h2><dl>",
        "".join(f"<dt>{name}</dt><dd>{meaning}</dd>" for name, meaning in GLOSSARY),
        "</dl></section>",
    ]
    return html_page(title, "".join(parts))


def html_page(title: str, body: str) -> str:
    """A page of its own in the report's style; `body` is HTML."""
    return (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<meta http-equiv='Content-Security-Policy' content=\"{_POLICY}\">"
        f"<title>{safe_text(title)}</title><style>{STYLE}</style></head><body><main><h1>{safe_text(title)}</h1>"
        f"{body}</main></body></html>\n"
    )


def safe_text(value: object, limit: int = MAX_TEXT) -> str:
    """HTML-safe text: markup escaped, control characters and lone surrogates replaced, length capped."""
    text = str(value)
    if len(text) > limit:
        text = f"{text[:limit]}… ({len(text) - limit:,} more characters)"
    text = text.encode("utf-8", "replace").decode("utf-8")
    return escape("".join(c if c in "\n\t" or (c >= " " and c != "\x7f") else "�" for c in text), quote=True)


def _percent(rate: Rate) -> str:
    return f"{100 * rate.rate:.1f}% <small>[{100 * rate.low:.1f}, {100 * rate.high:.1f}]</small>"


def _points(difference: Difference, scale: float = 100, digits: int = 1) -> str:
    d, low, high = (scale * value + 0.0 for value in difference)
    kind = "better" if low > 0 else "worse" if high < 0 else "same"
    return f"<span class='{kind}'>{d:+.{digits}f}</span> <small>[{low:+.{digits}f}, {high:+.{digits}f}]</small>"


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


_text, _table = safe_text, html_table  # short names for the strings below


def _headline(analysis: Analysis) -> str:
    last = analysis.models[-1]
    text = (
        f"<b>{_text(last.name)}</b> succeeds in <b>{100 * last.total.rate:.1f}%</b> of {last.total.n:,} attempts at "
        f"{last.episodes:,} episodes (95% interval {100 * last.total.low:.1f} to {100 * last.total.high:.1f}%)"
    )
    for pair in analysis.comparisons:
        if pair.second == last.name:
            d = pair.total.success
            verdict = "better than" if d.low > 0 else "worse than" if d.high < 0 else "not clearly different from"
            text += (
                f". It is <b>{verdict} {_text(pair.first)}</b>: {100 * d.difference:+.1f} points [{100 * d.low:+.1f}, "
                f"{100 * d.high:+.1f}] on the {pair.total.episodes:,} common episodes"
            )
    return f"<p class='lead'>{text}.</p>"


def _overview(models: Sequence[ModelResult]) -> str:
    ks = sorted({k for model in models for k in model.pass_at_k if k > 1})
    metrics = [model.metrics() for model in models]
    rows: list[list[str]] = [
        ["Success (95% interval)", *(_percent(model.total) for model in models)],
        *(
            [f"pass@{k}", *(f"{100 * m.pass_at_k[k]:.1f}%" if k in m.pass_at_k else "&ndash;" for m in models)]
            for k in ks
        ),
        ["Episodes &times; samples", *(f"{m.episodes:,} &times; {m.total.n / m.episodes:.3g}" for m in models)],
        *(
            [label, *(form.format(row[name]) if name in row else "&ndash;" for row in metrics)]
            for name, label, form in (*MEASURES, *_own(models[0]))
            if any(name in row for row in metrics)
        ),
    ]
    return (
        f"<section><h2>Overview</h2>{_table(['', *(_named(n, m.name) for n, m in enumerate(models))], rows)}</section>"
    )


def _own(model: ModelResult) -> list[tuple[str, str, str]]:
    """Measures of the user's, as those of the glossary."""
    return [(name, _text(measure.label), "{:.3f}") for name, (measure, _) in model.summary.own.items()]


def _named(index: int, name: str) -> str:
    """Model name with a dot in its colour."""
    return f"<span class='dot' style='background:{color_of(index)}'></span>{_text(name)}"


def _reward_model(analysis: Analysis) -> str:
    found = analysis.probes.reward_model
    if found is None:
        return ""
    accuracy = _percent(found.accuracy) if found.accuracy else "&ndash;"

    def number(value: float | None) -> str:
        return "&ndash;" if value is None else f"{value:.3f}"

    row = [
        f"{len(found.scores):,}", f"{found.pairs:,}", accuracy, number(found.ece), number(found.auc),
        number(found.correlation),
    ]  # fmt: skip
    head = ["Episodes scored", "Pairs", "Ranked correctly", "Calibration error", "AUC", "Correlation with success"]
    return f"<section><h2>Reward model against true success</h2>{_table(head, [row], text_columns=0)}</section>"


def _comparisons(comparisons: Sequence[Comparison]) -> str:
    if not comparisons:
        return ""
    rows = []
    for pair in comparisons:
        total = pair.total
        p_value = "&lt; 0.001" if pair.p_value < 0.001 else f"{pair.p_value:.3f}"
        rows.append([
            f"{_text(pair.second)} &minus; {_text(pair.first)}", _points(total.success), _points(pair.reward, 1, 3),
            f"{total.episodes:,}", f"{total.wins:,}", f"{total.losses:,}", p_value,
        ])  # fmt: skip
    head = ["Difference", "Success, points", "Reward", "Episodes", "Better on", "Worse on", "Sign test p"]
    return f"<section><h2>Paired comparison</h2>{_table(head, rows)}</section>"


def _pictures(figures: Sequence[tuple[Path, str]]) -> str:
    shown = ""
    for path, caption in figures:
        data = path.read_bytes()
        width = int.from_bytes(data[16:20], "big") // 1.5  # PNG header; one scale for all figures, hence one font size
        shown += (
            f"<figure><img alt='{_text(caption)}' width='{width:.0f}' "
            f"src='data:image/png;base64,{base64.b64encode(data).decode()}'><figcaption>{_text(caption)}</figcaption></figure>"
        )
    return f"<section><h2>Figures</h2>{shown}</section>" if shown else ""


def _rates(title: str, models: Sequence[tuple[str, dict[str, Rate]]], head: str) -> str:
    groups = list(dict.fromkeys(name for _, rates in models for name in rates))
    rows = [
        [_text(group), *(_percent(rates[group]) if group in rates else "&ndash;" for _, rates in models)]
        for group in groups
    ]
    return f"<section><h2>{title}</h2>{_table([head, *(_text(name) for name, _ in models)], rows)}</section>"


def _tools(models: Sequence[ModelResult]) -> str:
    rows = []
    for model in models:
        tools = list(model.summary.tools.values())
        total = sum(t.trajectories for t in tools)
        for name in [*model.summary.tool_names(), NO_CALL]:
            calls, errors = sum(t.calls[name] for t in tools), sum(t.errors[name] for t in tools)
            if calls or errors:
                share = f"{100 * errors / calls:.1f}%" if calls else "&ndash;"
                rows.append(
                    [_text(model.name), _text(name), f"{calls:,}", f"{calls / total:.2f}", f"{errors:,}", share]
                )
    if not rows:
        return ""
    head = ["Model", "Tool", "Calls", "Per episode", "Misuse", "Share of calls"]
    return f"<section><h2>Tools</h2>{_table(head, rows, text_columns=2)}</section>"


def _loops(models: Sequence[ModelResult]) -> str:
    rows = []
    for model in models:
        total = max(1, model.summary.trajectories)
        for strategy, count in model.summary.strategies.most_common(5):
            rows.append([_text(model.name), _text(strategy, 120), f"{count:,}", f"{100 * count / total:.1f}%"])
    loops = [
        f"{_text(model.name)}: {sum(model.summary.loop_periods.values()):,} ("
        + ", ".join(f"{count:,} of period {period}" for period, count in sorted(model.summary.loop_periods.items()))
        + ")"
        for model in models
        if model.summary.loop_periods
    ]
    said = f"Episodes with loops: {'; '.join(loops)}." if loops else "No episode repeated a state-action cycle."
    head = ["Model", "Sequence of actions", "Episodes", "Share"]
    return f"<section><h2>Strategies and loops</h2><p>{said}</p>{_table(head, rows, text_columns=2)}</section>"


def _regressions(comparisons: Sequence[Comparison]) -> str:
    parts = []
    for pair in comparisons:
        rows = [
            [
                f"{_text(e.level)} / {e.seed}", _text(e.kind), f"{100 * e.success[0]:.0f}% → {100 * e.success[1]:.0f}%",
                f"{e.reward[0]:.3f} → {e.reward[1]:.3f}",
            ]
            for e in pair.regressions
        ]  # fmt: skip
        if rows:
            label = f"{_text(pair.second)} does worse than {_text(pair.first)} on {pair.total.losses:,} episodes"
            parts.append(_table(["Level / seed", "Kind", "Success", "Reward"], rows, label, text_columns=2))
    return f"<section><h2>Worst regressions</h2>{''.join(parts)}</section>" if parts else ""


def _cases(analysis: Analysis) -> str:
    if not analysis.cases:
        return ""
    names = [model.name for model in analysis.models]
    shown = "".join(_case(case, names) for case in analysis.cases)
    return f"<section class='wide'><h2>Episodes side by side</h2>{shown}</section>"


def _case(case: Case, names: Sequence[str]) -> str:
    episode, first = case.episode, case.trajectories[0]
    image = ""
    if case.image is not None:
        data = base64.b64encode(case.image).decode()
        image = f"<img class='image' alt='the hidden image' src='data:image/png;base64,{data}'>"
    columns = []
    for index, (name, trajectory) in enumerate(zip(names, case.trajectories, strict=True)):
        turn = case.turning_points[index] if index else case.first_turning_point
        columns.append(_column(index, name, trajectory, turn))
    target = f"<p><b>Right answer</b> {_text(first.target)}</p>" if first.target else ""
    return (
        f"<article><h3>{_text(episode.level)} · {_text(episode.kind)} · seed {episode.seed}</h3><div class='question'>"
        f"{image}<div><pre>{_text(first.prompt)}</pre>{target}</div></div>"
        f"<div class='columns'>{''.join(columns)}</div></article>"
    )


def _column(index: int, name: str, trajectory: Trajectory, turning: int | None) -> str:
    outcome = "<span class='good'>✓ success</span>" if trajectory.success else "<span class='bad'>✗ failure</span>"
    answer = "none" if trajectory.answer is None else _text(trajectory.answer, 200)
    turns = "".join(_turn(number, turn, number == turning) for number, turn in enumerate(trajectory.turns))
    ended_early = turning is not None and turning >= len(trajectory.turns)
    end = "<p class='turning'>turning point: it ends here</p>" if ended_early else ""
    return (
        f"<div class='column'><h4><span>{_named(index, name)}</span> {outcome}</h4><ol>{turns}</ol>{end}"
        f"<p class='end'>answer: <b>{answer}</b> · reward {trajectory.reward:.3f} · {_text(trajectory.stop_reason)}</p>"
        "</div>"
    )


def _turn(number: int, turn: Turn, turning: bool) -> str:
    mark = "<p class='turning'>turning point</p>" if turning else ""
    error = " error" if turn.is_error else ""
    observation = ""
    if turn.observation is not None:
        observation = f"<pre class='observation{error}'>{_text(turn.observation)}</pre>"
    flag = "<span class='bad flag'>misuse</span>" if turn.is_error else ""
    return f"<li value='{number + 1}'>{mark}<pre class='action'>{_text(turn.action)}</pre>{flag}{observation}</li>"
