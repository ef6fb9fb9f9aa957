"""litellm: chat, structured output, demanded calls, text completions, responses."""

import json
import os

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
import litellm
from checks import Checks

checks = Checks()
ASKED = {"messages": [{"role": "user", "content": "row 2"}], "max_tokens": 200, "seed": 1}
SCHEMA = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "blue"]}},
    "required": ["colour"],
    "additionalProperties": False,
}
FORM = {"type": "json_schema", "json_schema": {"name": "cell", "schema": SCHEMA, "strict": True}}
TOOL = {"type": "function", "function": {"name": "zoom", "parameters": SCHEMA}}

with checks.passing("chat, plain and streamed"):
    answer = litellm.completion(model="openai/small", **ASKED)
    stream = litellm.completion(model="openai/small", **ASKED, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert text == answer.choices[0].message.content
with checks.passing("response_format"):
    answer = litellm.completion(model="openai/small", **ASKED, response_format=FORM)
    assert json.loads(answer.choices[0].message.content)["colour"] in ("red", "blue")
with checks.passing("tool_choice: required"):
    answer = litellm.completion(model="openai/small", **ASKED, tools=[TOOL], tool_choice="required")
    assert answer.choices[0].message.tool_calls[0].function.name == "zoom"
with checks.passing("penalties and logit_bias"):
    options = {"presence_penalty": 1, "frequency_penalty": 1, "logit_bias": {"70": 5}}
    litellm.completion(model="openai/small", **ASKED, **options)
with checks.passing("text completions"):
    answer = litellm.text_completion(
        model="text-completion-openai/small", prompt="row 2", max_tokens=9, logprobs=1
    )
    assert answer.choices[0].text
with checks.passing("responses"):
    response = litellm.responses(model="openai/small", input="row 2", max_output_tokens=9)
    assert response.output
checks.expect_refusal(
    "embeddings",
    litellm.BadRequestError,
    lambda: litellm.embedding(model="openai/small", input=["x"], max_retries=0),
)
checks.print_report()
