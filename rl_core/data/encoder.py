"""Token ids of texts, as `tokenizer(text)` gives them without what it makes around them, of many texts at once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar, cast

if TYPE_CHECKING:  # for annotations only; importing transformers takes seconds
    from transformers import PreTrainedTokenizerBase

__all__ = ["TextEncoder", "backend_of"]

T = TypeVar("T")
_Asked = tuple[str, bool, bool]  # text, special, spelled


class TextEncoder:
    """Texts to token ids by the tokenizer's backend in Rust, where it alone decides them; else by the tokenizer.

    A call of a tokenizer makes masks, types and copies of all of them, which take longer than the ids of a short text.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._is_fast = backend_of(tokenizer) is not None
        self._asked: list[_Asked] | None = None  # while texts are collected
        self._known: Iterator[tuple[_Asked, list[int]]] | None = None  # while they are given out
        self._made: list[Any] = []

    def ids(self, text: str, *, special: bool = False, spelled: bool = False) -> list[int]:
        """Token ids of a text.

        Args:
            special: with the tokens that the tokenizer puts around a sequence (BOS, EOS).
            spelled: special tokens in the text are plain characters.
        """
        asked = text, special, spelled
        if self._asked is not None:
            self._asked.append(asked)
            return []
        if self._known is not None:
            found = next(self._known, None)
            if found is not None and found[0] == asked:
                return found[1]
            self._known = None  # not as it was collected: from here on one by one
        return self._batch([text], special, spelled)[0]

    @property
    def is_batching(self) -> bool:
        """True = within `together`, where ids must not be kept for later."""
        return self._asked is not None or self._known is not None

    def once(self, make: Callable[[], T]) -> T:
        """Result of `make`, which `together` calls in its first pass alone."""
        if self._asked is not None:
            self._made.append(make())
            return cast(T, self._made[-1])
        if self._known is not None and self._made:
            return cast(T, self._made.pop(0))
        return make()

    def together(self, works: Sequence[Callable[[], T]]) -> Iterator[T | Exception]:
        """Result, or error, of each of these, whose texts are encoded together: in a third less time.

        Each is called twice: first all, to collect their texts, whose ids are empty then; then one after the other.
        Which texts it asks for must not depend on ids.
        """
        self._asked, self._made = [], []
        per_work: list[list[Any]] = []
        with self._one_by_one_again():
            for work in works:
                start = len(self._made)
                _outcome(work)
                per_work.append(self._made[start:])
            asked, self._asked = self._asked, None
            self._known = zip(asked, self._encoded(asked), strict=True)
            for work, made in zip(works, per_work, strict=True):
                self._made = made
                yield _outcome(work)

    @contextmanager
    def _one_by_one_again(self) -> Iterator[None]:
        try:
            yield
        finally:
            self._asked, self._known, self._made = None, None, []

    def _encoded(self, asked: Sequence[_Asked]) -> list[list[int]]:
        kinds: dict[tuple[bool, bool], list[int]] = defaultdict(list)
        for place, (_, special, spelled) in enumerate(asked):
            kinds[special, spelled].append(place)
        found: list[list[int]] = [[]] * len(asked)
        for kind, places in kinds.items():
            for place, ids in zip(places, self._batch([asked[n][0] for n in places], *kind), strict=True):
                found[place] = ids
        return found

    def _batch(self, texts: list[str], special: bool, spelled: bool) -> list[list[int]]:
        if not self._is_fast:
            more = {"split_special_tokens": True} if spelled else {}
            return [
                cast(list[int], self._tokenizer(text, add_special_tokens=special, **more)["input_ids"])
                for text in texts
            ]
        backend: Any = cast(Any, self._tokenizer).backend_tokenizer
        # As each call of the tokenizer sets them: others may have asked it for padding, or cut with it.
        if backend.truncation is not None:
            backend.no_truncation()
        if backend.padding is not None:
            backend.no_padding()
        split = spelled or bool(getattr(self._tokenizer, "split_special_tokens", False))
        if backend.encode_special_tokens != split:
            backend.encode_special_tokens = split
        if len(texts) == 1:
            return [backend.encode(texts[0], add_special_tokens=special).ids]
        return [encoding.ids for encoding in backend.encode_batch_fast(texts, add_special_tokens=special)]


def _outcome(work: Callable[[], T]) -> T | Exception:
    try:
        return work()
    except Exception as error:
        return error


def backend_of(tokenizer: PreTrainedTokenizerBase) -> Any:
    """The `tokenizers.Tokenizer` that alone decides a tokenizer's ids; None where its class adds something."""
    from transformers import PreTrainedTokenizerFast

    kind = type(tokenizer)
    if not isinstance(tokenizer, PreTrainedTokenizerFast) or kind.__call__ is not PreTrainedTokenizerFast.__call__:
        return None
    inner = "_encode_plus"  # what a call ends in; a class with another one is left to itself
    if getattr(kind, inner, None) is not getattr(PreTrainedTokenizerFast, inner, 0):
        return None
    return tokenizer.backend_tokenizer
