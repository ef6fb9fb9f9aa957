"""Calibration of a machine with small_machine models; the memory of processes comes from a double."""

import re

import pytest
import torch

from posttrain.cli.check_machine import write_machine_calibration
from posttrain.settings_files import read_settings_file
from rl_core.errors import BackendError, SettingsError
from rl_core.resources import machine_calibration as calibration
from rl_core.resources.activations import MicroBatch, estimate_packed_activations
from rl_core.resources.model_shape import measure_model_shape
from rl_core.settings.planning import MachineSettings

SMALL_SHAPES = ((32, 1, 2, 1, 48), (64, 1, 2, 1, 96))


@pytest.fixture
def small_machine(monkeypatch):
    """Use two tiny models, little memory to copy, and a process of 100 MB without its models."""
    sizes = {
        "SHAPES": SMALL_SHAPES,
        "TINY_SHAPE": SMALL_SHAPES[0],
        "HEAP_SHAPE": SMALL_SHAPES[1],
        "ROWS": 4,
        "HEAP_ROWS": 8,
        "LENGTH": 16,
        "SLOTS": 8,
        "FEW_SLOTS": 2,
        "NEW_TOKENS": 4,
        "NUM_COPIED_VALUES": 2**12,
        "PRODUCT_ROWS": 8,
        "PRODUCT_SIZES": (16, 32),
    }
    for name, value in sizes.items():
        monkeypatch.setattr(calibration, name, value)
    measured = []

    def fake_peak_bytes(code):
        measured.append(code)
        return (
            100_000_000
            + (7_000_000 if "import some_pipeline" in code else 0)
            + ("for_heap" in code) * 5_000_000
        )

    monkeypatch.setattr(calibration, "_measure_peak_bytes", fake_peak_bytes)
    return measured


def test_speeds_and_memory_of_a_small_machine(small_machine):
    steps = []
    settings = calibration.calibrate_machine(
        "a processor", pipeline_imports=("some_pipeline",), repeats=2, progress=steps.append
    )
    rounds = [f"speeds of models, round {number} of 3" for number in (1, 2, 3)]
    assert steps == ["memory of processes", "speed of memory", *rounds, "products of matrices"]
    assert (
        [point.hidden_size for point in settings.training]
        == [32, 64]
        == [row.hidden_size for row in settings.decoding]
    )
    assert all(
        row.slowest <= row.median <= row.fastest
        for row in (*settings.training, *settings.scoring, *settings.decoding)
    )
    assert (settings.name, settings.threads) == ("a processor", torch.get_num_threads())
    assert (settings.library_bytes, settings.pipeline_bytes) == (100_000_000, 7_000_000)
    assert [(row.rows, row.size) for row in settings.products] == [(8, 16), (8, 32)]
    assert (
        settings.decode_step_seconds >= 0
        and settings.decode_row_seconds >= 0
        and settings.copy_bytes_per_second > 0
    )


@pytest.mark.parametrize("is_supported", [True, False])
def test_speeds_in_bfloat16_are_measured_where_the_processor_has_them(
    small_machine, monkeypatch, is_supported
):
    monkeypatch.setattr(calibration, "has_bfloat16_kernels", lambda: is_supported)
    products = object() if is_supported else None
    monkeypatch.setattr(calibration.gemm, "load_bf16_gemm", lambda: products)
    monkeypatch.setattr(calibration.packed_gemm, "load_bf16_products", lambda: products)
    built = []

    def record(kind):
        def build(model, precision):
            built.append((kind, precision))
            return lambda: None

        return build

    for name in ("training_step", "scoring_pass", "slots_run"):
        monkeypatch.setattr(calibration, f"_build_{name}", record(name))
    settings = calibration.calibrate_machine("a processor", repeats=1)
    points = [settings.training_bfloat16, settings.scoring_bfloat16, settings.decoding_bfloat16]
    widths = [[point.hidden_size for point in measured] for measured in points]
    assert widths == ([[32, 64]] * 3 if is_supported else [[]] * 3)
    kinds = [(name, "bfloat16") for name in ("training_step", "scoring_pass", "slots_run")]
    assert [entry for entry in built if entry[1] == "bfloat16"] == [
        kind for kind in kinds for _ in SMALL_SHAPES if is_supported
    ]


def test_speeds_in_bfloat16_are_complete_or_absent(small_machine):
    settings = calibration.calibrate_machine("a processor", repeats=1)
    values = {name: getattr(settings, name) for name in settings.__dataclass_fields__}
    values |= {f"{name}_bfloat16": settings.training for name in ("training", "scoring")}
    values["decoding_bfloat16"] = ()
    with pytest.raises(SettingsError, match="decoding_bfloat16: is missing beside training_bf"):
        MachineSettings(**values)


def test_the_heap_share_is_the_memory_beyond_live_tensors(small_machine):
    """Take 5 MB beyond the library: weights and two moments of the model, its activations, and holes."""
    shape = measure_model_shape(calibration._build_model(SMALL_SHAPES[1]), 16)
    live = estimate_packed_activations(shape, MicroBatch(8 * 16, 8 * 16, 8 * 15))
    activations = live.saved + live.temporary
    holes = 5_000_000 - 12 * shape.parameters - activations
    assert holes > 0 and calibration._measure_heap_share(100_000_000) == pytest.approx(
        holes / activations
    )
    adapter_holes = (
        5_000_000 - 4 * shape.parameters - activations
    )  # moments of the adapters are neglected
    assert calibration._measure_heap_share(100_000_000, adapters=True) == pytest.approx(
        adapter_holes / activations
    )
    assert calibration._measure_heap_share(200_000_000) == 0.0  # never negative


def test_a_plan_reads_the_written_file(small_machine, tmp_path, capsys):
    path = tmp_path / "machine.yaml"
    _, report = write_machine_calibration(path)
    out, err = capsys.readouterr()
    assert (
        not out and err.startswith("measuring ") and err.count("\n") == 1
    )  # before the measurement
    settings, _ = read_settings_file(MachineSettings, path, shipped_name=str(path))
    assert settings.library_bytes == 100_000_000 and [
        point.hidden_size for point in settings.scoring
    ] == [32, 64]
    assert (
        re.search(r"training: .* \(32\), .* \(64\) GFLOP/s", report)
        and f"--machine {path}" in report
    )
    assert f"{settings.threads} threads" in report


def test_an_unwritable_file_is_refused_before_the_measurement(small_machine, tmp_path):
    for path, message in (
        (tmp_path, "is a folder"),
        (tmp_path / "none" / "machine.yaml", "is not a writable folder"),
    ):
        with pytest.raises(SettingsError, match=f"--to: {path} .*{message}"):
            write_machine_calibration(path)
    assert small_machine == []


def test_a_process_that_fails_or_hangs_gives_one_line(monkeypatch):
    with pytest.raises(
        BackendError, match=r"^a process that measures memory failed: ValueError: no room$"
    ):
        calibration._measure_peak_bytes("raise ValueError('no room')")
    with pytest.raises(BackendError, match=r"failed: exit code 3$"):
        calibration._measure_peak_bytes("import os; os._exit(3)")
    monkeypatch.setattr(calibration, "PROCESS_SECONDS", 0.2)
    with pytest.raises(BackendError, match=r"took longer than 0.2 s; try again"):
        calibration._measure_peak_bytes("import time; time.sleep(30)")
