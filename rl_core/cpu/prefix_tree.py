r"""Prefix trees of token rows: what rows have in common at their beginning is computed once.

Rows of one training step often begin alike: samples of one prompt, both sides of a preference pair, turns of an
episode that send the whole conversation again, branches of an agent's conversation. A causal model's state at a token
depends only on this token and the ones before it, so rows that begin alike have the same states up to where they
differ. The rows of a micro-batch are therefore a tree (trie) with one node for each distinct prefix:

    row 0   A B C D            A - B - C - D
    row 1   A B C E F    ->             \
    row 2   A B                          E - F        6 nodes for 11 tokens

- Embedding, norms, linear layers and MLP see each node once instead of every token of a padded [B, S] batch.
- Attention lets a node see itself and its ancestors. A row is the list of its nodes from the root; it computes queries
  only for its last nodes, those that no other row owns (`rl_core.cpu.attention_kernel`).
- The output head sees each state once, with the tokens that follow it in some row as targets
  (`rl_core.models.logprobs`).
- A node's gradient is the sum over the rows that pass through it, always in the same order.

Losses, log-probabilities and gradients equal those of separate rows up to rounding. Padding-free batches (TRL's
`padding_free`, torch's variable-length attention) save the padding; a tree also saves the repeated tokens.

`build_prefix_tree` finds the nodes of one micro-batch. `plan_tree_batches` splits the rows of a step into micro-batches
by their nodes, so that rows that begin alike are in the same one. `capabilities.check_prefix_sharing` decides which
models may use it.

T tokens of all rows, N nodes, R repeated tokens, B rows, S tokens of a padded row.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

MIN_SHARED_SHARE = 0.05  # sharing fewer tokens than this costs about what it saves
# A further micro-batch takes as long as this many tokens, because it adds to the gradient of every weight once more
# (3.2M parameters, `tests/benchmarks/results/speed.md`).
_MICRO_BATCH_COST = 96
_WINDOW_TOKENS = 2**24  # tokens that are sorted at a time: 64 MiB


@dataclass(slots=True)
class PrefixTree:
    """Nodes of the real tokens of some rows, which lie end to end, row by row."""

    nodes_T: torch.Tensor  # int64, node in 0..N-1 of each token
    # int64, ascending: the token that owns each node; the owned tokens of a row are its last ones
    owners_N: torch.Tensor
    repeated_R: torch.Tensor  # int64, the T - N tokens that own no node

    @property
    def num_nodes(self) -> int:
        """Number of distinct prefixes."""
        return len(self.owners_N)


def encode_row(ids: Sequence[int]) -> bytes:
    """Encode token ids, 4 bytes each: common beginnings of rows are common beginnings of their bytes."""
    return np.asarray(ids, dtype=np.int32).tobytes()


def build_prefix_tree(
    ids_BS: torch.Tensor, lengths: Sequence[int], *, min_share: float = 0.0
) -> PrefixTree | None:
    """Build the tree of some rows; return None if it would not save more than `min_share` of all tokens.

    Args:
        ids_BS: right-padded token ids on the CPU.
        lengths: real tokens of each row.
    """
    if len(lengths) < 2:
        return None
    ids = ids_BS.to(torch.int32).contiguous().numpy()
    rows = [ids[row, :length].tobytes() for row, length in enumerate(lengths)]
    order, common = _sort_rows(rows)
    if sum(common) <= min_share * sum(lengths) or not sum(common):
        return None
    starts = np.cumsum([0, *lengths[:-1]]).tolist()
    owners_T = torch.arange(sum(lengths))  # token that owns the node of each token
    for (before, row), count in zip(pairwise(order), common[1:], strict=True):
        first, other = starts[row], starts[before]
        owners_T[first : first + count] = owners_T[other : other + count]
    is_owner_T = owners_T == torch.arange(len(owners_T))
    numbers_T = is_owner_T.cumsum(0) - 1
    return PrefixTree(
        numbers_T[owners_T], is_owner_T.nonzero().squeeze(1), (~is_owner_T).nonzero().squeeze(1)
    )


def build_separate_trees(
    groups: Sequence[int], ids_BS: torch.Tensor, lengths: Sequence[int], *, min_share: float = 0.0
) -> PrefixTree | None:
    """Build trees of groups of rows as one; the part of a group depends on its own rows alone.

    Args:
        groups: number of consecutive rows of each group.
        ids_BS, lengths, min_share: as in `build_prefix_tree`; `min_share` applies to each group.
    """
    if len(groups) < 2:
        return build_prefix_tree(ids_BS, lengths, min_share=min_share)
    parts = []
    row = start = count = 0
    is_shared = False
    for rows in groups:
        total = sum(lengths[row : row + rows])
        tree = build_prefix_tree(
            ids_BS[row : row + rows], lengths[row : row + rows], min_share=min_share
        )
        is_shared |= tree is not None
        if tree is None:
            tokens = torch.arange(total)
            tree = PrefixTree(tokens, tokens, tokens[:0])
        parts.append((tree.nodes_T + count, tree.owners_N + start, tree.repeated_R + start))
        row, start, count = row + rows, start + total, count + tree.num_nodes
    if not is_shared:
        return None
    return PrefixTree(*(torch.cat(part) for part in zip(*parts, strict=True)))


def _sort_rows(rows: Sequence[bytes]) -> tuple[list[int], list[int]]:
    """Return the order in which each row follows the one that it shares most with, and how many tokens it shares."""
    order = sorted(range(len(rows)), key=rows.__getitem__)
    common = [_count_common_tokens(rows[before], rows[row]) for before, row in pairwise(order)]
    return order, [0, *common]


def _count_common_tokens(first: bytes, second: bytes) -> int:
    count = min(len(first), len(second)) // 4
    if not count:
        return 0
    differs = np.frombuffer(first, np.int32, count) != np.frombuffer(second, np.int32, count)
    return int(differs.argmax()) if differs.any() else count


def count_nodes(rows: Sequence[bytes]) -> int:
    """Count the distinct prefixes of encoded rows."""
    return sum(map(len, rows)) // 4 - sum(_sort_rows(rows)[1])


def plan_tree_batches(units: Iterable[Sequence[bytes]], max_tokens: int) -> list[list[int]] | None:
    """Group units of rows into micro-batches of at most `max_tokens` nodes; a larger unit gets its own.

    Units are sorted by their first rows, so neighbours are branches of one tree, and each micro-batch holds consecutive
    units. It ends where the next one repeats the fewest tokens, unless that leaves too much of the budget unused.

    Args:
        units: encoded rows (`encode_row`) that stay together: a single row, both sides of a pair, the contexts of an
            episode. More than 16.8 million tokens are planned in consecutive parts.
    Returns: indices of the units in each micro-batch, ascending, the largest tree first; None if the trees would save
        at most `MIN_SHARED_SHARE` of all tokens.
    """
    groups: list[tuple[int, list[int]]] = []
    num_tokens = 0
    for first, window in _split_into_windows(units):
        num_tokens += sum(len(row) // 4 for unit in window for row in unit)
        groups += [
            (nodes, sorted(first + index for index in members))
            for nodes, members in _plan_window(window, max_tokens)
        ]
    saved = num_tokens - sum(nodes for nodes, _ in groups)
    if saved <= MIN_SHARED_SHARE * num_tokens:
        return None
    groups.sort(key=lambda group: (-group[0], group[1][0]))
    return [members for _, members in groups]


def _split_into_windows(
    units: Iterable[Sequence[bytes]],
) -> Iterator[tuple[int, list[Sequence[bytes]]]]:
    """Yield consecutive units of at most `_WINDOW_TOKENS` tokens (or one unit), with the index of the first."""
    window: list[Sequence[bytes]] = []
    num_bytes = first = 0
    for index, unit in enumerate(units):
        size = sum(map(len, unit))
        if window and num_bytes + size > 4 * _WINDOW_TOKENS:
            yield first, window
            window, num_bytes, first = [], 0, index
        window.append(unit)
        num_bytes += size
    if window:
        yield first, window


def _plan_window(
    units: Sequence[Sequence[bytes]], max_tokens: int
) -> Iterator[tuple[int, list[int]]]:
    """Yield the nodes (at most so many) and the units of each micro-batch."""
    order, shared = _sort_rows([unit[0] for unit in units])
    nodes = [count_nodes(units[index]) for index in order]
    begin = 0
    while begin < len(order):
        used, end, best = nodes[begin], begin + 1, (math.inf, 0, 0)
        while end < len(order):
            cost = shared[end] + _MICRO_BATCH_COST * (1 - used / max_tokens)
            if cost <= best[0]:
                best = (cost, end, used)
            added = nodes[end] - shared[end]
            if used + added > max_tokens:
                break
            used, end = used + added, end + 1
        else:
            best = (0.0, end, used)
        yield best[2], order[begin : best[1]]
        begin = best[1]
