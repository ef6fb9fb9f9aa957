"""Tables and curves of the runs."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from claimed.intervals import estimate_gap, format_interval

from learning_runs.jobs import (
    ALGORITHMS,
    BATCH,
    CRITIC_LAGS,
    CRITIC_WEIGHTS,
    DISTILLATIONS,
    GROUPS,
    LAGS,
    SCHEDULES,
    VARIANTS,
    WEIGHTS,
    Job,
    list_jobs,
)


def estimate_rate(results: list[dict[str, Any]]) -> Any:
    """Estimate the success over all seeds, episodes as clusters."""
    import numpy as np

    from rl_core.analysis.statistics import compute_clustered_rate

    success_SE = np.array([result["success"] for result in results], dtype=np.int64)
    return compute_clustered_rate(success_SE.sum(0), np.full(success_SE.shape[1], len(results)))


def load_results(output: Path, seeds: int) -> dict[str, list[dict[str, Any]]]:
    results: dict[str, list[dict[str, Any]]] = {}
    jobs = [Job("sft", seed, "algorithms") for seed in range(seeds)]
    jobs += list_jobs(
        seeds, ["algorithms", "variants", "staleness", "groups", "curriculum", "stopping"]
    )
    for job in jobs:
        path = output / "jobs" / job.file
        if path.is_file():
            results.setdefault(job.name, []).append(json.loads(path.read_text()))
    return results


def write_report(output: Path, seeds: int, episodes: int) -> None:
    results = load_results(output, seeds)
    if "sft" not in results:
        print("no report without the runs `sft` of --parts algorithms; each run is in jobs/")
        return
    sft = estimate_rate(results["sft"])
    lines = [
        f"{episodes} episodes for every algorithm, {seeds} seeds; 500 held-out episodes, played once by each model.",
        "",
        "| algorithm | success [95%] | each seed | above SFT | seconds of a run | steps on each rollout |",
        "|---|---|---|---|---|---|",
        f"| SFT (the start) | {format_rate(sft)} | {format_percentages(results['sft'])} | | | |",
    ]
    recipes = ALGORITHMS | DISTILLATIONS | VARIANTS
    names = sorted(
        (n for n in recipes if n in results), key=lambda n: -estimate_rate(results[n]).rate
    )
    for name in names:
        rate = estimate_rate(results[name])
        clear = "yes" if rate.low > sft.high else "no"
        seconds = statistics.fmean(result["seconds"] for result in results[name])
        epochs = recipes[name].get("epochs", 2 if "loss" in recipes[name] else 1)
        lines.append(
            f"| {name} | {format_rate(rate)} | {format_percentages(results[name])} | {clear} | {seconds:.0f} "
            f"| {epochs} |"
        )
    stale = [f"lag {lag} {kind}" for lag in LAGS for kind in WEIGHTS]
    stale += [f"ppo lag {lag} {kind}" for lag in CRITIC_LAGS for kind in CRITIC_WEIGHTS]
    lines += [
        "",
        *format_table(results, stale, "rollouts stale by so many updates, importance weights"),
    ]
    groups = [f"group {size}" if size != 8 else "grpo" for size in sorted((*GROUPS, 8))]
    lines += ["", *format_table(results, groups, "group size at equal episodes")]
    if any(name in results for name in SCHEDULES):
        lines += ["", *format_schedules(results)]
    if "stopped early" in results:
        stopped = results["stopped early"]
        used = statistics.fmean(result["episodes"] for result in stopped)
        lines += [
            "",
            f"Early stopping (patience 3 evaluations) within a budget of {2 * episodes} episodes: stopped after "
            f"{used:.0f} on average, {1 - used / (2 * episodes):.0%} saved; success "
            f"{format_rate(estimate_rate(stopped))} ({format_percentages(stopped)}).",
        ]
    variance = output / "variance.json"
    if variance.is_file():
        rows = json.loads(variance.read_text())
        base = rows["no baseline"]["variance"]
        lines += [
            "",
            "| credit | variance of the gradient | against no baseline | cosine of mean gradients |",
        ]
        lines.append("|---|---|---|---|")
        for name, row in rows.items():
            lines.append(
                f"| {name} | {row['variance']:.4g} | {row['variance'] / base:.2f} | {row['cosine']:.2f} |"
            )
    text = "\n".join(lines) + "\n"
    (output / "learning.md").write_text(text)
    print(text)
    draw_curves(results, names, output / "learning.png")


def read_reports(text: str) -> list[dict[str, list[float]]]:
    """Read the success of each algorithm and seed, in percent, from results/learning.md, newest run first."""
    reports = []
    for section in text.split("\n## ")[1:]:
        if "`--parts algorithms`" not in section.partition("\n")[0]:
            continue
        rows = [line.split(" | ") for line in section.splitlines() if "% [" in line]
        reports.append({row[0].strip("| "): [float(x) for x in row[2].split(",")] for row in rows})
    return reports


def pool_seeds(reports: list[dict[str, list[float]]]) -> dict[str, list[float]]:
    """Collect the seeds of all runs by algorithm, the highest mean first."""
    values = {
        name: [value for report in reports for value in report.get(name, ())]
        for name in dict.fromkeys(name for report in reports for name in report)
    }
    return dict(sorted(values.items(), key=lambda item: -statistics.fmean(item[1])))


def compare_reports(text: str) -> str:
    """Compare all algorithms with GRPO over several reports, seed by seed.

    Args:
        text: of results/learning.md; the tables of its sections with `--parts algorithms` in their titles count.

    Returns:
        A table: mean success of all seeds and of each report, and the difference to GRPO of the same report and seed.
    """
    reports = read_reports(text)
    titles = " | ".join(f"run {number}" for number in range(1, len(reports) + 1))
    lines = [
        f"| algorithm | success | {titles} | against GRPO, points [95%] | worst seed |",
        "|" + "---|" * (len(reports) + 4),
    ]
    for name, values in pool_seeds(reports).items():
        ours = [report for report in reports if name in report]
        gap = estimate_gap(values, [value for report in ours for value in report["grpo"]])
        cells = [f"{statistics.fmean(r[name]):.1f}" if name in r else "" for r in reports]
        against = "" if name == "grpo" else format_interval(gap)
        lines.append(
            f"| {name} | {statistics.fmean(values):.1f}% | {' | '.join(cells)} | {against} | {min(values):.1f} |"
        )
    return "\n".join(lines) + "\n"


def draw_comparison(text: str, path: Path) -> None:
    """Draw the success of every seed by algorithm, narrow enough to read on a phone.

    Args:
        text: of results/learning.md, as for `compare_reports`.
        path: PNG of about 730 px, a line for each algorithm and a dot for each seed.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    values = pool_seeds(read_reports(text))
    figure, axis = plt.subplots(figsize=(6, 0.5 * len(values) + 1.1))
    for line, (name, seeds) in enumerate(values.items()):
        color = "#5B6573" if name.startswith("SFT") else "#0072B2"
        axis.plot(seeds, [line] * len(seeds), "o", color=color, alpha=0.35, markersize=9)
        axis.plot([statistics.fmean(seeds)] * 2, [line - 0.36, line + 0.36], color=color, lw=3.5)
    axis.set_yticks(range(len(values)), [name.replace(" (the start)", "") for name in values])
    axis.set_ylim(len(values) - 0.4, -0.6)
    axis.set_xlim(-2, 102)
    axis.set_xticks(range(0, 101, 25), [f"{share}%" for share in range(0, 101, 25)])
    axis.tick_params(labelsize=16, length=0)
    axis.grid(alpha=0.3)
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.set_xlabel("success; dot: a seed, bar: mean", fontsize=16)
    figure.savefig(path, dpi=120, bbox_inches="tight", pad_inches=0.08)
    plt.close(figure)


def format_rate(rate: Any) -> str:
    return f"{rate.rate:.1%} [{100 * rate.low:.1f}, {100 * rate.high:.1f}]"


def format_percentages(results: list[dict[str, Any]]) -> str:
    return ", ".join(f"{100 * statistics.fmean(result['success']):.1f}" for result in results)


def format_schedules(results: dict[str, Any]) -> list[str]:
    """Tabulate success by level, and when the last step of each schedule began."""
    levels = sorted(
        {level for rows in results.values() for row in rows for level in row.get("levels", ())}
    )
    lines = [
        f"| levels in training | success [95%] | each seed | {' | '.join(levels)} | last step from episode |",
        "|" + "---|" * (4 + len(levels)),
    ]
    for name in ("sft", "grpo", *SCHEDULES):
        rows = [row for row in results.get(name, ()) if "levels" in row]
        if not rows:
            continue
        shares = []
        for level in levels:
            shares_of_seeds = [
                ok
                for row in rows
                for ok, at in zip(row["success"], row["levels"], strict=True)
                if at == level
            ]
            shares.append(f"{statistics.fmean(shares_of_seeds):.1%}")
        last = ", ".join(
            str(BATCH * row["moves"][-1]["iteration"]) if row.get("moves") else "-" for row in rows
        )
        title = {"sft": "SFT (the start)", "grpo": "all equally often"}.get(name, name)
        lines.append(
            f"| {title} | {format_rate(estimate_rate(rows))} | {format_percentages(rows)} | {' | '.join(shares)} "
            f"| {last} |"
        )
    return lines


def format_table(results: dict[str, Any], names: list[str], title: str) -> list[str]:
    lines = [
        f"| {title} | success [95%] | each seed | sampler KL | effective samples |",
        "|---|---|---|---|---|",
    ]
    for name in names:
        if name in results:
            last = [result["last"] for result in results[name]]
            kl = statistics.fmean(row.get("policy/sampler_kl", 0.0) for row in last)
            share = [
                row["policy/effective_sample_share"]
                for row in last
                if "policy/effective_sample_share" in row
            ]
            ess = f"{statistics.fmean(share):.0%}" if share else ""
            lines.append(
                f"| {name} | {format_rate(estimate_rate(results[name]))} | {format_percentages(results[name])} "
                f"| {kl:.2g} | {ess} |"
            )
    return lines


def draw_curves(results: dict[str, Any], names: list[str], path: Path) -> None:
    """Draw success against episodes: mean over the seeds, and their spread."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    import numpy as np

    columns = 4
    rows = -(-len(names) // columns)
    figure, axes = plt.subplots(
        rows, columns, figsize=(12, 2.6 * rows), sharex=True, sharey=True, squeeze=False
    )
    base = estimate_rate(results["sft"])
    for axis, name in zip(axes.flat, names, strict=False):
        curves = [result["curve"] for result in results[name]]
        length = min(map(len, curves))
        x = np.mean([[point[0] for point in curve[:length]] for curve in curves], axis=0)
        y = np.array([[point[1] for point in curve[:length]] for curve in curves])
        axis.axhspan(base.low, base.high, color="#D9DEE4", zorder=0)
        axis.fill_between(x, y.min(0), y.max(0), color="#0072B2", alpha=0.2, linewidth=0)
        axis.plot(x, y.mean(0), color="#0072B2", marker="o", markersize=3)
        axis.set_title(f"{name}: {estimate_rate(results[name]).rate:.0%}", fontsize=10)
        axis.grid(alpha=0.3)
        axis.set_ylim(0, 1)
    for axis in axes[-1]:
        axis.set_xlabel("episodes")
    for row in axes:
        row[0].set_ylabel("success")
    for axis in list(axes.flat)[len(names) :]:
        axis.set_visible(False)
    figure.suptitle(
        "Success on 200 validation episodes: mean and range over seeds; grey: the SFT model's interval"
    )
    figure.tight_layout()
    figure.savefig(path, dpi=110)
