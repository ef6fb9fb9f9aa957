"""Hostile surroundings: long paths, variables, users without permission, odd files where a file is expected."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from hostile.case import BASE, CONFIG, Case, Content, fifo, link

__all__ = ["CASES"]

STRANGER = 54321  # a user that no table of users knows
DEEP = "/".join(["x" * 199] * 50)  # 10,000 characters, each name short enough
_DATA = BASE.replace("num_demonstrations: 50, levels: [easy]", "demonstrations: {name}")
_ROW = (
    b'{"messages": [{"role": "user", "content": "1 + 1"}, {"role": "assistant", "content": "2"}]}\n'
)


def _config(name: str, text: str, *says: str, **more: object) -> Case:
    return Case(name, ("validate", CONFIG), (CONFIG, *says), {CONFIG: text}, **more)  # type: ignore[arg-type]


def _data(name: str, place: str, files: Mapping[str, Content], *says: str) -> Case:
    text = _DATA.replace("{name}", f'"{place}"')
    return Case(f"data: {name}", ("validate", CONFIG), says, {CONFIG: text, **files})


def _with(
    name: str, code: int, *says: str, user: int = 0, umask: int = 0o022, **variables: str | None
) -> Case:
    """Build a case of `validate` with a valid configuration under these variables."""
    return Case(
        f"variables: {name}",
        ("validate", CONFIG),
        says,
        {CONFIG: BASE + "output: /tmp/hostile-output\n"},
        code=code,
        environment=variables,
        user=user,
        umask=umask,
    )


def closed(text: str) -> Content:
    """Create a file that only its owner may read."""

    def make(path: Path) -> None:
        path.write_text(text)
        path.chmod(0o600)

    return make


def closed_folder(path: Path) -> None:
    """Create a folder that only its owner may list."""
    path.mkdir(mode=0o700)


def hard_link(path: Path) -> None:
    """Create a second name of a file outside."""
    os.link(path.parents[1] / "canary.txt", path)


_PATHS = [
    _config(
        "output of 10000 letters", BASE + f"output: {DEEP}\n", ":9: output", "cannot be a folder"
    ),
    _config(
        "output with a question mark",
        BASE + "output: 'q?mode=memory'\n",
        ":9: output",
        "contains a '?'",
    ),
    _config("model of 10000 letters", BASE.replace("preset: nano", f"path: /{DEEP}"), "model.path"),
    _config(
        "template of 10000 letters",
        BASE.replace("preset: nano", f"preset: nano, chat_template: {DEEP}"),
        "chat_",
    ),
    _data("path of 10000 letters", DEEP, {}, "or name another path with --set"),
    Case("config of 10000 letters", ("validate", DEEP), ("File name too long",)),
    Case("data of 10000 letters", ("data", DEEP), ("File name too long",)),
    Case(
        "runs in 10000 letters",
        ("runs", "--output", f"outputs/{DEEP}"),
        ("File name too long",),
        writes=True,
    ),
    Case("analyze 10000 letters", ("analyze", DEEP), ("File name too long",)),
    Case(
        "set of 10000 letters",
        ("validate", CONFIG, "--set", "x" * 10_000 + "=1"),
        ("x: unknown key",),
        {CONFIG: BASE},
    ),
    Case("resume of 10000 letters", ("resume", "x" * 10_000), ("no runs in",), {CONFIG: BASE}),
]

_FILES = [
    _data("folder with a pipe alone", "rows", {"rows/a.jsonl": fifo}, "without data files"),
    _data(
        "folder with a link to itself",
        "rows",
        {"rows/a.jsonl": link("a.jsonl")},
        "without data files",
    ),
    _data(
        "folder with a folder by a file's name",
        "rows",
        {"rows/a.jsonl/x": b""},
        "without data files",
    ),
    _data("folder of links in a circle", "rows", {"rows/rows": link(".")}, "without data files"),
    _data("file in proc", "/proc/self/status", {}, "/proc/self/status is empty"),
    _data("memory of the process", "/proc/self/mem", {}, "/proc/self/mem is empty"),
    _data(
        "a hard link to a file outside",
        "rows.jsonl",
        {"rows.jsonl": hard_link},
        "rows.jsonl:1:",
        "is not JSON",
    ),
    _data(
        "name with escapes",
        "r\\e[31m.jsonl",
        {"r\x1b[31m.jsonl": _ROW + b"{\n"},
        "r\\x1b[31m.jsonl:2:",
    ),
    _data("name with a line break", "r\\nx.jsonl", {"r\nx.jsonl": _ROW + b"{\n"}, "x.jsonl:2:"),
    Case(
        "config by a hard link",
        ("validate", CONFIG),
        (CONFIG, "a single value"),
        {CONFIG: hard_link},
    ),
]

_VARIABLES = [
    _with("no HOME", 0, ": OK", HOME=None),
    _with("empty HOME", 0, ": OK", HOME=""),
    _with("HOME a device", 0, ": OK", HOME="/dev/null"),
    _with(
        "no variables that Python reads", 0, ": OK", PATH=None, LANG=None, USER=None, LOGNAME=None
    ),
    _with("caches in a device", 0, ": OK", XDG_CACHE_HOME="/dev/null", HF_HOME="/dev/null/x"),
    _with("TMPDIR that is not there", 0, ": OK", TMPDIR="/nowhere"),
    _with("threads of letters", 0, ": OK", OMP_NUM_THREADS="abc", MKL_NUM_THREADS="-1"),
    _with("terminal of letters", 0, ": OK", COLUMNS="abc", LINES="-1", TERM="\x1b[31m"),
    _with("umask that takes all", 0, ": OK", umask=0o777),
    _with("user that nobody knows", 0, ": OK", user=STRANGER, HOME=None, USER=None, LOGNAME=None),
    Case(
        "home of a config without HOME",
        ("validate", CONFIG),
        (CONFIG, "model.path"),
        {CONFIG: BASE.replace("preset: nano", "path: ~/x")},
        environment={"HOME": None},
        user=STRANGER,
    ),
    *(
        _with(f"store {uri}", 2, f"MLFLOW_TRACKING_URI: '{uri}'", MLFLOW_TRACKING_URI=uri)
        for uri in ("ftp://x/y", "http://[bad")
    ),
    Case(
        "store by FTP of a run",
        ("run", CONFIG),
        ("MLFLOW_TRACKING_URI: 'ftp://host' is not a store that MLflow accepts",),
        {CONFIG: BASE},
        environment={"MLFLOW_TRACKING_URI": "ftp://user:s3cret-c4nary@host"},
    ),
    Case(
        "store of garbage",
        ("runs",),
        ("garbage",),
        writes=True,
        environment={"MLFLOW_TRACKING_URI": "garbage://x"},
    ),
]

_FORBIDDEN = [
    Case(
        "closed config",
        ("validate", CONFIG),
        (CONFIG, "Permission denied"),
        {CONFIG: closed(BASE)},
        user=STRANGER,
    ),
    Case(
        "config in a closed folder",
        ("validate", "c/x.yaml"),
        ("c/x.yaml", "Permission denied"),
        {"c": closed_folder},
        user=STRANGER,
    ),
    Case(
        "closed data",
        ("validate", CONFIG),
        ("rows.jsonl cannot be read",),
        {CONFIG: _DATA.replace("{name}", "rows.jsonl"), "rows.jsonl": closed(_ROW.decode())},
        user=STRANGER,
    ),
    Case(
        "data in a closed folder",
        ("validate", CONFIG),
        ("c/rows.jsonl",),
        {CONFIG: _DATA.replace("{name}", "c/rows.jsonl"), "c": closed_folder},
        user=STRANGER,
    ),
    Case(
        "report on closed data",
        ("data", "rows.jsonl"),
        ("rows.jsonl", "Permission denied"),
        {"rows.jsonl": closed(_ROW.decode())},
        user=STRANGER,
    ),
    Case(
        "output in a closed folder",
        ("validate", CONFIG),
        (":9: output",),
        {CONFIG: BASE + "output: c/x\n", "c": closed_folder},
        user=STRANGER,
    ),
    Case(
        "model in a closed folder",
        ("validate", CONFIG),
        ("model.path",),
        {
            CONFIG: BASE.replace("preset: nano, vocab_size: 320, context: 128", "path: ./c/m"),
            "c": closed_folder,
        },
        user=STRANGER,
    ),
    *(
        Case(
            f"closed output: {command}",
            (*command.split(), "--output", "outputs"),
            ("outputs", "Permission denied"),
            {"outputs": closed_folder},
            writes=True,
            user=STRANGER,
        )
        for command in ("runs", "promote --pending", "resume", "store gc", "store sync", "status")
    ),
    Case(
        "closed trajectories",
        ("analyze", "c"),
        ("c: cannot be read: Permission denied",),
        {"c": closed_folder},
        user=STRANGER,
    ),
]

CASES = [*_PATHS, *_FILES, *_VARIABLES, *_FORBIDDEN]
