"""Layers whose frozen weights are in few bits (bitsandbytes), as plain ones for a while: to be merged, read or written.

bitsandbytes merges an adapter by rounding the sum once more, which makes another model of it than the one that was
trained, and its packed weights cannot be taken back by a copy of their bytes. So the layers are exchanged: inside there
are plain ones with the values that the few bits stand for, outside the very layers from before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["few_bit_layers", "merge_into_plain", "plain_weights", "saved_as_plain"]

_KINDS = ("Params4bit", "Int8Params")  # of bitsandbytes, which is imported only where it is used


def few_bit_layers(model: torch.nn.Module) -> list[tuple[torch.nn.Module, str, Any]]:
    """(parent, attribute, layer) of every linear layer whose weight is in few bits."""
    return [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if type(getattr(child, "weight", None)).__name__ in _KINDS
        and not hasattr(child, "base_layer")  # an adapter's layer shows the weight of the one below it
    ]


@contextmanager
def plain_weights(model: torch.nn.Module, found: Sequence[tuple[torch.nn.Module, str, Any]]) -> Iterator[None]:
    """The layers of `few_bit_layers` are plain `Linear` ones inside, and the same objects as before afterwards."""
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    try:
        for parent, name, layer in found:
            setattr(parent, name, _plain(layer, dtype))
        yield
    finally:
        for parent, name, layer in found:
            setattr(parent, name, layer)


def _plain(layer: Any, dtype: torch.dtype) -> torch.nn.Linear:
    from peft.utils.integrations import dequantize_bnb_weight

    weight = dequantize_bnb_weight(layer.weight, state=getattr(layer, "state", None)).to(dtype)
    made = torch.nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None, device="meta")
    made.weight = torch.nn.Parameter(weight, requires_grad=False)
    if layer.bias is not None:
        made.bias = layer.bias
    return made.train(layer.training)


def merge_into_plain(layer: Any) -> None:
    """Merge the active adapters of a layer of peft for few bits into the plain layer that stands under it now."""
    weight = layer.base_layer.weight
    for adapter in layer.active_adapters:
        if adapter not in layer.lora_A:
            continue
        delta = layer.get_delta_weight(adapter).to(weight.dtype)
        if getattr(layer, "use_dora", {}).get(adapter, False):
            magnitude = layer.lora_magnitude_vector[adapter]
            norm = magnitude.get_weight_norm(weight.data, delta, scaling=1).detach()
            weight.data = (magnitude.weight / norm).view(-1, 1).to(weight.dtype) * (weight.data + delta)
        else:
            weight.data = weight.data + delta
        layer.merged_adapters.append(adapter)


@contextmanager
def saved_as_plain(model: Any) -> Iterator[None]:
    """`model.save_pretrained` writes no quantisation into the config inside."""
    names = ("hf_quantizer", "is_loaded_in_4bit", "is_loaded_in_8bit", "quantization_method")
    kept = {name: model.__dict__.pop(name) for name in names if name in model.__dict__}
    config = model.config.__dict__.pop("quantization_config", None)
    try:
        yield
    finally:
        model.__dict__.update(kept)
        if config is not None:
            model.config.quantization_config = config
