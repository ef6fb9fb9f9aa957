"""Installation of posttrain's packages in the tested versions, into the environment of this Python.

From a wheel, which holds the tested versions:

    pip install --no-deps posttrain-*.whl
    python -m posttrain.install [--extras monitor,postgres] [--torch cpu]

In a checkout `python deployments/install.py` (or `make setup`) also installs the checkout itself.

uv resolves and installs; where it cannot be had or fails, pip does the same work more slowly. uv reads no settings of
pip, so those that name where packages come from (index, extra wheels, certificates) are handed over. torch comes in the
build that the machine needs: without an NVIDIA driver the CPU build, if its index answers. Only the standard library is
imported.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

PROJECT_ROOT = Path(__file__).resolve().parents[1]
IS_CHECKOUT = (PROJECT_ROOT / "pyproject.toml").is_file()
CONSTRAINTS = (
    PROJECT_ROOT if IS_CHECKOUT else PROJECT_ROOT / "tasks" / "shipped"
) / "constraints.txt"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
# pip's setting -> the variable that tells uv the same
UV_VARIABLES = {
    "find-links": "UV_FIND_LINKS",
    "index-url": "UV_DEFAULT_INDEX",
    "cert": "SSL_CERT_FILE",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Install; return the exit code of the tool that failed, 130 after Ctrl-C, or 0."""
    parser = argparse.ArgumentParser(
        prog="posttrain.install", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument(
        "--extras", default="", help="extras of pyproject.toml, separated by commas"
    )
    parser.add_argument(
        "--torch",
        choices=("auto", "cpu", "default"),
        default="auto",
        help="torch's build: cpu, or that of the usual index; auto: cpu without an NVIDIA driver",
    )
    arguments = parser.parse_args(argv)
    project = format_project(arguments.extras)
    started = time.monotonic()
    if not ensure_pip() and shutil.which("uv") is None:
        print(
            f"{sys.prefix} has no pip, and there is no uv on the PATH; run "
            f"`uv pip install --python {shlex.quote(sys.executable)} pip`, or make the environment by `python -m venv`",
            file=sys.stderr,
        )
        return 1
    try:
        environment = {**os.environ, **convert_to_uv_variables(read_pip_settings())}
        is_cpu = arguments.torch == "cpu" or (
            arguments.torch == "auto" and needs_cpu_build(environment)
        )
        size = "2 GB" if is_cpu else "up to 6.5 GB with CUDA"
        print(f"installing the pinned packages into {sys.prefix} ({size})", flush=True)
        if is_cpu:
            reason = "--torch cpu" if arguments.torch == "cpu" else "no NVIDIA driver here"
            print(f"{reason}: torch's CPU build", flush=True)
        problem = install_with_uv(project, environment, is_cpu=is_cpu)
        if problem:
            print(f"{problem}; pip installs them, which takes some minutes", flush=True)
            code = install_with_pip(project, is_cpu=is_cpu)
            if code:
                return code
    except KeyboardInterrupt:
        print("stopped by Ctrl-C; the same command continues", file=sys.stderr)
        return 130
    print(f"installed in {time.monotonic() - started:.0f} s")
    return 0


def ensure_pip() -> bool:
    """Install the pip that Python brings into an environment without one, as `uv venv` makes it. Return whether it is
    there; its settings name the package index.
    """
    if importlib.util.find_spec("pip") is not None:
        return True
    return not subprocess.run([sys.executable, "-m", "ensurepip"], capture_output=True).returncode


def format_project(extras: str) -> list[str]:
    """Return the arguments of pip and uv that name this project with its extras."""
    suffix = f"[{extras}]" if extras else ""
    if IS_CHECKOUT:
        return ["--editable", f"{PROJECT_ROOT}{suffix}"]
    return [f"posttrain{suffix}=={version('posttrain')}"]


def install_with_uv(
    project: Sequence[str], environment: dict[str, str], *, is_cpu: bool
) -> str | None:
    """Install by uv. Return the reason if that was not possible; None = it was.

    Args:
        environment: of uv.
        is_cpu: install torch's CPU build, if its index answers.
    """
    program = shutil.which("uv")
    if program is None and run_pip("uv"):
        return "uv cannot be installed"
    uv = [program] if program else [sys.executable, "-m", "uv"]
    command = [
        *uv,
        "pip",
        "install",
        "--python",
        sys.executable,
        "--quiet",
        "--constraints",
        str(CONSTRAINTS),
        *project,
    ]
    if is_cpu:
        impatient = {**environment, "UV_HTTP_RETRIES": "0", "UV_HTTP_TIMEOUT": "30"}
        attempt = subprocess.run(
            [*command, "--torch-backend", "cpu"], env=impatient, stderr=subprocess.PIPE, text=True
        )
        if attempt.returncode == 0:
            return None
        reason = (attempt.stderr.strip() or f"exit code {attempt.returncode}").splitlines()[-1]
        print(
            f"uv could not install torch's CPU build ({reason.strip()}): the build of the usual index",
            flush=True,
        )
    code = subprocess.run(command, env=environment).returncode
    return f"uv failed (exit code {code})" if code else None


def read_pip_settings() -> dict[str, str]:
    """Read pip's settings by name, environment variables before files."""
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True
    ).stdout
    settings: dict[str, str] = {}
    for line in sorted(listed.splitlines(), key=lambda line: line.startswith(":env:")):
        key, _, value = line.partition("=")
        settings[key.rpartition(".")[2]] = value.strip("'\"")
    return settings


def convert_to_uv_variables(settings: dict[str, str]) -> dict[str, str]:
    """Convert pip's settings to environment variables of uv; those that are set already win."""
    return {
        variable: settings[name]
        for name, variable in UV_VARIABLES.items()
        if settings.get(name) and variable not in os.environ
    }


def needs_cpu_build(environment: dict[str, str]) -> bool:
    """Return whether torch comes from the index of CPU builds: Linux, no driver, no local build."""
    links = (
        Path(folder) for folder in environment.get("UV_FIND_LINKS", "").replace(",", " ").split()
    )
    has_local_build = any(folder.is_dir() and any(folder.glob("torch-*.whl")) for folder in links)
    has_driver = (
        shutil.which("nvidia-smi") is not None or Path("/proc/driver/nvidia/version").exists()
    )
    return sys.platform == "linux" and not has_local_build and not has_driver


def install_with_pip(project: Sequence[str], *, is_cpu: bool) -> int:
    """Install by pip, torch first, so that nothing else decides on its build. Return the exit code."""
    index = ["--extra-index-url", CPU_INDEX] if is_cpu else []
    return run_pip(*index, "torch") or run_pip(*project)


def run_pip(*arguments: str) -> int:
    """Run `pip install` under the constraints; it prints errors alone. Return its exit code."""
    quiet = ("-qq", "--disable-pip-version-check")
    return subprocess.run(
        [sys.executable, "-m", "pip", "install", *quiet, "-c", str(CONSTRAINTS), *arguments]
    ).returncode


if __name__ == "__main__":
    sys.exit(main())
