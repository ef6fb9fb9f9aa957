"""`nemo_gym`: tasks of a resources server, against stand-ins written from NeMo Gym 0.7's protocol."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from fastapi import FastAPI
from helpers.fakes.nemo_gym_server import build_counter_app, build_dialogue_app, serve_app

from rl_core.environments import make_environment
from rl_core.errors import DataError, EnvironmentFault, SettingsError

INCREMENT = {
    "name": "increment_counter",
    "parameters": {
        "type": "object",
        "properties": {"count": {"type": "integer", "description": ""}},
        "required": ["count"],
        "additionalProperties": False,
    },
    "strict": True,
    "type": "function",
    "description": "",
}
READ = {
    "name": "get_counter_value",
    "parameters": {"type": "object", "properties": {}, "required": []},
    "type": "function",
}
CALL = '<tool_call>{"name": "%s", "arguments": %s}</tool_call>'


def write_rows(path: Path, count: int = 12, **parameters: object) -> Path:
    """Write rows as those of example_session_state_mgmt."""
    rows = [
        {
            "responses_create_params": {
                "input": [
                    {"role": "developer", "content": "Count."},
                    {"role": "user", "content": f"add {number}"},
                ],
                "tools": [INCREMENT, READ],
                **parameters,
            },
            "initial_count": 3,
            "expected_count": 3 + number,
        }
        for number in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def app() -> FastAPI:
    return build_counter_app()


@pytest.fixture(scope="module")
def url(app: FastAPI) -> Iterator[str]:
    with serve_app(app) as address:
        yield address


def test_a_task_with_tools_by_hand(app: FastAPI, url: str, tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl")
    environment = make_environment("nemo_gym", {"url": url, "path": str(path), "heldout": 0.3})
    seeds = environment.seeds("train")
    assert len(seeds) + len(environment.seeds("heldout")) == 12 and len(seeds) > 6
    assert sorted(environment.tools.tools) == ["get_counter_value", "increment_counter"]
    one, two = (environment.episode(seeds[index], "all") for index in (0, 1))
    wanted = [int(episode.prompt.removeprefix("add ")) for episode in (one, two)]
    system, user = one.reset()
    assert system["role"] == "system" and system["content"].startswith(
        "Count.\n\nYou may call tools"
    )
    assert user == {"role": "user", "content": f"add {wanted[0]}"}
    two.reset()
    two.step(CALL % ("increment_counter", '{"count": 100}'))  # in a session of its own
    step = one.step(
        CALL % ("increment_counter", json.dumps({"count": wanted[0]}))
        + CALL % ("get_counter_value", "{}")
    )
    assert [json.loads(m["content"]) for m in step.messages] == [
        {"success": True},
        {"count": 3 + wanted[0]},
    ]
    assert [m["role"] for m in step.messages] == ["tool", "tool"] and not step.is_error
    assert step.tool_call is not None and [c.name for c in step.more_calls] == ["get_counter_value"]
    step = one.step("<think>done</think>ready")
    assert (step.reward, step.terminated, step.success, step.answer) == (1.0, True, True, "ready")
    assert two.step("ready").reward == 0.0
    one.close()
    two.close()
    first = app.state.verified[0]
    assert (first["initial_count"], first["expected_count"]) == (3, 3 + wanted[0])
    kinds = [item["type"] for item in first["response"]["output"]]
    assert kinds == ["function_call"] * 2 + ["function_call_output"] * 2 + ["message"]
    calls, outputs = first["response"]["output"][:2], first["response"]["output"][2:4]
    assert [c["call_id"] for c in calls] == [o["call_id"] for o in outputs]
    assert json.loads(calls[0]["arguments"]) == {"count": wanted[0]}
    assert first["response"]["output"][-1]["content"][0]["text"] == "ready"


def test_errors_of_tools_are_read_and_failures_are_no_zeros(url: str, tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", tools=[{**INCREMENT, "parameters": {}}])
    environment = make_environment("nemo_gym", {"url": url, "path": str(path), "heldout": 0.3})
    episode = environment.episode(0, "all")
    episode.reset()
    step = episode.step(CALL % ("increment_counter", "{}"))
    assert step.is_error and "Field required" in step.messages[0]["content"]
    step = episode.step(CALL % ("decrement_counter", "{}"))
    assert step.is_error and "no tool 'decrement_counter'" in step.messages[0]["content"]
    with pytest.raises(EnvironmentFault, match="masks the sample: the judge is away"):
        episode.step("mask")
    with pytest.raises(EnvironmentFault, match="reward is None"):
        episode.step("nan")
    with pytest.raises(EnvironmentFault, match="reset it first"):
        environment.episode(0, "all").step("x")


def test_a_dialogue_of_the_gymnasium_agent(tmp_path: Path) -> None:
    rows = [
        {
            "responses_create_params": {"input": f"question {number}"},
            "verifier_metadata": {"follow_ups": ["and then?"], "expected_answer": str(number)},
        }
        for number in range(12)
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with serve_app(build_dialogue_app()) as address:
        environment = make_environment(
            "nemo_gym", {"url": address, "path": str(path), "heldout": 0.3}
        )
        episode = environment.episode(0, "all")
        number = episode.prompt.removeprefix("question ")
        assert [m["content"] for m in episode.reset()] == [f"question {number}", "hello"]
        step = episode.step("first")
        assert [(m["role"], m["content"]) for m in step.messages] == [("user", "and then?")]
        assert step.info == {"turn": 0}
        step = episode.step(f"it is {number}")
        assert (step.reward, step.terminated, step.success) == (1.0, True, True)
        episode.close()


def test_addresses_that_are_none_of_its_servers(tmp_path: Path) -> None:
    path = str(write_rows(tmp_path / "rows.jsonl"))
    other = FastAPI()
    with serve_app(other) as address:
        episode = make_environment(
            "nemo_gym", {"url": address, "path": path, "heldout": 0.3}
        ).episode(0, "all")
        with pytest.raises(EnvironmentFault, match="has neither /verify nor /step"):
            episode.reset()
    with pytest.raises(EnvironmentFault, match=r"NeMo Gym: .*Connection"):
        make_environment("nemo_gym", {"url": address, "path": path, "heldout": 0.3}).episode(
            0, "all"
        ).reset()


@pytest.mark.parametrize(
    ("row", "part"),
    [
        ('{"prompt": "x"}', "has no responses_create_params"),
        ('{"responses_create_params": {"input": []}}', "neither a text nor a list"),
        ('{"responses_create_params": {"input": [{"type": "function_call"}]}}', "is no message"),
        (
            '{"responses_create_params": {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}}',
            "content other than text",
        ),
        (
            '{"responses_create_params": {"input": "x", "tools": [{"type": "web_search"}]}}',
            "is no function",
        ),
        ("{", "rows.jsonl:2"),
    ],
)
def test_rows_are_checked(tmp_path: Path, row: str, part: str) -> None:
    path = write_rows(tmp_path / "rows.jsonl", 1)
    path.write_text(path.read_text() + row + "\n")
    with pytest.raises(DataError) as caught:
        make_environment("nemo_gym", {"url": "http://x", "path": str(path)})
    assert part in str(caught.value) and "rows.jsonl:2" in str(caught.value)


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"url": "x"}, "options.url"),
        ({"heldout": 1.0}, "options.heldout"),
        ({"timeout_s": 0.0}, "options.timeout_s"),
        ({"path": "nowhere.jsonl"}, "options.path: no such file"),
        ({"heldout": 1e-9}, "leaves no row"),
        ({"agent": "complex"}, "options.agent"),
    ],
)
def test_options_are_checked(tmp_path: Path, options: dict, part: str) -> None:
    path = str(write_rows(tmp_path / "rows.jsonl"))
    with pytest.raises(SettingsError) as caught:
        make_environment("nemo_gym", {"url": "http://x", "path": path, **options})
    assert part in str(caught.value)
