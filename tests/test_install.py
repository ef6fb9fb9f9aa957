"""posttrain/install.py: the arguments of uv, and the installation by pip if uv fails."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from subprocess import CompletedProcess

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def install(monkeypatch):
    spec = importlib.util.spec_from_file_location(
        "posttrain_install", ROOT / "posttrain" / "install.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for variable in ("UV_FIND_LINKS", "UV_DEFAULT_INDEX", "SSL_CERT_FILE"):
        monkeypatch.delenv(variable, raising=False)
    return module


class Commands:
    """Stand-in for subprocess.run: records commands and returns exit codes by a word of them."""

    def __init__(self, codes, stderr=""):
        self.codes, self.stderr, self.seen = codes, stderr, []

    def __call__(self, command, **options):
        self.seen.append([str(part) for part in command])
        code = next((code for word, code in self.codes.items() if word in self.seen[-1]), 0)
        return CompletedProcess(command, code, stdout="", stderr=self.stderr)


def test_settings_of_pip_reach_uv_and_the_environment_wins_over_files(install, monkeypatch):
    listed = "global.index-url='https://one/simple'\n:env:.index-url='https://two/simple'\ninstall.find-links='/wheels'\n"
    monkeypatch.setattr(
        install.subprocess, "run", lambda *_, **__: CompletedProcess([], 0, stdout=listed)
    )
    settings = install.read_pip_settings()
    assert settings == {"index-url": "https://two/simple", "find-links": "/wheels"}
    assert install.convert_to_uv_variables(settings) == {
        "UV_DEFAULT_INDEX": "https://two/simple",
        "UV_FIND_LINKS": "/wheels",
    }
    monkeypatch.setenv("UV_FIND_LINKS", "/mine")
    assert install.convert_to_uv_variables(settings) == {"UV_DEFAULT_INDEX": "https://two/simple"}


def test_a_build_of_torch_at_hand_or_a_driver_decides_on_the_build(install, monkeypatch, tmp_path):
    monkeypatch.setattr(install.sys, "platform", "linux")
    monkeypatch.setattr(install.shutil, "which", lambda name: None)
    assert install.needs_cpu_build({})
    assert install.needs_cpu_build({"UV_FIND_LINKS": f"{tmp_path}, /nowhere"})
    (tmp_path / "torch-2.13.0-cp311-none-any.whl").touch()
    assert not install.needs_cpu_build({"UV_FIND_LINKS": str(tmp_path)})
    monkeypatch.setattr(install.shutil, "which", lambda name: "/usr/bin/nvidia-smi")
    assert not install.needs_cpu_build({})


def test_an_index_of_cpu_builds_that_does_not_answer_is_followed_by_the_usual_one(
    install, monkeypatch, capsys
):
    commands = Commands({"--torch-backend": 2}, "Resolving\n  error: No space left on device\n")
    monkeypatch.setattr(install.subprocess, "run", commands)
    assert install.install_with_uv(["--editable", "project"], {}, is_cpu=True) is None
    attempts = [command for command in commands.seen if "--editable" in command]
    assert [("--torch-backend" in command) for command in attempts] == [True, False]
    assert capsys.readouterr().out == (
        "uv could not install torch's CPU build (error: No space left on device): the build of the usual index\n"
    )


def test_pip_installs_where_uv_fails_and_its_failure_is_the_exit_code(install, monkeypatch, capsys):
    monkeypatch.setattr(install.sys, "argv", ["install.py", "--extras", "dev"])
    monkeypatch.setattr(
        install.shutil, "which", lambda name: "/bin/uv" if name == "uv" else "/usr/bin/nvidia-smi"
    )
    commands = Commands({"/bin/uv": 2})
    monkeypatch.setattr(install.subprocess, "run", commands)
    assert install.main() == 0
    assert [command[-1] for command in commands.seen if "-c" in command] == [
        "torch",
        f"{ROOT}[dev]",
    ]
    output = capsys.readouterr().out
    assert "uv failed (exit code 2); pip installs them" in output
    assert "(up to 6.5 GB with CUDA)" in output
    monkeypatch.setattr(install.subprocess, "run", Commands({"/bin/uv": 2, "torch": 7}))
    assert install.main() == 7


@pytest.mark.parametrize("torch", ["auto", "cpu"])
def test_pip_installs_the_cpu_build_where_there_is_no_driver(install, monkeypatch, capsys, torch):
    commands = Commands({"/bin/uv": 2})
    monkeypatch.setattr(install.subprocess, "run", commands)
    monkeypatch.setattr(install.shutil, "which", lambda name: "/bin/uv" if name == "uv" else None)
    monkeypatch.setattr(install, "needs_cpu_build", lambda environment: True)
    assert install.main(["--torch", torch]) == 0
    (command,) = [command for command in commands.seen if command[-1] == "torch"]
    assert command[-3:] == ["--extra-index-url", install.CPU_INDEX, "torch"]
    assert "(2 GB)" in capsys.readouterr().out


def test_ctrl_c_is_no_failure_of_uv_after_which_pip_would_install(install, monkeypatch, capsys):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(install.subprocess, "run", interrupted)
    monkeypatch.setattr(install.sys, "argv", ["install.py"])
    assert install.main() == 130
    assert capsys.readouterr().err == "stopped by Ctrl-C; the same command continues\n"


def test_a_wheel_installs_its_own_version_and_pins_without_a_checkout(install, monkeypatch, capsys):
    assert install.format_project("") == ["--editable", str(ROOT)]
    monkeypatch.setattr(install, "IS_CHECKOUT", False)
    monkeypatch.setattr(install, "version", lambda name: "0.1.0")
    assert install.format_project("monitor,wandb") == ["posttrain[monitor,wandb]==0.1.0"]
    commands = Commands({})
    monkeypatch.setattr(install.subprocess, "run", commands)
    monkeypatch.setattr(install, "needs_cpu_build", lambda environment: False)
    assert install.main(["--torch", "cpu"]) == 0
    assert commands.seen[-1][-3:] == ["posttrain==0.1.0", "--torch-backend", "cpu"]
    assert str(install.CONSTRAINTS) in commands.seen[-1]
    assert "--torch cpu: torch's CPU build" in capsys.readouterr().out


def test_an_environment_of_uv_gets_the_pip_that_python_brings(install, monkeypatch, capsys):
    """`uv venv` makes environments without pip, whose settings name the index and which installs uv."""
    commands = Commands({"ensurepip": 0})
    monkeypatch.setattr(install.subprocess, "run", commands)
    monkeypatch.setattr(install.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(install.shutil, "which", lambda name: None)
    assert install.main(["--torch", "cpu"]) == 0
    assert commands.seen[0] == [sys.executable, "-m", "ensurepip"]

    monkeypatch.setattr(install.subprocess, "run", Commands({"ensurepip": 1}))
    assert install.main(["--torch", "cpu"]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"{sys.prefix} has no pip, and there is no uv on the PATH; run `uv pip")
    monkeypatch.setattr(install.sys, "executable", "/home/my team/bin/python")
    assert install.main(["--torch", "cpu"]) == 1
    assert "`uv pip install --python '/home/my team/bin/python' pip`" in capsys.readouterr().err
    monkeypatch.undo()
    monkeypatch.setattr(install.importlib.util, "find_spec", lambda name: None)

    commands = Commands({"ensurepip": 1})
    monkeypatch.setattr(install.subprocess, "run", commands)
    monkeypatch.setattr(install.shutil, "which", lambda name: "/bin/uv" if name == "uv" else None)
    assert install.main(["--torch", "cpu"]) == 0
    assert commands.seen[-1][0] == "/bin/uv"


def test_the_script_of_the_checkout_is_the_same_program():
    done = run([sys.executable, ROOT / "deployments" / "install.py", "--help"])
    assert done.returncode == 0 and "--torch" in done.stdout
    done = run([sys.executable, "-m", "posttrain.install", "--extras"], cwd=ROOT)
    assert done.returncode == 2 and "expected one argument" in done.stderr


def run(command, **options):
    return subprocess.run(command, capture_output=True, text=True, timeout=60, **options)
