"""Prefect's defaults for a script that imported Prefect before this project."""

import subprocess
import sys

from helpers import ROOT

SCRIPT = """
import logging, os, prefect
from flows.runtime.prefect_home import prefect_defaults
before = dict(os.environ)
with prefect_defaults():
    extra = prefect.settings.get_current_settings().logging.extra_loggers
    levels = {type(h).__name__: h.level for h in logging.getLogger().handlers}
print(sorted(extra), levels, before == dict(os.environ))
"""


def run(**environment):
    variables = {"PATH": "/usr/bin:/bin", "HOME": environment.pop("home"), "PYTHONPATH": str(ROOT), **environment}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=variables, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


def test_the_console_is_quiet_and_the_environment_stays(tmp_path):
    assert run(home=str(tmp_path)) == "['flows', 'rl_core', 'tasks'] {'PrefectConsoleHandler': 50} True"


def test_a_level_that_the_user_has_set_stays(tmp_path):
    assert "'PrefectConsoleHandler': 10" in run(home=str(tmp_path), PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL="DEBUG")
