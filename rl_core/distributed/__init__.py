"""Training of one model by several processes: the process group, and sharding of the weights."""

from rl_core.distributed.group import SINGLE_PROCESS, DummyBatch, ProcessGroup, join_process_group
from rl_core.distributed.sharding import Shards, gather_state, scatter_state, to_local_rows

__all__ = [
    "SINGLE_PROCESS",
    "DummyBatch",
    "Shards",
    "ProcessGroup",
    "gather_state",
    "join_process_group",
    "to_local_rows",
    "scatter_state",
]
