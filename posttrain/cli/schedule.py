"""Command `posttrain schedule`: run or retrain a pipeline at set times, on the servers of `posttrain up`."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.cli import run_setup
from posttrain.cli.arguments import add_config_argument, add_data_options
from rl_core.errors import BackendError, SettingsError
from tasks.command_hints import format_posttrain_command

if TYPE_CHECKING:
    from posttrain.operations.schedules import Schedule
    from tasks.config import PipelineSettings

EXAMPLES = (
    'schedule my_task/config.yaml --cron "0 2 * * *"    (retrain at 02:00 UTC if there is new data)',
    'schedule demo --cron "0 6 * * mon" --timezone Europe/Berlin --flow run',
    "schedule --list",
    "schedule --remove demo-retrain",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    add_config_argument(parser, optional=True)
    parser.add_argument(
        "--cron",
        metavar="CRON",
        help="when: minute, hour, day of the month, month, day of the week",
    )
    parser.add_argument(
        "--timezone", default="UTC", metavar="ZONE", help="of the times (default: UTC)"
    )
    parser.add_argument(
        "--flow",
        choices=("retrain", "run"),
        default="retrain",
        help="retrain: only if there is data new to the champion (default); run: the pipeline, whose cached stages are "
        "skipped",
    )
    actions = parser.add_mutually_exclusive_group()
    actions.add_argument("--list", action="store_true", help="list the schedules")
    actions.add_argument("--remove", metavar="NAME", help="remove a schedule")
    add_data_options(parser)


def run_command(arguments: argparse.Namespace) -> int:
    """Schedule a pipeline; list or remove schedules."""
    from posttrain.cli.tables import print_requested_data

    is_new = not arguments.list and arguments.remove is None
    _refuse_wrong_options(arguments, is_new)
    if is_new:
        from posttrain.operations.schedules import check_cron

        check_cron(arguments.cron, arguments.timezone)
    settings = run_setup.load_optional_settings(arguments)
    if is_new and arguments.flow == "retrain":
        assert settings is not None
        _refuse_pipeline_without_gate(settings)
    output = Path(settings.output if settings else arguments.output)
    pool = _connect_to_scheduler(output)
    if arguments.list:
        schedules = asyncio.run(_call_prefect(list_all=True))
        if not print_requested_data(
            arguments, schedules, [_build_row(schedule) for schedule in schedules]
        ):
            print(_format_schedules(schedules))
        return 0
    if arguments.remove is not None:
        print(f"{asyncio.run(_call_prefect(remove=arguments.remove))}: removed")
        return 0
    assert settings is not None
    from flows.parameters import read_main_values

    overrides = [*arguments.set, f"output={json.dumps(str(output.resolve()))}"]  # VALUE is YAML
    schedule, replaced = asyncio.run(
        _call_prefect(
            create={
                "pipeline": settings.name,
                "main": read_main_values(settings),
                "config": arguments.config,
                "overrides": overrides,
                "flow": arguments.flow,
                "cron": arguments.cron,
                "timezone": arguments.timezone,
                "pool": pool,
            }
        )
    )
    if not print_requested_data(arguments, schedule, [_build_row(schedule)]):
        remove = format_posttrain_command(f"schedule --remove {schedule.name}", output)
        print(f"{schedule.name}: {schedule.flow} {schedule.config}, cron '{schedule.cron}'")
        if replaced is not None:
            zone = replaced.timezone
            print(f"  replaces {replaced.config}, cron '{replaced.cron}' ({zone})")
        print("\n".join(f"  next   {time}" for time in schedule.next_times))
        print(f"`{remove}` removes it; it runs while `posttrain up` does")
    return 0


def _refuse_pipeline_without_gate(settings: PipelineSettings) -> None:
    """Refuse a pipeline that `retrain` would refuse at every scheduled time. Raises: SettingsError."""
    from tasks.lifecycle.retraining import check_retraining_stages

    try:
        check_retraining_stages(settings)
    except SettingsError as error:
        raise SettingsError(f"{error}; or schedule the pipeline as it is: --flow run") from None


def _refuse_wrong_options(arguments: argparse.Namespace, is_new: bool) -> None:
    """Refuse a command without a time or a configuration, and one that asks for two things. Raises: SettingsError."""
    if is_new and arguments.config is None:
        raise SettingsError(
            'name a configuration and a time: posttrain schedule CONFIG --cron "0 2 * * *"; or --list, --remove NAME'
        )
    if is_new and arguments.cron is None:
        raise SettingsError(
            f"--cron is missing: for 02:00 every day, posttrain schedule {shlex.quote(arguments.config)} "
            '--cron "0 2 * * *"'
        )
    from tasks.config.displayed_settings import list_secret_overrides

    if secrets := list_secret_overrides(arguments.set):
        raise SettingsError(
            f"--set {secrets[0]}: a secret, which Prefect would store as text; write it into the configuration, which "
            "is read at each run, or read it there from an environment variable"
        )
    if not is_new and arguments.cron is not None:
        raise SettingsError("--cron: is for a new schedule; leave out --list and --remove")
    if arguments.remove is not None and (arguments.json or arguments.csv):
        raise SettingsError("--json and --csv print schedules; --remove prints none")


def _connect_to_scheduler(output: Path) -> str:
    """Connect to the Prefect server that runs the schedules; return its work pool. Raises: BackendError."""
    from posttrain.operations.connection import connect_to_servers, find_running_servers

    state = find_running_servers(output)
    if state is None and not os.environ.get("PREFECT_API_URL"):
        up = format_posttrain_command("up --detach", output)
        raise BackendError(
            f"schedules run on the servers of `posttrain up`, which do not run for {output.resolve()}; start them: {up}"
        )
    from flows.runtime.prefect_home import set_prefect_environment

    set_prefect_environment(output)
    connect_to_servers(output)
    return "posttrain" if state is None else state.options.pool


async def _call_prefect(
    *, create: dict[str, Any] | None = None, remove: str = "", list_all: bool = False
) -> Any:
    """Create, remove or list schedules at the configured Prefect server. Raises: BackendError if it refuses."""
    import httpx
    from prefect.client.orchestration import get_client
    from prefect.exceptions import PrefectException

    from posttrain.operations import schedules

    try:
        async with get_client() as client:
            if list_all:
                return await schedules.list_schedules(client)
            if remove:
                return await schedules.remove_schedule(client, remove)
            assert create is not None
            config = schedules.resolve_config_parameter(create.pop("config"))
            return await schedules.create_schedule(client, config=config, **create)
    except (httpx.HTTPError, PrefectException) as error:
        # ObjectNotFound has its reason in `http_exc`.
        reason = " ".join(str(getattr(error, "http_exc", error)).split())
        raise BackendError(
            f"Prefect refuses or does not answer ({type(error).__name__}: {reason}); `posttrain status` shows its state"
        ) from error


def _build_row(schedule: Schedule) -> dict[str, str]:
    """Build the row of a schedule."""
    return {
        "name": schedule.name,
        "flow": schedule.flow,
        "cron": schedule.cron,
        "timezone": schedule.timezone,
        "next": schedule.next_times[0] if schedule.next_times else "off",
        "config": schedule.config,
    }


def _format_schedules(schedules: list[Schedule]) -> str:
    from flows.runtime.terminal import escape_control_characters
    from posttrain.cli.tables import format_table

    if not schedules:
        return 'no schedules; make one: posttrain schedule CONFIG --cron "0 2 * * *"'
    rows = [_build_row(schedule) for schedule in schedules]
    cells = [[escape_control_characters(cell) for cell in row.values()] for row in rows]
    return format_table(list(rows[0]), cells)
