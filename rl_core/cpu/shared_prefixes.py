"""Common prefixes of a batch's rows: prompts of a group, of a pair, of a whole task.

A causal model's states at a token depend on it and on those before it, so rows with a common prefix share the states of
that prefix, which need computing only once.

B rows, S sequence, T real tokens, N tokens of which no two have the same beginning.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

__all__ = ["RowGroups", "SharedPrefixes", "prefixes_within", "shared_prefixes"]


@dataclass(slots=True)
class SharedPrefixes:
    """Equivalence of real tokens, laid end to end row by row: the same token with the same tokens before it."""

    unique_T: torch.Tensor  # int64, index in 0..N-1 of what each real token is
    first_N: torch.Tensor  # int64, ascending: one real token for each of them
    repeated_R: torch.Tensor  # int64, the T - N real tokens that are in no `first_N`


@dataclass(slots=True)
class RowGroups:
    """Consecutive rows of a batch that go through other adapters than the rest; no state is shared between groups."""

    rows: list[int]  # rows of each group, in order
    tokens: list[int] = field(default_factory=list)  # of each group, as layers get them now; kept by the forward pass


def shared_prefixes(ids_BS: torch.Tensor, lengths: Sequence[int], *, least: float = 0.0) -> SharedPrefixes | None:
    """Common prefixes; None where fewer than the share `least` of all real tokens would be saved, or none.

    Args:
        ids_BS: right-padded token ids on the CPU. lengths: real tokens of each row.
    """
    if len(lengths) < 2:
        return None
    ids_BS = ids_BS.contiguous()
    # Rows of bytes in order: those that begin alike stand together, and each shares most with its neighbour.
    order = sorted(range(len(lengths)), key=lambda row: ids_BS[row, : lengths[row]].numpy().tobytes())
    before, after = ids_BS[order[:-1]], ids_BS[order[1:]]
    lengths_B = torch.tensor(lengths)
    limits = torch.minimum(lengths_B[order[:-1]], lengths_B[order[1:]])
    common = (before == after).to(torch.int64).cumprod(1).sum(1).minimum(limits).tolist()
    if sum(common) <= least * sum(lengths) or not sum(common):
        return None
    starts = [0] * len(lengths)
    for row in range(1, len(lengths)):
        starts[row] = starts[row - 1] + lengths[row - 1]
    origins_T = torch.arange(sum(lengths))  # a real token that stands for each
    for place, count in enumerate(common, start=1):
        here, there = starts[order[place]], starts[order[place - 1]]
        origins_T[here : here + count] = origins_T[there : there + count]
    is_first_T = origins_T == torch.arange(len(origins_T))
    numbers_T = is_first_T.cumsum(0) - 1
    return SharedPrefixes(numbers_T[origins_T], is_first_T.nonzero().squeeze(1), (~is_first_T).nonzero().squeeze(1))


def prefixes_within(
    groups: Sequence[int], ids_BS: torch.Tensor, lengths: Sequence[int], *, least: float = 0.0
) -> SharedPrefixes | None:
    """Common prefixes of rows of one group; what one group shares depends on its own rows alone.

    Args:
        groups: rows of each group, consecutive. others: as `shared_prefixes`, `least` being a share of each group.
    """
    if len(groups) < 2:
        return shared_prefixes(ids_BS, lengths, least=least)
    parts, row, start, count, found = [], 0, 0, 0, False
    for rows in groups:
        total = sum(lengths[row : row + rows])
        shared = shared_prefixes(ids_BS[row : row + rows], lengths[row : row + rows], least=least)
        found |= shared is not None
        if shared is None:
            every = torch.arange(total)
            shared = SharedPrefixes(every, every, every[:0])
        parts.append(SharedPrefixes(shared.unique_T + count, shared.first_N + start, shared.repeated_R + start))
        row, start, count = row + rows, start + total, count + len(shared.first_N)
    if not found:
        return None
    return SharedPrefixes(*(torch.cat(part) for part in zip(*map(_fields, parts), strict=True)))


def _fields(shared: SharedPrefixes) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return shared.unique_T, shared.first_N, shared.repeated_R
