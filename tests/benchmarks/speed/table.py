"""Medians, ratios and distances to the floor, as markdown and as a picture.

A side's rate is the median over its steps of tokens per second. A case holds, as compare_speed writes it:
    {"stage", "size", "threads", "others_cpu",
     "sides": {"ours" | "peer": {"about": {...}, "dropped": [answers], "steps": [answers]}}}
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass

SIDES = ("ours", "peer")
# What is wanted, for the small model and for the medium one: at least so many times the peer.
WANTED = {
    "sft": (2.5, 1.5),
    "reward": (2.0, 1.5),
    "dpo": (2.0, 1.5),
    "grpo": (2.5, 1.5),
    "grpo4": (2.0, 1.5),
    "ppo": (2.0, 1.5),
    "generate": (3.0, 1.5),
    "episodes": (4.0, 4.0),
}
WANTED_FLOOR = {"small": 2.0, "medium": 1.8}  # at most so many times the floor


@dataclass(frozen=True)
class Spread:
    """Median, lowest and highest of some values."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values):
        return cls(statistics.median(values), min(values), max(values))


@dataclass(frozen=True)
class Line:
    """One case, worked out."""

    stage: str
    size: str
    threads: int
    rates: dict[str, Spread]  # tokens per second of wall time
    ratio: float  # of the medians
    pairs: Spread  # ratios of the steps that were taken one after the other
    cpu_ratio: float  # the same as `ratio`, by processor time
    floor: dict[str, float | None]  # times the floor; None where the stage has none
    peak_mb: dict[str, float]
    start_s: dict[str, float]  # from starting Python to the end of the first step
    loss_gap: (
        float | None
    )  # largest difference between the losses of the same step; None where both sides sample
    same_tokens: (
        bool | None
    )  # whether the same steps had equally many; None where both sides sample
    others: float | None

    @property
    def wanted_ratio(self):
        return WANTED[self.stage.partition("_")[0]][0 if self.size == "small" else 1]


def compute_rates(steps, time="wall_s"):
    """Return tokens per second of each step."""
    return [step["tokens"] / step[time] for step in steps]


def summarize_case(case, floor_rate):
    """Summarise one case as a line. `floor_rate`: tokens per second at the floor, or None."""
    sides = {name: case["sides"][name]["steps"] for name in SIDES}
    rates = {name: compute_rates(steps) for name, steps in sides.items()}
    cpu = {name: statistics.median(compute_rates(steps, "cpu_s")) for name, steps in sides.items()}
    spreads = {name: Spread.of(values) for name, values in rates.items()}
    losses = [(a["loss"], b["loss"]) for a, b in zip(sides["ours"], sides["peer"], strict=True)]
    known = [abs(a - b) for a, b in losses if a is not None and b is not None]
    tokens = [[step["tokens"] for step in sides[name]] for name in SIDES]
    return Line(
        case["stage"],
        case["size"],
        case["threads"],
        spreads,
        spreads["ours"].median / spreads["peer"].median,
        Spread.of([a / b for a, b in zip(rates["ours"], rates["peer"], strict=True)]),
        cpu["ours"] / cpu["peer"],
        {name: floor_rate / spreads[name].median if floor_rate else None for name in SIDES},
        {name: max(step["peak_mb"] for step in steps) for name, steps in sides.items()},
        {
            name: side["about"]["start_s"] + side["dropped"][0]["wall_s"]
            for name, side in case["sides"].items()
        },
        max(known) if known else None,
        tokens[0] == tokens[1] if known else None,
        case["others_cpu"],
    )


def format_report(processor, lines, checks, about, notes):
    """Format the whole report.

    Args:
        processor: its name, for the first line.
        checks: size -> results of `speed.checks`.
        about: lines on machine and versions.
        notes: what could not be measured, and why.
    """
    text = [
        f"# Speed compared with TRL and transformers: {processor}",
        "",
        *[f"- {entry}" for entry in about],
        "",
    ]
    text += [f"- not measured: {note}" for note in notes] + ([""] if notes else [])
    for size in dict.fromkeys(line.size for line in lines):
        for threads in sorted({line.threads for line in lines if line.size == size}):
            text += [
                f"## {size}, {threads} thread{'s' if threads > 1 else ''}",
                "",
                *_format_rows(lines, size, threads),
                "",
            ]
    if checks:
        text += ["## The same comes out", "", *_check_rows(lines, checks), ""]
    return "\n".join(text)


def _format_rows(lines, size, threads):
    yield (
        "| stage | ours, tokens/s | peer, tokens/s | ratio [pairs] | wanted | by processor time | "
        "times the floor: ours (at most), peer | peak MB: ours, peer | seconds to start | others' cores |"
    )
    yield "|---|---|---|---|---|---|---|---|---|---|"
    for line in lines:
        if (line.size, line.threads) != (size, threads):
            continue
        rates = " | ".join(_format_rate(line.rates[name]) for name in SIDES)
        ours, theirs = (line.floor[name] for name in SIDES)
        floors = "-" if ours is None else f"{ours:.1f} ({WANTED_FLOOR[size]:g}), {theirs:.1f}"
        peaks = ", ".join(f"{line.peak_mb[name]:,.0f}" for name in SIDES)
        starts = ", ".join(f"{line.start_s[name]:.1f}" for name in SIDES)
        verdict = "met" if line.ratio >= line.wanted_ratio else "missed"
        others = "-" if line.others is None else f"{line.others:.2f}"
        yield (
            f"| {line.stage} | {rates} | **{line.ratio:.2f}** [{line.pairs.low:.2f}, {line.pairs.high:.2f}] | "
            f"{line.wanted_ratio:g} {verdict} | {line.cpu_ratio:.2f} | {floors} | {peaks} | {starts} | {others} |"
        )


def _format_rate(spread):
    return f"{spread.median:,.0f} [{spread.low:,.0f}, {spread.high:,.0f}]"


def _check_rows(lines, checks):
    yield "| model | what | found | limit | |"
    yield "|---|---|---|---|---|"
    for size, size_checks in checks.items():
        for check in size_checks:
            verdict = "holds" if check["value"] <= check["limit"] else "FAILS"
            yield f"| {size} | {check['what']} | {check['value']:.2g} | {check['limit']:g} | {verdict} |"
        for line in lines:
            if line.size == size and line.loss_gap is not None:
                what = (
                    f"{line.stage}, {line.threads}t: losses of the same steps, ours against TRL's"
                )
                rows = "same rows" if line.same_tokens else "FAILS: other rows"
                yield f"| {size} | {what} | {line.loss_gap:.2g} | | {rows} |"


def draw_ratios(lines, file):
    """Draw ratios as bars with the range of the pairs and the target as a mark; a panel for each size and threads."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = list(dict.fromkeys((line.size, line.threads) for line in lines))
    figure, axes = pyplot.subplots(
        1,
        len(panels),
        figsize=(4.2 * len(panels) + 1.2, 5),
        squeeze=False,
        sharey=True,
        layout="constrained",
    )
    names = list(dict.fromkeys(line.stage for line in lines))
    for axis, (size, threads) in zip(axes[0], panels, strict=True):
        for line in lines:
            if (line.size, line.threads) != (size, threads):
                continue
            position = names.index(line.stage)
            error = [
                [max(0.0, line.ratio - line.pairs.low)],
                [max(0.0, line.pairs.high - line.ratio)],
            ]
            axis.barh(
                position,
                line.ratio,
                xerr=error,
                height=0.6,
                color="#0060a0",
                ecolor="#5d6875",
            )
            axis.plot(
                [line.wanted] * 2, [position - 0.38, position + 0.38], color="#b34700", linewidth=2
            )
        axis.axvline(1.0, color="#1f2630", linewidth=0.8)
        axis.set_title(f"{size}, {threads} thread{'s' if threads > 1 else ''}")
        axis.set_xlabel("times the peer's tokens/s (mark: wanted)")
        axis.set_yticks(range(len(names)), names)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0][0].invert_yaxis()
    figure.savefig(file, dpi=120)
    pyplot.close(figure)
