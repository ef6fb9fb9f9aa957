"""openai-agents: typed output, demanded tools and sessions over responses (its default) and chat."""

from typing import Literal

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from checks import Checks
from openai import AsyncOpenAI
from pydantic import BaseModel

set_tracing_disabled(True)
checks, client = Checks(), AsyncOpenAI(max_retries=0)
seen = []


class Cell(BaseModel):
    colour: Literal["red", "blue"]


@function_tool
def zoom(side: Literal["left", "right"]) -> str:
    """Look closer."""
    seen.append(side)
    return "red"


for kind, model in (
    ("responses", OpenAIResponsesModel("small", client)),
    ("chat", OpenAIChatCompletionsModel("small", client)),
):
    with checks.passing(f"text, {kind}"):
        agent = Agent(name="a", model=model, model_settings=ModelSettings(max_tokens=4000))
        assert Runner.run_sync(agent, "row 2").final_output
    with checks.passing(f"output_type, {kind}"):
        settings = ModelSettings(max_tokens=4000)
        agent = Agent(name="b", model=model, model_settings=settings, output_type=Cell)
        assert Runner.run_sync(agent, "row 2").final_output.colour
    with checks.passing(f"a demanded tool, then an answer, {kind}"):
        settings = ModelSettings(max_tokens=4000, tool_choice="required")
        agent = Agent(name="c", model=model, model_settings=settings, tools=[zoom])
        assert Runner.run_sync(agent, "row 2", max_turns=3).final_output is not None and seen
with checks.passing("previous_response_id"):
    model = OpenAIResponsesModel("small", client)
    agent = Agent(name="d", model=model, model_settings=ModelSettings(max_tokens=4000))
    first = Runner.run_sync(agent, "row 2")
    assert Runner.run_sync(agent, "and?", previous_response_id=first.last_response_id)
checks.print_report()
