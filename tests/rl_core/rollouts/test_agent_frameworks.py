"""Agents of frameworks, unmodified, in an environment of their own (slow).

pip installs each package into a new environment, which needs an index. `AGENT_FRAMEWORKS=/path/to/venv` takes one that
has them instead.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

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


LANGCHAIN = """
import os
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

@tool
def lookup(name: str) -> str:
    "Look a name up."
    return "7"

model = ChatOpenAI(model="policy", max_tokens=8).bind_tools([lookup])
messages = [HumanMessage(os.environ["TASK_QUESTION"])]
for n in range(2):
    messages += [model.invoke(messages), HumanMessage("again")]
assert list(model.stream(messages))
"""

SMOLAGENTS = """
import os
from smolagents import CodeAgent, OpenAIModel, ToolCallingAgent, tool

@tool
def lookup(name: str) -> str:
    \"\"\"Look a name up.

    Args:
        name: the name
    \"\"\"
    return "7"

model = OpenAIModel("policy", os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"], max_tokens=8)
for kind in (CodeAgent, ToolCallingAgent):
    print(kind(tools=[lookup], model=model, max_steps=1).run(os.environ["TASK_QUESTION"]))
"""

MINI_SWE_AGENT = """
import os
os.environ |= {"MSWEA_COST_TRACKING": "ignore_errors", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel

model = LitellmModel(model_name="openai/policy", model_kwargs={"max_tokens": 8})
agent = DefaultAgent(model, LocalEnvironment(), system_template="Use bash.", instance_template="{{task}}", step_limit=2)
agent.run(os.environ["TASK_QUESTION"])
"""

CASES = {
    "openai": ("openai", OPENAI, 3),
    "openai-agents": ("openai-agents", OPENAI_AGENTS, 1),
    "pydantic-ai": ("pydantic-ai-slim[openai]", PYDANTIC_AI, 2),
    "langchain": ("langchain-openai", LANGCHAIN, 3),
    "smolagents": ("smolagents[openai]", SMOLAGENTS, 4),
    "mini-swe-agent": ("mini-swe-agent", MINI_SWE_AGENT, 2),
}


def find_python(folder, package):
    """Return the Python of an environment with the package."""
    if existing := os.environ.get("AGENT_FRAMEWORKS"):
        return Path(existing) / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    install = [str(folder / "bin" / "pip"), "install", "-q", package]
    done = subprocess.run(install, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"pip cannot install {package}: {done.stderr[-300:]}")
    return folder / "bin" / "python"


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", CASES)
def test_a_framework_runs_unmodified(tmp_path, name):
    package, code, num_calls = CASES[name]
    python = find_python(tmp_path / "venv", package)
    script = tmp_path / "agent.py"
    script.write_text(code)
    agent = rl_core.Agent(
        f"{python} {script}",
        [{"question": "code of a"}],
        heldout=0,
        reward=reward_length,
        readable=[str(python.parents[1])],
        timeout_s=300.0,
        context=16384,
    )
    failed = []
    policy = build_policy(context=16384)
    rollouts = play(agent, policy, failed=failed, max_turns=20, max_completion_tokens=16384)
    assert not failed, json.dumps([failed[0].error, failed[0].trace])
    turns = rollouts[0].trajectory.turns
    assert len(turns) >= num_calls, [turn.action for turn in turns]
    if name not in ("smolagents", "mini-swe-agent"):  # these send their own versions of replies
        assert not rollouts[0].context_starts, "a framework's conversation stays one context"
