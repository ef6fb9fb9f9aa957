"""Prefect's defaults for a script that imported Prefect before this project."""

import importlib
import random
import resource
import shutil
import subprocess
import sys

import pytest
from helpers import ROOT

from flows.runtime import embedded_server, prefect_home
from rl_core.errors import BackendError

SCRIPT = """
import logging, os, prefect
from flows.runtime.prefect_home import apply_prefect_defaults
before = dict(os.environ)
with apply_prefect_defaults():
    extra = prefect.settings.get_current_settings().logging.extra_loggers
    levels = {type(h).__name__: h.level for h in logging.getLogger().handlers}
print(sorted(extra), levels, before == dict(os.environ))
"""


def run_script(**environment):
    variables = {
        "PATH": "/usr/bin:/bin",
        "HOME": environment.pop("home"),
        "PYTHONPATH": str(ROOT),
        **environment,
    }
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=variables, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


def test_the_console_is_quiet_and_the_environment_stays(tmp_path):
    assert (
        run_script(home=str(tmp_path))
        == "['flows', 'posttrain', 'rl_core', 'tasks'] {'PrefectConsoleHandler': 50} True"
    )


def test_a_level_that_the_user_has_set_stays(tmp_path):
    assert "'PrefectConsoleHandler': 10" in run_script(
        home=str(tmp_path), PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL="DEBUG"
    )


def test_a_full_disk_is_reported_immediately(tmp_path, monkeypatch):
    """Refuse at the start: the server's database could not be created, and the run waited 120 s for it."""
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=2_000_000))
    with pytest.raises(
        BackendError, match=r"No space left on device for Prefect's database: 2\.0 MB are free"
    ):
        embedded_server._refuse_full_disk(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=20_000_000))
    assert embedded_server._refuse_full_disk(tmp_path) is None


def test_a_file_size_limit_is_reported_immediately(tmp_path, monkeypatch):
    """Refuse at the start: with `ulimit -f 300` the server neither started nor ended."""
    limits = {"soft": 300 * 1024}
    monkeypatch.setattr(
        resource, "getrlimit", lambda kind: (limits["soft"], resource.RLIM_INFINITY)
    )
    with pytest.raises(
        BackendError,
        match=r"File too large for Prefect's database: files may have 0\.3 MB here.*ulimit",
    ):
        embedded_server._refuse_full_disk(tmp_path)
    limits["soft"] = 20_000_000
    assert embedded_server._refuse_full_disk(tmp_path) is None
    limits["soft"] = resource.RLIM_INFINITY
    assert embedded_server._refuse_full_disk(tmp_path) is None


def test_waits_and_pings_of_the_client_do_not_use_the_global_generator(
    monkeypatch,
):
    """Keep `random` for user code: a reward drew other numbers after each ping of the client's connection."""
    modules = [importlib.import_module(name) for name in prefect_home._RANDOM_CONSUMERS]
    for module in modules:
        monkeypatch.setattr(module, "random", random)
    math, client, connection = modules

    def draw_after_client():
        random.seed(0)
        math.poisson_interval(1.0)
        next(client.backoff())
        connection.random.getrandbits(32)  # the payload of a ping
        return random.random()

    random.seed(0)
    first = random.random()
    assert draw_after_client() != first
    prefect_home.isolate_random_generator()
    assert draw_after_client() == first
