"""Fixtures of the tests of rl_core; tiny.py, beside this file, holds the model makers."""

import threading

import pytest

from rl_core.cpu import amx_gemm, attention_kernel, norm_and_gate
from rl_core.storage import faults


@pytest.fixture(autouse=True)
def no_faults():
    """A fault point that one test set never fires in the next one."""
    yield
    faults.configure(None)


@pytest.fixture(params=["torch", "compiled", "tiles"])
def way(request, monkeypatch):
    """CPU implementation: torch's kernels, compiled code, compiled code with products by tiles."""
    if request.param == "tiles" and amx_gemm.load() is None:
        pytest.skip("needs a C compiler and a processor with tiles")
    if request.param != "tiles":
        monkeypatch.setattr(amx_gemm, "load", lambda: None)
    if request.param == "torch":
        monkeypatch.setattr(norm_and_gate, "load", lambda: None)
        monkeypatch.setattr(attention_kernel, "load", lambda: None)
    elif norm_and_gate.load() is None:
        pytest.skip("needs a C compiler")
    return request.param


@pytest.fixture
def in_threads():
    """Runs work(0), work(1), ... at the same time."""

    def run(work, count):
        threads = [threading.Thread(target=work, args=(index,)) for index in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    return run
