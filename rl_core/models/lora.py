"""Layers whose frozen weights are in few bits (bitsandbytes), as plain ones for a while: to be merged, read or written.

bitsandbytes merges an adapter by rounding the sum once more, which makes another model of it than the one that was
trained, and its packed weights cannot be taken back by a copy of their bytes. So the layers are exchanged: inside there
are plain ones with the values that the few bits stand for, outside the very layers from before.

Low-rank adapters (arXiv:2106.09685) through peft, which is imported only where adapters are used.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rl_core.errors import SettingsError
from rl_core.settings import LoraSettings

if TYPE_CHECKING:
    from transformers import PreTrainedModel


# of bitsandbytes, which is imported only where it is used
_QUANTIZED_KINDS = (
    "Params4bit",
    "Int8Params",
)


def find_quantized_layers(model: torch.nn.Module) -> list[tuple[torch.nn.Module, str, Any]]:
    """(parent, attribute, layer) of every linear layer whose weight is in few bits."""
    return [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if type(getattr(child, "weight", None)).__name__ in _QUANTIZED_KINDS
        and not hasattr(
            child, "base_layer"
        )  # an adapter's layer shows the weight of the one below it
    ]


@contextmanager
def dequantize_layers(
    model: torch.nn.Module, layers: Sequence[tuple[torch.nn.Module, str, Any]]
) -> Iterator[None]:
    """The layers of `find_quantized_layers` are plain `Linear` ones inside, and the same objects as before afterwards."""
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    try:
        for parent, name, layer in layers:
            setattr(parent, name, _dequantize_layer(layer, dtype))
        yield
    finally:
        for parent, name, layer in layers:
            setattr(parent, name, layer)


def _dequantize_layer(layer: Any, dtype: torch.dtype) -> torch.nn.Linear:
    from peft.utils.integrations import dequantize_bnb_weight

    weight = dequantize_bnb_weight(layer.weight, state=getattr(layer, "state", None)).to(dtype)
    made = torch.nn.Linear(
        layer.in_features, layer.out_features, bias=layer.bias is not None, device="meta"
    )
    made.weight = torch.nn.Parameter(weight, requires_grad=False)
    if layer.bias is not None:
        made.bias = layer.bias
    return made.train(layer.training)


def merge_into_dequantized(layer: Any) -> None:
    """Merge the active adapters of a layer of peft for few bits into the plain layer that stands under it now."""
    weight = layer.base_layer.weight
    for adapter in layer.active_adapters:
        if adapter not in layer.lora_A:
            continue
        delta = layer.get_delta_weight(adapter).to(weight.dtype)
        if getattr(layer, "use_dora", {}).get(adapter, False):
            magnitude = layer.lora_magnitude_vector[adapter]
            norm = magnitude.get_weight_norm(weight.data, delta, scaling=1).detach()
            weight.data = (magnitude.weight / norm).view(-1, 1).to(weight.dtype) * (
                weight.data + delta
            )
        else:
            weight.data = weight.data + delta
        layer.merged_adapters.append(adapter)


@contextmanager
def drop_quantization_config(model: Any) -> Iterator[None]:
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


ALL_LINEAR = "all-linear"
# within the name of a weight of a module trained as a whole
_MODULES_TO_SAVE = re.compile(r"\.modules_to_save\.[^.]+\.")


def add_adapter(model: PreTrainedModel, settings: LoraSettings) -> PreTrainedModel:
    """`model` with trainable adapters on its `target_modules`; all other weights are frozen.

    Raises: SettingsError when peft is missing, or no layer has one of these names.
    """
    from transformers.pytorch_utils import Conv1D

    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise SettingsError("lora: needs the peft package, which is not installed") from error
    targets = _resolve_target_modules(model, settings)
    _check_saved_modules(model, settings)
    linears = [
        module
        for name, module in model.named_modules()
        if targets == ALL_LINEAR or name.rsplit(".", 1)[-1] in targets
    ]
    transposed = [module for module in linears if isinstance(module, Conv1D)]
    wrapped: Any = get_peft_model(
        model,
        LoraConfig(
            r=settings.rank,
            lora_alpha=settings.alpha,  # type: ignore[arg-type]  # a float is fine: it only scales
            lora_dropout=settings.dropout,
            target_modules=targets if isinstance(targets, str) else list(targets),
            modules_to_save=list(settings.modules_to_save) or None,
            use_rslora=settings.rank_stabilized,
            use_dora=settings.dora,
            fan_in_fan_out=bool(transposed),
            task_type="CAUSAL_LM",
        ),
    )
    return wrapped


def _resolve_target_modules(
    model: PreTrainedModel, settings: LoraSettings
) -> tuple[str, ...] | str:
    """Names of the layers with an adapter. Raises: SettingsError for one that is none, or shares its weights."""
    from transformers.pytorch_utils import Conv1D

    if settings.target_modules == ALL_LINEAR:
        return ALL_LINEAR
    linear_names = {
        name.rsplit(".", 1)[-1]
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear | Conv1D)
    }
    missing = [name for name in settings.target_modules if name not in linear_names]
    if missing:
        raise SettingsError(
            f"lora.target_modules: no linear layer of this model is named {', '.join(missing)}; "
            f"there are {', '.join(sorted(linear_names))} (all-linear: all but the output head)"
        )
    if tied := [name for name in settings.target_modules if name in _find_tied_names(model)]:
        raise SettingsError(
            f"lora.target_modules: {tied[0]} shares its weights with the embedding here, so merging its adapter would "
            "change both; leave it out"
        )
    return settings.target_modules


def _check_saved_modules(model: PreTrainedModel, settings: LoraSettings) -> None:
    """Raises: SettingsError for a name that no module has, or that of shared weights."""
    names = {name.rsplit(".", 1)[-1] for name, _ in model.named_modules()}
    if missing := [name for name in settings.modules_to_save if name not in names]:
        raise SettingsError(f"lora.modules_to_save: this model has no module named {missing[0]}")
    if tied := [name for name in settings.modules_to_save if name in _find_tied_names(model)]:
        raise SettingsError(
            f"lora.modules_to_save: {tied[0]} shares its weights with the embedding or the output head here, and a "
            "copy of it would not; leave it out"
        )


def _find_tied_names(model: PreTrainedModel) -> set[str]:
    """Last names of embedding and output head, where they share their weights."""
    if not model.config.tie_word_embeddings:
        return set()
    shared = (model.get_input_embeddings(), model.get_output_embeddings())
    found = {
        name.rsplit(".", 1)[-1]
        for name, module in model.named_modules()
        if any(module is one for one in shared)
    }
    return found | {"lm_head", "embed_tokens"}


def is_lora(model: torch.nn.Module) -> bool:
    """True = `model` is wrapped by peft."""
    return hasattr(model, "peft_config") and hasattr(model, "get_base_model")


def is_fresh_adapter(model: Any) -> bool:
    """True = adapters that change nothing yet, so that without them the model computes what it does with them."""
    if not is_lora(model):
        return False
    named = dict(model.named_parameters())
    second = [
        tensor
        for name, tensor in named.items()
        if ".lora_B." in name or ".lora_embedding_B." in name
    ]
    if not second or any(bool(tensor.any()) for tensor in second):
        return False
    originals = {name: tensor for name, tensor in named.items() if ".original_module." in name}
    return all(
        torch.equal(tensor, named[found])
        for name, tensor in originals.items()
        for found in named
        if _MODULES_TO_SAVE.sub(".", found) == name.replace(".original_module.", ".")
        and ".modules_to_save." in found
    )


def unwrap_model(model: Any) -> PreTrainedModel:
    """The transformers model inside; adapter layers stay in place."""
    return model.get_base_model() if is_lora(model) else model


def unwrap_linear(module: Any) -> Any:
    """The layer under an adapter, or the layer itself."""
    return getattr(module, "base_layer", module)


@contextmanager
def disable_adapter(model: Any) -> Iterator[None]:
    """The very model that adapters were added to, inside: adapters are off, modules trained as a whole the original."""
    with model.disable_adapter():
        yield


@contextmanager
def use_merged_weights(model: torch.nn.Module) -> Iterator[None]:
    """Adapters merged into the weights inside; afterwards the weights are the very bits that they were before.

    Subtracting an update that was added leaves rounding errors behind, so the original weights are kept and put back.
    Layers in few bits are plain ones inside (rl_core/models/lora.py).
    """
    found = find_quantized_layers(model)
    few_bits = {id(layer) for _, _, layer in found}
    packed = {
        id(layer) for layer in _find_adapter_layers(model) if id(layer.base_layer) in few_bits
    }
    with dequantize_layers(model, found):
        yield from _merge_layers(model, packed)


def _merge_layers(model: torch.nn.Module, packed: set[int]) -> Iterator[None]:
    """`packed`: ids of the adapters' layers whose weights are in few bits outside."""
    layers = _find_adapter_layers(model)
    originals = [layer.base_layer.weight.detach().clone() for layer in layers]
    done: list[Any] = []
    try:
        with torch.no_grad():
            for layer in layers:
                done.append(layer)
                if id(layer) in packed:
                    merge_into_dequantized(layer)
                else:
                    layer.merge()
        yield
    finally:
        with torch.no_grad():
            for layer, original in zip(done, originals, strict=False):
                layer.base_layer.weight.data.copy_(original)
                layer.merged_adapters.clear()
                layer._caches.clear()  # norms that DoRA notes for an `unmerge`


def is_servable_adapter(model: Any) -> bool:
    """True = the adapter is one that inference servers add to the base model: neither DoRA nor whole modules."""
    if not is_lora(model):
        return False
    config = next(iter(model.peft_config.values()))
    return not (
        config.use_dora or config.modules_to_save or getattr(config, "fan_in_fan_out", False)
    )


def save_adapter(model: Any, folder: Path) -> None:
    """Write the adapter alone, in peft's format."""
    model.save_pretrained(folder, safe_serialization=True, save_embedding_layers=False)


def save_merged(model: Any, folder: Path) -> None:
    """Write the model with its adapters merged, as a plain transformers model folder."""
    base = unwrap_model(model)
    with use_merged_weights(model):
        state = {
            _MODULES_TO_SAVE.sub(".", name.replace(".base_layer.", ".")): tensor
            for name, tensor in base.state_dict().items()
            if ".lora_" not in name and ".original_module." not in name
        }
        with drop_quantization_config(base):
            base.save_pretrained(folder, state_dict=state)


def build_quantization_options(
    settings: LoraSettings | None, device: torch.device, dtype: torch.dtype
) -> dict[str, Any]:
    """Options of `from_pretrained` for frozen weights in few bits; {} = none. Raises: as `check_quantization`."""
    if settings is None or settings.quantize == "none":
        return {}
    check_quantization(settings, device)
    from transformers import BitsAndBytesConfig

    in_four = {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True,
    }
    bits = in_four if settings.quantize == "nf4" else {"load_in_8bit": True}
    return {
        "quantization_config": BitsAndBytesConfig(**bits, bnb_4bit_compute_dtype=dtype),
        "device_map": {"": device},
    }


def check_quantization(settings: LoraSettings, device: torch.device) -> None:
    """Raises: SettingsError where frozen weights in few bits cannot be had: no CUDA device, or no bitsandbytes."""
    if settings.quantize == "none":
        return
    if device.type != "cuda":
        raise SettingsError(
            f"lora.quantize: {settings.quantize} needs a CUDA device, and the model is to be on {device.type}; set "
            "quantize to none, or model.device to cuda where there is one"
        )
    if importlib.util.find_spec("bitsandbytes") is None:
        raise SettingsError(
            f"lora.quantize: {settings.quantize} needs the package bitsandbytes, which is not installed: pip install "
            "bitsandbytes"
        )


def _find_adapter_layers(model: torch.nn.Module) -> list[Any]:
    """Every layer that carries an adapter and is not merged already."""
    if not is_lora(model):
        return []
    from peft.tuners.lora import LoraLayer

    return [
        module for module in model.modules() if isinstance(module, LoraLayer) and not module.merged
    ]
