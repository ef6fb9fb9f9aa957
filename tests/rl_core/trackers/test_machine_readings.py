"""Machine readings in addition to the metrics of a run, in TensorBoard."""

import pytest

from rl_core.trackers import TensorBoardTracker


def test_readings_are_numbered_separately_and_hide_no_metrics(tmp_path):
    """Resume the run at step 2 and reading 7: step 1 and readings 1 to 6 stay."""
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    for steps, readings in (((1, 2, 3), (1, 5, 6)), ((2, 3), (7,))):
        tracker = TensorBoardTracker(tmp_path, cut=True)
        for number in readings:
            tracker.log_system({"system/cpu_utilization_percentage": float(number)}, number)
        for step in steps:
            tracker.log_metrics({"train/loss": float(step)}, step)
        tracker.close("KILLED")

    def list_steps(folder, name):
        events = reader.EventAccumulator(str(folder)).Reload()
        return [event.step for event in events.Scalars(name)]

    assert list_steps(tmp_path, "train/loss") == [1, 2, 3]
    assert list_steps(tmp_path / "system", "system/cpu_utilization_percentage") == [1, 5, 6, 7]
