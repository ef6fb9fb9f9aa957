"""`posttrain data FILE`: reports on files with known content."""

import json

import pytest
from helpers.adapters import fakes

from posttrain.cli.data import describe_data_file
from posttrain.cli.main import main
from rl_core.data import splits
from rl_core.data.chat import ChatRenderer
from rl_core.data.tokenizer import train_tokenizer
from rl_core.errors import DataError, SettingsError

TEXT = "one two three four five six seven eight nine ten eleven twelve"


def write_rows(folder, rows, name="rows.jsonl"):
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def make_pair(prompt, chosen, rejected):
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected}


def find_line(report, head):
    return next(line for line in report.splitlines() if line.startswith(head))


def test_a_file_of_pairs(tmp_path):
    rows = [
        make_pair("a", "b", "c"),
        make_pair("a", "c", "b"),
        make_pair("a", "b", "c"),
        make_pair("d", "e", "e"),
        make_pair("f", "g", "h"),
    ]
    rows[4]["source"] = "web"
    report = describe_data_file(write_rows(tmp_path, rows), near_duplicate_threshold=0)
    assert find_line(report, "kind").split() == ["kind", "preferences"]
    assert (
        "prompt-chosen-rejected (5 rows)" in report
        and "line 4: chosen: is equal to rejected" in report
    )
    assert find_line(report, "rows").endswith("5, 1 cannot be used") and find_line(
        report, "not read"
    ).endswith("source")
    assert "1 rows are exact copies of earlier ones (line 3 and line 1)" in report
    assert "2 distinct; 2 rows repeat one" in find_line(report, "prompts")
    assert "2 rows contradict earlier ones (line 2 and line 1; line 3 and line 2)" in report
    assert "loss     chosen     |b|" in report and "context  prompt     |a|" in report


def test_tokens_lengths_and_loss_by_a_model(tmp_path):
    tokenizer = train_tokenizer(["abc"], 300)  # a token per letter but for merges within "abc"
    renderer = ChatRenderer(tokenizer)
    rows = [{"prompt": "x" * count, "completion": "yz"} for count in (1, 2, 9)]
    report = describe_data_file(
        write_rows(tmp_path, rows), renderer=renderer, context=10, near_duplicate_threshold=0
    )
    # Each row: <|user|> x... <|end|> <|assistant|> | y z <|end|>
    assert "30 in all, 9 with loss" in report
    assert "1 rows are longer than the model's context of 10" in report
    assert "median 8, 95% up to 15, longest 15" in report
    assert (
        "context     4  |<|user|>x<|end|><|assistant|>|" in report
        and "loss        3  |yz<|end|>|" in report
    )


def test_overlap_and_near_copies(tmp_path):
    rows = [
        {"prompt": TEXT, "completion": "a"},
        {"prompt": f"{TEXT} thirteen", "completion": "a"},
        {"text": "no"},
    ]
    heldout = write_rows(
        tmp_path, [{"prompt": TEXT.upper(), "completion": "b c d e f g"}], "heldout.jsonl"
    )
    with fakes("datasketch"):
        report = describe_data_file(
            write_rows(tmp_path, rows), heldout_path=heldout, near_duplicate_threshold=0.5
        )
    assert (
        "1 rows have a prompt of" in find_line(report, "overlap")
        and "line 1 and its line 1" in report
    )
    assert "1 rows share 50% of their shingles with an earlier one (line 2 and line 1)" in report


def test_jaccard_similarity_by_hand(monkeypatch):
    first, second = splits.build_shingles("a b c d e f"), splits.build_shingles("A b c d e g")
    assert first == {"a b c d e", "b c d e f"} and splits.compute_jaccard(first, second) == 1 / 3
    assert splits.build_shingles("a b") == {"a b"}
    with fakes("datasketch"):
        twelve, thirteen = TEXT, f"{TEXT} thirteen"  # 8 shingles, and one more
        duplicates = splits.find_near_duplicates([twelve, "x", thirteen, twelve], None, 0.8)
        assert duplicates == [(2, 0, 8 / 9), (3, 2, 8 / 9)]
        assert splits.find_near_duplicates([thirteen], [twelve], 0.9) == []
        with pytest.raises(SettingsError, match="above 0"):
            splits.find_near_duplicates([twelve], None, 1.5)
    monkeypatch.setattr(splits, "is_datasketch_available", lambda: False)
    with pytest.raises(SettingsError, match=r"python -m posttrain.install --extras data"):
        splits.find_near_duplicates([TEXT], None, 0.5)


def test_the_command(tmp_path, capsys):
    path = write_rows(
        tmp_path,
        [{"conversations": [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}]}],
    )
    assert main(["data", str(path)]) == 0
    out = capsys.readouterr().out
    assert (
        "ShareGPT (1 rows)" in out
        and "loss     assistant  |4|" in out
        and "1 rows with 1" in find_line(out, "turns")
    )
    assert main(["data", "list"]) == 2 and "no such file" in capsys.readouterr().err
    with pytest.raises(DataError, match="has no data file in it"):
        describe_data_file((tmp_path / "empty").mkdir() or tmp_path / "empty")


def test_rows_of_no_format_come_with_the_command_that_converts_them(tmp_path):
    path = write_rows(tmp_path, [{"question": "a", "answer": "b"}])
    with pytest.raises(DataError, match="none is left") as error:
        describe_data_file(path)
    assert "jq -c '{prompt: .question, completion: .answer}'" in str(error.value)


def test_rows_cannot_move_the_cursor_of_the_terminal(tmp_path, capsys):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": "a \x1b[2J b", "completion": "c\x1b]0;x\x07"}) + "\n")
    assert main(["data", str(path)]) == 0
    out = capsys.readouterr().out
    assert "a \\x1b[2J b" in out and "c\\x1b]0;x\\x07" in out and "\x1b" not in out
