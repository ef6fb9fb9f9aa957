"""Sizes of a model that determine memory and work, counted on the meta device without allocating or reading weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from rl_core.errors import ModelError
from rl_core.models import causal_lm, lora
from rl_core.models.forward_modes import has_dropout
from rl_core.models.image_models import build_from_config
from rl_core.settings import ModelSettings
from rl_core.training.optimizers import find_hidden_matrices
from rl_core.training.performance_metrics import count_step_flops

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True)
class FlopsPolynomial:
    """Operations of a sequence of S tokens: per_token S + per_pair S^2."""

    per_token: float
    per_pair: float

    def compute_total(self, tokens: float, pairs: float) -> float:
        """Compute the operations of some sequences: `tokens` = sum of their S, `pairs` = sum of S^2."""
        return self.per_token * tokens + self.per_pair * pairs


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Parameter counts (shared ones once) and widths of one model, including its adapters."""

    parameters: int
    trainable: int
    muon: int  # trainable parameters that Muon updates
    largest_matrix: int  # largest matrix that Muon updates
    linear: int  # weights of linear layers without the output head; packed or quantized
    adapted: int  # weights under an adapter; quantized or merged
    largest_block: int  # parameters of the largest transformer block
    largest_product: int  # weights of the largest linear layer, whose gradient is computed as one
    embedding: int  # weights of the input embedding
    head: int  # outputs x inputs of the output head; 0 = none
    head_trains: bool
    tied: bool  # the head is the embedding
    layers: int
    hidden: int
    inner: int  # width of the MLP
    query_width: int  # query heads x head size
    kv_width: int  # key/value heads x head size
    query_heads: int
    head_norms: bool  # norms of single heads (Qwen3)
    ranks: int  # sum of the adapters' ranks in a block
    vocabulary: int
    context: int  # longest sequence, tokens
    drops_out: bool
    training: FlopsPolynomial  # forward and backward
    forward: FlopsPolynomial

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of the keys and values of one token, in float32."""
        return 4 * 2 * self.layers * self.kv_width


def build_model_without_weights(
    settings: ModelSettings, *, adapters: bool = True
) -> PreTrainedModel:
    """Build the model of the settings on the meta device from its config: a preset, a folder or a hub name.

    Args:
        adapters: add those of `settings.lora`.
    Raises: ModelError if there is no config, or the name is one of the registry.
    """
    model_settings = settings if adapters else dataclasses.replace(settings, lora=None)
    path = model_settings.path
    if path is not None:
        if path.startswith("models:"):
            raise ModelError(
                f"model.path: {path} is in the registry; name its folder with --set model.path=..."
            )
        source = Path(path) if Path(path).is_dir() else path
        return causal_lm.load_without_weights(source, model_settings)
    with torch.device("meta"):
        model: Any = build_from_config(
            causal_lm.build_preset_config(model_settings, model_settings.vocab_size)
        )
        if model_settings.lora is not None:
            model = lora.add_adapter(model, model_settings.lora)
    return model.to(causal_lm.resolve_dtype(model_settings)).train()


def measure_model_shape(
    model: PreTrainedModel, context: int, *, trunk_only: bool = False
) -> ModelShape:
    """Measure the sizes of a causal language model, or of its trunk with a scalar head (reward model, critic).

    Args:
        context: longest sequence, in tokens.
        trunk_only: without the output head; one weight vector for the scalar head is added.
    """
    base: Any = lora.unwrap_model(model)
    counted: nn.Module = base.base_model if trunk_only else model
    config = base.config.get_text_config()
    head, embedding = base.get_output_embeddings(), base.get_input_embeddings()
    hidden = int(config.hidden_size)
    head_size = hidden if trunk_only else 0
    heads = int(getattr(config, "num_attention_heads", 1))
    head_dim = int(getattr(config, "head_dim", None) or hidden // heads)
    kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
    blocks = _list_blocks(base)
    trained = {
        name: parameter for name, parameter in counted.named_parameters() if parameter.requires_grad
    }
    muon_sizes = [trained[name].numel() for name in find_hidden_matrices(counted) & trained.keys()]
    linears = list(_iter_linear_layers(base, head))
    return ModelShape(
        parameters=sum(parameter.numel() for parameter in counted.parameters()) + head_size,
        trainable=sum(parameter.numel() for parameter in trained.values()) + head_size,
        muon=sum(muon_sizes),
        largest_matrix=max(muon_sizes, default=0),
        linear=sum(layer.weight.numel() for layer, _ in linears if isinstance(layer, nn.Linear)),
        adapted=sum(layer.weight.numel() for layer, adapted in linears if adapted),
        largest_block=max(
            (sum(parameter.numel() for parameter in block.parameters()) for block in blocks),
            default=0,
        ),
        largest_product=max((layer.weight.numel() for layer, _ in linears), default=0),
        embedding=embedding.weight.numel(),
        head=0 if trunk_only else lora.unwrap_linear(head).weight.numel(),
        head_trains=not trunk_only
        and any(parameter.requires_grad for parameter in head.parameters()),
        tied=lora.unwrap_linear(head).weight is embedding.weight,
        layers=len(blocks),
        hidden=hidden,
        inner=int(getattr(config, "intermediate_size", None) or 4 * hidden),
        query_width=heads * head_dim,
        kv_width=kv_heads * head_dim,
        query_heads=heads,
        head_norms=any(name.endswith("q_norm") for name, _ in base.named_modules()),
        ranks=_sum_adapter_ranks(model) // max(1, len(blocks)),
        vocabulary=int(config.vocab_size),
        context=context,
        drops_out=has_dropout(model),
        training=_fit_flops(counted),
        forward=_fit_forward_flops(counted),
    )


def count_experts(model: PreTrainedModel) -> tuple[int, int] | None:
    """Return the number of experts of a layer, and of those that a token uses; None for a model without experts."""
    config: Any = lora.unwrap_model(model).config.get_text_config()
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    counts = [getattr(config, name, None) for name in names]
    count = next((count for count in counts if count), None)
    num_active = getattr(config, "num_experts_per_tok", None)
    return (int(count), int(num_active)) if count and num_active else None


def _list_blocks(base: Any) -> list[nn.Module]:
    layers = getattr(base.base_model, "layers", None) or getattr(base.base_model, "h", None)
    return list(layers) if layers is not None else []


def _iter_linear_layers(base: nn.Module, head: Any) -> Iterator[tuple[Any, bool]]:
    """Yield (linear layer, whether it has an adapter) of all layers except the head.

    Matrices of adapters are left out. GPT-2's transposed layers of transformers are included.
    """
    from transformers.pytorch_utils import Conv1D

    for name, module in base.named_modules():
        layer = lora.unwrap_linear(module)
        if layer is module and (name.endswith(".base_layer") or ".lora_" in name):
            continue
        if isinstance(layer, nn.Linear | Conv1D) and module is not head:
            yield layer, layer is not module


def _sum_adapter_ranks(model: nn.Module) -> int:
    parameters = model.named_parameters()
    return sum(parameter.shape[0] for name, parameter in parameters if ".lora_A." in name)


def _fit_flops(model: nn.Module) -> FlopsPolynomial:
    """Fit the two coefficients of `count_step_flops` from sequences of 1 and 2 tokens: a + b and 2 a + 4 b."""
    one, two = count_step_flops(model, [1]), count_step_flops(model, [2])
    per_pair = (two - 2 * one) / 2
    return FlopsPolynomial(one - per_pair, per_pair)


def _fit_forward_flops(model: nn.Module) -> FlopsPolynomial:
    """Fit the operations of the forward pass, a third of forward and backward.

    With nothing to train, `count_step_flops` counts 4 per parameter, of which 2 are forward.
    """
    with _freeze_parameters(model):
        flops = _fit_flops(model)
    return FlopsPolynomial(flops.per_token / 2, flops.per_pair / 3)


@contextmanager
def _freeze_parameters(model: nn.Module) -> Iterator[None]:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in trained:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)
