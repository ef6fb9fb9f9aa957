"""Crash states of a file system: possible contents of a disk after a power cut, from a record of operations.

`Recorder` notes every creation, write, fsync, rename and removal below a folder. `crash_states` gives the trees that a
crash after any of them may leave:

- data of a file that was not synced since: the old bytes, the new ones, a prefix, zeros, or sectors of all three;
- entries of a folder that was not synced since: any of its operations lost, in any order, but operations on one name in
  their order. A rename within a folder is one operation. Syncing a file does not sync its name.

That is POSIX at its weakest; real file systems keep more. `fsync` can be dropped by place, to see that it is needed.
"""

from __future__ import annotations

import contextlib
import hashlib
import linecache
import os
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

SECTOR = 64  # bytes; small, as the files of a test are
ROOT = 0

Tree = dict[str, "bytes | Tree"]


@dataclass(frozen=True)
class Entry:
    """An operation on entries of one folder: names that get a node, and names that lose theirs."""

    folder: int
    puts: tuple[tuple[str, int], ...] = ()
    drops: tuple[str, ...] = ()
    is_folder: bool = False  # that the names get

    @property
    def names(self) -> set[str]:
        return {name for name, _ in self.puts} | set(self.drops)


@dataclass(frozen=True)
class Data:
    """The bytes of a file, at the time when they were next looked at."""

    node: int
    content: bytes


@dataclass(frozen=True)
class Synced:
    """A file's data or a folder's entries reached the disk."""

    node: int


@dataclass(frozen=True)
class Mark:
    """A promise to the caller that `value` is safe."""

    value: Any


@dataclass
class Recorder:
    """Record of operations below `root`, while the `with` block runs. `drop`: places of fsyncs that do nothing."""

    root: Path
    drop: frozenset[str] = frozenset()
    ops: list[Any] = field(default_factory=list)
    sites: dict[str, int] = field(
        default_factory=dict
    )  # place of an fsync -> how often it was reached
    _folders: dict[int, dict[str, int]] = field(default_factory=lambda: {ROOT: {}})
    _contents: dict[int, bytes] = field(default_factory=dict)
    _by_inode: dict[tuple[int, int], int] = field(default_factory=dict)
    _count: int = ROOT

    def __enter__(self) -> Recorder:
        info = os.stat(self.root)
        self._by_inode[info.st_dev, info.st_ino] = ROOT
        self._look()
        self.ops.append(Synced(ROOT))
        self._stack = contextlib.ExitStack()
        for name in ("rename", "replace", "unlink", "remove", "mkdir", "rmdir", "link"):
            self._stack.enter_context(mock.patch.object(os, name, self._wrapped(getattr(os, name))))
        self._stack.enter_context(mock.patch.object(os, "fsync", self._fsync))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        self._look()

    def mark(self, value: Any) -> None:
        """Record a promise."""
        self._look()
        self.ops.append(Mark(value))

    def _wrapped(self, call: Callable[..., Any]) -> Callable[..., Any]:
        is_rename = call.__name__ in ("rename", "replace")

        def wrapped(*args: Any, **named: Any) -> Any:
            self._look()
            result = call(*args, **named)
            if is_rename:
                self._rename(Path(os.path.abspath(args[0])), Path(os.path.abspath(args[1])))
            self._look()
            return result

        return wrapped

    def _fsync(self, descriptor: int) -> None:
        self._look()
        info = os.fstat(descriptor)
        node = self._by_inode.get((info.st_dev, info.st_ino))
        if node is None:
            return
        site = _locate_fsync()
        self.sites[site] = self.sites.get(site, 0) + 1
        if site not in self.drop:
            self.ops.append(Synced(node))

    def _rename(self, old: Path, new: Path) -> None:
        if self.root not in new.parents:
            return
        assert old.parent == new.parent, f"{old} -> {new}: a rename between folders is not modelled"
        folder = self._folder_at(new.parent)
        entries = self._folders[folder]
        entries[new.name] = node = entries.pop(old.name)
        self.ops.append(Entry(folder, puts=((new.name, node),), drops=(old.name,)))

    def _folder_at(self, path: Path) -> int:
        node = ROOT
        for part in path.relative_to(self.root).parts:
            node = self._folders[node][part]
        return node

    def _look(self, folder: int = ROOT, path: Path | None = None) -> None:
        """Record what appeared, disappeared and changed since the last look."""
        path = path or self.root
        known = self._folders[folder]
        there = {entry.name: entry for entry in os.scandir(path)}
        for name in sorted(known.keys() - there.keys()):
            del known[name]
            self.ops.append(Entry(folder, drops=(name,)))
        for name, entry in sorted(there.items()):
            info = entry.stat(follow_symlinks=False)
            inode = (info.st_dev, info.st_ino)
            if name not in known:
                node = (
                    self._by_inode.get(inode) if info.st_nlink > 1 and not entry.is_dir() else None
                )
                if node is None:
                    self._count = node = self._count + 1
                known[name] = self._by_inode[inode] = node
                self.ops.append(Entry(folder, puts=((name, node),), is_folder=entry.is_dir()))
                if entry.is_dir():
                    self._folders[node] = {}
            if entry.is_dir():
                self._look(known[name], path / name)
            elif (content := (path / name).read_bytes()) != self._contents.get(known[name], b""):
                self._contents[known[name]] = content
                self.ops.append(Data(known[name], content))


def _locate_fsync() -> str:
    """Return the place of the fsync that is being called: the function, and the line in it."""
    frame = sys._getframe(2)
    while frame.f_code.co_name == "fsync_path" and frame.f_back is not None:
        frame = frame.f_back
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
    return f"{frame.f_code.co_name}: {line}"


@dataclass
class _Disk:
    """Durable and pending state of the simulated disk. `is_folder`: nodes that are folders, not files."""

    is_folder: set[int]
    folders: dict[int, dict[str, int]] = field(default_factory=lambda: {ROOT: {}})
    contents: dict[int, bytes] = field(default_factory=dict)
    waiting: dict[int, list[Entry]] = field(default_factory=dict)
    written: dict[int, list[bytes]] = field(default_factory=dict)

    def apply(self, op: Any) -> None:
        if isinstance(op, Entry):
            self.waiting.setdefault(op.folder, []).append(op)
        elif isinstance(op, Data):
            self.written.setdefault(op.node, []).append(op.content)
        elif isinstance(op, Synced):
            for entry in self.waiting.pop(op.node, []):
                _put(self.folders.setdefault(op.node, {}), entry)
            if written := self.written.pop(op.node, []):
                self.contents[op.node] = written[-1]

    def tree(
        self,
        choose: Callable[[list[Entry]], list[Entry]],
        torn: Callable[[bytes, list[bytes]], bytes],
    ) -> Tree:
        """Build one possible tree by two choices: of a folder's operations, and of a file's bytes."""
        entries: dict[int, dict[str, int]] = {
            node: dict(names) for node, names in self.folders.items()
        }
        for folder, waiting in self.waiting.items():
            for entry in choose(waiting):
                _put(entries.setdefault(folder, {}), entry)
        chosen: dict[int, bytes] = {}

        def build(node: int) -> Tree:
            built: Tree = {}
            for name, inner in sorted(entries.get(node, {}).items()):
                if inner in self.is_folder:
                    built[name] = build(inner)
                else:
                    if inner not in chosen:
                        chosen[inner] = torn(
                            self.contents.get(inner, b""), self.written.get(inner, [])
                        )
                    built[name] = chosen[inner]
            return built

        return build(ROOT)


def _put(names: dict[str, int], entry: Entry) -> None:
    for name in entry.drops:
        names.pop(name, None)
    names.update(entry.puts)


def _keep_consistent(waiting: list[Entry], keep: list[bool]) -> list[Entry]:
    """Return the operations to keep, without those on names of which an earlier operation was lost."""
    lost: set[str] = set()
    entries = []
    for entry, wanted in zip(waiting, keep, strict=True):
        if wanted and not (entry.names & lost):
            entries.append(entry)
        else:
            lost |= entry.names
    return entries


def _tear(rng: random.Random, old: bytes, written: list[bytes]) -> bytes:
    if not written:
        return old
    new = rng.choice([written[-1], *written])
    start = _find_common_start([old, *written])  # bytes on the disk that were not written since
    return new[:start] + _tear_bytes(rng, old[start:], new[start:])


def _find_common_start(contents: list[bytes]) -> int:
    shortest = min(map(len, contents))
    return next(
        (i for i in range(shortest) if len({content[i] for content in contents}) > 1), shortest
    )


def _tear_bytes(rng: random.Random, old: bytes, new: bytes) -> bytes:
    kind = rng.randrange(6)
    if kind == 0:
        return old
    if kind == 1:
        return new
    if kind == 2:
        return new[: rng.randrange(len(new) + 1)]
    if kind == 3:
        return bytes(len(new))
    sectors = []
    for start in range(0, len(new), SECTOR):
        part = new[start : start + SECTOR]
        sectors.append(
            rng.choice(
                [part, old[start : start + len(part)].ljust(len(part), b"\0"), bytes(len(part))]
            )
        )
    return b"".join(sectors)


def _list_choices(
    rng: random.Random, tries: int
) -> Iterator[tuple[Callable[..., Any], Callable[..., Any]]]:
    """Yield choices: nothing written back, everything, names without data, data without names, then random ones."""

    def none(waiting: list[Entry]) -> list[Entry]:
        return []

    def everything(waiting: list[Entry]) -> list[Entry]:
        return waiting

    def some(waiting: list[Entry]) -> list[Entry]:
        share = rng.choice([0.2, 0.5, 0.8, 0.95])
        return _keep_consistent(waiting, [rng.random() < share for _ in waiting])

    def old(before: bytes, written: list[bytes]) -> bytes:
        return before

    def new(before: bytes, written: list[bytes]) -> bytes:
        return written[-1] if written else before

    def any_of(before: bytes, written: list[bytes]) -> bytes:
        return _tear(rng, before, written)

    yield none, old
    yield everything, new
    yield everything, old
    yield none, new
    for _ in range(tries):
        yield rng.choice([some, some, everything, none]), rng.choice([any_of, any_of, new, old])


def crash_states(ops: list[Any], tries: int, seed: int = 0) -> Iterator[tuple[Tree, list[Any]]]:
    """Yield (tree, promises made before the crash), each pair once, for a crash after every operation.

    tries: random choices for every operation, in addition to the four extremes.
    """
    rng = random.Random(seed)
    folders = {node for op in ops if isinstance(op, Entry) and op.is_folder for _, node in op.puts}
    disk = _Disk(folders)
    promises: list[Any] = []
    seen: set[bytes] = set()
    for op in ops:
        if isinstance(op, Mark):
            promises.append(op.value)
        disk.apply(op)
        for choose, torn in _list_choices(rng, tries):
            tree = disk.tree(choose, torn)
            digest = hashlib.sha256(repr((tree, promises[-1:])).encode()).digest()
            if digest not in seen:
                seen.add(digest)
                yield tree, list(promises)


def write_tree(tree: Tree, folder: Path) -> None:
    """Write a tree into a folder that is not there."""
    folder.mkdir()
    for name, content in tree.items():
        if isinstance(content, bytes):
            (folder / name).write_bytes(content)
        else:
            write_tree(content, folder / name)
