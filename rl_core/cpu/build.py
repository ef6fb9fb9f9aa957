"""Build of this folder's C into one shared library, where there is a compiler.

The sources are compiled once for a processor and compiler, in seconds, into a cache folder; results then differ from
those of torch's kernels by rounding. Without a compiler a library is taken that was compiled for processors of this
level (container images have them), and else, or with POSTTRAIN_NATIVE=0, torch does it all.

    python -m rl_core.cpu.build FOLDER      compiles for the levels of x86-64; POSTTRAIN_CPU_CODE=FOLDER finds them
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
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch  # noqa: F401  its OpenMP library has to be there before ours looks for one

from rl_core.errors import CheckpointError, SettingsError
from rl_core.storage.atomic_files import make_folder, move_into_place, resolve_cache_folder

logger = logging.getLogger(__name__)

_FOLDER = Path(__file__).parent
# No -ffast-math: it would change how the whole process rounds tiny numbers.
_FLAGS = ("-O3", "-std=gnu11", "-fPIC")
PREBUILT_VARIABLE = "POSTTRAIN_CPU_CODE"  # variable: folder of the libraries for levels
# Levels of x86-64, the best one first, with the features that tell them from the next one.
_LEVELS = {
    "x86-64-v4": {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"},
    "x86-64-v3": {"avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"},
}
_COMPILE_SECONDS = 120


@functools.cache
def load_library() -> ctypes.CDLL | None:
    """The library, compiled now if it has not been; None where that is not wanted or does not work."""
    if os.environ.get("POSTTRAIN_NATIVE") == "0":
        return None
    compiler = os.environ.get("CC") or next(
        (name for name in ("cc", "gcc", "clang") if shutil.which(name)), None
    )
    if compiler is None and (found := find_prebuilt_library()) is not None:
        return _open_library(found)
    if compiler is None:
        logger.info("no C compiler: the CPU uses torch's kernels alone, which is slower")
        return None
    try:
        with contextlib.ExitStack() as stack:
            return _open_library(
                _compile_cached(
                    compiler,
                    _resolve_cache_folder(stack),
                    has_threads=find_loaded_openmp() is not None,
                )
            )
    except (OSError, subprocess.SubprocessError, CheckpointError) as error:
        said = (getattr(error, "stderr", None) or "").strip().splitlines()
        logger.warning(
            "%s could not compile the code in %s (%s); the CPU uses torch's kernels alone, which is slower",
            compiler,
            _FOLDER,
            said[0] if said else error,
        )
        return None


def _open_library(library: Path) -> ctypes.CDLL | None:
    """The library in this process; None where it cannot be loaded."""
    try:
        if (
            openmp := find_loaded_openmp()
        ) is not None:  # so that it finds the very one whose threads torch keeps
            ctypes.CDLL(openmp, mode=ctypes.RTLD_GLOBAL)
        return ctypes.CDLL(str(library))
    except OSError as error:
        logger.warning(
            "%s cannot be loaded (%s); the CPU uses torch's kernels alone, which is slower",
            library,
            error,
        )
        return None


def find_prebuilt_library(processor: str | None = None) -> Path | None:
    """Library of these sources for the best level that the processor has; None = there is none.

    processor: its features; None = of this one.
    """
    folder = os.environ.get(PREBUILT_VARIABLE, "")
    features = set((_read_processor_features() if processor is None else processor).split())
    has_threads = find_loaded_openmp() is not None
    needed: set[str] = set()
    for level in reversed(_LEVELS):  # a level has the features of those below
        needed |= _LEVELS[level]
    for level in _LEVELS:
        path = Path(folder, _build_library_name((level, *_read_sources(), str(has_threads))))
        if folder and needed <= features and path.is_file():
            return path
        needed -= _LEVELS[level]
    return None


def compile_levels(folder: Path) -> list[Path]:
    """Compile for all levels; returns the libraries. Raises: OSError, SubprocessError."""
    compiler = os.environ.get("CC", "cc")
    has_threads = find_loaded_openmp() is not None
    made = []
    for level in _LEVELS:
        library = folder / _build_library_name((level, *_read_sources(), str(has_threads)))
        _compile_library(compiler, (f"-march={level}",), library, has_threads=has_threads)
        made.append(library)
    return made


def _resolve_cache_folder(stack: contextlib.ExitStack) -> Path:
    """The cache folder of libraries; a temporary one where none can be written (a loaded library needs no file)."""
    try:
        folder = make_folder(resolve_cache_folder(""))
        if os.access(folder, os.W_OK):
            return folder
    except (OSError, CheckpointError, SettingsError):
        pass
    return Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="posttrain-")))


def find_loaded_openmp() -> str | None:
    """The OpenMP library that torch has loaded. Another one would have threads of its own, in the way of torch's."""
    try:
        paths = {
            line.split()[-1]
            for line in Path("/proc/self/maps").read_text().splitlines()
            if "/" in line
        }
    except OSError:
        return None
    found = sorted(path for path in paths if re.match(r"lib(gomp|iomp5|omp)\b", Path(path).name))
    return found[0] if len(found) == 1 else None


def _compile_cached(compiler: str, folder: Path, *, has_threads: bool) -> Path:
    """The shared library for these sources, processor and compiler; it is made where it is not there."""
    version = subprocess.run(
        [*compiler.split(), "--version"], capture_output=True, text=True, check=True, timeout=30
    )
    parts = (
        *_read_sources(),
        compiler,
        str(has_threads),
        version.stdout,
        platform.machine(),
        _read_processor_features(),
    )
    library = folder / _build_library_name(parts)
    if not library.is_file():
        logger.info("compiling for this processor, once: some seconds")
        _compile_library(compiler, ("-march=native",), library, has_threads=has_threads)
    return library


def _read_sources() -> tuple[str, ...]:
    """Sources and flags, on which the library depends."""
    return (*(path.read_text() for path in sorted(_FOLDER.glob("*.[ch]"))), *_FLAGS)


def _build_library_name(parts: tuple[str, ...]) -> str:
    return f"posttrain-{hashlib.sha256(chr(10).join(parts).encode()).hexdigest()[:16]}.so"


def _compile_library(
    compiler: str, processor: tuple[str, ...], library: Path, *, has_threads: bool
) -> None:
    """Compile all sources into a library, whole or not there."""
    sources = sorted(_FOLDER.glob("*.c"))
    with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
        made = Path(scratch) / library.name
        compiled = [Path(scratch) / f"{source.stem}.o" for source in sources]
        flags = [*_FLAGS, *processor, *(["-fopenmp"] if has_threads else [])]
        commands = [
            [*flags, "-c", str(source), "-o", str(to)]
            for source, to in zip(sources, compiled, strict=True)
        ]
        run = functools.partial(
            subprocess.run, capture_output=True, text=True, check=True, timeout=_COMPILE_SECONDS
        )
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(lambda arguments: run([*compiler.split(), *arguments]), commands))
        # Linked without -fopenmp, which would bring a library of its own.
        run([*compiler.split(), "-shared", "-o", str(made), *map(str, compiled), "-lm"])
        move_into_place(made, library)


@functools.cache  # asked at every product
def is_intel_processor() -> bool:
    """True on a processor of Intel's; False where the system does not tell."""
    try:
        return "GenuineIntel" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False


def _read_processor_features() -> str:
    """The processor's features, which -march=native compiles for."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(
        sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))})
    )


if __name__ == "__main__":
    for found in compile_levels(make_folder(Path(sys.argv[1]))):
        print(found)
