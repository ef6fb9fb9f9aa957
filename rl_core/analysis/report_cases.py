"""Episodes side by side: those that the last model lost to the first, filterable without a script, and others."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence

from rl_core.analysis.comparison import Comparison
from rl_core.analysis.report_html import html_table, safe_text
from rl_core.analysis.report_tables import named
from rl_core.analysis.results import Case
from rl_core.types import Trajectory, Turn

__all__ = ["MAX_CASE_BYTES", "filter_style", "lost", "regressions", "shown_cases"]

MAX_CASE_BYTES = 3_000_000  # of all episodes side by side; with figures and tables a report stays below 5 MB
MAX_CHOICES = 40  # levels or kinds that can be filtered by
_QUESTION = 90  # characters of the question in an episode's headline

_text, _table = safe_text, html_table  # short names for the strings below


def lost(case: Case) -> bool:
    """True = the last model did worse than the first."""
    return case.episode.success[-1] < case.episode.success[0]


def regressions(comparisons: Sequence[Comparison], pair: Comparison | None, cases: str, choices: str) -> str:
    """Episodes that the last model lost, then the worst of every pair of models as tables."""
    parts = []
    if pair is not None:
        lead = f"{_text(pair.second)} does worse than {_text(pair.first)} on {pair.total.losses:,} of"
        told = f"{lead} {pair.total.episodes:,} common episodes, better on {pair.total.wins:,}."
        parts.append(f"<p>{told}</p>{choices if cases else ''}{cases}")
    for one in comparisons:
        rows = [
            [
                f"{_text(e.level)} / {e.seed}", _text(e.kind), f"{100 * e.success[0]:.0f}% → {100 * e.success[1]:.0f}%",
                f"{e.reward[0]:.3f} → {e.reward[1]:.3f}",
            ]
            for e in one.regressions
        ]  # fmt: skip
        if rows:
            label = f"{_text(one.second)} does worse than {_text(one.first)} on {one.total.losses:,} episodes"
            table = _table(["Level / seed", "Kind", "Success", "Reward"], rows, "", text_columns=2)
            parts.append(f"<details class='list'><summary>{label}: the worst {len(rows)}</summary>{table}</details>")
    return "".join(parts)


def shown_cases(cases: Sequence[Case], names: Sequence[str], limit: int = MAX_CASE_BYTES) -> tuple[str, str]:
    """HTML of the episodes that were lost and of the others; what does not fit into `limit` bytes is counted instead.

    Args:
        names: of the models.
    """
    classes = [_classes(cases, attribute, prefix) for attribute, prefix in _FILTERS]
    found: dict[bool, list[str]] = {True: [], False: []}
    left_out: dict[bool, int] = {True: 0, False: 0}
    for case in sorted(cases, key=lambda case: not lost(case)):
        kinds = [
            known.get(getattr(case.episode, attribute), "")
            for known, (attribute, _) in zip(classes, _FILTERS, strict=True)
        ]
        text = _case(case, names, " ".join(filter(None, kinds)), is_open=not found[lost(case)])
        size = len(text.encode())
        if size <= limit:
            limit -= size
            found[lost(case)].append(text)
        else:
            left_out[lost(case)] += 1
    more = {
        key: f"<p class='note'>{count:,} more would make this page too large: they are in the trajectory files.</p>"
        for key, count in left_out.items()
        if count
    }
    return tuple("".join(found[key]) + more.get(key, "") for key in (True, False))  # type: ignore[return-value]


_FILTERS = (("level", "l"), ("kind", "k"))


def _classes(cases: Sequence[Case], attribute: str, prefix: str) -> Mapping[str, str]:
    """Class of each level or kind of the episodes that were lost."""
    values = dict.fromkeys(getattr(case.episode, attribute) for case in cases if lost(case))
    return {value: f"{prefix}{number}" for number, value in enumerate(list(values)[:MAX_CHOICES])}


def filter_style(cases: Sequence[Case]) -> tuple[str, str]:
    """(controls, style) that hide lost episodes of other levels and kinds: radio buttons and `:has`, no script."""
    controls, rules = "", ""
    for attribute, prefix in _FILTERS:
        known = _classes(cases, attribute, prefix)
        if len(known) < 2:
            continue
        buttons = f"<label><input type='radio' name='{prefix}' id='{prefix}all' checked>all</label>"
        for value, name in known.items():
            count = sum(lost(case) and getattr(case.episode, attribute) == value for case in cases)
            buttons += f"<label><input type='radio' name='{prefix}' id='{name}'>{_text(value, 60)} ({count})</label>"
            rules += f"#regressions:has(#{name}:checked) article:not(.{name}){{display:none}}"
        controls += f"<fieldset><legend>{attribute.capitalize()}</legend>{buttons}</fieldset>"
    return (f"<form class='filters'>{controls}</form>" if controls else ""), rules


def _case(case: Case, names: Sequence[str], classes: str, *, is_open: bool) -> str:
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
    marks = " ".join(
        f"<span class='{'good' if t.success else 'bad'}' title='{_text(name)}'>{'✓' if t.success else '✗'}</span>"
        for name, t in zip(names, case.trajectories, strict=True)
    )
    question = _text(" ".join(first.prompt.split())[-_QUESTION:], _QUESTION)
    return (
        f"<article class='{classes}'><details{' open' if is_open else ''}><summary><b>{_text(episode.level)} · "
        f"{_text(episode.kind)} · seed {episode.seed}</b> {marks} <small>{question}</small></summary>"
        f"<div class='question'>{image}<div><pre>{_text(first.prompt)}</pre>{target}</div></div>"
        f"<div class='columns'>{''.join(columns)}</div></details></article>"
    )


def _column(index: int, name: str, trajectory: Trajectory, turning: int | None) -> str:
    outcome = "<span class='good'>✓ success</span>" if trajectory.success else "<span class='bad'>✗ failure</span>"
    answer = "none" if trajectory.answer is None else _text(trajectory.answer, 200)
    turns = "".join(_turn(number, turn, number == turning) for number, turn in enumerate(trajectory.turns))
    ended_early = turning is not None and turning >= len(trajectory.turns)
    end = "<p class='turning'>turning point: it ends here</p>" if ended_early else ""
    return (
        f"<div class='column'><h4><span>{named(index, name)}</span> {outcome}</h4><ol>{turns}</ol>{end}"
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
