"""Settings that vary, as given by `--set`."""

import pytest

from flows.sweep.plan import format_configuration
from flows.sweep.search import Dimension, build_grid, parse_set_options, split_list_text
from rl_core.errors import SettingsError


def test_lists_and_ranges_vary_and_the_rest_is_an_override():
    overrides, varied = parse_set_options(
        [
            "a.b=1e-4,3e-4",
            "c=[easy, hard]",
            "d=1..3",
            "e=1e-5..1e-3:3:log",
            "f='x,y'",
            "g={a: 1, b: 2}",
            "h=0.1..0.5",
        ]
    )
    assert overrides == ["c=[easy, hard]", "f='x,y'", "g={a: 1, b: 2}"]
    assert [dimension.key for dimension in varied] == ["a.b", "d", "e", "h"]
    assert varied[0] == Dimension("a.b", ("1e-4", "3e-4"))
    assert varied[1].is_whole and varied[1].list_grid_values() == ("1", "2", "3")
    assert varied[2].is_log and [
        float(text) for text in varied[2].list_grid_values()
    ] == pytest.approx([1e-5, 1e-4, 1e-3])
    assert split_list_text("[a, b], 'c,d', {e: 1, f: 2}") == ["[a, b]", "'c,d'", "{e: 1, f: 2}"]


def test_the_grid_changes_the_last_setting_fastest():
    varied = [Dimension("a", ("1", "2")), Dimension("b", (), 0.0, 1.0, points=3)]
    assert [tuple(params.values()) for params in build_grid(varied)] == [
        ("1", "0.0"),
        ("1", "0.5"),
        ("1", "1.0"),
        ("2", "0.0"),
        ("2", "0.5"),
        ("2", "1.0"),
    ]


@pytest.mark.parametrize(
    "text, message",
    [
        ("a=3..1", "the first number must be below"),
        ("a=0..1:3:log", "needs numbers above 0"),
        ("a=1,1", "lists a value twice"),
        ("a=1,,2", "a value of the list is empty"),
        ("a=1..2:x", "a range is LOW..HIGH"),
        ("a=0.5..1:1", "at least 2 points"),
    ],
)
def test_invalid_dimensions_are_refused_with_a_remedy(text, message):
    with pytest.raises(SettingsError, match=message):
        parse_set_options([text])


def test_a_grid_of_a_range_needs_points_and_has_a_limit():
    with pytest.raises(
        SettingsError, match=r"as in 0.1..0.5:5; or draw from it with --method random"
    ):
        build_grid([Dimension("a", (), 0.1, 0.5)])
    with pytest.raises(SettingsError, match="20,000 configurations"):
        build_grid(
            [Dimension("a", (), 0, 199, is_whole=True), Dimension("b", (), 0, 99, is_whole=True)]
        )
    with pytest.raises(SettingsError, match="varies twice"):
        parse_set_options(["a=1,2", "a=3,4"])


def test_a_label_rounds_drawn_numbers_to_three_digits_but_not_written_ones():
    drawn = {
        "stages.policy.learning_rate": "7.994574862476338e-05",
        "stages.policy.clip_eps": "0.2",
        "model.path": "a=b",
    }
    assert format_configuration(drawn) == "learning_rate=7.99e-05, clip_eps=0.2, path=a=b"
    assert (
        format_configuration({"seed": "12345678901", "name": "v1.23456789012"})
        == "seed=12345678901, name=v1.23456789012"
    )
