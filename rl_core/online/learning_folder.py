"""Folder of one learning service: the model that it began with, its settings, and what happened.

<folder>/model/          the model that the service began with; snapshots are weights of it
<folder>/service.json    its name, registered version and digest, and the time at which the service began
<folder>/online.yaml     settings of worker and gate
<folder>/events.jsonl    decisions, alarms, restarts
<folder>/operator.json   orders of a person: to go on after an alarm
<folder>/orders.json     numbers of the last orders that were handed to the worker
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_core.errors import DataError, SettingsError
from rl_core.online.service_files import GATE_FILE, METRICS_FILE, OPERATOR_FILE, read_json_object
from rl_core.settings import EnvironmentSettings, ModelSettings, OnlineSettings
from rl_core.storage.atomic_files import (
    copy_tree,
    make_folder,
    write_json_atomic,
    write_text_atomic,
)
from rl_core.storage.faults import inject_fault
from rl_core.storage.folders import publish_folder
from rl_core.storage.line_logs import RotatingLineLog
from rl_core.storage.locks import FolderLock
from rl_core.storage.manifest import digest_folder

SERVICE_FILE = "service.json"
SETTINGS_FILE = "online.yaml"
EVENTS_FILE = "events.jsonl"
FORWARDED_ORDERS_FILE = "orders.json"
MAX_EVENT_BYTES, NUM_ROTATED_FILES = 4 * 2**20, 3
MAX_STORED_ORDERS = 100


def build_pipeline_settings(
    online: OnlineSettings, environment: EnvironmentSettings, model: ModelSettings, folder: Path
) -> OnlineSettings:
    """Settings of the service of a pipeline, which adds its environment, model and folder.

    Raises: SettingsError where the section `online` names what is the pipeline's.
    """
    if online.model.path is not None:
        raise SettingsError(
            "online.model.path: in a pipeline the service begins with what is served; leave it out"
        )
    if online.folder != OnlineSettings().folder:
        raise SettingsError(
            "online.folder: a pipeline's services are in its own folder; leave it out"
        )
    own = dataclasses.replace(model, path=str(folder / "model"), lora=online.model.lora)
    return dataclasses.replace(
        online, folder=str(folder), model=own, environment=online.environment or environment
    )


@dataclass(frozen=True, slots=True)
class LearningFolder:
    """One service's folder, made when it first begins."""

    path: Path
    facts: dict[str, Any]  # of service.json

    @classmethod
    def open_or_create(cls, path: Path, source: Path, facts: Mapping[str, Any]) -> LearningFolder:
        """The folder; at the first start the model is copied into it.

        Args:
            source: folder of the model. facts: name, and registered version where there is one.
        Raises: CheckpointError where the disk refuses; DataError where the folder is that of another model.
        """
        make_folder(path)
        digest = digest_folder(source)
        model = path / "model"
        if not (model / "config.json").is_file():
            publish_folder(model, lambda target: _copy_model(source, target), {"kind": "model"})
            inject_fault("online.model")
        if not (path / SERVICE_FILE).is_file():
            write_json_atomic(
                path / SERVICE_FILE, {**facts, "model_sha256": digest, "began": time.time()}
            )
        found = read_service_facts(path)
        if found.get("model_sha256") != digest:
            raise DataError(f"{path}: is the service of another model; move it away to begin anew")
        return cls(path, found)

    def write_settings(self, settings: OnlineSettings) -> Path:
        """The file that worker and gate read; JSON is YAML."""
        text = json.dumps(dataclasses.asdict(settings), indent=1, sort_keys=True)
        write_text_atomic(self.path / SETTINGS_FILE, text + "\n")
        return self.path / SETTINGS_FILE

    def append_event(self, kind: str, text: str, **more: Any) -> None:
        """Append to the record of what happened. Raises: CheckpointError."""
        line = json.dumps({"time": time.time(), "kind": kind, "text": text, **more})
        RotatingLineLog(
            self.path / EVENTS_FILE, max_bytes=MAX_EVENT_BYTES, keep=NUM_ROTATED_FILES
        ).append_lines((line + "\n").encode())

    @property
    def forwarded_orders(self) -> dict[str, int]:
        """Number of the last order that was handed to the worker, by the file of the gate or of a person."""
        found = read_json_object(self.path / FORWARDED_ORDERS_FILE)
        return {
            name: number if type(number := found.get(name)) is int else 0
            for name in (GATE_FILE, OPERATOR_FILE)
        }

    def record_forwarded_orders(self, forwarded: Mapping[str, int]) -> None:
        """Note that all orders up to these are handed over, before they are: one that a kill loses is given up,
        and never given twice, when a rollback may have come between."""
        write_json_atomic(self.path / FORWARDED_ORDERS_FILE, dict(forwarded))
        inject_fault("online.taken")


def request_resume(path: Path) -> str:
    """Ask the server of a service's folder to have learning go on after an alarm; returns a sentence for the person.

    Raises: DataError for a folder that holds no service; CheckpointError where the disk refuses.
    """
    if not read_service_facts(path):
        raise DataError(
            f"{path}: holds no service; name the folder of one, as outputs/NAME/online/version-N"
        )
    if not (paused := read_json_object(path / METRICS_FILE).get("paused")):
        return "learning is not paused"
    with FolderLock(make_folder(path / "operator")):
        orders = read_json_object(path / OPERATOR_FILE).get("orders", [])
        number = orders[-1]["number"] + 1 if orders else 1
        orders = [*orders, {"number": number, "order": {"order": "resume"}}][-MAX_STORED_ORDERS:]
        write_json_atomic(path / OPERATOR_FILE, {"orders": orders})
        inject_fault("online.asked")
    return f"paused until now: {paused}; its server is asked to go on, at its next start if it does not run"


def _copy_model(source: Path, target: Path) -> dict[str, str]:
    copy_tree(source, target)
    return {}


def read_service_facts(path: Path) -> dict[str, Any]:
    """Facts of a service's folder; {} where it is none."""
    return read_json_object(path / SERVICE_FILE)


def read_events(path: Path, count: int = 1000) -> list[dict[str, Any]]:
    """The newest events of a service, the oldest first."""
    lines: list[str] = []
    for number in range(NUM_ROTATED_FILES, -1, -1):
        file = path / (f"{EVENTS_FILE}.{number}" if number else EVENTS_FILE)
        if file.is_file():
            lines += file.read_text(errors="replace").splitlines()
    found = []
    for line in lines[-count:]:
        try:
            found.append(json.loads(line))
        except ValueError:  # torn by a kill
            continue
    return [event for event in found if isinstance(event, dict)]
