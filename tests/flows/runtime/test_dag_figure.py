"""Arrows of the figure: data flow between the stages of the run."""

import itertools

import numpy as np
import pytest
from PIL import Image

from flows.runtime import pipeline_figure
from flows.runtime.pipeline_figure import (
    _BOX_PIXELS,
    _compute_box_positions,
    _compute_pixel_layout,
    _list_arrows,
    draw_pipeline_figure,
)


@pytest.mark.parametrize(
    ("present", "expected"),
    [
        ("prepare_data sft policy evaluate", "prepare_data>sft sft>policy policy>evaluate"),
        (
            "prepare_data sft reward_model policy",
            "prepare_data>sft prepare_data>reward_model sft>reward_model sft>policy reward_model>policy",
        ),
        (
            "prepare_data sft preference evaluate",
            "prepare_data>sft sft>preference preference>evaluate",
        ),
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
    assert {">".join(arrow) for arrow in _list_arrows(present.split())} == set(expected.split())


@pytest.mark.parametrize(("uses", "end"), [(True, "policy"), (False, "analyze")])
def test_the_reward_model_points_at_who_asks_it(uses, end):
    arrows = _list_arrows(
        ["sft", "reward_model", "policy", "evaluate", "analyze"], uses_reward_model=uses
    )
    assert [to for start, to in arrows if start == "reward_model"] == [end]


def test_columns_follow_from_the_stages_that_ran():
    positions = _compute_box_positions(
        ["prepare_data", "sft", "reward_model", "policy", "evaluate", "analyze", "promote"]
    )
    assert positions["sft"] == (1.0, 1.0) and positions["reward_model"] == (
        pytest.approx(1.55),
        0.0,
    )
    assert positions["policy"] == (pytest.approx(2.3), 1.0) and positions["promote"] == (
        pytest.approx(4.3),
        0.0,
    )
    assert _compute_box_positions(["prepare_data", "sft", "policy"])["policy"] == (2.0, 1.0)
    assert _compute_box_positions(["sft", "preference", "thoughts"])["thoughts"] == (2.0, 1.0)
    assert len(set(positions.values())) == len(positions)


def test_no_box_covers_another_whatever_ran():
    """Check all sets of stages: the reward model once covered the data without SFT, and the evaluation."""
    names = [
        "prepare_data",
        "sft",
        "reward_model",
        "policy",
        "evaluate",
        "analyze",
        "export",
        "promote",
    ]
    for present in itertools.chain.from_iterable(
        itertools.combinations(names, count) for count in range(2, 9)
    ):
        _, centres = _compute_pixel_layout(_compute_box_positions(present))
        for first, other in itertools.combinations(present, 2):
            apart = [abs(a - b) for a, b in zip(centres[first], centres[other], strict=True)]
            assert apart[0] >= _BOX_PIXELS[0] or apart[1] >= _BOX_PIXELS[1], (present, first, other)


def make_row(stage, *, cached=False, **numbers):
    return {"stage": stage, "cached": cached, "seconds": 3.0, **numbers}


def test_the_figure_has_a_box_for_each_stage_in_the_colour_of_how_it_came_about(tmp_path):
    rows = [
        make_row("prepare_data", cached=True),
        make_row("sft", success=0.5),
        make_row("policy", success=1.0),
        {"stage": "other"},
    ]
    pixels = np.asarray(
        Image.open(draw_pipeline_figure(rows, tmp_path / "run.png", "demo: 12 s")).convert("RGB")
    )
    size, centres = _compute_pixel_layout(
        _compute_box_positions([row["stage"] for row in rows[:3]])
    )
    assert pixels.shape == (size[1], size[0], 3) and size == (
        810,
        342,
    )  # 3 columns of 270; 40 + 216 * 1.4

    def colour(name):
        x, y = centres[name]
        return tuple(pixels[round(y) - 10, round(x) - 95])  # within the box, next to its text

    assert colour("prepare_data") == (0xEE, 0xEE, 0xEE)
    assert colour("sft") == colour("policy") == (0xD7, 0xE8, 0xF7)
    between = pixels[
        round(centres["sft"][1]), round((centres["sft"][0] + centres["policy"][0]) / 2)
    ]
    assert tuple(between) == (0x6B, 0x7F, 0x8F)  # the arrow
    dark = pixels.max(axis=2) < 60
    assert dark[:40, :200].any() and not dark[:40, 400:].any()  # the title, above the boxes
    for x, y in centres.values():
        assert dark[round(y) - 46 : round(y) - 26, round(x) - 60 : round(x) + 60].any()  # its name
        assert dark[
            round(y) + 5 : round(y) + 35, round(x) - 60 : round(x) + 60
        ].any()  # its numbers


@pytest.mark.parametrize("name", ["judge_answers_by_their_rubric", "s" * 60, "评估_" * 15])
def test_the_name_of_a_custom_stage_stays_in_its_box(tmp_path, monkeypatch, name):
    monkeypatch.setattr(
        pipeline_figure, "list_stage_names", lambda: ("prepare_data", "reward_model", name)
    )
    path = draw_pipeline_figure([make_row("prepare_data"), make_row(name)], tmp_path / "run.png")
    dark = np.asarray(Image.open(path).convert("RGB")).max(axis=2) < 60
    _, centres = _compute_pixel_layout(_compute_box_positions(["prepare_data", name]))
    x, y = (round(value) for value in centres[name])
    (columns,) = dark[y - 46 : y - 26].any(axis=0).nonzero()
    columns = columns[columns > x - _BOX_PIXELS[0]]  # of this box's name
    assert x - 100 <= columns.min() < x - 60 and x + 60 < columns.max() <= x + 100


def test_a_run_without_a_stage_of_the_dag_has_an_empty_figure(tmp_path):
    assert Image.open(draw_pipeline_figure([], tmp_path / "run.png")).size == (540, 227)
