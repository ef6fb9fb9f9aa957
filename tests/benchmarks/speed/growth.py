"""Growth of cost: the exponent of a power law, with a table and a figure."""

from __future__ import annotations

import math
from dataclasses import dataclass

# What the theory says of seconds and of memory; ranges where two terms meet (attention grows with the square).
EXPECTED = {
    ("length", "update"): ("1 to 2", "1"),
    ("length", "rollout"): ("1 to 2", "1"),
    ("batch", "update"): ("1", "up to 1: micro-batches are bounded"),
    ("batch", "rollout"): ("below 1: weights are read once a step", "up to 1"),
    ("parameters", "update"): ("1", "1"),
    ("parameters", "rollout"): ("1", "1"),
    ("trajectories", "collect"): ("1", "0 to 1: slots are bounded"),
    ("iterations", "policy"): ("1", "0"),
}


@dataclass(frozen=True)
class Fit:
    """y = c x^exponent by least squares on logarithms."""

    exponent: float
    r_squared: float  # of the logarithms; 1 where they lie on a line
    last: float  # exponent between the last two points, where fixed costs weigh least

    @classmethod
    def of(cls, xs, ys):
        """Raises: ValueError for fewer than two points, or one that is not above 0."""
        if len(xs) < 2 or min(*xs, *ys) <= 0:
            raise ValueError(
                f"a power law needs two points above 0, not x {list(xs)}, y {list(ys)}"
            )
        u, v = [math.log(x) for x in xs], [math.log(y) for y in ys]
        mean_u, mean_v = sum(u) / len(u), sum(v) / len(v)
        uu = sum((a - mean_u) ** 2 for a in u)
        uv = sum((a - mean_u) * (b - mean_v) for a, b in zip(u, v, strict=True))
        vv = sum((b - mean_v) ** 2 for b in v)
        r_squared = uv * uv / (uu * vv) if vv > 0 else 1.0
        return cls(uv / uu, r_squared, (v[-1] - v[-2]) / (u[-1] - u[-2]))


def group_points(points):
    """Return (axis, work) -> its points in the order of their values."""
    groups = {}
    for point in points:
        groups.setdefault((point["axis"], point["work"]), []).append(point)
    return {key: sorted(part, key=lambda point: point["value"]) for key, part in groups.items()}


def format_report(points, about):
    """Format the table of fits, then every point."""
    text = ["# How cost grows", "", *[f"- {entry}" for entry in about], ""]
    text += [
        "| against | work | range | seconds ~ x^ [last two], R2 | expected | memory ~ x^ [last two] | expected |"
    ]
    text += ["|---|---|---|---|---|---|---|"]
    for (axis, work), part in group_points(points).items():
        xs = [point["value"] for point in part]
        cells = []
        for name, expected in zip(("seconds", "memory_mb"), EXPECTED[axis, work], strict=True):
            if len(part) < 2:
                cells += ["-", expected]
                continue
            fit = Fit.of(xs, [max(point[name], 1e-3) for point in part])
            quality = f", {fit.r_squared:.3f}" if name == "seconds" else ""
            cells += [f"{fit.exponent:.2f} [{fit.last:.2f}]{quality}", expected]
        text.append(f"| {axis} | {work} | {xs[0]:,} to {xs[-1]:,} | {' | '.join(cells)} |")
    text += [
        "",
        "| against | work | x | seconds | memory, MB above the imports | peak RSS, MB | others' cores |",
    ]
    text += ["|---|---|---|---|---|---|---|"]
    for (axis, work), part in group_points(points).items():
        for point in part:
            others = "-" if point["others_cpu"] is None else f"{point['others_cpu']:.2f}"
            text.append(
                f"| {axis} | {work} | {point['value']:,} | {point['seconds']:.3f} | {point['memory_mb']:,.0f} | "
                f"{point['peak_mb']:,.0f} | {others} |"
            )
    return "\n".join(text) + "\n"


def draw_growth(points, file):
    """Draw seconds above, memory below, one column for each axis; both logarithmic, so that a power law is a line."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    parts = group_points(points)
    axes = list(dict.fromkeys(axis for axis, _ in parts))
    figure, grid = pyplot.subplots(
        2, len(axes), figsize=(3.6 * len(axes), 6.4), squeeze=False, layout="constrained"
    )
    colours = {"update": "#0060a0", "rollout": "#b34700"}
    for (axis, work), part in parts.items():
        column = axes.index(axis)
        for row, (name, label) in enumerate(
            (("seconds", "seconds"), ("memory_mb", "MB above the imports"))
        ):
            xs, ys = [point["value"] for point in part], [max(point[name], 1e-3) for point in part]
            exponent = f": {Fit.of(xs, ys).exponent:.2f}" if len(part) > 1 else ""
            panel = grid[row][column]
            panel.loglog(
                xs, ys, "o-", color=colours.get(work, "#2e7d32"), label=f"{work}{exponent}"
            )
            panel.set_xticks(xs, [f"{x:,}" for x in xs], fontsize=8)
            panel.minorticks_off()
            panel.yaxis.set_major_formatter("{x:g}")
            panel.legend(title="exponent", fontsize=8, title_fontsize=8, loc="upper left")
            panel.spines[["top", "right"]].set_visible(False)
            if row:
                panel.set_xlabel(axis)
            if not column:
                panel.set_ylabel(label)
    for panel in grid.flat:  # at least two decades, so that what hardly grows does not look steep
        low, high = panel.get_ylim()
        wider = max(1.0, (100 * low / high) ** 0.5)
        panel.set_ylim(low / wider, high * wider)
    figure.savefig(file, dpi=120)
    pyplot.close(figure)
