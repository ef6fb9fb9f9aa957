"""Checks of networks for plain observations: the package is there, the environment can be made and acted in."""

from __future__ import annotations

from collections.abc import Iterator

from rl_core.errors import PosttrainError
from tasks.config.problems import Key, Problem
from tasks.config.settings import PipelineSettings

__all__ = ["network_problems"]

STAGE: Key = ("stages", "network")


def network_problems(settings: PipelineSettings, import_code: bool) -> Iterator[Problem]:
    """Problems of the environment that `stages.network` names; one of the user's is made only where code may run."""
    network = settings.stages.network
    if network is None or (network.environment_class is not None and not import_code):
        return
    from rl_core.networks.making import check_environment  # imports torch

    try:
        check_environment(network)
    except PosttrainError as error:
        name, _, text = str(error).partition(": ")
        yield Problem((*STAGE, name) if name.isidentifier() else STAGE, text if name.isidentifier() else str(error))
