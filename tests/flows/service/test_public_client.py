"""The unmodified public client (tinker SDK) in environments of its own, against server and worker as processes.

`make sdk-test`. The environments are made here and kept in POSTTRAIN_SDK_ENVIRONMENTS, if that is set.
"""

import json
import os
import subprocess
import sys
import sysconfig
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from helpers import ROOT

from flows.operations.ports import is_free
from flows.service.configuration import service_settings
from flows.service.store import ServiceStore
from rl_core.storage.single_files import write_json_atomic
from tasks.config import resolve

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

VERSIONS = ("0.25", "0.30", "0.34", "0.38")
SCRIPTS = ROOT / "tests" / "sdk"


@pytest.fixture(scope="module")
def environments(tmp_path_factory):
    """python(version): the interpreter of an environment with the newest SDK of that minor version."""
    kept = os.environ.get("POSTTRAIN_SDK_ENVIRONMENTS")
    folder = Path(kept) if kept else tmp_path_factory.mktemp("environments")

    def python(version):
        place = folder / version
        if not (place / "installed").exists():
            subprocess.run([sys.executable, "-m", "venv", str(place)], check=True)
            pip = [str(place / "bin" / "pip"), "install", "--quiet", "--no-input", f"tinker=={version}.*"]
            done = subprocess.run(pip, capture_output=True, text=True)
            if done.returncode:
                pytest.skip(f"tinker {version} cannot be installed: {done.stderr.strip().splitlines()[-1]}")
            (place / "installed").touch()
        return str(place / "bin" / "python")

    return python


@pytest.fixture(scope="module")
def served(tmp_path_factory, base_folder):
    """(address, key, folder that holds the base model) of a running service."""
    folder = tmp_path_factory.mktemp("served")
    port = next(number for number in range(8400, 8500) if is_free(number))
    values = {"folder": str(folder / "service"), "server": {"port": port},
              "engine": {"bases": {"base": str(base_folder)}, "device": "cpu"}}  # fmt: skip
    settings = service_settings(values)
    store = ServiceStore(settings.store_url)
    _, secret = store.create_key("sdk")
    store.close()
    write_json_atomic(folder / "settings.json", resolve(settings))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    processes = []
    for role in ("server", "worker"):
        command = [sys.executable, "-m", "flows.service.process", role, str(folder / "settings.json")]
        with open(folder / f"{role}.log", "wb") as log:
            processes.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
    address = f"http://127.0.0.1:{port}"
    try:
        _wait_for(f"{address}/api/v1/healthz")
        yield address, secret, base_folder.parent
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait(60)


def _wait_for(url):
    for _ in range(3000):  # five minutes: other programs may keep the machine busy
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    raise AssertionError(f"{url} does not answer")


def run(python, script, served):
    """The JSON that a script prints last."""
    address, key, folder = served
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("TINKER", "PYTHON"))}
    environment |= {"TINKER_BASE_URL": address, "TINKER_API_KEY": key, "EXTRA_PACKAGES": sysconfig.get_path("purelib")}
    command = [python, str(SCRIPTS / script)]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0 and done.stdout, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("version", VERSIONS)
def test_scoreboard(environments, served, version):
    """Every public method is supported, or refused by name; at least nine of ten are supported."""
    found = run(environments(version), "scoreboard.py", served)
    assert len(found) > 80
    other = {name: text for name, text in found.items() if text != "supported" and not text.startswith("refused")}
    assert other == {}
    share = sum(text == "supported" for text in found.values()) / len(found)
    print(f"\nSDK {version}: {share:.1%} of {len(found)} public methods supported")
    assert share >= 0.9


@pytest.mark.parametrize("version", VERSIONS)
def test_loops(environments, served, version):
    """Supervised and policy-gradient loops learn; what the client computes from our answers agrees with itself."""
    found = run(environments(version), "loops.py", served)
    assert found["sft_losses"][-1] < 0.5 * found["sft_losses"][0]
    assert found["resumed_loss"] == pytest.approx(found["saved_loss"], abs=1e-6)
    assert found["custom_logprobs"] == pytest.approx(found["logprobs"], abs=1e-5)
    assert found["sampled_difference"] < 1e-4
    assert found["rewards"][-1] > found["rewards"][0] + 0.2
    assert found["chunked_loss"] == pytest.approx(found["whole_loss"], rel=1e-6)
