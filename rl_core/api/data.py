"""Data arguments of the Python API: prompts, demonstrations and preference pairs, from files or lists."""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

from rl_core.data.chat import ChatRenderer
from rl_core.data.formats import Row
from rl_core.data.pairs import PreferencePair, PreferenceSplit, PreferenceUse, build_pair_rows
from rl_core.data.records import (
    SKIP_ADVICE,
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
from rl_core.data.training_sequences import (
    ImageSequence,
    TokenRows,
    TrainingSequence,
    attach_images,
)
from rl_core.environments.agent import Agent
from rl_core.environments.environment import Environment
from rl_core.environments.mixture import LabelledEnvironment, MixturePart, mix_environments
from rl_core.environments.prompts import Prompts
from rl_core.errors import DataError, RecordsError, SettingsError

logger = logging.getLogger(__name__)

T = TypeVar("T")
# A function of (task, client), sync or async, its import path, or a command line.
AgentSource = Callable[..., Any] | str


@dataclass(frozen=True)
class DataSplit(Generic[T]):
    """Training rows, held-out rows, and the digest of their sources."""

    train: Sequence[T]
    heldout: Sequence[T]
    digest: str


# An environment, or several that a policy learns in together: a list, or a mapping from labels.
EnvironmentSource = (
    Environment | Sequence[Environment | MixturePart] | Mapping[str, Environment | MixturePart]
)


def resolve_environment(
    environment: EnvironmentSource | None,
    prompts: RowSource | None,
    heldout_prompts: RowSource | None,
    system: str = "",
    *,
    agent: AgentSource | None = None,
    requires_reward: bool = True,
) -> tuple[Environment, str]:
    """Return the environment to act in, and a digest of the prompts ("" without prompts).

    Args:
        agent: plays the prompts, which are its tasks.
        requires_reward: see `Agent`.
    Raises: SettingsError unless exactly one of environment and prompts is passed.
    """
    if agent is not None:
        return _build_agent(agent, environment, prompts, heldout_prompts, system, requires_reward)
    if (environment is None) == (prompts is None):
        state = "both are given" if prompts is not None else "neither is given"
        raise SettingsError(f"environment, prompts: {state}; pass one of them")
    if environment is not None:
        if isinstance(environment, list | tuple | Mapping):
            environment = mix_environments(environment)
        if isinstance(environment, type) and issubclass(environment, Environment):
            raise SettingsError(
                f"environment: {environment.__name__} is a class; pass {environment.__name__}()"
            )
        if not isinstance(environment, Environment):
            raise SettingsError(
                f"environment: {type(environment).__name__} is not an rl_core.Environment; for a name from a "
                "configuration use rl_core.make_environment(name, options)"
            )
        if heldout_prompts is not None or system:
            raise SettingsError(
                "heldout_prompts, system: only apply to prompts; an environment defines its own"
            )
        return environment, ""
    assert prompts is not None
    rows = _read_prompts(prompts)
    if heldout_prompts is None:
        return Prompts(rows.rows, (), system=system), rows.digest
    heldout = _read_prompts(heldout_prompts)
    return Prompts(rows.rows, heldout.rows, system=system), rows.digest + heldout.digest


def _build_agent(
    agent: AgentSource,
    environment: EnvironmentSource | None,
    tasks: RowSource | None,
    heldout: RowSource | None,
    system: str,
    requires_reward: bool,
) -> tuple[Environment, str]:
    """Build the environment of an agent and its tasks. Raises: SettingsError."""
    if environment is not None or tasks is None or system:
        raise SettingsError(
            "agent: takes its tasks from prompts (a file or rows), and no environment or system message; options of "
            "the agent are those of rl_core.Agent, which is passed as the environment"
        )
    heldout = 0 if heldout is None else heldout
    built = Agent(agent, tasks, heldout=heldout, requires_reward=requires_reward)
    return built, built.digest


def _read_prompts(source: RowSource) -> PromptRows | Records:
    """Read rows of a file, a folder, or a list."""
    try:
        with _advise_in_python():
            return (
                read_prompt_rows(source) if isinstance(source, str | Path) else read_prompts(source)
            )
    except SettingsError as error:
        message = str(error).replace("options.path: ", "").removeprefix("options.prompt: ")
        message = re.sub(r"set options\.prompt: (\S+)", r"rename '\1' to 'prompt'", message)
        raise DataError(f"prompts: {message}") from None
    except DataError as error:  # rows of this script are those of the argument `prompts`
        raise type(error)(re.sub(r"(?m)^( *)data(?=:|\[)", r"\1prompts", str(error))) from None


@contextlib.contextmanager
def _advise_in_python() -> Iterator[None]:
    """Replace advice on bad rows that names settings of a configuration by what a script can do."""
    try:
        yield
    except RecordsError as error:
        message = str(error)
        advice = "Fix them, or leave them out"
        if "the context holds" in message:
            advice += "; long rows fit into a model with a longer context"
        raise RecordsError(message.replace(SKIP_ADVICE, advice)) from None


def check_prompt_lengths(
    environment: Environment,
    renderer: ChatRenderer,
    context: int,
    splits: Sequence[str] = ("train", "heldout"),
) -> None:
    """Refuse prompts that leave no room for an answer, before anything is played; other environments pass.

    Raises: DataError naming the first rows.
    """
    for part in environment.parts:
        if isinstance(part, LabelledEnvironment):
            check_prompt_lengths(part.inner, renderer, context, splits)
    if not isinstance(environment, Prompts):
        return
    too_long, num_prompts = [], 0
    for split in splits:
        argument = "prompts" if split == "train" else "heldout_prompts"
        for level in environment.levels:
            for seed in environment.seeds_of(split, level):
                num_prompts += 1
                length = len(renderer.prompt_ids(environment.episode(seed, level).reset()))
                if length >= context:
                    row = seed - environment.seeds(split).start
                    too_long.append(f"{argument}[{row}]: {length} tokens")
    if too_long:
        shown = [*too_long[:10], "..."] if len(too_long) > 10 else too_long
        listing = "".join(f"\n  {line}" for line in shown)
        raise DataError(
            f"{len(too_long)} of {num_prompts} prompts leave no room for an answer in a context of {context} tokens:"
            f"{listing}\nLeave them out, or take a model with a longer context"
        )


def load_conversations(
    data: RowSource,
    heldout: RowSource | float,
    renderer: ChatRenderer,
    context: int,
    seed: int,
    loss_on: Literal["all", "last"] = "all",
    folder: Path | None = None,
) -> DataSplit[TrainingSequence | ImageSequence]:
    """Load demonstrations as (token ids, loss mask), and hold out a share of the prompts or separate rows.

    If rows have images, those of each come third.

    Args:
        heldout: share by prompt, or rows.
        folder: caches token ids, so that a resumed run does not compute them again.
    Raises: RecordsError listing bad rows, including those longer than the context.
    """
    reader = _RowReader(TokenisationJob("demonstrations", loss_on), renderer, context, folder)
    split = _split_rows(
        data,
        heldout,
        reader,
        lambda row: extract_opening_text(row["messages"]),
        seed,
        fallback_key=lambda row: str(row["messages"][:-1]),
    )
    train, heldout_rows = (
        attach_images(part.sequences, part.rows, renderer) for part in (split.train, split.heldout)
    )
    return DataSplit[TrainingSequence | ImageSequence](train, heldout_rows, split.digest)


def load_preference_pairs(
    data: RowSource,
    heldout: RowSource | float,
    renderer: ChatRenderer,
    context: int,
    seed: int,
    use: PreferenceUse = "dpo",
    folder: Path | None = None,
) -> DataSplit[PreferencePair]:
    """Load preference rows as the pairs of a loss or of a reward model; arguments and errors as `load_conversations`.

    `kto` takes labelled completions, and both sides of preference rows; the others only take preference rows. Only
    `reward_model` takes a `margin`.
    Args:
        use: the loss, or "reward_model".
    Raises: DataError naming a row that the loss cannot use.
    """
    reader = _RowReader(TokenisationJob("preferences"), renderer, context, folder)
    split = _split_rows(data, heldout, reader, lambda row: extract_prompt_text(row["prompt"]), seed)
    train_split = PreferenceSplit.from_rows(
        split.train.sequences, split.train.rows, use, "training"
    )
    heldout_split = PreferenceSplit.from_rows(
        split.heldout.sequences, split.heldout.rows, use, "held-out"
    )
    train, heldout_pairs = build_pair_rows(train_split, heldout_split, use, seed, renderer)
    return DataSplit(train, heldout_pairs, split.digest)


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
    """Reader of rows that tokenises each row once."""

    def __init__(
        self, job: TokenisationJob, renderer: ChatRenderer, context: int, folder: Path | None
    ) -> None:
        self._job, self._renderer, self._context = job, renderer, context
        self._cache = TokenCache(folder)

    def __call__(self, source: RowSource) -> tuple[Records, TokenRows]:
        tokenized: list[TokenizedRows] = []

        def check_rows(rows: Sequence[Row]) -> list[str]:
            result = self._cache.load_or_tokenize(
                compute_rows_digest(rows),
                lambda: rows,
                self._renderer,
                self._job,
                estimate_text_bytes(rows),
            )
            tokenized.append(result)
            return result.list_refusal_reasons(
                len(rows), self._context, f"the context holds {self._context}"
            )

        read = read_demonstrations if self._job.kind == "demonstrations" else read_preferences
        with _advise_in_python():
            return read(source, check_rows=check_rows), tokenized[0].rows


def _split_rows(
    data: RowSource,
    heldout: RowSource | float,
    read: _RowReader,
    get_prompt: Callable[[Row], str],
    seed: int,
    fallback_key: Callable[[Row], str] | None = None,
) -> _TokenizedSplit:
    """Read the rows, and split them by prompt if `heldout` is a share; 0 = hold nothing out.

    Args:
        fallback_key: returns what to split by if all rows have the same prompt.
    """
    records, sequences = read(data)
    rows = records.rows
    if isinstance(heldout, bool) or not isinstance(heldout, int | float):
        heldout_records, heldout_sequences = read(heldout)
        overlap = count_overlap(rows, heldout_records.rows, get_prompt)
        if overlap["num_overlap_rows"]:
            logger.warning(
                "heldout: %d of %d rows have a prompt of the training rows, so they are not held out",
                overlap["num_overlap_rows"],
                overlap["num_heldout_rows"],
            )
        return _TokenizedSplit(
            _TokenizedRows(rows, sequences),
            _TokenizedRows(heldout_records.rows, heldout_sequences),
            records.digest + heldout_records.digest,
        )
    if heldout == 0:
        return _TokenizedSplit(
            _TokenizedRows(rows, sequences),
            _TokenizedRows([], sequences.select_rows([])),
            records.digest,
        )
    if not 0 < heldout < 1:
        raise SettingsError(
            f"heldout: {heldout} must be a share from 0 to below 1, a file, or a list of rows"
        )
    if fallback_key is not None and len({normalize_prompt(get_prompt(row)) for row in rows}) == 1:
        get_prompt = fallback_key
    try:
        sides = split_indices(rows, get_prompt, heldout, seed)[:2]
    except DataError as error:
        raise DataError(f"heldout: {error}; heldout=0 holds nothing out") from None
    train, heldout_rows = (
        _TokenizedRows(select_rows(rows, indices), sequences.select_rows(indices))
        for indices in sides
    )
    return _TokenizedSplit(train, heldout_rows, f"{records.digest} {heldout}")
