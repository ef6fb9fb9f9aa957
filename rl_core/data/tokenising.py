"""Rows to token ids, in several processes where there is enough to do; the result does not depend on their number."""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import queue
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import Any

from rl_core.data.chat import ChatRenderer
from rl_core.data.row_tokens import Job, Refusals, Row, chunk_tokens
from rl_core.data.token_rows import TokenChunk
from rl_core.importing import child_import_path

__all__ = ["CHUNK", "processes_for", "tokenised"]

logger = logging.getLogger(__name__)

CHUNK = 512  # rows of a chunk, whatever the number of processes
# Of text for each process: one takes about four seconds to start, in which another does 5 MB.
TEXT_EACH = 16 * 2**20

Found = tuple[TokenChunk, Refusals]


def processes_for(num_bytes: int) -> int:
    """Processes that pay for so much text: 1 = this one; at most torch's threads, as `threads` of a run sets them."""
    import torch  # here, as the rest of the module needs none of it

    return max(1, min(torch.get_num_threads(), num_bytes // TEXT_EACH))


def tokenised(rows: Iterable[Row], renderer: ChatRenderer, job: Job, processes: int = 1) -> Iterator[Found]:
    """Chunks of CHUNK rows as token ids, in order, and the rows that were refused.

    Args:
        processes: 1 = in this process; else so many others. One that fails is left out, and its chunk done here.
    Raises: SettingsError for tools that the template does not take.
    """
    chunks = _chunks(rows)
    if processes < 2:
        for first, some in chunks:
            yield chunk_tokens(renderer, job, some, first)
        return
    with _Children(renderer, job, processes) as children:
        for answer, first, some in children.answers(chunks):
            yield chunk_tokens(renderer, job, some, first) if answer is None else answer


def _chunks(rows: Iterable[Row]) -> Iterator[tuple[int, list[Row]]]:
    """(number of the first row, rows)."""
    rest, first = iter(rows), 0
    while some := list(islice(rest, CHUNK)):
        yield first, some
        first += len(some)


class _Children:
    """Processes that tokenise chunks, each asked by a thread of this one."""

    def __init__(self, renderer: ChatRenderer, job: Job, count: int) -> None:
        self._setup, self._digest, self._count = (renderer.tokenizer, renderer.settings, job), renderer.digest, count
        self._free: queue.SimpleQueue[subprocess.Popen[bytes] | None] = queue.SimpleQueue()
        self._started: list[subprocess.Popen[bytes]] = []
        self._threads, self._lock = ThreadPoolExecutor(count), threading.Lock()
        self._greeting, self._greeted, self._lost = b"", set[int](), 0

    def __enter__(self) -> _Children:
        try:
            self._greeting = pickle.dumps(self._setup, pickle.HIGHEST_PROTOCOL)
        except Exception as error:  # a tokenizer of the user's code may hold anything
            logger.info("rows are tokenised in one process, as the tokenizer cannot be sent to others: %s", error)
        for _ in range(self._count):
            child = _start() if self._greeting else None
            self._put_back(child)
            if child is not None:
                self._started.append(child)
        return self

    def __exit__(self, *_: object) -> None:
        for child in self._started:
            child.kill()
        self._threads.shutdown(wait=True, cancel_futures=True)
        for child in self._started:
            with contextlib.suppress(OSError):
                child.communicate()

    def answers(self, chunks: Iterable[tuple[int, list[Row]]]) -> Iterator[tuple[Found | None, int, list[Row]]]:
        """Findings of the children, in the order of the chunks; None = the chunk is to be done here."""
        waiting: deque[tuple[Future[Found | None], int, list[Row]]] = deque()
        for first, some in chunks:
            waiting.append((self._threads.submit(self._ask, first, some), first, some))
            if len(waiting) >= 2 * self._count:
                future, place, rows = waiting.popleft()
                yield future.result(), place, rows
        while waiting:
            future, place, rows = waiting.popleft()
            yield future.result(), place, rows

    def _ask(self, first: int, rows: list[Row]) -> Found | None:
        child = self._free.get()
        try:
            if child is None:
                return None
            if child.pid not in self._greeted:
                self._greet(child)
            return _exchange(child, (first, rows))
        except Exception as error:
            logger.warning("a process that tokenised rows is gone: %s %s", type(error).__name__, error)
            child = None
            return None
        finally:
            self._put_back(child)

    def _put_back(self, child: subprocess.Popen[bytes] | None) -> None:
        """Make a child free for the next chunk; None is one that is gone, and waits for none while another is left."""
        if child is None:
            with self._lock:
                self._lost += 1
                if self._lost < self._count:
                    return
        self._free.put(child)

    def _greet(self, child: subprocess.Popen[bytes]) -> None:
        """Tell a child what to do, and wait until it has started."""
        assert child.stdin is not None and child.stdout is not None
        child.stdin.write(self._greeting)
        child.stdin.flush()
        if pickle.load(child.stdout) != self._digest:
            raise ValueError("its chat template is another one")
        self._greeted.add(child.pid)


def _start() -> subprocess.Popen[bytes] | None:
    # One thread each, without a GPU; where this process found its modules, the child does too.
    variables = {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    try:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "rl_core.data.tokenising_child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, **variables, "PYTHONPATH": child_import_path()},
        )
    except OSError as error:
        logger.warning("a process to tokenise rows cannot be started: %s", error)
        return None


def _exchange(child: subprocess.Popen[bytes], request: Any) -> Found | None:
    assert child.stdin is not None and child.stdout is not None
    child.stdin.write(pickle.dumps(request, pickle.HIGHEST_PROTOCOL))
    child.stdin.flush()
    found: Found | None = pickle.load(child.stdout)
    return found
