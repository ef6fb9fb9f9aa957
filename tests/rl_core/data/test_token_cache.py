"""Token cache: texts are tokenised once; what is stored on disk, under which key, and how damage is handled."""

import hashlib
import logging
import shutil

import numpy as np
import pytest
import torch
from helpers.chat_templates import HERMES, OPENS_AND_STRIPS, family
from transformers import AutoTokenizer

from rl_core.data import token_cache, tokenising
from rl_core.data.chat import ChatRenderer
from rl_core.data.pairs import build_row_sides
from rl_core.data.token_cache import TABLE_FILE, TokenCache, compute_rows_digest
from rl_core.data.tokenising import CHUNK_ROWS, TokenisationJob, choose_num_processes, tokenize_rows
from rl_core.data.training_sequences import build_training_sequences
from rl_core.processes.process_pool import ConnectedChild
from rl_core.settings import ModelSettings

SFT, DPO = TokenisationJob("demonstrations"), TokenisationJob("preferences")


def make_conversation(*texts):
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[n % 2], "content": text} for n, text in enumerate(texts)]}


NO_LOSS = "no assistant message carries loss: all of them have weight 0"
ROWS = [
    make_conversation("red?", "blue"),
    make_conversation("scan 1", "row", "scan 2", "cell 2"),
    make_conversation("u", "<think>a</think>b", "v", "c"),
]
PAIRS = [
    {"prompt": "red?", "chosen": "blue", "rejected": "the cell"},
    {"prompt": "1", "completion": "row 1", "label": True},
]


@pytest.fixture(scope="module")
def renderer():
    return ChatRenderer(family(HERMES))


def fail_if_called():
    raise AssertionError("tokenised again")


def tokenize_test_rows(cache, renderer, rows=ROWS, job=SFT):
    return cache.load_or_tokenize(compute_rows_digest(rows), lambda: rows, renderer, job, 0)


@pytest.mark.parametrize(("history_thoughts", "sequences"), [("keep", 3), ("template", 5)])
def test_rows_are_tokenised_as_one_by_one_and_once(tmp_path, history_thoughts, sequences):
    renderer = ChatRenderer(
        family(OPENS_AND_STRIPS), ModelSettings(history_thoughts=history_thoughts)
    )
    tokens = tokenize_test_rows(TokenCache(tmp_path), renderer)
    expected = [
        sequence for row in ROWS for sequence in build_training_sequences(renderer, row["messages"])
    ]
    assert list(tokens.rows) == expected and len(expected) == sequences
    assert tokens.compute_longest(3).tolist()[:1] == [len(expected[0][0])] and not tokens.refused
    cached = TokenCache(tmp_path).load_or_tokenize(
        compute_rows_digest(ROWS), fail_if_called, renderer, SFT, 0
    )
    assert list(cached.rows) == expected and cached.rows.rows.tolist() == tokens.rows.rows.tolist()
    assert (
        list(TokenCache(None).load_or_tokenize("", lambda: ROWS, renderer, SFT, 0).rows) == expected
    )  # no folder


def test_sides_of_preferences_and_labelled_completions(tmp_path, renderer):
    tokens = tokenize_test_rows(TokenCache(tmp_path), renderer, PAIRS, DPO)
    sides = [side for row in PAIRS for side, _ in build_row_sides(row, renderer)]
    assert [ids for ids, _ in tokens.rows] == [side.ids for side in sides] and len(sides) == 3
    assert tokens.rows.prompts.tolist() == [len(side.prompt_ids) for side in sides]
    assert [mask for _, mask in tokens.rows] == [
        [False] * len(s.prompt_ids) + s.loss_mask for s in sides
    ]


def test_refused_rows_are_stored_with_their_reason(tmp_path, renderer):
    rows = [ROWS[0], {"messages": [{"role": "user", "content": "alone"}]}, ROWS[1]]
    for cache in (TokenCache(tmp_path), TokenCache(tmp_path)):
        tokens = tokenize_test_rows(cache, renderer, rows)
        assert tokens.refused == [(1, NO_LOSS)]
        assert tokens.rows.rows.tolist() == [0, 2] and tokens.compute_longest(3)[1] == 0
    longest = int(tokens.compute_longest(3)[2])
    assert tokens.list_refusal_reasons(3, longest - 1, "no more")[1:] == [
        NO_LOSS,
        f"is {longest} tokens long, no more",
    ]


def test_whatever_decides_the_ids_is_another_entry(tmp_path, renderer):
    cache = TokenCache(tmp_path)
    others = [
        ("rows", renderer, SFT),
        ("other rows", renderer, SFT),
        ("rows", renderer, DPO),
        ("rows", renderer, TokenisationJob("demonstrations", "last")),
        ("rows", ChatRenderer(family(OPENS_AND_STRIPS)), SFT),
        ("rows", ChatRenderer(family(HERMES, texts=["other words"])), SFT),
        ("rows", ChatRenderer(family(HERMES, ["<think>"])), SFT),
    ]
    names = [cache._compute_entry_name(*other) for other in others]
    assert len(set(names)) == len(names) and all(names)
    renderer.tokenizer(
        "red", padding="max_length", truncation=True, max_length=3
    )  # set by a call, not by the tokenizer
    assert (
        cache._compute_entry_name("rows", ChatRenderer(family(HERMES)), SFT)
        == cache._compute_entry_name("rows", renderer, SFT)
        == names[0]
    )


@pytest.mark.parametrize("name", [TABLE_FILE, "refused.json", "manifest.json"])
def test_damage_is_noticed_and_rebuilt(tmp_path, renderer, caplog, name):
    expected = list(tokenize_test_rows(TokenCache(tmp_path), renderer).rows)
    (entry,) = tmp_path.iterdir()
    content = bytearray((entry / name).read_bytes())
    content[len(content) // 2] ^= 1
    (entry / name).write_bytes(content)
    with caplog.at_level(logging.WARNING):
        assert list(tokenize_test_rows(TokenCache(tmp_path), renderer).rows) == expected
    assert "token ids are damaged and made again" in caplog.text and name in caplog.text
    assert TokenCache(tmp_path).load_or_tokenize(
        compute_rows_digest(ROWS), fail_if_called, renderer, SFT, 0
    )


def test_a_part_of_a_table(tmp_path, renderer, caplog):
    cache = TokenCache(tmp_path)
    table_rows = tokenize_test_rows(cache, renderer)
    cache.store_subset(
        "part", renderer, SFT, table_rows, table_rows.rows.find_sequence_indices([0, 2]), 6
    )
    part = TokenCache(tmp_path).load_or_tokenize("part", fail_if_called, renderer, SFT, 0)
    assert list(part.rows) == [
        (ids[:6], mask[:6]) for ids, mask in (table_rows.rows[0], table_rows.rows[2])
    ]
    (table,) = (entry for entry in tmp_path.iterdir() if (entry / TABLE_FILE).exists())
    first = table_rows.rows[0]
    (table / TABLE_FILE).unlink()  # not truncated: `table_rows` maps it
    (table / TABLE_FILE).write_bytes(b"")
    remade = TokenCache(tmp_path).load_or_tokenize("part", lambda: [ROWS[0]], renderer, SFT, 0)
    assert list(remade.rows) == [first] and "damaged" in caplog.text


def test_two_that_make_the_same_table(tmp_path, renderer):
    name = tokenize_test_rows(TokenCache(tmp_path / "other"), renderer).name

    def load_rows():  # another process is faster
        shutil.copytree(tmp_path / "other" / name, tmp_path / "tokens" / name)
        return ROWS

    tokens = TokenCache(tmp_path / "tokens").load_or_tokenize(
        compute_rows_digest(ROWS), load_rows, renderer, SFT, 0
    )
    assert len(tokens.rows) == 3 and [entry.name for entry in (tmp_path / "tokens").iterdir()] == [
        name
    ]


def test_a_disk_that_refuses(tmp_path, renderer, caplog):
    (tmp_path / "file").write_text("")
    tokens = tokenize_test_rows(TokenCache(tmp_path / "file" / "tokens"), renderer)
    assert len(tokens.rows) == 3 and tokens.name == "" and "token ids are not cached" in caplog.text


def make_rows(count=2 * CHUNK_ROWS + 100):
    return [make_conversation(f"cell {n}?", f"row {n} " * (n % 5 + 1)) for n in range(count)]


def compute_table_digest(folder, renderer, rows, monkeypatch, processes):
    monkeypatch.setattr(token_cache, "choose_num_processes", lambda size: processes)
    tokens = tokenize_test_rows(TokenCache(folder), renderer, rows)
    assert len(tokens.rows) == len(rows)
    return hashlib.sha256((folder / tokens.name / TABLE_FILE).read_bytes()).hexdigest()


@pytest.mark.slow
def test_several_processes_write_the_same_bytes(tmp_path, renderer, monkeypatch, caplog):
    rows = make_rows()
    expected = compute_table_digest(tmp_path / "one", renderer, rows, monkeypatch, 1)
    assert compute_table_digest(tmp_path / "two", renderer, rows, monkeypatch, 2) == expected
    assert "died" not in caplog.text


def test_processes_that_die_are_done_without(renderer, monkeypatch, caplog):
    def start_short_lived(self):
        return ConnectedChild("this", quiet=True)  # ends without an answer

    monkeypatch.setattr(tokenising._TokenisingProcesses, "_start_child", start_short_lived)
    rows = make_rows()
    chunks = [chunk for chunk, _ in tokenize_rows(rows, renderer, SFT, 2)]
    alone = [chunk for chunk, _ in tokenize_rows(rows, renderer, SFT, 1)]
    assert [chunk.ids.tolist() for chunk in chunks] == [
        chunk.ids.tolist() for chunk in alone
    ] and len(alone) == 3
    assert np.concatenate([chunk.rows for chunk in chunks]).tolist() == list(range(len(rows)))
    assert "a process that tokenises rows died" in caplog.text


def test_processes_only_where_there_is_enough_text(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    megabyte = 2**20
    assert [choose_num_processes(size * megabyte) for size in (0, 31, 32, 48, 1000)] == [
        1,
        1,
        2,
        3,
        4,
    ]


def test_a_tokenizer_that_a_stage_has_saved_is_the_same(tmp_path, renderer):
    """Check that a later stage does not tokenise the data stage's rows again."""
    names = []
    for folder in ("data", "sft"):
        tokenizer = (
            renderer.tokenizer if not names else AutoTokenizer.from_pretrained(tmp_path / "data")
        )
        tokenizer.save_pretrained(tmp_path / folder)
        later = ChatRenderer(AutoTokenizer.from_pretrained(tmp_path / folder))
        names.append(TokenCache(tmp_path)._compute_entry_name("rows", later, SFT))
    assert names[0] == names[1] != ""


def test_two_answers_in_a_row_have_a_header_each_in_a_side_too(renderer):
    """Check a former bug: the second answer of a preference's side followed the first without a header."""
    answers = [{"role": "assistant", "content": "blue"}, {"role": "assistant", "content": "row 1"}]
    side, _ = build_row_sides(
        {"prompt": "red?", "chosen": answers, "rejected": "the cell"}, renderer
    )[0]
    ids, mask = renderer.encode_conversation([{"role": "user", "content": "red?"}, *answers])
    assert side.ids == ids and [False] * len(side.prompt_ids) + side.loss_mask == mask


def test_texts_that_are_encoded_together_are_encoded_as_one_by_one(renderer):
    """Check that refusals, plain texts and settings between them change no other row."""
    rows = [
        *ROWS,
        {"messages": [{"role": "text", "content": "row 2"}]},
        {"messages": []},
        make_conversation("a <|im_end|> b", "c"),
    ] * 40
    tokens = TokenCache(None).load_or_tokenize("", lambda: rows, renderer, SFT, 0)
    expected = []
    for number, row in enumerate(rows):
        if row["messages"]:
            expected += [(number, s) for s in build_training_sequences(renderer, row["messages"])]
    assert list(zip(tokens.rows.rows.tolist(), tokens.rows, strict=True)) == expected
    assert [row for row, _ in tokens.refused] == [
        n for n, row in enumerate(rows) if not row["messages"]
    ]
    assert (
        renderer.prompt_ids([{"role": "user", "content": "red?"}])
        and not renderer.encoder.is_batching
    )
