"""Checks of the place of a policy's rollouts: Ray and its cluster, a schedule, an inference server."""

from __future__ import annotations

from collections.abc import Iterator

from rl_core.errors import PosttrainError, SettingsError
from rl_core.settings import PolicySettings
from rl_core.settings.rollouts import check_ray
from tasks.config.curriculum_checks import POLICY
from tasks.config.files import adapter_rank, shape_of
from tasks.config.memory_checks import weight_bytes
from tasks.config.problems import Key, Problem
from tasks.config.settings import PipelineSettings

__all__ = ["rollout_problems"]

KEY: Key = (*POLICY, "rollouts")


def rollout_problems(settings: PipelineSettings, ask_servers: bool) -> Iterator[Problem]:
    """Problems of the workers or the server; `ask_servers`: a server or cluster has to answer already."""
    policy = settings.stages.policy
    if policy is None:
        return
    rollouts = policy.rollouts
    if rollouts.workers == "in_process" and rollouts.replay_schedule is None:
        return
    try:
        if rollouts.replay_schedule is not None:
            from rl_core.rollout_workers.schedule_replay import read_schedule  # imports torch

            read_schedule(rollouts.replay_schedule)
        elif rollouts.workers == "ray":
            _check_cluster(policy, settings, ask=ask_servers)
        elif ask_servers:
            _check_server(policy, settings)
    except PosttrainError as error:
        name, colon, text = str(error).removeprefix("rollouts.").partition(": ")
        is_named = str(error).startswith("rollouts.") and bool(colon)
        where = ("replay_schedule",) if rollouts.replay_schedule is not None else ()
        yield Problem((*KEY, *name.split(".")) if is_named else (*KEY, *where), text if is_named else str(error))


def _check_cluster(policy: PolicySettings, settings: PipelineSettings, *, ask: bool) -> None:
    """Ray is installed; its cluster answers and has our versions (`ask`), or the store here has room for weights."""
    from rl_core.rollout_workers.ray_cluster import check_store  # imports no Ray
    from rl_core.rollout_workers.ray_session import RaySession

    check_ray()
    if policy.rollouts.address is not None and ask:
        session = RaySession(policy.rollouts.address, 0)
        try:
            session.begin()
            session.check_versions()
        finally:
            session.close()
    elif policy.rollouts.address is None:
        check_store(weight_bytes(settings.model))


def _check_server(policy: PolicySettings, settings: PipelineSettings) -> None:
    """The server answers, is of the version that was tested, and can sample this model."""
    from rl_core.rollout_workers.server_checks import check_when_starting  # imports torch

    lora = settings.model.lora
    if lora is not None and lora.quantize != "none":
        raise SettingsError(
            f"rollouts.workers: a server samples from the base model as it is, and the trainer's is in few bits "
            f"(model.lora.quantize: {lora.quantize}); set quantize: none, or workers: in_process"
        )
    check_when_starting(policy.rollouts, shape_of(settings.model), adapter_rank(settings.model))
