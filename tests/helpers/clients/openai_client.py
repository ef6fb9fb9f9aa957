"""The official client: chat, structured output, tools, completions, responses, and what is refused."""

import json
from typing import Literal

import openai
from checks import Checks
from pydantic import BaseModel

checks, client = Checks(), openai.OpenAI(max_retries=0)
ASKED = [{"role": "user", "content": "row 2"}]
COMMON = {"model": "small", "messages": ASKED, "seed": 1, "max_tokens": 200}
TOOL = {
    "type": "function",
    "function": {
        "name": "zoom",
        "parameters": {
            "type": "object",
            "properties": {"row": {"type": "integer", "minimum": 0, "maximum": 9}},
            "required": ["row"],
            "additionalProperties": False,
        },
        "strict": True,
    },
}
NAMED = {"type": "function", "function": {"name": "zoom"}}


class Cell(BaseModel):
    colour: Literal["red", "blue"]


with checks.passing("models"):
    assert [model.id for model in client.models.list()] == ["small"]
with checks.passing("chat, plain and streamed"):
    answer = client.chat.completions.create(**COMMON)
    stream = client.chat.completions.create(**COMMON, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert text == answer.choices[0].message.content
with checks.passing("response_format: json_object and json_schema"):
    cell = client.chat.completions.parse(**COMMON, response_format=Cell).choices[0].message.parsed
    assert cell.colour in ("red", "blue")
    form = {"type": "json_object"}
    answer = client.chat.completions.create(**COMMON | {"max_tokens": 900}, response_format=form)
    if answer.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(answer.choices[0].message.content), dict)
with checks.passing("tool_choice: required and named"):
    for choice in ("required", NAMED):
        answer = client.chat.completions.create(**COMMON, tools=[TOOL], tool_choice=choice)
        (call,) = answer.choices[0].message.tool_calls
        assert call.function.name == "zoom" and set(json.loads(call.function.arguments)) == {"row"}
    with client.chat.completions.stream(**COMMON, tools=[TOOL], tool_choice=NAMED) as stream:
        assert stream.get_final_completion().choices[0].message.tool_calls
with checks.passing("tool_choice: allowed_tools"):
    other = {"type": "function", "function": {"name": "stop"}}
    allowed = {"mode": "required", "tools": [other]}
    answer = client.chat.completions.create(
        **COMMON,
        tools=[TOOL, other],
        tool_choice={"type": "allowed_tools", "allowed_tools": allowed},
    )
    assert answer.choices[0].message.tool_calls[0].function.name == "stop"
with checks.passing("penalties and logit_bias"):
    options = {"presence_penalty": 1, "frequency_penalty": 0.5, "logit_bias": {"70": 100}}
    answer = client.chat.completions.create(**COMMON | {"max_tokens": 4}, **options, logprobs=True)
    assert len(answer.choices[0].logprobs.content) == 4
with checks.passing("completions: texts, echo with log-probabilities, stream"):
    answer = client.completions.create(
        model="small", prompt=["row 2", "row 3"], echo=True, logprobs=2, max_tokens=0
    )
    assert [choice.text for choice in answer.choices] == ["row 2", "row 3"]
    assert answer.choices[0].logprobs.token_logprobs[1] < 0
    options = {"model": "small", "prompt": "row 2", "seed": 1, "max_tokens": 9, "n": 2}
    answer = client.completions.create(**options)
    texts = ["", ""]
    for chunk in client.completions.create(**options, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [choice.text for choice in answer.choices]
with checks.passing("responses: text, stream, parse, functions, previous_response_id, delete"):
    first = client.responses.create(model="small", input="row 2", max_output_tokens=20)
    assert first.output_text
    second = client.responses.create(
        model="small", input="and?", previous_response_id=first.id, max_output_tokens=20
    )
    assert second.usage.input_tokens > first.usage.input_tokens
    with client.responses.stream(model="small", input="row 2", max_output_tokens=20) as stream:
        deltas = [e.delta for e in stream if e.type == "response.output_text.delta"]
    assert deltas
    parsed = client.responses.parse(model="small", input="row 2", text_format=Cell)
    assert parsed.output_parsed.colour in ("red", "blue")
    flat = {"type": "function", **TOOL["function"]}
    asked = client.responses.create(
        model="small", input="row 2", tools=[flat], tool_choice="required"
    )
    (call,) = [item for item in asked.output if item.type == "function_call"]
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "red"}
    client.responses.create(
        model="small",
        input=[output],
        tools=[flat],
        previous_response_id=asked.id,
        max_output_tokens=9,
    )
    assert client.responses.retrieve(first.id).id == first.id
    client.responses.delete(first.id)
    try:
        client.responses.retrieve(first.id)
        raise AssertionError("the response is still there")
    except openai.NotFoundError as error:
        assert "was deleted" in str(error)
checks.expect_refusal(
    "embeddings",
    openai.BadRequestError,
    lambda: client.embeddings.create(model="small", input="x"),
)
checks.expect_refusal(
    "a schema with not",
    openai.BadRequestError,
    lambda: client.chat.completions.create(
        **COMMON,
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "x", "schema": {"not": {}}},
        },
    ),
)
checks.expect_refusal(
    "reasoning_effort without such a variable in the chat template",
    openai.UnprocessableEntityError,
    lambda: client.chat.completions.create(**COMMON, reasoning_effort="low"),
)
checks.expect_refusal(
    "web_search and other hosted tools",
    openai.UnprocessableEntityError,
    lambda: client.responses.create(model="small", input="x", tools=[{"type": "web_search"}]),
)
checks.expect_refusal(
    "background responses",
    openai.UnprocessableEntityError,
    lambda: client.responses.create(model="small", input="x", background=True),
)
checks.print_report()
