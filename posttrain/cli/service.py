"""Command `posttrain service`: run the training service; manage its keys, runs, queue and logs."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from posttrain.cli.arguments import add_data_options, add_set_option, parse_positive_integer
from rl_core.errors import DataError

if TYPE_CHECKING:
    from posttrain.training_service.store import ServiceStore
    from rl_core.settings import ServiceSettings

_CONFIG_HELP = "the service's YAML file, or the name of a shipped one (default: service)"
_SET_HELP = "override a setting, as in folder=/data/service; may be repeated"

EXAMPLES = (
    "service up service --set engine.bases.small=models/small    (until Ctrl-C)",
    "service key create anna --limit 600 --queue 64",
    "service runs",
    "service cancel r-0123456789abcdef01234567",
    "service promote tinker://RUN/weights/best",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    subcommands = parser.add_subparsers(
        title="commands", metavar="COMMAND", required=True, dest="part"
    )
    up = subcommands.add_parser("up", help="start server and worker; restart them when they die")
    up.add_argument("config", metavar="CONFIG", nargs="?", default="service", help=_CONFIG_HELP)
    add_set_option(up, _SET_HELP)
    _add_key_parser(subcommands)
    runs = _add_subcommand_parser(subcommands, "runs", "training runs, the newest first")
    _add_number_option(runs, "at most (default: 20)")
    add_data_options(runs)
    queue = _add_subcommand_parser(
        subcommands, "queue", "open requests by kind, and waiting and service times"
    )
    add_data_options(queue)
    cancel = _add_subcommand_parser(
        subcommands, "cancel", "cancel a waiting request, or all waiting requests of a run"
    )
    cancel.add_argument(
        "name", metavar="REQUEST|RUN", help="id of a request (r-...) or of a training run"
    )
    promote = _add_subcommand_parser(
        subcommands,
        "promote",
        "make the version of a saved path the champion of its registered model",
    )
    promote.add_argument(
        "path",
        metavar="PATH",
        help="tinker://RUN/weights/NAME, saved while worker.registered was set",
    )
    logs = _add_subcommand_parser(subcommands, "logs", "last lines of the logs")
    logs.add_argument(
        "process",
        metavar="PROCESS",
        nargs="?",
        choices=("server", "worker"),
        help="server or worker",
    )
    _add_number_option(logs, "lines (default: 20)")
    audit = _add_subcommand_parser(subcommands, "audit", "who did what, the newest first")
    _add_number_option(audit, "at most (default: 20)")
    add_data_options(audit)


def _add_key_parser(subcommands: Any) -> None:
    key = _add_subcommand_parser(subcommands, "key", "API keys: create, list, revoke")
    actions = key.add_subparsers(title="commands", metavar="COMMAND", required=True, dest="action")
    create = actions.add_parser("create", help="a new key; its secret is printed once")
    create.add_argument("name", metavar="NAME", help="name of its user")
    create.add_argument(
        "--limit",
        type=parse_positive_integer,
        metavar="N",
        help="requests per minute (default: no limit)",
    )
    create.add_argument(
        "--queue",
        type=parse_positive_integer,
        metavar="N",
        help="waiting and running requests (default: no limit)",
    )
    list_keys = actions.add_parser("list", help="all keys, without secrets")
    add_data_options(list_keys)
    revoke = actions.add_parser("revoke", help="revoke a key within seconds")
    revoke.add_argument("name", metavar="NAME", help="name or id of the key")
    for action in (create, list_keys, revoke):
        _add_service_config_option(action)


def _add_subcommand_parser(subcommands: Any, name: str, summary: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = subcommands.add_parser(
        name, help=summary, description=f"{summary[0].upper()}{summary[1:]}."
    )
    if name != "key":
        _add_service_config_option(parser)
    return parser


def _add_number_option(parser: argparse.ArgumentParser, help_text: str) -> None:
    parser.add_argument(
        "--number", "-n", type=parse_positive_integer, default=20, metavar="N", help=help_text
    )


def _add_service_config_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", "-c", metavar="CONFIG", default="service", help=_CONFIG_HELP)
    add_set_option(parser, _SET_HELP)


def run_command(arguments: argparse.Namespace) -> int:
    """Run one of its subcommands."""
    from posttrain.settings_files import load_service_settings

    settings = load_service_settings(arguments.config, arguments.set)
    if arguments.part == "up":
        from posttrain.training_service.supervisor import supervise_service

        supervise_service(settings, lambda text: print(text, flush=True))
        return 0
    if arguments.part == "logs":
        return _print_log_tails(settings, arguments)
    from posttrain.training_service.store import open_service_store

    store = open_service_store(settings)
    try:
        if arguments.part == "promote":
            return _promote_checkpoint(settings, store, arguments)
        return _SUBCOMMANDS[arguments.part](store, arguments)
    finally:
        store.close()


def _format_time(seconds: float | None) -> str:
    return "" if seconds is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def _print_table(
    arguments: argparse.Namespace,
    titles: Sequence[str],
    rows: Sequence[Sequence[object]],
    empty_message: str,
) -> None:
    """Print rows as a table, or with `--json` or `--csv` as records with the titles as keys."""
    from posttrain.cli.tables import format_table, print_requested_data

    keys = [title.lower().replace(" ", "_") for title in titles]
    if print_requested_data(arguments, [dict(zip(keys, row, strict=True)) for row in rows]):
        return
    if not rows:
        print(empty_message)
        return

    print(format_table(titles, [[_format_cell(cell) for cell in row] for row in rows]))


def _format_cell(value: object) -> str:
    """Format a cell on one line with control characters escaped; clients choose the paths."""
    from flows.runtime.terminal import escape_control_characters

    return escape_control_characters(str(value)).replace("\n", "\\n").replace("\t", "\\t")


def _read_key_names(store: ServiceStore) -> dict[str, str]:
    """Return the names of the keys by their ids."""
    return {key.key_id: key.name for key in store.list_keys()}


def _manage_keys(store: ServiceStore, arguments: argparse.Namespace) -> int:
    if arguments.action == "create":
        key, secret = store.create_key(
            arguments.name, requests_per_minute=arguments.limit, queue=arguments.queue
        )
        store.record_audit_entry("operator", "key_create", key.key_id, key.name)
        print(f"{secret}\n\nShown once; clients take it as TINKER_API_KEY.")
    elif arguments.action == "revoke":
        if not store.revoke_key(arguments.name):
            raise DataError(
                f"key '{arguments.name}': no such active key; posttrain service key list shows them"
            )
        store.record_audit_entry("operator", "key_revoke", arguments.name)
        print(f"{arguments.name} is revoked")
    else:
        rows = [
            (
                key.key_id,
                key.name,
                key.requests_per_minute or "",
                key.queue or "",
                _format_time(key.created),
                _format_time(key.used),
                "revoked" if key.revoked else "",
            )
            for key in store.list_keys()
        ]
        titles = ("ID", "NAME", "PER MINUTE", "QUEUE", "CREATED", "USED", "STATE")
        _print_table(
            arguments, titles, rows, "no keys; make one: posttrain service key create NAME"
        )
    return 0


def _list_training_runs(store: ServiceStore, arguments: argparse.Namespace) -> int:
    names = _read_key_names(store)
    rows = [
        (
            run.model_id,
            names.get(run.owner, run.owner),
            run.facts.get("base") or run.base,
            run.state,
            run.steps,
            _format_time(run.touched),
        )
        for run in store.list_runs(None, arguments.number).items
    ]
    _print_table(
        arguments,
        ("RUN", "KEY", "BASE MODEL", "STATE", "UPDATES", "LAST REQUEST"),
        rows,
        "no training runs",
    )
    return 0


def _list_queued_requests(store: ServiceStore, arguments: argparse.Namespace) -> int:
    from posttrain.training_service.store.overview import compute_kind_stats

    def format_quantile(seconds: dict[str, float], quantile: str) -> str:
        return f"{seconds[quantile]:.3f}" if seconds else ""

    stats = compute_kind_stats(store.count_open_requests(), store.list_request_timings())
    rows = [
        (
            kind,
            requests.waiting,
            requests.running,
            format_quantile(requests.waited_seconds, "0.5"),
            format_quantile(requests.waited_seconds, "0.99"),
            format_quantile(requests.served_seconds, "0.5"),
            format_quantile(requests.served_seconds, "0.99"),
        )
        for kind, requests in stats.items()
    ]
    titles = (
        "KIND",
        "WAITING",
        "RUNNING",
        "WAIT P50 S",
        "WAIT P99 S",
        "SERVICE P50 S",
        "SERVICE P99 S",
    )
    _print_table(arguments, titles, rows, "no requests")
    return 0


def _cancel_requests(store: ServiceStore, arguments: argparse.Namespace) -> int:
    name = arguments.name
    ids = [name] if store.find_result(name) is not None else []
    if not ids:
        requests = store.list_requests(name, 100_000)
        ids = [request.request_id for request in requests if request.state == "waiting"]
        if not ids and store.find_run(name) is None:
            raise DataError(
                f"'{name}' is neither a request nor a training run; posttrain service runs lists runs"
            )
    cancelled = [request_id for request_id in ids if store.cancel_request(request_id)]
    for request_id in cancelled:
        store.record_audit_entry("operator", "request_cancel", request_id)
    is_complete = bool(ids) and len(cancelled) == len(ids)
    rest = "" if is_complete else "; running and finished requests are not"
    print(f"{len(cancelled)} cancelled{rest}")
    return 0


def _list_audit_entries(store: ServiceStore, arguments: argparse.Namespace) -> int:
    names = _read_key_names(store)
    rows = [
        (
            _format_time(entry.time),
            names.get(entry.owner, entry.owner),
            entry.action,
            entry.subject,
            entry.detail,
        )
        for entry in store.list_audit_entries(None, arguments.number).items
    ]
    _print_table(arguments, ("TIME", "KEY", "ACTION", "SUBJECT", "DETAIL"), rows, "no entries yet")
    return 0


def _print_log_tails(settings: ServiceSettings, arguments: argparse.Namespace) -> int:
    from flows.runtime.terminal import escape_control_characters
    from posttrain.training_service.supervisor import resolve_log_path

    for name in [arguments.process] if arguments.process else ["server", "worker"]:
        path = resolve_log_path(settings, name)
        text = path.read_text(errors="replace") if path.is_file() else ""
        lines = text.splitlines()[-arguments.number :]
        print(f"--- {path}")
        print(escape_control_characters("\n".join(lines)) if lines else "(empty)")
    return 0


def _promote_checkpoint(
    settings: ServiceSettings, store: ServiceStore, arguments: argparse.Namespace
) -> int:
    """Move the alias `champion` to the version of a saved path."""
    from pathlib import Path

    from posttrain.cli.run_setup import connect_mlflow

    checkpoint = store.find_checkpoint(arguments.path)
    if checkpoint is None:
        raise DataError(
            f"'{arguments.path}': there are no saved weights of this path, or they have expired"
        )
    if checkpoint.version is None:
        remedies = {
            "none": "register future checkpoints with worker.registered=all",
            "failed": "it could not be registered; posttrain service logs worker",
        }
        remedy = remedies.get(
            checkpoint.registration, "the worker registers it when it is idle; try again"
        )
        raise DataError(f"'{arguments.path}' has no version in the model registry; {remedy}")
    connect_mlflow(str(Path(settings.folder).parent))
    from tasks.tracking import Tracking

    name, _, version = checkpoint.version.rpartition("/")
    tracking = Tracking(settings.mlflow or None, Path(settings.folder), "service")
    previous = tracking.find_champion(name)
    tracking.set_champion(name, int(version))
    store.record_audit_entry("operator", "checkpoint_promote", checkpoint.path, checkpoint.version)
    note = "" if previous is None else f" (before: version {previous.version})"
    print(f"{checkpoint.version} is champion of {name}{note}")
    return 0


_SUBCOMMANDS: dict[str, Callable[[ServiceStore, argparse.Namespace], int]] = {
    "key": _manage_keys,
    "runs": _list_training_runs,
    "queue": _list_queued_requests,
    "cancel": _cancel_requests,
    "audit": _list_audit_entries,
}
