"""Hostile input is refused with one clear message, in little time and memory, and nothing else happens."""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hostile import checkpoints, code, configs, data, names, surroundings
from hostile.case import Case

TABLES = {
    "configs": configs.CASES,
    "code": code.CASES,
    "data": data.CASES,
    "checkpoints": checkpoints.CASES,
    "names": names.CASES,
    "surroundings": surroundings.CASES,
}
MEGABYTES, CPU_SECONDS = 1024, 5
LONGEST_MESSAGE = 6000  # characters
LOGGED = re.compile(
    r"checkpoint 1 is damaged and was set aside|.*: the line of bytes \d+ to \d+ is unreadable"
)
SECRET = "s3cret-c4nary"


class Runner:
    """The fork server of `helpers/hostile_runner.py`."""

    def __init__(self, home: Path) -> None:
        root = Path(__file__).parent
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(root.parent), str(root)]),
            "PYTHONDONTWRITEBYTECODE": "1",
            "HF_HUB_OFFLINE": "1",
            "HOME": str(home),
            "HOSTILE_SECRET": SECRET,
            "OMP_NUM_THREADS": "1",
        }
        environment.pop("MLFLOW_TRACKING_URI", None)
        environment.pop("PREFECT_API_URL", None)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "helpers.hostile_runner"],
            cwd=home,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        report: dict[str, Any] = json.loads(self.process.stdout.readline())
        return report

    def close(self) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    server = Runner(tmp_path_factory.mktemp("home"))
    yield server
    server.close()


def read_state(folder: Path, without: Path) -> dict[str, tuple[Any, ...]]:
    """Return everything below a folder: kind, mode, size, time of change, link target, content of small files."""
    state: dict[str, tuple[Any, ...]] = {}
    for root, folders, files in os.walk(folder):
        if Path(root) == without:
            folders.clear()
            continue
        for name in [*folders, *files]:
            path = Path(root, name)
            if path == without:
                continue
            info = path.lstat()
            content = ""
            if stat.S_ISREG(info.st_mode) and info.st_size < 2**20:
                content = hashlib.sha256(path.read_bytes()).hexdigest()
            target = os.readlink(path) if path.is_symlink() else ""
            when = 0 if stat.S_ISDIR(info.st_mode) and path == without.parent else info.st_mtime_ns
            state[str(path.relative_to(folder))] = (
                info.st_mode,
                info.st_size * bool(when),
                when,
                target,
                content,
            )
    return state


def make_folder(case: Case, root: Path) -> Path:
    """Make the folder that a case runs in, with canaries around it."""
    inside = root / "inside"
    inside.mkdir()
    (root / "canary.txt").write_text("untouched")
    (root / "outside").mkdir()
    (root / "outside" / "canary.txt").write_text("untouched")
    for name, content in case.files.items():
        path = inside / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if callable(content):
            content(path)
        else:
            path.write_bytes(
                content.encode("utf-8", "surrogateescape") if isinstance(content, str) else content
            )
    return inside


def _find_message(lines: list[str]) -> int:
    return next(
        (index for index, line in enumerate(lines) if line.startswith("posttrain: ")), len(lines)
    )


def check(case: Case, runner: Runner, root: Path) -> None:
    """Run a case and look at its end, its message, its cost and what lies around."""
    inside, streams = (
        make_folder(case, root),
        [root.with_name(f"{root.name}.{name}") for name in ("out", "err")],
    )
    free = inside / "outputs" if case.writes else root / "nothing"
    before = read_state(root, without=free)
    report = runner.run(
        {
            "folder": str(inside),
            "arguments": list(case.arguments),
            "megabytes": MEGABYTES,
            "cpu_seconds": CPU_SECONDS,
            "allowed": [str(free)],
            "stdout": str(streams[0]),
            "stderr": str(streams[1]),
            "environment": dict(case.environment),
            "user": case.user,
            "umask": case.umask,
        }
    )
    out, err = (path.read_text(errors="surrogateescape") for path in streams)
    details = f"{report}\n--- stdout\n{out[-1500:]}\n--- stderr\n{err[-3000:]}"
    assert report["code"] == case.code, details
    assert report["seen"] == [], details
    assert read_state(root, without=free) == before, details
    assert "Traceback" not in out + err and "MemoryError" not in err, details
    if case.code == 0:
        assert all(part in out for part in case.says), details
        return
    messages = [line for line in err.splitlines() if not line.startswith("posttrain: warning: ")]
    if messages and messages[0].startswith("usage: "):  # of the parser of arguments
        messages = [
            re.sub(r"^posttrain( \w+)?: ", "posttrain: ", line)
            for line in messages
            if line.startswith("posttrain")
        ]
    assert messages and all(LOGGED.match(line) for line in messages[: _find_message(messages)]), (
        details
    )
    assert sum(line.startswith("posttrain: ") for line in messages) == 1, details
    assert 20 < len(err) < LONGEST_MESSAGE and SECRET not in err and "\0" not in err, details
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", err), details
    for part in case.says:
        assert part in err, f"{part!r} is missing\n{details}"


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=f"{table}: {case.name}")
        for table, cases in TABLES.items()
        for case in cases
    ],
)
def test_hostile_input_is_refused(case: Case, runner: Runner, tmp_path: Path) -> None:
    assert case.says, "a case lists parts of its message"
    if case.user and os.geteuid() != 0:
        pytest.skip("only root can be another user")
    if not case.user:
        (tmp_path / "root").mkdir()
        check(case, runner, tmp_path / "root")
        return
    with tempfile.TemporaryDirectory() as folder:  # pytest's folders are closed to other users
        os.chmod(folder, 0o755)
        Path(folder, "root").mkdir()
        check(case, runner, Path(folder, "root"))


def test_there_are_at_least_200_cases_and_each_has_its_name() -> None:
    names = [f"{table}: {case.name}" for table, cases in TABLES.items() for case in cases]
    assert len(names) == len(set(names)) and len(names) >= 200
