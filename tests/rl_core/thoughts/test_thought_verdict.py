"""The verdict on thoughts: one case that passes, and one for each way to fail."""

import numpy as np
import pytest

from rl_core.errors import DataError
from rl_core.thoughts.verdict import judge_thoughts

NAMES = ("own", "shuffled", "filler", "truncated")


def draw_gains(policy, shuffled, filler, truncated, noise=0.3):
    """Draw 60 episodes of two turns around these means; each condition has separate noise."""
    rng = np.random.default_rng(0)
    means = dict(zip(NAMES, (policy, shuffled, filler, truncated), strict=True))
    return {
        name: (mean + noise * rng.standard_normal((60, 2))).tolist() for name, mean in means.items()
    }


def test_genuine_thoughts_pass():
    verdict = judge_thoughts(draw_gains(1.0, -0.5, 0.1, 0.6))
    assert verdict.genuine and verdict.failures == []
    assert verdict.gains["own"].low > 0.9 and verdict.gains["own"].high < 1.1
    assert verdict.lost["shuffled"] == pytest.approx(1.5, abs=0.15)
    assert verdict.lost["truncated"] == pytest.approx(
        0.4, abs=0.1
    )  # more than half of it may remain
    assert (
        verdict.to_json()["genuine"] is True
        and verdict.collect_metrics()["thoughts/genuine"] == 1.0
    )
    assert verdict.describe().endswith("genuine") and "NOT" not in verdict.describe()


@pytest.mark.parametrize(
    ("means", "part"),
    [
        ((0.0, -1.0, -1.0, -1.0), "not significantly above 0"),
        ((-0.5, -1.5, -1.5, -1.5), "not significantly above 0"),
        ((1.0, 1.0, 0.0, 0.0), "shuffled thoughts do not lose significantly"),
        ((1.0, 0.0, 1.2, 0.0), "filler thoughts do not lose significantly"),
        ((1.0, 0.0, 0.0, 1.1), "truncated thoughts do not lose significantly"),
        ((1.0, 0.7, 0.0, 0.0), "shuffled thoughts lose 3"),
        ((1.0, 0.0, 0.7, 0.0), "filler thoughts lose 3"),
    ],
)
def test_each_way_to_fail(means, part):
    verdict = judge_thoughts(draw_gains(*means))
    assert not verdict.genuine
    assert len(verdict.failures) == 1 and part in verdict.failures[0]
    assert "NOT genuine" in verdict.describe() and part in verdict.describe()


@pytest.mark.parametrize(("episodes", "genuine"), [(5, False), (6, True)])
def test_few_episodes_are_never_enough(episodes, genuine):
    """Check that without noise intervals have no width; the exact p-value is 1 / 2^episodes, and .025 is required."""
    verdict = judge_thoughts({"own": [[2.0]] * episodes, "shuffled": [[0.5]] * episodes})
    assert verdict.genuine is genuine
    assert verdict.p_values == {
        "own": pytest.approx(0.5**episodes),
        "shuffled": pytest.approx(0.5**episodes),
    }
    assert verdict.collect_metrics()["thoughts/p_own"] == verdict.p_values["own"]


def test_the_threshold_is_the_users():
    actual = draw_gains(1.0, 0.7, 0.0, 0.0)
    assert judge_thoughts(actual, min_dependence=0.2).genuine
    assert not judge_thoughts(actual, min_dependence=0.4).genuine


def test_exact_numbers_without_noise():
    verdict = judge_thoughts({"own": [[1.0, 3.0], [2.0]], "shuffled": [[0.0, 1.0], [0.5]]})
    # episode means: own 2, 2; shuffled .5, .5; drop 1.5 of 2
    assert verdict.gains["own"] == (2.0, 2.0, 2.0) and verdict.gains["shuffled"] == (0.5, 0.5, 0.5)
    assert verdict.drops["shuffled"] == (1.5, 1.5, 1.5) and verdict.lost == {"shuffled": 0.75}


def test_differences_are_paired_by_episode():
    spread = np.linspace(-3, 3, 60)  # episodes differ far more than conditions
    verdict = judge_thoughts(
        {"own": (spread + 0.2)[:, None].tolist(), "shuffled": spread[:, None].tolist()}
    )
    assert verdict.drops["shuffled"].low == pytest.approx(0.2)


@pytest.mark.parametrize(
    "invalid",
    [
        {"shuffled": [[1.0]]},
        {"own": [[1.0]]},
        {"own": [[1.0], [1.0]], "filler": [[1.0]]},
        {"own": [[1.0, 2.0]], "filler": [[1.0]]},
        {"own": [[]], "filler": [[]]},
        {"own": [], "filler": []},
    ],
)
def test_refusals(invalid):
    with pytest.raises(DataError):
        judge_thoughts(invalid)
