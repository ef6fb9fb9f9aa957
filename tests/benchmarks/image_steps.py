"""The Dockerfile's steps, one by one, in a plain Debian root: for a machine without docker. Root alone may run it.

    debootstrap --variant=minbase --include=ca-certificates,python3,python3-venv,python-is-python3 bookworm ROOT
    python tests/benchmarks/image_steps.py --root ROOT --work FOLDER [--build-arg NAME=VALUE] [--run COMMAND]

Each stage begins with a copy of ROOT, in the role of python:3.11-slim-bookworm. RUN runs by chroot, with private
mounts; COPY obeys .dockerignore. Afterwards the health check and every --run are run as the image's user, with its
variables, through its entry point. It prints each step with its seconds, and the size of each stage beyond ROOT.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]


@dataclass
class Stage:
    """A stage of the build: its root and what its instructions have set so far."""

    root: Path
    build_arguments: dict[str, str]  # --build-arg
    folder: str = "/"
    user: str = "0:0"
    environment: dict[str, str] = field(
        default_factory=lambda: {"PATH": "/usr/local/bin:/usr/bin:/usr/sbin:/bin:/sbin"}
    )
    arguments: dict[str, str] = field(default_factory=dict)
    entry: list[str] = field(default_factory=list)
    command: list[str] = field(default_factory=list)
    health: list[str] = field(default_factory=list)

    def run(
        self, command: list[str], binds: list[str], more: dict[str, str], user: str = "0:0"
    ) -> int:
        """Return the exit code of a command in this root, with /proc, /dev and these folders mounted for it alone."""
        mounts = [f"mount -t proc proc {self.root}/proc", f"mount --rbind /dev {self.root}/dev"]
        for bind in binds:
            (self.root / bind.lstrip("/")).mkdir(parents=True, exist_ok=True)
            mounts.append(f"mount --bind -o ro {bind} {self.root}{bind}")
        variables = {
            "HOME": "/root" if user == "0:0" else "/home/posttrain",
            **self.environment,
            **self.arguments,
            **more,
        }
        inside = shlex.join(
            ["sh", "-c", f"cd {shlex.quote(self.folder)} && exec {shlex.join(command)}"]
        )
        assignments = shlex.join(f"{k}={v}" for k, v in variables.items())
        entered = f"exec chroot --userspec={user} {self.root} env -i {assignments}"
        script = " && ".join([*mounts, f"{entered} {inside}"])
        return subprocess.run(
            ["unshare", "--mount", "--pid", "--fork", "sh", "-c", script]
        ).returncode

    def expanded(self, text: str) -> str:
        """Expand $NAME of ENV and ARG in a text."""
        known = {**self.arguments, **self.environment}
        return re.sub(r"\$\{?(\w+)\}?", lambda match: known.get(match[1], ""), text)

    def place(self, path: str) -> Path:
        """Return the path in the root, of one that may be relative to WORKDIR."""
        return self.root / os.path.join(self.folder, path).lstrip("/")


def parse_instructions(text: str) -> list[tuple[str, str]]:
    """Return (instruction, rest) of a Dockerfile, continued lines joined."""
    lines = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    return [
        (name, rest.strip())
        for line in re.sub(r"\\\n", " ", lines).splitlines()
        if line.strip()
        for name, _, rest in [line.partition(" ")]
    ]


def copy(source: Path, target: Path) -> None:
    """Copy a file, or the content of a folder without what .dockerignore excludes in every folder."""
    if source.is_file():
        target.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, target / source.name)
        return
    ignored = [
        line[3:]
        for line in (PROJECT / ".dockerignore").read_text().splitlines()
        if line.startswith("**/")
    ]

    def left_out(folder: str, names: list[str]) -> list[str]:
        return [
            name for name in names if any(fnmatch.fnmatch(name, pattern) for pattern in ignored)
        ]

    shutil.copytree(source, target, symlinks=True, ignore=left_out, dirs_exist_ok=True)


def is_allowed(name: str) -> bool:
    """Return True if .dockerignore, which begins with `*`, lets the name into the build."""
    return f"!{name.removeprefix('./')}" in (PROJECT / ".dockerignore").read_text().splitlines()


def run_step(
    stages: dict[str, Stage], stage: Stage, name: str, rest: str, options: argparse.Namespace
) -> int:
    """Run one instruction and return its exit code."""
    if name == "RUN":
        return stage.run(
            ["sh", "-c", rest], options.bind, dict(one.split("=", 1) for one in options.env)
        )
    if name == "COPY":
        *sources, target = rest.split()
        if sources[0].startswith("--from="):
            other = stages[sources[0].removeprefix("--from=")]
            return subprocess.run(
                ["cp", "-a", f"{other.root}{sources[1]}/.", stage.place(target)]
            ).returncode
        for source in sources:
            if not is_allowed(source):
                print(f"  {source}: .dockerignore leaves it out")
                return 1
            place = stage.place(target)
            copy(PROJECT / source, place)
    elif name == "ENV":
        for variable, value in re.findall(r"(\w+)=(\S+)", rest):
            stage.environment[variable] = stage.expanded(value)
    elif name == "ARG":
        variable, _, value = rest.partition("=")
        stage.arguments[variable] = stage.build_arguments.get(variable, value.strip('"'))
    elif name == "WORKDIR":
        stage.folder = rest
        stage.place(".").mkdir(parents=True, exist_ok=True)
    elif name == "USER":
        stage.user = rest
    elif name == "VOLUME":
        return 0 if stage.place(rest).is_dir() else 1
    elif name == "HEALTHCHECK":
        stage.health = json.loads(rest.partition(" CMD ")[2])
    elif name == "ENTRYPOINT":
        stage.entry = json.loads(rest)
    elif name == "CMD":
        stage.command = json.loads(rest)
    else:
        print(f"  {name}: unknown instruction")
        return 1
    return 0


def measure_size(folder: Path) -> int:
    """Return the bytes of a folder."""
    return int(
        subprocess.run(["du", "-sxb", folder], capture_output=True, text=True).stdout.split()[0]
    )


def main() -> int:
    """Run all steps; returns the exit code of the first that failed, or 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--root",
        type=Path,
        required=True,
        help="a Debian root with Python, as debootstrap makes it",
    )
    parser.add_argument("--work", type=Path, required=True, help="a new folder for the stages")
    parser.add_argument("--build-arg", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument(
        "--bind",
        action="append",
        default=[],
        help="folder that RUN sees as well, as one of packages",
    )
    parser.add_argument(
        "--env", action="append", default=[], metavar="NAME=VALUE", help="of RUN, as for proxies"
    )
    parser.add_argument(
        "--run",
        action="append",
        default=[],
        help="command of the image, as `doctor`, once it is made",
    )
    options = parser.parse_args()
    arguments = dict(argument.split("=", 1) for argument in options.build_arg)
    stages: dict[str, Stage] = {}
    stage, begun = None, time.monotonic()
    for name, rest in parse_instructions((PROJECT / "deployments/Dockerfile").read_text()):
        since = time.monotonic()
        if name == "FROM":
            label = rest.partition(" AS ")[2] or f"stage{len(stages)}"
            stage = stages[label] = Stage(options.work / label, arguments)
            options.work.mkdir(parents=True, exist_ok=True)
            code = subprocess.run(["cp", "-a", options.root, stage.root]).returncode
        else:
            assert stage is not None, "a Dockerfile begins with FROM"
            code = run_step(stages, stage, name, rest, options)
        print(f"[{time.monotonic() - since:6.1f} s] {name} {rest[:90]} -> {code}", flush=True)
        if code:
            return code
    assert stage is not None
    base = measure_size(options.root)

    for label, built in stages.items():
        print(f"{label}: {(measure_size(built.root) - base) / 1e6:,.0f} MB beyond the root")
    print(f"all steps in {time.monotonic() - begun:.0f} s")
    stage.arguments = {}
    for words in [stage.health, *([*stage.entry, *shlex.split(run)] for run in options.run)]:
        since = time.monotonic()
        code = stage.run(words, [], {}, stage.user)
        print(f"[{time.monotonic() - since:6.1f} s] {shlex.join(words)} -> {code}", flush=True)
        if code:
            return code
    return 0


if __name__ == "__main__":
    sys.exit(main())
