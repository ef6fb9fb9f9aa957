"""OpenAI's clients and tools, unmodified, against a server of this process (`make clients-test`; slow).

pip installs each client into an environment of its own, which needs an index. `POSTTRAIN_CLIENTS=FOLDER` holds the
environments: FOLDER/NAME is taken if it exists, and made there otherwise.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import ROOT
from helpers.serving import TOKEN, make_folder_of_model, running_server

pytestmark = [pytest.mark.slow, pytest.mark.clients]
pytest.importorskip("llguidance")

# name: packages, script in tests/helpers/clients
CLIENTS = {
    "openai": (["openai"], "openai_client.py"),
    "litellm": (["litellm"], "litellm_client.py"),
    "langchain-openai": (["langchain-openai"], "langchain_client.py"),
    "pydantic-ai": (["pydantic-ai-slim[openai]"], "pydantic_ai_client.py"),
    "openai-agents": (["openai-agents"], "openai_agents_client.py"),
    "llm": (["llm"], "llm_client.py"),
    "instructor": (["instructor"], "instructor_client.py"),
    "inspect-ai": (["inspect-ai", "openai"], "inspect_client.py"),
    "lm-eval": (["lm-eval[api]", "transformers"], "lm_eval_client.py"),
    "smolagents": (["smolagents[openai]"], "smolagents_client.py"),
    "mini-swe-agent": (["mini-swe-agent"], "mini_swe_agent_client.py"),
    "dspy": (["dspy"], "dspy_client.py"),
}
SECONDS = 600  # of one client's script


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clients")
    model = make_folder_of_model(folder / "model", context=16384)
    with running_server(folder, model, context=16384, request_seconds=300.0) as running:
        running.model_folder = model
        yield running


def find_python(folder, packages):
    """Return the Python of an environment with the packages; make it if it does not exist."""
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        install = [str(python), "-m", "pip", "install", "-q", *packages]
        done = subprocess.run(install, capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"pip cannot install {packages}: {done.stderr[-300:]}")
    return python


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", CLIENTS)
def test_a_client_runs_unmodified(tmp_path, server, name):
    packages, script = CLIENTS[name]
    environments = Path(os.environ.get("POSTTRAIN_CLIENTS", tmp_path))
    python = find_python(environments / name, packages)
    kept = ("PATH", "HOME", "LANG", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE")
    environment = {variable: os.environ[variable] for variable in kept if variable in os.environ}
    environment |= {
        "OPENAI_BASE_URL": f"{server.url}/v1",
        "OPENAI_API_BASE": f"{server.url}/v1",
        "OPENAI_API_KEY": TOKEN,
        "CLIENT_MODEL_FOLDER": str(server.model_folder),
        "NO_PROXY": "127.0.0.1",
        "OMP_NUM_THREADS": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    done = subprocess.run(
        [str(python), str(ROOT / "tests" / "helpers" / "clients" / script)],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    report = json.loads(done.stdout.strip().splitlines()[-1])
    ask = "import importlib.metadata, sys; print(importlib.metadata.version(sys.argv[1]))"
    command = [str(python), "-c", ask, packages[0].partition("[")[0]]
    version = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    print(f"\n{name}: {version}\n  passed: {report['passed']}\n  refused: {report['refused']}")
    assert not report["failed"], "\n".join(f"{k}: {v}" for k, v in report["failed"].items())
    assert report["passed"]
