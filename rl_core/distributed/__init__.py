"""Several processes that train one model: who they are, what they agree on, and how the model's weights are shared."""

from rl_core.distributed.group import ALONE, Idle, Workers, join
from rl_core.distributed.sharding import Shards, gathered, local, spread

__all__ = ["ALONE", "Idle", "Shards", "Workers", "gathered", "join", "local", "spread"]
