"""Build of this folder's C into one shared library, where there is a compiler.

The sources are compiled once for a processor and compiler, in seconds, into a cache folder; results then differ from
those of torch's kernels by rounding. Without a compiler, or with POSTTRAIN_NATIVE=0, torch does it all.
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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch  # noqa: F401  its OpenMP library has to be there before ours looks for one

from rl_core.errors import CheckpointError, SettingsError
from rl_core.storage.own_files import cache_folder
from rl_core.storage.single_files import adopt, make_folder

__all__ = ["is_intel", "load", "loaded_openmp"]

logger = logging.getLogger(__name__)

_FOLDER = Path(__file__).parent
# No -ffast-math: it would change how the whole process rounds tiny numbers.
_FLAGS = ("-O3", "-march=native", "-std=gnu11", "-fPIC")
_COMPILE_SECONDS = 120


@functools.cache
def load() -> ctypes.CDLL | None:
    """The library, compiled now if it has not been; None where that is not wanted or does not work."""
    if os.environ.get("POSTTRAIN_NATIVE") == "0":
        return None
    compiler = os.environ.get("CC") or next((name for name in ("cc", "gcc", "clang") if shutil.which(name)), None)
    if compiler is None:
        logger.info("no C compiler: the CPU uses torch's kernels alone, which is slower")
        return None
    try:
        with contextlib.ExitStack() as stack:
            openmp = loaded_openmp()
            if openmp is not None:  # so that the library finds the very one whose threads torch keeps
                ctypes.CDLL(openmp, mode=ctypes.RTLD_GLOBAL)
            return ctypes.CDLL(str(_compiled(compiler, _folder(stack), has_threads=openmp is not None)))
    except (OSError, subprocess.SubprocessError, CheckpointError) as error:
        said = (getattr(error, "stderr", None) or "").strip().splitlines()
        logger.warning(
            "%s could not compile the code in %s (%s); the CPU uses torch's kernels alone, which is slower",
            compiler, _FOLDER, said[0] if said else error,
        )  # fmt: skip
        return None


def _folder(stack: contextlib.ExitStack) -> Path:
    """The cache folder of libraries; a temporary one where none can be written (a loaded library needs no file)."""
    try:
        folder = make_folder(cache_folder(""))
        if os.access(folder, os.W_OK):
            return folder
    except (OSError, CheckpointError, SettingsError):
        pass
    return Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="posttrain-")))


def loaded_openmp() -> str | None:
    """The OpenMP library that torch has loaded. Another one would have threads of its own, in the way of torch's."""
    try:
        paths = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "/" in line}
    except OSError:
        return None
    found = sorted(path for path in paths if re.match(r"lib(gomp|iomp5|omp)\b", Path(path).name))
    return found[0] if len(found) == 1 else None


def _compiled(compiler: str, folder: Path, *, has_threads: bool) -> Path:
    """The shared library for these sources, processor and compiler; it is made where it is not there."""
    version = subprocess.run([*compiler.split(), "--version"], capture_output=True, text=True, check=True, timeout=30)
    sources = sorted(_FOLDER.glob("*.c"))
    texts = [path.read_text() for path in (*sources, *sorted(_FOLDER.glob("*.h")))]
    parts = (*texts, *_FLAGS, compiler, str(has_threads), version.stdout, platform.machine(), _processor())
    identity = "\n".join(parts)
    name = f"posttrain-{hashlib.sha256(identity.encode()).hexdigest()[:16]}.so"
    library = folder / name
    if not library.is_file():
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            made = Path(scratch) / name
            compiled = [Path(scratch) / f"{source.stem}.o" for source in sources]
            flags = [*_FLAGS, *(["-fopenmp"] if has_threads else [])]
            commands = [
                [*flags, "-c", str(source), "-o", str(to)] for source, to in zip(sources, compiled, strict=True)
            ]
            logger.info("compiling %d files for this processor, once: some seconds", len(sources))
            run = functools.partial(
                subprocess.run, capture_output=True, text=True, check=True, timeout=_COMPILE_SECONDS
            )
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                list(pool.map(lambda arguments: run([*compiler.split(), *arguments]), commands))
            # Linked without -fopenmp, which would bring a library of its own.
            run([*compiler.split(), "-shared", "-o", str(made), *map(str, compiled), "-lm"])
            adopt(made, library)  # whole, or not there
    return library


@functools.cache  # asked at every product
def is_intel() -> bool:
    """True on a processor of Intel's; False where the system does not tell."""
    try:
        return "GenuineIntel" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False


def _processor() -> str:
    """The processor's features, which -march=native compiles for."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))}))
