"""vLLM among the servers of `posttrain up`: in an environment of its own, for the rollouts of one pipeline."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from urllib.parse import urlsplit

from posttrain.operations.services import ServiceSpec, build_base_environment, fetch_json
from rl_core.errors import SettingsError
from rl_core.settings import RolloutSettings
from tasks.config import PipelineSettings
from tasks.config.machine_checks import compute_adapter_rank
from tasks.shipped import shipped
from tasks.tracking import is_registered_reference

MAX_ADAPTER_RANK = 512  # of an adapter, as deployments/vllm/start.py takes it
LOOPBACK = ("127.0.0.1", "localhost", "::1")


def check_inference_settings(settings: PipelineSettings) -> None:
    """Raises: SettingsError where these settings do not say what to start, or where."""
    rollouts = _require_server_rollouts(settings)
    python = rollouts.server.python
    if python is None:
        raise SettingsError(
            "--rollouts: stages.policy.rollouts.server.python is not set; make vLLM's environment "
            "(deployments/vllm/README.md) and name its Python"
        )
    program = Path(python).expanduser()
    if not (program.is_file() and os.access(program, os.X_OK)):
        raise SettingsError(
            f"--rollouts: stages.policy.rollouts.server.python: {python} is no program"
        )
    host = urlsplit(rollouts.base_url).hostname or ""
    if host not in LOOPBACK:
        raise SettingsError(
            f"--rollouts: stages.policy.rollouts.address is on {host}; `posttrain up` starts it here alone"
        )
    model = settings.model.path
    if model is None or is_registered_reference(model):
        raise SettingsError(
            f"--rollouts: model.path is {model or 'left out'}, and the server starts from a folder or a hub name; "
            "name one"
        )
    if (rank := compute_adapter_rank(settings.model)) > MAX_ADAPTER_RANK:
        raise SettingsError(
            f"--rollouts: model.lora.rank is {rank}, and vLLM takes adapters up to {MAX_ADAPTER_RANK}; set a lower rank, or "
            "modules_to_save, with which whole weights are sent"
        )


def build_inference_specs(
    settings: PipelineSettings, output: Path, mlflow: str
) -> list[ServiceSpec]:
    """The server. `mlflow` is not used."""
    rollouts, model = _require_server_rollouts(settings), settings.model
    url, server = urlsplit(rollouts.base_url), rollouts.server
    command = [
        sys.executable,
        str(shipped("deployments") / "vllm" / "start.py"),
        "--python",
        str(Path(str(server.python)).expanduser()),
        "--model",
        str(model.path),
        "--host",
        str(url.hostname),
        "--port",
        str(url.port),
        "--dtype",
        model.dtype,
    ]
    if rank := compute_adapter_rank(model):
        command += ["--lora-rank", str(rank)]
    if server.sleeps:
        command += ["--sleeps"]
    if model.trust_remote_code:
        command += ["--", "--trust-remote-code"]

    def works() -> bool:
        try:
            fetch_json(f"{rollouts.base_url}/health")
        except (OSError, ValueError):
            return False
        return True

    return [
        ServiceSpec(
            "rollouts",
            tuple(command),
            build_base_environment(output, "rollouts"),
            Path(output),
            rollouts.base_url,
            works,
            "the config's stages.policy.rollouts.address",
            url.port,
        )
    ]


def _require_server_rollouts(settings: PipelineSettings) -> RolloutSettings:
    """Raises: SettingsError for a pipeline whose rollouts come from no server."""
    policy = settings.stages.policy
    if policy is None or policy.rollouts.workers != "server":
        raise SettingsError(
            "--rollouts: the pipeline samples no rollouts from a server; set stages.policy.rollouts: {workers: server, "
            "address: 127.0.0.1:8000}"
        )
    return policy.rollouts
