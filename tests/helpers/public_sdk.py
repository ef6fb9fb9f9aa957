"""Environments with the public SDK, and a service as two processes, for tests of the one against the other."""

import contextlib
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from helpers import ROOT
from helpers.waiting import free_ports
from posttrain.settings_files import parse_service_settings
from posttrain.training_service.store import ServiceStore
from rl_core.storage.atomic_files import write_json_atomic
from tasks.config import dump_settings


def sdk_environments(folder):
    """Return python(version): the interpreter of an environment with the newest SDK of that minor version."""
    folder = Path(os.environ.get("POSTTRAIN_SDK_ENVIRONMENTS") or folder)

    def python(version):
        environment = folder / version
        if not (environment / "installed").exists():
            subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True)
            pip = [
                str(environment / "bin" / "pip"),
                "install",
                "--quiet",
                "--no-input",
                f"tinker=={version}.*",
            ]
            done = subprocess.run(pip, capture_output=True, text=True)
            if done.returncode:
                pytest.skip(
                    f"tinker {version} cannot be installed: {done.stderr.strip().splitlines()[-1]}"
                )
            (environment / "installed").touch()
        return str(environment / "bin" / "python")

    return python


@contextlib.contextmanager
def run_service(folder, bases, **settings):
    """Run a service in a folder, as two processes; yield (address, key). settings: further blocks."""
    (port,) = free_ports(1)
    values = {
        "folder": str(folder / "service"),
        "mlflow_runs": False,
        "server": {"port": port},
        "engine": {"bases": bases, "device": "cpu"},
        **settings,
    }
    settings = parse_service_settings(values)
    store = ServiceStore(settings.store_url)
    _, secret = store.create_key("sdk")
    store.close()
    write_json_atomic(folder / "settings.json", dump_settings(settings))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    processes = []
    for role in ("server", "worker"):
        command = [
            sys.executable,
            "-m",
            "posttrain.training_service.process",
            role,
            str(folder / "settings.json"),
        ]
        with open(folder / f"{role}.log", "wb") as log:
            processes.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
    address = f"http://127.0.0.1:{port}"
    try:
        _wait_for(f"{address}/api/v1/healthz")
        yield address, secret
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
