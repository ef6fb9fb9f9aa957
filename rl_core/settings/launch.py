"""How the processes of a stage are started."""

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
    """In this process, or in several that train one model together; changes no result but for rounding."""

    kind: Literal["in_process", "torchrun"] = setting(
        "in_process", doc="torchrun: data parallel, the model shared out over processes (FSDP2 fully_shard)"
    )
    processes: int = setting(
        1, ge=1, le=1024, doc="on each node; on GPUs (nccl) at most as many as there are, else on CPUs (gloo)"
    )
    nodes: int = setting(1, ge=1, le=1024, doc="machines; all see the output folder, the data and this code")
    rdzv_backend: Literal["c10d", "etcd-v2"] = setting("c10d", doc="how nodes find each other, as torchrun has it")
    rdzv_endpoint: str | None = setting(None, doc="host:port of one node, or of etcd; needed with several nodes")
    rdzv_id: str = setting("posttrain", doc="name of the job among the nodes")
    timeout_seconds: float = setting(3600.0, gt=0, doc="longest wait of one process for another before the stage fails")

    def check(self) -> None:
        """Several nodes need a place to meet."""
        if self.rdzv_endpoint is not None and not _ENDPOINT.fullmatch(self.rdzv_endpoint):
            raise SettingsError(f"rdzv_endpoint: {self.rdzv_endpoint!r} must read host:port, for example node-1:29400")
        if self.nodes > 1 and self.rdzv_endpoint is None:
            raise SettingsError(f"rdzv_endpoint: {self.nodes} nodes need a place to meet; name host:port of one")
        if self.kind == "in_process" and (self.processes > 1 or self.nodes > 1):
            raise SettingsError(
                f"kind: in_process is one process, but {self.processes} on {self.nodes} nodes are asked for; "
                "use kind: torchrun"
            )
