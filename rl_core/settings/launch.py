"""Process launch settings of a stage."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from rl_core.errors import SettingsError
from rl_core.settings.base import Settings, setting

__all__ = ["LaunchSettings"]

_ENDPOINT = re.compile(r"[A-Za-z0-9.\-_\[\]:]+:\d{1,5}")


@dataclass(frozen=True, kw_only=True)
class LaunchSettings(Settings):
    """Single-process or distributed training; results agree up to rounding."""

    kind: Literal["in_process", "torchrun"] = setting(
        "in_process", doc="torchrun: data parallel with the model sharded over processes (FSDP2 fully_shard)"
    )
    processes: int = setting(
        1, ge=1, le=1024, doc="processes per node; on GPUs (nccl) if there are at least as many, else on CPUs (gloo)"
    )
    nodes: int = setting(1, ge=1, le=1024, doc="machines; all must share the output folder, the data and this code")
    rdzv_backend: Literal["c10d", "etcd-v2"] = setting("c10d", doc="rendezvous backend of torchrun")
    rdzv_endpoint: str | None = setting(None, doc="host:port of one node or of etcd; required with several nodes")
    rdzv_id: str = setting("posttrain", doc="job id shared by the nodes")
    timeout_seconds: float = setting(3600.0, gt=0, doc="longest wait between processes before the stage fails")

    def check(self) -> None:
        """Several nodes need a rendezvous endpoint."""
        if self.rdzv_endpoint is not None and not _ENDPOINT.fullmatch(self.rdzv_endpoint):
            raise SettingsError(f"rdzv_endpoint: {self.rdzv_endpoint!r} must be host:port, for example node-1:29400")
        if self.nodes > 1 and self.rdzv_endpoint is None:
            raise SettingsError(f"rdzv_endpoint: {self.nodes} nodes need a rendezvous; set host:port of one node")
        if self.kind == "in_process" and (self.processes > 1 or self.nodes > 1):
            raise SettingsError(
                f"kind: in_process is one process, but {self.processes} on {self.nodes} nodes are asked for; "
                "use kind: torchrun"
            )
