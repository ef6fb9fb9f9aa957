"""Questions from a file: split once, played with the calculator, demonstrated by their worked solutions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from helpers import ROOT

from rl_core.data.chat import ChatRenderer
from rl_core.data.tokenizer import train_tokenizer
from rl_core.environments import make_environment
from rl_core.environments.environment import HELDOUT_START
from rl_core.environments.gsm8k import GSM8K, classify_level
from rl_core.errors import DataError, EnvironmentFault, RecordsError, SettingsError

REAL = ROOT / "data/gsm8k_train.jsonl"  # where configs/gsm8k.yaml has it; no part of the project


def question(number: int, steps: int) -> dict[str, str]:
    lines = [
        f"Step {step}: <<{number}+{step}={number + step}>>{number + step}." for step in range(steps)
    ]
    return {
        "question": f"What is {number}?",
        "answer": "\n".join([*lines, f"#### {number}"]),
        "final": str(number),
    }


ROWS = [question(number, number % 7) for number in range(70)]


def written(folder: Path, rows: list[Any]) -> str:
    path = folder / "raw.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


@pytest.fixture
def environment(tmp_path: Path) -> GSM8K:
    return GSM8K(path=written(tmp_path, ROWS))


def play(environment: GSM8K, seed: int, level: str) -> list[Any]:
    """Play the episode with the demonstration's actions and return its messages."""
    demonstration = environment.demonstration(seed, level)
    episode = environment.episode(seed, level)
    messages = episode.reset()
    for message in demonstration.messages[len(messages) :]:
        if message["role"] == "assistant":
            step = episode.step(message["content"])
            messages = [*messages, message, *step.messages]
    assert step.terminated and step.success and step.reward == 1.0 and not step.is_error
    return messages


def replay_all(environment: GSM8K) -> int:
    count = 0
    for split in ("train", "heldout"):
        for level in environment.levels:
            for seed in environment.seeds_of(split, level):
                assert (
                    play(environment, seed, level)
                    == environment.demonstration(seed, level).messages
                )
                count += 1
    return count


def test_levels_go_by_the_number_of_steps() -> None:
    assert [classify_level(steps) for steps in range(7)] == ["short"] * 3 + ["medium"] * 2 + [
        "long"
    ] * 2


def test_seeds_number_the_rows_of_each_split(environment: GSM8K) -> None:
    train, heldout = environment.seeds("train"), environment.seeds("heldout")
    assert (train, heldout) == (range(63), range(HELDOUT_START, HELDOUT_START + 7))
    by_level = [environment.seeds_of("train", level) for level in environment.levels]
    assert sorted(seed for seeds in by_level for seed in seeds) == list(train)
    prompts = [
        {
            environment.episode(seed, level).prompt
            for level in environment.levels
            for seed in environment.seeds_of(s, level)
        }
        for s in ("train", "heldout")
    ]
    assert len(prompts[0]) == 63 and len(prompts[1]) == 7 and not prompts[0] & prompts[1]


def test_a_seed_of_another_level_or_of_no_row_is_refused(environment: GSM8K) -> None:
    seed = environment.seeds_of("train", "long")[0]
    with pytest.raises(SettingsError, match="is of level 'long', not 'short'"):
        environment.episode(seed, "short")
    for beyond in (63, -1, HELDOUT_START + 7):
        with pytest.raises(SettingsError, match=r"has (63|7) rows"):
            environment.episode(beyond, "short")
    with pytest.raises(SettingsError, match="no level 'lng'; did you mean 'long'"):
        environment.seeds_of("train", "lng")
    with pytest.raises(SettingsError, match="split 'test'"):
        environment.seeds("test")


def test_demonstrations_win_their_episodes(environment: GSM8K) -> None:
    assert replay_all(environment) == 70
    seed = environment.seeds_of("train", "medium")[0]
    demonstration = environment.demonstration(seed, "medium")
    assert demonstration.kind in ("3 steps", "4 steps") and demonstration.success
    assert "calculator EXPRESSION" in demonstration.messages[0]["content"]


def test_an_episode_with_errors_an_answer_and_an_end(environment: GSM8K) -> None:
    seed = environment.seeds_of("train", "short")[0]
    episode = environment.episode(seed, "short")
    number = int(episode.target)
    assert [message["role"] for message in episode.reset()] == ["system", "user"]

    failed = episode.step("calculator 1/0")
    assert failed.is_error and failed.messages == [
        {"role": "tool", "content": "error: division by zero"}
    ]
    misspelt = episode.step("<tool_call>{</tool_call>")
    assert (
        misspelt.is_error
        and misspelt.tool_call is None
        and "not valid JSON" in misspelt.messages[0]["content"]
    )
    worked = episode.step("calculator 1+2")
    assert (
        worked.messages[0]["content"] == "3"
        and worked.tool_call is not None
        and not worked.is_error
    )
    assert not (failed.terminated or misspelt.terminated or worked.terminated)

    last = episode.step(f"#### ${number}.00")
    assert (last.reward, last.terminated, last.truncated, last.success) == (1.0, True, False, True)
    assert last.answer == str(number) and last.messages == []
    with pytest.raises(EnvironmentFault):
        episode.step("more")


@pytest.mark.parametrize(
    "action", ["#### {wrong}", "#### {right} or {wrong}", "It is {right}.", ""]
)
def test_wrong_several_or_no_numbers_end_without_reward(environment: GSM8K, action: str) -> None:
    episode = environment.episode(environment.seeds_of("train", "short")[0], "short")
    right = int(episode.target)
    step = episode.step(action.format(right=right, wrong=right + 1))
    assert (step.reward, step.terminated, step.success, step.is_error) == (0.0, True, False, False)
    assert (step.answer is None) == ("####" not in action)


def test_prepare_writes_what_a_later_environment_reads(tmp_path: Path) -> None:
    path = written(tmp_path, [*ROWS, ROWS[0], {**ROWS[1], "question": " what  is 1? "}])
    raw = GSM8K(path=path, heldout=0.2)
    report = raw.prepare(tmp_path / "data", seed=5)
    expected = {
        "num_rows": 72,
        "num_prompts": 70,
        "num_duplicate_rows": 1,
        "num_overlap_prompts": 0,
        "num_skipped": 0,
    }
    assert {name: report[name] for name in expected} == expected
    assert (
        report["num_heldout_prompts"] == 14
        and report["num_calls_exact"] == sum(n % 7 for n in range(70)) + 1
    )
    assert sum(report[f"num_train_{level}"] for level in GSM8K.levels) == report["num_train_rows"]

    Path(path).unlink()  # the prepared files are all that is needed
    prepared = GSM8K(data=tmp_path / "data")
    for split in ("train", "heldout"):
        assert prepared.seeds(split) == raw.seeds(split)
        for level in GSM8K.levels:
            for seed in raw.seeds_of(split, level):
                assert prepared.episode(seed, level).prompt == raw.episode(seed, level).prompt
    again = tmp_path / "again"
    GSM8K(
        path=written(tmp_path, [*ROWS, ROWS[0], {**ROWS[1], "question": " what  is 1? "}]),
        heldout=0.2,
    ).prepare(again, 5)
    for name in ("questions_train.jsonl", "questions_heldout.jsonl"):
        assert (again / name).read_bytes() == (tmp_path / "data" / name).read_bytes()


def test_another_seed_splits_otherwise(tmp_path: Path) -> None:
    path = written(tmp_path, ROWS)
    folders = [tmp_path / str(seed) for seed in range(2)]
    for seed, folder in enumerate(folders):
        GSM8K(path=path).prepare(folder, seed)
    heldout = [
        (folder / "questions_heldout.jsonl").read_text(encoding="utf-8") for folder in folders
    ]
    assert heldout[0] != heldout[1]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (
            {"question": "q", "answer": "a"},
            "raw.jsonl:3: answer: has no final and no line '#### NUMBER'",
        ),
        (
            {"question": "q", "answer": "a", "final": "many"},
            "raw.jsonl:3: final: must hold one number",
        ),
        (
            {"question": "q", "answer": "#### 5", "final": "6"},
            "raw.jsonl:3: final: is 6, but the solution ends in",
        ),
        ({"question": "", "answer": "#### 5"}, "raw.jsonl:3: question: is empty"),
    ],
)
def test_bad_questions_stop_before_anything_is_written(
    tmp_path: Path, row: dict[str, str], words: str
) -> None:
    path = written(tmp_path, [*ROWS[:2], row])
    with pytest.raises(RecordsError, match=words):
        GSM8K(path=path).prepare(tmp_path / "data", 0)
    assert not (tmp_path / "data").exists()
    report = GSM8K(path=path, on_bad_row="skip").prepare(tmp_path / "data", 0)
    assert (report["num_rows"], report["num_skipped"], len(report["problems"])) == (2, 1, 1)


def test_original_rows_without_final_are_understood(tmp_path: Path) -> None:
    rows = [{"question": f"q{n}", "answer": f"So.\n#### {n},000"} for n in range(1, 5)]
    environment = GSM8K(path=written(tmp_path, rows), heldout=0.5)
    assert {environment.episode(seed, "short").target for seed in environment.seeds("train")} < {
        "1000",
        "2000",
        "3000",
        "4000",
    }
    assert replay_all(environment) == 4


def test_make_and_its_errors(tmp_path: Path) -> None:
    assert isinstance(
        make_environment("gsm8k", {"path": written(tmp_path, ROWS), "max_rows": 10}), GSM8K
    )
    wrong: list[tuple[dict[str, Any], str]] = [
        ({}, "options.path: environment 'gsm8k' needs"),
        ({"path": str(tmp_path / "none")}, "options.path: no such file"),
        ({"path": "x", "heldout": 1.0}, "options.heldout"),
        ({"path": "x", "max_rows": 1}, "options.max_rows"),
        ({"path": "x", "call_format": "xml"}, "options.call_format"),
        ({"pth": "x"}, "did you mean 'path'"),
    ]
    for options, words in wrong:
        with pytest.raises(SettingsError, match=words):
            make_environment("gsm8k", options)
    with pytest.raises(DataError, match="is a folder"):
        GSM8K(path=str(tmp_path)).seeds("train")


@pytest.mark.skipif(
    not REAL.exists(), reason="needs data/gsm8k_train.jsonl (see configs/gsm8k.yaml)"
)
@pytest.mark.parametrize("call_format", ["line", "hermes"])
def test_every_real_question_converts_and_is_won_by_its_solution(
    tmp_path: Path, call_format: str
) -> None:
    environment = make_environment("gsm8k", {"path": str(REAL), "call_format": call_format})
    assert isinstance(environment, GSM8K)
    report = environment.prepare(tmp_path, seed=0)
    num_rows = sum(1 for line in REAL.open(encoding="utf-8") if line.strip())
    assert report["num_rows"] == report["num_train_rows"] + report["num_heldout_rows"] == num_rows
    assert (
        report["num_calls_exact"] > 2 * num_rows
    )  # most solutions take more than two calculations
    assert (
        report["num_calls_wrong"]
        == report["num_calls_unreadable"]
        == report["num_calls_rounded"]
        == 0
    )
    assert replay_all(environment) == num_rows


@pytest.mark.skipif(
    not REAL.exists(), reason="needs data/gsm8k_train.jsonl (see configs/gsm8k.yaml)"
)
def test_real_demonstrations_tokenise_without_loss(tmp_path: Path) -> None:
    environment = GSM8K(path=str(REAL), max_rows=200)
    demonstrations = [
        environment.demonstration(seed, level)
        for level in environment.levels
        for seed in environment.seeds_of("train", level)
    ]
    renderer = ChatRenderer(
        train_tokenizer(
            [message["content"] for item in demonstrations for message in item.messages], 1024
        )
    )
    for item in demonstrations:
        ids, mask = renderer.encode_conversation(item.messages)
        learned = [token for token, learns in zip(ids, mask, strict=True) if learns]
        actions = [
            message["content"] for message in item.messages if message["role"] == "assistant"
        ]
        assert renderer.action_text(learned) == "".join(actions)
        assert learned.count(renderer.eos_id) == len(actions)
