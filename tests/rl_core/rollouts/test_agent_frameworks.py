"""Agents of frameworks, unmodified, each in an environment of its own that pip installs (slow; needs an index)."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from helpers.agents import build_policy, play, reward_length

import rl_core

pytestmark = pytest.mark.slow

OPENAI = """
import json, os
from openai import OpenAI
client, task = OpenAI(), json.loads(os.environ["TASK"])
messages = [{"role": "user", "content": task["question"]}]
for n in range(2):
    answer = client.chat.completions.create(model="policy", messages=messages, max_tokens=8)
    messages += [answer.choices[0].message, {"role": "user", "content": "again"}]
with client.chat.completions.stream(model="policy", messages=messages, max_tokens=8) as stream:
    for event in stream:
        pass
assert [model.id for model in client.models.list()] == ["policy"]
"""

OPENAI_AGENTS = """
import os
from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI

set_tracing_disabled(True)

@function_tool
def lookup(name: str) -> str:
    "Look a name up."
    return "7"

agent = Agent(name="one", instructions="Use lookup.", tools=[lookup], model_settings=ModelSettings(max_tokens=8),
    model=OpenAIChatCompletionsModel("policy", AsyncOpenAI()))
print(Runner.run_sync(agent, os.environ["TASK_QUESTION"]).final_output)
"""

PYDANTIC_AI = """
import os
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel

agent = Agent(OpenAIChatModel("policy"), instructions="Use lookup.", model_settings={"max_tokens": 8})

@agent.tool_plain
def lookup(name: str) -> str:
    "Look a name up."
    return "7"

result = agent.run_sync(os.environ["TASK_QUESTION"])
print(agent.run_sync("again", message_history=result.all_messages()).output)
"""


@pytest.mark.parametrize(
    ("package", "code", "num_calls"),
    [
        ("openai", OPENAI, 3),
        ("openai-agents", OPENAI_AGENTS, 1),
        ("pydantic-ai-slim[openai]", PYDANTIC_AI, 2),
    ],
    ids=["openai", "openai-agents", "pydantic-ai"],
)
def test_a_framework_runs_unmodified(tmp_path, package, code, num_calls):
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
    install = [str(venv / "bin" / "pip"), "install", "-q", package]
    done = subprocess.run(install, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"pip cannot install {package}: {done.stderr[-300:]}")
    script = tmp_path / "agent.py"
    script.write_text(code)
    agent = rl_core.Agent(
        f"{venv}/bin/python {script}",
        [{"question": "code of a"}],
        heldout=0,
        reward=reward_length,
        readable=[str(venv)],
    )
    failed = []
    rollouts = play(agent, build_policy(), failed=failed)
    assert not failed, json.dumps([failed[0].error, failed[0].trace])
    assert len(rollouts[0].trajectory.turns) >= num_calls
    assert not rollouts[0].context_starts, "a framework's conversation stays one context"
