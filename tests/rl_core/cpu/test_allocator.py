"""Memory that is freed stays with the process, unless the user has set the allocator; memory that is given out."""

import os
import platform
import subprocess
import sys

import pytest
import torch

from rl_core.cpu.allocator import Arena, pages

needs_glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="of glibc's allocator")

PROGRAM = """
import resource, sys
import torch
from rl_core.cpu.allocator import keep_freed_memory
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


@needs_glibc
def test_pages_are_not_mapped_again() -> None:
    said, kept = run("keep")
    _, given_back = run("leave")
    assert said == "True"
    assert given_back > 10_000 > 100 * kept  # 163,840 pages of 4 KiB, or fewer larger ones


@needs_glibc
def test_a_user_who_has_set_the_allocator_is_left_alone() -> None:
    said, faults = run("keep", MALLOC_TRIM_THRESHOLD_="131072")
    assert said == "False" and faults > 10_000


def test_fresh_pages_belong_to_this_process() -> None:
    memory = pages(10_000)
    assert memory.shape == (10_000,) and not memory.any() and memory.data_ptr() % 64 == 0
    child = os.fork()
    if not child:
        memory.fill_(1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert not memory.any()


def test_pieces_do_not_overlap_and_are_given_out_again() -> None:
    arena = Arena(chunk=1000)
    sizes = [100, 1, 800, 5000, 30, 64]
    pieces = [arena.take(size) for size in sizes]
    for number, piece in enumerate(pieces):
        piece.fill_(number)
        assert piece.data_ptr() % 64 == 0 and len(piece) >= sizes[number]
    assert [int(piece.float().mean()) for piece in pieces] == list(range(6))
    assert all(piece.min() == piece.max() for piece in pieces)
    arena.reset()
    assert [arena.take(size).data_ptr() for size in sizes] == [piece.data_ptr() for piece in pieces]
    assert torch.equal(pieces[3], torch.full_like(pieces[3], 3))  # nothing is written by giving it out
