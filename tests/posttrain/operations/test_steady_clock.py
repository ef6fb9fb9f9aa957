"""Clock of supervision when the system clock is set: nothing is restarted early or late."""

import time

from posttrain.operations.managed_service import MonotonicClock


def test_clock_does_not_jump(monkeypatch):
    monkeypatch.setattr(time, "time", lambda: 1000.0)
    monkeypatch.setattr(time, "monotonic", lambda: 50.0)
    clock = MonotonicClock()
    assert clock() == 1000.0
    for wall in (1000.0 + 3600, 1000.0 - 3600):
        monkeypatch.setattr(time, "time", lambda wall=wall: wall)
        monkeypatch.setattr(time, "monotonic", lambda: 57.5)
        assert clock() == 1007.5
