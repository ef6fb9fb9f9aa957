"""Setup of every test: one thread (the suite runs on several workers), no network, no progress bars."""

import gc
import os
import urllib.request

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("DO_NOT_TRACK", "true")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# bfloat16 is tested on every processor, also where runs compute in float32 because it is faster there
os.environ.setdefault("POSTTRAIN_BFLOAT16", "1")
os.environ.pop(
    "COLUMNS", None
)  # set in the workers of pytest-xdist; output that goes to no terminal is not wrapped

import pytest
import torch
from helpers.matrices import find_left_out_cases


@pytest.hookimpl(tryfirst=True)  # before pytest deselects by mark
def pytest_collection_modifyitems(items):
    """Mark the cases of long matrices that `make test` leaves out as slow."""
    left_out = find_left_out_cases([item.nodeid for item in items])
    for item in items:
        if item.nodeid in left_out:
            item.add_marker(pytest.mark.slow)


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Collect the tests without the garbage collector, and let it run seldom afterwards.

    With its threshold of 700 objects a test that parses the sources spends 70% of its time on garbage.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.set_threshold(100_000, 10, 10)
        gc.enable()


@pytest.fixture(scope="module", autouse=True)
def _freeze_imported_modules():
    """Exempt what lives at the start of a file from garbage collection: a pass over all modules takes 0.4 s."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _seed_torch():
    """Seed torch's generator, so that a test draws the same weights alone as after any other test."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _forget_proxies(monkeypatch):
    """Let urllib read the proxies of the environment again; it keeps those of its first request."""
    monkeypatch.setattr(urllib.request, "_opener", None)


@pytest.fixture(autouse=True)
def _restore_stage_registry(monkeypatch):
    """Restore the stage registry after the test; configurations register the stages that they name."""
    from tasks import stage_registry

    monkeypatch.setattr(stage_registry, "_STAGES", stage_registry._STAGES)


@pytest.fixture(scope="session")
def prefect_address():
    """Start a server and yield the address of its API.

    Threads of the client outlive the tests that used it, so they must not draw from the global random generator.
    """
    from crash.servers import prefect_server

    from flows.runtime.prefect_home import isolate_random_generator

    isolate_random_generator()
    with prefect_server() as api:
        yield api


@pytest.fixture(scope="module")
def prefect_api(prefect_address):
    """Yield the address; flow runs of this process use the server, and so do children that receive it."""
    from prefect.settings import (
        PREFECT_API_URL,
        PREFECT_FLOWS_HEARTBEAT_FREQUENCY,
        temporary_settings,
    )

    with temporary_settings(
        {PREFECT_API_URL: prefect_address, PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None}
    ):
        yield prefect_address
