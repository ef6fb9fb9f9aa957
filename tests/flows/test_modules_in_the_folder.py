"""A user's `tasks.py`, `flows.py` or `rl_core.py` in the current folder, next to an editable installation."""

import os
import re
import subprocess
import sys

import pytest
from helpers import ROOT

NAMES = ("tasks", "flows", "rl_core", "posttrain")
# The editable installation of setuptools finds the packages by a hook after all folders of the path.
EDITABLE = f"""
import sys
from importlib.util import spec_from_file_location

class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name in {NAMES}:
            return spec_from_file_location(name, f"{ROOT}/{{name}}/__init__.py")

sys.path[:] = [folder for folder in sys.path if folder != "{ROOT}"]
finders = [finder for finder in sys.meta_path if "Editable" not in getattr(finder, "__name__", "")]
sys.meta_path[:] = [*finders, Finder]
"""
PARENT = """
from posttrain.cli.main import append_working_directory
append_working_directory()
from rl_core.user_code.load import build_child_import_path
import os, subprocess
code = "import tasks.shipped, posttrain.cli.main, rl_core.errors, mine; print(tasks.__file__)"
done = subprocess.run(
    [sys.executable, "-P", "-c", code],
    env={**os.environ, "PYTHONPATH": build_child_import_path()},
)
sys.exit(done.returncode)
"""


@pytest.fixture
def folder(tmp_path):
    for name in NAMES:
        (tmp_path / f"{name}.py").write_text("raise SystemExit('the wrong module')\n")
    (tmp_path / "mine.py").write_text("")
    return tmp_path


def test_children_find_this_posttrain_and_modules_of_the_user(folder):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-P", "-c", EDITABLE + PARENT],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(ROOT / "tasks/__init__.py")


def test_servers_of_up_find_it(folder, monkeypatch):
    from posttrain.operations.services import build_base_environment, build_client_environment
    from posttrain.operations.state import ServerOptions

    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.setenv("PREFECT_SERVER_API_AUTH_STRING", "user:word")
    environment = build_client_environment(
        folder / "outputs", "worker", ServerOptions(), "http://127.0.0.1:5000"
    )
    assert environment["PYTHONPATH"].split(os.pathsep)[0] == str(ROOT)
    assert (
        environment["PYTHONSAFEPATH"]
        == "1"
        == build_base_environment(folder, "prefect")["PYTHONSAFEPATH"]
    )
    assert environment["PREFECT_FLOWS_HEARTBEAT_FREQUENCY"] == "30"


def test_no_child_searches_the_current_folder_first():
    """Find calls of `python -m`, which searches that folder first unless `-P` or PYTHONSAFEPATH is set."""
    with_safe_environment = {
        "posttrain/install.py",  # pip and uv alone, before anything of ours is installed
        "posttrain/operations/services.py",
        "posttrain/operations/supervisor.py",
        "posttrain/operations/registration.py",
        "tasks/processes/launch.py",
        "posttrain/monitor/server.py",
    }
    paths = {
        str(path.relative_to(ROOT))
        for room in NAMES
        for path in (ROOT / room).rglob("*.py")
        if re.search(r'sys\.executable,\s+"-m"', path.read_text())
    }
    assert paths <= with_safe_environment
