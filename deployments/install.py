"""Installation of the pinned packages and of this checkout into the virtual environment that runs this file.

    python deployments/install.py [--extras dev,monitor]

uv resolves and installs; where it cannot be had or fails, pip does the same work more slowly. uv reads no settings of
pip, so those that name where packages come from (index, extra wheels, certificates) are handed over. torch comes in the
build that the machine needs: without an NVIDIA driver the CPU build, if its index answers.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CONSTRAINTS = ROOT / "constraints.txt"
# pip's setting -> the variable that tells uv the same
HANDED_OVER = {
    "find-links": "UV_FIND_LINKS",
    "index-url": "UV_DEFAULT_INDEX",
    "cert": "SSL_CERT_FILE",
}


def main() -> int:
    """Install; returns the exit code of the tool that failed, 130 after Ctrl-C, or 0."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--extras", default="", help="extras of pyproject.toml, separated by commas"
    )
    extras = parser.parse_args().extras
    project = f"{ROOT}[{extras}]" if extras else str(ROOT)
    started = time.monotonic()
    print(f"installing the pinned packages into {sys.prefix} (2.3 GB)", flush=True)
    try:
        failed = with_uv(project)
        if failed:
            print(
                f"{failed}; pip installs instead, which takes some minutes without a word",
                flush=True,
            )
            code = with_pip(project)
            if code:
                return code
    except KeyboardInterrupt:
        print("stopped by Ctrl-C; the same command goes on", file=sys.stderr)
        return 130
    print(f"installed in {time.monotonic() - started:.0f} s")
    return 0


def with_uv(project: str) -> str | None:
    """Install by uv. Returns the reason in words where that was not possible."""
    found = shutil.which("uv")
    if found is None and run_pip("uv"):
        return "uv cannot be installed"
    uv = [found] if found else [sys.executable, "-m", "uv"]
    environment = {**os.environ, **handed_over(pip_settings())}
    command = [
        *uv,
        "pip",
        "install",
        "--python",
        sys.executable,
        "--quiet",
        "--constraints",
        str(CONSTRAINTS),
        "--editable",
        project,
    ]
    if wants_cpu_build(environment):
        print("no NVIDIA driver here: torch's CPU build", flush=True)
        once = {**environment, "UV_HTTP_RETRIES": "0", "UV_HTTP_TIMEOUT": "30"}
        if (
            subprocess.run(
                [*command, "--torch-backend", "cpu"], env=once, stderr=subprocess.DEVNULL
            ).returncode
            == 0
        ):
            return None
        print(
            "the index of torch's CPU builds does not answer: the build of the usual index",
            flush=True,
        )
    code = subprocess.run(command, env=environment).returncode
    return f"uv failed (exit code {code})" if code else None


def pip_settings() -> dict[str, str]:
    """pip's settings by name, environment variables before files."""
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True
    ).stdout
    found: dict[str, str] = {}
    for line in sorted(listed.splitlines(), key=lambda line: line.startswith(":env:")):
        key, _, value = line.partition("=")
        found[key.rpartition(".")[2]] = value.strip("'\"")
    return found


def handed_over(settings: dict[str, str]) -> dict[str, str]:
    """Environment variables for uv that say what pip's settings say; those that are set already win."""
    return {
        variable: settings[name]
        for name, variable in HANDED_OVER.items()
        if settings.get(name) and variable not in os.environ
    }


def wants_cpu_build(environment: dict[str, str]) -> bool:
    """Whether torch has to come from the index of CPU builds: Linux, no driver, no build of its own at hand."""
    links = (
        Path(folder) for folder in environment.get("UV_FIND_LINKS", "").replace(",", " ").split()
    )
    at_hand = any(folder.is_dir() and any(folder.glob("torch-*.whl")) for folder in links)
    has_driver = (
        shutil.which("nvidia-smi") is not None or Path("/proc/driver/nvidia/version").exists()
    )
    return sys.platform == "linux" and not at_hand and not has_driver


def with_pip(project: str) -> int:
    """Install by pip, torch first, so that nothing else decides on its build. Returns the exit code."""
    return run_pip("torch") or run_pip("--editable", project)


def run_pip(*what: str) -> int:
    """Exit code of `pip install` under the constraints; it prints errors alone."""
    quiet = ("-qq", "--disable-pip-version-check")
    return subprocess.run(
        [sys.executable, "-m", "pip", "install", *quiet, "-c", str(CONSTRAINTS), *what]
    ).returncode


if __name__ == "__main__":
    sys.exit(main())
