"""vLLM as one of the servers of `posttrain up`, in its own Python environment, for the rollouts of one pipeline."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

from posttrain.operations.services import ServiceSpec, build_base_environment
from rl_core.errors import SettingsError
from rl_core.json_client import RequestError, fetch_json
from rl_core.models.named_models import resolve_local_model
from rl_core.rollout_workers.managed_server import build_start_command, check_start_settings
from rl_core.settings import RolloutSettings
from tasks.config import PipelineSettings
from tasks.config.machine_checks import compute_adapter_rank
from tasks.tracking import is_registered_reference

LOOPBACK = ("127.0.0.1", "localhost", "::1")


def check_inference_settings(settings: PipelineSettings) -> None:
    """Check that the settings name the program, model and address to start. Raises: SettingsError."""
    rollouts = _require_server_rollouts(settings)
    if rollouts.server.start:
        raise SettingsError(
            "--rollouts: stages.policy.rollouts.server.start is true, so the run starts its own server; remove it and "
            "set rollouts.address, or run without --rollouts"
        )
    if rollouts.server.python is None:
        raise SettingsError(
            "--rollouts: stages.policy.rollouts.server.python is not set; create vLLM's environment "
            "(deployments/vllm/README.md) and name its Python"
        )
    host = urlsplit(rollouts.base_url).hostname or ""
    if host not in LOOPBACK:
        raise SettingsError(
            f"--rollouts: stages.policy.rollouts.address is on {host}; `posttrain up` starts it only on this machine"
        )
    model = settings.model.path
    if model is None or is_registered_reference(model):
        raise SettingsError(
            f"--rollouts: model.path is {model or 'not set'}, but the server needs a folder or a hub name; set one"
        )
    try:
        check_start_settings(rollouts.server, compute_adapter_rank(settings.model))
    except SettingsError as error:
        raise SettingsError(f"--rollouts: stages.policy.{error}") from None


def build_inference_specs(
    settings: PipelineSettings, output: Path, mlflow: str
) -> list[ServiceSpec]:
    """Build the specification of the vLLM server. `mlflow` is not used; see `ExtraServers`."""
    rollouts, model = _require_server_rollouts(settings), settings.model
    url, server = urlsplit(rollouts.base_url), rollouts.server
    command = build_start_command(
        str(resolve_local_model(str(model.path)) or model.path),
        server,
        int(url.port or 0),
        host=str(url.hostname),
        dtype=model.dtype,
        lora_rank=compute_adapter_rank(model),
        trust_remote_code=model.trust_remote_code,
    )

    def check_health() -> bool:
        try:
            fetch_json(f"{rollouts.base_url}/health")
        except RequestError:
            return False
        return True

    return [
        ServiceSpec(
            "rollouts",
            tuple(command),
            build_base_environment(output, "rollouts"),
            Path(output),
            rollouts.base_url,
            check_health,
            "the config's stages.policy.rollouts.address",
            url.port,
        )
    ]


def _require_server_rollouts(settings: PipelineSettings) -> RolloutSettings:
    """Return the rollout settings of a pipeline that samples from a server. Raises: SettingsError otherwise."""
    policy = settings.stages.policy
    if policy is None or policy.rollouts.workers != "server":
        raise SettingsError(
            "--rollouts: the pipeline does not sample rollouts from a server; set stages.policy.rollouts: {workers: "
            "server, address: 127.0.0.1:8000}"
        )
    return policy.rollouts
