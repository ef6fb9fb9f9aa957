"""Freed memory stays with the process, unless the user has configured the allocator; memory that is handed out."""

import os
import platform
import subprocess
import sys

import pytest
import torch

from rl_core.cpu.allocator import Arena, allocate_huge_pages

needs_glibc = pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc", reason="tests glibc's allocator"
)

# Page faults of 3 tensors of 64 MiB, before and after the allocator is set to keep freed memory. The smallest of four
# counts is used, because an object allocated after a freed tensor occasionally makes the heap grow again.
PROGRAM = """
import resource
import torch
from rl_core.cpu.allocator import keep_freed_memory
torch.set_num_threads(1)
def faults():
    for _ in range(3): torch.zeros(2**24)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(3): torch.zeros(2**24)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print(faults(), keep_freed_memory(), min(faults() for _ in range(4)))
"""


def run_program(**environment: str) -> tuple[int, str, int]:
    process = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        capture_output=True,
        text=True,
        check=True,
        env={name: value for name, value in os.environ.items() if "MALLOC" not in name}
        | environment,
    )
    faults_before, is_set, faults_after = process.stdout.split()
    return int(faults_before), is_set, int(faults_after)


@pytest.mark.slow
@needs_glibc
def test_pages_are_not_mapped_again() -> None:
    faults_before, is_set, faults_after = run_program()
    assert is_set == "True"
    assert faults_before > 3_000 > 30 * faults_after  # 49,152 pages of 4 KiB, or fewer larger ones


@needs_glibc
def test_a_configured_allocator_is_not_changed() -> None:
    _, is_set, faults = run_program(MALLOC_TRIM_THRESHOLD_="131072")
    assert is_set == "False" and faults > 3_000


def test_fresh_pages_belong_to_this_process() -> None:
    memory = allocate_huge_pages(10_000)
    assert memory.shape == (10_000,) and not memory.any() and memory.data_ptr() % 64 == 0
    child = os.fork()
    if not child:
        memory.fill_(1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert not memory.any()


def test_pieces_do_not_overlap_and_are_reused() -> None:
    arena = Arena(chunk=1000)
    sizes = [100, 1, 800, 5000, 30, 64]
    pieces = [arena.allocate_bytes(size) for size in sizes]
    for number, piece in enumerate(pieces):
        piece.fill_(number)
        assert piece.data_ptr() % 64 == 0 and len(piece) >= sizes[number]
    assert [int(piece.float().mean()) for piece in pieces] == list(range(6))
    assert all(piece.min() == piece.max() for piece in pieces)
    arena.reset()
    assert [arena.allocate_bytes(size).data_ptr() for size in sizes] == [
        piece.data_ptr() for piece in pieces
    ]
    # allocation does not write to the memory
    assert torch.equal(pieces[3], torch.full_like(pieces[3], 3))
