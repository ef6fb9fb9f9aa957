"""Texts to token ids, one by one or many in one batch, by the tokenizer's backend where it alone decides them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar, cast

from rl_core.data.completion_decoding import CompletionDecoder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


T = TypeVar("T")
_EncodingRequest = tuple[str, bool, bool]  # text, special, spelled


class TextEncoder:
    """Texts to token ids by the tokenizer's backend in Rust, where it alone decides them; else by the tokenizer.

    A call of a tokenizer makes masks, types and copies of all of them, which take longer than the ids of a short text.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._is_fast = find_fast_backend(tokenizer) is not None
        self._collected_requests: list[_EncodingRequest] | None = None  # while texts are collected
        self._encoded_requests: Iterator[tuple[_EncodingRequest, list[int]]] | None = (
            None  # while they are handed out
        )
        self._computed_values: list[Any] = []
        self._completion_decoder: CompletionDecoder | None = None

    def find_completion_decoder(self, prompt: str) -> CompletionDecoder:
        """Return the decoder of texts after a prompt; it is examined once."""
        if self._completion_decoder is None:
            header = self._encode_batch([prompt], False, False)[0]
            self._completion_decoder = CompletionDecoder(self._tokenizer, header)
        return self._completion_decoder

    def encode_text(
        self, text: str, *, add_special_tokens: bool = False, split_special_tokens: bool = False
    ) -> list[int]:
        """Return the token ids of a text.

        Args:
            add_special_tokens: include the tokens that the tokenizer puts around a sequence (BOS, EOS).
            split_special_tokens: treat special tokens in the text as plain characters.
        """
        request = text, add_special_tokens, split_special_tokens
        if self._collected_requests is not None:
            self._collected_requests.append(request)
            return []
        if self._encoded_requests is not None:
            encoded = next(self._encoded_requests, None)
            if encoded is not None and encoded[0] == request:
                return encoded[1]
            self._encoded_requests = None  # not as it was collected: from here on one by one
        return self._encode_batch([text], add_special_tokens, split_special_tokens)[0]

    @property
    def is_batching(self) -> bool:
        """True = within `run_together`, where ids must not be cached."""
        return self._collected_requests is not None or self._encoded_requests is not None

    def compute_once(self, compute: Callable[[], T]) -> T:
        """Return the result of `compute`, which `run_together` calls in its first pass only."""
        if self._collected_requests is not None:
            self._computed_values.append(compute())
            return cast(T, self._computed_values[-1])
        if self._encoded_requests is not None and self._computed_values:
            return cast(T, self._computed_values.pop(0))
        return compute()

    def run_together(self, jobs: Sequence[Callable[[], T]]) -> Iterator[T | Exception]:
        """Return the result, or error, of each job; their texts are encoded in one batch, a third faster.

        Each job is called twice: first all of them, to collect their texts, whose ids are empty then; then one after
        the other.
        The texts that a job encodes must not depend on ids.
        """
        self._collected_requests, self._computed_values = [], []
        per_work: list[list[Any]] = []
        with self._reset_batching():
            for work in jobs:
                start = len(self._computed_values)
                _capture_outcome(work)
                per_work.append(self._computed_values[start:])
            requests, self._collected_requests = self._collected_requests, None
            self._encoded_requests = zip(requests, self._encode_requests(requests), strict=True)
            for work, made in zip(jobs, per_work, strict=True):
                self._computed_values = made
                yield _capture_outcome(work)

    @contextmanager
    def _reset_batching(self) -> Iterator[None]:
        try:
            yield
        finally:
            self._collected_requests, self._encoded_requests, self._computed_values = None, None, []

    def _encode_requests(self, requests: Sequence[_EncodingRequest]) -> list[list[int]]:
        kinds: dict[tuple[bool, bool], list[int]] = defaultdict(list)
        for position, (_, special, spelled) in enumerate(requests):
            kinds[special, spelled].append(position)
        encoded: list[list[int]] = [[]] * len(requests)
        for kind, places in kinds.items():
            for position, ids in zip(
                places, self._encode_batch([requests[n][0] for n in places], *kind), strict=True
            ):
                encoded[position] = ids
        return encoded

    def _encode_batch(self, texts: list[str], special: bool, spelled: bool) -> list[list[int]]:
        if not self._is_fast:
            more = {"split_special_tokens": True} if spelled else {}
            return [
                cast(
                    list[int],
                    self._tokenizer(text, add_special_tokens=special, **more)["input_ids"],
                )
                for text in texts
            ]
        backend: Any = cast(Any, self._tokenizer).backend_tokenizer
        # As each call of the tokenizer sets them: other callers may have enabled padding or truncation.
        if backend.truncation is not None:
            backend.no_truncation()
        if backend.padding is not None:
            backend.no_padding()
        split = spelled or bool(getattr(self._tokenizer, "split_special_tokens", False))
        if backend.encode_special_tokens != split:
            backend.encode_special_tokens = split
        if len(texts) == 1:
            return [backend.encode(texts[0], add_special_tokens=special).ids]
        return [
            encoding.ids
            for encoding in backend.encode_batch_fast(texts, add_special_tokens=special)
        ]


def _capture_outcome(work: Callable[[], T]) -> T | Exception:
    try:
        return work()
    except Exception as error:
        return error


def find_fast_backend(tokenizer: PreTrainedTokenizerBase) -> Any:
    """Return the `tokenizers.Tokenizer` that alone decides a tokenizer's ids; None if its class adds something."""
    from transformers import PreTrainedTokenizerFast

    kind = type(tokenizer)
    if (
        not isinstance(tokenizer, PreTrainedTokenizerFast)
        or kind.__call__ is not PreTrainedTokenizerFast.__call__
    ):
        return None
    inner = "_encode_plus"  # what a call ends in; a class with another one is left to itself
    if getattr(kind, inner, None) is not getattr(PreTrainedTokenizerFast, inner, 0):
        return None
    return tokenizer.backend_tokenizer
