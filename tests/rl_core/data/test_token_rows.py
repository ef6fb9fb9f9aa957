"""Token rows: sequences in compact form are restored unchanged."""

import pickle

import numpy as np
import pytest

from rl_core.data import training_sequences
from rl_core.data.training_sequences import TokenRows, build_token_chunk
from rl_core.errors import CorruptError

ROWS = [
    ([1, 70_000, 3], [False, True, True]),
    ([5, 6], [False, True]),
    ([7] * 4, [False, False, True, False]),
]


def test_rows_come_back_as_lists_of_the_same_values():
    rows = TokenRows.from_sequences(iter(ROWS))
    assert list(rows) == ROWS and len(rows) == 3 and rows[-1] == ROWS[2] and rows[:2] == ROWS[:2]
    assert all(type(value) is bool for value in rows[0][1]) and all(
        type(value) is int for value in rows[0][0]
    )
    assert rows.num_tokens == 9
    assert rows.num_bytes == 9 * 4 + 9 + 4 * 8 + 3 * (
        8 + 4
    )  # ids, masks, four offsets, row and prompt of each
    with pytest.raises(IndexError):
        rows[3]
    with pytest.raises(ValueError, match="2 token ids, but a loss mask of 1"):
        TokenRows.from_sequences([([1, 2], [True])])
    assert len(TokenRows()) == 0 and list(TokenRows()) == [] and TokenRows().num_rows == 0


def build_two_chunks():
    """Build rows 0, 2 (two sequences) and 3, in chunks of three sequences and one; row 1 was refused."""
    first = [(0, 1, *ROWS[0]), (2, 0, *ROWS[1]), (2, 2, *ROWS[2])]
    return TokenRows(
        [build_token_chunk(first), build_token_chunk([(3, 0, [8, 9, 9], [False, True, False])])]
    )


def test_sequences_of_rows_cut_and_joined():
    rows = build_two_chunks()
    assert (
        rows.rows.tolist() == [0, 2, 2, 3]
        and rows.row_starts.tolist() == [0, 1, 3]
        and rows.num_rows == 3
    )
    assert rows.lengths.tolist() == [3, 2, 4, 3] and rows.loss_tokens.tolist() == [2, 1, 1, 1]
    assert rows.find_sequence_indices([0, 1, 2]).tolist() == [
        0,
        1,
        2,
    ] and rows.find_sequence_indices([3, 2]).tolist() == [3, 1, 2]
    part = rows.select_rows([2, 3], max_tokens=2)
    assert list(part) == [ROWS[1], ([7, 7], [False, False]), ([8, 9], [False, True])]
    assert part.lengths.tolist() == [2, 2, 2] and part.loss_tokens.tolist() == [1, 0, 1]
    assert part.prompts.tolist() == [0, 2, 0] and part.num_tokens == 6
    assert list(part.select_sequences(np.array([2]), 9)) == [([8, 9], [False, True])]  # a cut stays
    both = part.join_rows(rows)
    assert list(both) == [*part, *rows] and both.lengths.tolist() == [2, 2, 2, 3, 2, 4, 3]


@pytest.mark.parametrize("mapped", [False, True])
def test_rows_travel_to_other_processes(tmp_path, mapped):
    rows = build_two_chunks()
    if mapped:
        with (tmp_path / "rows.arrow").open("wb") as file:
            training_sequences.write_token_table(file, rows._chunks)
        rows = training_sequences.read_token_table(tmp_path / "rows.arrow")
        assert (
            list(rows) == list(build_two_chunks()) and not rows.read_arrays(0)[0].flags.owndata
        )  # a view of the file
    part = rows.select_rows([2, 3], 3)
    for some in (rows, part, part.join_rows(rows)):
        sent = pickle.dumps(some)
        assert list(pickle.loads(sent)) == list(some)
    if mapped:
        assert b"rows.arrow" in pickle.dumps(part) and rows._chunks[
            0
        ].ids.tobytes() not in pickle.dumps(part)


def test_a_file_that_is_no_table(tmp_path):
    path = tmp_path / "rows.arrow"
    path.write_bytes(b"not Arrow")
    with pytest.raises(CorruptError, match=r"rows.arrow: cannot be read as Arrow"):
        training_sequences.read_token_table(path)
    with path.open("wb") as file:
        training_sequences.write_integer_column(file, np.arange(3))
    assert training_sequences.read_integer_column(path).tolist() == [0, 1, 2]
    with pytest.raises(CorruptError, match="has the columns"):
        training_sequences.read_token_table(path)
