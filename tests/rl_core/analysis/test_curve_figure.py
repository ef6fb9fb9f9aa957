"""Curves as SVG: what default panels show, ticks, hostile names, several runs, non-finite values."""

import math
import xml.etree.ElementTree as ET

import pytest

from rl_core.analysis.curve_figure import build_curve_figure, choose_ticks, format_value
from rl_core.analysis.metric_reference import sort_by_importance
from rl_core.errors import DataError

REWARD = [(1.0, 0.0), (2.0, 0.5), (3.0, 1.0)]


def list_line_points(svg):
    """Return the points of every polyline of an SVG document, which is parsed as XML."""
    lines = ET.fromstring(svg).iter("{http://www.w3.org/2000/svg}polyline")
    return [
        [tuple(map(float, pair.split(","))) for pair in line.get("points").split()]
        for line in lines
    ]


def test_default_panels_are_reward_success_kl_entropy_length():
    series = {
        "train/loss": REWARD,
        "policy/entropy": REWARD,
        "policy/update_kl": [(1.0, 0.0), (2.0, 0.1)],
        "train/action_tokens": REWARD,
        "train/success_rate": REWARD,
        "reward/mean": REWARD,
        "perf/step_seconds": REWARD,
    }
    figure = build_curve_figure({"": series})
    titles = [panel.title for panel in figure.panels]
    assert titles == ["Reward", "Success", "KL of one update", "Entropy", "Length", "Loss"]
    assert "Success: 100%" in repr(figure)


def test_a_kl_that_is_always_zero_has_no_panel():
    figure = build_curve_figure(
        {"": {"policy/update_kl": [(1.0, 0.0), (2.0, 0.0)], "train/loss": REWARD}}
    )
    assert [panel.title for panel in figure.panels] == ["Loss"]


def test_points_lie_where_their_values_say():
    (points,) = list_line_points(build_curve_figure({"": {"reward/mean": REWARD}})._repr_svg_())
    # Plot area: x from 44 to 310, y from 30 (value 1) to 152 (value 0).
    assert points == [(44.0, 152.0), (177.0, 91.0), (310.0, 30.0)]


def test_values_that_are_not_finite_are_left_out():
    series = {"reward/mean": [(1.0, math.nan), (2.0, 1.0), (3.0, math.inf), (4.0, 2.0)]}
    figure = build_curve_figure({"": series})
    assert figure.panels[0].lines[""] == [(2.0, 1.0), (4.0, 2.0)]
    assert "nan" not in figure._repr_svg_().lower()
    empty = build_curve_figure({"": {"reward/mean": [(1.0, math.nan)]}})
    assert empty.panels == [] and "nothing was trained" in repr(empty)


def test_a_figure_of_nothing_says_so():
    figure = build_curve_figure({"": {}})
    assert "nothing was trained" in figure._repr_html_()
    assert "nothing was trained" in ET.fromstring(figure._repr_svg_()).find("{*}text").text


def test_one_point_and_constant_values_are_drawn():
    figure = build_curve_figure(
        {"": {"reward/mean": [(7.0, 3.0)], "eval/loss": [(1.0, 2.0), (2.0, 2.0)]}}
    )
    svg = figure._repr_svg_()
    assert svg.count("<circle") == 1
    assert list_line_points(svg) == [[(44.0, 91.0), (310.0, 91.0)]]


def test_names_and_patterns_select_panels():
    series = {"reward/mean": REWARD, "reward/format": REWARD, "train/loss": REWARD}
    figure = build_curve_figure({"": series}, ["train/loss", "reward/*"])
    assert [panel.title for panel in figure.panels] == [
        "train/loss",
        "reward/mean",
        "reward/format",
    ]
    with pytest.raises(
        DataError, match="no metric 'train/los' was logged; did you mean 'train/loss'"
    ):
        build_curve_figure({"": series}, ["train/los"])
    with pytest.raises(
        DataError, match="30 metrics are selected, but a figure has up to 24 panels"
    ):
        build_curve_figure({"": {f"tool/{n}": REWARD for n in range(30)}}, ["tool/*"])


def test_brackets_in_a_name_stand_for_themselves():
    figure = build_curve_figure({"": {"eval/[hard]": REWARD, "eval/h": REWARD}}, ["eval/[hard]"])
    assert [panel.title for panel in figure.panels] == ["eval/[hard]"]
    figure = build_curve_figure({"": {"eval/[hard]": REWARD, "eval/h": REWARD}}, ["*[*"])
    assert [panel.title for panel in figure.panels] == ["eval/[hard]"]


def test_runs_share_panels_and_have_one_colour_each():
    figure = build_curve_figure(
        {"a": {"reward/mean": REWARD}, "b": {"reward/mean": REWARD, "train/loss": REWARD}}
    )
    lines = ET.fromstring(figure._repr_svg_()).findall(".//{*}polyline")
    assert [line.get("stroke") for line in lines] == ["#2B8CD6", "#C77C00", "#C77C00"]


def test_names_with_markup_are_escaped():
    name = "<script>&'\""
    figure = build_curve_figure({name: {"reward/" + name: REWARD}, "b": {}}, ["reward/*"])
    for page in (figure._repr_html_(), figure._repr_svg_()):
        assert "<script" not in page
        ET.fromstring(page)  # well-formed


def test_long_curves_are_thinned_to_the_mean_of_neighbours():
    points = [(float(step), float(step % 2)) for step in range(6000)]
    (line,) = list_line_points(
        build_curve_figure({"a": {"tool/x": points}, "b": {}}, ["tool/x"])._repr_svg_()
    )
    assert len(line) == 300  # 20 neighbours each, mean 0.5: all at one height
    assert len({y for _, y in line}) == 1


def test_only_svg_files_are_written(tmp_path):
    figure = build_curve_figure({"": {"reward/mean": REWARD}})
    assert figure.save(tmp_path / "curves.svg").read_text() == figure._repr_svg_()
    with pytest.raises(DataError, match=r"ends in \.svg"):
        figure.save(tmp_path / "curves.png")


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0.0, 1.0, [0.0, 0.25, 0.5, 0.75, 1.0]),
        (0.11, 0.62, [0.2, 0.4, 0.6]),
        (-3.0, 5.0, [-2.0, 0.0, 2.0, 4.0]),
        (10_000.0, 10_001.0, [10_000.0, 10_000.25, 10_000.5, 10_000.75, 10_001.0]),
    ],
)
def test_ticks_are_round(low, high, ticks):
    assert choose_ticks(low, high) == pytest.approx(ticks, abs=1e-9)


def test_values_have_four_digits_at_most():
    values = [0.0, 0.62367, 12345.6, 1.2e-9, -2.5e8]
    assert [format_value(v) for v in values] == ["0", "0.6237", "12,346", "1.2e-09", "-2.5e+08"]
    shares = [0.0, 0.5, 0.9874, 0.996, 1.0]
    texts = [format_value(v, is_share=True) for v in shares]
    assert texts == ["0%", "50%", "98.7%", "99.6%", "100%"]


def test_metrics_are_ordered_by_importance():
    names = [
        "perf/x",
        "zeta/custom",
        "train/loss",
        "tool/calls",
        "reward/format",
        "policy/entropy",
        "reward/mean",
    ]
    assert sort_by_importance(names) == [
        "reward/mean",
        "policy/entropy",
        "train/loss",
        "reward/format",
        "tool/calls",
        "zeta/custom",
        "perf/x",
    ]
