"""Self-play in a configuration: environments without two players are refused at the key, before a stage begins."""

import pytest
from helpers.config_problems import list_problems

POKER = {"name": "kuhn_poker"}


def find_problems(policy, environment=None, **values):
    if "environments" not in values:
        values["environment"] = environment or POKER
    return list_problems(stages={"sft": {}, "policy": policy}, **values)


def test_kuhn_poker_is_accepted_and_other_environments_are_named() -> None:
    assert find_problems({"self_play": {}}) == {}
    problems = find_problems({"self_play": {}}, {"name": "arithmetic"})
    assert list(problems) == ["stages.policy.self_play"]
    text = problems["stages.policy.self_play"]
    assert "environment 'arithmetic' is not a two-player game; use kuhn_poker" in text
    problems = find_problems(
        {"self_play": {}}, environments=[POKER, {"name": "arithmetic", "label": "sums"}]
    )
    assert "is not supported in a mixture" in problems["stages.policy.self_play"]


@pytest.mark.parametrize(
    ("policy", "key", "text"),
    [
        ({"self_play": {"pool_size": 0}}, "self_play.pool_size", "at least 1"),
        ({"self_play": {"oponent": "pool"}}, "self_play.oponent", "did you mean 'opponent'"),
        ({"self_play": {}, "prompts_per_iteration": 3}, "self_play", "must be even"),
        (
            {"self_play": {"current_share": 0.9}, "prompts_per_iteration": 8},
            "self_play.current_share",
            "0.9 of 4 pairs of prompts rounds to all of them",
        ),
        ({"role_baseline": {"decay": 1.5}}, "role_baseline.decay", "less than 1"),
    ],
)
def test_values_out_of_range_are_refused_at_their_key(policy, key, text) -> None:
    problems = find_problems(policy)
    assert text in problems[f"stages.policy.{key}"]


def test_measures_of_self_play_can_be_watched() -> None:
    def find(metric, **policy):
        condition = {"metric": metric, "window": 2, "comparison": "<=", "threshold": 0.2}
        return find_problems({"early_stop": condition, "eval_every": 5, **policy})

    assert find("eval/exploitability", self_play={}) == {}
    problems = find("eval/exploitability")
    assert (
        "self_play in a game that can be enumerated" in problems["stages.policy.early_stop.metric"]
    )
