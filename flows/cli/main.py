"""The `posttrain` command.

Only the standard library and the error tree are imported here, so that `posttrain --help` starts at once; each command
imports what it needs.

Exit codes: 0 done; 1 it failed; 2 the command, the settings or the data are wrong; 130 and 143 stopped by Ctrl-C and
SIGTERM, with everything saved.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from flows.cli.parser import build_parser
from flows.cli.user_code_path import find_own_code
from flows.cli.visible import visible
from flows.runtime import outlived, stopping
from flows.runtime.stopping import Terminated, bounded, stop_after, unwind_on_sigterm
from rl_core.errors import DataError, ModelError, PosttrainError, ResumeRefused, SettingsError, Stopped
from rl_core.storage.single_files import REMEDIES

if TYPE_CHECKING:
    from tasks.config import PipelineSettings

__all__ = ["command", "main"]

ELSEWHERE = "use a writable folder (--output, or output: in the configuration), or fix this one"
ROOM = "make room, as with `posttrain gc`; the same command resumes from the last checkpoint"
LONGEST_LINE = 2000  # characters of a line of a message; names and values in it may be of any length
# File system errors that a user can fix; any other OSError is a bug and shown with its traceback.
REFUSALS = {
    errno.EACCES: ELSEWHERE,
    errno.EPERM: ELSEWHERE,
    errno.EROFS: ELSEWHERE,
    errno.EEXIST: ELSEWHERE,
    errno.ENOTDIR: ELSEWHERE,
    errno.ENOSPC: ROOM,
    errno.EDQUOT: ROOM,
    errno.EFBIG: "raise the file size limit (ulimit -f); the same command resumes from the last checkpoint",
}
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    arguments = build_parser().parse_args(argv)
    unwind_on_sigterm()
    find_own_code()
    try:
        with bounded():
            code = _run(arguments)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # the reader closed the pipe, as in `posttrain runs | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def command() -> NoReturn:
    """The console script: `main`, then the end of the process."""
    code = main()
    if stopping.asked.is_set() or outlived.api_is_away.is_set():
        # Prefect would go on for a minute, trying to send what nobody takes. Everything of ours is closed.
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def _run(arguments: argparse.Namespace) -> int:
    """Run the command; user errors become a message and an exit code."""
    try:
        return COMMANDS[arguments.command](arguments)
    except Stopped as stopped:
        return _failed(arguments, str(stopped), 128 + stopped.signum)
    except KeyboardInterrupt as error:
        how, number = ("SIGTERM", signal.SIGTERM) if isinstance(error, Terminated) else ("Ctrl-C", signal.SIGINT)
        more = "; the same command resumes from the last checkpoint" if arguments.command in TRAINING else ""
        return _failed(arguments, f"stopped by {how}{more}", 128 + number)
    except (SettingsError, DataError, ModelError, ResumeRefused) as error:
        return _failed(arguments, str(error), 2)
    except PosttrainError as error:
        return _failed(arguments, _with_advice(f"{type(error).__name__}: {error}"), 1)
    except OSError as error:
        if error.errno in (errno.ENAMETOOLONG, errno.ELOOP) and error.filename is not None:  # of an argument
            return _failed(arguments, f"{os.fsdecode(error.filename)[:200]}: {os.strerror(error.errno)}", 2)
        if error.errno not in REFUSALS or (error.filename is None and error.errno not in FULL):
            raise
        where = f"{os.fsdecode(error.filename)}: " if error.filename is not None else ""
        return _failed(arguments, f"{where}{os.strerror(error.errno)}; {REFUSALS[error.errno]}", 1)
    except Exception as error:  # a writer of another language or a database says it in words of its own
        if (message := _with_advice(f"{type(error).__name__}: {error}")) == f"{type(error).__name__}: {error}":
            raise
        return _failed(arguments, message, 1)


def _with_advice(message: str) -> str:
    """A message that says that the disk is full, or a file too large, with what to do."""
    said = {**{number: os.strerror(number) for number in FULL}, 0: "database or disk is full"}
    found = next((number for number, words in said.items() if words in message), None)
    if found is None:
        return message
    return f"{message.replace(f'; {REMEDIES.get(found)}', '')}; {REFUSALS.get(found, ROOM)}"


def _failed(arguments: argparse.Namespace, message: str, code: int) -> int:
    if arguments.debug:
        traceback.print_exc()
    lines = (line if len(line) <= LONGEST_LINE else f"{line[:LONGEST_LINE]} ..." for line in message.splitlines())
    print(f"posttrain: {visible(chr(10).join(lines))}", file=sys.stderr)
    return code


# ------------------------------------------------------------------------------------------------------------ commands


def _load(arguments: argparse.Namespace, import_code: bool = True) -> PipelineSettings:
    from tasks.config import load

    return load(arguments.config, arguments.set, import_code=import_code, warn=_warn)


def _warn(text: str) -> None:
    print(f"posttrain: warning: {visible(text)}", file=sys.stderr)


def _optional(arguments: argparse.Namespace, import_code: bool = False) -> PipelineSettings | None:
    """Settings of --config, if given; without `import_code` the code that they name is not imported."""
    if arguments.config is None and arguments.set:
        raise SettingsError("--set changes a configuration; give one with --config")
    return None if arguments.config is None else _load(arguments, import_code)


def _prepare(settings: PipelineSettings) -> None:
    """Configure Prefect before its import: files in the output folder, or the servers of `posttrain up`."""
    from flows.operations.connect import connect
    from flows.runtime.prefect_home import prepare_prefect

    prepare_prefect(Path(settings.output))
    connect(Path(settings.output))


def _refuse_bad_rows(settings: PipelineSettings) -> None:
    """Before any server starts, and before a run of the refused data is recorded anywhere."""
    from tasks.config.data_checks import refuse_bad_rows

    refuse_bad_rows(settings)


def _connect_mlflow(output: str | Path) -> Path:
    """Use the MLflow server of `posttrain up` if it runs; returns the folder."""
    from flows.operations.connect import connect

    connect(Path(output), prefect=False)
    return Path(output)


def init(arguments: argparse.Namespace) -> int:
    """Write a starter config, environment and reward."""
    from flows.cli.init import init

    print(init(Path(arguments.folder)))
    return 0


def convert(arguments: argparse.Namespace) -> int:
    """Print or write a configuration of TRL or verl as ours."""
    from tasks.config.convert import convert
    from tasks.config.yaml_loader import read_yaml

    text = convert(read_yaml(arguments.file).data, arguments.file, arguments.trainer)
    if arguments.out is None:
        print(text, end="")
        return 0
    try:
        with Path(arguments.out).open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise SettingsError(f"{arguments.out}: is there already; name a new file") from None
    print(f"{arguments.out}: written; check it: posttrain validate {arguments.out}")
    return 0


def data(arguments: argparse.Namespace) -> int:
    """Print a report on a data file."""
    from flows.cli.data import describe_file

    options: dict[str, Any] = {}
    if arguments.model is not None:
        from rl_core.data.chat import ChatRenderer
        from rl_core.models import causal_lm
        from rl_core.settings import ModelSettings

        settings = ModelSettings(path=arguments.model)
        renderer = ChatRenderer(causal_lm.load_tokenizer(arguments.model, settings), settings)
        options = {"renderer": renderer, "context": causal_lm.context_length(arguments.model, settings)}
    heldout = Path(arguments.heldout) if arguments.heldout else None
    print(
        describe_file(
            Path(arguments.file), kind=arguments.kind, heldout=heldout, max_rows=arguments.max_rows,
            near=arguments.near, **options,
        )
    )  # fmt: skip
    return 0


def run(arguments: argparse.Namespace) -> int:
    """Run the pipeline of a configuration."""
    stop_after(arguments.stop_after)
    settings = _load(arguments)
    _refuse_bad_rows(settings)
    _prepare(settings)
    from flows.post_training import run_pipeline

    result = run_pipeline(
        settings, fresh=arguments.fresh, quiet=arguments.quiet, allow_drift=arguments.allow_drift
    )  # fmt: skip
    print(result.table())
    return 0 if result.ok else 1


def retrain(arguments: argparse.Namespace) -> int:
    """Retrain on new data, from the champion, with promotion through the gate."""
    settings = _load(arguments)
    _refuse_bad_rows(settings)
    _prepare(settings)
    from flows.retrain import run_retraining

    result = run_retraining(
        settings, start=arguments.start, force=arguments.force, reason=arguments.reason, quiet=arguments.quiet,
        allow_drift=arguments.allow_drift, fresh=arguments.fresh,
    )  # fmt: skip
    if result.pipeline is not None:
        print(result.pipeline.table())
    print(result.message)
    return 0


def validate(arguments: argparse.Namespace) -> int:
    """Check a configuration and print a summary of its pipeline."""
    settings = _load(arguments, import_code=arguments.import_code)
    from tasks.config import named_code, resolve, settings_digest
    from tasks.config.data_checks import checked_files

    if arguments.show:
        import yaml

        print(yaml.safe_dump(resolve(settings), sort_keys=False, allow_unicode=True), end="")
        return 0
    data = checked_files(settings)
    code = ", ".join(named_code(settings))
    if code and not arguments.import_code:
        from tasks.pipeline.user_code import user_code_digests

        try:
            user_code_digests(named_code(settings))  # each is found, none is run
        except SettingsError as error:
            raise SettingsError(f"{arguments.config}: {error}") from error
    print(
        f"{arguments.config}: fine{', but for code that was not imported' * bool(code and not arguments.import_code)}"
    )
    print(f"  pipeline  {settings.name} (settings {settings_digest(settings)})")
    print(f"  stages    {' -> '.join(settings.stages.active)}")
    print(f"  model     {_model_line(settings)}")
    for line in data:
        print(f"  data      {line}")
    if _acts(settings):
        print(f"  acts in   {settings.environment.name}")
    if code:
        print(f"  code      {code} ({'imported' if arguments.import_code else 'found, not imported: --import-code'})")
    print(f"  writes to {Path(settings.output).absolute() / settings.name}")
    return 0


def _model_line(settings: PipelineSettings) -> str:
    path = settings.model.path
    if path is None:
        return f"preset {settings.model.preset}, from scratch"
    if path.startswith("models:"):
        return f"{path} (registered; looked up when it runs)"
    return path if Path(path).is_dir() else f"{path} (no folder here, so a Hugging Face name; looked up when it runs)"


def _acts(settings: PipelineSettings) -> bool:
    """True if some stage plays episodes or asks the environment's demonstrator."""
    stages = settings.stages
    data = stages.prepare_data
    own = {"prepare_data"}
    if data is not None and data.demonstrations:
        own.add("sft")
    if data is not None and data.preferences:
        own |= {"preference", "reward_model"}
    return bool(set(stages.active) - own)


def profile(arguments: argparse.Namespace) -> int:
    """Print the time profile of a stage."""
    settings = _load(arguments)
    _prepare(settings)
    from flows.cli.time_profile import profile_stage

    print(profile_stage(settings, arguments.stage, arguments.iterations, quiet=arguments.quiet))
    return 0


def stage(arguments: argparse.Namespace) -> int:
    """Run one stage."""
    settings = _load(arguments)
    if getattr(settings.stages, arguments.name) is None:
        raise SettingsError(
            f"{arguments.config}: has no stage '{arguments.name}', only {', '.join(settings.stages.active)}; "
            f"add it with --set stages.{arguments.name}={{}}"
        )
    _refuse_bad_rows(settings)
    _prepare(settings)
    from flows.single_stage import run_stage

    result = run_stage(
        settings, arguments.name, model=arguments.model, fresh=arguments.fresh, quiet=arguments.quiet,
        allow_drift=arguments.allow_drift,
    )  # fmt: skip
    print(result.table())
    return 0 if result.ok else 1


def why(arguments: argparse.Namespace) -> int:
    """Say why a stage was run or not."""
    settings = _load(arguments, import_code=False)
    from flows.cli.why import explain

    print(explain(settings, arguments.name))
    return 0


def evaluate(arguments: argparse.Namespace) -> int:
    """Evaluate one model on a configuration's held-out episodes."""
    settings = _load(arguments)
    _prepare(settings)
    from flows.single_stage import evaluate_model

    result = evaluate_model(settings, arguments.model, quiet=arguments.quiet)
    print(result.table())
    return 0 if result.ok else 1


def analyze(arguments: argparse.Namespace) -> int:
    """Analyse trajectory files, or models after evaluating them on the same episodes."""
    settings = _optional(arguments, import_code=True)
    from flows.cli.model_names import given_models

    models = given_models(arguments.paths) if settings else {}
    missing = [path for path in arguments.paths if not models and not Path(path).exists()]
    if missing:
        raise DataError(f"{missing[0]}: no such file; give trajectories.jsonl files or folders that hold some")
    if not settings and (models := given_models(arguments.paths)):
        raise SettingsError(f"{arguments.paths[0]}: is a model; give its episodes with --config CONFIG")
    if settings and models:
        return _analyze_models(settings, models, Path(arguments.out), arguments.quiet)
    if settings:
        _connect_mlflow(settings.output)
    from flows.cli.analyze_files import analyze as analyze_paths

    report = analyze_paths([Path(path) for path in arguments.paths], settings, Path(arguments.out))
    print(f"report: {report}")
    return 0


def _analyze_models(settings: PipelineSettings, models: dict[str, str], out: Path, quiet: bool) -> int:
    _prepare(settings)
    from flows.single_stage import analyze_models
    from rl_core.storage.single_files import copy_tree

    result = analyze_models(settings, models, quiet=quiet)
    print(result.table())
    if "analyze" in result.results:
        copy_tree(result.results["analyze"].path, out)
        print(f"report: {out / 'report.html'}")
    return 0 if result.ok else 1


def promote(arguments: argparse.Namespace) -> int:
    """Move the alias `champion`."""
    settings = _load(arguments, import_code=False)
    _connect_mlflow(settings.output)
    from tasks.stages.promote import promote_version

    print(promote_version(settings, arguments.version, arguments.note))
    return 0


def approve(arguments: argparse.Namespace) -> int:
    """Decide on a pending promotion, or list the pending ones."""
    settings = _optional(arguments)
    from flows.cli.approve import decide

    output = _connect_mlflow(settings.output if settings else arguments.output)
    uri = settings.tracking.uri if settings else None
    where = f" --config {arguments.config}" if settings else "" if output == Path("outputs") else f" --output {output}"
    answer = {"approve": arguments.approve, "by": arguments.by, "note": arguments.note}
    print(decide(output, uri, arguments.run, **answer, where=where))
    return 0


def resume(arguments: argparse.Namespace) -> int:
    """Resume an interrupted run."""
    stop_after(arguments.stop_after)
    chosen = _optional(arguments)
    output = Path(chosen.output if chosen else arguments.output)
    from flows.cli.resume import find, settings_of

    record = find(output, arguments.run)
    settings = settings_of(record, output)
    _prepare(settings)
    from flows.post_training import run_pipeline

    print(f"going on with '{record.name}', which is {record.status}")
    result = run_pipeline(
        settings, only=record.only, models=record.given, quiet=arguments.quiet, started=record.started,
        allow_drift=arguments.allow_drift, restart=arguments.fresh,
    )  # fmt: skip
    print(result.table())
    return 0 if result.ok else 1


def verify_resume(arguments: argparse.Namespace) -> int:
    """Compare a run in one piece with an interrupted one."""
    settings = _load(arguments)
    from flows.verification.verify import Plan, verify

    plan = Plan(arguments.kills, arguments.slices, arguments.seed, arguments.minutes, arguments.keep)
    return verify(arguments.config, arguments.set, settings, plan)


def replay(arguments: argparse.Namespace) -> int:
    """Play a recorded episode again, or list the failed ones."""
    settings = _optional(arguments, import_code=True)
    from flows.cli.replay import kept_table, recorded_settings
    from flows.cli.replay import replay as play_again

    settings = settings or recorded_settings(Path(arguments.output))
    if arguments.episode is None:
        print(kept_table(settings))
        return 0
    text, is_same = play_again(settings, arguments.episode, trace=arguments.debug)
    print(text)
    return 0 if is_same else 1


def sync(arguments: argparse.Namespace) -> int:
    """Deliver what still waits for the tracking store."""
    settings = _optional(arguments)
    from flows.cli.sync import sync as deliver

    output = _connect_mlflow(settings.output if settings else arguments.output)
    text, good = deliver(output, settings.tracking.uri if settings else None)
    print(text)
    return 0 if good else 1


def gc(arguments: argparse.Namespace) -> int:
    """List or remove unreferenced data."""
    settings = _optional(arguments)
    from flows.cli.gc import collect

    output = _connect_mlflow(settings.output if settings else arguments.output)
    uri = settings.tracking.uri if settings else None
    print(collect(output, uri, keep=arguments.keep, pipelines=arguments.pipeline, delete=arguments.yes))
    return 0


def up(arguments: argparse.Namespace) -> int:
    """Start servers, worker and deployments, or repair running ones."""
    from flows.operations.commands import up as start

    names = ("prefect_port", "mlflow_port", "database", "pool", "runs", "gpu_slots", "deployments")
    given = {name: getattr(arguments, name) for name in names if getattr(arguments, name) is not None}
    start(Path(arguments.output), given, detach=arguments.detach)
    return 0


def down(arguments: argparse.Namespace) -> int:
    """Stop everything that `up` started."""
    from flows.operations.commands import down as stop

    print(stop(Path(arguments.output)))
    return 0


def status(arguments: argparse.Namespace) -> int:
    """Print the state of the servers of `up`."""
    from flows.operations.commands import status as look

    text, good = look(Path(arguments.output), as_json=arguments.json)
    print(text)
    return 0 if good else 1


def ui(arguments: argparse.Namespace) -> int:
    """Serve the MLflow and the Prefect pages until Ctrl-C."""
    settings = _optional(arguments)
    from flows.cli.ui import serve
    from flows.operations.connect import running

    output = Path(settings.output if settings else arguments.output)
    if (state := running(output)) is not None:
        from flows.operations.report import links

        print(f"`posttrain up` serves both:\n{links(state, output)}")
        return 0
    serve(
        output,
        settings.tracking.uri if settings else None,
        host=arguments.host,
        mlflow_port=arguments.mlflow_port,
        prefect_port=arguments.prefect_port,
    )
    return 0


def monitor(arguments: argparse.Namespace) -> int:
    """Serve the live page until Ctrl-C, or export a run as files."""
    from flows.monitor import server

    output, run = Path(arguments.output), arguments.run or ""
    if arguments.export is None:
        server.serve(output, run, arguments.port)
        return 0
    for path in server.export(output, run, Path(arguments.export)):
        print(path)
    return 0


def runs(arguments: argparse.Namespace) -> int:
    """List runs with status and result."""
    settings = _optional(arguments)
    from tasks.tracking import list_runs, run_records

    output = _connect_mlflow(settings.output if settings else arguments.output)
    uri = settings.tracking.uri if settings else None
    if arguments.format != "table":
        print(_exported(run_records(output, uri=uri, limit=arguments.limit), arguments.format), end="")
        return 0
    rows = list_runs(output, uri=uri, limit=arguments.limit)
    print(_table(rows) if rows else f"no runs in {output.absolute()}; start one: posttrain run demo")
    return 0


def doctor(arguments: argparse.Namespace) -> int:
    """Check this machine for missing requirements, repair dead runs, or explain a model's fast paths."""
    if arguments.faults:
        from rl_core.storage.fault_points import listing

        print(listing())
        return 0
    settings = _optional(arguments)
    from flows.cli.doctor import examine, report

    output, uri = Path(settings.output if settings else arguments.output), settings.tracking.uri if settings else None
    with contextlib.suppress(PosttrainError):  # an unreachable server becomes a finding
        from flows.operations.connect import connect

        connect(output)
    if arguments.repair:
        from flows.runtime.repair import repair

        print("\n".join(repair(output, uri)))
        return 0
    if arguments.model is not None:
        from flows.cli.model_capabilities import explain

        explanation = explain(arguments.model, settings.model if settings else None, output, uri)
        print(explanation.text)
        return 1 if explanation.is_refused else 0
    findings = examine(output, uri)
    print(report(findings))
    return 1 if any(finding.is_bad for finding in findings) else 0


def _exported(records: Sequence[dict[str, Any]], form: str) -> str:
    """Records as JSON, or as CSV with a column for each metric and tag (metrics.NAME, tags.NAME)."""
    if form == "json":
        return json.dumps(records, indent=1) + "\n"
    import pandas as pd

    text: str = pd.json_normalize(list(records)).to_csv(index=False)
    return text if records else ""


def _table(rows: Sequence[dict[str, Any]]) -> str:
    """Rows with equal keys as an aligned text table."""
    head = list(rows[0])
    cells = [head, *([visible(str(row.get(name, ""))) for name in head] for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(head))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in cells]
    return "\n".join(lines)


_ALL = (
    init, convert, data, run, retrain, validate, stage, why, profile, evaluate, analyze, promote, approve, resume, up,
    down, status, ui, monitor, runs, replay, verify_resume, sync, gc, doctor,
)  # fmt: skip
TRAINING = ("run", "resume", "retrain", "stage")  # resumable commands
COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    command.__name__.replace("_", "-"): command for command in _ALL
}

if __name__ == "__main__":
    command()
