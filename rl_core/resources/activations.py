"""Memory of a micro-batch's forward and backward pass: activations kept for backward, logits, temporaries.

Two ways through a model (`capabilities.training_forward`): the packed forward pass on a CPU, whose saved tensors are
counted here, and transformers' own, whose saved tensors are recorded on the meta device.

N tokens of a micro-batch, H hidden, I width of the MLP, E width of the query heads, K width of the key/value heads,
V vocabulary.
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


_TRACED_TOKENS = 64  # of the sequence on the meta device: what is kept grows with the tokens alone


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The largest micro-batch of an optimizer step."""

    tokens: int  # real ones that are computed
    padded: int  # rows x width
    loss_tokens: int
    count: int = 1  # micro-batches of the step


@dataclass(frozen=True, slots=True)
class Activations:
    """Bytes at the peak of a micro-batch."""

    saved: int  # for backward, by all layers
    layer: int  # of one layer: what backward frees with it, or what checkpointing computes again
    temporary: int  # gradients of activations on their way
    logits: int  # of the output head and the log-softmax
    holes: int = 0  # of the heap, between tensors of a step

    def with_heap_holes(self, share: float) -> Activations:
        """The same with holes of this share of what is live."""
        return dataclasses.replace(self, holes=int(share * (self.saved + self.temporary)))


def estimate_packed_activations(shape: ModelShape, batch: MicroBatch) -> Activations:
    """Of `rl_core.cpu.run_packed_forward`, in float32.

    A layer keeps, for each token: two sums and their norms (4 H); turned heads (E + 2 K) and the attended ones (E), a
    logarithm a query head; gate and up (2 I) and their product (I); two scales; the adapters' inner values; with norms
    of single heads their inputs (E + K). The last layer computes its MLP at loss tokens alone, and copies its input
    there (E + H).
    """
    hidden, inner, queries, keys = shape.hidden, shape.inner, shape.query_width, shape.kv_width
    attention = 2 * hidden + 2 * queries + 2 * keys + shape.query_heads + 1
    attention += queries + keys if shape.head_norms else 0
    mlp = 2 * hidden + 3 * inner + 1
    layer = attention + mlp + shape.ranks
    tokens, read = batch.tokens, min(batch.loss_tokens, batch.tokens)
    kept = shape.layers * layer * tokens - mlp * (tokens - read) + (queries + 2 * hidden) * read
    around = (
        2 * hidden * batch.padded + hidden * read
    )  # the padded result and its copy, the states that the head reads
    # Backward of the MLP: gradients of the sum, the norm, the product, gate and up; what it frees is less.
    temporary = (2 * hidden + 3 * inner) * tokens
    return Activations(
        4 * (kept + around),
        4 * layer * tokens,
        4 * temporary,
        estimate_head_bytes(shape, batch, "cpu", torch.float32),
    )


def estimate_head_bytes(
    shape: ModelShape, batch: MicroBatch, device: str, dtype: torch.dtype
) -> int:
    """Of the chunked head (`rl_core.models.chunked_head`): two float32 buffers of [chunk, V], and logits below that.

    0 for a model without an output head.
    """
    if not shape.head:
        return 0
    chunk = min(max(1, batch.loss_tokens), compute_chunk_tokens(device, shape.vocabulary))
    lower = 0 if dtype == torch.float32 else dtype.itemsize
    return chunk * shape.vocabulary * (2 * 4 + lower)


def estimate_transformers_activations(
    model: PreTrainedModel,
    shape: ModelShape,
    batch: MicroBatch,
    *,
    device: str,
    autocast: bool,
    checkpointing: bool,
) -> Activations:
    """Of transformers' own forward pass, by tensors that autograd keeps in a pass on the meta device.

    Attention counts as a fused kernel: queries, keys, values, result and the logarithms of the denominators. Under
    autocast, products work on bfloat16 copies of weights and inputs, which are kept beside the originals.
    Args:
        model: on the meta device, in training mode.
    """
    first, others = _trace_saved_bytes(model)
    layers, tokens = max(1, shape.layers), batch.padded / _TRACED_TOKENS
    layer, around = int(sum(others) / layers * tokens), int(first * tokens)
    item = next(model.parameters()).element_size()
    if (
        autocast
    ):  # inputs of products in bfloat16 (3 of them H or E wide, one I), and the weights' own copies
        layer += 2 * batch.padded * (3 * shape.hidden + shape.inner)
        around += 2 * shape.linear
    kept = around + (
        item * shape.hidden * batch.padded * layers if checkpointing else layer * layers
    )
    again = layer if checkpointing else 0
    temporary = item * (2 * shape.hidden + 3 * shape.inner) * batch.padded
    dtype = torch.bfloat16 if autocast else next(model.parameters()).dtype
    return Activations(
        kept + again, layer, temporary, estimate_head_bytes(shape, batch, device, dtype)
    )


# -- what autograd keeps -----------------------------------------------------------------------------------------------


def _trace_saved_bytes(model: PreTrainedModel) -> tuple[int, list[int]]:
    """Bytes kept for backward of one sequence of `_TRACED_TOKENS`: outside the layers, and by each layer."""
    trunk: Any = unwrap_model(model).base_model
    blocks = getattr(trunk, "layers", None) or getattr(trunk, "h", [])
    own = {parameter.untyped_storage()._cdata for parameter in trunk.parameters()}
    found: dict[
        int, tuple[int, int]
    ] = {}  # storage -> (layer that keeps it first; -1 = none, bytes)
    alive: list[torch.Tensor] = []  # so that no address is used twice
    present = -1

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        place = tensor.untyped_storage()._cdata
        if place not in own and place not in found:
            found[place] = (present, tensor.untyped_storage().nbytes())
            alive.append(tensor)
        return tensor

    def enter(number: int) -> Callable[..., None]:
        def set_present(*_: Any) -> None:
            nonlocal present
            present = number

        return set_present

    handles = [
        block.register_forward_pre_hook(enter(number)) for number, block in enumerate(blocks)
    ]
    handles += [block.register_forward_hook(enter(-1)) for block in blocks]
    ids = torch.zeros(1, _TRACED_TOKENS, dtype=torch.int64, device="meta")
    # A mask of four dimensions is taken as it is; any other would be looked into, which has no values here.
    mask = torch.ones(1, 1, _TRACED_TOKENS, _TRACED_TOKENS, dtype=torch.bool, device="meta")
    try:
        with (
            _patch_fused_kernels(),
            torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        ):
            result = trunk(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
    finally:
        for handle in handles:
            handle.remove()
    del result
    by_layer = [0] * max(1, len(blocks))
    around = 0
    for number, size in found.values():
        if number < 0:
            around += size
        else:
            by_layer[number] += size
    return around, by_layer


class _FusedAttention(torch.autograd.Function):
    """Shapes of a fused attention kernel: what it keeps for its backward pass."""

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        out = torch.empty_like(query)
        ctx.save_for_backward(
            query, key, value, out, query.new_empty(query.shape[:-1], dtype=torch.float32)
        )
        return out


class _GroupedProduct(torch.autograd.Function):
    """Shapes of the product of rows with their experts' weights [experts, inputs, outputs]: it keeps the rows."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(rows, weights)
        return rows.new_empty(len(rows), weights.shape[-1])


@contextmanager
def _patch_fused_kernels() -> Iterator[None]:
    """Attention and experts' products by their shapes.

    On the meta device torch's attention would keep [S, S] weights, and its grouped product takes bfloat16 alone.
    """

    def attend(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **options: Any
    ) -> torch.Tensor:
        found: torch.Tensor = _FusedAttention.apply(query, key, value)
        return found

    def product(rows: torch.Tensor, weights: torch.Tensor, **options: Any) -> torch.Tensor:
        found: torch.Tensor = _GroupedProduct.apply(rows, weights)
        return found

    own = {"scaled_dot_product_attention": attend, "grouped_mm": product}
    before = {name: getattr(functional, name) for name in own if hasattr(functional, name)}
    for name in before:
        setattr(functional, name, own[name])
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(functional, name, function)
