"""Case of hostile input: files in place, a command, and the expected message."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

__all__ = [
    "BASE",
    "CONFIG",
    "Case",
    "Content",
    "bound_socket",
    "config",
    "device",
    "fifo",
    "link",
    "repeated",
    "sparse",
]

Content = bytes | str | Callable[[Path], None]  # content of a file, or the function that creates it
CONFIG = "config.yaml"
BASE = """\
name: hostile
threads: 1
environment: {name: pixel_grid}
model: {preset: nano, vocab_size: 320, context: 128}
tracking: {traces: 0, system_metrics_seconds: 0}
stages:
  prepare_data: {num_demonstrations: 50, levels: [easy]}
  sft: {max_steps: 2}
"""


@dataclass(frozen=True)
class Case:
    """Command `posttrain ARGUMENTS` in a separate folder next to canaries."""

    name: str
    arguments: tuple[str, ...]
    says: tuple[str, ...]  # the message must contain all of them
    files: Mapping[str, Content] = field(default_factory=dict)
    code: int = 2
    writes: bool = False  # True = it may write into its output folder
    environment: Mapping[str, str | None] = field(default_factory=dict)  # None = not set
    user: int = 0  # uid that runs it; 0 = the test's user
    umask: int = 0o022


def config(text: bytes | str, says: str | tuple[str, ...], name: str, **files: Content) -> Case:
    """Build a case with a configuration, at CONFIG, that `validate` refuses."""
    parts = (says,) if isinstance(says, str) else says
    return Case(name, ("validate", CONFIG), (CONFIG, *parts), {CONFIG: text, **files})


def fifo(path: Path) -> None:
    """Create a pipe without a writer."""
    os.mkfifo(path)


def bound_socket(path: Path) -> None:
    """Create the file of a socket."""
    previous = Path.cwd()
    os.chdir(path.parent)  # names of sockets are short
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path.name)
    finally:
        os.chdir(previous)


def device(name: str) -> Callable[[Path], None]:
    """Create a link to a device, such as /dev/zero, which never ends."""
    return link(f"/dev/{name}")


def link(target: str) -> Callable[[Path], None]:
    """Create a symbolic link."""
    return lambda path: path.symlink_to(target)


def sparse(size: int, start: bytes = b"", end: bytes = b"") -> Callable[[Path], None]:
    """Create a file of `size` bytes that takes no space: zeros between its start and its end."""

    def make(path: Path) -> None:
        with path.open("wb") as file:
            file.write(start)
            file.truncate(size - len(end))
            file.seek(0, os.SEEK_END)
            file.write(end)

    return make


def repeated(start: bytes, part: bytes, times: int, end: bytes) -> Callable[[Path], None]:
    """Create a file that repeats a part `times` times, written in blocks."""

    def make(path: Path) -> None:
        with path.open("wb") as file:
            file.write(start)
            block = part * max(1, 2**20 // len(part))
            num_blocks, rest = divmod(times * len(part), len(block))
            for _ in range(num_blocks):
                file.write(block)
            file.write(block[:rest] + end)

    return make
