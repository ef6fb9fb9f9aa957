"""Rows of a file as episodes: formats, the split by content, levels, tools, verifiers, demonstrations, clear errors."""

import json

import pyarrow
import pyarrow.parquet
import pytest
from helpers.adapters import hide_package

from rl_core.data.records import read_prompt_rows
from rl_core.environments import Tool, make_environment
from rl_core.environments.prompts import Prompts
from rl_core.errors import DataError, SettingsError

ROWS = [
    {"prompt": f"{n} + 1 = ?", "answer": str(n + 1), "level": "easy" if n < 20 else "hard"}
    for n in range(40)
]


def written(folder, name, rows=ROWS):
    place = folder / name
    place.parent.mkdir(parents=True, exist_ok=True)
    if name.endswith(".jsonl"):
        place.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif name.endswith(".json"):
        place.write_text(json.dumps(rows))
    elif name.endswith(".csv"):
        lines = [
            ",".join(rows[0]),
            *(",".join(f'"{value}"' for value in row.values()) for row in rows),
        ]
        place.write_text("\ufeff" + "\r\n".join(lines) + "\r\n")
    else:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), place)
    return str(place)


def questions(environment, split):
    return {
        (level, environment.episode(seed, level).row["prompt"])
        for level in environment.levels
        for seed in environment.seeds_of(split, level)
    }


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.parquet"])
def test_every_format_is_the_same_environment(tmp_path, name):
    environment = make_environment("prompts", {"path": written(tmp_path, name), "heldout": 0.25})
    train, heldout = questions(environment, "train"), questions(environment, "heldout")
    assert train.isdisjoint(heldout) and len(train | heldout) == 40
    assert 3 <= len(heldout) <= 20 and {level for level, _ in heldout} == {"easy", "hard"}
    assert environment.columns == ("prompt", "answer", "level")
    reference = Prompts(ROWS, 0.25)
    assert heldout == questions(reference, "heldout")  # by content, whatever it was read from
    seed = environment.seeds_of("train", "hard")[0]
    episode = environment.episode(seed, "hard")
    assert episode.target == str(int(episode.row["prompt"].split()[0]) + 1)
    assert environment.held_out("hard").by == "content"


def test_a_row_keeps_its_side_when_rows_are_added():
    few = questions(Prompts(ROWS[:30], 0.2), "heldout")
    more = questions(
        Prompts([*ROWS[:30], *({**row, "prompt": "x" + row["prompt"]} for row in ROWS)], 0.2),
        "heldout",
    )
    assert few <= more


def test_a_folder_of_shards_and_a_pattern(tmp_path):
    written(tmp_path, "data/train-00000-of-00002.jsonl", ROWS[:20])
    written(tmp_path, "data/train-00001-of-00002.csv", ROWS[20:])
    assert len(make_environment("prompts", {"path": str(tmp_path)}).seeds("train")) > 20
    written(tmp_path, "data/test.jsonl", [ROWS[0], {**ROWS[0], "prompt": "new"}])
    with pytest.raises(
        SettingsError, match=r"files of several kinds \(data/test, data/train\); name those to read"
    ):
        make_environment("prompts", {"path": str(tmp_path)})
    options = {
        "path": str(tmp_path),
        "files": "data/train*",
        "heldout": str(tmp_path / "data/test.jsonl"),
    }
    environment = make_environment("prompts", options)
    assert len(environment.seeds("train")) == 40 and len(environment.seeds("heldout")) == 2
    assert environment.held_out("easy").shared  # the test row is a training row: said, and left out
    with pytest.raises(SettingsError, match=r"'valid' is none of data/test.jsonl"):
        make_environment("prompts", {"path": str(tmp_path), "files": "valid"})


def test_another_column_is_the_prompt(tmp_path):
    rows = [{"question": f"q{n}", "solution": n, "difficulty": n % 2} for n in range(12)]
    place = written(tmp_path, "a.jsonl", rows)
    with pytest.raises(
        SettingsError,
        match=r"no column 'prompt'; its first row has question, solution, .*prompt: question",
    ):
        make_environment("prompts", {"path": place})
    environment = make_environment(
        "prompts",
        {"path": place, "prompt": "question", "target": "solution", "level": "difficulty"},
    )
    assert sorted(environment.levels) == ["0", "1"]
    seed = environment.seeds_of("train", "1")[0]
    episode = environment.episode(seed, "1")
    assert episode.reset() == [{"role": "user", "content": episode.row["question"]}]
    assert episode.target == episode.row["question"][1:]


VERL_ROWS = [
    {
        "data_source": "sums",
        "prompt": [{"role": "user", "content": f"{n} + 1 = ?"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(n + 1)},
        "extra_info": {"index": n, "split": "train", "question": {"text": f"{n} and one?"}},
    }
    for n in range(12)
]


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.parquet"])
def test_fields_of_a_column_are_named_with_a_dot(tmp_path, name):
    options = {
        "path": written(tmp_path, name, VERL_ROWS),
        "target": "reward_model.ground_truth",
        "level": "extra_info.split",
        "demonstrations": "reward_model.ground_truth",
        "verifier": "numeric",
        "heldout": 0,
    }
    environment = make_environment("prompts", options)
    assert environment.levels == ("train",) and environment.columns == tuple(VERL_ROWS[0])
    episode = environment.episode(environment.seeds_of("train", "train")[4], "train")
    assert episode.target == "5" and episode.row["reward_model"]["style"] == "rule"
    assert episode.step("5").success and not environment.episode(3, "train").step("5").success
    assert environment.demonstration(4, "train").messages[-1]["content"] == "5"
    nested = {**options, "prompt": "extra_info.question.text", "target": ""}
    nested["verifier"] = {"exact": {"column": "reward_model.ground_truth"}}
    environment = make_environment("prompts", nested)
    episode = environment.episode(4, "train")
    assert episode.reset()[0]["content"] == "4 and one?" and episode.target == ""
    assert episode.step("5").success
    with pytest.raises(SettingsError, match=r"'extra_info.qestion', .*did you mean 'extra_info.q"):
        make_environment("prompts", {**options, "target": "extra_info.qestion"})
    with pytest.raises(SettingsError, match=r"options.prompt: .* no column 'extra_info.text'"):
        make_environment("prompts", {**options, "prompt": "extra_info.text"})
    with pytest.raises(SettingsError, match=r"options.verifier: no row has a column 'extra_info.x"):
        verifier = {"exact": {"column": "extra_info.x"}}
        make_environment("prompts", {**options, "verifier": verifier})


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_an_object_or_list_is_no_right_answer(tmp_path, name):
    path = written(tmp_path, name, VERL_ROWS)
    message = (
        r"options.target: the column 'reward_model' of row 1 holds an object .*; name a field of it, "
        r"options.target: reward_model.ground_truth \(reward_model.style, reward_model.ground_truth\)"
    )
    with pytest.raises(DataError, match=message):
        make_environment("prompts", {"path": path, "target": "reward_model"})
    with pytest.raises(DataError, match=r"options.level: .* options.level: extra_info.question"):
        make_environment("prompts", {"path": path, "level": "extra_info", "target": "ability"})
    verifier = {"exact": {"column": "reward_model"}}
    with pytest.raises(DataError, match=r"'exact': .*name a field of it: .*ground_truth"):
        make_environment("prompts", {"path": path, "verifier": verifier, "heldout": 0})
    accepted = written(tmp_path, "b" + name, [{"prompt": "a", "answer": ["b", "c"]}] * 2)
    with pytest.raises(DataError, match=r"column 'answer' of row 1 holds a list .*or to ''"):
        make_environment("prompts", {"path": accepted, "heldout": 0})
    make_environment("prompts", {"path": accepted, "heldout": 0, "target": ""})


def test_a_parquet_column_of_a_name_twice_is_refused(tmp_path):
    place = tmp_path / "twice.parquet"
    columns = [pyarrow.array(["a", "b"]), pyarrow.array(["1", "2"]), pyarrow.array(["3", "4"])]
    table = pyarrow.Table.from_arrays(columns, names=["prompt", "answer", "answer"])
    pyarrow.parquet.write_table(table, place)
    with pytest.raises(DataError, match=r"twice.parquet: has the column 'answer' 2 times"):
        make_environment("prompts", {"path": str(place)})
    place = tmp_path / "within.parquet"
    twice = pyarrow.StructArray.from_arrays(columns[1:], names=["gold", "gold"])
    table = pyarrow.Table.from_arrays([columns[0], twice], names=["prompt", "reward_model"])
    pyarrow.parquet.write_table(table, place)
    with pytest.raises(DataError, match=r"reward_model: cannot be read as an object: .*duplicate"):
        make_environment("prompts", {"path": str(place)})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"path": "nowhere.jsonl"}, "options.path: no such file or folder: nowhere.jsonl"),
        ({"path": "owner/name"}, "needs options.revision, the 40 hex digits of a commit"),
        ({"path": "owner/name", "revision": "main"}, "'main' is no commit"),
        ({}, "options.path: neither is given"),
        (
            {"rows": ROWS, "target": "anwser"},
            "no row has a column 'anwser', .*did you mean 'answer'",
        ),
        (
            {"rows": ROWS, "verifier": "numerc"},
            "options.verifier: no verifier 'numerc'; did you mean 'numeric'",
        ),
        ({"rows": ROWS, "verifier": {"exact": {"column": "gold"}}}, "reads the column 'gold'"),
        (
            {"rows": [{"prompt": "a"}, {"prompt": "b"}], "verifier": "exact"},
            "options.target: the verifier 'exact'",
        ),
        ({"rows": ROWS, "heldout": 1.0}, "options.heldout: 1.0 must be a share"),
        (
            {"rows": [{"prompt": "same"}] * 5, "heldout": 0.2},
            "1 different questions cannot be split",
        ),
        (
            {"rows": ROWS, "tools": "no_such_module_here:TOOLS"},
            "options.tools: module 'no_such_module_here'",
        ),
    ],
)
def test_mistakes_name_the_option(options, message):
    with pytest.raises(SettingsError, match=message):
        make_environment("prompts", options)


def test_cells_of_csv_are_text_and_empty_ones_too(tmp_path):
    """As the one reader of CSV gives them to rewards: a label is no truth value here, a prompt in brackets no list."""
    (tmp_path / "a.csv").write_text(
        'prompt,label,seed,answer\n[1] or [2]?,true,,2\n"two\nlines",false,7,\n'
    )
    rows = read_prompt_rows(tmp_path / "a.csv").rows
    assert rows == [
        {"prompt": "[1] or [2]?", "label": "true", "seed": "", "answer": "2"},
        {"prompt": "two\nlines", "label": "false", "seed": "7", "answer": ""},
    ]
    (tmp_path / "a.tsv").write_text("question\tlabel\nx, y\ttrue\n")
    (row,) = read_prompt_rows(tmp_path / "a.tsv", prompt="question").rows
    assert row == {"question": "x, y", "label": "true", "prompt": "x, y"}


def test_tables_that_are_none(tmp_path):
    (tmp_path / "a.csv").write_text("prompt,answer\nx,1\ny,2,3\n")
    with pytest.raises(DataError, match=r"a.csv:3: has 3 cells, the header 2 columns"):
        make_environment("prompts", {"path": str(tmp_path / "a.csv")})
    (tmp_path / "b.json").write_text('{"prompt": "x"}')
    with pytest.raises(DataError, match="holds one dict, expected an array"):
        make_environment("prompts", {"path": str(tmp_path / "b.json")})


def test_a_hub_data_set_without_a_network(tmp_path, monkeypatch):
    revision = "0123456789" * 4
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    options = {"path": "owner/name", "revision": revision}
    with pytest.raises(
        DataError, match=r"data set owner/name at 01234567 could not be fetched .* name the folder"
    ):
        make_environment("prompts", options)


def test_a_verifier_gives_reward_and_success():
    environment = Prompts(ROWS, verifier={"numeric": {"find": "last_number"}})
    assert environment.knows_success and not environment.blocking
    step = environment.episode(3, "easy").step("it is 4")
    assert (step.reward, step.success, step.terminated, step.answer) == (1.0, True, True, "it is 4")
    assert environment.episode(3, "easy").step("5").success is False
    step = Prompts(ROWS).episode(3, "easy").step("4")
    assert (step.reward, step.success) == (0.0, None)  # rewards decide


def double(number: int) -> int:
    """Twice the number."""
    if number > 100:
        raise ValueError("too large")
    return 2 * number


def test_tools_run_before_the_answer():
    environment = Prompts(
        ROWS, tools=[double, Tool("now", "the time", {}, lambda: "noon", 5.0)], verifier="exact"
    )
    assert environment.blocking  # one of the tools has a time limit
    episode = environment.episode(1, "easy")
    system, user = episode.reset()
    assert (
        system["role"] == "system"
        and '"name": "double"' in system["content"]
        and user["content"] == "1 + 1 = ?"
    )
    call = '<tool_call>{"name": "double", "arguments": {"number": %s}}</tool_call>'
    step = episode.step(call % 4 + call % 500)
    assert [message["content"] for message in step.messages] == ["8", "error: too large"]
    assert (step.tool_call.arguments, step.more_calls[0].arguments) == (
        {"number": 4},
        {"number": 500},
    )
    assert step.is_error and step.info == {"failed_calls": [1]}
    step = episode.step(call % '"x"')
    assert step.is_error and "number must be a whole number" in step.messages[0]["content"]
    assert episode.step("2").success


def test_demonstrations_are_a_column():
    environment = Prompts(ROWS, demonstrations="answer", system="Be brief.")
    assert environment.demonstration(2, "easy").messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "2 + 1 = ?"},
        {"role": "assistant", "content": "3"},
    ]
    assert Prompts(ROWS).demonstration(2, "easy") is None
    with pytest.raises(DataError, match="holds no answer"):
        Prompts([{"prompt": "p", "answer": 3}], demonstrations="answer").demonstration(0, "all")


def test_what_was_read_is_reported(tmp_path):
    place = written(tmp_path, "a.jsonl", [*ROWS, {"prompt": 3}])
    environment = make_environment("prompts", {"path": place, "on_bad_row": "skip"})
    report = environment.prepare(tmp_path, 0)
    assert (report["num_rows"], report["num_skipped"], report["levels"]) == (
        41,
        1,
        ["easy", "hard"],
    )
    assert report["num_train_rows"] + report["num_heldout_rows"] == 40


def test_mcp_servers_without_the_package_are_refused_at_their_option(monkeypatch):
    hide_package(monkeypatch, "mcp")
    with pytest.raises(
        SettingsError,
        match=r"^options\.mcp: needs the package 'mcp', .* python -m posttrain.install --extras mcp",
    ):
        Prompts([{"prompt": "a"}], mcp={"shop": {"command": ["python", "server.py"]}})
