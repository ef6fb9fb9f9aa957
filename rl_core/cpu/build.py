"""Build of this folder's C sources into one shared library, if there is a compiler.

The sources are compiled once per processor and compiler, in seconds, into a cache folder; results then differ from
those of torch's kernels by rounding. Without a compiler, a library compiled for processors of this level is used
(container images include them). Otherwise, or with POSTTRAIN_NATIVE=0, torch computes everything.

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

import torch  # noqa: F401  its OpenMP library must be loaded before ours

from rl_core.errors import CheckpointError, SettingsError
from rl_core.storage.atomic_files import make_folder, move_into_place, resolve_cache_folder

logger = logging.getLogger(__name__)

_FOLDER = Path(__file__).parent
# No -ffast-math: it would change the rounding of tiny numbers in the whole process.
_FLAGS = ("-O3", "-std=gnu11", "-fPIC")
PREBUILT_VARIABLE = "POSTTRAIN_CPU_CODE"  # environment variable: folder of libraries for levels
# Levels of x86-64, best first, with the features that the next level lacks.
_LEVELS = {
    "x86-64-v4": {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"},
    "x86-64-v3": {"avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"},
}
_COMPILE_SECONDS = 120


@functools.cache
def load_library() -> ctypes.CDLL | None:
    """Load the library, compiling it first if necessary; return None if that is disabled or fails."""
    if os.environ.get("POSTTRAIN_NATIVE") == "0":
        return None
    compiler = os.environ.get("CC") or next(
        (name for name in ("cc", "gcc", "clang") if shutil.which(name)), None
    )
    if compiler is None:
        prebuilt = find_prebuilt_library()
        if prebuilt is not None:
            return _open_library(prebuilt)
        logger.info("no C compiler: the CPU only uses torch's kernels, which is slower")
        return None
    has_threads = find_loaded_openmp() is not None
    try:
        with contextlib.ExitStack() as stack:
            folder = _resolve_cache_folder(stack)
            return _open_library(_compile_cached(compiler, folder, has_threads=has_threads))
    except (OSError, subprocess.SubprocessError, CheckpointError) as error:
        output = (getattr(error, "stderr", None) or "").strip().splitlines()
        logger.warning(
            "%s could not compile the code in %s (%s); the CPU only uses torch's kernels, which is slower",
            compiler,
            _FOLDER,
            output[0] if output else error,
        )
        return None


def _open_library(library: Path) -> ctypes.CDLL | None:
    """Load a library into this process; return None if that fails."""
    try:
        openmp = find_loaded_openmp()
        if openmp is not None:  # make the library use the same OpenMP threads as torch
            ctypes.CDLL(openmp, mode=ctypes.RTLD_GLOBAL)
        return ctypes.CDLL(str(library))
    except OSError as error:
        logger.warning(
            "%s cannot be loaded (%s); the CPU only uses torch's kernels, which is slower",
            library,
            error,
        )
        return None


def find_prebuilt_library(processor: str | None = None) -> Path | None:
    """Find the library of these sources for the best level that the processor supports; None = there is none.

    Args:
        processor: its features; None = of this one.
    """
    folder = os.environ.get(PREBUILT_VARIABLE, "")
    features = set((_read_processor_features() if processor is None else processor).split())
    has_threads = find_loaded_openmp() is not None
    needed: set[str] = set()
    for level in reversed(_LEVELS):  # a level includes the features of lower ones
        needed |= _LEVELS[level]
    for level in _LEVELS:
        path = Path(folder, _build_library_name((level, *_read_sources(), str(has_threads))))
        if folder and needed <= features and path.is_file():
            return path
        needed -= _LEVELS[level]
    return None


def compile_levels(folder: Path) -> list[Path]:
    """Compile for all levels and return the libraries.

    Raises: OSError, SubprocessError.
    """
    compiler = os.environ.get("CC", "cc")
    has_threads = find_loaded_openmp() is not None
    libraries = []
    for level in _LEVELS:
        library = folder / _build_library_name((level, *_read_sources(), str(has_threads)))
        _compile_library(compiler, (f"-march={level}",), library, has_threads=has_threads)
        libraries.append(library)
    return libraries


def _resolve_cache_folder(stack: contextlib.ExitStack) -> Path:
    """Return the cache folder of libraries, or a temporary one if it is not writable (a loaded library needs no
    file).
    """
    try:
        folder = make_folder(resolve_cache_folder(""))
        if os.access(folder, os.W_OK):
            return folder
    except (OSError, CheckpointError, SettingsError):
        pass
    return Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="posttrain-")))


def find_loaded_openmp() -> str | None:
    """Find the OpenMP library that torch has loaded; a second one would have competing threads."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return None
    paths = {line.split()[-1] for line in lines if "/" in line}
    libraries = sorted(
        path for path in paths if re.match(r"lib(gomp|iomp5|omp)\b", Path(path).name)
    )
    return libraries[0] if len(libraries) == 1 else None


def _compile_cached(compiler: str, folder: Path, *, has_threads: bool) -> Path:
    """Return the shared library for these sources, processor and compiler; compile it if it does not exist."""
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
    """Return sources and flags, which determine the library."""
    return (*(path.read_text() for path in sorted(_FOLDER.glob("*.[ch]"))), *_FLAGS)


def _build_library_name(parts: tuple[str, ...]) -> str:
    return f"posttrain-{hashlib.sha256(chr(10).join(parts).encode()).hexdigest()[:16]}.so"


def _compile_library(
    compiler: str, processor: tuple[str, ...], library: Path, *, has_threads: bool
) -> None:
    """Compile all sources into a library, atomically."""
    sources = sorted(_FOLDER.glob("*.c"))
    with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
        temporary = Path(scratch) / library.name
        objects = [Path(scratch) / f"{source.stem}.o" for source in sources]
        flags = [*_FLAGS, *processor, *(["-fopenmp"] if has_threads else [])]
        commands = [
            [*flags, "-c", str(source), "-o", str(target)]
            for source, target in zip(sources, objects, strict=True)
        ]
        run = functools.partial(
            subprocess.run, capture_output=True, text=True, check=True, timeout=_COMPILE_SECONDS
        )
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(lambda arguments: run([*compiler.split(), *arguments]), commands))
        # Linked without -fopenmp, which would add another OpenMP library.
        run([*compiler.split(), "-shared", "-o", str(temporary), *map(str, objects), "-lm"])
        move_into_place(temporary, library)


@functools.cache  # called for every product
def is_intel_processor() -> bool:
    """Return whether the processor is from Intel; False if unknown."""
    try:
        return "GenuineIntel" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False


def _read_processor_features() -> str:
    """Return the processor's features, which -march=native compiles for."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = ("flags", "Features", "model name")
    return "\n".join(sorted({line for line in lines if line.startswith(names)}))


if __name__ == "__main__":
    for built_library in compile_levels(make_folder(Path(sys.argv[1]))):
        print(built_library)
