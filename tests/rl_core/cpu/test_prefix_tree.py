"""Prefix trees: nodes of rows by hand and against sets of prefixes, and micro-batches planned by their nodes."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from rl_core.cpu import prefix_tree
from rl_core.cpu.prefix_tree import (
    build_prefix_tree,
    build_separate_trees,
    count_nodes,
    encode_row,
    plan_tree_batches,
)
from rl_core.data.batches import plan_micro_batches, plan_shared_batches
from rl_core.errors import DataError
from rl_core.rollouts.batching import TrainRow, build_batches

ROWS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=2, max_size=9)


def pad(rows) -> torch.Tensor:
    return nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True)


def list_prefixes(rows) -> list[tuple[int, ...]]:
    """List each token of the rows as the prefix that ends with it."""
    return [tuple(row[: end + 1]) for row in rows for end in range(len(row))]


def encode(units):
    return [[encode_row(row) for row in unit] for unit in units]


def test_the_nodes_of_the_example_worked_by_hand():
    """A B C D, A B C E F and A B have 6 nodes; the row that is sorted first owns what it shares."""
    tree = build_prefix_tree(
        torch.tensor([[1, 2, 3, 4, 0], [1, 2, 3, 5, 6], [1, 2, 0, 0, 0]]), [4, 5, 2]
    )
    assert tree.num_nodes == 6
    # tokens 0..3, 4..8, 9..10; [1, 2] is sorted first, then [1, 2, 3, 4]
    assert tree.owners_N.tolist() == [2, 3, 7, 8, 9, 10]
    assert tree.nodes_T.tolist() == [4, 5, 0, 1, 4, 5, 0, 2, 3, 4, 5]
    assert tree.repeated_R.tolist() == [0, 1, 4, 5, 6]


@pytest.mark.parametrize(
    ("rows", "nodes"),
    [
        ([[1, 2, 3]] * 4, 3),  # identical rows
        ([[1, 2, 3], [1, 2], [1]], 3),  # a row is the beginning of another
        ([[7], [7, 1], [7, 2], [7, 3]], 4),  # branches of one token
        ([[300, 1], [300, 1, 256], [44, 300]], 5),  # ids of several bytes
    ],
)
def test_degenerate_trees(rows, nodes):
    tree = build_prefix_tree(pad(rows), list(map(len, rows)))
    assert tree.num_nodes == nodes == count_nodes([encode_row(row) for row in rows])


def test_without_a_common_beginning_there_is_no_tree():
    assert build_prefix_tree(pad([[1, 2], [2, 1]]), [2, 2]) is None
    assert build_prefix_tree(pad([[1, 2]]), [2]) is None
    # padding is not part of a prefix
    assert build_prefix_tree(torch.tensor([[0, 0, 0], [1, 0, 0]]), [2, 3]) is None
    rows = pad([[1, 2, 3, 4], [1, 5, 6, 7]])
    assert build_prefix_tree(rows, [4, 4], min_share=1 / 8) is None
    assert build_prefix_tree(rows, [4, 4], min_share=0.12).num_nodes == 7


@settings(max_examples=80, deadline=None)
@given(ROWS)
def test_every_distinct_prefix_is_one_node(rows):
    prefixes = list_prefixes(rows)
    tree = build_prefix_tree(pad(rows), list(map(len, rows)))
    assert count_nodes([encode_row(row) for row in rows]) == len(set(prefixes))
    if len(set(prefixes)) == len(prefixes):
        assert tree is None
        return
    owned, repeated = tree.owners_N.tolist(), tree.repeated_R.tolist()
    assert [prefixes[owned[node]] for node in tree.nodes_T.tolist()] == prefixes
    assert tree.num_nodes == len(set(prefixes)) and owned == sorted(owned)
    assert sorted(owned + repeated) == list(range(len(prefixes)))
    ends = list(itertools.accumulate(map(len, rows)))
    for row, end in zip(rows, ends, strict=True):  # the kernel computes the last queries of a row
        is_owned = [token in owned for token in range(end - len(row), end)]
        assert is_owned == sorted(is_owned)


def test_trees_of_groups_are_separate():
    rows = pad([[1, 2], [1, 2], [1, 2], [1, 3]])
    tree = build_separate_trees([2, 2], rows, [2] * 4)
    assert tree.num_nodes == 5 and tree.nodes_T.tolist() == [0, 1, 0, 1, 2, 3, 2, 4]
    assert build_separate_trees([1, 1, 1, 1], rows, [2] * 4) is None


def build_branches(prompt, *branches):
    return [[[*prompt, *branch]] for branch in branches]


def test_a_micro_batch_ends_where_little_is_repeated():
    first = build_branches([1] * 100, [2] * 4, [3] * 4, [4] * 4)  # 112 nodes
    second = build_branches([5] * 100, [2] * 4, [3] * 4)  # 108 nodes
    units = encode([second[0], first[2], first[0], second[1], first[1]])
    assert plan_tree_batches(units, 220) == [[0, 1, 2, 3, 4]]
    # 216 tokens would hold one branch of the second tree as well, but 100 tokens would be computed twice
    assert plan_tree_batches(units, 216) == [[1, 2, 4], [0, 3]]
    # a tree above the budget is cut: 108 nodes, then 104
    assert plan_tree_batches(encode(first), 108) == [[0, 1], [2]]
    assert plan_tree_batches(encode(first), 5) is None  # each stands alone, so nothing is shared
    assert plan_tree_batches([], 5) is None


def test_rows_that_share_little_are_planned_by_their_lengths():
    rows = [[index, *range(3, 3 + length)] for index, length in enumerate((8, 5, 5, 2))]
    lengths = list(map(len, rows))
    units = encode([[row] for row in rows])
    assert plan_shared_batches(lengths, 12, units) == plan_micro_batches(lengths, 12)
    with pytest.raises(DataError):
        plan_shared_batches([0], 12, encode([[[]]]))


def test_units_stay_together_in_the_order_of_their_lengths():
    """Contexts of an episode, and pairs, are one unit; a micro-batch holds the longest row first."""
    turns = [[1, 2], [1, 2, 3, 4], [1, 2, 3, 4, 5, 6]]
    assert count_nodes([encode_row(row) for row in turns]) == 6
    other = [[1, 2, 8, 8, 8, 8, 8], [1, 2, 9]]  # 8 nodes, 2 of them as above
    units = encode([turns, other])
    assert plan_tree_batches(units, 12) == [[0, 1]]
    assert plan_tree_batches(units, 11) == [[1], [0]]  # the larger tree first
    assert plan_shared_batches([6, 7], 12, units) == [[1, 0]]


def test_many_tokens_are_planned_in_parts(monkeypatch):
    units = encode(build_branches([1, 1, 1], [2], [3], [4], [5]))
    assert plan_tree_batches(units, 100) == [[0, 1, 2, 3]]
    monkeypatch.setattr(prefix_tree, "_WINDOW_TOKENS", 8)
    assert plan_tree_batches(units, 100) == [[0, 1], [2, 3]]


@settings(max_examples=80, deadline=None)
@given(st.lists(ROWS, min_size=1, max_size=8), st.integers(1, 30))
def test_every_unit_is_planned_once_within_the_budget(units, budget):
    encoded = encode(units)
    groups = plan_tree_batches(iter(encoded), budget)
    assert groups == plan_tree_batches(encoded, budget)
    if groups is None:
        return
    assert sorted(index for group in groups for index in group) == list(range(len(units)))
    nodes = [count_nodes([row for index in group for row in encoded[index]]) for group in groups]
    for group, count in zip(groups, nodes, strict=True):
        assert count <= budget or len(group) == 1
    assert sum(nodes) <= sum(count_nodes(unit) for unit in encoded)


@settings(max_examples=80, deadline=None)
@given(ROWS)
def test_one_micro_batch_is_planned_where_it_saves_enough(rows):
    tokens, nodes = sum(map(len, rows)), len(set(list_prefixes(rows)))
    groups = plan_tree_batches(encode([[row] for row in rows]), tokens)
    saves_enough = tokens - nodes > prefix_tree.MIN_SHARED_SHARE * tokens
    assert groups == ([list(range(len(rows)))] if saves_enough else None)


def test_rows_of_one_tree_are_in_one_batch():
    """Four turns of two episodes; sorted by length, turns of one episode are apart."""
    rows = []
    for episode in (1, 2):
        history = [episode] * 10
        for turn in range(4):
            rows.append(TrainRow(list(history), [7, turn], [True] * 2))
            history = [*history, 7, turn, 8, 8, 8]
    plain = build_batches(rows, 60, 0)
    shared = build_batches(rows, 60, 0, shares_prefixes=True)
    assert [sorted(batch.rows) for batch in plain] == [[3, 7], [2, 6], [0, 1, 5], [4]]
    assert [batch.rows for batch in shared] == [[3, 7, 2, 6, 1, 5, 0, 4]]
    small = build_batches(rows, 30, 0, shares_prefixes=True)
    assert [batch.rows for batch in small] == [[3, 2, 1, 0], [7, 6, 5, 4]]
    assert small[0].input_ids_BS.shape == (4, 27)


def test_contexts_of_an_episode_count_once():
    row = TrainRow([1, 2], [3, 4, 1, 2, 3, 4, 5, 6], [True] * 8, context_starts=[2])
    assert [len(context) // 4 for context in row.encode_contexts()] == [4, 6]
    rows = [row, TrainRow([9], [9], [True])]
    (batch,) = build_batches(rows, 8, 0, shares_prefixes=True)
    assert batch.rows == [0, 1] and len(build_batches(rows, 8, 0)) == 2
