"""Rows that are too long are refused, left out or cut, and repeated ones left out, as the settings say."""

from types import SimpleNamespace

import pytest

from rl_core.data.chat import ChatRenderer
from rl_core.data.pairs import build_row_sides
from rl_core.data.row_sequences import CompressedRows
from rl_core.data.token_cache import TokenCache
from rl_core.data.tokenising import TokenisationJob
from rl_core.data.tokenizer import train_tokenizer
from rl_core.data.training_sequences import build_training_sequences
from rl_core.errors import DataError, RecordsError
from rl_core.settings import DataSettings
from tasks.stages import prepare_data
from tasks.stages.prepare_data import LocatedRows, select_fitting_rows


@pytest.fixture(scope="module")
def renderer():
    return ChatRenderer(train_tokenizer(["abc"], 300))  # one token for each of the letters below


def row(prompt, answer):
    return {
        "messages": [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
    }


def select_rows(rows, renderer, context=100, **settings):
    """Rows left, and the summary. `<|user|> prompt <|end|> <|assistant|> answer <|end|>`: 4 tokens and the letters."""
    table = LocatedRows(
        CompressedRows(rows), "rows.jsonl", [("rows.jsonl", i + 1) for i in range(len(rows))]
    )
    stage, summary = SimpleNamespace(settings=DataSettings(**settings)), {}
    prepare_data._drop_repeats(
        stage, table, prepare_data._extract_demonstration_prompt, summary, "demonstrations"
    )
    tokens = TokenCache(None).load_or_tokenize(
        "", lambda: table.rows, renderer, TokenisationJob("demonstrations"), 0
    )
    fitting = select_fitting_rows(table, tokens, "demonstrations", context, stage.settings, summary)
    sequences = [
        s
        for r in table.rows
        for s in build_training_sequences(renderer, r["messages"], None, "all", r.get("max_tokens"))
    ]
    assert (
        list(fitting.tokens.select_sequences(fitting.sequence_indices, fitting.max_tokens))
        == sequences
    )
    assert len(table.rows) == len(table.row_locations)
    return table.rows, summary


def test_long_rows(renderer):
    rows = [row("x", "yz"), row("x", "y" * 20)]  # 7 and 25 tokens
    assert select_rows(rows, renderer)[0] == rows
    with pytest.raises(RecordsError, match=r"rows.jsonl:2: is 25 tokens long, max_tokens is 10"):
        select_rows(rows, renderer, max_tokens=10)
    with pytest.raises(RecordsError, match="the context holds 9"):
        select_rows(rows, renderer, context=9, max_tokens=10)
    left, summary = select_rows(rows, renderer, max_tokens=10, long_rows="drop")
    assert left == rows[:1] and summary == {
        "demonstrations_too_long": 1,
        "demonstrations_cut": 0,
        "demonstrations_tokens": 7,
    }
    left, summary = select_rows(rows, renderer, max_tokens=10, long_rows="cut")
    assert (
        left == [rows[0], {**rows[1], "max_tokens": 10}] and summary["demonstrations_tokens"] == 17
    )
    assert summary["demonstrations_cut"] == 1 and summary["demonstrations_too_long"] == 0


def test_a_cut_keeps_the_first_tokens_and_needs_one_with_loss(renderer):
    messages = row("x" * 5, "y" * 20)["messages"]
    ((ids, mask),) = build_training_sequences(renderer, messages)
    assert build_training_sequences(renderer, messages, max_tokens=10) == [(ids[:10], mask[:10])]
    assert sum(mask[:10]) == 2  # <|user|> 5 x <|end|> <|assistant|> are 8
    with pytest.raises(DataError, match="among the first 8 tokens"):
        build_training_sequences(renderer, messages, max_tokens=8)
    with pytest.raises(RecordsError, match="among the first 8 tokens"):
        select_rows(
            [row("x", "y"), row("x" * 5, "y" * 20)], renderer, max_tokens=8, long_rows="cut"
        )


def test_no_row_is_left(renderer):
    with pytest.raises(DataError, match="every row is longer than 5 tokens"):
        select_rows([row("x", "yz")], renderer, max_tokens=5, long_rows="drop")


def test_repeated_rows(renderer):
    rows = [row("x", "y"), row("X ", "z"), row("x", "y"), row("w", "y")]
    assert select_rows(rows, renderer)[0] == rows
    left, summary = select_rows(rows, renderer, deduplicate="rows")
    assert left == [rows[0], rows[1], rows[3]] and summary["demonstrations_repeats_left_out"] == 1
    left, summary = select_rows(rows, renderer, deduplicate="prompts")
    assert left == [rows[0], rows[3]] and summary["demonstrations_repeats_left_out"] == 2


def test_pairs_are_cut_as_well(renderer):
    pair = {
        "prompt": "x" * 3,
        "chosen": "y" * 6,
        "rejected": "yz",
    }  # <|user|> xxx <|end|> <|assistant|> are 6 tokens
    (chosen, _), (rejected, _) = build_row_sides({**pair, "max_tokens": 9}, renderer)
    whole = [side for side, _ in build_row_sides(pair, renderer)]
    assert (
        chosen.ids == whole[0].ids[:9]
        and chosen.loss_mask == [True] * 3
        and len(whole[0].ids) == 13
    )
    assert rejected == whole[1] and len(whole[1].ids) == 9  # short enough
    with pytest.raises(DataError, match="same in the tokens that are read"):
        build_row_sides({**pair, "max_tokens": 7}, renderer)
    with pytest.raises(DataError, match="among the first 6 tokens"):
        build_row_sides({**pair, "max_tokens": 6}, renderer)
