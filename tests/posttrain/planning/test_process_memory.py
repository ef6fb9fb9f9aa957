"""Memory of a process: measured once, stored, and measured again if the stored value is useless."""

import pytest

from posttrain.planning import target
from posttrain.planning.target import build_machine_target
from rl_core.resources import machine_calibration


@pytest.fixture
def measured(tmp_path, monkeypatch):
    """Count calls of the measurement, which returns 300 MB and one byte more each time."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    calls = []

    def fake_process_bytes():
        calls.append(1)
        return 300_000_000 + len(calls)

    monkeypatch.setattr(machine_calibration, "measure_process_bytes", fake_process_bytes)
    return calls


def test_a_process_is_measured_once_for_its_versions(measured, monkeypatch):
    assert [build_machine_target(None).runtime_bytes for _ in range(3)] == [
        300_000_001
    ] * 3 and len(measured) == 1
    monkeypatch.setattr(target, "version", lambda name: "9")
    assert target.measure_process_bytes_once() == 300_000_002
    monkeypatch.setenv("POSTTRAIN_NATIVE", "0")
    assert target.measure_process_bytes_once() == 300_000_003


@pytest.mark.parametrize("damaged", ["", "12", "many\n", "-5"])
def test_a_damaged_value_is_measured_again(measured, tmp_path, damaged):
    target.measure_process_bytes_once()
    (stored,) = (tmp_path / "posttrain" / "plan").iterdir()
    stored.write_text(damaged)
    assert target.measure_process_bytes_once() == 300_000_002 == int(stored.read_text())


def test_without_a_cache_it_is_measured_each_time(measured, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert [target.measure_process_bytes_once() for _ in range(2)] == [300_000_001, 300_000_002]
