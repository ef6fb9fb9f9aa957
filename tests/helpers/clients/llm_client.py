"""llm, the command-line program: prompts, schemas and the completions API, from its file of models."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from checks import Checks

checks, folder = Checks(), Path(tempfile.mkdtemp())
base = os.environ["OPENAI_BASE_URL"]
(folder / "extra-openai-models.yaml").write_text(
    f"""
- model_id: chat
  model_name: small
  api_base: {base}
  api_key_name: policy
  supports_schema: true
  supports_tools: true
- model_id: text
  model_name: small
  api_base: {base}
  api_key_name: policy
  completion: true
"""
)


def run_llm(*arguments):
    """Return what the command prints."""
    program = Path(sys.executable).parent / "llm"
    environment = {**os.environ, "LLM_USER_PATH": str(folder)}
    done = subprocess.run(
        [program, *arguments, "--key", os.environ["OPENAI_API_KEY"]],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


SCHEMA = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "blue"]}},
    "required": ["colour"],
    "additionalProperties": False,
}
with checks.passing("prompt, plain and streamed"):
    assert run_llm("-m", "chat", "row 2", "--no-stream", "-o", "max_tokens", "60")
    assert run_llm("-m", "chat", "row 2", "-o", "max_tokens", "60")
with checks.passing("--schema"):
    printed = run_llm("-m", "chat", "row 2", "--schema", json.dumps(SCHEMA))
    assert json.loads(printed)["colour"] in ("red", "blue")
with checks.passing("penalties and logit_bias"):
    options = {"presence_penalty": 1, "frequency_penalty": 1, "max_tokens": 9}
    pairs = [part for name, value in options.items() for part in ("-o", name, str(value))]
    assert run_llm("-m", "chat", "row 2", *pairs)
with checks.passing("completions API"):
    assert run_llm("-m", "text", "row 2", "-o", "max_tokens", "20")
checks.print_report()
