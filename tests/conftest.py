"""Setup of every test: one thread (the suite runs on two workers), no network, no progress bars."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("DO_NOT_TRACK", "true")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.pop(
    "COLUMNS", None
)  # set in the workers of pytest-xdist; output that goes to no terminal is not wrapped

import pytest
import torch


@pytest.fixture(autouse=True)
def _seed_torch():
    """Seed torch's generator, so that a test draws the same weights alone as after any other test."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _restore_stage_registry(monkeypatch):
    """Restore the stage registry after the test; configurations register the stages that they name."""
    from tasks import stage_registry

    monkeypatch.setattr(stage_registry, "_STAGES", stage_registry._STAGES)
