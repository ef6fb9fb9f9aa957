"""Low-rank adapters (arXiv:2106.09685) through peft, which is imported only where adapters are used."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rl_core.errors import SettingsError
from rl_core.settings import LoraSettings

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["add_adapter", "is_lora", "merged", "plain_linear", "save_merged", "unwrap"]


def add_adapter(model: PreTrainedModel, settings: LoraSettings) -> PreTrainedModel:
    """`model` with trainable adapters on its `target_modules`; all other weights are frozen.

    Raises: SettingsError when peft is missing, or no layer has one of these names.
    """
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise SettingsError("lora: needs the peft package, which is not installed") from error
    linear_names = {
        name.rsplit(".", 1)[-1] for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)
    }
    missing = [name for name in settings.target_modules if name not in linear_names]
    if missing:
        raise SettingsError(
            f"lora.target_modules: no linear layer of this model is named {', '.join(missing)}; "
            f"there are {', '.join(sorted(linear_names))}"
        )
    tied = [name for name in settings.target_modules if name in ("lm_head", "embed_tokens")]
    if tied and model.config.tie_word_embeddings:
        raise SettingsError(
            f"lora.target_modules: {tied[0]} shares its weights with the embedding here, so merging its adapter would "
            "change both; leave it out"
        )
    wrapped: Any = get_peft_model(
        model,
        LoraConfig(
            r=settings.rank,
            lora_alpha=settings.alpha,  # type: ignore[arg-type]  # a float is fine: it only scales
            lora_dropout=settings.dropout,
            target_modules=list(settings.target_modules),
            task_type="CAUSAL_LM",
        ),
    )
    return wrapped


def is_lora(model: torch.nn.Module) -> bool:
    """True = `model` is wrapped by peft."""
    return hasattr(model, "peft_config") and hasattr(model, "get_base_model")


def unwrap(model: Any) -> PreTrainedModel:
    """The transformers model inside; adapter layers stay in place."""
    return model.get_base_model() if is_lora(model) else model


def plain_linear(module: Any) -> Any:
    """The layer under an adapter, or the layer itself."""
    return getattr(module, "base_layer", module)


@contextmanager
def merged(model: torch.nn.Module) -> Iterator[None]:
    """Adapters merged into the weights inside; afterwards the weights are the very bits that they were before.

    Subtracting an update that was added leaves rounding errors behind, so the original weights are kept and put back.
    """
    layers = _adapter_layers(model)
    originals = [layer.base_layer.weight.detach().clone() for layer in layers]
    done: list[Any] = []
    try:
        with torch.no_grad():
            for layer in layers:
                done.append(layer)
                layer.merge()
        yield
    finally:
        with torch.no_grad():
            for layer, original in zip(done, originals, strict=False):
                layer.base_layer.weight.copy_(original)
                layer.merged_adapters.clear()


def save_merged(model: Any, folder: Path) -> None:
    """Write the model with its adapters merged, as a plain transformers model folder."""
    base = unwrap(model)
    with merged(model):
        state = {
            name.replace(".base_layer.", "."): tensor
            for name, tensor in base.state_dict().items()
            if ".lora_" not in name
        }
        base.save_pretrained(folder, state_dict=state)


def _adapter_layers(model: torch.nn.Module) -> list[Any]:
    """Every layer that carries an adapter and is not merged already."""
    if not is_lora(model):
        return []
    from peft.tuners.lora import LoraLayer

    return [module for module in model.modules() if isinstance(module, LoraLayer) and not module.merged]
