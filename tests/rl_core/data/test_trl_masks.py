"""Token ids and loss tokens of every format, compared with those of TRL 1.16.0 for the same rows.

Recorded by `tests/benchmarks/format_table.py record`, which gives the reason for each intended difference.
"""

import pytest
from benchmarks import format_table
from helpers.format_files import (
    FILES,
    list_loss_positions,
    read,
    read_recorded_masks,
    sides_of,
    small_renderer,
)

from rl_core.data.pairs import build_pair
from rl_core.data.records import read_preferences


@pytest.fixture(scope="module")
def renderer():
    return small_renderer()


def encode_rows(file, renderer):
    return [sides_of(row, renderer) for row in read(file.path, file.kind).rows]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_tokens_and_loss_tokens_are_trl_s_or_differ_for_a_reason(renderer, file):
    theirs = read_recorded_masks()["files"][file.name]
    differences = {
        format_table.describe_difference(a, b)
        for a, b in zip(encode_rows(file, renderer), theirs, strict=True)
    }
    if file.name in format_table.REASONS:
        assert differences == {format_table.REASONS[file.name][0]}
    else:
        assert all(not word or word.startswith("not taken by TRL: ") for word in differences)


def test_most_formats_that_trl_takes_are_equal():
    equal = [
        file.name
        for file, _, differences, _ in format_table.read_format_rows()
        if not any(differences)
    ]
    assert {
        "messages",
        "messages_tools",
        "conversational",
        "pairs_conversational",
        "implicit_prompt",
    } <= set(equal)


def test_text_differs_by_the_first_label_alone(renderer):
    file = next(file for file in FILES if file.name == "text")
    for ((ids, mask),), theirs in zip(
        encode_rows(file, renderer), read_recorded_masks()["files"]["text"], strict=True
    ):
        (side,) = theirs["sides"]
        assert (ids, [0, *list_loss_positions(mask)]) == (side["ids"], side["loss"])


def test_the_table_of_the_document_is_that_of_this_version():
    assert format_table.PAGE.read_text() == format_table.render_page(), (
        "python tests/benchmarks/format_table.py write"
    )


def test_a_side_of_several_turns_has_loss_on_the_assistants_turns_alone(renderer):
    """Check a side with a user's turn: TRL trains on it, we only read it. Tokens are those of the conversation."""
    user, answer = {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}
    row = {"prompt": [user], "chosen": [answer, user, answer], "rejected": [answer]}
    pair = build_pair(read_preferences([row]).rows[0], renderer)
    ids, mask = renderer.encode_conversation([user, answer, user, answer])
    assert (
        pair.chosen.ids == ids
        and [False] * len(pair.chosen.prompt_ids) + pair.chosen.loss_mask == mask
    )
    assert sum(mask) == 4  # two answers of one token each, plus their ends of turn
    assert pair.rejected.ids == ids[: len(pair.rejected.ids)] and pair.rejected.loss_mask == [
        True,
        True,
    ]
