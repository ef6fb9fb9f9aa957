"""Several processes that train one model: their process group, and the sharding of its weights."""

from rl_core.distributed.group import SINGLE_PROCESS, DummyBatch, ProcessGroup, join
from rl_core.distributed.sharding import Shards, gather_state, local, scatter_state

__all__ = ["SINGLE_PROCESS", "DummyBatch", "Shards", "ProcessGroup", "gather_state", "join", "local", "scatter_state"]
