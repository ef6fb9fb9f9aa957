"""Token ids of the rows of a data file, some at a time: the work of each process of `tokenising`.

Rows to token ids, in several processes where there is enough to do; the result does not depend on their number.
"""

from __future__ import annotations

import functools
import logging
import pickle
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

from rl_core.data.chat import ChatRenderer, compute_tokenizer_digest
from rl_core.data.formats import RowKind
from rl_core.data.pairs import build_row_sides
from rl_core.data.recorded_rows import build_recorded_sequences
from rl_core.data.training_sequences import TokenChunk, build_token_chunk, build_training_sequences
from rl_core.errors import DataError
from rl_core.processes.process_pool import ConnectedChild, ProcessPool

Row = dict[str, Any]
ROWS_PER_ENCODING = 64  # rows whose texts are encoded together
RefusedRows = list[tuple[int, str]]  # (row, reason) of each row that has no tokens


@dataclass(frozen=True, slots=True)
class TokenisationJob:
    """Purpose that rows are tokenised for."""

    kind: RowKind
    loss_on: Literal["all", "last"] = "all"  # assistant turns of demonstrations with loss


def tokenize_chunk(
    renderer: ChatRenderer, job: TokenisationJob, rows: Sequence[Row], first: int
) -> tuple[TokenChunk, RefusedRows]:
    """Return the sequences of consecutive rows, and the rows that the template refuses.

    Of a demonstration those of `build_training_sequences`; of a preference row its sides, chosen first; of a labelled
    completion itself. A row's `max_tokens` cuts each.
    Args:
        first: number of the first of these rows.
    Raises: SettingsError for tools that the template does not take.
    """
    refused: RefusedRows = []
    is_recorded = any("sequences" in row for row in rows)
    tokenizer = compute_tokenizer_digest(renderer.tokenizer) if is_recorded else None

    def sequences() -> Iterator[tuple[int, int, Sequence[int], Sequence[bool]]]:
        for start in range(0, len(rows), ROWS_PER_ENCODING):
            works = [
                functools.partial(_tokenize_row, renderer, job, row, tokenizer)
                for row in rows[start : start + ROWS_PER_ENCODING]
            ]
            for number, result in enumerate(
                renderer.encoder.run_together(works), start=first + start
            ):
                if isinstance(result, DataError):
                    refused.append((number, str(result)))
                elif isinstance(result, Exception):
                    raise result
                else:
                    for prompt, ids, mask in result:
                        yield number, prompt, ids, mask

    return build_token_chunk(sequences()), refused


def _tokenize_row(
    renderer: ChatRenderer, job: TokenisationJob, row: Row, tokenizer: str | None
) -> list[tuple[int, list[int], list[bool]]]:
    """Return tokens of the prompt, ids and mask of each sequence of a row."""
    if job.kind == "demonstrations":
        limit = row.get("max_tokens")
        if "sequences" in row:
            size = len(renderer.tokenizer)
            sequences = build_recorded_sequences(row, tokenizer, size, job.loss_on, limit)
        else:
            sequences = build_training_sequences(
                renderer, row["messages"], row.get("tools"), job.loss_on, limit
            )
        return [(0, ids, mask) for ids, mask in sequences]
    sides = [side for side, _ in build_row_sides(row, renderer)]
    return [(len(s.prompt_ids), s.ids, [False] * len(s.prompt_ids) + s.loss_mask) for s in sides]


logger = logging.getLogger(__name__)

CHUNK_ROWS = 512  # rows of a chunk, whatever the number of processes
# Of text for each process: one takes about four seconds to start, in which another does 5 MB.
TEXT_BYTES_PER_PROCESS = 16 * 2**20

ChunkTokens = tuple[TokenChunk, RefusedRows]


def choose_num_processes(num_bytes: int) -> int:
    """Processes that pay for so much text: 1 = this one; at most torch's threads, as `threads` of a run sets them."""
    import torch  # here, as the rest of the module needs none of it

    return max(1, min(torch.get_num_threads(), num_bytes // TEXT_BYTES_PER_PROCESS))


def tokenize_rows(
    rows: Iterable[Row], renderer: ChatRenderer, job: TokenisationJob, num_processes: int = 1
) -> Iterator[ChunkTokens]:
    """Yield chunks of CHUNK rows as token ids, in order, and the rows that were refused.

    Args:
        num_processes: 1 = in this process; else so many others. If one fails, its chunk is tokenised here.
    Raises: SettingsError for tools that the template does not take.
    """
    chunks = _split_chunks(rows)
    if num_processes < 2:
        for first, some in chunks:
            yield tokenize_chunk(renderer, job, some, first)
        return
    with _TokenisingProcesses(renderer, job, num_processes) as children:
        for answer, first, some in children.iter_results(chunks):
            yield tokenize_chunk(renderer, job, some, first) if answer is None else answer


def _split_chunks(rows: Iterable[Row]) -> Iterator[tuple[int, list[Row]]]:
    """Yield (number of the first row, rows)."""
    rest, first = iter(rows), 0
    while some := list(islice(rest, CHUNK_ROWS)):
        yield first, some
        first += len(some)


class _TokenisingProcesses(ProcessPool[ConnectedChild]):
    """Processes that tokenise chunks, each driven by one thread of this process."""

    def __init__(self, renderer: ChatRenderer, job: TokenisationJob, count: int) -> None:
        super().__init__(count)
        self._count, self._digest, self._num_lost = count, renderer.digest, 0
        self._threads = ThreadPoolExecutor(count)
        try:
            setup = (renderer.tokenizer, renderer.settings, job)
            self._setup_message = pickle.dumps(setup, pickle.HIGHEST_PROTOCOL)
        except Exception as error:  # a tokenizer of the user's code may hold anything
            logger.info(
                "rows are tokenised in one process, as the tokenizer cannot be sent to others: %s",
                error,
            )
            self._num_lost = count

    def __enter__(self) -> _TokenisingProcesses:
        return self

    def __exit__(self, *_: object) -> None:
        self._num_lost = self._count  # no chunk starts another process
        for child in list(self._live_children):
            child.process.kill()  # its thread notices
        self._threads.shutdown(wait=True, cancel_futures=True)
        self.end_children()

    def iter_results(
        self, chunks: Iterable[tuple[int, list[Row]]]
    ) -> Iterator[tuple[ChunkTokens | None, int, list[Row]]]:
        """Yield the children's results, in the order of the chunks; None = tokenise the chunk in this process."""
        waiting: deque[tuple[Future[ChunkTokens | None], int, list[Row]]] = deque()
        for first, some in chunks:
            waiting.append(
                (self._threads.submit(self._tokenize_in_child, first, some), first, some)
            )
            if len(waiting) >= 2 * self._count:
                future, place, rows = waiting.popleft()
                yield future.result(), place, rows
        while waiting:
            future, place, rows = waiting.popleft()
            yield future.result(), place, rows

    def _tokenize_in_child(self, first: int, rows: list[Row]) -> ChunkTokens | None:
        if self._num_lost >= self._count:
            return None
        try:
            with self.use_child() as child:
                return _exchange_pickles(
                    child, pickle.dumps((first, rows), pickle.HIGHEST_PROTOCOL)
                )
        except Exception as error:
            self._num_lost += 1
            logger.warning(
                "a process that tokenises rows died or could not be started: %s %s",
                type(error).__name__,
                error,
            )
            return None

    def _start_child(self) -> ConnectedChild:
        # One thread each, without a GPU.
        variables = {
            "TOKENIZERS_PARALLELISM": "false",
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
        }
        return ConnectedChild("rl_core.data.tokenising_child", variables, quiet=True)

    def _set_up_child(self, child: ConnectedChild) -> None:
        if _exchange_pickles(child, self._setup_message) != self._digest:
            raise ValueError("its chat template is another one")


def _exchange_pickles(child: ConnectedChild, message: bytes) -> Any:
    child.send_bytes(message)
    return pickle.loads(child.recv_bytes())
