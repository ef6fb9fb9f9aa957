"""Frozen models whose linear layers have 8 or 4 bits per weight.

torchao quantizes while the files are read, so the full-precision model is never in memory completely: 8 bits with a
scale per output row, 4 bits with a scale per 32 inputs of a row, both symmetric. The integers are stored in the layers
defined here, two 4-bit values per byte, and dequantized for each product: torchao's 4-bit kernels are for bfloat16 on
GPUs, and took fifty times as long as float32 on a CPU. Embeddings, output head and norms are not quantized.

O outputs, I inputs, G groups of inputs with one scale, N rows.
"""

from __future__ import annotations

import importlib.util
import logging
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from rl_core.cpu import layer_kernels
from rl_core.errors import SettingsError
from rl_core.settings.common import Precision

# Inputs that share a scale of 4-bit weights; the first size that divides the inputs of all layers is used.
GROUP_SIZES = (32, 16, 8)
_UNQUANTIZED_NAME_PARTS = ("embed", "wte", "wpe", "lm_head", "norm", "score")


def is_torchao_installed() -> bool:
    """Return whether weights can be quantized."""
    return importlib.util.find_spec("torchao") is not None


def build_quantized_loading_options(
    precision: Precision, device: torch.device, folder: Path | None
) -> dict[str, Any]:
    """Build options of `from_pretrained` that quantize each linear layer as it is read; {} for full precision.

    Args:
        folder: of the model's files; None = a hub name, for which 4 bits use groups of 32.
    Raises: SettingsError without torchao, or if no group size divides the layers' inputs.
    """
    if precision == "full":
        return {}
    if not is_torchao_installed():
        raise SettingsError(
            f"precision: {precision} needs the package torchao; install it, or posttrain[quantize], or set full"
        )
    for name in ("torchao", "torchao.utils"):
        # They warn about missing GPU libraries.
        logging.getLogger(name).setLevel(logging.ERROR)
    from torchao.quantization import Int8WeightOnlyConfig, IntxWeightOnlyConfig
    from torchao.quantization.granularity import PerGroup
    from transformers import TorchAoConfig

    if precision == "int8":
        quantization: Any = Int8WeightOnlyConfig(set_inductor_config=False)
    else:
        four_bits: Any = getattr(torch, "int4")  # noqa: B009  # missing in the type stubs
        quantization = IntxWeightOnlyConfig(
            weight_dtype=four_bits, granularity=PerGroup(_choose_group_size(folder))
        )
    return {"quantization_config": TorchAoConfig(quantization), "device_map": {"": device}}


def _choose_group_size(folder: Path | None) -> int:
    inputs = set()
    if folder is not None:
        shapes = _read_tensor_shapes(folder)
        inputs = {shape[1] for name, shape in shapes if _is_linear_weight(name, shape)}
    for size in GROUP_SIZES:
        if all(count % size == 0 for count in inputs):
            return size
    indivisible = next(count for count in sorted(inputs) if count % GROUP_SIZES[-1])
    raise SettingsError(
        f"precision: int4 needs layers with a multiple of {GROUP_SIZES[-1]} inputs; one has {indivisible}; set int8"
    )


class QuantizedLinear(nn.Module):
    """Frozen linear layer with 8 or 4 bits per weight."""

    def __init__(
        self, rounded_OI: torch.Tensor, scale_OG: torch.Tensor, bits: int, bias: torch.Tensor | None
    ) -> None:
        """Store the integers, packed if `bits` is 4.

        Args:
            rounded_OI: int8, from -128 to 127 or from -8 to 7.
        """
        super().__init__()
        self.bits = bits
        self.numbers: torch.Tensor
        self.scale_OG: torch.Tensor
        if bits == 4:
            nibbles_OI = (rounded_OI + 8).to(torch.uint8)
            rounded_OI = nibbles_OI[:, 0::2] | (nibbles_OI[:, 1::2] << 4)
        self.register_buffer("numbers", rounded_OI.contiguous())
        self.register_buffer("scale_OG", scale_OG.clone())
        self.bias = bias

    def dequantize(self) -> torch.Tensor:
        """Return the weights [O, I] in the dtype of their scales."""
        numbers_OI = self.numbers
        if self.bits == 4:
            nibbles = torch.stack([numbers_OI & 15, numbers_OI >> 4], dim=-1)
            numbers_OI = nibbles.flatten(1).to(torch.int8) - 8
        grouped_OGi = numbers_OI.unflatten(1, (self.scale_OG.shape[1], -1)).to(self.scale_OG.dtype)
        return grouped_OGi.mul_(self.scale_OG[..., None]).flatten(1)

    def forward(self, x_NI: torch.Tensor) -> torch.Tensor:
        """Compute x W^T + b for an input with any number of leading dimensions."""
        weight_OI = self.dequantize().to(x_NI.dtype)
        out_NO = layer_kernels.compute_linear(x_NI.reshape(-1, x_NI.shape[-1]), [weight_OI])
        out_NO = out_NO.view(*x_NI.shape[:-1], -1)
        return out_NO if self.bias is None else out_NO + self.bias


@torch.no_grad()
def replace_quantized_layers(model: nn.Module, precision: Precision) -> None:
    """Replace every layer that torchao has quantized by a `QuantizedLinear`, one after the other."""
    for parent in list(model.modules()):
        for name, layer in list(parent.named_children()):
            weight: Any = getattr(layer, "weight", None)
            if isinstance(layer, nn.Linear) and hasattr(weight, "qdata"):
                bits = 8 if precision == "int8" else 4
                quantized = QuantizedLinear(weight.qdata, weight.scale, bits, layer.bias)
                setattr(parent, name, quantized)


def count_weight_bytes(model: nn.Module) -> int:
    """Return the bytes of a model's weights and buffers in memory; shared ones count once."""
    tensors = (*model.parameters(), *model.buffers())
    sizes = {tensor.data_ptr(): tensor.numel() * tensor.element_size() for tensor in tensors}
    return sum(sizes.values())


def estimate_model_bytes(folder: Path | None, dtype: torch.dtype, precision: Precision) -> int:
    """Estimate the bytes that a model will use from the shapes in its files; 0 for a hub name."""
    if folder is None:
        return 0
    return sum(
        _estimate_tensor_bytes(name, shape, dtype.itemsize, precision)
        for name, shape in _read_tensor_shapes(folder)
    )


def _read_tensor_shapes(folder: Path) -> Iterator[tuple[str, list[int]]]:
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118  # not a mapping
                yield name, tensors.get_slice(name).get_shape()


def _is_linear_weight(name: str, shape: list[int]) -> bool:
    return (
        len(shape) == 2
        and name.endswith(".weight")
        and not any(part in name for part in _UNQUANTIZED_NAME_PARTS)
    )


def _estimate_tensor_bytes(
    name: str, shape: list[int], item_bytes: int, precision: Precision
) -> int:
    numel = math.prod(shape)
    if precision == "full" or not _is_linear_weight(name, shape):
        return numel * item_bytes
    if precision == "int8":
        return numel + shape[0] * item_bytes
    return numel // 2 + numel // GROUP_SIZES[0] * item_bytes
