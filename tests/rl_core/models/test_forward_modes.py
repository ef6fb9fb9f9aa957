"""Precision of passes on processors with and without torch's bfloat16 kernels."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch

from rl_core.models import forward_modes
from rl_core.models.forward_modes import enable_autocast, resolve_autocast, warn_about_slow_weights

CPU = torch.device("cpu")


@pytest.fixture
def processor(monkeypatch):
    """Pretend that torch has bfloat16 kernels for this processor, and the processor instructions and speed, or not."""

    def pretend(has_kernels, has_instructions=True, *, is_fast=True, is_compiled=True):
        monkeypatch.delenv("POSTTRAIN_BFLOAT16", raising=False)
        mkldnn = SimpleNamespace(_is_mkldnn_bf16_supported=lambda: has_kernels)
        monkeypatch.setattr(forward_modes.torch.ops, "mkldnn", mkldnn, raising=False)
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: has_instructions)
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
        kernel = "dots" if has_instructions and is_fast and is_compiled else None
        monkeypatch.setattr(forward_modes.gemm, "find_bf16_kernel", lambda: kernel)
        monkeypatch.setattr(
            forward_modes.build, "load_library", lambda: object() if is_compiled else None
        )
        forward_modes._explain_float32.cache_clear()

    yield pretend
    forward_modes._explain_float32.cache_clear()


def multiply():
    weight = torch.full((4, 4), 1.0 + 2**-10)  # rounds to 1 in bfloat16
    return torch.nn.functional.linear(torch.ones(1, 4), weight)


@pytest.mark.parametrize("has_kernels", [True, False])
def test_autocast_rounds_only_where_it_is_worth_it(processor, caplog, has_kernels):
    processor(has_kernels)
    with enable_autocast("bfloat16", CPU):
        result = multiply()
    expected = torch.bfloat16 if has_kernels else torch.float32
    assert result.dtype == expected
    assert torch.equal(result.float(), torch.full((1, 4), 4.0 if has_kernels else 4.0 + 2**-8))
    with enable_autocast("bfloat16", CPU):
        multiply()
    assert caplog.text.count("autocast: bfloat16 is off") == (0 if has_kernels else 1)


def test_vectors_without_the_instructions_compute_in_float32(processor, caplog):
    """torch emulates bfloat16 on every processor with AVX-512, which is slower than float32."""
    processor(has_kernels=True, has_instructions=False)
    with enable_autocast("bfloat16", CPU):
        assert multiply().dtype == torch.float32
    assert "has no instructions for bfloat16, and float32 is faster" in caplog.text


def test_slow_instructions_are_not_used(processor, caplog):
    """Intel's processors with AMX switched off have dot products of half of float32's speed."""
    processor(has_kernels=True, is_fast=False)
    with enable_autocast("bfloat16", CPU):
        assert multiply().dtype == torch.float32
    assert "multiplies bfloat16 slowly, and float32 is faster" in caplog.text


def test_without_compiled_code_instructions_count_as_fast(processor):
    processor(has_kernels=True, is_compiled=False)
    assert resolve_autocast("bfloat16", "cpu") == "bfloat16"
    processor(has_kernels=True, has_instructions=False, is_compiled=False)
    assert resolve_autocast("bfloat16", "cpu") == "none"


def test_a_variable_computes_in_bfloat16_anyway(processor, monkeypatch):
    processor(has_kernels=False)
    monkeypatch.setenv("POSTTRAIN_BFLOAT16", "1")
    with enable_autocast("bfloat16", CPU):
        assert multiply().dtype == torch.bfloat16


def test_other_devices_and_float32_are_left_as_they_are(processor):
    processor(has_kernels=False)
    assert resolve_autocast("bfloat16", "cuda") == "bfloat16"
    assert resolve_autocast("none", "cpu") == "none"


@pytest.mark.parametrize(
    ("dtype", "has_kernels", "is_warned"),
    [
        (torch.bfloat16, False, True),
        (torch.float16, False, True),
        (torch.bfloat16, True, False),
        (torch.float32, False, False),
    ],
)
def test_weights_in_half_precision_are_warned_about(
    processor, caplog, dtype, has_kernels, is_warned
):
    processor(has_kernels)
    caplog.set_level(logging.WARNING)
    warn_about_slow_weights(torch.nn.Linear(2, 2, dtype=dtype))
    assert ("model.dtype" in caplog.text) == is_warned
