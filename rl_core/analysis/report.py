"""Analysis report: a self-contained HTML page with light and dark colour schemes, for screens, phones and paper.

The verdict comes first, then regressions (episodes that the last model lost to the first, filterable without a
script), then tables of all models with the last one's difference from the first, figures and further episodes.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rl_core.analysis.comparison import ModelComparison, PairedGroup
from rl_core.analysis.glossary import GLOSSARY, METRICS, PAIRED_METRIC_DIRECTIONS, SHOWN_WITH
from rl_core.analysis.report_html import (
    MISSING,
    classify_difference,
    escape_text,
    format_difference,
    format_rate,
    render_contents,
    render_model_name,
    render_page,
    render_section,
    render_table,
    render_text_table,
)
from rl_core.analysis.results import AnalysisData, EpisodeCase, ModelResult
from rl_core.analysis.statistics import Rate
from rl_core.analysis.summary import NO_CALL
from rl_core.types import Trajectory, Turn


def find_main_comparison(analysis: AnalysisData) -> ModelComparison | None:
    """Return the comparison of the last model with the first; None if there is one model."""
    first, last = analysis.models[0].name, analysis.models[-1].name
    return next(
        (pair for pair in analysis.comparisons if (pair.first, pair.second) == (first, last)), None
    )


def _render_difference_header(pair: ModelComparison | None) -> list[str]:
    if pair is None:
        return []
    return [f"{escape_text(pair.second)} &minus; {escape_text(pair.first)}"]


def render_overview_table(analysis: AnalysisData) -> str:
    """Render every measure of every model."""
    models, pair = analysis.models, find_main_comparison(analysis)
    ks = sorted({k for model in models for k in model.pass_at_k if k > 1})
    metrics = [model.collect_metrics() for model in models]
    paired = _render_paired_differences(pair) if pair is not None else {}
    rows: list[list[str]] = [
        [
            "Success (95% interval)",
            *(MISSING if model.total is None else format_rate(model.total) for model in models),
            *_render_success_difference(pair),
        ],
        *(
            [
                f"pass@{k}",
                *(f"{100 * m.pass_at_k[k]:.1f}%" if k in m.pass_at_k else MISSING for m in models),
                *_render_unpaired_difference(pair, _select_pass_at_k(k), "{:.1%}", models),
            ]
            for k in ks
        ),
        [
            "Episodes &times; samples",
            *(f"{m.episodes:,} &times; {m.summary.trajectories / m.episodes:.3g}" for m in models),
            *([""] if pair else []),
        ],
        *(
            [
                label,
                *(form.format(row[name]) if name in row else MISSING for row in metrics),
                *(
                    [paired[name]]
                    if name in paired
                    else _render_unpaired_difference(pair, _select_metric(name), form, models)
                ),
            ]
            for name, label, form in (*METRICS, *_list_custom_metrics(models[0]))
            if any(SHOWN_WITH.get(name, name) in row for row in metrics)
        ),
    ]
    head = [
        "",
        *(render_model_name(n, m.name) for n, m in enumerate(models)),
        *_render_difference_header(pair),
    ]
    return render_table(head, rows)


def _render_paired_differences(pair: ModelComparison) -> dict[str, str]:
    """Return cells of the paired differences by measure; shares in points."""
    cells = {"reward_mean": format_difference(pair.reward, 1, 3)}
    for name, _, form in METRICS:
        if (difference := pair.measures.get(name)) is not None:
            is_share = form.endswith("%}")
            digits = int(form.partition(".")[2][0])
            cells[name] = format_difference(
                difference, 100 if is_share else 1, digits, PAIRED_METRIC_DIRECTIONS[name]
            )
    return cells


def _select_pass_at_k(k: int) -> Callable[[ModelResult], float | None]:
    return lambda model: model.pass_at_k.get(k)


def _select_metric(name: str) -> Callable[[ModelResult], float | None]:
    return lambda model: model.collect_metrics().get(name)


def _render_success_difference(pair: ModelComparison | None) -> list[str]:
    return [_format_success_gain(pair.total)] if pair is not None else []


def _format_success_gain(row: PairedGroup) -> str:
    return MISSING if row.success is None else format_difference(row.success)


def _format_episode_success(values: Sequence[float | None]) -> str:
    return " → ".join(MISSING if value is None else f"{100 * value:.0f}%" for value in values[:2])


def _render_unpaired_difference(
    pair: ModelComparison | None,
    value: Callable[[ModelResult], float | None],
    form: str,
    models: Sequence[ModelResult],
) -> list[str]:
    """Render a difference that has no interval, in the measure's format."""
    if pair is None:
        return []
    first, last = value(models[0]), value(models[-1])
    if first is None or last is None:
        return [MISSING]
    shown = form.format(abs(last - first))
    if float(shown.rstrip("%").replace(",", "")) == 0:
        return [shown]
    return [f"{'+' if last > first else '&minus;'}{shown}"]


def _list_custom_metrics(model: ModelResult) -> list[tuple[str, str, str]]:
    """Measures of the user's, as those of the glossary."""
    return [
        (name, escape_text(measure.label), "{:.3f}")
        for name, (measure, _) in model.summary.custom_metrics.items()
    ]


def render_comparisons_table(comparisons: Sequence[ModelComparison], names: Sequence[str]) -> str:
    """Render every pair of models on its common episodes. `names`: of all models, in the order of their colours."""
    rows = []
    for pair in comparisons:
        total = pair.total
        p_value = "&lt; 0.001" if pair.p_value < 0.001 else f"{pair.p_value:.3f}"
        rows.append(
            [
                " &minus; ".join(
                    render_model_name(names.index(name), name) for name in (pair.second, pair.first)
                ),
                _format_success_gain(total),
                format_difference(pair.reward, 1, 3),
                f"{total.episodes:,}",
                f"{total.wins:,}",
                f"{total.losses:,}",
                p_value,
            ]
        )
    head = [
        "Difference",
        "Success, points",
        "Reward",
        "Episodes",
        "Better on",
        "Worse on",
        "Sign test p",
    ]
    return render_table(head, rows) if rows else ""


def render_reward_model_table(analysis: AnalysisData) -> str:
    """Render the agreement of the reward model with true success."""
    calibration = analysis.probes.reward_model
    if calibration is None:
        return ""
    accuracy = format_rate(calibration.accuracy) if calibration.accuracy else MISSING

    def number(value: float | None) -> str:
        return MISSING if value is None else f"{value:.3f}"

    row = [
        f"{len(calibration.scores):,}",
        f"{calibration.pairs:,}",
        accuracy,
        number(calibration.ece),
        number(calibration.auc),
        number(calibration.correlation),
    ]
    head = [
        "Episodes scored",
        "Pairs",
        "Ranked correctly",
        "Calibration error",
        "AUC",
        "Correlation with success",
    ]
    return render_table(head, [row], text_columns=0)


def render_rates_table(analysis: AnalysisData, group: str, head: str) -> str:
    """Render success by environment, level or kind, with the paired difference of the last model from the first.

    Args:
        group: by_environment, by_level or by_kind. head: of the first column.
    """
    models, pair = analysis.models, find_main_comparison(analysis)
    rates: list[Mapping[str, Rate]] = [getattr(model, group) for model in models]
    paired = {row.name: row for row in getattr(pair, group)} if pair is not None else {}
    rows = [
        [
            escape_text(name),
            *(format_rate(rate[name]) if name in rate else MISSING for rate in rates),
            *(
                [_format_success_gain(paired[name]) if name in paired else MISSING]
                if pair is not None
                else []
            ),
        ]
        for name in dict.fromkeys(name for rate in rates for name in rate)
    ]
    return (
        render_table(
            [
                head,
                *(render_model_name(n, model.name) for n, model in enumerate(models)),
                *_render_difference_header(pair),
            ],
            rows,
        )
        if rows
        else ""
    )


def render_tools_table(models: Sequence[ModelResult]) -> str:
    """Calls and misuse by tool."""
    rows = []
    for index, model in enumerate(models):
        tools = list(model.summary.tools.values())
        total = sum(t.trajectories for t in tools)
        for name in [*model.summary.list_tool_names(), NO_CALL]:
            calls, errors = sum(t.calls[name] for t in tools), sum(t.errors[name] for t in tools)
            if calls or errors:
                share = f"{100 * errors / calls:.1f}%" if calls else MISSING
                rows.append(
                    [
                        render_model_name(index, model.name),
                        escape_text(name),
                        f"{calls:,}",
                        f"{calls / total:.2f}",
                        f"{errors:,}",
                        share,
                    ]
                )
    head = ["Model", "Tool", "Calls", "Per episode", "Misuse", "Share of calls"]
    return render_table(head, rows, text_columns=2) if rows else ""


def render_loops_table(models: Sequence[ModelResult]) -> str:
    """Render the most frequent sequences of actions, and repeated state-action cycles."""
    rows = []
    for index, model in enumerate(models):
        total = max(1, model.summary.trajectories)
        for strategy, count in model.summary.strategies.most_common(5):
            rows.append(
                [
                    render_model_name(index, model.name),
                    escape_text(strategy, 120),
                    f"{count:,}",
                    f"{100 * count / total:.1f}%",
                ]
            )
    loops = [
        f"{render_model_name(index, model.name)}: {sum(model.summary.loop_periods.values()):,} ("
        + ", ".join(
            f"{count:,} of period {period}"
            for period, count in sorted(model.summary.loop_periods.items())
        )
        + ")"
        for index, model in enumerate(models)
        if model.summary.loop_periods
    ]
    sentence = (
        f"Episodes with loops: {'; '.join(loops)}."
        if loops
        else "No episode repeated a state-action cycle."
    )
    head = ["Model", "Sequence of actions", "Episodes", "Share"]
    return f"<p>{sentence}</p>{render_table(head, rows, text_columns=2)}"


MAX_CASE_BYTES = (
    3_000_000  # of all episodes side by side; with figures and tables a report stays below 5 MB
)
MAX_FILTER_VALUES = 40  # levels or kinds that can be filtered by
_MAX_QUESTION_CHARACTERS = 90  # characters of the question in an episode's headline


def is_regression(case: EpisodeCase) -> bool:
    """Return whether the last model did worse than the first: by success, where known, else by reward."""
    first, last = case.episode.success[0], case.episode.success[-1]
    if first is None or last is None:
        return case.episode.reward[-1] < case.episode.reward[0]
    return last < first


def render_regressions(
    comparisons: Sequence[ModelComparison], pair: ModelComparison | None, cases: str, filters: str
) -> str:
    """Render the episodes that the last model lost, then the worst of every pair of models as tables."""
    parts = []
    if pair is not None:
        lead = f"{escape_text(pair.second)} does worse than {escape_text(pair.first)} on {pair.total.losses:,} of"
        summary = f"{lead} {pair.total.episodes:,} common episodes, better on {pair.total.wins:,}."
        parts.append(f"<p>{summary}</p>{filters if cases else ''}{cases}")
    for one in comparisons:
        rows = [
            [
                f"{escape_text(e.level)} / {e.seed}",
                escape_text(e.kind),
                _format_episode_success(e.success),
                f"{e.reward[0]:.3f} → {e.reward[1]:.3f}",
            ]
            for e in one.regressions
        ]
        if rows:
            num_lost = one.total.losses
            label = (
                f"{escape_text(one.second)} does worse than {escape_text(one.first)} "
                f"on {num_lost:,} episode{'s' * (num_lost != 1)}"
            )
            if len(rows) < num_lost:
                label += f": the worst {len(rows)}"
            table = render_table(
                ["Level / seed", "Kind", "Success", "Reward"], rows, "", text_columns=2
            )
            parts.append(f"<details class='list'><summary>{label}</summary>{table}</details>")
    return "".join(parts)


def render_cases(
    cases: Sequence[EpisodeCase], names: Sequence[str], limit: int = MAX_CASE_BYTES
) -> tuple[str, str]:
    """Render the lost episodes and the others; count those that do not fit into `limit` bytes.

    Args:
        names: of the models.
    """
    classes = [_assign_filter_classes(cases, attribute, prefix) for attribute, prefix in _FILTERS]
    rendered: dict[bool, list[str]] = {True: [], False: []}
    left_out: dict[bool, int] = {True: 0, False: 0}
    for case in sorted(cases, key=lambda case: not is_regression(case)):
        kinds = [
            known.get(getattr(case.episode, attribute), "")
            for known, (attribute, _) in zip(classes, _FILTERS, strict=True)
        ]
        text = _render_case(
            case, names, " ".join(filter(None, kinds)), is_open=not rendered[is_regression(case)]
        )
        size = len(text.encode())
        if size <= limit:
            limit -= size
            rendered[is_regression(case)].append(text)
        else:
            left_out[is_regression(case)] += 1
    more = {
        key: f"<p class='note'>{count:,} more would make this page too large: they are in the trajectory files.</p>"
        for key, count in left_out.items()
        if count
    }
    return tuple("".join(rendered[key]) + more.get(key, "") for key in (True, False))  # type: ignore[return-value]


_FILTERS = (("level", "l"), ("kind", "k"))


def _assign_filter_classes(
    cases: Sequence[EpisodeCase], attribute: str, prefix: str
) -> Mapping[str, str]:
    """Return the CSS class of each level or kind of the lost episodes."""
    values = dict.fromkeys(
        getattr(case.episode, attribute) for case in cases if is_regression(case)
    )
    return {
        value: f"{prefix}{number}" for number, value in enumerate(list(values)[:MAX_FILTER_VALUES])
    }


def render_filters(cases: Sequence[EpisodeCase]) -> tuple[str, str]:
    """Return (controls, style) that filter lost episodes by level and kind: radio buttons and `:has`, no script."""
    controls, rules = "", ""
    for attribute, prefix in _FILTERS:
        known = _assign_filter_classes(cases, attribute, prefix)
        if len(known) < 2:
            continue
        buttons = f"<label><input type='radio' name='{prefix}' id='{prefix}all' checked>all</label>"
        for value, name in known.items():
            count = sum(
                is_regression(case) and getattr(case.episode, attribute) == value for case in cases
            )
            label = f"{escape_text(value, 60)} ({count})"
            buttons += f"<label><input type='radio' name='{prefix}' id='{name}'>{label}</label>"
            rules += f"#regressions:has(#{name}:checked) article:not(.{name}){{display:none}}"
        controls += f"<fieldset><legend>{attribute.capitalize()}</legend>{buttons}</fieldset>"
    return (f"<form class='filters'>{controls}</form>" if controls else ""), rules


def _render_case(case: EpisodeCase, names: Sequence[str], classes: str, *, is_open: bool) -> str:
    episode, first = case.episode, case.trajectories[0]
    image = ""
    if case.image is not None:
        data = base64.b64encode(case.image).decode()
        image = f"<img class='image' alt='the hidden image' src='data:image/png;base64,{data}'>"
    columns = []
    for index, (name, trajectory) in enumerate(zip(names, case.trajectories, strict=True)):
        turn = case.turning_points[index] if index else case.first_turning_point
        columns.append(_render_case_column(index, name, trajectory, turn))
    target = f"<p><b>Right answer</b> {escape_text(first.target)}</p>" if first.target else ""
    marks = " ".join(
        f"<span class='{'good' if t.success else 'bad'}' title='{escape_text(name)}'>{'✓' if t.success else '✗'}</span>"
        for name, t in zip(names, case.trajectories, strict=True)
        if t.success is not None
    )
    question = escape_text(_extract_question(first.prompt), _MAX_QUESTION_CHARACTERS)
    return (
        f"<article class='{classes}'><details{' open' if is_open else ''}><summary><b>{escape_text(episode.level)} · "
        f"{escape_text(episode.kind)} · seed {episode.seed}</b> {marks} <small>{question}</small></summary>"
        f"<div class='question'>{image}<div><pre>{escape_text(first.prompt)}</pre>{target}</div></div>"
        f"<div class='columns'>{''.join(columns)}</div></details></article>"
    )


def _extract_question(prompt: str) -> str:
    """Return the end of a prompt, where most questions are, from the begin of a word on."""
    text = " ".join(prompt.split())
    if len(text) <= _MAX_QUESTION_CHARACTERS:
        return text
    end = text[2 - _MAX_QUESTION_CHARACTERS :]
    if text[1 - _MAX_QUESTION_CHARACTERS] != " ":
        end = end.partition(" ")[2] or end  # one long word is cut
    return f"… {end.lstrip()}"


def _render_case_column(index: int, name: str, trajectory: Trajectory, turning: int | None) -> str:
    outcome = {
        True: "<span class='good'>✓ success</span>",
        False: "<span class='bad'>✗ failure</span>",
        None: "",
    }[trajectory.success]
    answer = "none" if trajectory.answer is None else escape_text(trajectory.answer, 200)
    turns = "".join(
        _render_turn(number, turn, number == turning)
        for number, turn in enumerate(trajectory.turns)
    )
    ended_early = turning is not None and turning >= len(trajectory.turns)
    end = "<p class='turning'>turning point: it ends here</p>" if ended_early else ""
    return (
        f"<div class='column'><h4><span>{render_model_name(index, name)}</span> {outcome}</h4><ol>{turns}</ol>{end}"
        f"<p class='end'>answer: <b>{answer}</b> · reward {trajectory.reward:.3f} · "
        f"{escape_text(trajectory.stop_reason)}</p>"
        "</div>"
    )


def _render_turn(number: int, turn: Turn, turning: bool) -> str:
    mark = "<p class='turning'>turning point</p>" if turning else ""
    error = " error" if turn.is_error else ""
    observation = ""
    if turn.observation is not None:
        observation = f"<pre class='observation{error}'>{escape_text(turn.observation)}</pre>"
    flag = "<span class='bad flag'>misuse</span>" if turn.is_error else ""
    action = f"<pre class='action'>{escape_text(turn.action)}</pre>"
    return f"<li value='{number + 1}'>{mark}{action}{flag}{observation}</li>"


def render_report(
    analysis: AnalysisData, figures: Sequence[tuple[Path, str]], title: str = "Trajectory analysis"
) -> str:
    """Render the HTML page.

    Args:
        figures: (PNG file, caption) in order; the images are embedded. A caption may begin with a question.
    """
    names = [model.name for model in analysis.models]
    was_lost, others = render_cases(analysis.cases, names)
    controls, style = render_filters(analysis.cases)
    pair = find_main_comparison(analysis)
    sections = {
        "regressions": (
            "What got worse",
            render_regressions(analysis.comparisons, pair, was_lost, controls),
        ),
        "overview": ("All measures", render_overview_table(analysis)),
        "suites": ("Other evaluators", render_text_table(analysis.suites)),
        "comparison": ("Paired comparison", render_comparisons_table(analysis.comparisons, names)),
        "environments": (
            "Success by environment",
            render_rates_table(analysis, "by_environment", "Environment"),
        ),
        "levels": ("Success by level", render_rates_table(analysis, "by_level", "Level")),
        "kinds": ("Success by kind of question", render_rates_table(analysis, "by_kind", "Kind")),
        "figures": ("Figures", _render_figures(figures)),
        "reward-model": ("Reward model against true success", render_reward_model_table(analysis)),
        "tools": ("Tools", render_tools_table(analysis.models)),
        "strategies": ("Strategies and loops", render_loops_table(analysis.models)),
        "episodes": ("Episodes side by side", others),
        "terms": ("How to read this", _render_glossary()),
    }
    shown = {identity: section for identity, section in sections.items() if section[1]}
    parts = [
        _render_headline(analysis),
        "".join(f"<p class='note'>{escape_text(note)}</p>" for note in analysis.notes),
        render_contents({identity: name for identity, (name, _) in shown.items()}),
        *(render_section(identity, name, body) for identity, (name, body) in shown.items()),
    ]
    return render_page(title, "".join(parts), style)


def _render_headline(analysis: AnalysisData) -> str:
    last = analysis.models[-1]
    if last.total is None:
        return _render_reward_headline(analysis)
    text = (
        f"<b>{escape_text(last.name)}</b> succeeds in <b>{100 * last.total.rate:.1f}%</b> "
        f"of {last.total.n:,} attempts at "
        f"{last.episodes:,} episodes (95% interval {100 * last.total.low:.1f} to {100 * last.total.high:.1f}%)"
    )
    for pair in analysis.comparisons:
        if pair.second == last.name and (d := pair.total.success) is not None:
            text += (
                f". It is <b>{_VERDICT_PHRASES[classify_difference(d)]} {escape_text(pair.first)}</b>: "
                f"{100 * d.difference:+.1f} points "
                f"[{100 * d.low:+.1f}, {100 * d.high:+.1f}] on the {pair.total.episodes:,} common episodes"
            )
    main = find_main_comparison(analysis)
    gain = main.total.success if main is not None else None
    kind = classify_difference(gain) if gain is not None else "same"
    return f"<p class='lead is-{kind}' id='verdict'>{text}.</p>"


def _render_reward_headline(analysis: AnalysisData) -> str:
    """Render the verdict by reward, for episodes that do not tell success."""
    last, main = analysis.models[-1], find_main_comparison(analysis)
    text = (
        f"<b>{escape_text(last.name)}</b> has the mean reward <b>{last.collect_metrics()['reward_mean']:.3f}</b> "
        f"over {last.summary.trajectories:,} attempts at {last.episodes:,} episodes; success is unknown, as the "
        "environment has no verifier"
    )
    kind = "same"
    if main is not None:
        kind, d = classify_difference(main.reward), main.reward
        text += (
            f". It is <b>{_VERDICT_PHRASES[kind]} {escape_text(main.first)}</b>: {d.difference:+.3f} "
            f"[{d.low:+.3f}, {d.high:+.3f}] on the {main.total.episodes:,} common episodes"
        )
    return f"<p class='lead is-{kind}' id='verdict'>{text}.</p>"


_VERDICT_PHRASES = {
    "better": "better than",
    "worse": "worse than",
    "same": "not clearly different from",
}


def _render_figures(figures: Sequence[tuple[Path, str]]) -> str:
    shown = ""
    for path, caption in figures:
        data = path.read_bytes()
        width = (
            int.from_bytes(data[16:20], "big") // 1.5
        )  # PNG header; one scale for all figures, hence one font size
        question = re.match(r"[^.?]*\?", caption)
        head = f"<h3>{escape_text(question[0])}</h3>" if question else ""
        rest = caption[question.end() :].strip() if question else caption
        shown += (
            f"<figure>{head}<img alt='{escape_text(caption)}' width='{width:.0f}' "
            f"src='data:image/png;base64,{base64.b64encode(data).decode()}'><figcaption>{escape_text(rest)}</figcaption></figure>"
        )
    return shown


def _render_glossary() -> str:
    terms = "".join(f"<dt>{name}</dt><dd>{meaning}</dd>" for name, meaning in GLOSSARY)
    return f"<dl>{terms}</dl>"
