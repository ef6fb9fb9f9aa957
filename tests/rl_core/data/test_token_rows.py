"""Sequences in compact form come back as they were."""

import pytest

from rl_core.data.token_rows import TokenRows

ROWS = [([1, 70_000, 3], [False, True, True]), ([5, 6], [False, True]), ([7] * 4, [False, False, True, False])]


def test_rows_come_back_as_lists_of_the_same_values():
    rows = TokenRows(iter(ROWS))
    assert list(rows) == ROWS and len(rows) == 3 and rows[-1] == ROWS[2] and rows[:2] == ROWS[:2]
    assert all(type(value) is bool for value in rows[0][1]) and all(type(value) is int for value in rows[0][0])
    assert rows.num_tokens == 9 and rows.num_bytes == 9 * 4 + 9 + 4 * 8  # ids, masks, four places
    with pytest.raises(IndexError):
        rows[3]
    with pytest.raises(ValueError, match="2 token ids, but a loss mask of 1"):
        rows.append([1, 2], [True])
    assert len(TokenRows()) == 0 and list(TokenRows()) == []
