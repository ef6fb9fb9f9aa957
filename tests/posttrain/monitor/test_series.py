"""Metric series in bounded memory, checked by hand."""

import math

import numpy as np
import pytest

from posttrain.monitor.series import (
    MetricSeries,
    MetricSeriesTable,
    compute_moving_average,
    downsample_curve,
)


def test_moving_average_by_hand():
    values = np.array([1.0, 2.0, 6.0, -1.0])
    assert compute_moving_average(values, 2).tolist() == [1.0, 1.5, 4.0, 2.5]
    assert compute_moving_average(values, 10).tolist() == [1.0, 1.5, 3.0, 2.0]
    assert compute_moving_average(values, 1).tolist() == values.tolist()
    assert compute_moving_average(np.array([]), 3).tolist() == []


def test_neighbours_are_averaged_beyond_the_limit():
    series = MetricSeries(limit=2)
    for index, value in enumerate([1.0, 3.0, 5.0, 7.0, 10.0, 20.0, 4.0], start=1):
        series.add_observation(index, 100.0 + index, value)
    # Four points became (1+3)/2 and (5+7)/2; then two at a time; the seventh waits for its neighbour.
    steps, times, values = series.read_arrays()
    assert values.tolist() == [2.0, 6.0, 15.0, 4.0]
    assert steps.tolist() == [2.0, 4.0, 6.0, 7.0]
    assert times.tolist() == [102.0, 104.0, 106.0, 107.0]
    assert (series.stride, series.count, series.last, series.last_step) == (2, 7, 4.0, 7)
    assert series.compute_mean(4) == 9.5  # two merged points: 15 and 4


def test_memory_is_bounded_and_the_mean_is_preserved():
    series = MetricSeries(limit=16)
    for index in range(1024):
        series.add_observation(index, index, float(index))
    values = series.read_arrays()[2]
    assert len(values) <= 32
    assert values.mean() == 511.5


@pytest.mark.parametrize("chunks", [[1] * 60, [60], [1, 2, 3, 7, 30, 17], [0, 59, 1], [31, 29]])
def test_batches_give_the_same_points_as_single_observations(chunks):
    series, table = MetricSeries(limit=4), MetricSeriesTable()
    values = np.arange(60.0) ** 2
    start = 0
    for length in chunks:
        part = slice(start, start + length)
        series.add_observations(np.arange(60.0)[part], np.arange(60.0)[part] + 1000, values[part])
        table.add_rows(
            {"step": n, "time": 1000 * n, "metrics": {"a": n}} for n in range(start, start + length)
        )
        start += length
    steps, times, points = series.read_arrays()
    # 8 points are merged into 4 after 8, 16 and 32 observations: 7 points of 8, and 4 pending observations.
    assert series.stride == 8 and steps.tolist() == [*range(7, 60, 8), 59]
    assert points.tolist() == [values[n : n + 8].mean() for n in range(0, 60, 8)]
    assert times.tolist() == (steps + 1000).tolist() and (series.last, series.last_step) == (
        59.0**2,
        59.0,
    )
    assert table.series["a"].read_arrays()[2].tolist() == list(range(60)) and table.version == 60


def test_downsampling_keeps_spikes_and_ends():
    ys = np.zeros(10_000)
    ys[4321], ys[7777] = 5.0, -5.0
    xs = np.arange(10_000.0)
    x, y = downsample_curve(xs, ys, max_points=100)
    assert len(x) <= 102
    assert (x[0], x[-1]) == (0.0, 9999.0)
    assert (max(y), min(y)) == (5.0, -5.0)
    assert x[y.index(5.0)] == 4321.0
    assert downsample_curve(np.array([1.0]), np.array([2.0]), 100) == ([1.0], [2.0])


def test_growing_curve_keeps_its_points():
    ys = np.sin(np.arange(5001.0) ** 1.7)
    before, after = (
        set(zip(*downsample_curve(np.arange(float(n)), ys[:n], max_points=100), strict=True))
        for n in (5000, 5001)
    )
    assert len(before - after) <= 3 and 50 <= len(before) <= 102  # the last bucket and the end


def test_points_are_rounded_to_significant_digits():
    values = [0.123456789, -98765.4321, 3e-9, 0.0, 1.23456789e15]
    assert downsample_curve(np.array(values), np.array(values)) == (
        [float(f"{value:.7g}") for value in values],
        [float(f"{value:.5g}") for value in values],
    )


def test_nonfinite_values_are_counted_and_dropped():
    table = MetricSeriesTable()
    table.add_row(
        {"step": 1, "time": 2000, "metrics": {"a": 1.5, "b": "nan", "c": "inf", "d": None}}
    )
    table.add_row({"step": "x", "time": 2000, "metrics": {"a": 9.0}})
    table.add_row({"metrics": {"a": 9.0}})
    table.add_row({"step": 2, "time": 3000, "metrics": [1]})
    assert list(table.series) == ["a"]
    assert table.num_nonfinite == 3
    assert table.series["a"].read_arrays()[1].tolist() == [2.0]
    assert math.isnan(MetricSeries().last)


def test_mixed_column_is_converted_value_by_value():
    table = MetricSeriesTable()
    table.add_rows(
        {"step": n, "time": 0, "metrics": {"a": value}}
        for n, value in enumerate([True, "2.5", [3], {}, 4])
    )
    table.add_rows(
        {"step": n, "time": 0, "metrics": {"b": [1, 2]}} for n in range(2)
    )  # not a table of two columns
    assert table.series["a"].read_arrays()[2].tolist() == [1.0, 2.5, 4.0]
    assert list(table.series) == ["a"] and table.num_nonfinite == 4
    huge = 10**400
    table.add_rows(
        [
            {"step": 9, "time": 0, "metrics": {"a": huge, "c": 1}},
            {"step": huge, "time": 0, "metrics": {"c": 2}},
        ]
    )
    assert table.num_nonfinite == 5 and table.series["c"].read_arrays()[2].tolist() == [1.0]
