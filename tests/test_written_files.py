"""One room writes files, `rl_core/storage`: nothing else opens, renames or creates one, but what is listed here."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HINT = (
    "use rl_core/storage: write_text_atomic, write_json_atomic, replacing (atomic and synced), write_text_unsynced "
    "(live views), AppendLog (files that grow), publish_folder and seal_folder (folders), "
    "make_folder, open_log (output of child processes); tests/benchmarks/results/publishing_and_gates.md has the table"
)

# (file, what is called in it, reason). A line that matches nothing any more is an error.
EXCEPTIONS = {
    (
        "rl_core/models/causal_lm.py",
        "save_pretrained",
    ): "within a folder that is sealed or published afterwards",
    ("rl_core/models/lora.py", "save_pretrained"): "as above",
    ("rl_core/models/gguf_files.py", "save_pretrained"): "as above",
    ("rl_core/models/named_models.py", "tempfile.TemporaryDirectory"): "a wheel of pip, read once",
    ("posttrain/cli/export.py", "tempfile.TemporaryDirectory"): "a registered model's copy",
    ("rl_core/service/saved_weights.py", "save_pretrained"): "as above",
    ("rl_core/analysis/canvas.py", "savefig"): "into memory",
    ("rl_core/environments/subprocess_main.py", "open"): "os.devnull",
    ("rl_core/environments/subprocess_main.py", "fdopen"): "a pipe",
    (
        "rl_core/environments/subprocess_host.py",
        "tempfile.TemporaryDirectory",
    ): "the script of a trial",
    ("rl_core/environments/subprocess_host.py", "write_text"): "the script of a trial",
    (
        "rl_core/environments/subprocess_host.py",
        "tempfile.mkdtemp",
    ): "working folder of a child, removed with it",
    (
        "tasks/tracking/sink.py",
        "tempfile.TemporaryDirectory",
    ): "next to the journal, which clears remains of a kill",
    ("tasks/tracking/sink.py", "write_text"): "in that folder",
    (
        "rl_core/environments/code_child.py",
        "tempfile.TemporaryDirectory",
    ): "of a program under test, in the sandbox",
    ("rl_core/environments/code_child.py", "tempfile.TemporaryFile"): "as above",
    (
        "rl_core/environments/openenv_sessions.py",
        "tempfile.mkdtemp",
    ): "the log of a server, removed when it ends",
    (
        "rl_core/environments/agent_process.py",
        "mkdir",
    ): "folders of an agent's episode, removed with it",
    ("rl_core/environments/agent_process.py", "write_text"): "as above",
    ("rl_core/environments/agent_child.py", "write_text"): "as above",
    ("rl_core/environments/mcp_tools.py", "os.open"): "os.devnull",
    ("rl_core/environments/mcp_tools.py", "fdopen"): "os.devnull",
    ("rl_core/environments/sandbox.py", "os.makedirs"): "the child's root, a file system in memory",
    ("rl_core/environments/sandbox.py", "os.mkdir"): "as above",
    ("rl_core/environments/sandbox.py", "os.symlink"): "as above",
    ("rl_core/environments/sandbox.py", "open"): "as above, and /proc/self of the child",
    (
        "rl_core/cpu/build.py",
        "tempfile.TemporaryDirectory",
    ): "object files of the compiler; the library is adopted",
    (
        "rl_core/api/supervised.py",
        "tempfile.TemporaryDirectory",
    ): "transformers makes a classifier from files alone",
    ("tasks/tracking/models.py", "tempfile.TemporaryDirectory"): "files of an upload",
    ("tasks/tracking/models.py", "write_text"): "files of an upload",
    ("tasks/tracking/models.py", "mkdir"): "files of an upload",
    ("tasks/tracking/registry.py", "rename"): "within a folder that is being published",
    (
        "tasks/tracking/mlflow_tracker.py",
        "tempfile.mkdtemp",
    ): "a journal that the caller gave no place",
    ("flows/sweep/trial_process.py", "fdopen"): "a pipe",
    ("flows/sweep/worker.py", "fdopen"): "a pipe",
    ("posttrain/cli/main.py", "os.open"): "os.devnull",
    ("posttrain/cli/main.py", "fdopen"): "standard output and error, where the caller closed them",
    (
        "flows/runtime/embedded_server.py",
        "shutil.copyfile",
    ): "to a temporary name, which is adopted",
    ("flows/runtime/import_setup.py", "tempfile.gettempdir"): "the home of a user without one",
    ("flows/runtime/import_setup.py", "os.mkdir"): "as above",
    (
        "posttrain/cli/check_machine.py",
        "tempfile.TemporaryFile",
    ): "tries whether a folder can be written",
    (
        "posttrain/cli/model_capabilities.py",
        "tempfile.TemporaryDirectory",
    ): "a downloaded model that is looked at",
    (
        "posttrain/operations/state.py",
        "os.open",
    ): "the supervisor's lock, to look whether it is held",
    ("tasks/lifecycle/crashed_runs.py", "os.open"): "a journal, to look whether it is locked",
}

WRITING_MODES = set("wax+")
METHODS = {
    "write_text",
    "write_bytes",
    "savefig",
    "touch",
    "mkdir",
    "symlink_to",
    "hardlink_to",
    "save_pretrained",
    "to_csv",
    "to_json_file",
    "to_parquet",
    "rename",
}
FUNCTIONS = {
    "os": {
        "replace",
        "rename",
        "renames",
        "link",
        "symlink",
        "makedirs",
        "mkdir",
        "truncate",
        "mkfifo",
    },
    "shutil": {"copy", "copy2", "copyfile", "copytree", "move"},
    "json": {"dump"},
    "pickle": {"dump"},
    "torch": {"save"},
    "np": {"save", "savez", "savetxt"},
    "numpy": {"save", "savez", "savetxt"},
    "yaml": {"dump_to_file"},
    "tempfile": {
        "TemporaryDirectory",
        "TemporaryFile",
        "NamedTemporaryFile",
        "mkdtemp",
        "mkstemp",
        "gettempdir",
    },
}
NAMES = {"save_file", "open_owned_file", "fdopen"}


def _read_mode(call: ast.Call, position: int) -> str:
    """Return the mode of an `open`; "?" if it is computed."""
    modes = [keyword.value for keyword in call.keywords if keyword.arg == "mode"] + call.args[
        position : position + 1
    ]
    if not modes:
        return "r"
    return str(modes[0].value) if isinstance(modes[0], ast.Constant) else "?"


def _name_writer(call: ast.Call) -> str | None:
    """Return the name under which a call that writes is listed above; None for any other."""
    function = call.func
    if isinstance(function, ast.Name):
        if function.id == "open" and set(_read_mode(call, 1)) & (WRITING_MODES | {"?"}):
            return "open"
        return function.id if function.id in NAMES else None
    if not isinstance(function, ast.Attribute):
        return None
    module = function.value.id if isinstance(function.value, ast.Name) else ""
    if module == "os" and function.attr == "open":
        flags = ast.unparse(call.args[1])
        return "os.open" if any(word in flags for word in ("WRONLY", "RDWR", "CREAT")) else None
    if function.attr in FUNCTIONS.get(module, ()):
        return f"{module}.{function.attr}"
    if module == "os" and function.attr == "fdopen":
        return "fdopen"
    if function.attr == "open" and module not in ("os", "tarfile", "zipfile"):
        mode = set(_read_mode(call, 1 if module in ("io", "gzip", "bz2", "lzma", "codecs") else 0))
        return "open" if mode <= set("rwabxt+") and mode & WRITING_MODES else None
    if (
        function.attr == "replace" and len(call.args) == 1 and not call.keywords
    ):  # a text's takes two
        return "replace"
    if function.attr == "to_csv" and not call.args:  # gives text
        return None
    return function.attr if function.attr in METHODS else None


def list_writes(source: str) -> Iterator[tuple[int, str]]:
    """Yield (line, name) of every call that writes a file."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and (name := _name_writer(node)) is not None:
            yield node.lineno, name


@functools.cache
def list_writes_outside_storage() -> list[tuple[str, int, str]]:
    """Return (file, line, name) outside of the storage room."""
    paths = [
        path
        for floor in ("rl_core", "tasks", "flows", "posttrain")
        for path in sorted((ROOT / floor).rglob("*.py"))
    ]
    names = [path.relative_to(ROOT).as_posix() for path in paths]
    return [
        (name, line, call)
        for name in names
        if not name.startswith("rl_core/storage/")
        for line, call in list_writes((ROOT / name).read_text())
    ]


def test_nothing_else_writes_files() -> None:
    others = [
        f"{file}:{line}: {call}"
        for file, line, call in list_writes_outside_storage()
        if (file, call) not in EXCEPTIONS
    ]
    assert not others, "\n".join([*others, HINT])


def test_every_exception_is_needed_and_has_a_reason() -> None:
    used = {(file, call) for file, _, call in list_writes_outside_storage()}
    assert set(EXCEPTIONS) - used == set()
    assert all(len(reason) > 5 for reason in EXCEPTIONS.values()) and len(EXCEPTIONS) < 45


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("open(path, 'w')", "open"),
        ("open(path, mode='ab')", "open"),
        ("open(path, mode)", "open"),
        ("path.open('wb')", "open"),
        ("io.open(path, 'x')", "open"),
        ("path.write_text(text)", "write_text"),
        ("Path(path).write_bytes(b'')", "write_bytes"),
        ("os.replace(a, b)", "os.replace"),
        ("a.replace(b)", "replace"),
        ("a.rename(b)", "rename"),
        ("shutil.copytree(a, b)", "shutil.copytree"),
        ("json.dump(x, file)", "json.dump"),
        ("torch.save(x, path)", "torch.save"),
        ("frame.to_csv(path)", "to_csv"),
        ("folder.mkdir(parents=True)", "mkdir"),
        ("tempfile.mkdtemp()", "tempfile.mkdtemp"),
        ("os.open(path, os.O_RDWR | os.O_CREAT)", "os.open"),
    ],
)
def test_a_new_writer_is_detected(line: str, name: str) -> None:
    assert list(list_writes(f"def f():\n    {line}\n")) == [(2, name)]


@pytest.mark.parametrize(
    "line",
    [
        "open(path)",
        "open(path, 'rb')",
        "path.open('rb')",
        "text.replace('a', 'b')",
        "frame.to_csv(index=False)",
        "os.open(path, os.O_RDONLY)",
        "gzip.open(path)",
        "opener.open(url, timeout=2)",
        "self._open(run)",
    ],
)
def test_readers_are_not(line: str) -> None:
    assert list(list_writes(line)) == []
