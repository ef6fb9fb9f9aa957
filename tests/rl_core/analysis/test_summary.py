import math
import statistics

import numpy as np
import pytest
from helpers.handmade_trajectories import generate_trajectories, trajectory, zoom
from numpy.testing import assert_allclose

from rl_core.analysis.episode_index import EpisodeIndex
from rl_core.analysis.glossary import PAIRED_METRIC_DIRECTIONS
from rl_core.analysis.statistics import compute_clustered_rate
from rl_core.analysis.summary import (
    MAX_NAMES,
    NO_CALL,
    OTHER_NAME,
    Reservoir,
    StreamMoments,
    TrajectorySummary,
)
from rl_core.errors import DataError
from rl_core.types import StopReason, ToolCall, Turn

ANSWER = Turn("answer red", num_tokens=3)
MISUSE = Turn("zom 1", None, "error: no such tool", True, 4)


def summarize(*trajectories, **options):
    summary = TrajectorySummary(**options)
    for row in trajectories:
        summary.add_trajectory(row)
    return summary


def test_moments_agree_with_the_standard_library():
    values = [
        1e9 + x for x in (4.0, 7.0, 13.0, 16.0)
    ]  # far from 0, where a plain sum of squares loses all digits
    moments = StreamMoments()
    for value in values:
        moments.add_value(value)
    assert moments.mean == 1e9 + 10 and (moments.low, moments.high) == (1e9 + 4, 1e9 + 16)
    assert_allclose(moments.std, statistics.stdev(values))
    assert StreamMoments().std == 0.0


def test_reservoir_is_uniform_and_bounded():
    counts = np.zeros(20)
    for seed in range(2000):
        reservoir = Reservoir(5, seed)
        for item in range(20):
            reservoir.add_item(item)
        assert len(reservoir.items) == 5
        counts[reservoir.items] += 1
    assert_allclose(counts / 2000, 0.25, atol=0.05)  # sd of each share: .0097


def test_shares_by_hand():
    looked = trajectory(1, True, [zoom(1, 1), ANSWER])
    guessed = trajectory(2, False, [ANSWER])
    wrong = trajectory(3, False, [MISUSE, ANSWER])
    lost = trajectory(
        4, False, [zoom(1, 1), zoom(1, 1)], answer=None, stop_reason=StopReason.MAX_TURNS
    )
    metrics = summarize(looked, guessed, wrong, lost).compute_metrics()
    assert metrics["answered_rate"] == 0.75 and metrics["truncated_rate"] == 0.25
    assert metrics["looked_rate"] == 0.25  # the episode without an answer does not count as looked
    assert_allclose(metrics["misuse_rate"], 1 / 7)  # of turns
    assert metrics["trajectories_with_misuse"] == 0.25
    assert metrics["tool_calls_mean"] == 0.75 and metrics["turns_mean"] == 7 / 4
    assert metrics["loop_rate"] == 0.25
    # 1 of 1, none of 1 and 1 of 2 steps were worth it; the guess took no step
    assert_allclose(metrics["exploration_efficiency"], (1 + 0 + 0.5) / 3)
    assert metrics["reward_mean"] == 0.25
    assert_allclose(metrics["strategy_entropy"], math.log(4))


def test_looking_counts_image_tools_that_worked():
    calculated = Turn("calc 1+1", ToolCall("calc", {"expression": "1+1"}), "2")
    failed = zoom(99, 1, "error: row 99 is outside", is_error=True)
    assert summarize(trajectory(turns=[calculated, ANSWER])).compute_metrics()["looked_rate"] == 1
    assert (
        summarize(trajectory(turns=[calculated, ANSWER]), image_tools={"zoom"}).compute_metrics()[
            "looked_rate"
        ]
        == 0
    )
    assert (
        summarize(trajectory(turns=[zoom(1, 1), ANSWER]), image_tools={"zoom"}).compute_metrics()[
            "looked_rate"
        ]
        == 1
    )
    assert summarize(trajectory(turns=[failed, ANSWER])).compute_metrics()["looked_rate"] == 0


def test_repeated_actions_and_answers_taken_back_by_hand():
    fine = trajectory(1, turns=[zoom(1, 1), zoom(1, 2), ANSWER])
    repeating = trajectory(2, turns=[zoom(1, 1), zoom(1, 1), zoom(1, 1), ANSWER])
    wavers = trajectory(3, turns=[Turn("answer blue\nanswer red"), ANSWER])
    metrics = summarize(fine, repeating, wavers).compute_metrics()
    assert metrics["repetitions_mean"] == pytest.approx(2 / 3)
    assert metrics["contradictions_mean"] == pytest.approx(1 / 3)
    assert metrics["coherent_rate"] == pytest.approx(1 / 3)


def test_loops_are_cycles_of_states_and_actions():
    back_and_forth = [zoom(1, 1, "red"), zoom(2, 2, "blue")] * 2  # no two neighbours alike
    spelled = [
        zoom(1, 1),
        Turn("<tool_call>...", ToolCall("zoom", {"column": 1, "row": 1}), "RED "),
    ]
    progress = [
        zoom(1, 1, "red"),
        zoom(1, 1, "green"),
        ANSWER,
    ]  # the same action, but with a new observation
    assert summarize(trajectory(turns=back_and_forth)).loop_periods == {2: 1}
    assert summarize(trajectory(turns=spelled)).loop_periods == {1: 1}
    assert not summarize(trajectory(turns=progress)).loop_periods


def test_surprise_is_a_mean_over_tokens_not_trajectories():
    rows = [
        trajectory(mean_logprob=-1.0, num_action_tokens=30),
        trajectory(mean_logprob=-0.2, num_action_tokens=10),
    ]
    assert_allclose(summarize(*rows).compute_metrics()["nll_per_token"], (30 * 1.0 + 10 * 0.2) / 40)


def test_tools_by_level():
    summary = summarize(
        trajectory(turns=[zoom(1, 1), zoom(1, 2, "error", True), MISUSE, ANSWER]),
        trajectory(level="hard"),
    )
    easy, hard = summary.tools["pixel_grid", "easy"], summary.tools["pixel_grid", "hard"]
    assert easy.calls == {"zoom": 2} and easy.errors == {"zoom": 1, NO_CALL: 1}
    assert hard.calls == {"zoom": 1} and not hard.errors and hard.trajectories == 1
    assert summary.list_tool_names() == ["zoom"]


def test_names_that_a_policy_invents_are_bounded():
    rows = (
        trajectory(turns=[Turn("x", ToolCall(f"tool{i}", {}), "seen")])
        for i in range(2 * MAX_NAMES)
    )
    summary = summarize(*rows)
    calls = summary.tools["pixel_grid", "easy"].calls
    assert len(calls) == MAX_NAMES + 1 and calls[OTHER_NAME] == MAX_NAMES
    assert len(summary.strategies) == MAX_NAMES + 1


def test_empty_summary_has_numbers():
    assert all(math.isfinite(value) for value in TrajectorySummary().compute_metrics().values())
    assert all(
        math.isfinite(value) for value in summarize(trajectory(turns=[])).compute_metrics().values()
    )


@pytest.fixture
def index():
    with EpisodeIndex() as index:
        yield index


def test_index_rates_equal_those_in_memory(index):
    rows = list(generate_trajectories(60, 0.6, samples=3))
    for offset, row in enumerate(rows):
        index.add_trajectory(0, row, offset)
    for level in ("easy", "medium", "hard"):
        seeds = sorted({row.seed for row in rows if row.level == level})
        successes = [sum(row.success for row in rows if row.seed == seed) for seed in seeds]
        expected = compute_clustered_rate(successes, [3] * len(seeds))
        assert_allclose(index.compute_rates(0, "level")[level], expected, rtol=1e-12)
    assert index.compute_rates(0)["all"].n == 180 and index.count_episodes(0) == 60
    assert set(index.compute_rates(0, "kind")) == {"colour", "count", "compare"}
    assert_allclose(index.compute_pass_at_ks(0)[1], index.compute_rates(0)["all"].rate)
    assert list(index.compute_pass_at_ks(0)) == [1, 2, 3]


def test_index_pairs_by_hand(index):
    first = [(1, True), (2, True), (3, False), (4, False)]
    second = [(1, True), (2, False), (3, True), (9, True)]
    for model, outcomes in enumerate((first, second)):
        for seed, success in outcomes:
            index.add_trajectory(
                model,
                trajectory(seed, success, level="hard" if seed == 3 else "easy"),
                10 * model + seed,
            )
    pairs = index.compute_paired_differences(0, 1)["all"]
    assert dict(zip(pairs.values, pairs.counts, strict=True)) == {-1.0: 1, 0.0: 1, 1.0: 1}
    assert pairs.episodes == 3 and pairs.reward_sum == 0.0 and pairs.reward_squares == 2.0
    by_level = index.compute_paired_differences(0, 1, "level")
    assert by_level["easy"].values == [-1.0, 0.0] and by_level["hard"].values == [1.0]
    [worse] = index.find_changed_episodes((0, 1), worse=True, limit=9)
    assert worse.seed == 2 and worse.success == (1.0, 0.0) and worse.offsets == (2, 12)
    [better] = index.find_changed_episodes((0, 1), worse=False, limit=9)
    assert better.seed == 3 and better.level == "hard"
    assert {ref.seed for ref in index.find_common_episodes((0, 1), 9)} == {1, 2, 3}
    assert len(index.find_common_episodes((0, 1), 2)) == 2


def test_measures_are_paired_over_samples_and_where_both_models_have_them(index):
    guessed, looked = [ANSWER], [zoom(1, 1), ANSWER]
    summary = TrajectorySummary()
    for sample, turns in enumerate((guessed, looked)):  # 1.5 turns on average
        index.add_trajectory(
            0, row := trajectory(1, turns=turns, sample=sample), sample, summary.add_trajectory(row)
        )
    for model, seed, turns in (
        (0, 2, guessed),
        (1, 1, [zoom(1, 1), zoom(1, 2), ANSWER]),
        (1, 2, looked),
    ):
        index.add_trajectory(
            model, row := trajectory(seed, turns=turns), 0, summary.add_trajectory(row)
        )
    index.add_trajectory(1, trajectory(3), 0)
    sums = index.sum_paired_metrics(0, 1)
    assert (sums["turns_mean"].episodes, sums["turns_mean"].total) == (2, 1.5 + 1.0)
    assert sums["turns_mean"].squares == 1.5**2 + 1.0
    assert (sums["looked_rate"].total, sums["loop_rate"].total) == (0.5 + 1.0, 0.0)
    # a guess has no step: no episode of the first model has an efficiency in all of its samples
    assert "exploration_efficiency" not in sums and set(sums) < set(PAIRED_METRIC_DIRECTIONS)


def test_index_tells_episodes_of_another_data_version_apart(index):
    index.add_trajectory(0, trajectory(1), 0)
    index.add_trajectory(1, trajectory(1, target="green"), 0)
    assert index.compute_paired_differences(0, 1) == {}


def test_index_averages_samples_before_pairing(index):
    for sample, success in enumerate([True, True, False, False]):
        index.add_trajectory(0, trajectory(1, success, sample=sample), sample)
    index.add_trajectory(1, trajectory(1, True), 7)
    pairs = index.compute_paired_differences(0, 1)["all"]
    assert pairs.values == [0.5] and pairs.counts == [1]
    assert index.find_common_episodes((0, 1), 1)[0].offsets == (
        0,
        7,
    )  # the first sample stands for the episode


def test_index_labels_environments_only_where_there_are_several(index):
    index.add_trajectory(0, trajectory(1), 0)
    assert list(index.compute_rates(0, "level")) == ["easy"]
    index.add_trajectory(0, trajectory(1, environment="maze"), 0)
    assert list(index.compute_rates(0, "level")) == ["pixel_grid/easy", "maze/easy"]


def test_index_refuses_free_text_as_kind(index):
    with pytest.raises(DataError, match="kinds of question"):
        for number in range(2000):
            index.add_trajectory(0, trajectory(number, kind=f"kind {number}"), 0)
