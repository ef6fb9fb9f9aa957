"""Names that trackers and stores accept."""

import pytest

from rl_core.tracking import replace_invalid_characters


@pytest.mark.parametrize(
    ("options", "clean"),
    [
        ({"valid": "a-z"}, "loss_mean_"),
        ({"valid": "a-z", "merge": False}, "loss___mean_"),
        ({"valid": r"\w/ ", "substitute": "-"}, "loss/ -mean-"),
        ({"valid": "a-z! ", "substitute": ""}, "loss mean!"),
    ],
)
def test_invalid_characters_are_replaced(options, clean):
    assert replace_invalid_characters("loss/ +mean!", **options) == clean
