"""Readings of the machine beside a run's metrics, in TensorBoard."""

import pytest

from rl_core.trackers import TensorBoardTracker


def test_readings_have_numbers_of_their_own_and_hide_nothing(tmp_path):
    """The run resumes at step 2 and reading 7; readings 1 to 6 stay, so does step 1."""
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    for steps, readings in (((1, 2, 3), (1, 5, 6)), ((2, 3), (7,))):
        tracker = TensorBoardTracker(tmp_path, cut=True)
        for number in readings:
            tracker.log_system({"system/cpu_utilization_percentage": float(number)}, number)
        for step in steps:
            tracker.log_metrics({"train/loss": float(step)}, step)
        tracker.close("KILLED")

    def points(folder, name):
        events = reader.EventAccumulator(str(folder)).Reload()
        return [event.step for event in events.Scalars(name)]

    assert points(tmp_path, "train/loss") == [1, 2, 3]
    assert points(tmp_path / "system", "system/cpu_utilization_percentage") == [1, 5, 6, 7]
