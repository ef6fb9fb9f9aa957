"""Stage: export a learning service's snapshot as a model that can be compared, registered and promoted."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_core.settings import LoraSettings, Settings, setting
from tasks.stage_registry import CustomStage

if TYPE_CHECKING:
    from tasks.pipeline.stage import StageContext


@dataclass(frozen=True, kw_only=True)
class OnlineSnapshotSettings(Settings):
    """The snapshot, and the model that its service started from."""

    service: str = setting(doc="folder of the service")
    snapshot: int = setting(ge=1, doc="version: number of online updates in the weights")
    weights_sha256: str = setting(doc="digest of the snapshot's weights")
    base_sha256: str = setting(doc="digest of the model that the service started from")
    lora: LoraSettings | None = setting(
        None, doc="adapters that the service trains; unset: all weights"
    )


def _export_snapshot(context: StageContext) -> dict[str, Any]:
    """Write the model with the snapshot's weights."""
    import dataclasses

    from rl_core.api.policy import load_policy
    from rl_core.errors import DataError
    from rl_core.models.export_records import (
        TRAINED_LOGPROBS_FILE,
        record_trained_logprobs,
        write_records,
    )
    from rl_core.models.trainable_weights import load_trainable_weights
    from rl_core.online.build_worker import SNAPSHOTS_FOLDER
    from rl_core.online.weight_snapshots import WeightSnapshots, digest_weights
    from rl_core.storage.manifest import digest_folder

    settings: OnlineSnapshotSettings = context.settings
    service = Path(settings.service)
    if digest_folder(service / "model") != settings.base_sha256:
        raise DataError(f"{service / 'model'}: is not the model that the service started from")
    weights = WeightSnapshots(service / SNAPSHOTS_FOLDER).load_weights(settings.snapshot)
    if digest_weights(weights) != settings.weights_sha256:
        raise DataError(
            f"{service}: snapshot {settings.snapshot} has different weights than the selected one"
        )
    model = dataclasses.replace(
        context.pipeline.model, path=str(service / "model"), lora=settings.lora
    )
    policy = load_policy(model)
    load_trainable_weights(policy.model, weights)
    write_records(context.folder / TRAINED_LOGPROBS_FILE, record_trained_logprobs(policy.model))
    policy.save(context.folder / "model")
    return {
        "note": f"snapshot {settings.snapshot} of {service.name}",
        "snapshot": settings.snapshot,
    }


STAGE = CustomStage(
    _export_snapshot, OnlineSnapshotSettings, takes=("model",), gives="policy", uses_gpu=False
)
