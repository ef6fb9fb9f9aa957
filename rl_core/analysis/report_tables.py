"""Tables of the report: all models beside each other, with the last one's difference from the first."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from rl_core.analysis.canvas import color_of
from rl_core.analysis.comparison import Comparison
from rl_core.analysis.glossary import DIRECTIONS, MEASURES
from rl_core.analysis.report_html import MISSING, html_table, percent, points, safe_text
from rl_core.analysis.results import Analysis, ModelResult
from rl_core.analysis.statistics import Rate
from rl_core.analysis.summary import NO_CALL

__all__ = [
    "comparisons_table",
    "loops_table",
    "main_pair",
    "named",
    "overview",
    "rates_table",
    "reward_model_table",
    "tools_table",
]

_text, _table = safe_text, html_table  # short names for the strings below


def main_pair(analysis: Analysis) -> Comparison | None:
    """The last model against the first; None where there is one model."""
    first, last = analysis.models[0].name, analysis.models[-1].name
    return next((pair for pair in analysis.comparisons if (pair.first, pair.second) == (first, last)), None)


def named(index: int, name: str) -> str:
    """Model name with a dot in its colour."""
    return f"<span class='dot' style='background:{color_of(index)}'></span>{_text(name)}"


def _difference_head(pair: Comparison | None) -> list[str]:
    return [f"{_text(pair.second)} &minus; {_text(pair.first)}"] if pair is not None else []


def overview(analysis: Analysis) -> str:
    """Every measure of every model."""
    models, pair = analysis.models, main_pair(analysis)
    ks = sorted({k for model in models for k in model.pass_at_k if k > 1})
    metrics = [model.metrics() for model in models]
    told = _told(pair) if pair is not None else {}
    rows: list[list[str]] = [
        ["Success (95% interval)", *(percent(model.total) for model in models), *_success(pair)],
        *(
            [f"pass@{k}", *(f"{100 * m.pass_at_k[k]:.1f}%" if k in m.pass_at_k else MISSING for m in models),
             *_plain(pair, _pass_at(k), "{:.1%}", models)]
            for k in ks
        ),
        ["Episodes &times; samples", *(f"{m.episodes:,} &times; {m.total.n / m.episodes:.3g}" for m in models),
         *([""] if pair else [])],
        *(
            [label, *(form.format(row[name]) if name in row else MISSING for row in metrics),
             *([told[name]] if name in told else _plain(pair, _metric(name), form, models))]
            for name, label, form in (*MEASURES, *_own(models[0]))
            if any(name in row for row in metrics)
        ),
    ]  # fmt: skip
    head = ["", *(named(n, m.name) for n, m in enumerate(models)), *_difference_head(pair)]
    return _table(head, rows)


def _told(pair: Comparison) -> dict[str, str]:
    """Cells of the paired differences by measure; shares in points."""
    told = {"reward_mean": points(pair.reward, 1, 3)}
    for name, _, form in MEASURES:
        if (difference := pair.measures.get(name)) is not None:
            is_share = form.endswith("%}")
            digits = int(form.partition(".")[2][0])
            told[name] = points(difference, 100 if is_share else 1, digits, DIRECTIONS[name])
    return told


def _pass_at(k: int) -> Callable[[ModelResult], float | None]:
    return lambda model: model.pass_at_k.get(k)


def _metric(name: str) -> Callable[[ModelResult], float | None]:
    return lambda model: model.metrics().get(name)


def _success(pair: Comparison | None) -> list[str]:
    return [points(pair.total.success)] if pair is not None else []


def _plain(
    pair: Comparison | None, value: Callable[[ModelResult], float | None], form: str, models: Sequence[ModelResult]
) -> list[str]:
    """Cell of a difference that has no interval, in the measure's own format."""
    if pair is None:
        return []
    first, last = value(models[0]), value(models[-1])
    if first is None or last is None:
        return [MISSING]
    shown = form.format(abs(last - first))
    if float(shown.rstrip("%").replace(",", "")) == 0:
        return [shown]
    return [f"{'+' if last > first else '&minus;'}{shown}"]


def _own(model: ModelResult) -> list[tuple[str, str, str]]:
    """Measures of the user's, as those of the glossary."""
    return [(name, _text(measure.label), "{:.3f}") for name, (measure, _) in model.summary.own.items()]


def comparisons_table(comparisons: Sequence[Comparison]) -> str:
    """Every pair of models on its common episodes."""
    rows = []
    for pair in comparisons:
        total = pair.total
        p_value = "&lt; 0.001" if pair.p_value < 0.001 else f"{pair.p_value:.3f}"
        rows.append([
            f"{_text(pair.second)} &minus; {_text(pair.first)}", points(total.success), points(pair.reward, 1, 3),
            f"{total.episodes:,}", f"{total.wins:,}", f"{total.losses:,}", p_value,
        ])  # fmt: skip
    head = ["Difference", "Success, points", "Reward", "Episodes", "Better on", "Worse on", "Sign test p"]
    return _table(head, rows) if rows else ""


def reward_model_table(analysis: Analysis) -> str:
    """Agreement of the reward model with true success."""
    found = analysis.probes.reward_model
    if found is None:
        return ""
    accuracy = percent(found.accuracy) if found.accuracy else MISSING

    def number(value: float | None) -> str:
        return MISSING if value is None else f"{value:.3f}"

    row = [
        f"{len(found.scores):,}", f"{found.pairs:,}", accuracy, number(found.ece), number(found.auc),
        number(found.correlation),
    ]  # fmt: skip
    head = ["Episodes scored", "Pairs", "Ranked correctly", "Calibration error", "AUC", "Correlation with success"]
    return _table(head, [row], text_columns=0)


def rates_table(analysis: Analysis, group: str, head: str) -> str:
    """Success by level or kind, with the paired difference of the last model from the first.

    Args:
        group: by_level or by_kind. head: of the first column.
    """
    models, pair = analysis.models, main_pair(analysis)
    rates: list[Mapping[str, Rate]] = [getattr(model, group) for model in models]
    paired = {row.name: row for row in getattr(pair, group)} if pair is not None else {}
    rows = [
        [_text(name), *(percent(rate[name]) if name in rate else MISSING for rate in rates),
         *([points(paired[name].success) if name in paired else MISSING] if pair is not None else [])]
        for name in dict.fromkeys(name for rate in rates for name in rate)
    ]  # fmt: skip
    return _table([head, *(_text(model.name) for model in models), *_difference_head(pair)], rows) if rows else ""


def tools_table(models: Sequence[ModelResult]) -> str:
    """Calls and misuse by tool."""
    rows = []
    for model in models:
        tools = list(model.summary.tools.values())
        total = sum(t.trajectories for t in tools)
        for name in [*model.summary.tool_names(), NO_CALL]:
            calls, errors = sum(t.calls[name] for t in tools), sum(t.errors[name] for t in tools)
            if calls or errors:
                share = f"{100 * errors / calls:.1f}%" if calls else MISSING
                rows.append(
                    [_text(model.name), _text(name), f"{calls:,}", f"{calls / total:.2f}", f"{errors:,}", share]
                )
    head = ["Model", "Tool", "Calls", "Per episode", "Misuse", "Share of calls"]
    return _table(head, rows, text_columns=2) if rows else ""


def loops_table(models: Sequence[ModelResult]) -> str:
    """Sequences of actions that occur most, and repeated state-action cycles."""
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
    return f"<p>{said}</p>{_table(head, rows, text_columns=2)}"
