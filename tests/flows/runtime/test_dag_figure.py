"""Arrows of the figure: data flow between the stages of the run."""

import pytest

from flows.runtime.dag_figure import _arrows, _places


@pytest.mark.parametrize(
    ("present", "expected"),
    [
        ("prepare_data sft policy evaluate", "prepare_data>sft sft>policy policy>evaluate"),
        (
            "prepare_data sft reward_model policy",
            "prepare_data>sft prepare_data>reward_model sft>reward_model sft>policy reward_model>policy",
        ),
        ("prepare_data sft preference evaluate", "prepare_data>sft sft>preference preference>evaluate"),
        ("prepare_data preference", "prepare_data>preference"),
        ("prepare_data sft thoughts evaluate", "prepare_data>sft sft>thoughts thoughts>evaluate"),
        ("policy thoughts evaluate analyze", "policy>thoughts thoughts>evaluate evaluate>analyze"),
        (
            "sft preference reward_model policy evaluate",
            "sft>preference preference>reward_model preference>policy reward_model>policy policy>evaluate",
        ),
    ],
)
def test_each_model_comes_from_the_stage_before_it(present, expected):
    assert {">".join(arrow) for arrow in _arrows(present.split())} == set(expected.split())


@pytest.mark.parametrize(("uses", "end"), [(True, "policy"), (False, "analyze")])
def test_the_reward_model_points_at_who_asks_it(uses, end):
    arrows = _arrows(["sft", "reward_model", "policy", "evaluate", "analyze"], uses_reward_model=uses)
    assert [to for start, to in arrows if start == "reward_model"] == [end]


def test_columns_follow_from_the_stages_that_ran():
    places = _places(["prepare_data", "sft", "reward_model", "policy", "evaluate", "analyze", "promote"])
    assert places["sft"] == (1.0, 1.0) and places["reward_model"] == (pytest.approx(1.55), 0.0)
    assert places["policy"] == (pytest.approx(2.3), 1.0) and places["promote"] == (pytest.approx(4.3), 0.0)
    assert _places(["prepare_data", "sft", "policy"])["policy"] == (2.0, 1.0)
    assert _places(["sft", "preference", "thoughts"])["thoughts"] == (2.0, 1.0)
    assert len(set(places.values())) == len(places)
