"""A case of hostile input: files that lie there, a command, and what has to be said."""

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

Content = bytes | str | Callable[[Path], None]  # what a file holds, or what makes it
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
    """`posttrain ARGUMENTS` in a folder of its own, beside canaries."""

    name: str
    arguments: tuple[str, ...]
    says: tuple[str, ...]  # every one has to stand in the message
    files: Mapping[str, Content] = field(default_factory=dict)
    code: int = 2
    writes: bool = False  # True = it may write into its output folder
    environment: Mapping[str, str | None] = field(default_factory=dict)  # None = not set
    user: int = 0  # as whom it runs; 0 = as the test
    umask: int = 0o022


def config(text: bytes | str, says: str | tuple[str, ...], name: str, **files: Content) -> Case:
    """A configuration that `validate` refuses, at CONFIG."""
    parts = (says,) if isinstance(says, str) else says
    return Case(name, ("validate", CONFIG), (CONFIG, *parts), {CONFIG: text, **files})


def fifo(path: Path) -> None:
    """A pipe that nobody writes into."""
    os.mkfifo(path)


def bound_socket(path: Path) -> None:
    """The file of a socket."""
    here = Path.cwd()
    os.chdir(path.parent)  # names of sockets are short
    try:
        with socket.socket(socket.AF_UNIX) as place:
            place.bind(path.name)
    finally:
        os.chdir(here)


def device(name: str) -> Callable[[Path], None]:
    """A link to a device, such as /dev/zero, which never ends."""
    return link(f"/dev/{name}")


def link(target: str) -> Callable[[Path], None]:
    """A symbolic link."""
    return lambda path: path.symlink_to(target)


def sparse(size: int, start: bytes = b"", end: bytes = b"") -> Callable[[Path], None]:
    """A file of `size` bytes that takes no room: zeros between its start and its end."""

    def make(path: Path) -> None:
        with path.open("wb") as file:
            file.write(start)
            file.truncate(size - len(end))
            file.seek(0, os.SEEK_END)
            file.write(end)

    return make


def repeated(start: bytes, part: bytes, times: int, end: bytes) -> Callable[[Path], None]:
    """A file of `times` times a part, written in pieces."""

    def make(path: Path) -> None:
        with path.open("wb") as file:
            file.write(start)
            block = part * max(1, 2**20 // len(part))
            whole, rest = divmod(times * len(part), len(block))
            for _ in range(whole):
                file.write(block)
            file.write(block[:rest] + end)

    return make
