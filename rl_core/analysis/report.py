"""Self-contained HTML report, with light and dark colour schemes, for screens, phones and paper.

The verdict comes first, then what got worse, then the numbers, figures and further episodes.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence
from pathlib import Path

from rl_core.analysis.glossary import GLOSSARY
from rl_core.analysis.report_cases import filter_style, regressions, shown_cases
from rl_core.analysis.report_html import html_page, safe_text, section, verdict
from rl_core.analysis.report_tables import (
    comparisons_table,
    loops_table,
    main_pair,
    overview,
    rates_table,
    reward_model_table,
    tools_table,
)
from rl_core.analysis.results import Analysis

__all__ = ["render"]

_text = safe_text


def render(analysis: Analysis, figures: Sequence[tuple[Path, str]], title: str = "Trajectory analysis") -> str:
    """HTML page.

    Args:
        figures: (PNG file, caption) in order; the images are embedded. A caption may begin with a question.
    """
    names = [model.name for model in analysis.models]
    was_lost, others = shown_cases(analysis.cases, names)
    controls, style = filter_style(analysis.cases)
    pair = main_pair(analysis)
    sections = {
        "regressions": ("What got worse", regressions(analysis.comparisons, pair, was_lost, controls)),
        "overview": ("All measures", overview(analysis)),
        "comparison": ("Paired comparison", comparisons_table(analysis.comparisons)),
        "levels": ("Success by level", rates_table(analysis, "by_level", "Level")),
        "kinds": ("Success by kind of question", rates_table(analysis, "by_kind", "Kind")),
        "figures": ("Figures", _pictures(figures)),
        "reward-model": ("Reward model against true success", reward_model_table(analysis)),
        "tools": ("Tools", tools_table(analysis.models)),
        "strategies": ("Strategies and loops", loops_table(analysis.models)),
        "episodes": ("Episodes side by side", others),
        "terms": ("How to read this", _terms()),
    }
    shown = {identity: found for identity, found in sections.items() if found[1]}
    links = "".join(f"<a href='#{identity}'>{name}</a>" for identity, (name, _) in shown.items())
    parts = [
        _headline(analysis),
        "".join(f"<p class='note'>{_text(note)}</p>" for note in analysis.notes),
        f"<nav>{links}</nav>",
        *(section(identity, name, body) for identity, (name, body) in shown.items()),
    ]
    return html_page(title, "".join(parts), style)


def _headline(analysis: Analysis) -> str:
    last = analysis.models[-1]
    text = (
        f"<b>{_text(last.name)}</b> succeeds in <b>{100 * last.total.rate:.1f}%</b> of {last.total.n:,} attempts at "
        f"{last.episodes:,} episodes (95% interval {100 * last.total.low:.1f} to {100 * last.total.high:.1f}%)"
    )
    for pair in analysis.comparisons:
        if pair.second == last.name:
            d = pair.total.success
            text += (
                f". It is <b>{_THAN[verdict(d)]} {_text(pair.first)}</b>: {100 * d.difference:+.1f} points "
                f"[{100 * d.low:+.1f}, {100 * d.high:+.1f}] on the {pair.total.episodes:,} common episodes"
            )
    main = main_pair(analysis)
    kind = verdict(main.total.success) if main is not None else "same"
    return f"<p class='lead is-{kind}' id='verdict'>{text}.</p>"


_THAN = {"better": "better than", "worse": "worse than", "same": "not clearly different from"}


def _pictures(figures: Sequence[tuple[Path, str]]) -> str:
    shown = ""
    for path, caption in figures:
        data = path.read_bytes()
        width = int.from_bytes(data[16:20], "big") // 1.5  # PNG header; one scale for all figures, hence one font size
        question = re.match(r"[^.?]*\?", caption)
        head = f"<h3>{_text(question[0])}</h3>" if question else ""
        rest = caption[question.end() :].strip() if question else caption
        shown += (
            f"<figure>{head}<img alt='{_text(caption)}' width='{width:.0f}' "
            f"src='data:image/png;base64,{base64.b64encode(data).decode()}'><figcaption>{_text(rest)}</figcaption></figure>"
        )
    return shown


def _terms() -> str:
    terms = "".join(f"<dt>{name}</dt><dd>{meaning}</dd>" for name, meaning in GLOSSARY)
    return f"<dl>{terms}</dl>"
