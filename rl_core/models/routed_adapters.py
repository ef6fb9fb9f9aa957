"""Low-rank adapters of several owners over one frozen model, each for rows of its own in a common pass.

The model itself stays as it is: `AdapterRouter.routed` puts layers that add an adapter's product in the place of its
linear layers for one forward pass. Every product with an adapter is taken over its owner's tokens alone, so its
gradient is a sum over these in their order, whatever is computed beside them.

N tokens, I inputs, O outputs, R rank.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from rl_core.cpu.kernels import linears
from rl_core.cpu.low_rank import AdapterSpan, add_low_rank, low_rank_grads
from rl_core.cpu.shared_prefixes import RowGroups

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["Adapter", "AdapterRouter", "LowRank"]


@dataclass(frozen=True, slots=True)
class LowRank:
    """Update of one weight [O, I]: scale B A, both factors float32."""

    down_RI: torch.Tensor  # A
    up_OR: torch.Tensor  # B
    scale: float

    @torch.no_grad()
    def added_to(self, weight_OI: torch.Tensor) -> torch.Tensor:
        """A new weight, of the dtype of the old one."""
        update_OI = (self.up_OR @ self.down_RI).mul_(self.scale)
        return (weight_OI + update_OI).to(weight_OI.dtype) if weight_OI.is_floating_point() else weight_OI


Adapter = Mapping[str, LowRank]  # by the name of the linear layer


class AdapterRouter:
    """The layers that take the place of a model's linear ones while adapters are routed."""

    def __init__(self, model: PreTrainedModel, names: Sequence[str]) -> None:
        """names: linear layers of the model that adapters may update."""
        self.groups = RowGroups([])
        self._adapters: Sequence[Adapter | None] = []
        self._places: list[tuple[nn.Module, str, nn.Module, nn.Module]] = []
        for name in names:
            owner, _, attribute = name.rpartition(".")
            parent, layer = model.get_submodule(owner), model.get_submodule(name)
            self._places.append((parent, attribute, layer, _RoutedLinear(layer, name, self)))

    @contextmanager
    def routed(self, rows: Sequence[int], adapters: Sequence[Adapter | None]) -> Iterator[RowGroups]:
        """The model with these adapters inside: the first rows of a batch through the first, and so on.

        Args:
            rows: of each adapter, consecutive. adapters: None = the model as it is.
        Returns: what `models.hidden_states` takes as `groups`.
        """
        self.groups, self._adapters = RowGroups(list(rows)), adapters
        for parent, attribute, _, routed in self._places:
            parent._modules[attribute] = routed
        try:
            yield self.groups
        finally:
            for parent, attribute, layer, _ in self._places:
                parent._modules[attribute] = layer
            self.groups, self._adapters = RowGroups([]), []

    def spans(self, names: Sequence[str], widths: Sequence[int]) -> list[AdapterSpan]:
        """Tokens that have updates of some of these layers, whose outputs of these widths lie side by side."""
        ends = list(itertools.accumulate(widths))
        spans, start = [], 0
        for tokens, adapter in zip(self.groups.tokens, self._adapters, strict=True):
            found = [(end - width, end, adapter[name]) for name, width, end in zip(names, widths, ends, strict=True)
                     if adapter is not None and name in adapter]  # fmt: skip
            if found and tokens:
                updates = [update for *_, update in found]
                spans.append(
                    AdapterSpan(
                        start, start + tokens, [(begin, end) for begin, end, _ in found], updates[0].scale,
                        [update.down_RI for update in updates], [update.up_OR for update in updates],
                    )
                )  # fmt: skip
            start += tokens
        return spans


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
        return self._updated(out.flatten(0, -2), x.flatten(0, -2), [self], [out.shape[-1]]).view(out.shape)

    def joined(self, x_NI: torch.Tensor, layers: Sequence[_RoutedLinear]) -> torch.Tensor:
        """Outputs of several routed layers of one input, side by side (see `cpu.kernels.linears`)."""
        plain = [layer.base_layer for layer in layers]
        return self._updated(linears(x_NI, plain), x_NI, layers, [layer.weight.shape[0] for layer in layers])

    def _updated(
        self, out_NO: torch.Tensor, x_NI: torch.Tensor, layers: Sequence[_RoutedLinear], widths: Sequence[int]
    ) -> torch.Tensor:
        spans = self.__dict__["_router"].spans([layer._name for layer in layers], widths)
        if not spans:
            return out_NO
        factors = [factor for span in spans for factor in (*span.downs, *span.ups)]
        updated: torch.Tensor = _AddLowRank.apply(out_NO, x_NI, spans, *factors)
        return updated


class _AddLowRank(torch.autograd.Function):
    """out + scale x A^T B^T over the tokens of each span, each in products of its own."""

    @staticmethod
    def forward(
        ctx: Any, out_NO: torch.Tensor, x_NI: torch.Tensor, spans: list[AdapterSpan], *factors: torch.Tensor
    ) -> torch.Tensor:
        ctx.mark_dirty(out_NO)
        saved = add_low_rank(out_NO, x_NI, spans)
        ctx.save_for_backward(x_NI, *saved, *factors)
        ctx.count = len(saved)
        ctx.spans = [(span.start, span.stop, span.columns, span.scale) for span in spans]
        return out_NO

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_NO: torch.Tensor) -> tuple[Any, ...]:
        x_NI, *tensors = ctx.saved_tensors
        saved, factors, spans = tensors[: ctx.count], tensors[ctx.count :], []
        for start, stop, columns, scale in ctx.spans:
            count = len(columns)
            spans.append(AdapterSpan(start, stop, columns, scale, factors[:count], factors[count : 2 * count]))
            factors = factors[2 * count :]
        grad_x_NI, grads = low_rank_grads(grad_NO.contiguous(), x_NI, saved, spans, with_x=ctx.needs_input_grad[1])
        return grad_NO, grad_x_NI, None, *grads
