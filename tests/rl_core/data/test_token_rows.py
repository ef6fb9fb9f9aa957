"""Sequences in compact form come back as they were."""

import pickle

import numpy as np
import pytest

from rl_core.data import token_tables
from rl_core.data.token_rows import TokenRows, chunk_of
from rl_core.errors import CorruptError

ROWS = [([1, 70_000, 3], [False, True, True]), ([5, 6], [False, True]), ([7] * 4, [False, False, True, False])]


def test_rows_come_back_as_lists_of_the_same_values():
    rows = TokenRows.of(iter(ROWS))
    assert list(rows) == ROWS and len(rows) == 3 and rows[-1] == ROWS[2] and rows[:2] == ROWS[:2]
    assert all(type(value) is bool for value in rows[0][1]) and all(type(value) is int for value in rows[0][0])
    assert rows.num_tokens == 9
    assert rows.num_bytes == 9 * 4 + 9 + 4 * 8 + 3 * (8 + 4)  # ids, masks, four places, row and prompt of each
    with pytest.raises(IndexError):
        rows[3]
    with pytest.raises(ValueError, match="2 token ids, but a loss mask of 1"):
        TokenRows.of([([1, 2], [True])])
    assert len(TokenRows()) == 0 and list(TokenRows()) == [] and TokenRows().num_rows == 0


def two_chunks():
    """Rows 0, 2 (two sequences) and 3, in chunks of three sequences and one; row 1 was refused."""
    first = [(0, 1, *ROWS[0]), (2, 0, *ROWS[1]), (2, 2, *ROWS[2])]
    return TokenRows([chunk_of(first), chunk_of([(3, 0, [8, 9, 9], [False, True, False])])])


def test_sequences_of_rows_cut_and_joined():
    rows = two_chunks()
    assert rows.rows.tolist() == [0, 2, 2, 3] and rows.row_starts.tolist() == [0, 1, 3] and rows.num_rows == 3
    assert rows.lengths.tolist() == [3, 2, 4, 3] and rows.loss_tokens.tolist() == [2, 1, 1, 1]
    assert rows.places_of([0, 1, 2]).tolist() == [0, 1, 2] and rows.places_of([3, 2]).tolist() == [3, 1, 2]
    part = rows.of_rows([2, 3], max_tokens=2)
    assert list(part) == [ROWS[1], ([7, 7], [False, False]), ([8, 9], [False, True])]
    assert part.lengths.tolist() == [2, 2, 2] and part.loss_tokens.tolist() == [1, 0, 1]
    assert part.prompts.tolist() == [0, 2, 0] and part.num_tokens == 6
    assert list(part.select(np.array([2]), 9)) == [([8, 9], [False, True])]  # a cut stays
    both = part.joined(rows)
    assert list(both) == [*part, *rows] and both.lengths.tolist() == [2, 2, 2, 3, 2, 4, 3]


@pytest.mark.parametrize("mapped", [False, True])
def test_rows_travel_to_other_processes(tmp_path, mapped):
    rows = two_chunks()
    if mapped:
        with (tmp_path / "rows.arrow").open("wb") as file:
            token_tables.write_table(file, rows._chunks)
        rows = token_tables.read_table(tmp_path / "rows.arrow")
        assert list(rows) == list(two_chunks()) and not rows.arrays(0)[0].flags.owndata  # a view of the file
    part = rows.of_rows([2, 3], 3)
    for some in (rows, part, part.joined(rows)):
        sent = pickle.dumps(some)
        assert list(pickle.loads(sent)) == list(some)
    if mapped:
        assert b"rows.arrow" in pickle.dumps(part) and rows._chunks[0].ids.tobytes() not in pickle.dumps(part)


def test_a_file_that_is_no_table(tmp_path):
    path = tmp_path / "rows.arrow"
    path.write_bytes(b"not Arrow")
    with pytest.raises(CorruptError, match=r"rows.arrow: cannot be read as Arrow"):
        token_tables.read_table(path)
    with path.open("wb") as file:
        token_tables.write_column(file, np.arange(3))
    assert token_tables.read_column(path).tolist() == [0, 1, 2]
    with pytest.raises(CorruptError, match="has the columns"):
        token_tables.read_table(path)
