"""Data set formats: what is loaded from a row of each, and the advice when one is refused."""

import json

import pytest

from rl_core.data.formats import detect_format
from rl_core.data.records import check_first_rows, read_demonstrations, read_preferences
from rl_core.errors import DataError, RecordsError

USER, ANSWER = {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}
WRONG = {"role": "assistant", "content": "5"}


def read_demonstration(row, **named):
    return read_demonstrations([row], **named).rows[0]


def read_preference(row):
    return read_preferences([row]).rows[0]


@pytest.mark.parametrize(
    ("name", "row", "messages"),
    [
        ("messages", {"messages": [USER, ANSWER]}, [USER, ANSWER]),
        ("prompt-completion", {"prompt": "2+2?", "completion": "4"}, [USER, ANSWER]),
        (
            "prompt-completion, conversational",
            {"prompt": [USER], "completion": [ANSWER]},
            [USER, ANSWER],
        ),
        (
            "prompt-completion, conversational",  # only the completion carries loss
            {"prompt": [USER, WRONG, USER], "completion": [ANSWER]},
            [USER, {**WRONG, "weight": 0}, USER, ANSWER],
        ),
        (
            "ShareGPT",
            {
                "conversations": [
                    {"from": "human", "value": "2+2?"},
                    {"from": "gpt", "value": "4"},
                ],
                "system": "Be brief.",
            },
            [{"role": "system", "content": "Be brief."}, USER, ANSWER],
        ),
        (
            "ShareGPT",
            {
                "conversations": [
                    {"from": "human", "value": "2+2?"},
                    {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 2}}'},
                    {"from": "observation", "value": "4"},
                    {"from": "gpt", "value": "4", "weight": 0},
                    {"from": "human", "value": "2+2?"},
                    {"from": "gpt", "value": "4"},
                ]
            },
            [
                USER,
                {
                    "role": "assistant",
                    "content": "",
                    "tool_calls": [
                        {"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
                    ],
                },
                {"role": "tool", "content": "4"},
                {**ANSWER, "weight": 0},
                USER,
                ANSWER,
            ],
        ),
        ("ShareGPT", {"conversations": [USER, ANSWER]}, [USER, ANSWER]),
        (
            "Alpaca",
            {"instruction": "Add.", "input": "2, 2", "output": "4"},
            [{**USER, "content": "Add.\n\n2, 2"}, ANSWER],
        ),
        ("Alpaca", {"instruction": "2+2?", "input": "", "output": "4"}, [USER, ANSWER]),
        (
            "Alpaca",
            {"instruction": "2+2?", "output": "4", "system": "S", "history": [["2+2?", "5"]]},
            [{"role": "system", "content": "S"}, USER, WRONG, USER, ANSWER],
        ),
        ("Dolly", {"instruction": "2+2?", "context": "", "response": "4"}, [USER, ANSWER]),
        ("text", {"text": "Once upon a time"}, [{"role": "text", "content": "Once upon a time"}]),
    ],
)
def test_demonstrations(name, row, messages):
    assert detect_format(row, "demonstrations").name == name
    assert read_demonstration(row) == {"messages": messages}


@pytest.mark.parametrize(
    ("name", "row", "expected"),
    [
        (
            "prompt-chosen-rejected",
            {"prompt": "2+2?", "chosen": "4", "rejected": "5"},
            ("2+2?", "4", "5"),
        ),
        (
            "pairs, conversational",
            {"prompt": [USER], "chosen": [ANSWER], "rejected": [WRONG]},
            ("2+2?", "4", "5"),
        ),
        (
            "pairs, conversational",
            {"prompt": [USER, WRONG, USER], "chosen": [ANSWER], "rejected": [WRONG, USER, ANSWER]},
            ([USER, WRONG, USER], "4", [WRONG, USER, ANSWER]),
        ),
        (
            "pairs, implicit prompt",
            {"chosen": [USER, ANSWER], "rejected": [USER, WRONG]},
            ("2+2?", "4", "5"),
        ),
        (
            "UltraFeedback, binarized",
            {
                "prompt": "2+2?",
                "chosen": [USER, ANSWER],
                "rejected": [USER, WRONG],
                "messages": [USER, ANSWER],
            },
            ("2+2?", "4", "5"),
        ),
        (
            "Orca-DPO",
            {"system": "S", "question": "2+2?", "chosen": "4", "rejected": "5"},
            ([{"role": "system", "content": "S"}, USER], "4", "5"),
        ),
        (
            "Orca-DPO",
            {"system": "", "question": "2+2?", "chosen": "4", "rejected": "5"},
            ("2+2?", "4", "5"),
        ),
        (
            "pairs, Alpaca",  # the instruction is in the same column as the input, unlike Orca's pairs
            {"instruction": "Add.", "input": "2, 2", "chosen": "4", "rejected": "5"},
            ("Add.\n\n2, 2", "4", "5"),
        ),
        (
            "pairs, ShareGPT",
            {
                "conversations": [{"from": "human", "value": "2+2?"}],
                "chosen": {"from": "gpt", "value": "4"},
                "rejected": {"from": "gpt", "value": "5"},
            },
            ("2+2?", "4", "5"),
        ),
        (
            "pairs, ShareGPT",
            {
                "conversations": [USER, WRONG, USER],
                "system": "S",
                "chosen": [ANSWER],
                "rejected": [WRONG],
            },
            ([{"role": "system", "content": "S"}, USER, WRONG, USER], "4", "5"),
        ),
        (
            "HH-RLHF",
            {
                "chosen": "\n\nHuman: 2+2?\n\nAssistant: 5\n\nHuman: 2+2?\n\nAssistant: 4",
                "rejected": "\n\nHuman: 2+2?\n\nAssistant: 5\n\nHuman: 2+2?\n\nAssistant: 5",
            },
            ([USER, WRONG, USER], "4", "5"),
        ),
    ],
)
def test_preferences(name, row, expected):
    assert detect_format(row, "preferences").name == name
    assert read_preference(row) == dict(
        zip(("prompt", "chosen", "rejected"), expected, strict=True)
    )


def test_labelled_completions_are_text_or_messages():
    assert read_preference({"prompt": [USER], "completion": [ANSWER], "label": True}) == {
        "prompt": "2+2?",
        "completion": "4",
        "label": True,
    }
    assert read_preference({"prompt": "2+2?", "completion": "5", "label": False})["label"] is False
    assert read_preference({"messages": [USER, WRONG, USER, ANSWER], "label": True}) == {
        "prompt": [USER, WRONG, USER],
        "completion": "4",
        "label": True,
    }


@pytest.mark.parametrize(
    ("reader", "row", "words"),
    [
        (
            read_demonstration,
            {"question": "a", "answer": "b"},
            "jq -c '{prompt: .question, completion: .answer}' FILE",
        ),
        (
            read_demonstration,
            {"system_prompt": "S", "question": "a", "response": "b"},
            '{messages: [{role: "system", content: .system_prompt}, {role: "user", content: .question}, '
            '{role: "assistant", content: .response}]}',
        ),
        (
            read_demonstration,
            {"prompt": "2+2?", "completion": "5", "label": False},
            "jq -c 'select(.label)' FILE",
        ),
        (
            read_preference,
            {
                "conversations": [{"from": "human", "value": "a"}],
                "chosen": {"from": "human", "value": "b"},
                "rejected": [ANSWER],
            },
            "chosen: must begin and end with the assistant's message",
        ),
        (
            read_preference,
            {"messages": [ANSWER], "label": True},
            "messages: ends with the assistant's message",
        ),
        (
            read_demonstration,
            {"my_query": "a", "x": "b"},
            "columns found: my_query, x; name them: jq -c '{prompt: .my_query",
        ),
        (
            read_demonstration,
            {"conversations": [{"from": "human", "value": "a"}]},
            "jq -c '.conversations |= .[:-1]' FILE",
        ),
        (
            read_demonstration,
            {"conversations": [{"from": "alien", "value": "a"}]},
            "must be one of human",
        ),
        (
            read_demonstration,
            {"conversations": [{"from": "human", "value": "a", "loss": 1}]},
            "conversations[0].from",
        ),
        (
            read_preference,
            {"instruction": "q", "completions": [{"response": "a", "overall_score": 1}]},
            "sort_by(.overall_",
        ),
        (
            read_preference,
            {"question": "q", "better": "a", "worse": "b"},
            "{prompt: .question, chosen: .better, rejected: .worse}",
        ),
        (
            read_preference,
            {"chosen": "4", "rejected": "5"},
            "prompt: is missing; columns found: chosen, rejected",
        ),
        (read_preference, {"chosen": [ANSWER], "rejected": [WRONG]}, "there is no common prompt"),
        (
            read_preference,
            {"chosen": [USER, ANSWER], "rejected": [USER, ANSWER]},
            "is equal to rejected",
        ),
        (
            read_preference,
            {"prompt": "2+2?", "chosen": [ANSWER], "rejected": "5"},
            "chosen: must be text, found a list",
        ),
        (
            read_preference,
            {"prompt": "other", "chosen": [USER, ANSWER], "rejected": [USER, WRONG]},
            "is not the text that chosen and rejected begin with",
        ),
    ],
)
def test_what_is_not_read_is_refused_with_the_line_that_mends_it(reader, row, words):
    with pytest.raises(RecordsError) as error:
        reader(row)
    assert words in str(error.value)


def test_tools_may_be_bare_functions():
    function = {"name": "add", "parameters": {"type": "object", "properties": {}}}
    row = {"messages": [USER, ANSWER], "tools": json.dumps([function])}
    assert read_demonstration(row)["tools"] == [{"type": "function", "function": function}]
    with pytest.raises(RecordsError, match=r"tools\[0\]: must be"):
        read_demonstration({"messages": [USER, ANSWER], "tools": [{"name": 3}]})


def test_columns_that_are_not_read_are_named(caplog):
    read_demonstrations(
        [{"prompt": "2+2?", "completion": "4", "source": "web", "id": 3, "note": None}]
    )
    assert "columns that are not read: id, source" in caplog.text and "note" not in caplog.text


def test_columns_of_a_file_are_named_once_though_it_is_checked_and_then_read(tmp_path, caplog):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "2+2?", "completion": "4", "source": "web"}\n')
    check_first_rows("demonstrations", path, 10)
    read_demonstrations(path)
    assert caplog.text.count("columns that are not read: source") == 1
    path.write_text('{"prompt": "2+2?", "completion": "4", "source": "web", "id": 1}\n')
    read_demonstrations(path)
    assert caplog.text.count("columns that are not read") == 2
    for _ in range(2):
        read_demonstrations([{"prompt": "2+2?", "completion": "4", "hint": "h"}])
    assert caplog.text.count("columns that are not read: hint") == 2


def test_csv(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text('prompt,completion,label\n"2+2?\nor ""two""?",4,true\n2+3?,5,False\n\n,,\n')
    with pytest.raises(RecordsError, match=r"rows.csv:6"):
        read_preferences(path)  # the last row is empty
    path.write_text('prompt,completion,label\n"2+2?\nor ""two""?",4,true\n2+3?,5,False\n')
    records = read_preferences(path)
    assert records.rows == [
        {"prompt": '2+2?\nor "two"?', "completion": "4", "label": True},
        {"prompt": "2+3?", "completion": "5", "label": False},
    ]
    assert records.lines == [2, 4]
    path.write_text("messages\n" + '"' + json.dumps([USER, ANSWER]).replace('"', '""') + '"\n')
    assert read_demonstrations(path).rows == [{"messages": [USER, ANSWER]}]
    path.write_text("messages\n\"[{'role': 'user'}]\"\n")
    with pytest.raises(RecordsError, match="must be JSON in its cell"):
        read_demonstrations(path)
    path.write_text("prompt,completion\na,b,c\n")
    with pytest.raises(RecordsError, match="has 3 cells, the header 2 columns"):
        read_demonstrations(path)
    path.write_text("prompt,prompt\na,b\n")
    with pytest.raises(DataError, match="the header needs a name for each column"):
        read_demonstrations(path)


def test_an_array_is_refused_with_its_line(tmp_path):
    path = tmp_path / "alpaca.json"
    path.write_text('[\n{"instruction": "a", "output": "b"}\n]\n')
    with pytest.raises(DataError, match=r"jq -c '.\[\]' alpaca.json > alpaca.jsonl"):
        read_demonstrations(path)
