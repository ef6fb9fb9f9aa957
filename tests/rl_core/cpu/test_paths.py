"""Description of the code of a processor."""

import types
from collections.abc import Callable

import pytest

from rl_core.cpu import build, gemm, int8_gemm, packed_vectors, paths


@pytest.fixture
def processor(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """A processor with vectors of 8 numbers, and with tiles or without."""

    def make(*, tiles: object, vectors: object, training: object) -> str:
        monkeypatch.setattr(build, "load", lambda: types.SimpleNamespace(vector_numbers=lambda: 8))
        monkeypatch.setattr(gemm, "load_tiles", lambda: tiles)
        monkeypatch.setattr(gemm, "load", lambda: training)
        monkeypatch.setattr(int8_gemm, "load", lambda: tiles)
        monkeypatch.setattr(packed_vectors, "load", lambda: vectors)
        return paths.path_of_this_processor().detail

    return make


def test_each_kind_of_processor_is_named(processor: Callable[..., str]) -> None:
    some = object()
    tiles = processor(tiles=some, vectors=some, training=some)
    assert tiles.endswith("products in training by tiles (AMX), in rollouts by tiles (AMX)")
    vectors = processor(tiles=None, vectors=some, training=some)
    assert "vectors of 8 numbers; products in training by vectors, in rollouts by vectors; AMX" in vectors
    assert "in training by torch's library, in rollouts by vectors" in processor(
        tiles=None, vectors=some, training=None
    )


def test_a_machine_without_compiled_code_gets_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "load", lambda: None)
    monkeypatch.delenv("POSTTRAIN_NATIVE", raising=False)
    assert "compiler" in paths.path_of_this_processor().advice and not paths.path_of_this_processor().is_fast
    monkeypatch.setenv("POSTTRAIN_NATIVE", "0")
    assert paths.path_of_this_processor().advice == "unset it"
