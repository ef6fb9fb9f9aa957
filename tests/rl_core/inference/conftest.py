"""Engine implementations that the tests of rollout backends run with."""

from __future__ import annotations

import pytest
from helpers.tile_code import tile_code

from rl_core.capabilities import Decision, decoding
from rl_core.cpu import build, fused_decode, packed_gemm
from rl_core.cpu.packed_gemm import PackedProducts
from rl_core.inference import decoder
from rl_core.inference.cuda_graphs import StepGraphs


class RerunGraphs(StepGraphs):
    """Pseudo recordings that recompute from the inputs they keep."""

    def __init__(self) -> None:
        super().__init__(lambda compute, inputs: lambda: compute(inputs), min_steps=2)


def use_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use products by tiles, in plain C if the processor has none."""
    code = tile_code()
    if code is None:
        pytest.skip("needs a C compiler")
    monkeypatch.setattr(packed_gemm, "load_int8_gemm", lambda: PackedProducts(code, "int8"))
    monkeypatch.setattr(build, "load_library", lambda: code)


@pytest.fixture(params=["tiles", "vectors", "compiled", "packed", "in place", "recorded"])
def weights(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Select the engine implementation.

    Packed copies of the weights, as for small models on a CPU: with torch's kernels, with compiled code if heads have
    a fitting size, or completely compiled if the processor has tiles or wide vectors. Or weights in place, as on a
    GPU, optionally with replayed steps of rounded sizes.
    """
    if request.param in ("in place", "recorded"):
        monkeypatch.setattr(
            decoding,
            "check_packed_weights",
            lambda *_, **__: Decision("packed weights", False, "as on a GPU"),
        )
    if request.param == "recorded":
        monkeypatch.setattr(decoder, "create_step_graphs", lambda device: RerunGraphs())
    if request.param == "packed":
        monkeypatch.setattr(fused_decode, "load_decode_kernels", lambda: None)
    if request.param == "vectors" and packed_gemm.load_packed_vectors() is None:
        pytest.skip("needs a C compiler and a processor with vectors of 8 numbers")
    if request.param == "tiles":
        use_tiles(monkeypatch)
    else:
        monkeypatch.setattr(packed_gemm, "load_int8_gemm", lambda: None)
    if request.param != "vectors":
        monkeypatch.setattr(packed_gemm, "load_packed_vectors", lambda: None)
    if request.param == "compiled" and fused_decode.load_decode_kernels() is None:
        pytest.skip("needs a C compiler")
    return str(request.param)
