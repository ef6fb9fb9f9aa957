"""The data arguments of the Python API: prompts, demonstrations and preference pairs, from files or lists."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

from rl_core.data.chat import ChatRenderer
from rl_core.data.conversation import TrainingSequence, training_sequences
from rl_core.data.pairs import Pair, PairSide, mismatched_pairs
from rl_core.data.prompt_files import PromptRows, read_prompt_rows
from rl_core.data.records import Records, Row, RowSource, misfit, read_demonstrations, read_preferences, read_prompts
from rl_core.data.splits import opening_text, overlap_report, prompt_key, prompt_text, split_by_prompt
from rl_core.data.token_rows import TokenRows
from rl_core.environments.environment import Environment
from rl_core.environments.prompts import Prompts
from rl_core.errors import DataError, SettingsError
from rl_core.types import Message

__all__ = [
    "Split",
    "Use",
    "as_environment",
    "check_prompts",
    "conversations",
    "pair_of",
    "pairs_of_rows",
    "preference_length",
    "preference_pairs",
    "row_sides",
]

logger = logging.getLogger(__name__)

T = TypeVar("T")
Use = Literal["dpo", "ipo", "simpo", "orpo", "kto", "reward_model"]


@dataclass(frozen=True)
class Split(Generic[T]):
    """Rows to train on and rows held out, and the digests of what they were read from."""

    train: Sequence[T]
    heldout: Sequence[T]
    digest: str


def as_environment(
    environment: Environment | None, prompts: RowSource | None, heldout_prompts: RowSource | None, system: str = ""
) -> tuple[Environment, str]:
    """The environment to act in, and a digest of the prompts ("" where they are not rows).

    Raises: SettingsError unless exactly one of the two is given.
    """
    if (environment is None) == (prompts is None):
        state = "both are given" if prompts is not None else "neither is given"
        raise SettingsError(f"environment, prompts: {state}; hand in one of them")
    if environment is not None:
        if isinstance(environment, type) and issubclass(environment, Environment):
            raise SettingsError(f"environment: {environment.__name__} is a class; hand in {environment.__name__}()")
        if not isinstance(environment, Environment):
            raise SettingsError(
                f"environment: {type(environment).__name__} is no rl_core.Environment; a name from a configuration "
                "goes through rl_core.make_environment(name, options)"
            )
        if heldout_prompts is not None or system:
            raise SettingsError("heldout_prompts, system: go with prompts; an environment has its own")
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


def check_prompts(
    environment: Environment, renderer: ChatRenderer, context: int, splits: Sequence[str] = ("train", "heldout")
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
                    found.append(f"{'prompts' if split == 'train' else 'heldout_prompts'}[{row}]: {length} tokens")
    if found:
        listed = "".join(f"\n  {line}" for line in found[:10]) + ("\n  ..." if len(found) > 10 else "")
        raise DataError(
            f"{len(found)} of {count} prompts leave no room for an answer in a context of {context} tokens:{listed}\n"
            "Leave them out, or take a model with a longer context"
        )


def conversations(
    data: RowSource, heldout: RowSource | float, renderer: ChatRenderer, context: int, seed: int,
    loss_on: Literal["all", "last"] = "all",
) -> Split[TrainingSequence]:  # fmt: skip
    """Demonstrations as (token ids, loss mask), `heldout` of them (a share by prompt, or rows of their own) held out.

    Raises: RecordsError listing bad rows, those longer than the context among them.
    """

    def read(source: RowSource) -> Records:
        return read_demonstrations(source, token_length=length, context=context)

    def length(row: Row) -> int:
        return max(len(ids) for ids, _ in sequences(row))

    def sequences(row: Row) -> list[TrainingSequence]:
        return training_sequences(renderer, row["messages"], row.get("tools"), loss_on)

    parts = _split(
        data, heldout, read, lambda row: opening_text(row["messages"]), seed,
        otherwise=lambda row: str(row["messages"][:-1]),
    )  # fmt: skip
    train, rest = (TokenRows(s for row in part for s in sequences(row)) for part in (parts.train, parts.heldout))
    return Split(train, rest, parts.digest)


def preference_pairs(
    data: RowSource, heldout: RowSource | float, renderer: ChatRenderer, context: int, seed: int, use: Use = "dpo"
) -> Split[Pair]:
    """Preference rows as the pairs of a loss or of a reward model; arguments and errors as `conversations`.

    Args:
        use: the loss, or "reward_model". See `pairs_of_rows`.
    """

    def read(source: RowSource) -> Records:
        return read_preferences(source, token_length=lambda row: preference_length(row, renderer), context=context)

    parts = _split(data, heldout, read, lambda row: prompt_text(row["prompt"]), seed)
    train, rest = pairs_of_rows(parts.train, parts.heldout, renderer, use, seed)
    return Split(train, rest, parts.digest)


def preference_length(row: Row, renderer: ChatRenderer) -> int:
    """Tokens of the longest sequence of a preference row or a labelled completion."""
    return max(len(side.ids) for side, _ in row_sides(row, renderer))


def pairs_of_rows(
    train: Sequence[Row], heldout: Sequence[Row], renderer: ChatRenderer, use: Use, seed: int
) -> tuple[list[Pair], list[Pair]]:
    """Rows of `data.records.read_preferences` as the pairs of a loss.

    `kto` takes labelled completions, and both sides of preference rows; the others take preference rows alone. Only
    `reward_model` takes a `margin`. Raises: DataError naming a row that does not go with the loss.
    """
    for name, rows in (("training", train), ("held-out", heldout)):
        for place, row in enumerate(rows):
            reason = misfit(row, use)
            if reason:
                raise DataError(f"{name} row {place + 1}: {reason}; its prompt is {row['prompt'][:80]!r}")
    if use != "kto":
        parts = [[pair_of(row, renderer) for row in rows] for rows in (train, heldout)]
        return parts[0], parts[1]
    labelled = [[side for row in rows for side in row_sides(row, renderer)] for rows in (train, heldout)]
    return mismatched_pairs(labelled[0], seed), mismatched_pairs(labelled[1], seed, labelled[0])


def pair_of(row: Row, renderer: ChatRenderer) -> Pair:
    """A preference row as token ids."""
    (chosen, _), (rejected, _) = row_sides(row, renderer)
    return Pair(chosen, rejected, row.get("margin", 0.0))


def row_sides(row: Row, renderer: ChatRenderer) -> list[tuple[PairSide, bool]]:
    """Token ids of each completion of a row, with its label; chosen = True."""
    renderer = renderer.with_tools(row.get("tools"))
    prompt = row["prompt"]
    opening = [Message(role="user", content=prompt)] if isinstance(prompt, str) else prompt
    prompt_ids = renderer.prompt_ids(opening)

    def side(answer: str | list[Message]) -> PairSide:
        if isinstance(answer, str):
            completion_ids = renderer.action_ids(answer)
            return PairSide(prompt_ids, completion_ids, [True] * len(completion_ids))
        return PairSide(prompt_ids, *_turns(renderer, answer))

    names = {"completion": row["label"]} if "label" in row else {"chosen": True, "rejected": False}
    sides = [(_cut(side(row[name]), row.get("max_tokens")), label) for name, label in names.items()]
    if len(sides) == 2 and sides[0][0].completion_ids == sides[1][0].completion_ids:
        raise DataError(f"chosen and rejected are the same in the tokens that are read ({len(sides[0][0].ids)})")
    return sides


def _cut(side: PairSide, max_tokens: int | None) -> PairSide:
    """The first tokens of prompt and completion. Raises: DataError if none that carries loss is among them."""
    if max_tokens is None or len(side.ids) <= max_tokens:
        return side
    room = max(0, max_tokens - len(side.prompt_ids))
    if not any(side.loss_mask[:room]):
        raise DataError(f"nothing that carries loss is among the first {max_tokens} tokens")
    return PairSide(side.prompt_ids, side.completion_ids[:room], side.loss_mask[:room])


def _turns(renderer: ChatRenderer, messages: Sequence[Message]) -> tuple[list[int], list[bool]]:
    """Token ids and loss mask of messages after a prompt, from one of the assistant to one of the assistant."""
    ids: list[int] = []
    mask: list[bool] = []
    waiting: list[Message] = []
    for message in messages:
        if message["role"] != "assistant":
            waiting.append(message)
            continue
        before = renderer.observation_ids(waiting) if waiting else []
        action = renderer.action_ids(renderer.assistant_text(message))
        ids += [*before, *action]
        mask += [False] * len(before) + [message.get("weight", 1) != 0] * len(action)
        waiting = []
    return ids, mask


def _split(
    data: RowSource,
    heldout: RowSource | float,
    read: Callable[[RowSource], Records],
    prompt_of: Callable[[Row], str],
    seed: int,
    otherwise: Callable[[Row], str] | None = None,
) -> Split[dict[str, Any]]:
    """Rows read, and split by prompt where `heldout` is a share; 0 = nothing is held out.

    `otherwise`: the key of rows that all have the same prompt.
    """
    records = read(data)
    if isinstance(heldout, bool) or not isinstance(heldout, int | float):
        rest = read(heldout)
        overlap = overlap_report(records.rows, rest.rows, prompt_of)
        if overlap["num_overlap_rows"]:
            logger.warning(
                "heldout: %d of %d rows have a prompt of the training rows, so they are not held out",
                overlap["num_overlap_rows"], overlap["num_heldout_rows"],
            )  # fmt: skip
        return Split(records.rows, rest.rows, records.digest + rest.digest)
    if heldout == 0:
        return Split(records.rows, [], records.digest)
    if not 0 < heldout < 1:
        raise SettingsError(f"heldout: {heldout} has to be a share from 0 to below 1, a file, or a list of rows")
    if otherwise is not None and len({prompt_key(prompt_of(row)) for row in records.rows}) == 1:
        prompt_of = otherwise
    train, rows, _ = split_by_prompt(records.rows, prompt_of, heldout, seed)
    return Split(train, rows, f"{records.digest} {heldout}")
