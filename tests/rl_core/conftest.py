"""Fixtures of the tests of rl_core; helpers/tiny.py holds the model makers."""

import threading

import pytest

from rl_core.cpu import attention_kernel, gemm, layer_kernels, low_rank
from rl_core.storage import faults


@pytest.fixture(autouse=True)
def no_faults():
    """Clear fault points after each test."""
    yield
    faults.configure_faults(None)


@pytest.fixture(params=["torch", "compiled", "vectors", "tiles"])
def way(request, monkeypatch):
    """Select a CPU implementation: torch's kernels, compiled code, or that with products by vectors or by tiles."""
    products = {"vectors": gemm.load_vectors, "tiles": gemm.load_tiles}.get(
        request.param, lambda: None
    )
    if request.param in ("vectors", "tiles") and products() is None:
        pytest.skip(f"needs a C compiler and a processor with {request.param}")
    monkeypatch.setattr(gemm, "load_gemm", products)
    if request.param == "torch":
        monkeypatch.setattr(gemm, "load_bf16_gemm", lambda: None)
        monkeypatch.setattr(layer_kernels, "load_norm_and_gate", lambda: None)
        monkeypatch.setattr(attention_kernel, "load_attention_kernel", lambda: None)
        monkeypatch.setattr(low_rank, "load_low_rank", lambda: None)
    elif layer_kernels.load_norm_and_gate() is None:
        pytest.skip("needs a C compiler")
    return request.param


@pytest.fixture
def in_threads():
    """Return a function that runs work(0), work(1), ... at the same time."""

    def run_work(work, count):
        threads = [threading.Thread(target=work, args=(index,)) for index in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    return run_work
