"""The compiled code with its products by matrix tiles, also on processors that have none (`tile_stand_in.h`)."""

from __future__ import annotations

import ctypes
import functools
import hashlib
from pathlib import Path
from unittest import mock

from rl_core.cpu import build, packed_gemm

__all__ = ["tile_code"]

_STAND_IN = Path(__file__).with_name("tile_stand_in.h")


def _digest() -> str:
    return hashlib.sha256(_STAND_IN.read_bytes()).hexdigest()[:8]


@functools.cache
def tile_code() -> ctypes.CDLL | None:
    """Return the library; None if there is no compiler."""
    if packed_gemm.load_int8_gemm() is not None:
        return build.load_library()
    features = (f'-DTILE_STAND_IN="{_STAND_IN}"', f"-DSTAND_IN_DIGEST=0x{_digest()}")
    with mock.patch.object(build, "_FLAGS", (*build._FLAGS, *features)):
        code: ctypes.CDLL | None = build.load_library.__wrapped__()
    return code
