"""Examples of the public SDK against server and worker processes: they learn.

`make sdk-test`, like `test_public_client.py`, whose environment of SDK 0.38 they use.
"""

import json
import os
import re
import subprocess
import sys
import sysconfig

import pytest
from helpers import ROOT
from helpers.public_sdk import run_service, sdk_environments

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
EXAMPLES = ROOT / "examples"


@pytest.fixture(scope="module")
def environments(tmp_path_factory):
    return sdk_environments(tmp_path_factory.mktemp("environments"))


@pytest.fixture(scope="module")
def grid(tmp_path_factory):
    """Create the base model of the examples."""
    folder = tmp_path_factory.mktemp("grid") / "grid"
    command = [sys.executable, str(EXAMPLES / "service_grpo.py"), str(folder)]
    subprocess.run(
        command,
        check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=folder.parent,
        timeout=900,
    )
    return folder


@pytest.fixture(scope="module")
def served(tmp_path_factory, grid):
    references = {"start": str(grid)}
    folder = tmp_path_factory.mktemp("served")
    with run_service(folder, {"grid": str(grid)}, reference_models=references) as address:
        yield address


def run_example(python, served, *command):
    address, key = served[:2]
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("TINKER", "PYTHON"))
    }
    # posttrain and its dependencies
    path = os.pathsep.join([str(ROOT), sysconfig.get_path("purelib")])
    environment |= {
        "TINKER_BASE_URL": address,
        "TINKER_API_KEY": key,
        "TINKER_TELEMETRY": "0",
        "PYTHONPATH": path,
    }
    done = subprocess.run(
        [python, *map(str, command)], env=environment, capture_output=True, text=True, timeout=1200
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = done.stderr.splitlines()
    # calls that the SDK is about to remove
    assert [line for line in lines if "FutureWarning" in line and "examples" in line] == []
    return done.stdout


def test_grpo_on_pixel_grid_learns(environments, served):
    text = run_example(environments("0.38"), served, EXAMPLES / "service_grpo.py")
    success = [int(share) / 100 for share in re.findall(r"success (\d+)%", text)]
    assert len(success) == 30
    assert sum(success[-5:]) / 5 > sum(success[:5]) / 5 + 0.15
    print(json.dumps(success))


def test_preferences_are_learned(environments, served):
    text = run_example(environments("0.38"), served, EXAMPLES / "service_preferences.py")
    accuracy = [float(share) for share in re.findall(r"accuracy ([\d.]+)%", text)]
    margins = [float(margin) for margin in re.findall(r"margin (-?[\d.]+)", text)]
    assert margins[0] == pytest.approx(0.0, abs=1e-3)  # the policy is the reference
    assert accuracy[-1] > 75 and margins[-1] > 0.2
    text = run_example(environments("0.38"), served, EXAMPLES / "service_preferences.py", "reward")
    first, last = map(float, re.findall(r"([\d.]+)%", text))
    assert last > max(65.0, first + 10)


def test_ppo_with_pipelined_requests_learns(environments, served):
    text = run_example(environments("0.38"), served, EXAMPLES / "service_ppo.py")
    rewards = [float(value) for value in re.findall(r"reward (-?[\d.]+)", text)]
    assert len(rewards) == 20
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.06
    differences = [float(value) for value in re.findall(r"advantages differ by ([\d.e-]+)", text)]
    assert (
        len(differences) == 20 and max(differences) < 1e-4
    )  # GAE of the client and of the service
    references = [float(value) for value in re.findall(r"KL to the start (-?[\d.e-]+)", text)]
    assert abs(references[0]) < 1e-4 < references[-1]
    print(json.dumps(rewards))
