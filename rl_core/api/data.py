"""The data arguments of the Python API: prompts, demonstrations and preference pairs, from files or lists."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Literal, TypeVar

from rl_core.data.chat import ChatRenderer
from rl_core.data.formats import Row
from rl_core.data.pairs import PreferencePair, PreferenceSplit, PreferenceUse, build_pair_rows
from rl_core.data.records import (
    PromptRows,
    Records,
    RowSource,
    read_demonstrations,
    read_preferences,
    read_prompt_rows,
    read_prompts,
)
from rl_core.data.row_sequences import select_rows
from rl_core.data.splits import (
    count_overlap,
    extract_opening_text,
    extract_prompt_text,
    normalize_prompt,
    split_indices,
)
from rl_core.data.token_cache import (
    TokenCache,
    TokenizedRows,
    compute_rows_digest,
    estimate_text_bytes,
)
from rl_core.data.tokenising import TokenisationJob
from rl_core.data.training_sequences import TokenRows, TrainingSequence
from rl_core.environments.environment import Environment
from rl_core.environments.prompts import Prompts
from rl_core.errors import DataError, SettingsError

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True)
class DataSplit(Generic[T]):
    """Rows to train on and rows held out, and the digests of what they were read from."""

    train: Sequence[T]
    heldout: Sequence[T]
    digest: str


def resolve_environment(
    environment: Environment | None,
    prompts: RowSource | None,
    heldout_prompts: RowSource | None,
    system: str = "",
) -> tuple[Environment, str]:
    """The environment to act in, and a digest of the prompts ("" where they are not rows).

    Raises: SettingsError unless exactly one of the two is given.
    """
    if (environment is None) == (prompts is None):
        state = "both are given" if prompts is not None else "neither is given"
        raise SettingsError(f"environment, prompts: {state}; hand in one of them")
    if environment is not None:
        if isinstance(environment, type) and issubclass(environment, Environment):
            raise SettingsError(
                f"environment: {environment.__name__} is a class; hand in {environment.__name__}()"
            )
        if not isinstance(environment, Environment):
            raise SettingsError(
                f"environment: {type(environment).__name__} is no rl_core.Environment; a name from a configuration "
                "goes through rl_core.make_environment(name, options)"
            )
        if heldout_prompts is not None or system:
            raise SettingsError(
                "heldout_prompts, system: go with prompts; an environment has its own"
            )
        return environment, ""
    assert prompts is not None
    rows = _read_prompts(prompts)
    heldout = _read_prompts(heldout_prompts) if heldout_prompts is not None else None
    digest = rows.digest + (heldout.digest if heldout is not None else "")
    return Prompts(rows.rows, heldout.rows if heldout is not None else (), system=system), digest


def _read_prompts(source: RowSource) -> PromptRows | Records:
    """Rows of a file or a folder, or in memory."""
    if not isinstance(source, str | Path):
        return read_prompts(source)
    try:
        return read_prompt_rows(source)
    except SettingsError as error:
        text = str(error).replace("options.path: ", "").replace("options.prompt: ", "")
        raise DataError(f"prompts: {text}") from error


def check_prompt_lengths(
    environment: Environment,
    renderer: ChatRenderer,
    context: int,
    splits: Sequence[str] = ("train", "heldout"),
) -> None:
    """Refuse prompts that leave no room for an answer, before anything is played; other environments pass.

    Raises: DataError naming the first rows.
    """
    if not isinstance(environment, Prompts):
        return
    found, count = [], 0
    for split in splits:
        for level in environment.levels:
            for seed in environment.seeds_of(split, level):
                count += 1
                length = len(renderer.prompt_ids(environment.episode(seed, level).reset()))
                if length >= context:
                    row = seed - environment.seeds(split).start
                    found.append(
                        f"{'prompts' if split == 'train' else 'heldout_prompts'}[{row}]: {length} tokens"
                    )
    if found:
        listed = "".join(f"\n  {line}" for line in found[:10]) + (
            "\n  ..." if len(found) > 10 else ""
        )
        raise DataError(
            f"{len(found)} of {count} prompts leave no room for an answer in a context of {context} tokens:{listed}\n"
            "Leave them out, or take a model with a longer context"
        )


def load_conversations(
    data: RowSource,
    heldout: RowSource | float,
    renderer: ChatRenderer,
    context: int,
    seed: int,
    loss_on: Literal["all", "last"] = "all",
    folder: Path | None = None,
) -> DataSplit[TrainingSequence]:
    """Demonstrations as (token ids, loss mask), `heldout` of them (a share by prompt, or rows of their own) held out.

    Args:
        folder: keeps token ids, so that a resumed run does not make them again.
    Raises: RecordsError listing bad rows, those longer than the context among them.
    """
    reader = _RowReader(TokenisationJob("demonstrations", loss_on), renderer, context, folder)
    parts = _split_rows(
        data,
        heldout,
        reader,
        lambda row: extract_opening_text(row["messages"]),
        seed,
        fallback_key=lambda row: str(row["messages"][:-1]),
    )
    return DataSplit(parts.train.sequences, parts.heldout.sequences, parts.digest)


def load_preference_pairs(
    data: RowSource,
    heldout: RowSource | float,
    renderer: ChatRenderer,
    context: int,
    seed: int,
    use: PreferenceUse = "dpo",
    folder: Path | None = None,
) -> DataSplit[PreferencePair]:
    """Preference rows as the pairs of a loss or of a reward model; arguments and errors as `conversations`.

    `kto` takes labelled completions, and both sides of preference rows; the others take preference rows alone. Only
    `reward_model` takes a `margin`.
    Args:
        use: the loss, or "reward_model".
    Raises: DataError naming a row that does not go with the loss.
    """
    reader = _RowReader(TokenisationJob("preferences"), renderer, context, folder)
    parts = _split_rows(data, heldout, reader, lambda row: extract_prompt_text(row["prompt"]), seed)
    train = PreferenceSplit.from_rows(parts.train.sequences, parts.train.rows, use, "training")
    rest = PreferenceSplit.from_rows(parts.heldout.sequences, parts.heldout.rows, use, "held-out")
    pairs = build_pair_rows(train, rest, use, seed)
    return DataSplit(*pairs, parts.digest)


@dataclass(frozen=True)
class _TokenizedRows:
    """Rows and their sequences."""

    rows: Sequence[Row]
    sequences: TokenRows


@dataclass(frozen=True)
class _TokenizedSplit:
    train: _TokenizedRows
    heldout: _TokenizedRows
    digest: str


class _RowReader:
    """Reads rows, and tokenises each once."""

    def __init__(
        self, job: TokenisationJob, renderer: ChatRenderer, context: int, folder: Path | None
    ) -> None:
        self._job, self._renderer, self._context = job, renderer, context
        self._cache = TokenCache(folder)

    def __call__(self, source: RowSource) -> tuple[Records, TokenRows]:
        found: list[TokenizedRows] = []

        def check(rows: Sequence[Row]) -> list[str]:
            found.append(
                self._cache.load_or_tokenize(
                    compute_rows_digest(rows),
                    lambda: rows,
                    self._renderer,
                    self._job,
                    estimate_text_bytes(rows),
                )
            )
            return found[0].list_refusal_reasons(
                len(rows), self._context, f"the context holds {self._context}"
            )

        read = read_demonstrations if self._job.kind == "demonstrations" else read_preferences
        return read(source, check_rows=check), found[0].rows


def _split_rows(
    data: RowSource,
    heldout: RowSource | float,
    read: _RowReader,
    prompt_of: Callable[[Row], str],
    seed: int,
    fallback_key: Callable[[Row], str] | None = None,
) -> _TokenizedSplit:
    """Rows read, and split by prompt where `heldout` is a share; 0 = nothing is held out.

    `otherwise`: the key of rows that all have the same prompt.
    """
    records, sequences = read(data)
    rows = records.rows
    if isinstance(heldout, bool) or not isinstance(heldout, int | float):
        rest, others = read(heldout)
        overlap = count_overlap(rows, rest.rows, prompt_of)
        if overlap["num_overlap_rows"]:
            logger.warning(
                "heldout: %d of %d rows have a prompt of the training rows, so they are not held out",
                overlap["num_overlap_rows"],
                overlap["num_heldout_rows"],
            )
        return _TokenizedSplit(
            _TokenizedRows(rows, sequences),
            _TokenizedRows(rest.rows, others),
            records.digest + rest.digest,
        )
    if heldout == 0:
        return _TokenizedSplit(
            _TokenizedRows(rows, sequences),
            _TokenizedRows([], sequences.select_rows([])),
            records.digest,
        )
    if not 0 < heldout < 1:
        raise SettingsError(
            f"heldout: {heldout} has to be a share from 0 to below 1, a file, or a list of rows"
        )
    if fallback_key is not None and len({normalize_prompt(prompt_of(row)) for row in rows}) == 1:
        prompt_of = fallback_key
    train, rest_places, _ = split_indices(rows, prompt_of, heldout, seed)
    parts = [
        _TokenizedRows(select_rows(rows, some), sequences.select_rows(some))
        for some in (train, rest_places)
    ]
    return _TokenizedSplit(parts[0], parts[1], f"{records.digest} {heldout}")
