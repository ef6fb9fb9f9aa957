"""`posttrain service`: the training service, its keys, runs, queue and logs.

Everything is imported at its call, so that `posttrain --help` starts at once.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from rl_core.errors import DataError

if TYPE_CHECKING:
    from flows.service.store import ServiceStore
    from rl_core.settings import ServiceSettings

__all__ = ["service"]


def service(arguments: argparse.Namespace) -> int:
    """Run one of its commands."""
    from flows.service.configuration import load_service_settings

    settings = load_service_settings(arguments.config, arguments.set)
    if arguments.part == "up":
        from flows.service.supervising import supervise

        supervise(settings, lambda text: print(text, flush=True))
        return 0
    if arguments.part == "logs":
        return _logs(settings, arguments)
    from flows.service.store import ServiceStore

    store = ServiceStore(settings.store_url)
    try:
        if arguments.part == "promote":
            return _promote(settings, store, arguments)
        return _PARTS[arguments.part](store, arguments)
    finally:
        store.close()


def _when(seconds: float | None) -> str:
    return "" if seconds is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def _table(
    arguments: argparse.Namespace, titles: Sequence[str], rows: Sequence[Sequence[object]], nothing: str
) -> None:
    """Rows as a table, or with `--json` as objects with the titles as keys."""
    if arguments.json:
        keys = [title.lower().replace(" ", "_") for title in titles]
        print(json.dumps([dict(zip(keys, row, strict=True)) for row in rows], indent=1))
        return
    if not rows:
        print(nothing)
        return
    texts = [list(titles), *([_cell(cell) for cell in row] for row in rows)]
    widths = [max(len(row[column]) for row in texts) for column in range(len(titles))]
    for row in texts:
        print("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())


def _cell(value: object) -> str:
    """A cell on one line; paths are what clients sent."""
    from flows.runtime.visible import visible

    return visible(str(value)).replace("\n", "\\n").replace("\t", "\\t")


def _names(store: ServiceStore) -> dict[str, str]:
    """Names of keys by their ids."""
    listed = store.keys()
    return {key.key_id: key.name for key in listed}


def _key(store: ServiceStore, arguments: argparse.Namespace) -> int:
    if arguments.action == "create":
        key, secret = store.create_key(arguments.name, requests_per_minute=arguments.limit, queue=arguments.queue)
        store.note("operator", "key_create", key.key_id, key.name)
        print(f"{secret}\n\nShown once; clients take it as TINKER_API_KEY.")
    elif arguments.action == "revoke":
        if not store.revoke_key(arguments.name):
            raise DataError(f"key '{arguments.name}': there is none in use; posttrain service key list shows them")
        store.note("operator", "key_revoke", arguments.name)
        print(f"{arguments.name} is revoked")
    else:
        listed = store.keys()
        rows = [
            (key.key_id, key.name, key.requests_per_minute or "", key.queue or "", _when(key.created), _when(key.used),
             "revoked" if key.revoked else "")
            for key in listed
        ]  # fmt: skip
        titles = ("ID", "NAME", "PER MINUTE", "QUEUE", "CREATED", "USED", "STATE")
        _table(arguments, titles, rows, "no keys; make one: posttrain service key create NAME")
    return 0


def _runs(store: ServiceStore, arguments: argparse.Namespace) -> int:
    names = _names(store)
    rows = [
        (run.model_id, names.get(run.owner, run.owner), run.facts.get("base") or run.base, run.state, run.steps,
         _when(run.touched))
        for run in store.runs(None, arguments.number).items
    ]  # fmt: skip
    _table(arguments, ("RUN", "KEY", "BASE MODEL", "STATE", "UPDATES", "LAST REQUEST"), rows, "no training runs")
    return 0


def _queue(store: ServiceStore, arguments: argparse.Namespace) -> int:
    from flows.service.queue_stats import kind_stats

    def seconds(values: dict[str, float], quantile: str) -> str:
        return f"{values[quantile]:.3f}" if values else ""

    rows = [
        (kind, found.waiting, found.running, seconds(found.waited_seconds, "0.5"),
         seconds(found.waited_seconds, "0.99"), seconds(found.served_seconds, "0.5"),
         seconds(found.served_seconds, "0.99"))
        for kind, found in kind_stats(store.depths(), store.timings()).items()
    ]  # fmt: skip
    titles = ("KIND", "WAITING", "RUNNING", "WAIT P50 S", "WAIT P99 S", "SERVICE P50 S", "SERVICE P99 S")
    _table(arguments, titles, rows, "no requests")
    return 0


def _cancel(store: ServiceStore, arguments: argparse.Namespace) -> int:
    name = arguments.name
    ids = [name] if store.result(name) is not None else []
    if not ids:
        ids = [one.request_id for one in store.requests_of(name, 100_000) if one.state == "waiting"]
        if not ids and store.run(name) is None:
            raise DataError(f"'{name}' is neither a request nor a training run; posttrain service runs lists runs")
    done = [request_id for request_id in ids if store.cancel(request_id)]
    for request_id in done:
        store.note("operator", "request_cancel", request_id)
    print(f"{len(done)} cancelled" + ("" if len(done) == len(ids) and ids else "; what runs or is final is not"))
    return 0


def _audit(store: ServiceStore, arguments: argparse.Namespace) -> int:
    names = _names(store)
    rows = [
        (_when(entry.time), names.get(entry.owner, entry.owner), entry.action, entry.subject, entry.detail)
        for entry in store.audit(None, arguments.number).items
    ]
    _table(arguments, ("TIME", "KEY", "ACTION", "SUBJECT", "DETAIL"), rows, "nothing was done yet")
    return 0


def _logs(settings: ServiceSettings, arguments: argparse.Namespace) -> int:
    from flows.runtime.visible import visible
    from flows.service.supervising import log_of

    for name in [arguments.process] if arguments.process else ["server", "worker"]:
        path = log_of(settings, name)
        lines = path.read_text(errors="replace").splitlines()[-arguments.number :] if path.is_file() else []
        print(f"--- {path}")
        print(visible("\n".join(lines)) if lines else "(empty)")
    return 0


def _promote(settings: ServiceSettings, store: ServiceStore, arguments: argparse.Namespace) -> int:
    """Move the alias `champion` to the version of a saved path."""
    from pathlib import Path

    from flows.cli.arguments_to_settings import connect_mlflow

    found = store.checkpoint(arguments.path)
    if found is None:
        raise DataError(f"'{arguments.path}': there are no saved weights of this path, or they have expired")
    if found.version is None:
        remedy = {
            "none": "register what is saved from now on: worker.registered=all",
            "failed": "it could not be registered; posttrain service logs worker",
        }.get(found.registration, "the worker registers it when nothing else is to be done; try again")
        raise DataError(f"'{arguments.path}' has no version in the model registry; {remedy}")
    connect_mlflow(str(Path(settings.folder).parent))
    from tasks.tracking import Tracking

    name, _, version = found.version.rpartition("/")
    tracking = Tracking(settings.mlflow or None, Path(settings.folder), "service")
    before = tracking.champion(name)
    tracking.set_champion(name, int(version))
    store.note("operator", "checkpoint_promote", found.path, found.version)
    was = "" if before is None else f" (before: version {before.version})"
    print(f"{found.version} is champion of {name}{was}")
    return 0


_PARTS: dict[str, Callable[[ServiceStore, argparse.Namespace], int]] = {
    "key": _key,
    "runs": _runs,
    "queue": _queue,
    "cancel": _cancel,
    "audit": _audit,
}
