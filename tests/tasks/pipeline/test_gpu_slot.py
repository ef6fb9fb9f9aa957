"""Slots of the limit `gpu`: stages that wait for one, and stages that do not."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch

from tasks.pipeline import prefect_stages


@pytest.mark.parametrize(
    ("stage", "limit", "gpus", "expected"),
    [
        ("policy", "gpu", True, ["gpu"]),
        ("policy", "gpu", False, []),
        ("policy", "", True, []),
        ("prepare_data", "gpu", True, []),
        ("promote", "gpu", True, []),  # it may wait for a person
    ],
)
def test_a_slot_is_held_with_gpus_and_a_limit(monkeypatch, stage, limit, gpus, expected):
    held_now, seen = [], []

    @contextmanager
    def concurrency(name, lease_duration, strict):
        assert (lease_duration, strict) == (60.0, False)
        held_now.append(name)
        yield
        held_now.remove(name)

    monkeypatch.setattr(prefect_stages, "concurrency", concurrency)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus)
    monkeypatch.setenv("POSTTRAIN_GPU_LIMIT", limit)
    with prefect_stages.hold_gpu_slot(stage):
        seen += held_now
    assert seen == expected and held_now == []
