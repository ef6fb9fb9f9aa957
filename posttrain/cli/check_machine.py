"""Command `posttrain check machine`: check packages, devices, folders, servers and crashed runs.

With `--calibrate` it measures this machine and writes its speeds for `posttrain check plan --machine`.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import platform
import shlex
import shutil
import sqlite3
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from flows.runtime.terminal import StatusLine, detect_terminal_columns
from posttrain.cli import run_setup
from posttrain.cli.arguments import add_config_argument, add_data_options
from posttrain.cli.tables import print_requested_data
from rl_core.errors import PosttrainError, SettingsError
from rl_core.json_client import find_health_problem
from tasks.command_hints import INSTALL_COMMAND, format_posttrain_command
from tasks.shipped import shipped

Clock = Callable[[], float]

GIB = 2**30
HEALTH_TIMEOUT_SECONDS = 5.0  # of a server's health check
CONSTRAINTS = shipped("constraints.txt")
DEFAULT_CALIBRATION_FILE = "machine.yaml"
_PIPELINE_IMPORTS = ("prefect", "mlflow", "flows.post_training")  # of a pipeline, besides rl_core

EXAMPLES = (
    "check machine",
    "check machine gsm8k    (its output folder and tracking store)",
    "check machine --repair",
    "check machine --model Qwen/Qwen3-0.6B",
    "check machine --calibrate --to machine.yaml",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    add_config_argument(parser, optional=True, was_option=True)
    parser.add_argument(
        "--repair", action="store_true", help="mark killed runs and show how to resume them"
    )
    add_data_options(parser)
    parser.add_argument(
        "--calibrate",
        action="store_true",
        help="measure the speed and memory of this machine in about a minute, and write them for `posttrain check plan "
        "--machine`",
    )
    parser.add_argument(
        "--to",
        metavar="FILE",
        help=f"with --calibrate: the file (default: {DEFAULT_CALIBRATION_FILE})",
    )
    parser.add_argument(
        "--faults",
        action="store_true",
        help="list the points at which POSTTRAIN_FAULT breaks a run",
    )
    parser.add_argument(
        "--model",
        metavar="MODEL",
        help="say which fast paths this model folder, hub name or models:/NAME@ALIAS may take here, and why (dtype, "
        "device and adapters as in CONFIG)",
    )


def run_command(arguments: argparse.Namespace) -> int:
    """Check this machine, repair crashed runs, calibrate, or explain a model's fast paths."""
    if arguments.faults:
        from rl_core.storage.faults import format_fault_points, list_fault_points

        if not print_requested_data(arguments, list_fault_points()):
            print(format_fault_points())
        return 0
    if arguments.calibrate:
        path = Path(arguments.to or DEFAULT_CALIBRATION_FILE)
        values, text = write_machine_calibration(path)
        if not print_requested_data(arguments, values, [values]):
            print(text)
        return 0
    if arguments.to is not None:
        raise SettingsError("--to: names the file of --calibrate; add that option")
    settings = run_setup.load_optional_settings(arguments)
    output = Path(settings.output if settings else arguments.output)
    uri = settings.tracking.uri if settings else None
    with contextlib.suppress(PosttrainError):  # an unreachable server becomes a finding
        from posttrain.operations.connection import connect_to_servers

        connect_to_servers(output)
    if arguments.repair:
        from flows.runtime.flow_run_states import repair_crashed_runs

        lines = repair_crashed_runs(output, uri)
        if not print_requested_data(arguments, lines, [{"repaired": line} for line in lines]):
            print("\n".join(lines))
        return 0
    if arguments.model is not None:
        from posttrain.cli.model_capabilities import explain_model

        model_settings = settings.model if settings else None
        explanation = explain_model(arguments.model, model_settings, output, uri)
        if not print_requested_data(arguments, explanation.record, [explanation.record]):
            print(explanation.text)
        return 1 if explanation.is_refused else 0
    findings = examine_machine(output, uri)
    if not print_requested_data(arguments, [dataclasses.asdict(finding) for finding in findings]):
        print(format_findings(findings))
    return 1 if any(finding.is_bad for finding in findings) else 0


@dataclass(frozen=True, slots=True)
class DoctorFinding:
    """Result of one check."""

    name: str
    state: Literal["ok", "note", "bad"]  # note: works, with a caveat; bad: a requirement is missing
    detail: str
    advice: str = ""

    @property
    def is_bad(self) -> bool:
        """True if pipelines cannot run."""
        return self.state == "bad"


def examine_machine(output: Path, tracking_uri: str | None = None) -> list[DoctorFinding]:
    """Check Python, packages, devices, memory, the output folder and the stores. Leave no files behind.

    Args:
        output: output folder of pipelines.
        tracking_uri: `tracking.uri` of a config; None: MLFLOW_TRACKING_URI, else the output folder's database.
    """
    return [
        *_check_packages(),
        *_check_devices(),
        _check_memory(),
        _check_output_folder(output),
        _check_disk_space(output),
        _check_mlflow_store(tracking_uri, output),
        _check_prefect_api(),
        _check_sandbox(),
        *_check_crashed_runs(output),
    ]


def format_findings(findings: list[DoctorFinding]) -> str:
    """Format findings within the terminal, each followed by its advice, if any."""
    states = {"ok": "OK  ", "note": "note", "bad": "BAD "}
    width = max(len(finding.name) for finding in findings)
    lines = []
    for finding in findings:
        head = f"{states[finding.state]}  {finding.name.ljust(width)}  "
        margin = " " * len(head)
        lines += _wrap_finding(finding.detail, head, margin)
        if finding.advice:
            lines += _wrap_finding(f"-> {finding.advice}", margin, f"{margin}   ")
    num_bad = sum(finding.is_bad for finding in findings)
    if num_bad:
        noun = "requirement is" if num_bad == 1 else "requirements are"
        lines += ["", f"{num_bad} {noun} missing"]
    else:
        lines += ["", "all requirements are met"]
    return "\n".join(lines)


def _wrap_finding(text: str, head: str, margin: str) -> list[str]:
    columns = detect_terminal_columns()
    if columns is None:
        return [f"{head}{text}"]
    return textwrap.wrap(
        text,
        max(columns, len(margin) + 20),
        initial_indent=head,
        subsequent_indent=margin,
        break_on_hyphens=False,
        break_long_words=False,
    ) or [head.rstrip()]


def _check_packages() -> Iterator[DoctorFinding]:
    try:
        package = metadata.metadata("posttrain")
        requirements = metadata.requires("posttrain") or []
    except metadata.PackageNotFoundError:
        yield DoctorFinding(
            "posttrain", "bad", "is not installed", "run `make setup`, or `pip install -e .`"
        )
        return
    yield DoctorFinding("posttrain", "ok", package["Version"])
    yield _check_python(str(package["Requires-Python"] or ""))
    pins = _read_pinned_versions()
    for text in requirements:
        requirement = Requirement(text)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            yield _check_package(requirement, pins.get(_normalize_package_name(requirement.name)))


def _check_python(allowed: str) -> DoctorFinding:
    version = ".".join(str(part) for part in sys.version_info[:3])
    if version not in SpecifierSet(allowed):
        return DoctorFinding(
            "python",
            "bad",
            f"{version}; needed {allowed}",
            "create the environment with another Python",
        )
    return DoctorFinding("python", "ok", version)


def _check_package(requirement: Requirement, pin: str | None) -> DoctorFinding:
    name = requirement.name
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        return DoctorFinding(
            name, "bad", f"is not installed; needed {requirement.specifier}", INSTALL_COMMAND
        )
    if not requirement.specifier.contains(version, prereleases=True):
        return DoctorFinding(
            name,
            "bad",
            f"{version}; needed {requirement.specifier}",
            INSTALL_COMMAND,
        )
    if pin is not None and Version(version).public != Version(pin).public:
        return DoctorFinding(name, "note", f"{version}; tested with {pin}")
    return DoctorFinding(name, "ok", version)


def _read_pinned_versions() -> dict[str, str]:
    """Return the tested versions by canonical name; {} if installed without a checkout."""
    pins = {}
    lines = CONSTRAINTS.read_text(encoding="utf-8").splitlines() if CONSTRAINTS.is_file() else []
    for line in lines:
        try:
            requirement = Requirement(line.split("#")[0].strip())
        except InvalidRequirement:  # a comment or an empty line
            continue
        exact = [item.version for item in requirement.specifier if item.operator == "=="]
        if exact:
            pins[_normalize_package_name(requirement.name)] = exact[0]
    return pins


def _normalize_package_name(name: str) -> str:
    return name.lower().replace("_", "-")


def _check_devices() -> Iterator[DoctorFinding]:
    try:
        import torch
    except Exception as error:  # a broken native library raises OSError, among others
        yield DoctorFinding(
            "torch import",
            "bad",
            f"{type(error).__name__}: {error}",
            "install torch again (docs/quickstart.md, 'GPUs')",
        )
        return
    from rl_core.cpu.openmp_spin import count_usable_processors, free_processors

    limit = os.environ.get("OMP_NUM_THREADS")
    threads = (
        f"{torch.get_num_threads()} (OMP_NUM_THREADS={limit})"
        if limit
        else f"{torch.get_num_threads()}"
    )
    cores = f"{count_usable_processors()} of {os.cpu_count()} CPU cores usable, {free_processors(0.3)} free now"
    yield DoctorFinding("threads", "ok", f"{cores}, torch takes {threads}")
    yield _check_compiled_code()
    if not torch.cuda.is_available():
        reason = (
            "this torch is built without CUDA"
            if torch.version.cuda is None
            else "torch sees no GPU"
        )
        yield DoctorFinding(
            "gpu",
            "note",
            f"none: {reason}",
            "fine for the demo; for large models see docs/quickstart.md, 'GPUs'",
        )
        return
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        memory = f"{properties.total_memory / GIB:.0f} GiB"
        yield DoctorFinding(
            f"gpu {index}", "ok", f"{properties.name}, {memory}, CUDA {torch.version.cuda}"
        )


def _check_compiled_code() -> DoctorFinding:
    """Check the code that training and rollouts in float32 run on this processor."""
    from rl_core.cpu import packed_gemm

    path = packed_gemm.describe_processor_code()
    return DoctorFinding("cpu code", "ok" if path.is_fast else "note", path.detail, path.advice)


def _check_memory() -> DoctorFinding:
    import psutil

    memory = psutil.virtual_memory()
    detail = f"{memory.available / GIB:.1f} of {memory.total / GIB:.1f} GiB free"
    if memory.available < 4 * GIB:
        return DoctorFinding("memory", "note", detail, "the demo takes up to 4 GiB")
    return DoctorFinding("memory", "ok", detail)


def _find_existing_parent(path: Path) -> Path:
    """Return the folder itself, or its nearest existing parent."""
    path = path.absolute()
    return next(parent for parent in (path, *path.parents) if parent.exists())


def _check_output_folder(output: Path) -> DoctorFinding:
    folder = _find_existing_parent(output)
    if not folder.is_dir():
        return DoctorFinding(
            "output", "bad", f"{folder} is a file", "give another folder with --output"
        )
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        return DoctorFinding(
            "output", "bad", f"{folder} is not writable: {error.strerror}", "give another folder"
        )
    note = "" if folder == output.absolute() else " (created on the first run)"
    return DoctorFinding("output", "ok", f"{output.absolute()}{note}")


def _check_disk_space(output: Path) -> DoctorFinding:
    free = shutil.disk_usage(_find_existing_parent(output)).free
    detail = f"{free / GIB:.1f} GiB free"
    if free < GIB:
        return DoctorFinding(
            "disk", "bad", detail, "a run needs at least 1 GiB; free some, or give another --output"
        )
    return DoctorFinding("disk", "note" if free < 5 * GIB else "ok", detail)


def _check_mlflow_store(uri: str | None, output: Path) -> DoctorFinding:
    from tasks.mlflow_environment import build_default_uri, strip_uri_password

    uri = uri or os.environ.get("MLFLOW_TRACKING_URI") or build_default_uri(output)
    shown = strip_uri_password(uri)
    scheme = urlsplit(uri).scheme
    if scheme in ("http", "https"):
        problem = find_health_problem(f"{uri.rstrip('/')}/health", HEALTH_TIMEOUT_SECONDS)
        advice = "start it, or leave MLFLOW_TRACKING_URI and tracking.uri out for a local database"
    elif scheme == "sqlite":
        path = Path(uri.removeprefix("sqlite:///"))
        if not path.exists():
            return DoctorFinding("mlflow store", "ok", f"{shown} (created on the first run)")
        problem = _probe_sqlite(path)
        advice = "restore the file, or move it away to start a new one"
    else:
        problem = _probe_database(uri)
        advice = "check the address, the driver and that the database is up"
    if problem:
        return DoctorFinding("mlflow store", "bad", f"{shown}: {problem}", advice)
    return DoctorFinding("mlflow store", "ok", shown)


def _check_prefect_api() -> DoctorFinding:
    url = os.environ.get("PREFECT_API_URL")
    if not url:
        return DoctorFinding(
            "prefect api", "ok", "none set: every run starts its own server for its duration"
        )
    problem = find_health_problem(f"{url.rstrip('/')}/health", HEALTH_TIMEOUT_SECONDS)
    if problem:
        advice = "start it (`prefect server start`), or unset PREFECT_API_URL"
        return DoctorFinding("prefect api", "bad", f"{url}: {problem}", advice)
    return DoctorFinding("prefect api", "ok", url)


def _check_sandbox() -> DoctorFinding:
    """Try the confinement of child processes that run model-written code and external scorers."""
    from rl_core.environments.sandbox import PARTS
    from rl_core.environments.subprocess_host import ChildFailed, probe_sandbox

    try:
        missing = probe_sandbox()
    except ChildFailed as error:
        return DoctorFinding(
            "sandbox",
            "bad",
            f"no child process starts: {error}",
            "see docs/reliability.md, 'Sandbox'",
        )
    working = ", ".join(part for part in PARTS if part not in missing)
    if not missing:
        return DoctorFinding("sandbox", "ok", f"of model-written code: {working}")
    failures = "; ".join(f"not {part}: {reason}" for part, reason in missing.items())
    return DoctorFinding(
        "sandbox",
        "note",
        f"of model-written code: {working or 'nothing'}; {failures}",
        "docs/reliability.md says what that leaves open",
    )


def _check_crashed_runs(output: Path) -> Iterator[DoctorFinding]:
    """Report runs that were killed but are still marked as running."""
    from tasks.lifecycle.crashed_runs import find_crashed_runs

    crashed = [run for run in find_crashed_runs(output.absolute()) if not run.is_remote]
    if not crashed:
        return
    from tasks.tracking.run_ids import list_named_runs

    short_ids = {run.name: run.short_id for run in list_named_runs(output.absolute())}
    pipelines = [short_ids.get(run.name, run.name) for run in crashed if run.is_pipeline]
    num_stages = len(crashed) - len(pipelines)
    stages = f"{num_stages} {'stage' if num_stages == 1 else 'stages'}"
    if pipelines:
        verb = "run was" if len(pipelines) == 1 else "runs were"
        where = f" (in {stages})" if num_stages else ""
        detail = f"{len(pipelines)} {verb} killed: {', '.join(pipelines)}{where}"
    else:
        detail = f"{stages} of earlier runs killed"
    repair = format_posttrain_command("check machine --repair", output)
    yield DoctorFinding("runs", "note", detail, f"{repair} marks them and shows how to resume")


def _probe_sqlite(path: Path) -> str:
    """Return the error of opening an sqlite file; "" = it is a database."""
    try:
        connection = sqlite3.connect(
            f"file:{path}?mode=ro", uri=True, timeout=HEALTH_TIMEOUT_SECONDS
        )
        try:
            connection.execute("select name from sqlite_master limit 1").fetchall()
        finally:
            connection.close()
    except sqlite3.Error as error:
        return str(error)
    return ""


def _probe_database(uri: str) -> str:
    """Return the error of connecting to a database server; "" = connected."""
    import sqlalchemy

    try:
        engine = sqlalchemy.create_engine(uri, pool_pre_ping=True)
        with engine.connect():
            return ""
    except Exception as error:  # of the driver, or ImportError for a missing driver
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"


def write_machine_calibration(
    path: Path, *, clock: Clock = time.perf_counter
) -> tuple[dict[str, Any], str]:
    """Measure this machine for about a minute and write the file; return the settings and a summary.

    Raises: SettingsError, before anything is measured, if the file's folder does not exist; BackendError if a process
        that measures memory fails; CheckpointError if the file cannot be written.
    """
    problem = ""
    if path.is_dir():
        problem = "is a folder"
    elif not os.access(path.parent, os.W_OK):
        problem = f"cannot be written: {path.parent} is not a writable folder"
    if problem:
        raise SettingsError(f"--to: {path} {problem}; name a file for the speeds")

    import yaml

    from rl_core.resources.machine_calibration import calibrate_machine
    from rl_core.settings.planning import SPEED_NAMES
    from rl_core.storage.atomic_files import write_text_atomic
    from tasks.config import dump_settings

    start = time.monotonic()
    progress = StatusLine(sys.stderr)
    processor = _read_processor_name()
    progress.print_line(f"measuring {processor}, which takes about a minute on an idle machine")
    machine = calibrate_machine(
        processor, pipeline_imports=_PIPELINE_IMPORTS, clock=clock, progress=progress
    )
    progress.clear_line()
    values = dump_settings(machine)
    head = (
        "# Speeds of one machine, for `posttrain check plan CONFIG --machine FILE`: "
        "posttrain check machine --calibrate\n"
    )
    write_text_atomic(path, head + yaml.safe_dump(values, sort_keys=False, allow_unicode=True))
    lines = [f"{machine.name}, {machine.threads} threads, {machine.memory_bytes / 2**30:.1f} GiB"]
    for name in (*SPEED_NAMES, *(f"{name}_bfloat16" for name in SPEED_NAMES)):
        points = ", ".join(
            f"{speed.median / 1e9:,.0f} ({speed.hidden_size})" for speed in getattr(machine, name)
        )
        if points:
            lines.append(f"{name.replace('_', ' in ')}: {points} GFLOP/s (at width)")
    lines.append(
        f"memory: copies {machine.copy_bytes_per_second / 1e9:.1f} GB/s, reads "
        f"{machine.read_bytes_per_second / 1e9:.1f} GB/s; a process takes "
        f"{machine.library_bytes / 2**20:.0f} MiB, with the pipeline {machine.pipeline_bytes / 2**20:.0f} MiB more"
    )
    lines.append(
        f"{path} written after {time.monotonic() - start:.0f} s: posttrain check plan CONFIG "
        f"--machine {shlex.quote(str(path))}"
    )
    return values, "\n".join(lines)


def _read_processor_name() -> str:
    """Return the name of the processor, as far as the system provides it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    name = next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), ""
    )
    return name or platform.processor() or platform.machine()
