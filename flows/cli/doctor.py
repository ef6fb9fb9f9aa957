"""`posttrain doctor`: checks of this machine, its packages, devices, folders and servers."""

from __future__ import annotations

import os
import shutil
import sqlite3
import sys
import tempfile
import textwrap
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from flows.cli.fitting_table import terminal_columns
from tasks.own_commands import own_command
from tasks.shipped import shipped

__all__ = ["Finding", "examine", "report"]

GIB = 2**30
TIMEOUT_SECONDS = 5.0  # of a server's health check
CONSTRAINTS = shipped("constraints.txt")


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of one check."""

    name: str
    state: Literal["ok", "note", "bad"]  # note: works, with a caveat; bad: a requirement is missing
    detail: str
    advice: str = ""

    @property
    def is_bad(self) -> bool:
        """True if pipelines cannot run."""
        return self.state == "bad"


def examine(output: Path, tracking_uri: str | None = None) -> list[Finding]:
    """Check Python, packages, devices, memory, the output folder and the stores. Leaves no files behind.

    Args:
        output: output folder of pipelines.
        tracking_uri: `tracking.uri` of a config; None: MLFLOW_TRACKING_URI, else the output folder's database.
    """
    return [
        *_packages(),
        *_devices(),
        _memory(),
        _folder(output),
        _disk(output),
        _mlflow(tracking_uri, output),
        _prefect(),
        _sandbox(),
        *_dead_runs(output),
    ]


def report(findings: list[Finding]) -> str:
    """Findings as text within the terminal, each followed by its advice, if any."""
    words = {"ok": "ok  ", "note": "note", "bad": "BAD "}
    width = max(len(finding.name) for finding in findings)
    lines = []
    for finding in findings:
        head, margin = f"{words[finding.state]}  {finding.name.ljust(width)}  ", " " * (8 + width)
        lines += _wrapped(finding.detail, head, margin)
        if finding.advice:
            lines += _wrapped(f"-> {finding.advice}", margin, f"{margin}   ")
    num_bad = sum(finding.is_bad for finding in findings)
    lines.append(
        f"\n{num_bad} needed {'thing is' if num_bad == 1 else 'things are'} missing" if num_bad else "\nall is there"
    )
    return "\n".join(lines)


def _wrapped(text: str, head: str, margin: str) -> list[str]:
    columns = terminal_columns()
    if columns is None:
        return [f"{head}{text}"]
    return textwrap.wrap(
        text, max(columns, len(margin) + 20), initial_indent=head, subsequent_indent=margin, break_on_hyphens=False,
        break_long_words=False,
    ) or [head.rstrip()]  # fmt: skip


# ------------------------------------------------------------------------------------------------------------ packages


def _packages() -> Iterator[Finding]:
    try:
        described = metadata.metadata("posttrain")
        requirements = metadata.requires("posttrain") or []
    except metadata.PackageNotFoundError:
        yield Finding("posttrain", "bad", "is not installed", "run `make setup`, or `pip install -e .`")
        return
    yield Finding("posttrain", "ok", described["Version"])
    yield _python(str(described["Requires-Python"] or ""))
    pins = _pins()
    for text in requirements:
        requirement = Requirement(text)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            yield _package(requirement, pins.get(_canonical(requirement.name)))


def _python(allowed: str) -> Finding:
    version = ".".join(str(part) for part in sys.version_info[:3])
    if version not in SpecifierSet(allowed):
        return Finding("python", "bad", f"{version}; needed {allowed}", "make the environment with another Python")
    return Finding("python", "ok", version)


def _package(requirement: Requirement, pin: str | None) -> Finding:
    name = requirement.name
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        return Finding(name, "bad", f"is not installed; needed {requirement.specifier}", "run `make setup`")
    if not requirement.specifier.contains(version, prereleases=True):
        return Finding(name, "bad", f"{version}; needed {requirement.specifier}", "pip install -c constraints.txt -e .")
    if pin is not None and Version(version).public != Version(pin).public:
        return Finding(name, "note", f"{version}; tested with {pin}")
    return Finding(name, "ok", version)


def _pins() -> dict[str, str]:
    """Tested versions by canonical name; {} if installed without a checkout."""
    pins = {}
    lines = CONSTRAINTS.read_text(encoding="utf-8").splitlines() if CONSTRAINTS.is_file() else []
    for line in lines:
        try:
            requirement = Requirement(line.split("#")[0].strip())
        except InvalidRequirement:  # a comment or an empty line
            continue
        exact = [item.version for item in requirement.specifier if item.operator == "=="]
        if exact:
            pins[_canonical(requirement.name)] = exact[0]
    return pins


def _canonical(name: str) -> str:
    return name.lower().replace("_", "-")


# ------------------------------------------------------------------------------------------------------------- machine


def _devices() -> Iterator[Finding]:
    try:
        import torch
    except Exception as error:  # a broken native library raises OSError, among others
        yield Finding(
            "torch import",
            "bad",
            f"{type(error).__name__}: {error}",
            "install torch again (docs/quickstart.md, 'GPUs')",
        )
        return
    from rl_core.cpu.waiting import free_processors, usable_processors

    usable, free = usable_processors(), free_processors(0.3)
    limit = os.environ.get("OMP_NUM_THREADS")
    yield Finding(
        "threads",
        "ok",
        f"{usable} of {os.cpu_count()} CPU cores usable, {free} free now, torch takes {torch.get_num_threads()}"
        + (f" (OMP_NUM_THREADS={limit})" if limit else ""),
    )
    yield _compiled_code()
    if not torch.cuda.is_available():
        built = "this torch is built without CUDA" if torch.version.cuda is None else "torch sees no GPU"
        yield Finding(
            "gpu", "note", f"none: {built}", "fine for the demo; for large models see docs/quickstart.md, 'GPUs'"
        )
        return
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        memory = f"{properties.total_memory / GIB:.0f} GiB"
        yield Finding(f"gpu {index}", "ok", f"{properties.name}, {memory}, CUDA {torch.version.cuda}")


def _compiled_code() -> Finding:
    """Code that training and rollouts in float32 run on this processor."""
    from rl_core.cpu import paths

    path = paths.path_of_this_processor()
    return Finding("cpu code", "ok" if path.is_fast else "note", path.detail, path.advice)


def _memory() -> Finding:
    import psutil

    memory = psutil.virtual_memory()
    detail = f"{memory.available / GIB:.1f} of {memory.total / GIB:.1f} GiB free"
    if memory.available < 4 * GIB:
        return Finding("memory", "note", detail, "the demo takes up to 4 GiB")
    return Finding("memory", "ok", detail)


def _existing(path: Path) -> Path:
    """The folder itself, or its nearest existing parent."""
    path = path.absolute()
    return next(place for place in (path, *path.parents) if place.exists())


def _folder(output: Path) -> Finding:
    place = _existing(output)
    if not place.is_dir():
        return Finding("output", "bad", f"{place} is a file", "give another folder with --output")
    try:
        with tempfile.TemporaryFile(dir=place):
            pass
    except OSError as error:
        return Finding("output", "bad", f"{place} is not writable: {error.strerror}", "give another folder")
    made = "" if place == output.absolute() else " (created on the first run)"
    return Finding("output", "ok", f"{output.absolute()}{made}")


def _disk(output: Path) -> Finding:
    free = shutil.disk_usage(_existing(output)).free
    detail = f"{free / GIB:.1f} GiB free"
    if free < GIB:
        return Finding("disk", "bad", detail, "a run needs at least 1 GiB; free some, or give another --output")
    return Finding("disk", "note" if free < 5 * GIB else "ok", detail)


# -------------------------------------------------------------------------------------------------------------- stores


def _mlflow(uri: str | None, output: Path) -> Finding:
    from tasks.tracking.store import default_uri, without_password

    uri = uri or os.environ.get("MLFLOW_TRACKING_URI") or default_uri(output)
    shown = without_password(uri)
    scheme = urlsplit(uri).scheme
    if scheme in ("http", "https"):
        problem = _asked(f"{uri.rstrip('/')}/health")
        advice = "start it, or leave MLFLOW_TRACKING_URI and tracking.uri out for a local database"
    elif scheme == "sqlite":
        path = Path(uri.removeprefix("sqlite:///"))
        if not path.exists():
            return Finding("mlflow store", "ok", f"{shown} (created on the first run)")
        problem, advice = _opened(path), "restore the file, or move it away to start a new one"
    else:
        problem, advice = _connected(uri), "check the address, the driver and that the database is up"
    if problem:
        return Finding("mlflow store", "bad", f"{shown}: {problem}", advice)
    return Finding("mlflow store", "ok", shown)


def _prefect() -> Finding:
    url = os.environ.get("PREFECT_API_URL")
    if not url:
        return Finding("prefect api", "ok", "none set: every run starts its own server for its duration")
    problem = _asked(f"{url.rstrip('/')}/health")
    if problem:
        advice = "start it (`prefect server start`), or unset PREFECT_API_URL"
        return Finding("prefect api", "bad", f"{url}: {problem}", advice)
    return Finding("prefect api", "ok", url)


def _sandbox() -> Finding:
    """Confinement of child processes that run model-written code and external scorers, by a trial."""
    from rl_core.environments.sandbox import PARTS
    from rl_core.environments.subprocess_host import ChildFailed, missing_parts

    try:
        missing = missing_parts()
    except ChildFailed as error:
        return Finding("sandbox", "bad", f"no child process starts: {error}", "see docs/security.md")
    holds = ", ".join(part for part in PARTS if part not in missing)
    if not missing:
        return Finding("sandbox", "ok", f"of model-written code: {holds}")
    lacking = "; ".join(f"not {part}: {reason}" for part, reason in missing.items())
    return Finding(
        "sandbox",
        "note",
        f"of model-written code: {holds or 'nothing'}; {lacking}",
        "docs/security.md says what that leaves open",
    )


def _dead_runs(output: Path) -> Iterator[Finding]:
    """Runs that were killed but are still marked as running."""
    from tasks.lifecycle.dead_runs import dead_runs

    dead = [run for run in dead_runs(output.absolute()) if not run.elsewhere]
    if dead:
        wholes = [run.name for run in dead if run.is_pipeline]
        num_stages = len(dead) - len(wholes)
        runs = f"{len(wholes)} {'run was' if len(wholes) == 1 else 'runs were'} killed: {', '.join(wholes)}"
        stages = f"{num_stages} {'stage' if num_stages == 1 else 'stages'}"
        detail = f"{runs}{f' (in {stages})' if num_stages else ''}" if wholes else f"{stages} of earlier runs killed"
        repair = own_command("doctor --repair", output)
        yield Finding("runs", "note", detail, f"{repair} marks them and shows how to resume")


def _asked(url: str) -> str:
    """Error of a server's health check; "" = healthy."""
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_SECONDS):
            return ""
    except urllib.error.HTTPError as error:
        # Servers that require a token answer with an error status; they are up.
        return "" if error.code in (401, 403) else f"answered {error.code}"
    except (OSError, ValueError) as error:
        return f"no answer ({getattr(error, 'reason', None) or error})"


def _opened(path: Path) -> str:
    """Error of opening an sqlite file; "" = it is a database."""
    try:
        connection = sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=TIMEOUT_SECONDS)
        try:
            connection.execute("select name from sqlite_master limit 1").fetchall()
        finally:
            connection.close()
    except sqlite3.Error as error:
        return str(error)
    return ""


def _connected(uri: str) -> str:
    """Error of connecting to a database server; "" = connected."""
    import sqlalchemy

    try:
        engine = sqlalchemy.create_engine(uri, pool_pre_ping=True)
        with engine.connect():
            return ""
    except Exception as error:  # drivers raise their own exceptions, a missing driver an ImportError
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
