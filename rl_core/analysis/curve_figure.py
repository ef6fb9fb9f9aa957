"""Curves of a run as SVG for notebooks and reports: small panels without matplotlib, readable on light and dark pages.

A panel takes the page's text colour, so a notebook's theme applies to it. Several runs share a panel: each has one
colour and its moving average, and the legend names them.
"""

from __future__ import annotations

import difflib
import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

from rl_core.analysis.metric_reference import sort_by_importance
from rl_core.analysis.statistics import compute_moving_average
from rl_core.errors import DataError
from rl_core.storage.atomic_files import write_text_atomic

Points = Sequence[tuple[float, float]]  # (step, value), ordered by step
Series = Mapping[str, Points]  # by metric name

# Okabe-Ito colours, adjusted to a contrast of at least 3 on white and on #111.
LINE_COLORS = (
    "#2B8CD6",
    "#C77C00",
    "#0B9E74",
    "#C0629A",
    "#D55E00",
    "#7F7F7F",
    "#3F9FC4",
    "#8F8A00",
)
WIDTH, HEIGHT = 320, 176  # of a panel, in SVG units
LEFT, RIGHT, TOP, BOTTOM = 44, 10, 30, 24  # margins around the plot area
MAX_POINTS = 300  # points drawn per line; beyond, neighbours are averaged
MAX_PANELS = 24
SMOOTHING_SHARE = 12  # the moving average covers one twelfth of the points
# Of a panel on a page, and between panels; a page of this width has two columns.
_PANEL_MIN_WIDTH, _PANEL_GAP = 260, 14
TWO_COLUMNS_WIDTH = 2 * _PANEL_MIN_WIDTH + _PANEL_GAP
_STYLE = (
    "font-family:system-ui,-apple-system,'Segoe UI',Roboto,'Noto Sans',sans-serif;"
    "font-variant-numeric:tabular-nums"
)
_EMPTY_MESSAGE = "No metrics yet: nothing was trained. Call run() first."


@dataclass(frozen=True)
class PanelKind:
    """Default panel: a title, a unit, and candidate metrics, of which the first logged one is drawn."""

    title: str
    unit: str
    names: tuple[str, ...]
    is_share: bool = False  # drawn on the full scale from 0 to 1


DEFAULT_PANELS = (
    PanelKind("Reward", "mean", ("reward/mean", "train/episode_return")),
    PanelKind("Success", "share of rollouts", ("train/success_rate",), is_share=True),
    PanelKind("KL to the starting policy", "nats per token", ("policy/ref_kl", "policy/update_kl")),
    PanelKind("Entropy", "nats per token", ("policy/entropy",)),
    PanelKind("Length", "sampled tokens", ("train/action_tokens",)),
    PanelKind("Success, held out", "share of episodes", ("eval/success_rate",), is_share=True),
    PanelKind("Reward, held out", "mean", ("eval/reward_mean", "eval/episode_return")),
    PanelKind("Exploitability", "per game", ("eval/exploitability",)),
    PanelKind("Loss", "training", ("train/loss",)),
    PanelKind("Loss, held out", "", ("eval/loss",)),
    PanelKind("Accuracy", "training", ("train/accuracy",), is_share=True),
    PanelKind("Accuracy, held out", "", ("eval/accuracy",), is_share=True),
    PanelKind("Gradient norm", "before clipping", ("train/grad_norm",)),
)
_TITLES = {"policy/update_kl": "KL of one update"}  # where a candidate is not what the title says


@dataclass(frozen=True)
class Panel:
    """One panel: a title, a unit, and the points of each run."""

    title: str
    unit: str
    lines: Mapping[str, Points]  # by run
    is_share: bool = False


@dataclass(frozen=True, repr=False)
class CurveFigure:
    """Panels of curves. A notebook shows it; `save` writes an SVG file.

    `panels` holds what is drawn: titles, units and points.
    """

    panels: Sequence[Panel]
    runs: Sequence[str] = ("",)
    message: str = _EMPTY_MESSAGE  # shown instead of panels if there are none
    colors: Mapping[str, str] = field(default_factory=dict)  # by run; default: by position

    def __repr__(self) -> str:
        """List the panels with their last values."""
        if not self.panels:
            return f"CurveFigure: {self.message}"
        lines = ["CurveFigure (a notebook draws it; .save('curves.svg') writes it)"]
        for panel in self.panels:
            ends = [
                f"{name + ' ' if name else ''}{format_value(points[-1][1], panel.is_share)}"
                for name, points in panel.lines.items()
            ]
            lines.append(f"  {panel.title}: {', '.join(ends)}")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        """Return panels that wrap with the width of the page."""
        if not self.panels:
            return f'<p style="{_STYLE};opacity:.7">{html.escape(self.message)}</p>'
        cells = "".join(
            f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" style="width:100%;height:auto;display:block" '
            f'role="img" aria-label="{_describe_panel(panel)}">{self._draw_panel(panel)}</svg>'
            for panel in self.panels
        )
        return (
            f'<div style="{_STYLE};max-width:1080px">{self._draw_html_legend()}'
            f'<div style="display:grid;gap:4px {_PANEL_GAP}px;grid-template-columns:repeat(auto-fill,'
            f'minmax(min(100%,{_PANEL_MIN_WIDTH}px),1fr))">{cells}</div></div>'
        )

    def _repr_svg_(self) -> str:
        """Return one SVG document that adapts to a dark page."""
        columns = min(3, max(1, len(self.panels)))
        rows = max(1, -(-len(self.panels) // columns))
        legend = self._draw_svg_legend() if len(self.runs) > 1 and self.panels else ""
        top = 26 if legend else 0
        parts = [
            f'<g transform="translate({WIDTH * (index % columns)} {top + HEIGHT * (index // columns)})">'
            f"<title>{_describe_panel(panel)}</title>{self._draw_panel(panel)}</g>"
            for index, panel in enumerate(self.panels)
        ] or [f'<text x="12" y="30" font-size="12">{html.escape(self.message)}</text>']
        width, height = WIDTH * columns, top + HEIGHT * rows
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
            f'height="{height}" style="{_STYLE}" fill="currentColor"><style>svg{{color:#222831;background:#fff}}'
            "@media (prefers-color-scheme:dark){svg{color:#d8dee6;background:#14181d}}</style>"
            f"{legend}{''.join(parts)}</svg>"
        )

    def save(self, path: str | Path) -> Path:
        """Write the figure as an SVG file, atomically. Raises: DataError for another suffix."""
        path = Path(path)
        if path.suffix != ".svg":
            raise DataError(f"{path}: figures are written as SVG; choose a name that ends in .svg")
        write_text_atomic(path, self._repr_svg_())
        return path

    def _select_color(self, run: str) -> str:
        position = list(self.runs).index(run) if run in self.runs else 0
        return self.colors.get(run) or LINE_COLORS[position % len(LINE_COLORS)]

    def _draw_html_legend(self) -> str:
        if len(self.runs) < 2:
            return ""
        entries = "".join(
            '<span style="display:inline-flex;align-items:center;gap:6px;min-width:0">'
            f'<span style="width:14px;height:3px;flex:none;background:{self._select_color(run)}"></span>'
            f'<bdi style="overflow-wrap:anywhere">{html.escape(run)}</bdi></span>'
            for run in self.runs
        )
        return (
            f'<div style="display:flex;flex-wrap:wrap;gap:2px 16px;font-size:12px">{entries}</div>'
        )

    def _draw_svg_legend(self) -> str:
        parts, x = [], LEFT
        for run in self.runs:
            label = run if len(run) <= 24 else run[:23] + "…"
            parts.append(
                f'<rect x="{x}" y="12" width="14" height="3" fill="{self._select_color(run)}"/>'
                f'<text x="{x + 20}" y="17" font-size="11">{html.escape(label)}</text>'
            )
            x += 40 + 7 * len(label)
        return "".join(parts)

    def _draw_panel(self, panel: Panel) -> str:
        """Draw title, axes and lines of one panel, in SVG units."""
        bounds = _compute_bounds(panel)
        parts = [_draw_axes(panel, bounds)]
        is_single = len(self.runs) == 1
        for run, points in panel.lines.items():
            color = self._select_color(run)
            thinned = _thin_points(points)
            if len(thinned) == 1:
                x, y = bounds.compute_svg_position(*thinned[0])
                parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{color}"/>')
                continue
            window = max(1, len(thinned) // SMOOTHING_SHARE)
            smooth = compute_moving_average([value for _, value in thinned], window)
            if is_single and window > 1:
                parts.append(_draw_line(thinned, bounds, color, 'stroke-width="1" opacity=".38"'))
            averaged = list(zip((step for step, _ in thinned), map(float, smooth), strict=True))
            parts.append(_draw_line(averaged, bounds, color, 'stroke-width="2"'))
        return "".join(parts)


def build_curve_figure(runs: Mapping[str, Series], names: Sequence[str] = ()) -> CurveFigure:
    """Build the figure of one run or several.

    Args:
        runs: metrics by run; "" as the name of a single run leaves out the legend.
        names: metrics to draw, a panel each; `*` matches any characters. Default: reward, success, KL, entropy, length
            and what else tells how a run goes.
    Raises: DataError for a name that no run logged.
    """
    logged = {name: None for series in runs.values() for name, points in series.items() if points}
    finite = {
        run: {name: _select_finite(points) for name, points in series.items()}
        for run, series in runs.items()
    }
    if names:
        panels = [
            Panel(name, "", _collect_lines(finite, name), is_share=False)
            for name in _resolve_names(names, list(logged))
        ]
    else:
        panels = _build_default_panels(finite)
    return CurveFigure([panel for panel in panels if panel.lines], tuple(runs))


def _build_default_panels(runs: Mapping[str, Series]) -> list[Panel]:
    panels = []
    for kind in DEFAULT_PANELS:
        candidates = [(name, _collect_lines(runs, name)) for name in kind.names]
        logged = [(name, lines) for name, lines in candidates if lines]
        # A KL that is always 0, as with one step per rollout, says nothing.
        moving = [
            (name, lines)
            for name, lines in logged
            if "_kl" not in name or any(value for points in lines.values() for _, value in points)
        ]
        if moving:
            name, lines = moving[0]
            panels.append(Panel(_TITLES.get(name, kind.title), kind.unit, lines, kind.is_share))
    return panels


def _collect_lines(runs: Mapping[str, Series], name: str) -> dict[str, Points]:
    return {run: series[name] for run, series in runs.items() if series.get(name)}


def _select_finite(points: Points) -> list[tuple[float, float]]:
    return [(step, value) for step, value in points if math.isfinite(step) and math.isfinite(value)]


def _resolve_names(names: Sequence[str], logged: Sequence[str]) -> list[str]:
    """Return the logged metrics that the names and patterns select. Raises: DataError for one that selects none."""
    resolved: dict[str, None] = {}
    for name in names:
        pattern = name.replace("[", "[[]")  # a bracket stands for itself
        matches = [each for each in sort_by_importance(logged) if fnmatchcase(each, pattern)]
        if not matches:
            close = difflib.get_close_matches(name, logged, n=1, cutoff=0.6)
            hint = f"did you mean '{close[0]}'?" if close else "metrics() lists the names"
            raise DataError(f"plot: no metric '{name}' was logged; {hint}")
        resolved |= dict.fromkeys(matches)
    if len(resolved) > MAX_PANELS:
        raise DataError(
            f"plot: {len(resolved)} metrics are selected, but a figure has up to {MAX_PANELS} panels; name fewer"
        )
    return list(resolved)


@dataclass(frozen=True)
class _Bounds:
    """Range of a panel's axes, and the ticks of its value axis."""

    x_low: float
    x_high: float
    y_low: float
    y_high: float
    ticks: Sequence[float]

    def compute_svg_position(self, step: float, value: float) -> tuple[float, float]:
        """Return the position of a point in SVG units."""
        width, height = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
        x_range, y_range = self.x_high - self.x_low, self.y_high - self.y_low
        x = LEFT + width * ((step - self.x_low) / x_range if x_range > 0 else 0.5)
        y = TOP + height * (1 - (value - self.y_low) / y_range)
        return x, y


def _compute_bounds(panel: Panel) -> _Bounds:
    steps = [step for points in panel.lines.values() for step, _ in points]
    values = [value for points in panel.lines.values() for _, value in points]
    low, high = min(values), max(values)
    if panel.is_share and low >= 0 and high <= 1:
        return _Bounds(min(steps), max(steps), 0.0, 1.0, (0.0, 0.5, 1.0))
    if high - low <= 1e-9 * max(abs(low), abs(high)):  # constant, or rounding noise around a value
        spread = abs(high) * 0.1 or 1.0
        return _Bounds(min(steps), max(steps), low - spread, high + spread, (high,))
    ticks = choose_ticks(low, high)
    return _Bounds(min(steps), max(steps), min(low, ticks[0]), max(high, ticks[-1]), ticks)


def choose_ticks(low: float, high: float, count: int = 4) -> list[float]:
    """Return about `count` round values between `low` and `high`; for high > low."""
    raw = (high - low) / count
    if not math.isfinite(raw) or raw <= 0:
        return [low, high]
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [number * step for number in range(first, last + 1)] or [low, high]


def format_value(value: float, is_share: bool = False) -> str:
    """Return a number in at most four significant digits; a share as a percentage with one decimal."""
    if is_share:
        return f"{round(100 * value, 1):g}%"
    if value and (abs(value) >= 1e5 or abs(value) < 1e-4):
        return f"{value:.2g}"
    return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"


def _draw_axes(panel: Panel, bounds: _Bounds) -> str:
    """Draw title, last value, grid lines and tick labels."""
    unit = f'<tspan font-weight="400" opacity=".65" dx="6">{html.escape(panel.unit)}</tspan>'
    parts = [
        f'<text x="{LEFT}" y="16" font-size="12" font-weight="600" fill="currentColor">'
        f"{html.escape(_shorten_title(panel.title))}{unit if panel.unit else ''}</text>"
    ]
    if len(panel.lines) == 1:
        (points,) = panel.lines.values()
        parts.append(
            f'<text x="{WIDTH - RIGHT}" y="16" font-size="12" text-anchor="end" fill="currentColor">'
            f"{format_value(points[-1][1], panel.is_share)}</text>"
        )
    for tick in bounds.ticks:
        _, y = bounds.compute_svg_position(bounds.x_low, tick)
        parts.append(
            f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="currentColor" opacity=".16"/>'
            f'<text x="{LEFT - 6}" y="{y + 3.5:.1f}" font-size="10" text-anchor="end" fill="currentColor" '
            f'opacity=".7">{format_value(tick, panel.is_share)}</text>'
        )
    bottom = HEIGHT - 8
    ends = [(bounds.x_low, LEFT, "start"), (bounds.x_high, WIDTH - RIGHT, "end")]
    if bounds.x_low == bounds.x_high:
        ends = [(bounds.x_low, (LEFT + WIDTH - RIGHT) // 2, "middle")]
    parts += [
        f'<text x="{x}" y="{bottom}" font-size="10" text-anchor="{anchor}" fill="currentColor" '
        f'opacity=".7">{"step " if x == LEFT else ""}{step:,.15g}</text>'
        for step, x, anchor in ends
    ]
    return "".join(parts)


def _draw_line(points: Points, bounds: _Bounds, color: str, style: str) -> str:
    places = " ".join(
        f"{x:.1f},{y:.1f}" for x, y in (bounds.compute_svg_position(*point) for point in points)
    )
    return f'<polyline points="{places}" fill="none" stroke="{color}" stroke-linejoin="round" {style}/>'


def _thin_points(points: Points) -> list[tuple[float, float]]:
    """Average neighbours until at most MAX_POINTS points are left; a point has the step of its newest neighbour."""
    stride = -(-len(points) // MAX_POINTS)
    if stride <= 1:
        return list(points)
    blocks = [points[start : start + stride] for start in range(0, len(points), stride)]
    return [(block[-1][0], math.fsum(value for _, value in block) / len(block)) for block in blocks]


def _shorten_title(title: str) -> str:
    return title if len(title) <= 34 else "…" + title[-33:]


def _describe_panel(panel: Panel) -> str:
    """Return a panel in words, for a screen reader, escaped for an attribute."""
    parts = [
        f"{run + ': ' if run else ''}{format_value(points[0][1], panel.is_share)} to "
        f"{format_value(points[-1][1], panel.is_share)} over {len(points)} points"
        for run, points in panel.lines.items()
    ]
    return html.escape(f"{panel.title}: {'; '.join(parts)}")
