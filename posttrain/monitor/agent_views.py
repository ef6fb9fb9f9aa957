"""The tabs about the policy: rewards, tools, curriculum, trajectories."""

from __future__ import annotations

import json
import shlex
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from posttrain.monitor.charts import (
    MISSING_VALUE,
    ComparedStages,
    DrawingOptions,
    PageSelection,
    build_chart,
    build_charts_by_scale,
    build_family_chart,
    build_line,
    build_move_marks,
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

_ROLLBACK_METRICS = (
    ("curriculum/watched", "watched for a rollback"),
    ("curriculum/entry_level", "level at entry"),
)

OUTCOME_FILTERS: dict[str, Callable[[Mapping[str, Any]], bool]] = {
    "all": lambda row: True,
    "right": lambda row: bool(row.get("success")),
    "wrong": lambda row: not row.get("success"),
    "with misuse": has_misuse,
}


def _build_empty_note(text: str) -> list[dict[str, Any]]:
    return [{"kind": "note", "id": "nothing", "tone": "small", "lines": [text]}]


def _list_metrics_below(stage: StageView, prefix: str) -> list[tuple[str, str]]:
    """(metric, its last part) of the metrics right below a prefix."""
    return [
        (name, name.removeprefix(prefix))
        for name in sorted(stage.table.series)
        if name.startswith(prefix) and "/" not in name.removeprefix(prefix)
    ]


# -------------------------------------------------------------------------------------------------------- rewards


def build_rewards_tab(
    run: RunView, pairs: ComparedStages, choice: PageSelection
) -> list[dict[str, Any]]:
    """Reward components, raw and weighted, their correlation with success, and the alarm."""
    if not pairs or "reward/mean" not in pairs[0][1].table.series:
        return _build_empty_note(
            "This stage has no rewards. They come with the stage policy; choose it above once it has begun."
        )
    stage = pairs[0][1]
    drawn = choice.drawing_options
    raw = [
        pair
        for pair in _list_metrics_below(stage, "reward/")
        if pair[1] not in ("mean", "std", "alarm", "total")
    ]
    parts = [
        build_family_chart(
            "total",
            "Total reward",
            [("reward/mean", "mean"), ("reward/std", "std over rollouts")],
            pairs,
            drawn,
            unit="per episode",
        ),
        build_family_chart(
            "weighted",
            "Weighted parts",
            _list_metrics_below(stage, "reward/weighted/"),
            pairs,
            drawn,
            unit="add up to the total",
        ),
        *build_charts_by_scale("raw", raw, pairs, drawn, title="Raw: {}", unit="before weighing"),
        build_family_chart(
            "correlation",
            "Correlation with true success",
            _list_metrics_below(stage, "reward/correlation/"),
            pairs,
            drawn,
            unit="Pearson's r",
            span=(-1.0, 1.0),
        ),
    ]
    blocks: list[dict[str, Any]] = [
        _build_reward_tiles(stage),
        *filter(None, (build_reward_share_bars(stage, choice),)),
    ]
    alarm = stage.table.series.get("reward/alarm")
    if alarm is not None and float(alarm.read_arrays()[2].max()) > 0:
        found = build_family_chart(
            "alarm",
            "Alarm",
            [("reward/alarm", "alarm")],
            pairs,
            DrawingOptions(1, drawn.by_time),
            span=(0.0, 1.0),
        )
        parts.append(found)
    if alarm is not None and alarm.last > 0:
        lines = [
            "The alarm is on: the total reward rises while success falls.",
            "Compare the correlations of the components below.",
        ]
        blocks.append({"kind": "note", "id": "alarm", "tone": "bad", "lines": lines})
    charts = [found for found in parts if found is not None]
    blocks.append({"kind": "charts", "id": "rewards", "title": "", "note": "", "charts": charts})
    count, table_rows = (
        summarize_reward_components(stage.folder / "rewards.jsonl") if stage.folder else (0, [])
    )
    if count:
        rows = [
            [
                row["part"],
                format_number(row["raw"]),
                format_number(row["weighted"]),
                format_number(row["on_success"]),
                format_number(row["on_failure"]),
                format_number(row["correlation"], 2),
            ]
            for row in table_rows
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
        blocks.append(build_table("parts", "Breakdown of the newest rollouts", columns, rows, note))
    return blocks


def _build_reward_tiles(stage: StageView) -> dict[str, Any]:
    series = stage.table.series
    wanted = (
        ("reward/mean", "total reward", "mean over the last 10 iterations"),
        ("train/success_rate", "true success", "mean over the last 10 iterations"),
        ("reward/correlation/total", "correlation of the two", "Pearson's r over rollouts"),
        ("reward/masked_rate", "masked rollouts", "no reward could be computed"),
    )
    items = [
        {
            "label": label,
            "value": format_metric_value(name, series[name].compute_mean(10)),
            "sub": sub,
        }
        for name, label, sub in wanted
        if name in series
    ]
    if "reward/alarm" in series:
        times = float(series["reward/alarm"].read_arrays()[2].sum()) * series["reward/alarm"].stride
        value = "on" if series["reward/alarm"].last > 0 else "off"
        items.append(
            {
                "label": "alarm",
                "value": value,
                "sub": f"total rises while success falls: {times:.0f} times",
            }
        )
    return {"kind": "tiles", "id": "rewards now", "items": items}


# ---------------------------------------------------------------------------------------------------------- tools


def build_tools_tab(
    run: RunView, pairs: ComparedStages, choice: PageSelection
) -> list[dict[str, Any]]:
    """Tool calls and misuse over training, and by tool in the latest episodes."""
    blocks: list[dict[str, Any]] = []
    if pairs:
        first = ("tool/calls", "tool/misuse_rate", "train/turns")
        names: list[str] = [name for name in first if name in pairs[0][1].table.series]
        names += [n for n, _ in _list_metrics_below(pairs[0][1], "tool/") if n not in names]
        if names:
            charts = [
                build_overlay_chart(
                    name,
                    pairs,
                    choice.drawing_options,
                    span=(0.0, 0.1) if name == "tool/misuse_rate" else None,
                )
                for name in names
            ]
            blocks.append(
                {"kind": "charts", "id": "tools", "title": "", "note": "", "charts": charts}
            )
    told = [
        (source, rows, summarize_tool_calls(rows)) for source, rows in _read_recorded_episodes(run)
    ]
    newest = next((found for _, _, found in told if found), [])
    if pairs and (bars := build_tool_bars(pairs[0][1], choice, newest)) is not None:
        blocks.insert(0, bars)
    for source, rows, found in told:
        if not found:
            continue
        cells = [
            [
                row["tool"],
                f"{row['calls']:,}",
                format_number(row["per_episode"], 2),
                {"t": format_percent(row["share_of_episodes"]), "bar": row["share_of_episodes"]},
                format_percent(row["error_rate"]),
                format_percent(row["success_rate"]),
            ]
            for row in found
        ]
        columns = (
            "tool",
            "#calls",
            "#per episode",
            "episodes that call it",
            "#misuse",
            "#success when called",
        )
        note = f"The newest {len(rows):,} trajectories."
        blocks.append(
            build_table(f"tools:{source}", source[0].upper() + source[1:], columns, cells, note)
        )
    return blocks or _build_empty_note(
        "No tool was called yet: neither training nor evaluation has played an episode."
    )


def _read_recorded_episodes(run: RunView) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    for source, path in list_episode_files(run).items():
        yield source, read_episodes(path)


# ----------------------------------------------------------------------------------------------------- curriculum


def build_curriculum_tab(
    run: RunView, pairs: ComparedStages, choice: PageSelection
) -> list[dict[str, Any]]:
    """Curriculum stage over iterations, pending exit conditions, and all moves with reasons."""
    if not pairs or "curriculum/stage" not in pairs[0][1].table.series:
        return _build_empty_note(
            "This stage has no curriculum. It comes with the stage policy; choose it above once it has begun."
        )
    stage = pairs[0][1]
    settings = (run.config.get("stages") or {}).get(stage.label) or {}
    planned = [row for row in settings.get("curriculum") or [] if isinstance(row, dict)]
    names = [str(row.get("name", index)) for index, row in enumerate(planned)]
    now = int(stage.table.series["curriculum/stage"].last)
    names += [str(index) for index in range(len(names), now + 1)]
    blocks: list[dict[str, Any]] = [_build_curriculum_tiles(stage, names, now)]
    charts: list[dict[str, Any] | None] = [_build_stage_chart(run, stage, names, choice)]
    levels = _list_metrics_below(stage, "train/success_rate_by_level/")
    charts.append(
        build_family_chart(
            "levels",
            "Success by level",
            levels,
            pairs,
            choice.drawing_options,
            unit="share",
            span=(0.0, 1.0),
        )
    )
    averages = [*_list_metrics_below(stage, "curriculum/average/"), *_ROLLBACK_METRICS]
    charts += build_charts_by_scale(
        "average",
        averages,
        pairs,
        choice.drawing_options,
        title="Decides: {}",
        unit="average over its own window",
    )
    blocks.append(
        {
            "kind": "charts",
            "id": "curriculum",
            "title": "",
            "note": "",
            "charts": [c for c in charts if c is not None],
        }
    )
    if planned:
        blocks.append(_build_plan_table(planned, now, stage, settings, is_over=run.is_over))
    rows = [
        [
            f"{float(move.get('iteration', 0)):,.0f}",
            {
                "t": str(move.get("kind", "")),
                "badge": "info" if move.get("kind") == "advance" else "bad",
            },
            str(move.get("from", "")),
            str(move.get("to", "")),
            str(move.get("why", "")),
            ", ".join(
                f"{name} {format_number(value, 4)}"
                for name, value in (move.get("metrics") or {}).items()
            ),
        ]
        for move in reversed(stage.curriculum)
    ]
    if rows:
        columns = ("#iteration", "move", "from", "to", "~why", "~measured")
        blocks.append(build_table("moves", "History, the newest first", columns, rows))
    else:
        blocks.append(
            {
                "kind": "note",
                "id": "moves",
                "tone": "small",
                "lines": ["No move yet: still in the first stage."],
            }
        )
    return blocks


def _build_curriculum_tiles(stage: StageView, names: Sequence[str], now: int) -> dict[str, Any]:
    series = stage.table.series
    kinds = Counter(str(move.get("kind", "")) for move in stage.curriculum)
    here = series.get("curriculum/stage_iterations")
    filled = series.get("curriculum/window_filled")
    items = [
        {
            "label": "stage of the curriculum",
            "value": names[now],
            "sub": f"{now + 1} of {len(names)}",
        },
        {
            "label": "iterations in it",
            "value": format_number(here.last, 0) if here else MISSING_VALUE,
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


def _build_stage_chart(
    run: RunView, stage: StageView, names: Sequence[str], choice: PageSelection
) -> dict[str, Any]:
    plain = type(choice.drawing_options)(window=1, by_time=choice.by_time)
    lines = [build_line(stage.table.series["curriculum/stage"], "stage", 0, plain, run.started)]
    identity = f"stage:{stage.label}:{choice.by_time}"
    moves = build_move_marks(stage, plain, run.started)
    return build_chart(
        identity, "Stage of the curriculum", lines, plain, x="iteration", names=names, moves=moves
    )


def _build_plan_table(
    planned: Sequence[Mapping[str, Any]],
    now: int,
    stage: StageView,
    settings: Mapping[str, Any],
    *,
    is_over: bool,
) -> dict[str, Any]:
    """Stages with level mix and exit conditions, including current values for the active stage."""
    rows = []
    early = settings.get("early_stop")
    for index, row in enumerate(planned):
        total = sum(row.get("levels", {}).values()) or 1.0
        mix = ", ".join(
            f"{name} {weight / total:.0%}" for name, weight in row.get("levels", {}).items()
        )
        conditions = [
            _describe_condition(found, stage, index == now)
            for found in row.get("exit_conditions") or []
        ]
        if early and index == len(planned) - 1:
            conditions.append(
                f"{_describe_condition(early, stage, index == now)} (ends the training)"
            )
        joined = f" {'or' if row.get('require') == 'any' else 'and'} ".join(conditions)
        status = "info" if index == now else "good" if index < now else "none"
        word = (
            ("ended here" if is_over else "now")
            if index == now
            else "passed"
            if index < now
            else "to come"
        )
        rows.append(
            [
                str(row.get("name", index)),
                {"t": word, "badge": status},
                mix,
                joined or "the end of the iterations",
            ]
        )
    return build_table("plan", "Plan", ("stage", "", "mix of levels", "~is left when"), rows)


def _describe_condition(row: Mapping[str, Any], stage: StageView, present: bool) -> str:
    what = f"{row.get('statistic', 'mean')} of " if row.get("statistic", "mean") != "mean" else ""
    text = f"{what}{row.get('metric')} {row.get('comparison', '>=')} {row.get('threshold')} over {row.get('window')}"
    kind = "slope" if row.get("statistic") == "slope" else "average"
    series = stage.table.series.get(f"curriculum/{kind}/{row.get('metric')}")
    return (
        f"{text} (now {format_number(series.last, 4)})" if present and series is not None else text
    )


# --------------------------------------------------------------------------------------------------- trajectories


def build_trajectories_tab(
    run: RunView, pairs: ComparedStages, choice: PageSelection
) -> list[dict[str, Any]]:
    """Latest trajectories of one file, turn by turn."""
    files = list_episode_files(run)
    if not files:
        return _build_empty_note(
            "No trajectories yet: they come with training by rewards and with the stage evaluate."
        )
    source = choice.source if choice.source in files else next(iter(files))
    episodes = read_episodes(files[source])
    rows = [row for row in episodes if OUTCOME_FILTERS[choice.outcome](row)]
    if not rows:
        return _build_empty_note(
            f"{source}: none of its newest {len(episodes):,} trajectories is {choice.outcome}."
        )
    note = f"{source}: {len(rows):,} of the newest {len(episodes):,} trajectories"
    if len(rows) > MAX_EPISODES:
        note += f"; the newest {MAX_EPISODES} of them are listed"
    has_image = (run.config.get("environment") or {}).get("name") == "pixel_grid"
    shown = [_build_episode(run, row, has_image, files[source]) for row in rows[:MAX_EPISODES]]
    return [
        {"kind": "note", "id": "count", "tone": "small", "lines": [note + "."]},
        {"kind": "episodes", "id": "episodes", "source": source, "rows": shown},
    ]


def _build_episode(
    run: RunView, row: Mapping[str, Any], has_image: bool, path: Path
) -> dict[str, Any]:
    level, seed = str(row.get("level", "")), row.get("seed", 0)
    turns = [turn for turn in row["turns"] if isinstance(turn, dict)]
    number_of = f"{len(turns)} turn{'s' if len(turns) != 1 else ''}"
    # Training counts from 0 where it records, from 1 where it shows how far it is.
    where = (
        f"iteration {int(row['iteration']) + 1} · " if isinstance(row.get("iteration"), int) else ""
    )
    parts = ", ".join(
        f"{name} {format_number(value)}" for name, value in (row.get("rewards") or {}).items()
    )
    answer = row.get("answer")
    facts = [
        ["right answer", str(row.get("target") or MISSING_VALUE)],
        ["its answer", "none" if answer is None else str(answer)],
        ["reward", f"{format_number(row.get('reward'))}" + (f" ({parts})" if parts else "")],
        ["ended by", str(row.get("stop_reason", "")).replace("_", " ")],
        [
            "play it again",
            format_posttrain_command(
                f"replay {shlex.quote(format_replay_name(path, row))}", run.output
            ),
        ],
        [
            "tokens",
            f"{row.get('num_action_tokens', 0)} written, {row.get('num_completion_tokens', 0)} with what came back",
        ],
    ]
    image = (
        f"image.png?{urlencode({'run': run.id, 'level': level, 'seed': seed})}" if has_image else ""
    )
    return {
        "id": f"{row.get('iteration', '')}:{level}:{seed}:{row.get('sample', 0)}",
        "prompt": str(row.get("prompt", "")),
        "sub": f"{where}{level} · {row.get('kind', '')} · {number_of} · reward {format_number(row.get('reward'))}",
        "success": bool(row.get("success")),
        "facts": facts,
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


def _format_tool_call(call: object) -> str:
    if not isinstance(call, dict):
        return ""
    arguments = call.get("arguments")
    inner = (
        ", ".join(f"{k}={json.dumps(v)}" for k, v in arguments.items())
        if isinstance(arguments, dict)
        else ""
    )
    return f"calls {call.get('name')}({inner})"
