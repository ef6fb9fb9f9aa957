"""langchain-openai: structured output in three ways, demanded calls, responses, the completions model."""

from typing import Literal

from checks import Checks
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel

checks = Checks()


class Cell(BaseModel):
    """A cell of the grid."""

    colour: Literal["red", "blue"]


@tool
def zoom(side: Literal["left", "right"]) -> str:
    """Look closer."""
    return "red"


model = ChatOpenAI(model="small", max_tokens=300, seed=1, max_retries=0)
with checks.passing("chat, plain, streamed and in batches"):
    assert model.invoke("row 2").content == "".join(c.content for c in model.stream("row 2"))
    assert len(model.batch(["row 2", "row 3"])) == 2
for method in ("json_schema", "function_calling"):
    with checks.passing(f"with_structured_output: {method}"):
        assert model.with_structured_output(Cell, method=method).invoke("row 2").colour
with checks.passing("bind_tools with tool_choice"):
    for choice in ("any", "zoom"):
        (call,) = model.bind_tools([zoom], tool_choice=choice).invoke("row 2").tool_calls
        assert call["name"] == "zoom" and call["args"]["side"] in ("left", "right")
with checks.passing("penalties and logit_bias"):
    options = {"presence_penalty": 1, "frequency_penalty": 1, "logit_bias": {70: 5}}
    ChatOpenAI(model="small", max_tokens=9, **options).invoke("row 2")
with checks.passing("responses API"):
    through = ChatOpenAI(model="small", max_tokens=300, use_responses_api=True, max_retries=0)
    assert through.invoke("row 2").content
    assert through.with_structured_output(Cell).invoke("row 2").colour
    assert through.bind_tools([zoom], tool_choice="required").invoke("row 2").tool_calls
    assert list(through.stream("row 2"))
with checks.passing("OpenAI, the completions model"):
    assert OpenAI(model="small", max_tokens=9, seed=1, max_retries=0).invoke("row 2")
checks.print_report()
