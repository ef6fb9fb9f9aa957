"""Users without a home folder: no HOME, and no entry in the user database."""

import os
import pwd
import stat
import tempfile
from pathlib import Path

import pytest

from flows.runtime.import_setup import ensure_home_folder
from posttrain.cli import main as cli
from rl_core.errors import SettingsError

NAMES = ("HOME", "LOGNAME", "USER", "LNAME", "USERNAME")


@pytest.fixture
def homeless(monkeypatch, tmp_path):
    """Be a user that the system does not know; return the folder that becomes the home."""

    def refuse(uid):
        raise KeyError(uid)

    monkeypatch.setattr(pwd, "getpwuid", refuse)
    for name in NAMES:
        monkeypatch.setenv(name, "to be restored")
        monkeypatch.delenv(name)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path / f"posttrain-home-{os.getuid()}"


def test_a_user_without_a_home_gets_one(homeless):
    for _ in range(2):
        ensure_home_folder()
        assert Path.home() == homeless and stat.S_IMODE(homeless.stat().st_mode) == 0o700
        assert os.environ["USER"] == str(os.getuid())
        del os.environ["HOME"]


def test_commands_that_look_into_the_home_folder_work(homeless, capsys):
    """`posttrain check machine`, `up` and `run` ended with a traceback: Could not determine home directory."""
    from posttrain.operations.connection import connect_to_servers

    assert cli.main(["runs", "--output", str(homeless.parent / "out")]) == 0
    connect_to_servers(homeless.parent / "out")
    assert "no runs in" in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["link", "open to others", "file"])
def test_a_home_that_others_can_change_is_refused_in_a_line(homeless, kind, capsys):
    if kind == "link":
        homeless.symlink_to(homeless.parent)
    elif kind == "file":
        homeless.write_text("")
    else:
        homeless.mkdir()
        homeless.chmod(0o777)
    with pytest.raises(SettingsError, match="no home folder"):
        ensure_home_folder()
    assert cli.main(["runs"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_home_that_is_set_is_left_alone(homeless, monkeypatch):
    monkeypatch.setenv("HOME", "/does/not/exist")
    ensure_home_folder()
    assert os.environ["HOME"] == "/does/not/exist" and not homeless.exists()
