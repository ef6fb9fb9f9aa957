"""Settings that a deployment's run may change, against what the deployment declares or a shipped config says."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

from rl_core.errors import SettingsError
from rl_core.user_code import import_paths
from tasks.config import PipelineSettings, named_code, resolve

__all__ = ["CHANGEABLE", "HELD", "VARIABLE", "check_changes", "declared_parameters"]

# What whoever may start a run of a deployment decides ...
CHANGEABLE = (
    "seed", "threads", "run", "retrain", "stages", "model", "environment", "tracking.traces",
    "tracking.system_metrics_seconds",
)  # fmt: skip
# ... but for what runs code, or names files and models of this machine: that is for whoever runs `posttrain up`.
HELD = (
    "model.path", "model.trust_remote_code", "model.chat_template", "environment.options.path",
    "environment.options.taskset", "environment.options.pass_variables", "environment.options.network",
    "stages.prepare_data.demonstrations", "stages.prepare_data.preferences",
)  # fmt: skip
CODE = "code"  # import paths of environments and rewards, wherever they are
VARIABLE = "POSTTRAIN_RUNS_MAY_CHANGE"  # of the worker: more keys, with commas between


def declared_parameters() -> Mapping[str, Any] | None:
    """Parameters that the deployment of the current flow run declares; None for a run without a deployment."""
    from prefect.client.orchestration import get_client
    from prefect.context import FlowRunContext

    context = FlowRunContext.get()
    run = context.flow_run if context is not None else None
    if run is None or run.deployment_id is None:
        return None
    with get_client(sync_client=True) as client:
        return dict(client.read_deployment(run.deployment_id).parameters)


def check_changes(wanted: PipelineSettings, declared: PipelineSettings, allowed: str | None = None) -> None:
    """Compare a run's settings with the declared ones.

    Args:
        allowed: further keys that may differ, with commas between; None = those of POSTTRAIN_RUNS_MAY_CHANGE.
    Raises: SettingsError naming every key that may not differ.
    """
    text = os.environ.get(VARIABLE, "") if allowed is None else allowed
    more = tuple(filter(None, (key.strip() for key in text.split(","))))
    found = [key for key in _changed(resolve(wanted), resolve(declared)) if not _may_change(key, more)]
    new_code = sorted(_code(wanted) - _code(declared)) if CODE not in more else []
    found += [f"{CODE} ({path})" for path in new_code]
    if found:
        raise SettingsError(
            f"a run of this deployment may not change {', '.join(found)}; leave them as declared, declare them in the "
            f"deployment, or allow it where `posttrain up` is started: {VARIABLE}={_names(found)}"
        )


def _names(found: list[str]) -> str:
    return ",".join(dict.fromkeys(key.partition(" ")[0] for key in found))


def _may_change(key: str, more: tuple[str, ...]) -> bool:
    if _below(key, more):
        return True
    return _below(key, CHANGEABLE) and not _below(key, HELD)


def _below(key: str, others: tuple[str, ...]) -> bool:
    return any(key == other or key.startswith(f"{other}.") for other in others)


def _changed(wanted: Mapping[str, Any], declared: Mapping[str, Any], place: str = "") -> Iterator[str]:
    """Dotted keys of values that differ; a list is one value, and what is absent is null."""
    for name in dict.fromkeys([*wanted, *declared]):
        one, other = wanted.get(name), declared.get(name)
        if isinstance(one, Mapping) or isinstance(other, Mapping):
            yield from _changed(one or {}, other or {}, f"{place}{name}.")
        elif one != other:
            yield f"{place}{name}"


def _code(settings: PipelineSettings) -> set[str]:
    return {*named_code(settings), *import_paths(dict(settings.environment.options))}
