"""Descriptions of a processor's code path."""

import types
from collections.abc import Callable

import pytest

from rl_core.cpu import build, gemm, packed_gemm


@pytest.fixture
def processor(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Return a function that describes a processor with vectors of 8 numbers, with or without tiles."""

    def describe(*, tiles: object, vectors: object, training: object) -> str:
        monkeypatch.setattr(
            build, "load_library", lambda: types.SimpleNamespace(vector_numbers=lambda: 8)
        )
        monkeypatch.setattr(gemm, "load_tiles", lambda: tiles)
        monkeypatch.setattr(gemm, "load_gemm", lambda: training)
        monkeypatch.setattr(packed_gemm, "load_int8_gemm", lambda: tiles)
        monkeypatch.setattr(packed_gemm, "load_packed_vectors", lambda: vectors)
        kernel = "tiles" if tiles else "widened"
        bf16 = types.SimpleNamespace(kernel=kernel) if vectors else None
        monkeypatch.setattr(packed_gemm, "load_bf16_products", lambda: bf16)
        return packed_gemm.describe_processor_code().detail

    return describe


def test_each_kind_of_processor_is_named(processor: Callable[..., str]) -> None:
    some = object()
    tiles = processor(tiles=some, vectors=some, training=some)
    assert tiles.endswith(
        "products in training by tiles (AMX), in rollouts by tiles (AMX), of bfloat16 weights by tiles (AMX)"
    )
    vectors = processor(tiles=None, vectors=some, training=some)
    assert (
        "vectors of 8 numbers; products in training by vectors, in rollouts by vectors, of bfloat16 weights widened to "
        "float32; AMX" in vectors
    )
    assert "in training by torch's library, in rollouts by vectors" in processor(
        tiles=None, vectors=some, training=None
    )


def test_a_machine_without_compiled_code_gets_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "load_library", lambda: None)
    monkeypatch.delenv("POSTTRAIN_NATIVE", raising=False)
    assert (
        "compiler" in packed_gemm.describe_processor_code().advice
        and not packed_gemm.describe_processor_code().is_fast
    )
    monkeypatch.setenv("POSTTRAIN_NATIVE", "0")
    assert packed_gemm.describe_processor_code().advice == "unset it"
