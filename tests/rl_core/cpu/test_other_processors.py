"""Compiled code for processors with vectors of half the size, on one with AVX-512."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rl_core.cpu import build

HERE = Path(__file__).parent
COMPILER = os.environ.get("CC") or next(
    (name for name in ("cc", "gcc", "clang") if shutil.which(name)), "cc"
)
pytestmark = pytest.mark.skipif(build.load_library() is None, reason="needs a C compiler")


def run_tests(compiler: str, folder: Path, files: tuple[str, ...], chosen: str) -> dict[str, int]:
    """Run tests of these files with code from this compiler in another process; return the numbers of passed and
    skipped ones.
    """
    paths = [str(HERE / name) for name in files]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-m", "not slow", "-k", chosen, *paths],
        env={**os.environ, "CC": compiler, "XDG_CACHE_HOME": str(folder)},
        capture_output=True,
        text=True,
        check=False,
        cwd=HERE.parents[2],
    )
    last = done.stdout.strip().splitlines()[-1]
    assert done.returncode == 0, done.stdout[-3000:]
    return {word: int(count) for count, word in re.findall(r"(\d+) (passed|failed|skipped)", last)}


@pytest.mark.skipif(
    "avx512f" not in build._read_processor_features(), reason="its vectors have that size anyway"
)
def test_vectors_of_half_the_size(tmp_path: Path) -> None:
    files = (
        "test_gemm.py",
        "test_low_rank.py",
        "test_packed_vectors.py",
        "test_fused_decode.py",
        "test_attention_kernel.py",
    )
    counts = run_tests(
        f"{COMPILER} -mno-avx512f", tmp_path, files, "not tiles and not python_threads"
    )
    assert counts.get("skipped", 0) == 0 and counts["passed"] >= 40
