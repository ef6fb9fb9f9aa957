"""What a decoding step does between its matrix products, compiled from C where there is a compiler.

The source is compiled once for a processor and compiler, in seconds, into a cache folder; the results of a step then
differ from those of torch's kernels by rounding. Without a compiler, or with POSTTRAIN_NATIVE=0, torch does it all.

N new tokens, n of them attending, D head size, Q query and K key/value heads, V vocabulary.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import logging
import os
import platform
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Protocol

import torch

__all__ = ["Native", "Step", "load"]

logger = logging.getLogger(__name__)

_SOURCE = Path(__file__).with_name("decode.c")
# No -ffast-math: it would change how the whole process rounds tiny numbers.
_FLAGS = ("-O3", "-march=native", "-std=gnu11", "-fPIC")
_COMPILE_SECONDS = 120
MOST_IN_GROUP, LARGEST_HEAD, WIDTH = 8, 256, 16  # as in decode.c


class _Step(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("tokens", "rows", "Q", "K", "D", "length")),
        *((name, ctypes.c_void_p) for name in ("slots", "positions", "cosines", "sines", "q_weight", "k_weight")),
        *((name, ctypes.c_float) for name in ("q_eps", "k_eps", "scale")),
        ("scores", ctypes.c_void_p),
        ("threads", ctypes.c_int64),
    ]


class Norm(Protocol):
    """What is needed of `layers.RmsNorm`."""

    weight: torch.Tensor
    eps: float


class Step:
    """What all layers of one decoding step have in common. It keeps the tensors that the compiled code points to."""

    def __init__(
        self,
        positions_N: torch.Tensor,
        slots_N: torch.Tensor,
        cos_LD: torch.Tensor,
        sin_LD: torch.Tensor,
        cache: torch.Tensor,
        query_heads: int,
    ) -> None:
        """positions_N, slots_N: int64, of the new tokens. cos_LD, sin_LD: the sines' first half with its sign turned.

        cache: [layers, 2, slots, K, length, D].
        """
        _, _, _, kv_heads, length, size = cache.shape
        threads = torch.get_num_threads()
        scores = cache.new_empty(threads, query_heads // kv_heads, length)
        self._kept = (positions_N, slots_N, cos_LD, sin_LD, scores)
        self.rows = len(positions_N)  # the first of them attend
        self.fields = _Step(
            tokens=self.rows, rows=self.rows, Q=query_heads, K=kv_heads, D=size, length=length,
            slots=slots_N.data_ptr(), positions=positions_N.data_ptr(),
            cosines=cos_LD.data_ptr(), sines=sin_LD.data_ptr(), scores=scores.data_ptr(), threads=threads,
        )  # fmt: skip


class Native:
    """The compiled functions over contiguous float32 tensors on the CPU. Attention runs on torch's threads."""

    def __init__(self, library: ctypes.CDLL) -> None:
        count, real, place = ctypes.c_int64, ctypes.c_float, ctypes.c_void_p
        self._normed, self._gated, self._attend, self._draw = (
            getattr(library, name) for name in ("normed", "gated", "attend", "draw")
        )
        self._normed.argtypes = (place, count, count, real, place)
        self._gated.argtypes = (place, count, count, place)
        self._attend.argtypes = (place, place, place, place, place)
        self._draw.argtypes = (place, count, count, place, real, place, place, place)
        for function in (self._normed, self._gated, self._attend, self._draw):
            function.restype = None

    @staticmethod
    def can_attend(*, head_dim: int, query_heads: int, kv_heads: int) -> bool:
        """Whether heads have a size that the code is made for."""
        return head_dim % WIDTH == 0 and head_dim <= LARGEST_HEAD and query_heads // kv_heads <= MOST_IN_GROUP

    def normed(self, x_NH: torch.Tensor, eps: float) -> torch.Tensor:
        """x / rms(x)."""
        out_NH = torch.empty_like(x_NH)
        self._normed(x_NH.data_ptr(), *x_NH.shape, eps, out_NH.data_ptr())
        return out_NH

    def gated(self, both_NF: torch.Tensor) -> torch.Tensor:
        """silu(gate) * up of [gate, up] side by side: [N, 2 F] -> [N, F]."""
        rows, width = both_NF.shape[0], both_NF.shape[1] // 2
        out_NF = both_NF.new_empty(rows, width)
        self._gated(both_NF.data_ptr(), rows, width, out_NF.data_ptr())
        return out_NF

    def attend(
        self,
        step: Step,
        heads_NE: torch.Tensor,
        cache: torch.Tensor,
        q_norm: Norm | None,
        k_norm: Norm | None,
        scale: float,
    ) -> torch.Tensor:
        """Rotate, put keys and values into their slots, attend: [N, (Q + 2 K) D] -> [n, Q D], n = `step.rows`.

        Args:
            cache: keys and values of one layer, [2, slots, K, length, D].
            q_norm, k_norm: of the heads, where the model has them. scale: of the scores.
        """
        fields = step.fields
        fields.rows, fields.scale = step.rows, scale
        fields.q_weight, fields.q_eps = (q_norm.weight.data_ptr(), q_norm.eps) if q_norm is not None else (None, 0.0)
        fields.k_weight, fields.k_eps = (k_norm.weight.data_ptr(), k_norm.eps) if k_norm is not None else (None, 0.0)
        out_nE = heads_NE.new_empty(step.rows, fields.Q * fields.D)
        keys, values = cache[0].data_ptr(), cache[1].data_ptr()
        self._attend(ctypes.addressof(fields), heads_NE.data_ptr(), keys, values, out_nE.data_ptr())
        return out_nE

    def draw(
        self, logits_nV: torch.Tensor, uniforms_n: torch.Tensor, temperature: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `sampling.draw`."""
        rows, size = logits_nV.shape
        tokens_n, logprobs_n = torch.empty(rows, dtype=torch.int64), logits_nV.new_empty(rows)
        room = logits_nV.new_empty(2 * (size + WIDTH))
        self._draw(
            logits_nV.data_ptr(),
            rows,
            size,
            uniforms_n.data_ptr(),
            temperature,
            room.data_ptr(),
            tokens_n.data_ptr(),
            logprobs_n.data_ptr(),
        )
        return tokens_n, logprobs_n


@functools.cache
def load() -> Native | None:
    """The functions, compiled now if they have not been; None where that is not wanted or does not work."""
    if os.environ.get("POSTTRAIN_NATIVE") == "0":
        return None
    compiler = os.environ.get("CC") or next((name for name in ("cc", "gcc", "clang") if shutil.which(name)), None)
    if compiler is None:
        logger.info("no C compiler: rollouts on the CPU use torch's kernels alone, which is slower")
        return None
    try:
        with contextlib.ExitStack() as stack:
            openmp = _openmp()
            if openmp is not None:  # so that the library finds the very one whose threads torch keeps
                ctypes.CDLL(openmp, mode=ctypes.RTLD_GLOBAL)
            return Native(ctypes.CDLL(str(_compiled(compiler, _folder(stack), has_threads=openmp is not None))))
    except (OSError, subprocess.SubprocessError) as error:
        said = (getattr(error, "stderr", None) or "").strip().splitlines()
        logger.warning(
            "%s could not compile %s (%s); rollouts on the CPU use torch's kernels alone, which is slower",
            compiler, _SOURCE.name, said[0] if said else error,
        )  # fmt: skip
        return None


def _folder(stack: contextlib.ExitStack) -> Path:
    """Where libraries are kept; where none can be, a folder that goes with the stack (a loaded one needs no file)."""
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "posttrain"
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    except (OSError, RuntimeError):  # RuntimeError: a user without a home
        pass
    return Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="posttrain-")))


def _openmp() -> str | None:
    """The OpenMP library that torch has loaded. Another one would have threads of its own, in the way of torch's."""
    try:
        paths = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "/" in line}
    except OSError:
        return None
    found = sorted(path for path in paths if re.match(r"lib(gomp|iomp5|omp)\b", Path(path).name))
    return found[0] if len(found) == 1 else None


def _compiled(compiler: str, folder: Path, *, has_threads: bool) -> Path:
    """The shared library for this source, processor and compiler; it is made where it is not there."""
    version = subprocess.run([*compiler.split(), "--version"], capture_output=True, text=True, check=True, timeout=30)
    parts = (_SOURCE.read_text(), *_FLAGS, str(has_threads), version.stdout, platform.machine(), _processor())
    identity = "\n".join(parts)
    name = f"decode-{hashlib.sha256(identity.encode()).hexdigest()[:16]}.so"
    library = folder / name
    if not library.is_file():
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            made, compiled = Path(scratch) / name, Path(scratch) / "decode.o"
            # Linked without -fopenmp, which would bring a library of its own.
            compile_it = [*_FLAGS, *(["-fopenmp"] if has_threads else []), "-c", str(_SOURCE), "-o", str(compiled)]
            for arguments in (compile_it, ["-shared", "-o", str(made), str(compiled), "-lm"]):
                subprocess.run(
                    [*compiler.split(), *arguments],
                    capture_output=True, text=True, check=True, timeout=_COMPILE_SECONDS,
                )  # fmt: skip
            made.replace(library)  # whole, or not there
    return library


def _processor() -> str:
    """What -march=native looks at."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))}))
