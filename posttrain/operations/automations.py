"""`deployments/automations.yaml`, applied to a Prefect server by name: created or updated, never duplicated.

The file has the format of `prefect automation create --from-file`: a list, or `automations:` with a list. In addition,
a deployment or block may be named where Prefect wants an id, which exists only once the object does:

    actions:
      - {type: run-deployment, source: selected, deployment_id: post-training/nightly-retrain}
      - {type: call-webhook, block_document_id: webhook/posttrain-alerts, payload: "..."}
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import UUID

from rl_core.errors import DataError

if TYPE_CHECKING:
    from prefect.client.orchestration import PrefectClient

_ACTION_KEYS = ("actions", "actions_on_trigger", "actions_on_resolve")


@dataclass(frozen=True, slots=True)
class AppliedAutomation:
    """The outcome for one automation."""

    name: str
    what: str  # made, updated, unchanged, skipped
    note: str = ""


class MissingReference(Exception):
    """A block or deployment referenced by an automation does not exist."""


def read_automations(path: Path) -> list[dict[str, Any]]:
    """Read the automations of a file. Raises: DataError unless it is a list of automations with distinct names."""
    import yaml

    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise DataError(f"{path}: cannot be read: {' '.join(str(error).split())}") from None
    if isinstance(data, dict):
        data = data.get("automations", [data])
    if data is None:
        return []
    if not isinstance(data, list) or not all(isinstance(item, dict) for item in data):
        raise DataError(
            f"{path}: must hold a list of automations, or `automations:` with such a list"
        )
    names: list[str] = []
    for number, item in enumerate(data, 1):
        name = item.get("name")
        if not isinstance(name, str) or not name:
            raise DataError(f"{path}: automation {number} has no `name`, which identifies it")
        if name in names:
            raise DataError(f"{path}: '{name}' appears twice; give each automation its own name")
        names.append(name)
    return data


async def apply_automations(client: PrefectClient, path: Path) -> list[AppliedAutomation]:
    """Create or update the server's automations from the file, matched by name.

    An automation with a missing block is skipped with a note; one disabled in the UI stays disabled unless the file
    sets `enabled`.
    Raises: DataError if Prefect refuses one.
    """
    from prefect.events.schemas.automations import AutomationCore
    from pydantic import ValidationError

    outcomes = []
    for item in read_automations(path):
        name = str(item["name"])
        try:
            wanted = AutomationCore.model_validate(await _resolve_references(client, item))
        except MissingReference as error:
            outcomes.append(AppliedAutomation(name, "skipped", str(error)))
            continue
        except ValidationError as error:
            raise DataError(
                f"{path}: automation '{name}' is not valid:\n{_format_problems(error)}"
            ) from None
        outcome = await _create_or_update(client, wanted, has_explicit_enabled="enabled" in item)
        outcomes.append(outcome)
    return outcomes


async def _create_or_update(
    client: PrefectClient, wanted: Any, *, has_explicit_enabled: bool
) -> AppliedAutomation:
    existing = await client.read_automations_by_name(wanted.name)
    if not existing:
        await client.create_automation(wanted)
        return AppliedAutomation(wanted.name, "made")
    first, *duplicates = sorted(existing, key=lambda automation: str(automation.id))
    for duplicate in duplicates:  # `prefect automation create` adds one each time
        await client.delete_automation(duplicate.id)
    note = f"{len(duplicates)} of the same name removed" if duplicates else ""
    if not has_explicit_enabled:
        wanted = wanted.model_copy(update={"enabled": first.enabled})
    if _normalize_automation(wanted) == _normalize_automation(first):
        return AppliedAutomation(wanted.name, "unchanged", note)
    from prefect.events.schemas.automations import AutomationCore

    # Rebuilt so that defaults count as set, as the client sends only set fields; the owner cannot be changed.
    fields = wanted.model_dump(mode="json", exclude={"owner_resource"})
    await client.update_automation(first.id, AutomationCore.model_validate(fields))
    return AppliedAutomation(wanted.name, "updated", note)


def _normalize_automation(automation: Any) -> Any:
    from prefect.events.schemas.automations import AutomationCore

    return _normalize_value(
        automation.model_dump(mode="json", include=set(AutomationCore.model_fields))
    )


def _normalize_value(value: Any) -> Any:
    """Normalize a value for comparison: drop server-assigned trigger ids, sort event names."""
    if isinstance(value, dict):
        return {key: _normalize_value(item) for key, item in value.items() if key != "id"}
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return sorted(value)
    if isinstance(value, list):
        return [_normalize_value(item) for item in value]
    return value


async def _resolve_references(client: PrefectClient, item: dict[str, Any]) -> dict[str, Any]:
    item = dict(item)
    for key in _ACTION_KEYS:
        if isinstance(item.get(key), list):
            item[key] = [await _resolve_action_ids(client, action) for action in item[key]]
    return item


async def _resolve_action_ids(client: PrefectClient, action: Any) -> Any:
    if not isinstance(action, dict):
        return action
    action = dict(action)
    deployment, block = action.get("deployment_id"), action.get("block_document_id")
    if _is_name(deployment):
        action["deployment_id"] = await _find_deployment_id(client, str(deployment))
    if _is_name(block):
        action["block_document_id"] = await _find_block_id(client, str(block))
    return action


def _is_name(value: Any) -> bool:
    if not isinstance(value, str):
        return False
    try:
        UUID(value)
    except ValueError:
        return True
    return False


async def _find_deployment_id(client: PrefectClient, name: str) -> str:
    from prefect.exceptions import ObjectNotFound

    try:
        return str((await client.read_deployment_by_name(name)).id)
    except (ObjectNotFound, ValueError):
        raise MissingReference(
            f"there is no deployment '{name}' (written FLOW/DEPLOYMENT)"
        ) from None


async def _find_block_id(client: PrefectClient, name: str) -> str:
    from prefect.exceptions import ObjectNotFound

    kind, _, block_name = name.partition("/")
    try:
        return str((await client.read_block_document_by_name(block_name, kind)).id)
    except (ObjectNotFound, ValueError):
        raise MissingReference(
            f"there is no block '{name}'; create it in the Prefect UI under Blocks, then run `posttrain up` again"
        ) from None


def _format_problems(error: Any) -> str:
    lines = []
    for problem in error.errors()[:10]:
        field = ".".join(str(part) for part in problem["loc"])
        lines.append(f"  {field}: {problem['msg']}")
    return "\n".join(lines)
