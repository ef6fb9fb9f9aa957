"""Memory of a process: measured once, kept, and measured again where what is kept is of no use."""

import pytest

from posttrain.planning import target
from posttrain.planning.target import build_machine_target
from rl_core.resources import machine_calibration


@pytest.fixture
def measured(tmp_path, monkeypatch):
    """Calls of the measurement, which finds 300 MB and one more each time."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    calls = []

    def process_bytes():
        calls.append(1)
        return 300_000_000 + len(calls)

    monkeypatch.setattr(machine_calibration, "measure_process_bytes", process_bytes)
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
def test_what_is_damaged_is_measured_again(measured, tmp_path, damaged):
    target.measure_process_bytes_once()
    (kept,) = (tmp_path / "posttrain" / "plan").iterdir()
    kept.write_text(damaged)
    assert target.measure_process_bytes_once() == 300_000_002 == int(kept.read_text())


def test_without_a_cache_it_is_measured_each_time(measured, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert [target.measure_process_bytes_once() for _ in range(2)] == [300_000_001, 300_000_002]
