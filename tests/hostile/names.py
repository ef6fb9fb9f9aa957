"""Hostile names on the command line, and records of runs written to the output folder by somebody else."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from hostile.case import BASE, CONFIG, Case, Content, device, fifo, link

__all__ = ["CASES"]

_CONFIG = {CONFIG: BASE}


def _command(name: str, arguments: tuple[str, ...], says: str | tuple[str, ...]) -> Case:
    writes = arguments[0] in ("promote", "ui")  # the lock by which they see whether servers run
    return Case(name, arguments, (says,) if isinstance(says, str) else says, _CONFIG, writes=writes)


_ARGUMENTS = [
    _command("stage with dots", ("run", CONFIG, "--only", "../sft"), "invalid choice"),
    _command("stage dunder", ("run", CONFIG, "--only", "__init__"), "invalid choice"),
    _command(
        "stage that is not in the config",
        ("run", CONFIG, "--only", "policy"),
        "has no stage 'policy'",
    ),
    _command("unknown command", ("explode",), "there is no command 'explode'"),
    _command("command with escapes", ("\x1b[31mrun",), "there is no command"),
    _command("resume with dots", ("resume", "../../x"), "no runs in"),
    _command("resume a surrogate", ("resume", "\udcff"), "no runs in"),
    _command("resume a NUL", ("resume", "a\0b"), "no runs in"),
    _command("resume in a device", ("resume", "--output", "/dev/null"), "no runs in"),
    _command("approve with dots", ("promote", "--approve", "../../x"), "no runs in"),
    _command("approve an expression", ("promote", "--reject", "x' OR 1=1 --"), "no runs in"),
    _command("analyze dots", ("analyze", "../../nothing"), "no such file"),
    _command("analyze the password file", ("analyze", "/etc/passwd"), ("/etc/passwd",)),
    _command("analyze a NUL", ("analyze", "a\0b"), "no such file"),
    _command("analyze a long name", ("analyze", "x" * 5000), "File name too long"),
    _command("analyze with an unknown model", ("analyze", "a/b/c/d"), "no such file"),
    _command(
        "export of a run with dots",
        ("ui", "../../x", "--export", "outputs/e"),
        "no run '../../x'",
    ),
    _command(
        "export from a file", ("ui", "--output", CONFIG, "--export", "outputs/e"), "is a file"
    ),
    _command("monitor port", ("ui", "--live", "--port", "99999999"), "port"),
    _command("monitor port a text", ("ui", "--live", "--port", "1;ls"), "port"),
    _command("page for the world", ("ui", "--host", "0.0.0.0"), "is not loopback"),
    _command("page for a name", ("ui", "--host", "evil.example"), "is not loopback"),
    _command("up on port 0", ("up", "--prefect-port", "0"), "port"),
    _command("limit below 1", ("runs", "--limit", "-1"), "--limit"),
    _command("limit of 5000 digits", ("runs", "--limit", "9" * 5000), "--limit"),
    _command("unknown format", ("runs", "--xml"), "--xml"),
    _command("version 0", ("promote", CONFIG, "--version", "0"), "--version"),
    _command("init the root", ("init", "/"), "cannot be imported"),
    _command("init a word of Python", ("init", "class"), "cannot be imported"),
    _command("init an option", ("init", "--", "-rf"), "cannot be imported"),
    _command("init with blanks", ("init", "a b"), "cannot be imported"),
    _command("init full width", ("init", "\uff41\uff42"), "cannot be imported"),
    _command("init a long name", ("init", "x" * 300), "too long"),
    _command("set without config", ("promote", "--pending", "--set", "seed=1"), "promote CONFIG"),
    Case("init over a file", ("init", "there"), ("is a file",), {"there": b""}),
    Case("init over a device", ("init", "there"), ("is a file",), {"there": device("null")}),
    Case(
        "init over planted links",
        ("init", "there"),
        ("has config.yaml already",),
        {"there/config.yaml": link("../../outside/new.yaml")},
    ),
]

_SETTINGS: dict[str, Any] = {
    "name": "p",
    "output": "outputs",
    "threads": 1,
    "stages": {
        "prepare_data": {"num_demonstrations": 50, "levels": ["easy"]},
        "sft": {"max_steps": 2},
    },
}


def record(
    name: str, says: str | tuple[str, ...], *events: bytes | Mapping[str, Any], **files: Content
) -> Case:
    """Build a case with a run in the output folder that `resume` reads."""
    folder = "outputs/p/runs/2026-01-01-00-00-00"
    lines = b"".join(
        (e if isinstance(e, bytes) else json.dumps(e).encode()) + b"\n" for e in events
    )
    contents = {f"{folder}/.tracking/events.jsonl": lines, f"{folder}/metrics.jsonl": b""}
    contents |= {f"{folder}/{key.replace('__', '.')}": content for key, content in files.items()}
    return Case(
        f"record: {name}", ("resume",), (says,) if isinstance(says, str) else says, contents
    )


_START = {"op": "start", "name": "p · 2026-01-01 00:00:00", "host": "h", "time": 1}
_END = {"op": "end", "status": "FAILED", "time": 2}


def _text(text: str) -> dict[str, Any]:
    return {"op": "text", "name": "config.json", "text": text}


def _settings(**changed: Any) -> dict[str, Any]:
    return _text(json.dumps({**_SETTINGS, **changed}))


_RECORDS = [
    record("settings no JSON", "settings were recorded", _START, _text("nonsense"), _END),
    record("settings a list", "before its settings were recorded", _START, _text("[1]"), _END),
    record("settings nested", "settings were recorded", _START, _text('{"a":' * 50_000), _END),
    record("settings null", "settings were recorded", _START, {**_text(""), "text": None}, _END),
    record("name with dots", "name", _START, _settings(name="../../x"), _END),
    record(
        "environment of the folder",
        "environment",
        _START,
        _settings(environment={"name": "os:system"}),
        _END,
    ),
    record("reserved name", "name", _START, _settings(name="mlflow"), _END),
    record("unknown key", "sead", _START, _settings(sead=1), _END),
    record(
        "steps of 1e30", "max_steps", _START, _settings(stages={"sft": {"max_steps": 10**30}}), _END
    ),
    record("no event at all", "no runs in"),
    record("events no JSON", "no runs in", b"nonsense", b"\xff\xfe"),
    record("events nested", "no runs in", b'{"op":' * 50_000),
    record("events of other types", "no runs in", b"[1]", b"5", b'{"op": [1]}'),
    record("name a number", "name", {**_START, "name": 5}, _settings(name=".."), _END),
    record("tags a list", "name", _START, {"op": "tags", "tags": [1]}, _settings(name=".."), _END),
    record("status a list", ("name",), _START, _settings(name=".."), {"op": "end", "status": [1]}),
    record("run.json a list", "name", _START, _settings(name=".."), _END, run__json=b"[1]"),
    record(
        "run.json nested", "name", _START, _settings(name=".."), _END, run__json=b'{"a":' * 50_000
    ),
    record(
        "run.json given a text",
        "name",
        _START,
        _settings(name=".."),
        _END,
        run__json=b'{"given": "abc"}',
    ),
]
_PIPE = Case(
    "record: events are a pipe",
    ("resume",),
    ("no runs in",),
    {"outputs/p/runs/x/.tracking/events.jsonl": fifo},
)

CASES = [*_ARGUMENTS, *_RECORDS, _PIPE]
