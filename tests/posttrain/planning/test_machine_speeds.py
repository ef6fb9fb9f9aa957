"""Calibration of a machine, with smaller models; memory of processes is told by a stand-in."""

import re

import pytest
import torch

from posttrain.cli.doctor import write_machine_calibration
from posttrain.settings_files import read_settings_file
from rl_core.errors import BackendError, SettingsError
from rl_core.resources import machine_calibration as calibration
from rl_core.resources.activations import MicroBatch, estimate_packed_activations
from rl_core.resources.model_shape import measure_model_shape
from rl_core.settings.planning import MachineSettings

SMALL = ((32, 1, 2, 1, 48), (64, 1, 2, 1, 96))


@pytest.fixture
def small(monkeypatch):
    """Two tiny models, little memory to copy, and 100 MB of a process but for its models."""
    sizes = {
        "SHAPES": SMALL,
        "NANO": SMALL[0],
        "HEAP_SHAPE": SMALL[1],
        "ROWS": 4,
        "HEAP_ROWS": 8,
        "LENGTH": 16,
        "SLOTS": 8,
        "FEW": 2,
        "NEW": 4,
        "COPIED": 2**12,
        "PRODUCT_ROWS": 8,
        "PRODUCT_SIZES": (16, 32),
    }
    for name, value in sizes.items():
        monkeypatch.setattr(calibration, name, value)
    asked = []

    def peak_of(code):
        asked.append(code)
        return (
            100_000_000
            + (7_000_000 if "import some_pipeline" in code else 0)
            + ("for_heap" in code) * 5_000_000
        )

    monkeypatch.setattr(calibration, "_measure_peak_bytes", peak_of)
    return asked


def test_speeds_and_memory_of_a_small_machine(small):
    told = []
    found = calibration.calibrate_machine(
        "a processor", pipeline_imports=("some_pipeline",), repeats=2, progress=told.append
    )
    rounds = [f"speeds of models, round {number} of 3" for number in (1, 2, 3)]
    assert told == ["memory of processes", "memory's speed", *rounds, "products of matrices"]
    assert (
        [point.hidden_size for point in found.training]
        == [32, 64]
        == [one.hidden_size for one in found.decoding]
    )
    assert all(
        one.slowest <= one.median <= one.fastest
        for one in (*found.training, *found.scoring, *found.decoding)
    )
    assert (found.name, found.threads) == ("a processor", torch.get_num_threads())
    assert (found.library_bytes, found.pipeline_bytes) == (100_000_000, 7_000_000)
    assert [(one.rows, one.size) for one in found.products] == [(8, 16), (8, 32)]
    assert (
        found.decode_step_seconds >= 0
        and found.decode_row_seconds >= 0
        and found.copy_bytes_per_second > 0
    )


def test_the_heap_s_share_is_what_its_process_takes_beyond_what_lives(small):
    """5 MB beyond the library: weights and two moments of the model, its activations, and holes."""
    shape = measure_model_shape(calibration._build_model(SMALL[1]), 16)
    live = estimate_packed_activations(shape, MicroBatch(8 * 16, 8 * 16, 8 * 15))
    activations = live.saved + live.temporary
    holes = 5_000_000 - 12 * shape.parameters - activations
    assert holes > 0 and calibration._measure_heap_share(100_000_000) == pytest.approx(
        holes / activations
    )
    adapted = (
        5_000_000 - 4 * shape.parameters - activations
    )  # moments of the adapters count as nothing
    assert calibration._measure_heap_share(100_000_000, adapters=True) == pytest.approx(
        adapted / activations
    )
    assert calibration._measure_heap_share(200_000_000) == 0.0  # never below


def test_the_file_is_one_that_a_plan_reads(small, tmp_path, capsys):
    path = tmp_path / "machine.yaml"
    said = write_machine_calibration(path, as_json=False)
    out, err = capsys.readouterr()
    assert not out and err.startswith("measuring ") and err.count("\n") == 1  # at once
    found, _ = read_settings_file(MachineSettings, path, shipped_name=str(path))
    assert found.library_bytes == 100_000_000 and [
        point.hidden_size for point in found.scoring
    ] == [32, 64]
    assert (
        re.search(r"training: .* \(32\), .* \(64\) GFLOP/s", said) and f"--machine {path}" in said
    )
    assert f"{found.threads} threads" in said


def test_a_file_that_cannot_be_is_refused_before_a_minute_is_spent(small, tmp_path):
    for path, message in (
        (tmp_path, "is a folder"),
        (tmp_path / "none" / "machine.yaml", "none is no folder that"),
    ):
        with pytest.raises(SettingsError, match=f"--output: {path} .*{message}"):
            write_machine_calibration(path, as_json=False)
    assert small == []


def test_a_process_that_fails_or_hangs_is_one_line(monkeypatch):
    with pytest.raises(
        BackendError, match=r"^a process that measures memory failed: ValueError: no room$"
    ):
        calibration._measure_peak_bytes("raise ValueError('no room')")
    with pytest.raises(BackendError, match=r"failed: exit code 3$"):
        calibration._measure_peak_bytes("import os; os._exit(3)")
    monkeypatch.setattr(calibration, "PROCESS_SECONDS", 0.2)
    with pytest.raises(BackendError, match=r"took longer than 0.2 s; try again"):
        calibration._measure_peak_bytes("import time; time.sleep(30)")
