"""One rollout worker: its own model, engine and environments, independent of how it is called."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rl_core.environments.environment import Environment
from rl_core.environments.failed_episodes import FailedEpisode
from rl_core.errors import PosttrainError, SamplerMismatch, SettingsError, WorkerFailed
from rl_core.inference.engine import Engine, create_rollout_backend
from rl_core.models.trainable_weights import collect_trainable_weights
from rl_core.rollout_workers.sampler_probe import ProbeCompletion, SamplerProbe, sample_probe
from rl_core.rollout_workers.weight_transfer import (
    PackedTensor,
    WeightUpdate,
    combine_digests,
    digest_tensors,
    restore_weights,
)
from rl_core.rollouts.collect import GroupPlan, enable_native_tools, play_groups
from rl_core.rollouts.episode_sequence import Renderer
from rl_core.settings import SamplingSettings
from rl_core.types import AutocastPrecision, RolloutGroup


def read_runtime_versions() -> dict[str, str]:
    """Return the versions that a worker's process must share with its trainer's."""
    import transformers

    return {
        "Python": ".".join(map(str, sys.version_info[:2])),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


@dataclass(frozen=True)
class WorkerSpec:
    """Everything that a worker is built from, except the weights."""

    skeleton: Any  # of the model, see `weight_transfer.copy_without_weights`
    device: str
    renderer: Renderer
    environment: Callable[[], Environment]
    eos_ids: Sequence[int]
    pad_id: int
    max_length: int
    threads: int  # of torch: as in the trainer, for the same summation order
    versions: Mapping[str, str]  # of the trainer's process, see `read_runtime_versions`
    textless_ids: Sequence[int] = ()  # tokens that are never sampled
    autocast: AutocastPrecision = "none"  # of the trainer's forward pass

    def check_versions(self) -> None:
        """Raise SettingsError if this process has other versions than the trainer's."""
        for name, version in read_runtime_versions().items():
            if version != self.versions[name]:
                raise SettingsError(
                    f"rollouts.workers: a node of the cluster ({os.uname().nodename}) has {name} {version}, the "
                    f"trainer {self.versions[name]}; install the same constraints.txt on every node"
                )


@dataclass(frozen=True, slots=True)
class TransferReport:
    """A worker's report on the weights that it has loaded."""

    number: int  # version of the weights
    digest: str  # of its weights
    answers: list[ProbeCompletion]
    pid: int


@dataclass(frozen=True, slots=True)
class RolloutBatch:
    """Groups to play in one run of the engine."""

    indices: list[int]  # of the groups in the collection
    plans: list[GroupPlan]
    group_size: int
    sampling: SamplingSettings
    seed: int
    policy_version: int


@dataclass(frozen=True, slots=True)
class FinishedRolloutBatch:
    """The groups of a batch and its failed episodes."""

    indices: list[int]
    groups: list[RolloutGroup]
    failed: list[FailedEpisode]


class RolloutWorker:
    """A worker that plays batches with the weights that it loaded last."""

    def __init__(self, spec: WorkerSpec, base: Mapping[str, PackedTensor]) -> None:
        """Build model, engine and environment.

        Raises: SettingsError for other versions; the environment's errors.
        """
        spec.check_versions()
        torch.set_num_threads(spec.threads)
        self.spec = spec
        self.model = restore_weights(spec.skeleton, base, spec.device)
        self.model.train()  # as in the trainer between updates; engines ignore the mode
        self.environment = spec.environment()
        self.renderer = enable_native_tools(spec.renderer, self.environment)
        self.backend = create_rollout_backend(
            self.model,
            eos_ids=spec.eos_ids,
            pad_id=spec.pad_id,
            max_length=spec.max_length,
            textless_ids=spec.textless_ids,
            autocast=spec.autocast,
        )
        if isinstance(self.backend, Engine):
            self.backend.disable_cross_row_batching()
        self.version = -1

    def load(self, update: WeightUpdate, probe: SamplerProbe) -> TransferReport:
        """Copy an update into the model; report the resulting weights and probe samples.

        Raises: SamplerMismatch for weights that this model does not have.
        """
        torch.set_num_threads(
            self.spec.threads
        )  # a setting of the calling thread, which may be any of a pool
        weights = collect_trainable_weights(self.model)
        with torch.no_grad():
            for name, packed in update.changed.items():
                if name not in weights or weights[name].shape != torch.Size(packed.shape):
                    raise SamplerMismatch(
                        f"{name}: sent to a worker whose model has no such weight"
                    )
                weights[name].copy_(packed.unpack_tensor())
        self.version = update.number
        self.backend.refresh_weights()
        answers = sample_probe(self.backend, probe)
        digest = combine_digests(digest_tensors(collect_trainable_weights(self.model)))
        return TransferReport(update.number, digest, answers, os.getpid())

    def play(self, task: RolloutBatch) -> FinishedRolloutBatch:
        """Play a batch's groups.

        Raises: as `rollouts.collect.collect_rollouts`.
        """
        torch.set_num_threads(self.spec.threads)
        failed: list[FailedEpisode] = []
        groups = play_groups(
            self.environment,
            self.backend,
            self.renderer,
            task.plans,
            group_size=task.group_size,
            sampling=task.sampling,
            seed=task.seed,
            policy_version=task.policy_version,
            on_failure=failed.append,
        )
        return FinishedRolloutBatch(task.indices, groups, failed)

    def process(self) -> int:
        """Return the pid of this process."""
        return os.getpid()

    def call_method(self, method: str, *arguments: Any) -> Any:
        """Call a method; return an error as a value, to be raised again in the trainer."""
        try:
            return getattr(self, method)(*arguments)
        except PosttrainError as error:
            return error
        except Exception as error:
            return WorkerFailed(f"a rollout worker raised {type(error).__name__}: {error}")
