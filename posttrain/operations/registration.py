"""Registration of work pool, GPU limit, deployments and automations with Prefect.

Runs as a separate process (`python -m posttrain.operations.registration REQUEST RESULT`), so that Prefect is imported
with the servers' environment and the supervisor stays small. Idempotent: settings of an existing pool or limit stay
unchanged, deployments and automations are matched by name.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import re
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.operations.connection import check_prefect_api, explain_known_error
from posttrain.operations.services import GPU_LIMIT
from rl_core.errors import DataError, PosttrainError, SettingsError
from rl_core.json_client import find_health_problem
from rl_core.storage.atomic_files import write_json_atomic

if TYPE_CHECKING:
    from prefect.client.orchestration import PrefectClient
    from prefect.client.schemas.objects import DeploymentSchedule

POOL_TYPE = "process"
PAGE_SIZE = 200  # deployments of one request
MLFLOW_START_SECONDS = 180.0
DEPLOY_COMMAND = "deploy"  # instead of a request: run Prefect's command, in a child process


@dataclass(frozen=True, slots=True)
class RegistrationRequest:
    """Request of one registration."""

    root: str  # base folder of entrypoints
    pool: str
    gpu_slots: int | None  # None: one per GPU, no limit without a GPU, unchanged if it exists
    deployments: str  # prefect.yaml; an absent file registers nothing
    automations: str


def count_gpus() -> int:
    """Count the GPUs of this machine, without loading a driver."""
    return sum(1 for path in Path("/dev").glob("nvidia[0-9]*"))


def main() -> int:
    """Register and write the result. Return exit code 0, or 1 with the error in the result."""
    if sys.argv[1] == DEPLOY_COMMAND:
        return run_deploy_command(sys.argv[2:])
    request = RegistrationRequest(**json.loads(Path(sys.argv[1]).read_text()))
    result: dict[str, Any] = {
        "at": time.time(),
        "problem": "",
        "deployments": [],
        "automations": [],
        "notes": [],
    }
    try:
        asyncio.run(_register_all(request, result))
    except PosttrainError as error:
        result["problem"] = str(error)
    except Exception as error:  # any error of Prefect's client is reported by `status`
        text = f"{type(error).__name__}: {error}"
        result["problem"] = explain_known_error(text) or " ".join(text.split())[:500]
    write_json_atomic(Path(sys.argv[2]), result)
    print(result["problem"] or "registered", flush=True)
    return 1 if result["problem"] else 0


async def _register_all(request: RegistrationRequest, result: dict[str, Any]) -> None:
    if warning := check_prefect_api(os.environ["PREFECT_API_URL"], "posttrain up"):
        result["notes"].append(warning)
    from prefect.client.orchestration import get_client

    async with get_client() as client:
        result["pool"] = await _ensure_work_pool(client, request.pool, result["notes"])
        result["gpu_slots"] = await _set_gpu_limit(client, request.gpu_slots)
        deployments = Path(request.deployments)
        if deployments.exists():
            switches = await read_schedule_switches(client)
            result["deployments"] = _deploy_all(deployments, Path(request.root))
            await _check_parameters(client, result["deployments"], deployments)
            result["notes"] += await restore_schedule_switches(
                client, result["deployments"], switches
            )
        else:
            result["notes"].append(f"{deployments}: no such file, so no deployment was registered")
        if Path(request.automations).exists():
            from posttrain.operations.automations import apply_automations

            applied = await apply_automations(client, Path(request.automations))
            result["automations"] = [asdict(automation) for automation in applied]
    result["runs_url"] = _find_runs_page()


def _find_runs_page() -> str:
    """Return the address of the newest pipeline's table of runs in MLflow; "" = there is none yet."""
    from tasks.tracking import Tracking

    tracking = Tracking(None, Path.cwd())
    if tracking.store.is_local:
        return ""
    # At the first start MLflow may come up after Prefect.
    deadline = time.monotonic() + MLFLOW_START_SECONDS
    while find_health_problem(f"{tracking.store.uri.rstrip('/')}/health"):
        if time.monotonic() > deadline:
            return ""
        time.sleep(0.5)
    return tracking.find_newest_runs_url()


async def _ensure_work_pool(client: PrefectClient, name: str, notes: list[str]) -> str:
    from prefect.client.schemas.actions import WorkPoolCreate
    from prefect.exceptions import ObjectAlreadyExists, ObjectNotFound
    from prefect.workers.process import ProcessWorker

    try:
        pool = await client.read_work_pool(name)
    except ObjectNotFound:
        template = ProcessWorker.get_default_base_job_template()
        try:
            await client.create_work_pool(
                WorkPoolCreate(name=name, type=POOL_TYPE, base_job_template=template)
            )
        except ObjectAlreadyExists:  # created by the worker meanwhile
            return "made"
        return "made"
    if pool.type != POOL_TYPE:
        raise SettingsError(
            f"work pool '{name}' has type '{pool.type}', but the worker of `posttrain up` serves '{POOL_TYPE}' pools; "
            "choose another name with --pool"
        )
    if pool.is_paused:
        notes.append(
            f"work pool '{name}' is paused, so nothing starts; prefect work-pool resume {name}"
        )
    return "was there"


async def _set_gpu_limit(client: PrefectClient, wanted: int | None) -> int | None:
    """Create the GPU limit, or set it to `wanted`. Return its value; None = there is none.

    Without a GPU and without `wanted` none is created: no stage would use it.
    """
    from prefect.client.schemas.actions import (
        GlobalConcurrencyLimitCreate,
        GlobalConcurrencyLimitUpdate,
    )
    from prefect.exceptions import ObjectNotFound

    try:
        limit = await client.read_global_concurrency_limit_by_name(GPU_LIMIT)
    except ObjectNotFound:
        slots = wanted if wanted is not None else count_gpus()
        if not slots:
            return None
        await client.create_global_concurrency_limit(
            GlobalConcurrencyLimitCreate(name=GPU_LIMIT, limit=slots)
        )
        return slots
    if wanted is None or limit.limit == wanted:
        return int(limit.limit)
    await client.update_global_concurrency_limit(
        GPU_LIMIT, GlobalConcurrencyLimitUpdate(limit=wanted)
    )
    return wanted


async def read_schedule_switches(client: PrefectClient) -> dict[tuple[str, str], bool]:
    """Read which schedules are on, by id of the deployment and name of the schedule (or its definition)."""
    switches, offset = {}, 0
    while page := await client.read_deployments(limit=PAGE_SIZE, offset=offset):
        offset += len(page)
        for deployment in page:
            for schedule in deployment.schedules:
                switches[str(deployment.id), _name_schedule(schedule)] = schedule.active
    return switches


async def restore_schedule_switches(
    client: PrefectClient, names: list[str], switches: dict[tuple[str, str], bool]
) -> list[str]:
    """Switch schedules as they were before the deployments were registered again; return a note of those that are off.

    `prefect deploy` replaces schedules. A new one is on or off as its file says.
    """
    off = []
    for name in names:
        deployment = await client.read_deployment_by_name(name)
        for schedule in deployment.schedules:
            label = _name_schedule(schedule)
            is_active = switches.get((str(deployment.id), label), schedule.active)
            if is_active != schedule.active:
                await client.update_deployment_schedule(
                    deployment.id, schedule.id, active=is_active
                )
            if not is_active:
                off.append(name)
    if not off:
        return []
    return [
        f"schedules are off for {', '.join(dict.fromkeys(off))}: switch one on at its deployment's page, or "
        "`prefect deployment schedule ls NAME`, then `... resume NAME ID`"
    ]


def _name_schedule(schedule: DeploymentSchedule) -> str:
    return schedule.slug or schedule.schedule.model_dump_json()


def _deploy_all(path: Path, root: Path) -> list[str]:
    """Run `prefect deploy --all`. Return the deployments as FLOW/NAME. Raises: DataError."""
    command = [
        sys.executable,
        "-m",
        "posttrain.operations.registration",
        DEPLOY_COMMAND,
        "--prefect-file",
        str(path),
        "--all",
    ]
    process = subprocess.run(
        command,
        cwd=root,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "COLUMNS": "200"},
        check=False,
    )
    print(process.stdout, flush=True)
    deployed = re.findall(r"Deployment\s+'([^']+/[^']+)'\s+successfully", process.stdout)
    if process.returncode == 0:
        return deployed
    deployed_names = {name.rpartition("/")[2] for name in deployed}
    missing = (name for name in read_declared_names(path) if name not in deployed_names)
    failed = next(missing, "?")
    reason = explain_known_error(process.stdout)
    if not reason:
        lines = [line.strip() for line in process.stdout.splitlines() if line.strip()]
        lines = [line for line in lines if line != "An exception occurred."]
        reason = lines[-1][:500] if lines else f"exit code {process.returncode}"
    raise DataError(
        f"{path}: deployment '{failed}': {reason}; the servers are up; `posttrain up` registers it again"
    )


def run_deploy_command(arguments: list[str]) -> int:
    """Run `prefect deploy`, which builds the parameter schema of a flow once instead of three times.

    The schemas of our forms are large: building them takes most of the command's time.
    """
    from prefect.utilities import callables

    build_schema: Any = getattr(callables, "generate_parameter_schema", None)
    schemas: dict[object, Any] = {}

    def build_schema_once(*arguments: Any, **options: Any) -> Any:
        values = [*arguments, *options.values()]
        if len(values) != 2 or not isinstance(values[0], inspect.Signature):
            return build_schema(*arguments, **options)  # another version of Prefect
        signature, docstrings = values
        parameters = signature.parameters.values()
        key = (
            *(
                (each.name, each.kind, repr(each.default), repr(each.annotation))
                for each in parameters
            ),
            *sorted(docstrings.items()),
        )
        if key not in schemas:
            schemas[key] = build_schema(*arguments, **options)
        return schemas[key].model_copy(deep=True)

    if build_schema is not None:
        callables.generate_parameter_schema = build_schema_once
    from prefect.cli import app

    sys.argv = ["prefect", "--no-prompt", "deploy", *arguments]
    app()
    return 0


def read_declared_names(path: Path) -> list[str]:
    """Read the names of the deployments in a prefect.yaml, in order; [] if it cannot be read."""
    import yaml

    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
        return [str(item["name"]) for item in data["deployments"]]
    except (OSError, ValueError, yaml.YAMLError, KeyError, TypeError):
        return []


async def _check_parameters(client: PrefectClient, names: list[str], path: Path) -> None:
    """Check parameter names. Prefect does not, so that a run would fail later. Raises: DataError."""
    for name in names:
        deployment = await client.read_deployment_by_name(name)
        known = (deployment.parameter_openapi_schema or {}).get("properties", {})
        unknown = [key for key in deployment.parameters if key not in known]
        if unknown:
            raise DataError(
                f"{path}: deployment '{name}': the flow has no parameter '{unknown[0]}', only {', '.join(known)}; "
                "correct it under `parameters`, then run `posttrain up` again"
            )


if __name__ == "__main__":
    sys.exit(main())
