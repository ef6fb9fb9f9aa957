"""The gradient of one run: that of its adapters as one tensor, and that of anything else by name."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping

import numpy as np
import torch

__all__ = ["GradientLayout", "RunGradient", "added"]


class GradientLayout:
    """Places of parameters, one after the other, within a flat tensor."""

    def __init__(self, parameters: Mapping[str, torch.Tensor]) -> None:
        self.names = list(parameters)
        self.shapes = [parameter.shape for parameter in parameters.values()]
        sizes = [parameter.numel() for parameter in parameters.values()]
        self.places = [0, *itertools.accumulate(sizes)]
        self.size = self.places.pop()
        self.sizes = sizes
        self.distances = 4 * np.array(self.places, dtype=np.int64)  # bytes, of float32
        self.index = {name: number for number, name in enumerate(self.names)}


class RunGradient(Mapping[str, torch.Tensor]):
    """Gradient by the name of the parameter; views of the flat tensor."""

    def __init__(
        self, layout: GradientLayout, flat: torch.Tensor, missing: frozenset[str], loose: Mapping[str, torch.Tensor]
    ) -> None:
        """flat: float32, 0 at parameters that are `missing`: these have none. loose: those beside the layout."""
        self.layout, self.flat, self.missing, self.loose = layout, flat, missing, loose
        names = [name for name in layout.names if name not in missing] if missing else layout.names
        self.names = [*names, *loose] if loose else names

    def __getitem__(self, name: str) -> torch.Tensor:
        if name in self.loose:
            return self.loose[name]
        if name in self.missing:
            raise KeyError(name)
        index = self.layout.index[name]
        place = self.layout.places[index]
        return self.flat[place : place + self.layout.sizes[index]].view(self.layout.shapes[index])

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    @property
    def addresses(self) -> list[int]:
        """Of the gradients of `names`."""
        found: list[int] = (self.layout.distances + self.flat.data_ptr()).tolist()
        if self.missing:
            found = [place for place, name in zip(found, self.layout.names, strict=True) if name not in self.missing]
        return found + [part.data_ptr() for part in self.loose.values()]

    def apart(self) -> RunGradient:
        """The same in memory of its own: a part of a pass's tensor would keep the gradients of all its runs."""
        if self.flat.untyped_storage().nbytes() == self.flat.nbytes:
            return self
        return RunGradient(self.layout, self.flat.clone(), self.missing, self.loose)


def added(sum_: Mapping[str, torch.Tensor], part: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    """The sum of two gradients of a run; what only one of them has is that one's."""
    if not sum_ or not part:
        return sum_ or part
    if isinstance(sum_, RunGradient) and isinstance(part, RunGradient):
        loose = added(sum_.loose, part.loose)
        return RunGradient(sum_.layout, sum_.flat + part.flat, sum_.missing & part.missing, loose)
    return {
        **sum_, **{name: sum_[name] + own if name in sum_ else own for name, own in part.items()}
    }  # fmt: skip
