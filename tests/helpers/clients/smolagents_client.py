"""smolagents: agents that write code and agents that call tools, which demand a call."""

import os

from checks import Checks
from smolagents import CodeAgent, OpenAIModel, ToolCallingAgent, tool

checks = Checks()


@tool
def lookup(name: str) -> str:
    """Look a name up.

    Args:
        name: the name
    """
    return "7"


model = OpenAIModel(
    "small",
    os.environ["OPENAI_BASE_URL"],
    api_key=os.environ["OPENAI_API_KEY"],
    max_tokens=900,
    seed=1,
)
with checks.passing("CodeAgent, plain and with structured outputs"):
    assert CodeAgent(tools=[lookup], model=model, max_steps=1).run("row 2") is not None
    agent = CodeAgent(
        tools=[lookup], model=model, max_steps=1, use_structured_outputs_internally=True
    )
    assert agent.run("row 2") is not None
with checks.passing("ToolCallingAgent (tool_choice: required)"):
    agent = ToolCallingAgent(tools=[lookup], model=model, max_steps=2)
    agent.run("row 2")
    steps = [step for step in agent.memory.steps if getattr(step, "tool_calls", None)]
    assert steps and steps[0].tool_calls[0].name in ("lookup", "final_answer")
checks.print_report()
