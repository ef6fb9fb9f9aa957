"""Schedules of pipelines: Prefect deployments of a user's configuration, made by `posttrain schedule`.

A deployment is found again by its tag. It reads the configuration's file at each run, in the folder where the command
was called, so that relative paths and the user's modules mean the same as in `posttrain run`.
"""

from __future__ import annotations

import datetime
import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from posttrain.operations.services import PACKAGES_FOLDER
from rl_core.errors import DataError, SettingsError, suggest_name

if TYPE_CHECKING:
    from prefect.client.orchestration import PrefectClient
    from prefect.client.schemas.responses import DeploymentResponse

ScheduledFlow = Literal["retrain", "run"]

SCHEDULE_TAG = "posttrain-schedule"
PAGE_SIZE = 200  # deployments of one request
NUM_SHOWN_TIMES = 3
_ENTRYPOINTS = {"retrain": "flows.retrain.retrain", "run": "flows.post_training.post_training"}
_WAIT_OVERRIDE = "run.wait_seconds=14400"  # for the pipeline's lock, as in deployments/prefect.yaml
_MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
_DAYS = ("sun", "mon", "tue", "wed", "thu", "fri", "sat")
# Field: smallest value, largest value, names of values.
_CRON_FIELDS: dict[str, tuple[int, int, tuple[str, ...]]] = {
    "minute": (0, 59, ()),
    "hour": (0, 23, ()),
    "day of the month": (1, 31, ()),
    "month": (1, 12, _MONTHS),
    "day of the week": (0, 7, _DAYS),
}


@dataclass(frozen=True, slots=True)
class Schedule:
    """Scheduled pipeline."""

    name: str  # of the deployment: demo-retrain
    flow: str  # of Prefect: retrain or post-training
    config: str
    cron: str
    timezone: str
    is_active: bool
    next_times: tuple[str, ...]


def check_cron(cron: str, timezone: str) -> None:
    """Check a cron expression and its time zone, without Prefect. Raises: SettingsError that names the wrong field."""
    try:
        ZoneInfo(timezone)
    except (ZoneInfoNotFoundError, ValueError, OSError):  # OSError: a folder, or too long a name
        raise SettingsError(
            f"--timezone: '{timezone}' is no time zone; name one like UTC or Europe/Berlin"
        ) from None
    if cron.startswith("@"):
        known = ("@hourly", "@daily", "@midnight", "@weekly", "@monthly", "@yearly", "@annually")
        if cron not in known:
            raise SettingsError(f"--cron: '{cron}': {suggest_name(cron, known)}")
        return
    words = cron.split()
    if len(words) != len(_CRON_FIELDS):
        raise SettingsError(
            f"--cron: '{cron}' has {len(words)} fields, not 5: minute, hour, day of the month, month, day of the week; "
            'for 02:00 every day write "0 2 * * *"'
        )
    for word, (field, (low, high, names)) in zip(words, _CRON_FIELDS.items(), strict=True):
        for part in word.split(","):
            _check_cron_part(cron, part, field, low, high, names)


def _check_cron_part(
    cron: str, part: str, field: str, low: int, high: int, names: tuple[str, ...]
) -> None:
    """Check one value, range or step of a field. Raises: SettingsError."""
    span, slash, step = part.partition("/")
    if slash and not (step.isdecimal() and int(step) > 0):
        raise SettingsError(f"--cron: '{cron}': {field} '{part}': a step is a number above 0")
    if span == "*":
        return
    bounds = []
    for text in span.split("-", 1):
        name = text.lower()
        if name in names:
            bounds.append(names.index(name) + low)
        elif text.isdecimal() and low <= int(text) <= high:
            bounds.append(int(text))
        else:
            values = f"{low} to {high}" + (f" or {names[0]} to {names[-1]}" if names else "")
            raise SettingsError(f"--cron: '{cron}': {field} is '{text}', not {values}")
    if high == len(_DAYS) and bounds[-1] == 0 and len(bounds) == 2:
        bounds[-1] = high  # sat-sun: Sunday is 7, too
    if len(bounds) == 2 and bounds[0] > bounds[1]:
        raise SettingsError(f"--cron: '{cron}': {field} '{span}' ends before it begins")


def list_next_times(
    cron: str, timezone: str, now: datetime.datetime | None = None
) -> tuple[str, ...]:
    """List the next three times of a schedule, in its time zone; () if it never occurs.

    Call it after Prefect's address is set: it imports Prefect.
    """
    from prefect._vendor.croniter import CroniterBadDateError, croniter

    zone = ZoneInfo(timezone)
    now = now or datetime.datetime.now(zone)
    # The clock of the zone without its offset, as Prefect's scheduler counts.
    times = croniter(cron, now.astimezone(zone).replace(tzinfo=None))
    try:
        following = [times.get_next(datetime.datetime) for _ in range(NUM_SHOWN_TIMES)]
    except CroniterBadDateError:
        return ()
    return tuple(f"{time:%a %Y-%m-%d %H:%M} {timezone}" for time in following)


def resolve_schedule_name(pipeline: str, flow: ScheduledFlow) -> str:
    """Return the deployment's name, which no shipped deployment has."""
    return f"{pipeline}-{flow}"


async def create_schedule(
    client: PrefectClient,
    pipeline: str,
    config: str,
    overrides: list[str],
    *,
    flow: ScheduledFlow,
    cron: str,
    timezone: str,
    pool: str,
    main: Mapping[str, Any],
) -> tuple[Schedule, Schedule | None]:
    """Create the schedule of a pipeline, or replace the one of its name; return it and the replaced one.

    Args:
        config: absolute path of a file, or the name of a shipped one.
        overrides: KEY=VALUE each; applied at each run.
        pool: work pool of the worker.
        main: values that the form of a run shows; only those that a person changes there count.
    """
    from prefect.client.schemas.actions import DeploymentScheduleCreate
    from prefect.client.schemas.objects import ConcurrencyLimitStrategy, ConcurrencyOptions
    from prefect.client.schemas.schedules import CronSchedule
    from prefect.utilities.callables import parameter_schema
    from prefect.utilities.importtools import import_object

    next_times = list_next_times(cron, timezone)
    if not next_times:
        raise SettingsError(f"--cron: '{cron}' never occurs: no month has such a day")
    function = import_object(_ENTRYPOINTS[flow])
    parameters: dict[str, Any] = {
        "settings": config,
        "main": dict(main),
        "overrides": [_WAIT_OVERRIDE, *overrides],
    }
    if flow == "retrain":
        parameters["reason"] = f"schedule {cron}"
    name = resolve_schedule_name(pipeline, flow)
    replaced = next((old for old in await list_schedules(client) if old.name == name), None)
    await client.create_deployment(
        flow_id=await client.create_flow_from_name(function.name),
        name=name,
        description=f"Scheduled by `posttrain schedule {shlex.quote(config)} --cron '{cron}'`.",
        entrypoint=_ENTRYPOINTS[flow],
        work_pool_name=pool,
        parameters=parameters,
        parameter_openapi_schema=parameter_schema(function).model_dump(),
        enforce_parameter_schema=True,
        schedules=[
            DeploymentScheduleCreate(
                schedule=CronSchedule(cron=cron, timezone=timezone), active=True
            )
        ],
        concurrency_limit=1,
        concurrency_options=ConcurrencyOptions(collision_strategy=ConcurrencyLimitStrategy.ENQUEUE),
        job_variables={"working_dir": os.getcwd(), "env": _build_run_environment()},
        tags=[SCHEDULE_TAG],
    )
    return Schedule(name, function.name, config, cron, timezone, True, next_times), replaced


def _build_run_environment() -> dict[str, str]:
    """Build the environment of the runs: this posttrain, then the modules that the caller's commands import."""
    path = [str(PACKAGES_FOLDER), os.getcwd(), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    return {
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(filter(None, path))),
        "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30",  # automations.yaml takes three missing ones for a crash
        "PREFECT_LOGGING_EXTRA_LOGGERS": "rl_core,tasks,flows,posttrain",
    }


async def list_schedules(client: PrefectClient) -> list[Schedule]:
    """List the schedules that `posttrain schedule` made, by name."""
    return sorted(
        [
            _describe_deployment(deployment, await _read_flow_name(client, deployment))
            for deployment in await _read_scheduled_deployments(client)
        ],
        key=lambda schedule: schedule.name,
    )


async def remove_schedule(client: PrefectClient, name: str) -> str:
    """Remove a schedule by its name or FLOW/NAME; return the name. Raises: DataError with the nearest name."""
    deployments = await _read_scheduled_deployments(client)
    wanted = name.rpartition("/")[2]
    for deployment in deployments:
        if deployment.name == wanted:
            await client.delete_deployment(deployment.id)
            return str(deployment.name)
    names = [str(deployment.name) for deployment in deployments]
    raise DataError(
        f"no schedule '{name}'; {suggest_name(wanted, names)} (posttrain schedule --list)"
    )


async def _read_scheduled_deployments(client: PrefectClient) -> list[DeploymentResponse]:
    from prefect.client.schemas.filters import DeploymentFilter, DeploymentFilterTags

    wanted = DeploymentFilter(tags=DeploymentFilterTags(all_=[SCHEDULE_TAG]))
    deployments: list[DeploymentResponse] = []
    while page := await client.read_deployments(
        deployment_filter=wanted, limit=PAGE_SIZE, offset=len(deployments)
    ):
        deployments += page
    return deployments


async def _read_flow_name(client: PrefectClient, deployment: DeploymentResponse) -> str:
    return str((await client.read_flow(deployment.flow_id)).name)


def _describe_deployment(deployment: DeploymentResponse, flow: str) -> Schedule:
    cron, timezone, is_active = "", "UTC", False
    for schedule in deployment.schedules:
        cron = str(getattr(schedule.schedule, "cron", ""))
        timezone = str(getattr(schedule.schedule, "timezone", None) or "UTC")
        is_active = schedule.active and not deployment.paused
    return Schedule(
        name=str(deployment.name),
        flow=flow,
        config=str(deployment.parameters.get("settings", "")),
        cron=cron,
        timezone=timezone,
        is_active=is_active,
        next_times=list_next_times(cron, timezone) if cron and is_active else (),
    )


def resolve_config_parameter(config: str) -> str:
    """Return the configuration as a run elsewhere finds it: an absolute path, or the name of a shipped one."""
    path = Path(config).expanduser()
    return str(path.resolve()) if path.is_file() else config
