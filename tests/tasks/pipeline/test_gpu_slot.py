"""Slots of the limit `gpu`: stages that wait for one, and those that do not."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch

from tasks.pipeline import prefect_stages


@pytest.mark.parametrize(
    ("stage", "limit", "gpus", "held"),
    [
        ("policy", "gpu", True, ["gpu"]),
        ("policy", "gpu", False, []),
        ("policy", "", True, []),
        ("prepare_data", "gpu", True, []),
        ("promote", "gpu", True, []),  # it may wait for a person
    ],
)
def test_a_slot_is_held_where_there_are_gpus_and_a_limit(monkeypatch, stage, limit, gpus, held):
    holding, seen = [], []

    @contextmanager
    def concurrency(name, lease_duration, strict):
        assert (lease_duration, strict) == (60.0, False)
        holding.append(name)
        yield
        holding.remove(name)

    monkeypatch.setattr(prefect_stages, "concurrency", concurrency)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus)
    monkeypatch.setenv("POSTTRAIN_GPU_LIMIT", limit)
    with prefect_stages.hold_gpu_slot(stage):
        seen += holding
    assert seen == held and holding == []
