"""The picture's arrows: what one stage hands to the next in the run that is drawn."""

import pytest

from flows.picture import _arrows, _places


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
        (
            "sft preference reward_model policy evaluate",
            "sft>preference preference>reward_model preference>policy reward_model>policy policy>evaluate",
        ),
    ],
)
def test_each_model_comes_from_the_stage_before_it(present, expected):
    assert {">".join(arrow) for arrow in _arrows(present.split())} == set(expected.split())


def test_without_a_preference_stage_its_column_closes():
    assert _places(["sft", "policy"])["policy"] == (pytest.approx(2.3), 1.0)
    assert _places(["sft", "preference", "policy"])["policy"] == (3.3, 1.0)
    assert _places(["sft"])["sft"] == (1.0, 1.0)
