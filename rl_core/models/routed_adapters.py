"""Low-rank adapters of several owners over one frozen model, each for its own rows of a shared pass.

The model itself does not change: `AdapterRouter.route_rows` replaces its linear layers, for one forward pass, by
layers that add an adapter's product. Every product with an adapter covers only its owner's tokens, so its gradient is
a sum over these in order, regardless of the rest of the batch.

N tokens, I inputs, O outputs, R rank.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from rl_core.cpu.linear_layers import apply_linears
from rl_core.cpu.low_rank import AdapterSpan, AdapterSpans, add_low_rank, write_low_rank_grads
from rl_core.cpu.packed_forward import RowGroups

if TYPE_CHECKING:
    from transformers import PreTrainedModel


_Result = TypeVar("_Result")
_MAX_CACHED_SETS = 64  # lists of adapters whose tables are cached


@dataclass(frozen=True, slots=True)
class LowRank:
    """An update of one weight [O, I]: scale B A, both factors float32."""

    down_RI: torch.Tensor  # A
    up_OR: torch.Tensor  # B
    scale: float

    @torch.no_grad()
    def add_to_weight(self, weight_OI: torch.Tensor) -> torch.Tensor:
        """Return the updated weight, in the original's dtype."""
        update_OI = (self.up_OR @ self.down_RI).mul_(self.scale)
        if not weight_OI.is_floating_point():
            return weight_OI
        return (weight_OI + update_OI).to(weight_OI.dtype)


Adapter = Mapping[str, LowRank]  # by the name of the linear layer


class AdapterRouter:
    """The layers that replace a model's linear ones while adapters are routed."""

    def __init__(self, model: PreTrainedModel, names: Sequence[str]) -> None:
        """Create the replacement layers.

        Args:
            names: linear layers of the model that adapters may update.
        """
        self.groups = RowGroups([])
        self._gradients: AdapterGradients | None = None
        self._routes = _Routes([])
        # by ids of the adapters, least recently used first
        self._cached_routes: dict[tuple[int, ...], _Routes] = {}
        self._routed_layers: list[tuple[nn.Module, str, nn.Module, nn.Module]] = []
        for name in names:
            owner, _, attribute = name.rpartition(".")
            parent, layer = model.get_submodule(owner), model.get_submodule(name)
            self._routed_layers.append((parent, attribute, layer, _RoutedLinear(layer, name, self)))

    @contextmanager
    def route_rows(
        self,
        rows: Sequence[int],
        adapters: Sequence[Adapter | None],
        gradients: AdapterGradients | None = None,
    ) -> Iterator[RowGroups]:
        """Route the rows of a batch through these adapters: the first rows through the first adapter, and so on.

        Args:
            rows: number of consecutive rows of each adapter.
            adapters: None = the model without an adapter. Factors may change only in place; call `clear_routes`
                before an adapter is freed.
            gradients: receives the factors' gradients; None = no gradients.
        Returns: the `groups` argument of `models.compute_hidden_states`.
        """
        self.groups, self._gradients = RowGroups(list(rows)), gradients
        self._routes = self._find_routes(adapters)
        for parent, attribute, _, routed in self._routed_layers:
            parent._modules[attribute] = routed
        try:
            yield self.groups
        finally:
            for parent, attribute, layer, _ in self._routed_layers:
                parent._modules[attribute] = layer
            self.groups, self._gradients, self._routes = RowGroups([]), None, _Routes([])

    def clear_routes(self) -> None:
        """Drop what is cached about adapters between passes."""
        self._cached_routes.clear()

    def _find_routes(self, adapters: Sequence[Adapter | None]) -> _Routes:
        """Return the tables of this list of adapters; the latest lists are cached with their adapters."""
        key = tuple(map(id, adapters))
        routes = self._cached_routes.pop(key, None) or _Routes(adapters)
        self._cached_routes[key] = routes
        if len(self._cached_routes) > _MAX_CACHED_SETS:
            del self._cached_routes[next(iter(self._cached_routes))]
        return routes

    def build_spans(self, names: tuple[str, ...], widths: Sequence[int]) -> AdapterSpans:
        """Build the spans of tokens with updates of some of these layers, whose outputs of these widths lie side by
        side.
        """
        return self._routes.build_spans(names, widths, tuple(self.groups.tokens))

    def build_separate_spans(
        self, adapters: Sequence[Adapter | None], name: str, width: int, tokens: Sequence[int]
    ) -> AdapterSpans:
        """Build the spans of one layer that is called apart from the model; its gradients are placed in order.

        Args:
            tokens: number of consecutive tokens of each adapter.
        """
        return self._find_routes(adapters).build_spans(
            (name,), (width,), tuple(tokens), in_order=True
        )

    @property
    def gradients(self) -> AdapterGradients | None:
        """The gradient buffer of the current pass."""
        return self._gradients


class AdapterGradients:
    """The gradients of a pass's adapters: a flat tensor of all factors, in order by adapter."""

    def __init__(self, size: int, device: torch.device) -> None:
        """Allocate the buffer.

        Args:
            size: total number of elements of all adapters' factors.
        """
        self.flat = torch.empty(size, device=device)
        # an input that requires a gradient, so that autograd calls backward
        self.anchor = torch.zeros((), requires_grad=True, device=device)
        self.written_layers: set[str] = set()  # layers whose gradients have been written

    def accumulate_layers(
        self, names: Sequence[str], compute: Callable[[torch.Tensor], _Result]
    ) -> _Result:
        """Store the gradients of some layers that `compute` writes into a tensor like `flat`; add a layer's second
        ones.
        """
        if self.written_layers.isdisjoint(names):
            self.written_layers.update(names)
            return compute(self.flat)
        addition = torch.zeros_like(self.flat)
        result = compute(addition)
        self.flat += addition
        return result


class _Routes:
    """A list of adapters, with the spans of the latest pass by group of layers."""

    def __init__(self, adapters: Sequence[Adapter | None]) -> None:
        self._adapters = list(adapters)
        self._cached_spans: dict[tuple[bool | str, ...], tuple[tuple[int, ...], AdapterSpans]] = {}
        # by adapter and layer: offsets of A and B in the flat gradients
        self._factor_offsets: list[dict[str, tuple[int, int]]] = []
        offset = 0
        for adapter in self._adapters:
            self._factor_offsets.append({})
            for name, update in ({} if adapter is None else adapter).items():
                self._factor_offsets[-1][name] = (offset, offset + update.down_RI.numel())
                offset += update.down_RI.numel() + update.up_OR.numel()

    def build_spans(
        self,
        names: tuple[str, ...],
        widths: Sequence[int],
        tokens: tuple[int, ...],
        *,
        in_order: bool = False,
    ) -> AdapterSpans:
        """See `AdapterRouter.build_spans`.

        Args:
            tokens: of each adapter.
            in_order: see `AdapterRouter.build_separate_spans`.
        """
        previous_tokens, spans = self._cached_spans.get((in_order, *names), (None, None))
        if spans is None or previous_tokens != tokens:
            # only token counts change if every adapter has updates here
            if spans is not None and len(spans) == len(tokens) and all(tokens):
                spans = spans.with_token_counts(tokens)
            else:
                spans = self._compute_spans(names, widths, tokens, in_order=in_order)
            self._cached_spans[in_order, *names] = tokens, spans
        return spans

    def _compute_spans(
        self, names: Sequence[str], widths: Sequence[int], tokens: Sequence[int], *, in_order: bool
    ) -> AdapterSpans:
        ends = list(itertools.accumulate(widths))
        spans, destinations, start = [], [], 0
        for count, adapter, offsets in zip(
            tokens, self._adapters, self._factor_offsets, strict=True
        ):
            layer_updates = [
                (end - width, end, adapter[name])
                for name, width, end in zip(names, widths, ends, strict=True)
                if adapter is not None and name in adapter
            ]
            if layer_updates and count:
                updates = [update for *_, update in layer_updates]
                spans.append(
                    AdapterSpan(
                        start,
                        start + count,
                        [(begin, end) for begin, end, _ in layer_updates],
                        updates[0].scale,
                        [update.down_RI for update in updates],
                        [update.up_OR for update in updates],
                    )
                )
                layer_offsets = [offsets[name] for name in names if name in offsets]
                destinations.append(
                    [*(down for down, _ in layer_offsets), *(up for _, up in layer_offsets)]
                )
            start += count
        return AdapterSpans(spans, None if in_order else destinations)


class _RoutedLinear(nn.Module):
    """A linear layer that adds an adapter's product for some tokens."""

    def __init__(self, layer: nn.Module, name: str, router: AdapterRouter) -> None:
        super().__init__()
        self.base_layer, self._name = layer, name
        self.__dict__["_router"] = router  # not registered as a submodule

    @property
    def weight(self) -> Any:
        """The base layer's weight; some models read its dtype."""
        return self.base_layer.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute x W^T + bias + scale x A^T B^T, the last for tokens with an adapter."""
        if x.ndim == 2:
            return self.apply_together(x, [self])
        out = self.base_layer(x)
        flat = self._add_updates(out.flatten(0, -2), x.flatten(0, -2), [self], [out.shape[-1]])
        return flat.view(out.shape)

    def apply_together(self, x_NI: torch.Tensor, layers: Sequence[_RoutedLinear]) -> torch.Tensor:
        """Apply several routed layers to one input, side by side (see
        `cpu.linear_layers.apply_linears`).
        """
        out_NO = apply_linears(x_NI, [layer.base_layer for layer in layers])
        widths = [layer.weight.shape[0] for layer in layers]
        return self._add_updates(out_NO, x_NI, layers, widths)

    def _add_updates(
        self,
        out_NO: torch.Tensor,
        x_NI: torch.Tensor,
        layers: Sequence[_RoutedLinear],
        widths: Sequence[int],
    ) -> torch.Tensor:
        router: AdapterRouter = self.__dict__["_router"]
        names = tuple([layer._name for layer in layers])
        spans = router.build_spans(names, widths)
        if not spans:
            return out_NO
        gradients = router.gradients if torch.is_grad_enabled() else None
        anchor = None if gradients is None else gradients.anchor
        updated: torch.Tensor = _AddLowRank.apply(out_NO, x_NI, anchor, names, spans, gradients)
        return updated


class _AddLowRank(torch.autograd.Function):
    """out + scale x A^T B^T over the tokens of each span, with separate products per span.

    Gradients of the factors go to a buffer, not through autograd: with many adapters, autograd's handling of every
    factor costs more than the products.
    """

    @staticmethod
    def forward(
        ctx: Any,
        out_NO: torch.Tensor,
        x_NI: torch.Tensor,
        anchor: torch.Tensor | None,
        names: tuple[str, ...],
        spans: AdapterSpans,
        gradients: AdapterGradients | None,
    ) -> torch.Tensor:
        ctx.mark_dirty(out_NO)
        saved = add_low_rank(out_NO, x_NI, spans)
        ctx.save_for_backward(x_NI, *saved)
        ctx.names, ctx.spans, ctx.gradients = names, spans, gradients
        return out_NO

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_NO: torch.Tensor) -> tuple[Any, ...]:
        x_NI, *saved = ctx.saved_tensors
        grad_x_NI = ctx.gradients.accumulate_layers(
            ctx.names,
            lambda flat: write_low_rank_grads(
                flat, grad_NO.contiguous(), x_NI, saved, ctx.spans, with_x=ctx.needs_input_grad[1]
            ),
        )
        return grad_NO, grad_x_NI, None, None, None, None
