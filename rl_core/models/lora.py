"""Low-rank adapters (arXiv:2106.09685) through peft, and temporary dequantisation of frozen layers (bitsandbytes).

peft is imported only where adapters are used. bitsandbytes merges an adapter by rounding the sum again, which gives
another model than the trained one, and its packed weights cannot be restored by copying their bytes. Quantised layers
are therefore swapped for plain ones with the dequantised values, and swapped back as the same objects.
"""

from __future__ import annotations

import functools
import importlib.util
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rl_core.errors import SettingsError
from rl_core.models.adapter_targets import find_tied_names, read_adapted_weight, resolve_targets
from rl_core.settings import LoraSettings

if TYPE_CHECKING:
    from transformers import PreTrainedModel


# peft reads the former name of a property of transformers; no user can change that.
warnings.filterwarnings("ignore", message="`is_gradient_checkpointing`", category=FutureWarning)

_QUANTIZED_KINDS = (
    "Params4bit",
    "Int8Params",
)  # of bitsandbytes, which is imported only where it is used
# part of the name of a weight of a fully trained module
_MODULES_TO_SAVE = re.compile(r"\.modules_to_save\.[^.]+\.")
# part of the name of a weight under adapters, one for each
_BASE_LAYERS = re.compile(r"(\.base_layer)+\.")


def find_quantized_layers(model: torch.nn.Module) -> list[tuple[torch.nn.Module, str, Any]]:
    """List (parent, attribute, layer) of every linear layer with a quantised weight."""
    return [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if type(getattr(child, "weight", None)).__name__ in _QUANTIZED_KINDS
        and not hasattr(child, "base_layer")  # an adapter layer exposes its base layer's weight
    ]


@contextmanager
def dequantize_layers(
    model: torch.nn.Module, layers: Sequence[tuple[torch.nn.Module, str, Any]]
) -> Iterator[None]:
    """Replace the layers of `find_quantized_layers` by plain `Linear` ones; put back the same objects afterwards."""
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
    plain = torch.nn.Linear(
        layer.in_features, layer.out_features, bias=layer.bias is not None, device="meta"
    )
    plain.weight = torch.nn.Parameter(weight, requires_grad=False)
    if layer.bias is not None:
        plain.bias = layer.bias
    return plain.train(layer.training)


def merge_into_dequantized(layer: Any) -> None:
    """Merge the active adapters of a quantised peft layer into the plain layer that temporarily replaces its base."""
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
    """Make `model.save_pretrained` omit the quantisation from the config."""
    names = ("hf_quantizer", "is_loaded_in_4bit", "is_loaded_in_8bit", "quantization_method")
    attributes = {name: model.__dict__.pop(name) for name in names if name in model.__dict__}
    config = model.config.__dict__.pop("quantization_config", None)
    try:
        yield
    finally:
        model.__dict__.update(attributes)
        if config is not None:
            model.config.quantization_config = config


def add_adapter(model: PreTrainedModel, settings: LoraSettings) -> PreTrainedModel:
    """Add trainable adapters on the model's `target_modules`; freeze all other weights.

    Raises: SettingsError if peft is missing, no layer has one of these names, or peft refuses a layer or option.
    """
    from transformers.pytorch_utils import Conv1D

    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise SettingsError("lora: needs the peft package, which is not installed") from error
    targets = resolve_targets(model, settings)
    _check_saved_modules(model, settings)
    is_transposed = any(
        isinstance(module, Conv1D)
        for name, module in model.named_modules()
        if targets.is_all_linear or name.rsplit(".", 1)[-1] in targets.modules
    )
    config = LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,  # type: ignore[arg-type]  # a float is fine: it only scales
        lora_dropout=settings.dropout,
        target_modules=targets.modules
        if isinstance(targets.modules, str)
        else list(targets.modules),
        target_parameters=list(targets.parameters) or None,
        modules_to_save=list(settings.modules_to_save) or None,
        use_rslora=settings.rank_stabilized,
        use_dora=settings.dora,
        fan_in_fan_out=is_transposed,
        task_type="CAUSAL_LM",
    )
    try:
        wrapped: Any = get_peft_model(model, config)
    except (ValueError, NotImplementedError) as error:
        raise SettingsError(f"lora: peft refuses this model or these options: {error}") from error
    return wrapped


def _check_saved_modules(model: PreTrainedModel, settings: LoraSettings) -> None:
    """Raise SettingsError for a name without a module, or with shared weights."""
    names = {name.rsplit(".", 1)[-1] for name, _ in model.named_modules()}
    if missing := [name for name in settings.modules_to_save if name not in names]:
        raise SettingsError(f"lora.modules_to_save: this model has no module named {missing[0]}")
    if tied := [name for name in settings.modules_to_save if name in find_tied_names(model)]:
        raise SettingsError(
            f"lora.modules_to_save: {tied[0]} shares its weights with the embedding or the output head here, and a "
            "copy of it would not; remove it"
        )


def is_lora(model: torch.nn.Module) -> bool:
    """Return whether `model` is wrapped by peft."""
    return hasattr(model, "peft_config") and hasattr(model, "get_base_model")


def is_fresh_adapter(model: Any) -> bool:
    """Return whether the adapters change nothing yet, so the model computes the same without them."""
    if not is_lora(model):
        return False
    parameters = dict(model.named_parameters())
    up_factors = [
        tensor
        for name, tensor in parameters.items()
        if ".lora_B." in name or ".lora_embedding_B." in name
    ]
    if not up_factors or any(bool(tensor.any()) for tensor in up_factors):
        return False
    originals = {name: tensor for name, tensor in parameters.items() if ".original_module." in name}
    return all(
        torch.equal(tensor, parameters[saved_name])
        for name, tensor in originals.items()
        for saved_name in parameters
        if _MODULES_TO_SAVE.sub(".", saved_name) == name.replace(".original_module.", ".")
        and ".modules_to_save." in saved_name
    )


def unwrap_model(model: Any) -> PreTrainedModel:
    """Return the transformers model inside; adapter layers stay in place."""
    return model.get_base_model() if is_lora(model) else model


def unwrap_linear(module: Any) -> Any:
    """Return the layer under an adapter, or the layer itself."""
    return getattr(module, "base_layer", module)


@contextmanager
def disable_adapter(model: Any) -> Iterator[None]:
    """Disable adapters temporarily and use the original of fully trained modules: the model before adapters were
    added.
    """
    with model.disable_adapter():
        yield


@contextmanager
def draw_adapter_masks(model: torch.nn.Module, base: torch.nn.Module) -> Iterator[None]:
    """Draw the dropout masks of `model`'s adapters in passes of `base`, its network without them, and discard them.

    Dropout layers draw from one generator in turn. Without these draws the layers of `base` would get other masks than
    the same layers of `model`.

    Args:
        base: `model` itself with disabled adapters, or another model of the same layers. One that has adapters
            draws their masks itself.
    """
    if base is not model and is_lora(base):
        yield
        return
    modules = dict(unwrap_model(base).named_modules())
    adapted = set(map(id, _find_adapter_layers(model)))
    hooks = [
        modules[name].register_forward_hook(functools.partial(_draw_masks, layer))
        for name, layer in unwrap_model(model).named_modules()
        if id(layer) in adapted and name in modules
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _draw_masks(
    layer: Any, module: torch.nn.Module, inputs: tuple[Any, ...], output: torch.Tensor
) -> None:
    """Draw what the adapters of `layer` draw on these inputs, in the order and dtype of peft's forward pass."""
    if not module.training:  # as in a comparison of fast and plain passes
        return
    x = inputs[0].detach()
    for name in layer.active_adapters:
        if name not in layer.lora_A:  # of an embedding, which has no dropout
            continue
        x = x.to(layer.lora_A[name].weight.dtype)
        rate = getattr(layer.lora_dropout[name], "p", 0.0)
        if rate > 0:
            torch.nn.functional.dropout(x, rate, training=True)


@contextmanager
def use_merged_weights(model: torch.nn.Module) -> Iterator[None]:
    """Merge adapters into the weights temporarily; restore the weights bit for bit afterwards.

    Subtracting the update would leave rounding errors, so the original weights are stored and restored. Quantised
    layers are replaced by plain ones meanwhile.
    """
    quantized = find_quantized_layers(model)
    quantized_ids = {id(layer) for _, _, layer in quantized}
    packed = {
        id(layer)
        for layer in _find_adapter_layers(model)
        if id(layer.get_base_layer()) in quantized_ids
    }
    with dequantize_layers(model, quantized):
        yield from _merge_layers(model, packed)


def _merge_layers(model: torch.nn.Module, packed: set[int]) -> Iterator[None]:
    """Merge all adapters, yield, and restore.

    Args:
        packed: ids of the adapter layers whose weights are quantised otherwise.
    """
    layers = _find_adapter_layers(model)
    originals = [read_adapted_weight(layer).detach().clone() for layer in layers]
    merged: list[Any] = []
    try:
        with torch.no_grad():
            for layer in layers:
                merged.append(layer)
                if id(layer) in packed:
                    merge_into_dequantized(layer)
                else:
                    layer.merge()
        yield
    finally:
        with torch.no_grad():
            for layer, original in zip(merged, originals, strict=False):
                read_adapted_weight(layer).data.copy_(original)
                layer.merged_adapters.clear()
                layer._caches.clear()  # norms that DoRA stores for `unmerge`


def is_servable_adapter(model: Any) -> bool:
    """Return whether inference servers can apply the adapter to the base model: no DoRA, full modules or experts."""
    if not is_lora(model):
        return False
    config = next(iter(model.peft_config.values()))
    return not (
        config.use_dora
        or config.modules_to_save
        or getattr(config, "fan_in_fan_out", False)
        or getattr(config, "target_parameters", None)
    )


def select_served_rank(model: Any) -> int:
    """Select the rank that an inference server has to support; 0 = the full model is sent."""
    if not is_servable_adapter(model):
        return 0
    return max(int(config.r) for config in model.peft_config.values())


def save_adapter(model: Any, folder: Path) -> None:
    """Write only the adapter, in peft's format."""
    model.save_pretrained(folder, safe_serialization=True, save_embedding_layers=False)


def save_merged(model: Any, folder: Path) -> None:
    """Write the model with merged adapters as a plain transformers model folder."""
    base = unwrap_model(model)
    with use_merged_weights(model):
        state = {
            _MODULES_TO_SAVE.sub(".", _BASE_LAYERS.sub(".", name)): tensor
            for name, tensor in base.state_dict().items()
            if ".lora_" not in name and ".original_module." not in name
        }
        with drop_quantization_config(base):
            base.save_pretrained(folder, state_dict=state)


def build_quantization_options(
    settings: LoraSettings | None, device: torch.device, dtype: torch.dtype
) -> dict[str, Any]:
    """Build the options of `from_pretrained` for quantised frozen weights; {} = none.

    Raises: as `check_quantization`.
    """
    if settings is None or settings.quantize == "none":
        return {}
    check_quantization(settings, device)
    from transformers import BitsAndBytesConfig

    four_bit_options = {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True,
    }
    bit_options = four_bit_options if settings.quantize == "nf4" else {"load_in_8bit": True}
    return {
        "quantization_config": BitsAndBytesConfig(**bit_options, bnb_4bit_compute_dtype=dtype),
        "device_map": {"": device},
    }


def check_quantization(settings: LoraSettings, device: torch.device) -> None:
    """Raise SettingsError if frozen weights cannot be quantised: no CUDA device, or no bitsandbytes."""
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
    """List every layer with an unmerged adapter."""
    if not is_lora(model):
        return []
    from peft.tuners.lora import LoraLayer

    return [
        module for module in model.modules() if isinstance(module, LoraLayer) and not module.merged
    ]
