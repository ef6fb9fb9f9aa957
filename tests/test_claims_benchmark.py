"""The benchmark of claims: complete runs are measured once, intervals are Student's, tables hold the results."""

import json
import math

import pytest
from claimed import intervals
from claimed.arms import PARTS
from claimed.policy_runs import count_iterations_to
from claimed.report import write_report
from claimed.results import Results
from claimed.tasks import TASKS, VALIDATION
from learning_runs.report import compare_reports, draw_comparison


def test_a_run_is_saved_once_and_only_when_complete(tmp_path):
    results, calls = Results(tmp_path), []

    def measure():
        calls.append(1)
        return {"value": len(calls)}

    assert results.find("part", "an arm, 0.1", 0) is None
    with pytest.raises(RuntimeError):
        results.fill_slots(
            "part", "an arm, 0.1", 0, lambda: (_ for _ in ()).throw(RuntimeError("cut off"))
        )
    assert results.find("part", "an arm, 0.1", 0) is None
    for _ in range(2):
        row = results.fill_slots("part", "an arm, 0.1", 0, measure)
    assert row["value"] == 1 and len(calls) == 1 and row["processor_seconds"] >= 0
    results.fill_slots("part", "an arm, 0.1", 2, measure)
    assert [row["seed"] for row in results.of("part", "an arm, 0.1", 3)] == [0, 2]


def test_intervals_by_hand():
    # 1, 2, 3: mean 2, deviation 1, half width 4.303 / sqrt(3)
    mean, low, high = intervals.estimate_interval([1.0, 2.0, 3.0])
    assert (mean, low, high) == pytest.approx(
        (2.0, 2 - 4.302653 / math.sqrt(3), 2 + 4.302653 / math.sqrt(3)), rel=1e-6
    )
    assert intervals.estimate_gap([3.0, 4.0, 5.0], [1.0, 2.0, 3.0]) == pytest.approx(
        (2.0, 2.0, 2.0)
    )
    # seven seeds, 1 to 7: deviation sqrt(14/3); Student's quantile of six degrees is 2.4469
    low, high = intervals.estimate_interval([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0])[1:]
    assert (high - low) / 2 == pytest.approx(2.446912 * math.sqrt(14 / 3 / 7), rel=1e-6)
    assert math.isnan(intervals.estimate_interval([1.0])[1])
    assert [
        intervals.describe_gap(*pair)
        for pair in ((0.1, 1), (-1, -0.1), (-1, 1), (math.nan, math.nan))
    ] == ["true", "refuted: worse", "not shown", "one seed"]
    assert intervals.format_interval((0.5, 0.25, 0.75), 100) == "50.0 [25.0, 75.0]"
    assert intervals.format_share([50.0]) == "50.0%"
    assert intervals.format_share([49.0, 50.0, 51.0]) == "50.0% [47.5, 52.5]"


def test_the_first_iteration_at_a_level_is_that_of_the_moving_mean():
    curve = [0.0, 1.0, 1.0, 1.0, 1.0, 0.5, 1.0]
    row = {"curves": {"train/success_rate": curve}}
    assert (
        count_iterations_to(row, 0.8) == 5
        and count_iterations_to(row, 0.9) == 6
        and count_iterations_to(row, 0.95) is None
    )


def test_settings_are_compared_on_other_episodes_than_those_that_are_reported():
    environment = TASKS["cells"].build_prompt()
    reported, validation = TASKS["cells"].held_out(environment)
    assert len(validation) == VALIDATION and not set(reported) & set(validation)
    assert {request.level for request in reported} == {"easy"}


def test_every_part_has_a_task_and_names_its_arms_apart(tmp_path):
    for name, part in PARTS.items():
        files = {Results(tmp_path).path(name, arm.name, 0) for arm in part.arms}
        assert part.task in TASKS and len(files) == len(part.arms), name


def test_the_table_holds_the_results(tmp_path):
    results = Results(tmp_path / "results")
    for seed in range(3):
        for arm, right in (("5e-3", 1), ("5e-3, rollback", 3)):
            row = {
                "success": [1] * right + [0] * (4 - right),
                "levels": ["easy"] * 4,
                "validation": [1, 0],
                "turns": 2,
                "tool_calls": 1,
                "misuse": 0.0,
                "truncated": 0.0,
                "curves": {"train/success_rate": [0.5]},
            }
            results.fill_slots("rollback", arm, seed, lambda row=row: row)
    text = write_report(tmp_path, results, 3)
    assert (
        "| 5e-3, rollback | 75.0 [75.0, 75.0]% | 75.0, 75.0, 75.0 | 50.0% | 50.0 [50.0, 50.0] | true |"
        in text
    )
    assert text == (tmp_path / "claims.md").read_text() and "kl:" not in text
    assert json.loads(results.path("rollback", "5e-3", 1).read_text())["seed"] == 1


REPORTS = """# Results

## One, `--parts algorithms`

| algorithm | success [95%] | each seed | above SFT |
|---|---|---|---|
| SFT (the start) | 50.0% [48.0, 52.0] | 50.0, 50.0 | |
| grpo | 95.0% [94.0, 96.0] | 94.0, 96.0 | yes |
| ppo | 92.0% [91.0, 93.0] | 91.0, 93.0 | yes |

## Two, another part

| ppo | 1.0% [0.0, 2.0] | 1.0, 1.0 | no |

## Three, `--parts algorithms`

| ppo | 90.0% [89.0, 91.0] | 89.0, 91.0 | yes |
| grpo | 91.0% [90.0, 92.0] | 92.0, 90.0 | yes |
"""


def test_reports_are_compared_with_grpo_seed_by_seed():
    lines = compare_reports(REPORTS).splitlines()
    # ppo - grpo: -3, -3, -3, 1: mean -2, deviation 2, half width 3.182446 * 2 / sqrt(4)
    assert lines[2:] == [
        "| grpo | 93.0% | 95.0 | 91.0 |  | 90.0 |",
        "| ppo | 91.0% | 92.0 | 90.0 | -2.0 [-5.2, 1.2] | 89.0 |",
        "| SFT (the start) | 50.0% | 50.0 |  | -45.0 [-57.7, -32.3] | 50.0 |",
    ]


def test_the_drawing_of_all_reports_shows_every_seed_and_is_legible_on_a_phone(
    tmp_path, monkeypatch
):
    from matplotlib import pyplot

    figures = []
    monkeypatch.setattr(pyplot, "close", figures.append)
    draw_comparison(REPORTS, tmp_path / "algorithms.png")
    [axis] = figures[0].axes
    assert [label.get_text() for label in axis.get_yticklabels()] == ["grpo", "ppo", "SFT"]
    dots = [list(line.get_xdata()) for line in axis.lines if line.get_marker() == "o"]
    assert dots == [[94.0, 96.0, 92.0, 90.0], [91.0, 93.0, 89.0, 91.0], [50.0, 50.0]]
    width = pyplot.imread(tmp_path / "algorithms.png").shape[1]
    sizes = {label.get_fontsize() for label in (*axis.get_yticklabels(), *axis.get_xticklabels())}
    # Points to pixels at 120 dpi, scaled to the 380 px that a phone of 420 px leaves.
    assert min(sizes) * 120 / 72 * min(1, 380 / width) >= 11
