"""Tables of what was measured, in Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from claimed import memory, over_optimisation, rating_choice, thought_variance
from claimed.arms import PARTS, Part
from claimed.intervals import describe_gap, estimate_gap, estimate_interval, format_interval
from claimed.policy_runs import GROUP, PROMPTS, count_iterations_to
from claimed.results import Results, Row
from claimed.tasks import TASKS

EPISODES = PROMPTS * GROUP  # of an iteration
LATE = 20  # last iterations, over which a controller is judged


def write_report(output: Path, results: Results, seeds: int) -> str:
    """Write DIR/claims.md from the results that are there."""
    lines = []
    for name, part in PARTS.items():
        if results.of(name, part.arms[0].name, seeds):
            lines += [
                f"## {name}: {part.title}",
                "",
                *format_policies(name, part, results, seeds),
                "",
            ]
            lines += format_kl(name, part, results, seeds) if name == "kl" else []
    lines += (
        format_memory(results, seeds)
        + format_over_optimisation(results, seeds)
        + format_thoughts(results, seeds)
    )
    lines += format_ratings(results, seeds)
    text = "\n".join(lines) + "\n"
    output.mkdir(parents=True, exist_ok=True)
    (output / "claims.md").write_text(text)
    return text


def read_success(row: Row, key: str = "success") -> float:
    """Return the share of successes, in percent."""
    return 100 * statistics.fmean(row[key])


def format_percentages(rows: Sequence[Row], key: str = "success") -> str:
    """Format the percentages of the single seeds."""
    return ", ".join(f"{read_success(row, key):.1f}" for row in rows)


def format_policies(name: str, part: Part, results: Results, seeds: int) -> list[str]:
    """Tabulate the success of each arm and its difference to the first one."""
    base = results.of(name, part.arms[0].name, seeds)
    levels = [
        level for level in TASKS[part.task].levels if any(level in row["levels"] for row in base)
    ]
    by_level = levels if len(levels) > 1 else []
    more = [f"episodes until {100 * part.threshold:.0f}% in training"] if part.threshold else []
    titles = [
        "arm",
        "success [95%]",
        "each seed",
        "validation",
        *by_level,
        "vs. the first [95%]",
        "better",
        *more,
    ]
    lines = [f"| {' | '.join(titles)} |", "|" + "---|" * len(titles)]
    for arm in part.arms:
        rows = results.of(name, arm.name, seeds)
        if not rows:
            continue
        cells = [
            arm.name,
            f"{format_interval(estimate_interval([read_success(row) for row in rows]))}%",
            format_percentages(rows),
        ]
        cells.append(f"{statistics.fmean(read_success(row, 'validation') for row in rows):.1f}%")
        for level in by_level:
            values = [
                ok
                for row in rows
                for ok, at in zip(row["success"], row["levels"], strict=True)
                if at == level
            ]
            cells.append(f"{100 * statistics.fmean(values):.1f}%")
        if arm is part.arms[0] or len(rows) != len(base):
            cells += ["", ""]
        else:
            difference = estimate_gap(
                [read_success(row) for row in rows], [read_success(row) for row in base]
            )
            cells += [format_interval(difference), describe_gap(*difference[1:])]
        if part.threshold:
            reached = [count_iterations_to(row, part.threshold) for row in rows]
            cells.append(", ".join("never" if n is None else str(n * EPISODES) for n in reached))
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, "", *format_behaviour(name, part, results, seeds)]


def format_behaviour(name: str, part: Part, results: Results, seeds: int) -> list[str]:
    """Play of the policies, and effects of the updates: means over the seeds."""
    last = {
        "policy/entropy": "entropy",
        "policy/update_kl": "KL of an update",
        "policy/update_kl_exact": "exact",
        "value/explained_variance": "explained variance",
        "policy/refused_steps": "refused steps",
        "curriculum/rollbacks": "rollbacks",
    }
    known = {
        key
        for arm in part.arms
        for row in results.of(name, arm.name, seeds)
        for key in row["curves"]
    }
    seen = [key for key in last if key in known]
    played = {
        "turns": "turns",
        "tool_calls": "calls",
        "misuse": "misused turns",
        "truncated": "cut",
    }
    titles = ["arm", *played.values(), *(last[key] for key in seen), "processor s"]
    lines = [f"| {' | '.join(titles)} |", "|" + "---|" * len(titles)]
    for arm in part.arms:
        rows = results.of(name, arm.name, seeds)
        if rows:
            cells = [
                arm.name,
                *(f"{statistics.fmean(row[key] for row in rows):.3g}" for key in played),
            ]
            for key in seen:
                tails = [
                    [v for v in row["curves"].get(key, []) if v is not None][-5:] for row in rows
                ]
                values = [statistics.fmean(tail) for tail in tails if tail]
                cells.append(f"{statistics.fmean(values):.3g}" if values else "")
            cells.append(f"{statistics.fmean(row['processor_seconds'] for row in rows):.0f}")
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def format_kl(name: str, part: Part, results: Results, seeds: int) -> list[str]:
    """Tabulate the KL of the last iterations and its target."""
    target = 0.03
    lines = [
        f"| arm | KL, last {LATE} iterations [95%] | each seed | iterations within 20% of {target} | coefficient |",
        "|" + "---|" * 5,
    ]
    for arm in part.arms:
        rows = results.of(name, arm.name, seeds)
        if rows:
            late = [row["curves"]["policy/ref_kl"][-LATE:] for row in rows]
            means = [statistics.fmean(values) for values in late]
            inside = statistics.fmean(
                abs(value / target - 1) <= 0.2 for values in late for value in values
            )
            coefs = statistics.fmean(
                value for row in rows for value in row["curves"]["policy/kl_coef"][-LATE:]
            )
            numbers = ", ".join(f"{mean:.4f}" for mean in means)
            lines.append(
                f"| {arm.name} | {format_interval(estimate_interval(means), digits=4)} | {numbers} "
                f"| {inside:.0%} | {coefs:.3g} |"
            )
    return [*lines, ""]


def format_memory(results: Results, seeds: int) -> list[str]:
    """Tabulate memory and processor time of an optimizer step."""
    rows_by_arm = {arm: rows for arm in memory.ARMS if (rows := results.of("memory", arm, seeds))}
    if not rows_by_arm:
        return []
    lines = [
        "## memory: an optimizer step of 26M parameters, 8 rows of about 240 tokens",
        "",
        "| arm | trained weights | peak above the loaded model, MB [95%] | processor s of a step [95%] |",
        "|---|---|---|---|",
    ]
    for arm, rows in rows_by_arm.items():
        peaks, seconds = (
            estimate_interval([row["peak"] / 1e6 for row in rows]),
            estimate_interval([row["seconds"] for row in rows]),
        )
        lines.append(
            f"| {arm} | {rows[0]['trainable']:,} | {format_interval(peaks, digits=0)} "
            f"| {format_interval(seconds, digits=2)} |"
        )
    return [*lines, ""]


def format_over_optimisation(results: Results, seeds: int) -> list[str]:
    """Tabulate the true success of PPO against reward models."""
    name, arms = "over-optimisation", over_optimisation.ARMS
    base = results.of(name, arms[0].name, seeds)
    if not base:
        return []
    stopped = [read_success(row, "best") for row in base]
    right = ", ".join(f"{row['reward_model']['accuracy']:.3f}" for row in base)
    lines = [
        f"## {name}: PPO against a reward model (held-out accuracy {right})",
        "",
        "| arm | success at the end [95%] | each seed | at the best look [95%] | each seed | "
        "end, vs. stopping the first early [95%] | better | score at the end |",
        "|" + "---|" * 8,
    ]
    for arm in arms:
        if rows := results.of(name, arm.name, seeds):
            ends, best = (
                [read_success(row) for row in rows],
                [read_success(row, "best") for row in rows],
            )
            difference = estimate_gap(ends, stopped) if len(rows) == len(base) else None
            score = statistics.fmean(row["curves"]["reward/mean"][-1] for row in rows)
            lines.append(
                f"| {arm.name} | {format_interval(estimate_interval(ends))}% | {format_percentages(rows)} "
                f"| {format_interval(estimate_interval(best))}% | "
                f"{format_percentages(rows, 'best')} | {format_interval(difference) if difference else ''} | "
                f"{describe_gap(*difference[1:]) if difference else ''} | {score:.2f} |"
            )
    return [*lines, ""]


def format_thoughts(results: Results, seeds: int) -> list[str]:
    """Tabulate the variance of the thoughts' gradient."""
    rows = results.of("thoughts", "variance", seeds)
    if not rows:
        return []
    kinds = [row["kinds"] for row in rows]
    lines = [
        "## thoughts: variance of the policy gradient",
        "",
        "| credit | variance against no baseline [95%] | each seed | noise to signal | explained variance |",
        "|" + "---|" * 5,
    ]
    for name in thought_variance.KINDS:
        ratios = [kind[name]["variance"] / kind["no baseline"]["variance"] for kind in kinds]
        noise = statistics.fmean(
            kind[name]["variance"] / max(kind[name]["signal"], 1e-12) for kind in kinds
        )
        explained = statistics.fmean(kind[name]["explained"] for kind in kinds)
        numbers = ", ".join(f"{ratio:.2f}" for ratio in ratios)
        lines.append(
            f"| {name} | {format_interval(estimate_interval(ratios), digits=2)} | {numbers} "
            f"| {noise:.2f} | {explained:.2f} |"
        )
    return [*lines, ""]


def format_ratings(results: Results, seeds: int) -> list[str]:
    """Tabulate accuracy by labels, chosen by uncertainty and at random."""
    lines = []
    for labels in rating_choice.COUNTS:
        accuracies = {
            choose: {row["seed"]: 100 * row["accuracy"] for row in rows}
            for choose in ("uncertainty", "random")
            if (rows := results.of("ratings", rating_choice.name_arm(choose, labels), seeds))
        }
        both = sorted(set(accuracies.get("uncertainty", {})) & set(accuracies.get("random", {})))
        if both:
            chosen, drawn = (
                [accuracies[choose][seed] for seed in both] for choose in ("uncertainty", "random")
            )
            difference = estimate_gap(chosen, drawn)
            lines.append(
                f"| {labels} | {format_interval(estimate_interval(chosen))}% "
                f"| {format_interval(estimate_interval(drawn))}% | {format_interval(difference)} | "
                f"{describe_gap(*difference[1:])} | {len(both)} |"
            )
    if not lines:
        return []
    head = [
        "labels",
        "by uncertainty [95%]",
        "at random [95%]",
        "difference [95%]",
        "better",
        "seeds",
    ]
    return [
        "## ratings: held-out accuracy",
        "",
        f"| {' | '.join(head)} |",
        "|" + "---|" * len(head),
        *lines,
        "",
    ]
