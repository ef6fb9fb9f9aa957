"""Training sequences of a demonstration: the turns that carry loss, and a history without thoughts.

Token ids and loss masks of many sequences in 5 bytes a token, in memory or in a mapped file; lists take 44.

Token rows in Arrow files (IPC), read by mapping them into memory.
"""

from __future__ import annotations

import bisect
import importlib.util
import itertools
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal, cast, overload

import numpy as np
from numpy.typing import NDArray

from rl_core.data.chat import ChatRenderer
from rl_core.data.images import ImageReader, find_image_reader
from rl_core.data.row_sequences import CompressedRows
from rl_core.errors import CorruptError, DataError
from rl_core.types import ImagePixels, Message

if TYPE_CHECKING:
    import pyarrow


TrainingSequence = tuple[list[int], list[bool]]  # token ids and loss mask; True = carries loss


def build_training_sequences(
    renderer: ChatRenderer,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None = None,
    loss_on: Literal["all", "last"] = "all",
    max_tokens: int | None = None,
) -> list[TrainingSequence]:
    """Build the sequences of one conversation; each turn has loss in exactly one of them.

    With `history_thoughts: keep`, one sequence holds every turn as it was written, as a rollout does. With `template`,
    each
    turn follows the history as the template renders it for that turn; consecutive turns share a sequence as long as
    that
    history begins with the tokens before it; a template that drops thoughts starts a new one.
    A message of the role "text" alone is plain text: every token after the first carries loss.
    Args:
        tools: JSON schemas passed to the template.
        loss_on: assistant turns with loss, all or the last one; a message with `weight` 0 has none either way.
        max_tokens: tokens of a sequence that are used, from its start; a sequence without loss among them is dropped.
    Raises: DataError if no turn carries loss, none of it is left, or the template refuses the messages;
        SettingsError for tools that it does not take.
    """
    return truncate_sequences(
        _build_full_sequences(renderer.with_tools(tools), messages, loss_on), max_tokens
    )


def truncate_sequences(
    sequences: list[TrainingSequence], max_tokens: int | None
) -> list[TrainingSequence]:
    """Return the first tokens of each sequence, without sequences that have no loss left; None = all.

    Raises: DataError if none is left.
    """
    if max_tokens is None:
        return sequences
    cut = [(ids[:max_tokens], mask[:max_tokens]) for ids, mask in sequences]
    if not any(any(mask) for _, mask in cut):
        raise DataError(f"nothing that carries loss is among the first {max_tokens} tokens")
    return [(ids, mask) for ids, mask in cut if any(mask)]


def _build_full_sequences(
    renderer: ChatRenderer, messages: Sequence[Message], loss_on: Literal["all", "last"]
) -> list[TrainingSequence]:
    if len(messages) == 1 and messages[0]["role"] == "text":
        return [renderer.encode_plain_text(messages[0]["content"])]
    if loss_on == "last":
        messages = [*map(_drop_message_loss, messages[:-1]), messages[-1]]
    if all(message.get("weight", 1) == 0 for message in messages if message["role"] == "assistant"):
        raise DataError("no assistant message carries loss: all of them have weight 0")
    if renderer.settings.history_thoughts == "keep":
        return [renderer.encode_conversation(messages)]
    return [(ids, mask) for ids, mask in _render_sequences(renderer, messages) if any(mask)]


def _drop_message_loss(message: Message) -> Message:
    return cast(Message, {**message, "weight": 0}) if message["role"] == "assistant" else message


def _render_sequences(
    renderer: ChatRenderer, messages: Sequence[Message]
) -> Iterator[TrainingSequence]:
    """Return sequences in which every turn follows the prompt that the template renders for it."""
    if not messages or messages[-1]["role"] != "assistant":
        raise DataError("a training conversation must end with an assistant message")
    ids: list[int] = []
    mask: list[bool] = []
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt = renderer.prompt_ids(messages[:index])
        if prompt[: len(ids)] != ids:
            yield ids, mask
            ids, mask = [], []
        action = renderer.action_ids(renderer.render_assistant_text(message))
        mask += [False] * (len(prompt) - len(ids)) + [message.get("weight", 1) != 0] * len(action)
        ids = [*prompt, *action]
    yield ids, mask


Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class TokenChunk:
    """Consecutive sequences, stored end to end."""

    rows: Ints  # [sequences] index of the row of the data that each is of, ascending
    prompts: NDArray[
        np.int32
    ]  # [sequences] tokens of the prompt of a preference's side; 0 for a demonstration
    starts: Ints  # [sequences + 1] places of the first tokens, and the end
    ids: NDArray[np.int32]  # [tokens]
    mask: NDArray[np.uint8]  # [tokens] 1 = carries loss


def build_token_chunk(
    sequences: Iterable[tuple[int, int, Sequence[int], Sequence[bool]]],
) -> TokenChunk:
    """Pack sequences (row, tokens of the prompt, token ids, loss mask) in compact form.

    Raises: ValueError if ids and mask differ in length.
    """
    rows, prompts, starts, ids, mask = (
        array("q"),
        array("i"),
        array("q", [0]),
        array("i"),
        bytearray(),
    )
    for row, prompt, some_ids, some_mask in sequences:
        if len(some_ids) != len(some_mask):
            raise ValueError(f"{len(some_ids)} token ids, but a loss mask of {len(some_mask)}")
        rows.append(row)
        prompts.append(prompt)
        ids.extend(some_ids)
        mask.extend(some_mask)
        starts.append(len(ids))
    return TokenChunk(
        np.asarray(rows, np.int64),
        np.asarray(prompts, np.int32),
        np.asarray(starts, np.int64),
        np.asarray(ids, np.int32),
        np.frombuffer(bytes(mask), np.uint8),
    )


class TokenRows(Sequence[TrainingSequence]):
    """Sequences (token ids, loss mask) of chunks; lists are built on each access."""

    def __init__(
        self,
        chunks: Sequence[TokenChunk] = (),
        places: Ints | None = None,
        limits: Sequence[int | None] | None = None,
        recipe: tuple[Any, ...] | None = None,
    ) -> None:
        """Combine the rows of chunks, in their order.

        Args:
            places: indices of the sequences that are used, in this order; None = all.
            limits: tokens of a sequence that are used, for each chunk; None = all.
            recipe: a function and its arguments that rebuild the rows in another process, where chunks are mapped.
        """
        self._chunks, self._indices, self._rebuild = list(chunks), places, recipe
        self._limits = [None] * len(self._chunks) if limits is None else list(limits)
        self._firsts = [0, *itertools.accumulate(len(chunk.rows) for chunk in self._chunks)]

    @classmethod
    def from_sequences(cls, sequences: Iterable[TrainingSequence]) -> TokenRows:
        """Build rows of one sequence each."""
        return cls(
            [build_token_chunk((row, 0, ids, mask) for row, (ids, mask) in enumerate(sequences))]
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return self._rebuild or (TokenRows, (self._chunks, self._indices, self._limits))

    def select_sequences(self, indices: Ints, max_tokens: int | None = None) -> TokenRows:
        """Return the sequences at these indices, in this order, each cut at `max_tokens` tokens. Copies none."""
        indices = np.asarray(indices, np.int64)
        limits = [
            min((n for n in (limit, max_tokens) if n is not None), default=None)
            for limit in self._limits
        ]
        inner = indices if self._indices is None else self._indices[indices]
        return TokenRows(
            self._chunks, inner, limits, (TokenRows.select_sequences, (self, indices, max_tokens))
        )

    def join_rows(self, other: TokenRows) -> TokenRows:
        """Return these sequences and then the others."""
        mine, theirs = (
            np.arange(len(some)) if some._indices is None else some._indices
            for some in (self, other)
        )
        return TokenRows(
            [*self._chunks, *other._chunks],
            np.concatenate([mine, theirs + self._firsts[-1]]),
            [*self._limits, *other._limits],
            (TokenRows.join_rows, (self, other)),
        )

    @cached_property
    def lengths(self) -> Ints:
        """Tokens of each sequence."""
        return self._pick_sequences(
            ends - chunk.starts[:-1] for chunk, ends in self._iter_chunk_ends()
        )

    @cached_property
    def rows(self) -> Ints:
        """Row of the data that each sequence is of."""
        return self._pick_sequences(chunk.rows for chunk in self._chunks)

    @cached_property
    def prompts(self) -> Ints:
        """Tokens of each sequence's prompt; 0 for demonstrations."""
        return self._pick_sequences(chunk.prompts for chunk in self._chunks)

    @cached_property
    def loss_tokens(self) -> Ints:
        """Tokens of each sequence that carry loss."""
        return self._pick_sequences(
            _count_loss_tokens(chunk, ends) for chunk, ends in self._iter_chunk_ends()
        )

    @property
    def row_starts(self) -> Ints:
        """Place of the first sequence of each row."""
        return np.flatnonzero(np.diff(self.rows, prepend=-1))

    @property
    def num_rows(self) -> int:
        """Rows of the data that have a sequence here."""
        return len(self.row_starts)

    @property
    def num_tokens(self) -> int:
        """Tokens of all sequences."""
        return int(self.lengths.sum())

    @property
    def num_bytes(self) -> int:
        """Bytes that tokens, masks and places of all chunks take, mapped ones included."""
        parts = [getattr(chunk, name) for chunk in self._chunks for name in TokenChunk.__slots__]
        return sum(part.nbytes for part in parts) + (
            0 if self._indices is None else self._indices.nbytes
        )

    def find_sequence_indices(self, rows: Sequence[int]) -> Ints:
        """Return the indices of the sequences of these rows of the data, which ascend as rows do here."""
        wanted = np.asarray(rows, np.int64)
        starts, ends = (np.searchsorted(self.rows, wanted, side) for side in ("left", "right"))
        counts = ends - starts
        # of each row its first place, and the number of each place within its row
        first, within = (
            np.repeat(starts, counts),
            np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts),
        )
        return first + within

    def select_rows(self, rows: Sequence[int], max_tokens: int | None = None) -> TokenRows:
        """Return the sequences of these rows of the data, see `select_sequences`."""
        return self.select_sequences(self.find_sequence_indices(rows), max_tokens)

    def __len__(self) -> int:
        return self._firsts[-1] if self._indices is None else len(self._indices)

    @overload
    def __getitem__(self, index: int) -> TrainingSequence: ...
    @overload
    def __getitem__(self, index: slice) -> list[TrainingSequence]: ...
    def __getitem__(self, index: int | slice) -> TrainingSequence | list[TrainingSequence]:
        if isinstance(index, slice):
            return [self[place] for place in range(*index.indices(len(self)))]
        ids, mask = self.read_arrays(
            range(len(self))[index]
        )  # raises IndexError; negative ones count from the end
        return ids.tolist(), mask.view(np.bool_).tolist()

    def read_arrays(self, index: int) -> tuple[NDArray[np.int32], NDArray[np.uint8]]:
        """Return token ids and loss mask of a sequence, from 0, as views."""
        place = index if self._indices is None else int(self._indices[index])
        number = bisect.bisect_right(self._firsts, place) - 1
        chunk, inner, limit = (
            self._chunks[number],
            place - self._firsts[number],
            self._limits[number],
        )
        start, end = int(chunk.starts[inner]), int(chunk.starts[inner + 1])
        end = end if limit is None else min(end, start + limit)
        return chunk.ids[start:end], chunk.mask[start:end]

    def _iter_chunk_ends(self) -> Iterator[tuple[TokenChunk, Ints]]:
        """Yield chunks with the index after each sequence's last used token."""
        for chunk, limit in zip(self._chunks, self._limits, strict=True):
            ends = chunk.starts[1:]
            yield chunk, ends if limit is None else np.minimum(ends, chunk.starts[:-1] + limit)

    def _pick_sequences(self, parts: Iterable[NDArray[Any]]) -> Ints:
        indices = np.concatenate([np.zeros(0, np.int64), *parts]).astype(np.int64, copy=False)
        return indices if self._indices is None else indices[self._indices]


ImageSequence = tuple[list[int], list[bool], tuple[ImagePixels, ...]]


class ImageRows(Sequence[ImageSequence]):
    """Sequences with the images of their rows, which are read on each access.

    A sequence that was cut has the images whose tokens it holds; it ends before one that was cut itself.
    """

    def __init__(
        self, tokens: TokenRows, images: CompressedRows, reader: ImageReader, image_id: int
    ) -> None:
        """Combine them.

        Args:
            images: {"images": data URLs} of each sequence's row.
            image_id: the token that stands for a part of an image.
        """
        self.tokens, self._images, self._reader = tokens, images, reader
        self._image_id = image_id

    @property
    def num_rows(self) -> int:
        """Rows of the data that have a sequence here."""
        return self.tokens.num_rows

    @property
    def num_tokens(self) -> int:
        """Tokens of all sequences."""
        return self.tokens.num_tokens

    def __len__(self) -> int:
        return len(self.tokens)

    @overload
    def __getitem__(self, index: int) -> ImageSequence: ...
    @overload
    def __getitem__(self, index: slice) -> list[ImageSequence]: ...
    def __getitem__(self, index: int | slice) -> ImageSequence | list[ImageSequence]:
        if isinstance(index, slice):
            return [self[place] for place in range(*index.indices(len(self)))]
        ids, mask = self.tokens[index]
        places = [place for place, token in enumerate(ids) if token == self._image_id]
        images: list[ImagePixels] = []
        num_used = 0
        for image in self._reader.read_images(self._images[index]["images"]):
            if num_used + image.num_tokens > len(places):
                end = places[num_used] if num_used < len(places) else len(ids)
                return ids[:end], mask[:end], tuple(images)
            num_used += image.num_tokens
            images.append(image)
        return ids, mask, tuple(images)


def attach_images(
    tokens: TokenRows, rows: Iterable[Mapping[str, Any]], renderer: ChatRenderer
) -> TokenRows | ImageRows:
    """Return demonstrations with the images of their messages; the same ones if no row has an image.

    Args:
        rows: those that the sequences are of, in order.
    Raises: DataError for sequences that are not one a row.
    """
    images = CompressedRows(
        {
            "images": [
                url for message in row.get("messages", ()) for url in message.get("images", ())
            ]
        }
        for row in rows
    )
    reader = find_image_reader(renderer.tokenizer)
    if reader is None or not any(row["images"] for row in images):
        return tokens
    if len(tokens) != len(images):
        raise DataError(f"{len(images)} rows with images have {len(tokens)} sequences")
    image_id = renderer.tokenizer.convert_tokens_to_ids(reader.tokens[1])
    assert isinstance(image_id, int)
    return ImageRows(tokens, images, reader, image_id)


def _count_loss_tokens(chunk: TokenChunk, ends: Ints) -> Ints:
    """Count the tokens with loss of each sequence up to its end."""
    before = np.concatenate([[0], np.cumsum(chunk.mask, dtype=np.int64)])
    counts: Ints = before[ends] - before[chunk.starts[:-1]]
    return counts


def is_pyarrow_available() -> bool:
    """Return whether pyarrow is installed."""
    return importlib.util.find_spec("pyarrow") is not None


def write_token_table(file: IO[bytes], chunks: Iterable[TokenChunk]) -> None:
    """Write one record batch a chunk: row, prompt (its tokens), ids, mask."""
    import pyarrow as pa

    with pa.ipc.new_file(file, _build_table_schema()) as writer:
        for chunk in chunks:
            starts = pa.array(chunk.starts)
            columns = [
                pa.array(chunk.rows),
                pa.array(chunk.prompts),
                pa.LargeListArray.from_arrays(starts, pa.array(chunk.ids)),
                pa.LargeListArray.from_arrays(starts, pa.array(chunk.mask)),
            ]
            writer.write_batch(pa.record_batch(columns, schema=_build_table_schema()))


def read_token_table(path: Path) -> TokenRows:
    """Map the rows of a file written by `write_token_table`; copy nothing. Raises: CorruptError."""
    chunks = []
    for batch in _open_record_batches(path, _build_table_schema()):
        ids, mask = batch.column(2), batch.column(3)
        chunks.append(
            TokenChunk(
                batch.column(0).to_numpy(),
                batch.column(1).to_numpy(),
                ids.offsets.to_numpy(),
                ids.values.to_numpy(),
                mask.values.to_numpy(),
            )
        )
    return TokenRows(chunks, recipe=(read_token_table, (path,)))


def write_integer_column(file: IO[bytes], values: NDArray[np.int64]) -> None:
    """Write one column of integers."""
    import pyarrow as pa

    schema = pa.schema([pa.field("place", pa.int64(), nullable=False)])
    with pa.ipc.new_file(file, schema) as writer:
        writer.write_batch(pa.record_batch([pa.array(values)], schema=schema))


def read_integer_column(path: Path) -> NDArray[np.int64]:
    """Read the integers of a file written by `write_integer_column`. Raises: CorruptError."""
    parts: list[NDArray[np.int64]] = [
        batch.column(0).to_numpy() for batch in _open_record_batches(path, None)
    ]
    return np.concatenate([np.zeros(0, np.int64), *parts])


def _build_table_schema() -> pyarrow.Schema:
    import pyarrow as pa

    return pa.schema(
        [
            pa.field("row", pa.int64(), nullable=False),
            pa.field("prompt", pa.int32(), nullable=False),
            pa.field("ids", pa.large_list(pa.int32()), nullable=False),
            pa.field("mask", pa.large_list(pa.uint8()), nullable=False),
        ]
    )


def _open_record_batches(path: Path, schema: pyarrow.Schema | None) -> list[Any]:
    import pyarrow as pa

    try:
        reader = pa.ipc.open_file(pa.memory_map(str(path)))
        if schema is not None and reader.schema != schema:
            raise CorruptError(f"{path}: has the columns {reader.schema.names}")
        return [reader.get_batch(number) for number in range(reader.num_record_batches)]
    except (pa.ArrowException, OSError) as error:
        raise CorruptError(f"{path}: cannot be read as Arrow: {error}") from error
