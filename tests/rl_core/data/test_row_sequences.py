"""Rows stored as bytes: equal to the originals, in less memory than their text takes."""

import random
import tracemalloc

import pytest

from rl_core.data.records import read_demonstrations, read_prompts
from rl_core.data.row_sequences import CompressedRows, select_rows

ROWS = [
    {"messages": [{"role": "user", "content": "é" * n}], "seed": 2**60 + n, "level": None}
    for n in range(4)
]


def test_rows_come_back_as_they_were_put_in():
    rows = CompressedRows(iter(ROWS))
    rows.append({"pair": ("a", 1.5)})
    assert list(rows) == [*ROWS, {"pair": ("a", 1.5)}] and len(rows) == 5
    assert (
        rows[-1] == {"pair": ("a", 1.5)}
        and rows[1:3] == ROWS[1:3]
        and rows == [*ROWS, {"pair": ("a", 1.5)}]
    )
    assert rows != ROWS and rows != [*ROWS, {}] and rows != 5
    with pytest.raises(IndexError):
        rows[5]
    rows[0]["level"] = "changed"  # changes a copy
    assert rows[0] == ROWS[0]


def test_rows_are_chosen_replaced_and_joined():
    rows = CompressedRows(ROWS)
    some = rows.select_rows([3, 1])
    some.replace_row(0, {"a": 1})
    assert list(some) == [{"a": 1}, ROWS[1]] and rows == ROWS
    some.extend_rows(rows)
    some.extend_rows([{"b": 2}])
    assert list(some) == [{"a": 1}, ROWS[1], *ROWS, {"b": 2}]
    assert select_rows(rows, [2]) == [ROWS[2]] and select_rows(ROWS, (0, 2)) == [ROWS[0], ROWS[2]]
    assert repr(CompressedRows([{"a": 1}])) == "KeptRows([{'a': 1}])"


def test_a_row_read_takes_less_than_its_text():
    draw = random.Random(0).choices
    data = [
        {name: "".join(draw("abcdefgh", k=500)) for name in ("prompt", "completion")}
        for _ in range(1000)
    ]
    tracemalloc.start()
    rows = read_demonstrations(data).rows
    bytes_per_row = tracemalloc.get_traced_memory()[0] / len(data)
    tracemalloc.stop()
    # 3 bits a character are 375; deflate needs a little more, the object 33; dictionaries and lists took 1,900
    assert 375 < bytes_per_row < 700 and len(rows) == 1000


def test_prompts_may_hold_what_has_no_bytes():
    def check_answer(answer: str) -> bool:
        return answer == "4"

    (row,) = read_prompts([{"prompt": "2+2?", "check": check_answer}]).rows
    assert row["check"] is check_answer
