"""Tabs about the policy: rewards, tools, curriculum, trajectories."""

from __future__ import annotations

import json
import shlex
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from posttrain.monitor.charts import (
    MISSING_VALUE,
    ComparedStages,
    DrawingOptions,
    PageSelection,
    build_chart,
    build_charts_block,
    build_charts_by_scale,
    build_family_chart,
    build_line,
    build_move_marks,
    build_note,
    build_overlay_chart,
    build_table,
    format_metric_value,
    format_number,
    format_percent,
)
from posttrain.monitor.episodes import (
    format_replay_name,
    has_misuse,
    list_episode_files,
    read_episodes,
    summarize_reward_components,
    summarize_tool_calls,
)
from posttrain.monitor.overview_views import build_reward_share_bars, build_tool_bars
from posttrain.monitor.runs import RunView, StageView
from tasks.command_hints import format_posttrain_command

MAX_EPISODES = 60  # in the list of trajectories

OUTCOME_FILTERS: dict[str, Callable[[Mapping[str, Any]], bool]] = {
    "all": lambda row: True,
    "right": lambda row: bool(row.get("success")),
    "wrong": lambda row: row.get("success") is False,
    "with misuse": has_misuse,
}

_ROLLBACK_METRICS = (
    ("curriculum/watched", "watched for a rollback"),
    ("curriculum/entry_level", "level at entry"),
)
_REWARD_TILES = (
    ("reward/mean", "total reward", "mean over the last 10 iterations"),
    ("train/success_rate", "true success", "mean over the last 10 iterations"),
    ("reward/correlation/total", "correlation of the two", "Pearson's r over rollouts"),
    ("reward/masked_rate", "masked rollouts", "no reward could be computed"),
)


def _build_empty_note(text: str) -> list[dict[str, Any]]:
    return [build_note("nothing", [text], "small")]


def _list_metrics_below(
    stage: StageView, prefix: str, *, is_nested: bool = False
) -> list[tuple[str, str]]:
    """List the metrics directly below a prefix, or all below it, each with the last part of its name."""
    return [
        (name, name.removeprefix(prefix))
        for name in sorted(stage.table.series)
        if name.startswith(prefix) and (is_nested or "/" not in name.removeprefix(prefix))
    ]


def build_rewards_tab(
    run: RunView, pairs: ComparedStages, choice: PageSelection
) -> list[dict[str, Any]]:
    """Build the rewards tab: components, raw and weighted, their correlation with success, and the alarm."""
    if not pairs or "reward/mean" not in pairs[0][1].table.series:
        return _build_empty_note(
            "This stage has no rewards. They come with the stage policy; choose it above once it has begun."
        )
    stage = pairs[0][1]
    blocks: list[dict[str, Any]] = [_build_reward_tiles(stage)]
    if (bars := build_reward_share_bars(stage, choice)) is not None:
        blocks.append(bars)
    alarm = stage.table.series.get("reward/alarm")
    if alarm is not None and alarm.last > 0:
        lines = [
            "The alarm is on: the total reward rises while success falls.",
            "Compare the correlations of the components below.",
        ]
        blocks.append(build_note("alarm", lines, "bad"))
    blocks.append(build_charts_block("rewards", _build_reward_charts(stage, pairs, choice)))
    if (table := _build_components_table(stage)) is not None:
        blocks.append(table)
    return blocks


def _build_reward_charts(
    stage: StageView, pairs: ComparedStages, choice: PageSelection
) -> list[dict[str, Any]]:
    options = choice.drawing_options
    totals = [("reward/mean", "mean"), ("reward/std", "std over rollouts")]
    by_environment = _list_metrics_below(stage, "reward/mean_by_environment/")
    weighted = _list_metrics_below(stage, "reward/weighted/")
    correlations = _list_metrics_below(stage, "reward/correlation/")
    raw = [
        (name, label)
        for name, label in _list_metrics_below(stage, "reward/")
        if label not in ("mean", "std", "alarm", "total")
    ]
    charts = [
        build_family_chart("total", "Total reward", totals, pairs, options, unit="per episode"),
        build_family_chart(
            "environments",
            "Total reward by environment",
            by_environment,
            pairs,
            options,
            unit="per episode",
        ),
        build_family_chart(
            "weighted", "Weighted parts", weighted, pairs, options, unit="add up to the total"
        ),
        *build_charts_by_scale("raw", raw, pairs, options, title="Raw: {}", unit="before weighing"),
        build_family_chart(
            "correlation",
            "Correlation with true success",
            correlations,
            pairs,
            options,
            unit="Pearson's r",
            span=(-1.0, 1.0),
        ),
    ]
    alarm = stage.table.series.get("reward/alarm")
    if alarm is not None and float(alarm.read_arrays()[2].max()) > 0:
        alarms, unsmoothed = [("reward/alarm", "alarm")], DrawingOptions(1, options.by_time)
        charts.append(
            build_family_chart("alarm", "Alarm", alarms, pairs, unsmoothed, span=(0.0, 1.0))
        )
    return [chart for chart in charts if chart is not None]


def _build_components_table(stage: StageView) -> dict[str, Any] | None:
    """Build the breakdown of the newest rollouts; None without records."""
    if stage.folder is None:
        return None
    count, components = summarize_reward_components(stage.folder / "rewards.jsonl")
    if not count:
        return None
    rows = [
        [
            row["part"],
            format_number(row["raw"]),
            format_number(row["weighted"]),
            format_number(row["on_success"]),
            format_number(row["on_failure"]),
            format_number(row["correlation"], 2),
        ]
        for row in components
    ]
    columns = (
        "part",
        "#raw mean",
        "#weighted mean",
        "#when right",
        "#when wrong",
        "#correlation with success",
    )
    note = f"Means over the newest {count:,} rollouts of training; the last three columns are of the weighted part."
    return build_table("parts", "Breakdown of the newest rollouts", columns, rows, note)


def _build_reward_tiles(stage: StageView) -> dict[str, Any]:
    series = stage.table.series
    items = [
        {
            "label": label,
            "value": format_metric_value(name, series[name].compute_mean(10)),
            "sub": sub,
        }
        for name, label, sub in _REWARD_TILES
        if name in series
    ]
    if (alarm := series.get("reward/alarm")) is not None:
        times = float(alarm.read_arrays()[2].sum()) * alarm.stride
        items.append(
            {
                "label": "alarm",
                "value": "on" if alarm.last > 0 else "off",
                "sub": f"total rises while success falls: {times:.0f} times",
            }
        )
    return {"kind": "tiles", "id": "rewards now", "items": items}


def build_tools_tab(
    run: RunView, pairs: ComparedStages, choice: PageSelection
) -> list[dict[str, Any]]:
    """Build the tools tab: tool calls and misuse over training, and by tool in the latest episodes."""
    blocks: list[dict[str, Any]] = []
    if pairs and (charts := _build_tool_charts(pairs, choice)):
        blocks.append(build_charts_block("tools", charts))
    summaries = []
    for source, path in list_episode_files(run).items():
        episodes = read_episodes(path)
        if calls := summarize_tool_calls(episodes):
            summaries.append((source, len(episodes), calls))
    newest = summaries[0][2] if summaries else []
    if pairs and (bars := build_tool_bars(pairs[0][1], choice, newest)) is not None:
        blocks.insert(0, bars)
    blocks += [_build_tool_table(*summary) for summary in summaries]
    return blocks or _build_empty_note(
        "No tool was called yet: neither training nor evaluation has played an episode."
    )


def _build_tool_charts(pairs: ComparedStages, choice: PageSelection) -> list[dict[str, Any]]:
    stage = pairs[0][1]
    first = ("tool/calls", "tool/misuse_rate", "train/turns")
    names = [name for name in first if name in stage.table.series]
    names += [name for name, _ in _list_metrics_below(stage, "tool/") if name not in names]
    charts = []
    for name in names:
        span = (0.0, 0.1) if name == "tool/misuse_rate" else None
        charts.append(build_overlay_chart(name, pairs, choice.drawing_options, span=span))
    return charts


def _build_tool_table(
    source: str, num_episodes: int, calls: list[dict[str, Any]]
) -> dict[str, Any]:
    rows = [
        [
            row["tool"],
            f"{row['calls']:,}",
            format_number(row["per_episode"], 2),
            {"t": format_percent(row["share_of_episodes"]), "bar": row["share_of_episodes"]},
            format_percent(row["error_rate"]),
            format_percent(row["success_rate"]),
        ]
        for row in calls
    ]
    columns = (
        "tool",
        "#calls",
        "#per episode",
        "episodes that call it",
        "#misuse",
        "#success when called",
    )
    title = source[0].upper() + source[1:]
    note = f"The newest {num_episodes:,} trajectories."
    return build_table(f"tools:{source}", title, columns, rows, note)


def build_curriculum_tab(
    run: RunView, pairs: ComparedStages, choice: PageSelection
) -> list[dict[str, Any]]:
    """Build the curriculum tab: its stage over iterations, pending exit conditions, and all moves with reasons."""
    if not pairs or "curriculum/stage" not in pairs[0][1].table.series:
        return _build_empty_note(
            "This stage has no curriculum. It comes with the stage policy; choose it above once it has begun."
        )
    stage = pairs[0][1]
    settings = (run.config.get("stages") or {}).get(stage.label) or {}
    planned = [row for row in settings.get("curriculum") or [] if isinstance(row, dict)]
    names = [str(row.get("name", index)) for index, row in enumerate(planned)]
    current = int(stage.table.series["curriculum/stage"].last)
    names += [str(index) for index in range(len(names), current + 1)]
    charts = _build_curriculum_charts(run, pairs, names, choice)
    blocks = [
        _build_curriculum_tiles(stage, names, current),
        build_charts_block("curriculum", charts),
    ]
    if planned:
        blocks.append(_build_plan_table(planned, current, stage, settings, is_over=run.is_over))
    blocks.append(_build_moves_table(stage))
    return blocks


def _build_curriculum_tiles(stage: StageView, names: Sequence[str], current: int) -> dict[str, Any]:
    series = stage.table.series
    kinds = Counter(str(move.get("kind", "")) for move in stage.curriculum)
    iterations = series.get("curriculum/stage_iterations")
    filled = series.get("curriculum/window_filled")
    items = [
        {
            "label": "stage of the curriculum",
            "value": names[current],
            "sub": f"{current + 1} of {len(names)}",
        },
        {
            "label": "iterations in it",
            "value": format_number(iterations.last, 0) if iterations else MISSING_VALUE,
            "sub": "",
        },
        {"label": "advances", "value": str(kinds["advance"]), "sub": "to the next stage"},
        {"label": "rollbacks", "value": str(kinds["rollback"]), "sub": ""},
    ]
    if filled is not None:
        items.append(
            {
                "label": "window filled",
                "value": format_percent(filled.last),
                "sub": "nothing is judged before 100 %",
            }
        )
    return {"kind": "tiles", "id": "where", "items": items}


def _build_curriculum_charts(
    run: RunView, pairs: ComparedStages, names: Sequence[str], choice: PageSelection
) -> list[dict[str, Any]]:
    stage, options = pairs[0][1], choice.drawing_options
    unsmoothed = DrawingOptions(window=1, by_time=choice.by_time)
    series = stage.table.series["curriculum/stage"]
    stage_chart = build_chart(
        f"stage:{stage.label}:{choice.by_time}",
        "Stage of the curriculum",
        [build_line(series, "stage", 0, unsmoothed, run.started)],
        unsmoothed,
        x="iteration",
        names=names,
        moves=build_move_marks(stage, unsmoothed, run.started),
    )
    # Levels of a mixture are named environment/level.
    levels = _list_metrics_below(stage, "train/success_rate_by_level/", is_nested=True)
    level_chart = build_family_chart(
        "levels", "Success by level", levels, pairs, options, unit="share", span=(0.0, 1.0)
    )
    averages = [*_list_metrics_below(stage, "curriculum/average/"), *_ROLLBACK_METRICS]
    average_charts = build_charts_by_scale(
        "average",
        averages,
        pairs,
        options,
        title="Decides: {}",
        unit="average over its own window",
    )
    charts = [stage_chart, level_chart, *average_charts]
    return [chart for chart in charts if chart is not None]


def _build_plan_table(
    planned: Sequence[Mapping[str, Any]],
    current: int,
    stage: StageView,
    settings: Mapping[str, Any],
    *,
    is_over: bool,
) -> dict[str, Any]:
    """Build the table of stages with level mix and exit conditions; of the current stage with present values."""
    rows = []
    early_stop = settings.get("early_stop")
    for index, row in enumerate(planned):
        is_current = index == current
        weights = row.get("levels", {})
        total = sum(weights.values()) or 1.0
        mix = ", ".join(f"{name} {weight / total:.0%}" for name, weight in weights.items())
        conditions = [
            _describe_condition(condition, stage, is_current)
            for condition in row.get("exit_conditions") or []
        ]
        if early_stop and index == len(planned) - 1:
            condition = _describe_condition(early_stop, stage, is_current)
            conditions.append(f"{condition} (ends the training)")
        connective = " or " if row.get("require") == "any" else " and "
        if is_current:
            status = {"t": "ended here" if is_over else "now", "badge": "info"}
        elif index < current:
            status = {"t": "passed", "badge": "good"}
        else:
            status = {"t": "to come", "badge": "none"}
        exit_text = connective.join(conditions) or "the end of the iterations"
        rows.append([str(row.get("name", index)), status, mix, exit_text])
    return build_table("plan", "Plan", ("stage", "", "mix of levels", "~is left when"), rows)


def _describe_condition(row: Mapping[str, Any], stage: StageView, is_current: bool) -> str:
    statistic = row.get("statistic", "mean")
    prefix = f"{statistic} of " if statistic != "mean" else ""
    comparison = f"{row.get('comparison', '>=')} {row.get('threshold')}"
    text = f"{prefix}{row.get('metric')} {comparison} over {row.get('window')}"
    kind = "slope" if statistic == "slope" else "average"
    series = stage.table.series.get(f"curriculum/{kind}/{row.get('metric')}")
    if is_current and series is not None:
        return f"{text} (now {format_number(series.last, 4)})"
    return text


def _build_moves_table(stage: StageView) -> dict[str, Any]:
    rows = []
    for move in reversed(stage.curriculum):
        kind = str(move.get("kind", ""))
        metrics = (move.get("metrics") or {}).items()
        rows.append(
            [
                f"{float(move.get('iteration', 0)):,.0f}",
                {"t": kind, "badge": "info" if kind == "advance" else "bad"},
                str(move.get("from", "")),
                str(move.get("to", "")),
                str(move.get("why", "")),
                ", ".join(f"{name} {format_number(value, 4)}" for name, value in metrics),
            ]
        )
    if not rows:
        return build_note("moves", ["No move yet: still in the first stage."], "small")
    columns = ("#iteration", "move", "from", "to", "~why", "~measured")
    return build_table("moves", "History, the newest first", columns, rows)


def build_trajectories_tab(
    run: RunView, pairs: ComparedStages, choice: PageSelection
) -> list[dict[str, Any]]:
    """Build the trajectories tab: the latest trajectories of one file, turn by turn."""
    files = list_episode_files(run)
    if not files:
        return _build_empty_note(
            "No trajectories yet: they come with training by rewards and with the stage evaluate."
        )
    source = choice.source if choice.source in files else next(iter(files))
    episodes = read_episodes(files[source])
    rows = [row for row in episodes if OUTCOME_FILTERS[choice.outcome](row)]
    if not rows:
        text = f"{source}: none of its newest {len(episodes):,} trajectories is {choice.outcome}"
        if choice.outcome in ("right", "wrong") and all(e.get("success") is None for e in episodes):
            text += ": whether one is right is unknown, as the environment has no verifier"
        return _build_empty_note(f"{text}.")
    note = f"{source}: {len(rows):,} of the newest {len(episodes):,} trajectories"
    if len(rows) > MAX_EPISODES:
        note += f"; the newest {MAX_EPISODES} of them are listed"
    items = [_build_episode(run, row, files[source]) for row in rows[:MAX_EPISODES]]
    return [
        build_note("count", [f"{note}."], "small"),
        {"kind": "episodes", "id": "episodes", "source": source, "rows": items},
    ]


def _draws_images(environment: Mapping[str, Any], level: str) -> bool:
    """Return whether the environment, or that of the level in a mixture, shows a picture."""
    names = {"": environment.get("name")}
    for entry in (environment.get("options") or {}).get("environments") or ():
        label = entry.get("label") or str(entry.get("name")).rpartition(":")[2]
        names[label] = entry.get("name")
    return names.get(level.partition("/")[0], names[""]) == "pixel_grid"


def _build_episode(run: RunView, row: Mapping[str, Any], path: Path) -> dict[str, Any]:
    level, seed = str(row.get("level", "")), row.get("seed", 0)
    turns = [turn for turn in row["turns"] if isinstance(turn, dict)]
    num_turns = f"{len(turns)} turn{'s' if len(turns) != 1 else ''}"
    # The number of the records and of `posttrain replay`: iterations that were complete when it was sampled.
    iteration = ""
    if isinstance(row.get("iteration"), int):
        num_done = int(row["iteration"])
        iteration = f"after {num_done} iteration{'s' if num_done != 1 else ''} · "
    image = ""
    if _draws_images(run.config.get("environment") or {}, level):
        image = f"image.png?{urlencode({'run': run.id, 'level': level, 'seed': seed})}"
    reward = format_number(row.get("reward"))
    return {
        "id": f"{row.get('iteration', '')}:{level}:{seed}:{row.get('sample', 0)}",
        "prompt": str(row.get("prompt", "")),
        "sub": f"{iteration}{level} · {row.get('kind', '')} · {num_turns} · reward {reward}",
        "success": row.get("success"),
        "facts": _list_episode_facts(run, row, path),
        "image": image,
        "turns": [
            {
                "action": str(turn.get("action", "")),
                "call": _format_tool_call(turn.get("tool_call")),
                "observation": turn.get("observation"),
                "error": bool(turn.get("is_error")),
            }
            for turn in turns
        ],
    }


def _list_episode_facts(run: RunView, row: Mapping[str, Any], path: Path) -> list[list[str]]:
    """List facts of an episode as [label, text]."""
    answer = row.get("answer")
    reward = format_number(row.get("reward"))
    if components := row.get("rewards"):
        parts = ", ".join(f"{name} {format_number(value)}" for name, value in components.items())
        reward = f"{reward} ({parts})"
    replay = f"replay {shlex.quote(format_replay_name(path, row))}"
    num_written, num_all = row.get("num_action_tokens", 0), row.get("num_completion_tokens", 0)
    return [
        ["right answer", str(row.get("target") or MISSING_VALUE)],
        ["its answer", "none" if answer is None else str(answer)],
        ["reward", reward],
        ["ended by", str(row.get("stop_reason", "")).replace("_", " ")],
        ["replay it", format_posttrain_command(replay, run.output)],
        ["tokens", f"{num_written} written, {num_all} with observations"],
    ]


def _format_tool_call(call: object) -> str:
    if not isinstance(call, dict):
        return ""
    arguments, text = call.get("arguments"), ""
    if isinstance(arguments, dict):
        text = ", ".join(f"{name}={json.dumps(value)}" for name, value in arguments.items())
    return f"calls {call.get('name')}({text})"
