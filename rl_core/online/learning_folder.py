"""Folder of a learning service: its initial model, its settings, and its history.

<folder>/model/          the initial model of the service; snapshots are weights of it
<folder>/service.json    its name, registered version and digest, and the time at which the service started
<folder>/online.yaml     settings of worker and gate
<folder>/events.jsonl    decisions, alarms, restarts
<folder>/operator.json   orders of an operator: resume after an alarm
<folder>/orders.json     numbers of the last orders that were forwarded to the worker
"""

from __future__ import annotations

import dataclasses
import json
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_core.errors import DataError, SettingsError
from rl_core.online.service_files import GATE_FILE, METRICS_FILE, OPERATOR_FILE, read_json_object
from rl_core.settings import (
    EnvironmentSettings,
    ModelSettings,
    OnlineSettings,
    PolicySettings,
    RewardSettings,
)
from rl_core.storage.append_log import AppendLog, list_log_files, parse_checked_line
from rl_core.storage.atomic_files import (
    copy_tree,
    make_folder,
    write_json_atomic,
    write_text_atomic,
)
from rl_core.storage.faults import inject_fault
from rl_core.storage.folders import publish_folder
from rl_core.storage.locks import FolderLock
from rl_core.storage.manifest import digest_folder

logger = logging.getLogger(__name__)

SERVICE_FILE = "service.json"
SETTINGS_FILE = "online.yaml"
EVENTS_FILE = "events.jsonl"
FORWARDED_ORDERS_FILE = "orders.json"
MAX_EVENT_BYTES, NUM_ROTATED_FILES = 4 * 2**20, 3
MAX_STORED_ORDERS = 100


DEFAULT_REWARDS = {"task": 1.0}


def follow_policy_rewards(online: OnlineSettings, policy: PolicySettings | None) -> OnlineSettings:
    """Return the settings with the policy stage's rewards, unless the section `online` sets its own.

    Its `reward_options` come along unless they are set. The component `learned` needs `online.reward_model`; without
    it the component is left out, and a warning says so.
    """
    if online.rewards is not None:
        return online
    if policy is None:
        return dataclasses.replace(online, rewards=dict(DEFAULT_REWARDS))
    rewards, options = dict(policy.rewards), online.reward_options
    if options == RewardSettings():
        options = policy.reward_options
    if rewards.pop("process", None) is not None:
        logger.warning(
            "online.rewards: the policy stage's component 'process' is left out; answers are not divided into steps"
        )
    if "learned" in rewards and online.reward_model is None:
        del rewards["learned"]
        options = dataclasses.replace(
            options,
            normalise=tuple(name for name in options.normalise if name != "learned"),
            cache=tuple(name for name in options.cache if name != "learned"),
        )
        logger.warning(
            "online.rewards: the policy stage's component 'learned' is left out; set online.reward_model to use it"
        )
    return dataclasses.replace(
        online, rewards=rewards or dict(DEFAULT_REWARDS), reward_options=options
    )


def build_pipeline_settings(
    online: OnlineSettings,
    environment: EnvironmentSettings,
    model: ModelSettings,
    folder: Path,
    policy: PolicySettings | None = None,
) -> OnlineSettings:
    """Build the settings of a pipeline's service by adding its environment, model, folder and rewards.

    Args:
        policy: the policy stage, whose rewards apply unless the section sets its own.
    Raises: SettingsError if the section `online` sets what the pipeline determines.
    """
    if online.model.path is not None:
        raise SettingsError(
            "online.model.path: in a pipeline the service starts from the served model; leave it out"
        )
    if online.folder != OnlineSettings().folder:
        raise SettingsError(
            "online.folder: a pipeline stores its services in its output folder; leave it out"
        )
    service_model = dataclasses.replace(model, path=str(folder / "model"), lora=online.model.lora)
    return dataclasses.replace(
        follow_policy_rewards(online, policy),
        folder=str(folder),
        model=service_model,
        environment=online.environment or environment,
    )


@dataclass(frozen=True, slots=True)
class LearningFolder:
    """Folder of one service, created at its first start."""

    path: Path
    facts: dict[str, Any]  # content of service.json

    @classmethod
    def open_or_create(cls, path: Path, source: Path, facts: Mapping[str, Any]) -> LearningFolder:
        """Open the folder; at the first start, copy the model into it.

        Args:
            source: folder of the model.
            facts: name, and registered version if there is one.
        Raises: CheckpointError for a disk error; DataError if the source is no model, or the folder another model's.
        """
        if not (source / "config.json").is_file():
            raise DataError(f"{source}: is a folder without a config.json, so it is no model")
        make_folder(path)
        digest = digest_folder(source)
        model = path / "model"
        if not (model / "config.json").is_file():
            publish_folder(model, lambda target: _copy_model(source, target), {"kind": "model"})
            inject_fault("online.model")
        if not (path / SERVICE_FILE).is_file():
            service = {**facts, "model_sha256": digest, "began": time.time()}
            write_json_atomic(path / SERVICE_FILE, service)
        stored_facts = read_service_facts(path)
        if stored_facts.get("model_sha256") != digest:
            raise DataError(f"{path}: is the service of another model; move it away to start again")
        return cls(path, stored_facts)

    def write_settings(self, settings: OnlineSettings) -> Path:
        """Write the file that worker and gate read (JSON is YAML) and return its path."""
        text = json.dumps(dataclasses.asdict(settings), indent=1, sort_keys=True)
        write_text_atomic(self.path / SETTINGS_FILE, text + "\n")
        return self.path / SETTINGS_FILE

    def append_event(self, kind: str, text: str, **details: Any) -> None:
        """Append an event to the history. Raises: CheckpointError."""
        log = AppendLog(
            self.path / EVENTS_FILE,
            checksums=False,
            allow_nan=True,
            max_bytes=MAX_EVENT_BYTES,
            keep=NUM_ROTATED_FILES,
        )
        make_folder(self.path)
        log.append_record({"time": time.time(), "kind": kind, "text": text, **details})

    @property
    def forwarded_orders(self) -> dict[str, int]:
        """Number of the last order that was forwarded to the worker, by source: the gate's or the operator's file."""
        stored = read_json_object(self.path / FORWARDED_ORDERS_FILE)
        numbers = {name: stored.get(name) for name in (GATE_FILE, OPERATOR_FILE)}
        return {name: value if type(value) is int else 0 for name, value in numbers.items()}

    def record_forwarded_orders(self, forwarded: Mapping[str, int]) -> None:
        """Record that all orders up to these are forwarded, before they are.

        An order lost to a crash is dropped and never sent twice, because a rollback may have happened in between.
        """
        write_json_atomic(self.path / FORWARDED_ORDERS_FILE, dict(forwarded))
        inject_fault("online.taken")


def request_resume(path: Path) -> str:
    """Ask the server of a service's folder to resume learning after an alarm; return a sentence for the user.

    Raises: DataError for a folder that holds no service; CheckpointError for a disk error.
    """
    if not read_service_facts(path):
        raise DataError(
            f"{path}: holds no service; use a service folder such as outputs/NAME/online/version-N"
        )
    paused = read_json_object(path / METRICS_FILE).get("paused")
    if not paused:
        return "learning is not paused"
    with FolderLock(make_folder(path / "operator")):
        orders = read_json_object(path / OPERATOR_FILE).get("orders", [])
        number = orders[-1]["number"] + 1 if orders else 1
        orders = [*orders, {"number": number, "order": {"order": "resume"}}][-MAX_STORED_ORDERS:]
        write_json_atomic(path / OPERATOR_FILE, {"orders": orders})
        inject_fault("online.asked")
    return (
        f"paused: {paused}; the server will resume learning, at its next start if it is not running"
    )


def _copy_model(source: Path, target: Path) -> dict[str, str]:
    copy_tree(source, target)
    return {}


def read_service_facts(path: Path) -> dict[str, Any]:
    """Return the content of a service's file; {} if the folder holds no service."""
    return read_json_object(path / SERVICE_FILE)


def read_events(path: Path, count: int = 1000) -> list[dict[str, Any]]:
    """Return the newest events of a service, oldest first."""
    files = list_log_files(path / EVENTS_FILE)
    lines = [line for file in files for line in file.read_bytes().splitlines()]
    events = [parse_checked_line(line)[0] for line in lines[-count:]]
    return [event for event in events if event is not None]  # None = torn by a crash
