"""pydantic-ai: typed output by a tool, by the server's schema and by a prompt, over chat and responses."""

from typing import Literal

from checks import Checks
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel

checks = Checks()
SETTINGS = {"max_tokens": 400, "seed": 1}


class Cell(BaseModel):
    """A cell of the grid."""

    colour: Literal["red", "blue"]


for kind, model in (
    ("chat", OpenAIChatModel("small")),
    ("responses", OpenAIResponsesModel("small")),
):
    with checks.passing(f"text, {kind}"):
        assert Agent(model, model_settings=SETTINGS).run_sync("row 2").output
    with checks.passing(f"output by a tool (tool_choice: required), {kind}"):
        agent = Agent(model, output_type=ToolOutput(Cell), model_settings=SETTINGS)
        assert agent.run_sync("row 2").output.colour
    with checks.passing(f"output by the server's schema, {kind}"):
        agent = Agent(model, output_type=NativeOutput(Cell), model_settings=SETTINGS)
        assert agent.run_sync("row 2").output.colour
    with checks.passing(f"history, {kind}"):
        agent = Agent(model, model_settings=SETTINGS)
        result = agent.run_sync("row 2")
        assert agent.run_sync("again", message_history=result.all_messages()).output
checks.print_report()
