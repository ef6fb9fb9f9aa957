"""inspect-ai: an evaluation with generate, demanded tools, a response schema, and log-probabilities."""

import os
import tempfile

os.environ["INSPECT_LOG_DIR"] = tempfile.mkdtemp()
os.environ["POLICY_API_KEY"] = os.environ["OPENAI_API_KEY"]
os.environ["POLICY_BASE_URL"] = os.environ["OPENAI_BASE_URL"]
import asyncio
import json

from checks import Checks
from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.model import GenerateConfig, ResponseSchema, get_model
from inspect_ai.scorer import includes
from inspect_ai.solver import generate, use_tools
from inspect_ai.tool import tool
from inspect_ai.util import json_schema

checks = Checks()


@tool
def zoom():
    async def execute(row: int) -> str:
        """Look closer.

        Args:
            row: the row
        """
        return "red"

    return execute


def run_task(model, solver, **config):
    """Return the sample of an evaluation that succeeded."""
    task = Task([Sample("row 2", target="zzz")], solver=solver, scorer=includes())
    (log,) = eval(task, model=model, display="none", **config)
    assert log.status == "success", log.error
    return log.samples[0]


for name in ("openai-api/policy/small", "openai/small"):
    with checks.passing(f"eval, {name}"):
        assert run_task(name, generate(), max_tokens=30).output.completion is not None
    with checks.passing(f"a demanded tool, {name}"):
        solver = [use_tools(zoom(), tool_choice="any"), generate(tool_calls="none")]
        sample = run_task(name, solver, max_tokens=300)
        assert sample.messages[-1].tool_calls[0].function == "zoom"
    with checks.passing(f"response_schema, {name}"):
        schema = ResponseSchema(name="cell", json_schema=json_schema(bool))
        config = GenerateConfig(response_schema=schema, max_tokens=60)
        output = asyncio.run(get_model(name).generate("row 2", config=config))
        assert json.loads(output.completion) in (True, False)
with checks.passing("penalties, logit_bias and log-probabilities"):
    config = GenerateConfig(
        presence_penalty=1.0, frequency_penalty=0.5, logprobs=True, top_logprobs=2, max_tokens=9
    )
    output = asyncio.run(get_model("openai-api/policy/small").generate("row 2", config=config))
    assert len(output.choices[0].logprobs.content) == output.usage.output_tokens
checks.print_report()
