"""The compiled code with its products by matrix tiles, also on processors that have none (`tile_stand_in.h`)."""

from __future__ import annotations

import ctypes
import functools
import hashlib
from pathlib import Path
from unittest import mock

from rl_core.cpu import build, int8_gemm

__all__ = ["tile_code"]

_STAND_IN = Path(__file__).with_name("tile_stand_in.h")


def _digest() -> str:
    return hashlib.sha256(_STAND_IN.read_bytes()).hexdigest()[:8]


@functools.cache
def tile_code() -> ctypes.CDLL | None:
    """The library; None where there is no compiler, or the processor lacks AVX-512 as well."""
    if int8_gemm.load() is not None:
        return build.load()
    features = ("-D__AMX_TILE__", "-D__AMX_BF16__", "-D__AMX_INT8__", f"-DSTAND_IN=0x{_digest()}")
    with mock.patch.object(build, "_FLAGS", (*build._FLAGS, *features, "-include", str(_STAND_IN))):
        code: ctypes.CDLL | None = build.load.__wrapped__()
    return code if code is not None and code.tiles_ready() else None
