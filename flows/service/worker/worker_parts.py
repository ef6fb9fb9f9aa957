"""Parts that all of a worker's rooms work with."""

from __future__ import annotations

from dataclasses import dataclass

from flows.service.store import ServiceStore
from flows.service.worker.service_folder import ServiceFolder
from flows.service.worker.weights_on_disk import WeightsOnDisk
from rl_core.service.training_engine import TrainingEngine
from rl_core.settings import ServiceSettings

__all__ = ["WorkerParts"]


@dataclass(frozen=True, slots=True)
class WorkerParts:
    """Engine, store, folder and saved weights of one worker, and its settings."""

    engine: TrainingEngine
    store: ServiceStore
    folder: ServiceFolder
    weights: WeightsOnDisk
    settings: ServiceSettings
