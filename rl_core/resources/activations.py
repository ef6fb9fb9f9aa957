"""Memory of a micro-batch's forward and backward pass: activations saved for backward, logits, temporaries.

There are two ways through a model (`capabilities.training_forward`): the packed forward pass on a CPU, whose saved
tensors are counted here, and transformers' own, whose saved tensors are recorded on the meta device.

Symbols: N tokens of a micro-batch (nodes of its prefix tree), H hidden, I width of the MLP, E width of the query heads,
K width of the key/value heads, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from rl_core.models.chunked_head import compute_chunk_tokens
from rl_core.models.lora import unwrap_model
from rl_core.resources.model_shape import ModelShape

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_TRACED_TOKENS = 64  # of the traced sequence; saved bytes are proportional to the tokens


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Largest micro-batch of an optimizer step."""

    tokens: int  # computed: without padding, common beginnings of rows once
    padded: int  # rows x width
    loss_tokens: int
    count: int = 1  # micro-batches of the step


@dataclass(frozen=True, slots=True)
class Activations:
    """Bytes at the peak of a micro-batch."""

    saved: int  # for backward, by all layers
    layer: int  # of one layer: freed by its backward, or recomputed by checkpointing
    temporary: int  # gradients of activations
    logits: int  # of the output head and the log-softmax
    holes: int = 0  # of the heap, between the tensors of a step

    def with_heap_holes(self, share: float) -> Activations:
        """Return the same with holes of this share of the live bytes."""
        return dataclasses.replace(self, holes=int(share * (self.saved + self.temporary)))


def estimate_packed_activations(
    shape: ModelShape, batch: MicroBatch, *, checkpointing: bool = False
) -> Activations:
    """Estimate the activations of `rl_core.cpu.run_packed_forward`, which are float32 whatever its products round to.

    Per token a layer saves: two sums and their norms (4 H); rotated heads (E + 2 K) and the attended ones (E), a
        logarithm per query head; gate and up (2 I) and their product (I); two scales; the inner values of adapters;
        with norms of single heads their inputs (E + K). The last layer computes its MLP only at loss tokens, and
        copies its input there (E + H). With checkpointing, a layer saves its input (H), and one layer is recomputed.
    """
    hidden, inner, queries, keys = shape.hidden, shape.inner, shape.query_width, shape.kv_width
    attention = 2 * hidden + 2 * queries + 2 * keys + shape.query_heads + 1
    attention += queries + keys if shape.head_norms else 0
    mlp = 2 * hidden + 3 * inner + 1
    layer = attention + mlp + shape.ranks
    tokens = batch.tokens
    loss_tokens = min(batch.loss_tokens, tokens)
    saved = shape.layers * layer * tokens
    saved += (queries + 2 * hidden) * loss_tokens - mlp * (tokens - loss_tokens)
    if checkpointing:
        saved = (shape.layers * hidden + layer) * tokens
    outside = hidden * loss_tokens  # the states that the head reads
    # Backward of the MLP: gradients of the sum, the norm, the product, gate and up; it frees less than that.
    temporary = (2 * hidden + 3 * inner) * tokens
    return Activations(
        4 * (saved + outside),
        4 * layer * tokens,
        4 * temporary,
        estimate_head_bytes(shape, batch, "cpu", torch.float32),
    )


def estimate_head_bytes(
    shape: ModelShape, batch: MicroBatch, device: str, dtype: torch.dtype
) -> int:
    """Estimate the chunked head (`rl_core.models.chunked_head`).

    It has two float32 buffers of [chunk, V], and logits in lower precision. A model without an output head has 0.
    """
    if not shape.head:
        return 0
    chunk = min(max(1, batch.loss_tokens), compute_chunk_tokens(device, shape.vocabulary))
    logit_bytes = 0 if dtype == torch.float32 else dtype.itemsize
    return chunk * shape.vocabulary * (2 * 4 + logit_bytes)


def estimate_transformers_activations(
    model: PreTrainedModel,
    shape: ModelShape,
    batch: MicroBatch,
    *,
    device: str,
    autocast: bool,
    checkpointing: bool,
) -> Activations:
    """Estimate the activations of transformers' forward pass, by the tensors that autograd saves on the meta device.

    Attention counts as a fused kernel: queries, keys, values, result and the logarithms of the denominators. Under
        autocast, products use bfloat16 copies of weights and inputs, which are saved in addition to the originals.
    Args:
        model: on the meta device, in training mode.
    """
    traced_outside, traced_layers = _trace_saved_bytes(model)
    layers = max(1, shape.layers)
    scale = batch.padded / _TRACED_TOKENS
    layer = int(sum(traced_layers) / layers * scale)
    outside = int(traced_outside * scale)
    item = next(model.parameters()).element_size()
    if autocast:
        # bfloat16 inputs of products (three of width H or E, one of width I), and copies of the weights.
        layer += 2 * batch.padded * (3 * shape.hidden + shape.inner)
        outside += 2 * shape.linear
    saved = outside + layer * layers
    if checkpointing:
        # The inputs of all layers, and one recomputed layer.
        saved = outside + item * shape.hidden * batch.padded * layers + layer
    temporary = item * (2 * shape.hidden + 3 * shape.inner) * batch.padded
    dtype = torch.bfloat16 if autocast else next(model.parameters()).dtype
    return Activations(saved, layer, temporary, estimate_head_bytes(shape, batch, device, dtype))


def _trace_saved_bytes(model: PreTrainedModel) -> tuple[int, list[int]]:
    """Return the bytes saved for backward of a sequence of `_TRACED_TOKENS`: outside the layers, and by each layer."""
    trunk: Any = unwrap_model(model).base_model
    blocks = getattr(trunk, "layers", None) or getattr(trunk, "h", [])
    parameter_storages = {parameter.untyped_storage()._cdata for parameter in trunk.parameters()}
    saved: dict[int, tuple[int, int]] = {}  # storage: (first layer that saves it or -1, bytes)
    alive: list[torch.Tensor] = []  # so that no address is reused
    current_block = -1

    def record_saved(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in parameter_storages and storage._cdata not in saved:
            saved[storage._cdata] = (current_block, storage.nbytes())
            alive.append(tensor)
        return tensor

    def build_hook(number: int) -> Callable[..., None]:
        def set_current_block(*_: Any) -> None:
            nonlocal current_block
            current_block = number

        return set_current_block

    handles = [
        block.register_forward_pre_hook(build_hook(number)) for number, block in enumerate(blocks)
    ]
    handles += [block.register_forward_hook(build_hook(-1)) for block in blocks]
    ids = torch.zeros(1, _TRACED_TOKENS, dtype=torch.int64, device="meta")
    # A four-dimensional mask is used unchanged; the values of any other would be read, and meta tensors have none.
    mask = torch.ones(1, 1, _TRACED_TOKENS, _TRACED_TOKENS, dtype=torch.bool, device="meta")
    try:
        with (
            _patch_fused_kernels(),
            torch.autograd.graph.saved_tensors_hooks(record_saved, lambda tensor: tensor),
        ):
            result = trunk(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
    finally:
        for handle in handles:
            handle.remove()
    del result
    by_layer = [0] * max(1, len(blocks))
    outside = 0
    for number, size in saved.values():
        if number < 0:
            outside += size
        else:
            by_layer[number] += size
    return outside, by_layer


class _FusedAttention(torch.autograd.Function):
    """Shapes of a fused attention kernel, with what it saves for backward."""

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        result = torch.empty_like(query)
        log_denominators = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, result, log_denominators)
        return result


class _GroupedProduct(torch.autograd.Function):
    """Shapes of the product of rows with their experts' weights [experts, inputs, outputs]; it saves the rows."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(rows, weights)
        return rows.new_empty(len(rows), weights.shape[-1])


@contextmanager
def _patch_fused_kernels() -> Iterator[None]:
    """Replace attention and experts' products by functions that only know their shapes.

    On the meta device torch's attention would save [S, S] weights, and its grouped product accepts only bfloat16.
    """

    def attend(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **options: Any
    ) -> torch.Tensor:
        result: torch.Tensor = _FusedAttention.apply(query, key, value)
        return result

    def multiply_groups(rows: torch.Tensor, weights: torch.Tensor, **options: Any) -> torch.Tensor:
        result: torch.Tensor = _GroupedProduct.apply(rows, weights)
        return result

    replacements = {"scaled_dot_product_attention": attend, "grouped_mm": multiply_groups}
    originals = {
        name: getattr(functional, name) for name in replacements if hasattr(functional, name)
    }
    for name in originals:
        setattr(functional, name, replacements[name])
    try:
        yield
    finally:
        for name, function in originals.items():
            setattr(functional, name, function)
