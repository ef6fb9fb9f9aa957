"""Sharded tensors and modules, told apart without torch's packages for them, which take seconds to import.

As long as nobody has imported such a package, there is nothing of it.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, TypeGuard

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

__all__ = ["is_sharded_module", "is_sharded_tensor"]


def is_sharded_tensor(value: Any) -> TypeGuard[DTensor]:
    """True for a `torch.distributed.tensor.DTensor`."""
    package = sys.modules.get("torch.distributed.tensor")
    return package is not None and isinstance(value, package.DTensor)


def is_sharded_module(module: Any) -> TypeGuard[FSDPModule]:
    """True for a module of `torch.distributed.fsdp.fully_shard`."""
    package = sys.modules.get("torch.distributed.fsdp")
    return package is not None and isinstance(module, package.FSDPModule)
