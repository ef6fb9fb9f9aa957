"""Low-rank adapters (arXiv:2106.09685) through peft, which is imported only where adapters are used."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rl_core.errors import SettingsError
from rl_core.models.whole_weights import few_bit_layers, merge_into_plain, plain_weights, saved_as_plain
from rl_core.settings import LoraSettings

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = [
    "add_adapter",
    "check_few_bits",
    "is_fresh",
    "is_lora",
    "merged",
    "plain_linear",
    "quantized_loading",
    "save_adapter",
    "save_merged",
    "serves_alone",
    "unwrap",
    "without_adapter",
]

ALL = "all-linear"
_WHOLE = re.compile(r"\.modules_to_save\.[^.]+\.")  # within the name of a weight of a module trained as a whole


def add_adapter(model: PreTrainedModel, settings: LoraSettings) -> PreTrainedModel:
    """`model` with trainable adapters on its `target_modules`; all other weights are frozen.

    Raises: SettingsError when peft is missing, or no layer has one of these names.
    """
    from transformers.pytorch_utils import Conv1D

    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise SettingsError("lora: needs the peft package, which is not installed") from error
    targets = _checked_targets(model, settings)
    _check_whole_modules(model, settings)
    linears = [module for name, module in model.named_modules() if targets == ALL or name.rsplit(".", 1)[-1] in targets]
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


def _checked_targets(model: PreTrainedModel, settings: LoraSettings) -> tuple[str, ...] | str:
    """Names of the layers with an adapter. Raises: SettingsError for one that is none, or shares its weights."""
    from transformers.pytorch_utils import Conv1D

    if settings.target_modules == ALL:
        return ALL
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
    if tied := [name for name in settings.target_modules if name in _tied_names(model)]:
        raise SettingsError(
            f"lora.target_modules: {tied[0]} shares its weights with the embedding here, so merging its adapter would "
            "change both; leave it out"
        )
    return settings.target_modules


def _check_whole_modules(model: PreTrainedModel, settings: LoraSettings) -> None:
    """Raises: SettingsError for a name that no module has, or that of shared weights."""
    names = {name.rsplit(".", 1)[-1] for name, _ in model.named_modules()}
    if missing := [name for name in settings.modules_to_save if name not in names]:
        raise SettingsError(f"lora.modules_to_save: this model has no module named {missing[0]}")
    if tied := [name for name in settings.modules_to_save if name in _tied_names(model)]:
        raise SettingsError(
            f"lora.modules_to_save: {tied[0]} shares its weights with the embedding or the output head here, and a "
            "copy of it would not; leave it out"
        )


def _tied_names(model: PreTrainedModel) -> set[str]:
    """Last names of embedding and output head, where they share their weights."""
    if not model.config.tie_word_embeddings:
        return set()
    shared = (model.get_input_embeddings(), model.get_output_embeddings())
    found = {name.rsplit(".", 1)[-1] for name, module in model.named_modules() if any(module is one for one in shared)}
    return found | {"lm_head", "embed_tokens"}


def is_lora(model: torch.nn.Module) -> bool:
    """True = `model` is wrapped by peft."""
    return hasattr(model, "peft_config") and hasattr(model, "get_base_model")


def is_fresh(model: Any) -> bool:
    """True = adapters that change nothing yet, so that without them the model computes what it does with them."""
    if not is_lora(model):
        return False
    named = dict(model.named_parameters())
    second = [tensor for name, tensor in named.items() if ".lora_B." in name or ".lora_embedding_B." in name]
    if not second or any(bool(tensor.any()) for tensor in second):
        return False
    originals = {name: tensor for name, tensor in named.items() if ".original_module." in name}
    return all(
        torch.equal(tensor, named[found])
        for name, tensor in originals.items()
        for found in named
        if _WHOLE.sub(".", found) == name.replace(".original_module.", ".") and ".modules_to_save." in found
    )


def unwrap(model: Any) -> PreTrainedModel:
    """The transformers model inside; adapter layers stay in place."""
    return model.get_base_model() if is_lora(model) else model


def plain_linear(module: Any) -> Any:
    """The layer under an adapter, or the layer itself."""
    return getattr(module, "base_layer", module)


@contextmanager
def without_adapter(model: Any) -> Iterator[None]:
    """The very model that adapters were added to, inside: adapters are off, modules trained as a whole the original."""
    with model.disable_adapter():
        yield


@contextmanager
def merged(model: torch.nn.Module) -> Iterator[None]:
    """Adapters merged into the weights inside; afterwards the weights are the very bits that they were before.

    Subtracting an update that was added leaves rounding errors behind, so the original weights are kept and put back.
    Layers in few bits are plain ones inside (rl_core/models/whole_weights.py).
    """
    found = few_bit_layers(model)
    few_bits = {id(layer) for _, _, layer in found}
    packed = {id(layer) for layer in _adapter_layers(model) if id(layer.base_layer) in few_bits}
    with plain_weights(model, found):
        yield from _merged(model, packed)


def _merged(model: torch.nn.Module, packed: set[int]) -> Iterator[None]:
    """`packed`: ids of the adapters' layers whose weights are in few bits outside."""
    layers = _adapter_layers(model)
    originals = [layer.base_layer.weight.detach().clone() for layer in layers]
    done: list[Any] = []
    try:
        with torch.no_grad():
            for layer in layers:
                done.append(layer)
                if id(layer) in packed:
                    merge_into_plain(layer)
                else:
                    layer.merge()
        yield
    finally:
        with torch.no_grad():
            for layer, original in zip(done, originals, strict=False):
                layer.base_layer.weight.data.copy_(original)
                layer.merged_adapters.clear()
                layer._caches.clear()  # norms that DoRA notes for an `unmerge`


def serves_alone(model: Any) -> bool:
    """True = the adapter is one that inference servers add to the base model: neither DoRA nor whole modules."""
    if not is_lora(model):
        return False
    config = next(iter(model.peft_config.values()))
    return not (config.use_dora or config.modules_to_save or getattr(config, "fan_in_fan_out", False))


def save_adapter(model: Any, folder: Path) -> None:
    """Write the adapter alone, in peft's format."""
    model.save_pretrained(folder, safe_serialization=True, save_embedding_layers=False)


def save_merged(model: Any, folder: Path) -> None:
    """Write the model with its adapters merged, as a plain transformers model folder."""
    base = unwrap(model)
    with merged(model):
        state = {
            _WHOLE.sub(".", name.replace(".base_layer.", ".")): tensor
            for name, tensor in base.state_dict().items()
            if ".lora_" not in name and ".original_module." not in name
        }
        with saved_as_plain(base):
            base.save_pretrained(folder, state_dict=state)


def quantized_loading(settings: LoraSettings | None, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Options of `from_pretrained` for frozen weights in few bits; {} = none. Raises: as `check_few_bits`."""
    if settings is None or settings.quantize == "none":
        return {}
    check_few_bits(settings, device)
    from transformers import BitsAndBytesConfig

    in_four = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
    bits = in_four if settings.quantize == "nf4" else {"load_in_8bit": True}
    return {
        "quantization_config": BitsAndBytesConfig(**bits, bnb_4bit_compute_dtype=dtype),
        "device_map": {"": device},
    }


def check_few_bits(settings: LoraSettings, device: torch.device) -> None:
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


def _adapter_layers(model: torch.nn.Module) -> list[Any]:
    """Every layer that carries an adapter and is not merged already."""
    if not is_lora(model):
        return []
    from peft.tuners.lora import LoraLayer

    return [module for module in model.modules() if isinstance(module, LoraLayer) and not module.merged]
