"""Memory that is freed stays with the process, unless the user has set the allocator."""

import os
import platform
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="of glibc's allocator")

PROGRAM = """
import resource, sys
import torch
from rl_core.native.memory import keep_freed_memory
torch.set_num_threads(1)
print(keep_freed_memory() if sys.argv[1] == "keep" else None)
def faults(): return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(30): torch.zeros(2**24)
before = faults()
for _ in range(10): torch.zeros(2**24)  # 64 MiB
print(faults() - before)
"""


def run(how: str, **environment: str) -> tuple[str, int]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, how], capture_output=True, text=True, check=True,
        env={name: value for name, value in os.environ.items() if "MALLOC" not in name} | environment,
    )  # fmt: skip
    said, faults = done.stdout.split()
    return said, int(faults)


def test_pages_are_not_mapped_again() -> None:
    said, kept = run("keep")
    _, given_back = run("leave")
    assert said == "True"
    assert given_back > 10_000 > 100 * kept  # 163,840 pages of 4 KiB, or fewer larger ones


def test_a_user_who_has_set_the_allocator_is_left_alone() -> None:
    said, faults = run("keep", MALLOC_TRIM_THRESHOLD_="131072")
    assert said == "False" and faults > 10_000
