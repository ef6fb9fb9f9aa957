"""Low-rank adapters of several owners over one frozen model, each for rows of its own in a common pass.

The model itself stays as it is: `AdapterRouter.routed` puts layers that add an adapter's product in the place of its
linear layers for one forward pass. Every product with an adapter is taken over its owner's tokens alone, so its
gradient is a sum over these in their order, whatever is computed beside them.

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

from rl_core.cpu.layer_kernels import apply_linears
from rl_core.cpu.low_rank import AdapterSpan, AdapterSpans, add_low_rank, write_low_rank_grads
from rl_core.cpu.packed_forward import RowGroups

if TYPE_CHECKING:
    from transformers import PreTrainedModel


_Result = TypeVar("_Result")
_MAX_CACHED_SETS = 64  # of adapters side by side, whose tables are kept


@dataclass(frozen=True, slots=True)
class LowRank:
    """Update of one weight [O, I]: scale B A, both factors float32."""

    down_RI: torch.Tensor  # A
    up_OR: torch.Tensor  # B
    scale: float

    @torch.no_grad()
    def add_to_weight(self, weight_OI: torch.Tensor) -> torch.Tensor:
        """A new weight, of the dtype of the old one."""
        update_OI = (self.up_OR @ self.down_RI).mul_(self.scale)
        return (
            (weight_OI + update_OI).to(weight_OI.dtype)
            if weight_OI.is_floating_point()
            else weight_OI
        )


Adapter = Mapping[str, LowRank]  # by the name of the linear layer


class AdapterRouter:
    """The layers that take the place of a model's linear ones while adapters are routed."""

    def __init__(self, model: PreTrainedModel, names: Sequence[str]) -> None:
        """names: linear layers of the model that adapters may update."""
        self.groups = RowGroups([])
        self._gradients: AdapterGradients | None = None
        self._routes = _Routes([])
        # by the adapters; the one used last is the last
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
        """The model with these adapters inside: the first rows of a batch through the first, and so on.

        Args:
            rows: of each adapter, consecutive. adapters: None = the model as it is; factors change in place alone, and
                `forget` is called before an adapter is given up.
            gradients: where those of the factors go; None = none are asked for.
        Returns: what `models.compute_hidden_states` takes as `groups`.
        """
        self.groups, self._gradients, self._routes = (
            RowGroups(list(rows)),
            gradients,
            self._find_routes(adapters),
        )
        for parent, attribute, _, routed in self._routed_layers:
            parent._modules[attribute] = routed
        try:
            yield self.groups
        finally:
            for parent, attribute, layer, _ in self._routed_layers:
                parent._modules[attribute] = layer
            self.groups, self._gradients, self._routes = RowGroups([]), None, _Routes([])

    def clear_routes(self) -> None:
        """Drop what is kept of adapters between passes."""
        self._cached_routes.clear()

    def _find_routes(self, adapters: Sequence[Adapter | None]) -> _Routes:
        """Tables of these adapters side by side; the sets used last are kept, with the adapters themselves."""
        key = tuple(map(id, adapters))
        routes = self._cached_routes.pop(key, None) or _Routes(adapters)
        self._cached_routes[key] = routes
        if len(self._cached_routes) > _MAX_CACHED_SETS:
            del self._cached_routes[next(iter(self._cached_routes))]
        return routes

    def build_spans(self, names: tuple[str, ...], widths: Sequence[int]) -> AdapterSpans:
        """Tokens that have updates of some of these layers, whose outputs of these widths lie side by side."""
        return self._routes.build_spans(names, widths, tuple(self.groups.tokens))

    def build_separate_spans(
        self, adapters: Sequence[Adapter | None], name: str, width: int, tokens: Sequence[int]
    ) -> AdapterSpans:
        """Spans of one layer that is called apart from the model; places of their gradients are in order.

        Args: tokens: of each adapter, one after the other.
        """
        return self._find_routes(adapters).build_spans(
            (name,), (width,), tuple(tokens), in_order=True
        )

    @property
    def gradients(self) -> AdapterGradients | None:
        """Room for the gradients of the pass under way."""
        return self._gradients


class AdapterGradients:
    """Gradients of a pass's adapters: a flat tensor of all factors, those of each adapter in its own order."""

    def __init__(self, size: int, device: torch.device) -> None:
        """size: numbers of all adapters' factors."""
        self.flat = torch.empty(size, device=device)
        # the input by which autograd finds the way
        self.anchor = torch.zeros((), requires_grad=True, device=device)
        self.written_layers: set[str] = set()  # layers whose gradients have been written

    def accumulate_layers(
        self, names: Sequence[str], compute: Callable[[torch.Tensor], _Result]
    ) -> _Result:
        """Gradients of some layers, which `compute` writes into a tensor as `flat`; a layer's second ones are added."""
        if self.written_layers.isdisjoint(names):
            self.written_layers.update(names)
            return compute(self.flat)
        more = torch.zeros_like(self.flat)
        result = compute(more)
        self.flat += more
        return result


class _Routes:
    """Adapters side by side, and their spans at each group of layers, as the last pass had them."""

    def __init__(self, adapters: Sequence[Adapter | None]) -> None:
        self._adapters = list(adapters)
        self._cached_spans: dict[tuple[bool | str, ...], tuple[tuple[int, ...], AdapterSpans]] = {}
        # of A and B of each layer among all gradients
        self._factor_offsets: list[dict[str, tuple[int, int]]] = []
        place = 0
        for adapter in self._adapters:
            self._factor_offsets.append({})
            for name, update in ({} if adapter is None else adapter).items():
                self._factor_offsets[-1][name] = (place, place + update.down_RI.numel())
                place += update.down_RI.numel() + update.up_OR.numel()

    def build_spans(
        self,
        names: tuple[str, ...],
        widths: Sequence[int],
        tokens: tuple[int, ...],
        *,
        in_order: bool = False,
    ) -> AdapterSpans:
        """See `AdapterRouter.spans`. Args: tokens: of each adapter. in_order: see `AdapterRouter.apart`."""
        before, spans = self._cached_spans.get((in_order, *names), (None, None))
        if spans is None or before != tokens:
            if (
                spans is not None and len(spans) == len(tokens) and all(tokens)
            ):  # every adapter has updates here
                spans = spans.with_token_counts(tokens)
            else:
                spans = self._compute_spans(names, widths, tokens, in_order=in_order)
            self._cached_spans[in_order, *names] = tokens, spans
        return spans

    def _compute_spans(
        self, names: Sequence[str], widths: Sequence[int], tokens: Sequence[int], *, in_order: bool
    ) -> AdapterSpans:
        ends = list(itertools.accumulate(widths))
        spans, places, start = [], [], 0
        for count, adapter, own in zip(tokens, self._adapters, self._factor_offsets, strict=True):
            found = [
                (end - width, end, adapter[name])
                for name, width, end in zip(names, widths, ends, strict=True)
                if adapter is not None and name in adapter
            ]
            if found and count:
                updates = [update for *_, update in found]
                spans.append(
                    AdapterSpan(
                        start,
                        start + count,
                        [(begin, end) for begin, end, _ in found],
                        updates[0].scale,
                        [update.down_RI for update in updates],
                        [update.up_OR for update in updates],
                    )
                )
                placed = [own[name] for name in names if name in own]
                places.append([*(down for down, _ in placed), *(up for _, up in placed)])
            start += count
        return AdapterSpans(spans, None if in_order else places)


class _RoutedLinear(nn.Module):
    """A linear layer and, for some tokens, an adapter's product."""

    def __init__(self, layer: nn.Module, name: str, router: AdapterRouter) -> None:
        super().__init__()
        self.base_layer, self._name = layer, name
        self.__dict__["_router"] = router  # no module of this one

    @property
    def weight(self) -> Any:
        """Of the layer itself: some models look at its dtype."""
        return self.base_layer.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x W^T + bias + scale x A^T B^T, the last for tokens with an adapter."""
        if x.ndim == 2:
            return self.joined(x, [self])
        out = self.base_layer(x)
        return self._add_updates(
            out.flatten(0, -2), x.flatten(0, -2), [self], [out.shape[-1]]
        ).view(out.shape)

    def joined(self, x_NI: torch.Tensor, layers: Sequence[_RoutedLinear]) -> torch.Tensor:
        """Outputs of several routed layers of one input, side by side (see `cpu.kernels.linears`)."""
        plain = [layer.base_layer for layer in layers]
        return self._add_updates(
            apply_linears(x_NI, plain), x_NI, layers, [layer.weight.shape[0] for layer in layers]
        )

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
    """out + scale x A^T B^T over the tokens of each span, each in products of its own.

    Gradients of the factors go to their places, not through autograd: with many adapters its account of every factor
    costs more than the products.
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
        grad_x_NI = ctx.gradients.take(
            ctx.names,
            lambda flat: write_low_rank_grads(
                flat, grad_NO.contiguous(), x_NI, saved, ctx.spans, with_x=ctx.needs_input_grad[1]
            ),
        )
        return grad_NO, grad_x_NI, None, None, None, None
