"""The report as readers see it: order, contents list, differences, filters, size."""

import re
from types import SimpleNamespace

import pytest
from helpers.handmade_trajectories import generate_trajectories, trajectory

from rl_core.analysis import analyze, write_trajectories
from rl_core.analysis.report import (
    _extract_question,
    render_cases,
    render_filters,
    render_regressions,
)
from rl_core.analysis.report_html import format_difference
from rl_core.analysis.statistics import Difference
from rl_core.settings import AnalysisSettings

SETTINGS = AnalysisSettings(bootstrap_samples=200, side_by_side=12)


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """Analyse three models; the last is worse than the first on hard questions."""
    folder = tmp_path_factory.mktemp("report")
    skills = {"champion": 0.9, "sft": 0.4, "policy": 0.5}
    for name, skill in skills.items():
        write_trajectories(
            folder / f"{name}.jsonl", generate_trajectories(80, skill, seed=len(name))
        )
    analysis = analyze(
        {name: folder / f"{name}.jsonl" for name in skills}, folder / "out", SETTINGS
    )
    return analysis, analysis.report.read_text(encoding="utf-8")


def test_the_verdict_comes_first_then_what_got_worse_and_the_contents_list_names_every_section(
    report,
):
    _, text = report
    identities = re.findall(r"<section id='([\w-]+)'", text)
    assert (
        text.index("id='verdict'") < text.index("<nav>") < text.index("<section id='regressions'")
    )
    assert identities[:2] == ["regressions", "overview"] and "is-worse" in text
    assert re.findall(r"<a href='#([\w-]+)'>", text) == identities


def test_differences_of_the_last_model_from_the_first_stand_in_every_table(report):
    analysis, text = report
    [pair] = [
        pair for pair in analysis.comparisons if (pair.first, pair.second) == ("champion", "policy")
    ]
    for section in ("overview", "levels", "kinds"):
        table = text.partition(f"<section id='{section}'")[2].partition("</section>")[0]
        assert "<th>policy &minus; champion</th>" in table
    d = pair.total.success
    expected_cell = (
        f"{100 * d.difference:+.1f}</span> <small>[{100 * d.low:+.1f}, {100 * d.high:+.1f}]</small>"
    )
    assert (
        text.partition("<section id='overview'")[2]
        .partition("</tr>")[2]
        .partition("</tr>")[0]
        .count(expected_cell)
        == 1
    )
    levels = text.partition("<section id='levels'")[2].partition("</section>")[0]
    for row in pair.by_level:
        assert f"[{100 * row.success.low:+.1f}, {100 * row.success.high:+.1f}]" in levels


def test_measures_of_an_episode_have_paired_differences_with_intervals(report):
    analysis, text = report
    [pair] = [
        pair for pair in analysis.comparisons if (pair.first, pair.second) == ("champion", "policy")
    ]
    rows = dict(
        re.findall(r"<tr><td class=text>([^<]+)</td>(.*?)</tr>", text.partition("id='overview'")[2])
    )
    for label, name, scale, digits in (
        ("Turns per episode", "turns_mean", 1, 2),
        ("Cut by a limit", "truncated_rate", 100, 1),
    ):
        d = pair.measures[name]
        assert f"[{scale * d.low:+.{digits}f}, {scale * d.high:+.{digits}f}]" in rows[label]
    assert (
        pair.measures["truncated_rate"].low > 0
        and "<span class='worse'>worse" in rows["Cut by a limit"]
    )
    means = {row["model"]: row["turns_mean"] for row in analysis.summary}
    assert pair.measures["turns_mean"].difference == pytest.approx(
        means["policy"] - means["champion"]
    )
    assert "[" not in rows["Strategy entropy (nats)"]  # no episode has entropies


def test_better_and_worse_are_shown_only_if_the_interval_excludes_zero():
    assert "better" in format_difference(
        Difference(0.1, 0.05, 0.2)
    ) and "worse" in format_difference(Difference(-0.1, -0.2, -0.05))
    assert "worse" in format_difference(Difference(0.1, 0.05, 0.2), direction=-1)
    assert "better" in format_difference(Difference(-0.1, -0.2, -0.05), direction=-1)
    either = format_difference(Difference(0.1, 0.05, 0.2), direction=0)
    assert "better" not in either and "worse" not in either
    text = format_difference(Difference(0.1, -0.05, 0.2))
    assert "better" not in text and "worse" not in text and "+10.0" in text


def test_lost_episodes_are_filtered_by_level_and_kind_without_a_script(report):
    _, text = report
    part = text.partition("<section id='regressions'")[2].partition("</section>")[0]
    cases = re.findall(r"<article class='([^']*)'", part)
    assert len(cases) >= 5
    controls = dict(re.findall(r"<input type='radio' name='\w' id='(\w+)'>([^<]*)</label>", part))
    assert any(label.startswith("hard (") for label in controls.values()) and any(
        n[0] == "k" for n in controls
    )
    for name, label in controls.items():
        count = int(label.rpartition("(")[2].rstrip(")"))
        assert count == sum(name in classes.split() for classes in cases) > 0
        assert f"#regressions:has(#{name}:checked) article:not(.{name}){{display:none}}" in text


def test_what_does_not_fit_is_counted(report, monkeypatch):
    from rl_core.analysis import report as report_cases
    from rl_core.analysis import runner

    analyses = []
    monkeypatch.setattr(
        runner, "render_report", lambda analysis, figures, title: analyses.append(analysis) or ""
    )
    analysis, _ = report
    folder = analysis.report.parent.parent
    analyze(
        {name: folder / f"{name}.jsonl" for name in ("champion", "policy")},
        folder / "again",
        SETTINGS,
    )
    cases = analyses[0].cases
    names = ["champion", "policy"]
    all_counts = [part.count("<article") for part in render_cases(cases, names)]
    assert sum(all_counts) == len(cases) and all_counts[0] >= len(cases) / 2
    size = sum(len(part.encode()) for part in render_cases(cases, names))
    cut = render_cases(cases, names, size // 3)
    assert sum(part.count("<article") for part in cut) < len(cases)
    assert sum(len(part.encode()) for part in cut) < size // 3 + 400
    assert (
        f"<p class='note'>{all_counts[1] - cut[1].count('<article'):,} more would make this page too large"
        in cut[1]
    )
    assert (
        render_filters(cases)[1].count(":checked")
        == report_cases.render_filters(cases)[0].count("<input") - 2
    )


def test_one_model_has_no_differences(tmp_path):
    write_trajectories(tmp_path / "a.jsonl", [trajectory(seed, seed > 2) for seed in range(5)])
    text = analyze({"only": tmp_path / "a.jsonl"}, tmp_path / "out", SETTINGS).report.read_text()
    assert (
        "&minus;</th>" not in text
        and "<section id='regressions'" not in text
        and "id='verdict'" in text
    )


@pytest.mark.parametrize("image_tools", [(), ("zoom",)])
def test_looking_is_shown_where_a_tool_can_show_a_picture(tmp_path, image_tools):
    write_trajectories(tmp_path / "a.jsonl", [trajectory(seed, seed > 2) for seed in range(5)])
    text = analyze(
        {"only": tmp_path / "a.jsonl"}, tmp_path / "out", SETTINGS, image_tools=image_tools
    ).report.read_text()
    assert ("Looked with a tool before answering</td>" in text) == bool(image_tools)


@pytest.mark.slow
def test_two_thousand_episodes_of_eight_models_fit_into_five_megabytes(tmp_path):
    names = [f"model {number}" for number in range(8)]
    for number, name in enumerate(names):
        write_trajectories(
            tmp_path / f"{name}.jsonl",
            generate_trajectories(2000, 0.95 - 0.05 * number, seed=number),
        )
    settings = AnalysisSettings(bootstrap_samples=200, side_by_side=10_000)
    analysis = analyze(
        {name: tmp_path / f"{name}.jsonl" for name in names}, tmp_path / "out", settings
    )
    assert 1e6 < analysis.report.stat().st_size < 5e6


@pytest.mark.parametrize(
    ("losses", "words"),
    [(1, "worse than base on 1 episode<"), (3, "worse than base on 3 episodes: the worst 1<")],
)
def test_the_list_of_lost_episodes_says_how_many_it_leaves_out(losses, words):
    episode = SimpleNamespace(level="easy", seed=7, kind="k", success=(True, False), reward=(1, 0))
    total = SimpleNamespace(losses=losses, wins=0, episodes=5)
    pair = SimpleNamespace(first="base", second="sft", total=total, regressions=[episode])
    assert words in render_regressions([pair], None, "", "")


def test_the_headline_of_an_episode_shows_the_end_of_its_question_in_whole_words():
    short = "Write one question about chess.\n Use the word player."
    assert _extract_question(short) == "Write one question about chess. Use the word player."
    words = [f"word{number:03}" for number in range(30)]  # of 7 characters
    shown = _extract_question(" ".join(words))
    assert shown == "… " + " ".join(words[-11:]) and len(shown) == 89
    # the cut falls between two words
    assert _extract_question("a" * 50 + " " + "b" * 88) == "… " + "b" * 88
    assert _extract_question("c" * 200) == "… " + "c" * 88
