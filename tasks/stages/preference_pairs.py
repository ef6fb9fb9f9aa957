"""Preference pairs, from the data stage's file or from scored rollouts, and the cache of their reference log-probs.

The same pairs under the same weights are scored once:

    <folder>/<name>/   references.safetensors (train, heldout: float64 [pairs, 2]), manifest.json

The name is a digest of everything that affects the numbers, so a changed weight, pair or batch size is another entry.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import safetensors.torch
import torch

from rl_core.data.chat import ChatRenderer
from rl_core.data.completion_decoding import CompletionDecoder
from rl_core.data.pairs import (
    PreferencePair,
    PreferenceSplit,
    PreferenceUse,
    build_mismatched_pairs,
    build_pair_rows,
    build_pairs_from_groups,
    list_labelled_sides,
)
from rl_core.data.splits import compute_short_digest, extract_prompt_text, split_by_prompt
from rl_core.environments.environment import Environment
from rl_core.environments.failed_episodes import EpisodeFailureMonitor
from rl_core.errors import CheckpointError, CorruptError, DataError
from rl_core.models import causal_lm
from rl_core.rollouts.collect import collect_rollouts
from rl_core.rollouts.episode_sequence import EpisodeRequest
from rl_core.settings import PreferenceSettings, RewardModelSettings
from rl_core.storage.atomic_files import replace_file
from rl_core.storage.faults import inject_fault
from rl_core.storage.folders import (
    clear_leftovers,
    publish_folder,
    remove_folder,
    write_folder_file,
)
from rl_core.storage.manifest import digest_bytes, read_manifest, read_verified_file
from rl_core.trainers.preference import compute_reference_logprobs
from rl_core.trainers.reward_model import compute_longer_answer_baseline
from rl_core.training.checkpoints import collect_runtime_fingerprint
from rl_core.types import AutocastPrecision
from tasks.pipeline.stage import StageContext
from tasks.pipeline.stage_result import FAILED_EPISODES, PAIR_FILES
from tasks.stages.data_rows import list_split_files, load_split_tokens, read_json_rows
from tasks.stages.loading import (
    build_failure_recorder,
    build_pipeline_environment,
    load_frozen_policy,
    open_failed_episode_file,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

Row = dict[str, Any]
ReferenceLogprobs = list[tuple[float, float]]

REFERENCES_FILE = "references.safetensors"
PAIRS_PER_GROUP = 4  # more pairs of one prompt would mostly repeat each other
HELDOUT_SHARE = 0.15  # of the questions
MAX_GROUP_FACTOR = 16  # a policy that nearly always fails, or succeeds, gives few pairs


def load_or_compute_references(
    folder: Path,
    model: PreTrainedModel,
    parts: tuple[Sequence[PreferencePair], Sequence[PreferencePair]],
    *,
    pad_id: int,
    max_tokens: int,
    precision: AutocastPrecision = "none",
    code: str = "",
) -> tuple[ReferenceLogprobs, ReferenceLogprobs]:
    """Return the log-probabilities of (training, held-out) pairs under `model`, from the cache `folder` if possible.

    An entry is verified before it is used; a damaged one is removed, with a warning, and recomputed. If the disk
    refuses to store an entry, the numbers are used anyway.

    Args:
        pad_id, max_tokens, precision: as in `compute_reference_logprobs`.
        code: version of the code that computes them.
    """
    name = _compute_entry_name(model, parts, [pad_id, max_tokens, precision], code)
    entry = folder / name
    if folder.is_dir():
        clear_leftovers(folder)  # of a process that crashed while writing
    cached = _read_cache_entry(entry, tuple(len(pairs) for pairs in parts))
    if cached is not None:
        logger.info("reference log-probabilities: read from %s", entry)
        return cached
    train, heldout = (
        compute_reference_logprobs(
            model, pairs, pad_id=pad_id, max_tokens=max_tokens, precision=precision
        )
        for pairs in parts
    )
    inject_fault("references.scored")
    tensors = {"train": _convert_to_tensor(train), "heldout": _convert_to_tensor(heldout)}
    data = safetensors.torch.save(tensors)

    def write(temporary: Path) -> dict[str, str]:
        write_folder_file(temporary / REFERENCES_FILE, data)
        return {REFERENCES_FILE: digest_bytes(data)}

    try:
        publish_folder(entry, write, {"kind": "references"})
    except CheckpointError as error:
        logger.warning("reference log-probabilities are not cached: %s", error)
    return train, heldout


def digest_weights(model: torch.nn.Module) -> str:
    """Compute the SHA-256 over the names, types, shapes and bytes of all weights and buffers."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\0".encode())
        # as bytes, since numpy has no bfloat16
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def digest_pairs(pairs: Sequence[PreferencePair]) -> str:
    """Compute the SHA-256 over token ids and loss masks, in order."""
    digest = hashlib.sha256()
    for pair in pairs:
        for side in (pair.chosen, pair.rejected):
            row = [side.prompt_ids, side.completion_ids, [int(counts) for counts in side.loss_mask]]
            digest.update(json.dumps(row).encode())
    return digest.hexdigest()


def _compute_entry_name(
    model: PreTrainedModel,
    parts: Sequence[Sequence[PreferencePair]],
    batches: list[int | str],
    code: str,
) -> str:
    """Compute an entry's name, 32 hex digits.

    Batch size, threads, torch and device count, since they decide the last bits.
    """
    payload = {
        "weights": digest_weights(model),
        "pairs": [digest_pairs(pairs) for pairs in parts],
        "batches": batches,
        "runtime": collect_runtime_fingerprint(model),
        "code": code,
    }
    return hashlib.sha256(json.dumps(payload, sort_keys=True).encode()).hexdigest()[:32]


def _read_cache_entry(
    entry: Path, counts: tuple[int, ...]
) -> tuple[ReferenceLogprobs, ReferenceLogprobs] | None:
    """Read an entry; None if there is none, or if it was damaged and has been removed."""
    if not entry.is_dir():
        return None
    try:
        data = read_verified_file(entry, REFERENCES_FILE, read_manifest(entry))
        tensors = safetensors.torch.load(data)
        shapes = tuple(tuple(tensors[name].shape) for name in ("train", "heldout"))
        if shapes != tuple((count, 2) for count in counts):
            raise CorruptError(f"{entry / REFERENCES_FILE}: holds {shapes} for {counts} pairs")
    except (CorruptError, KeyError, safetensors.SafetensorError) as error:
        logger.warning("reference log-probabilities are damaged and recomputed: %s", error)
        remove_folder(entry)
        return None
    return _convert_to_rows(tensors["train"]), _convert_to_rows(tensors["heldout"])


def _convert_to_tensor(rows: ReferenceLogprobs) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float64).reshape(-1, 2)


def _convert_to_rows(tensor: torch.Tensor) -> ReferenceLogprobs:
    return [(float(chosen), float(rejected)) for chosen, rejected in tensor.tolist()]


@dataclass
class StagePairs:
    """Training and held-out pairs, split by question."""

    train: Sequence[PreferencePair]
    heldout: Sequence[PreferencePair]
    # accuracy of "the longer answer wins" on the held-out pairs
    longer_answer_accuracy: float | None = None
    note: str = ""


def load_stage_pairs(context: StageContext) -> StagePairs:
    """Load the pairs of a stage from the preference file if the data stage read one, else sample them from its model.

    Raises: DataError if one of the two parts is empty.
    """
    data = Path(context.inputs["data"]) if "data" in context.inputs else None
    if data is not None and (data / "preferences_train.jsonl").is_file():
        pairs = _load_pairs_from_files(data, context)
    else:
        pairs = _sample_pairs_from_rollouts(data, context)
    for name, part in (("train", pairs.train), ("heldout", pairs.heldout)):
        if not part:
            raise DataError(
                f"there is no {name} pair for the stage {context.name}: {pairs.note}. A pair needs a success and a "
                "failure at the same episode; train the preceding policy longer, or raise "
                f"stages.{context.name}.num_pairs or group_size"
            )
    inject_fault("pairs.made")
    return pairs


def _load_pairs_from_files(data: Path, context: StageContext) -> StagePairs:
    """Load the preference rows or labelled completions that the data stage checked and split by prompt."""
    policy_tokenizer = causal_lm.load_tokenizer(context.inputs["model"], context.pipeline.model)
    renderer = ChatRenderer(policy_tokenizer, context.pipeline.model)
    answers: list[tuple[int, int]] = []  # characters of the held-out ones
    prompts: list[set[bytes]] = []
    parts = []
    files = list_split_files(data, "preferences")
    for path, name, sides in zip(
        files,
        ("training", "held-out"),
        load_split_tokens(data, "preferences", renderer),
        strict=True,
    ):
        prompts.append(set())
        lengths = answers if name == "held-out" else None
        rows = _record_prompts(read_json_rows(path), prompts[-1], lengths)
        parts.append(PreferenceSplit.from_rows(sides, rows, _resolve_pair_use(context), name))
    train, heldout = build_pair_rows(
        parts[0], parts[1], _resolve_pair_use(context), context.seed, renderer
    )
    return StagePairs(
        train=train,
        heldout=heldout,
        # The usual baseline: the answer with more characters wins.
        longer_answer_accuracy=compute_longer_answer_baseline(answers) if answers else None,
        note=f"{len(parts[0].margins)} training rows of {len(prompts[0])} prompts, "
        f"{len(prompts[1])} prompts held out",
    )


def _record_prompts(
    rows: Iterable[Row], prompts: set[bytes], lengths: list[tuple[int, int]] | None
) -> Iterator[Row]:
    """Yield the rows; record their prompts and, if `lengths` is a list, the number of characters of both sides."""
    for row in rows:
        prompts.add(compute_short_digest(extract_prompt_text(row["prompt"])))
        if lengths is not None and "chosen" in row and not row.get("tie"):
            lengths.append((len(_extract_text(row["chosen"])), len(_extract_text(row["rejected"]))))
        yield row


def _extract_text(side: str | list[dict[str, Any]]) -> str:
    """Return the text of a side, which may be messages."""
    return side if isinstance(side, str) else "\n".join(message["content"] for message in side)


def _sample_pairs_from_rollouts(data: Path | None, context: StageContext) -> StagePairs:
    """Sample groups of the starting policy and pair each success with a failure at the same episode.

    Collects until there are `num_pairs`, with at most MAX_GROUP_FACTOR times the groups needed if each gave its share.
    """
    settings: RewardModelSettings | PreferenceSettings = context.settings
    environment = build_pipeline_environment(context.pipeline, data)
    policy = load_frozen_policy(context.inputs["model"], context.pipeline)
    backend = policy.backend()
    rng = np.random.default_rng(context.seed)
    # Of a mixture without the environments that are only evaluated.
    seeds = {level: environment.seeds_of("train", level) for level in environment.level_weights}
    levels = [level for level in seeds if len(seeds[level])]
    # an episode may be drawn twice, and two episodes may ask the same question
    by_question: list[tuple[str, list[PreferencePair]]] = []
    count = groups_played = successes = guesses = 0
    failed = open_failed_episode_file(context)
    failed.clear_file()
    failures = EpisodeFailureMonitor(
        settings.sampling.max_failed_share,
        store_episode=build_failure_recorder(context, failed, model_name="pairs"),
    )
    most_groups = MAX_GROUP_FACTOR * -(-settings.num_pairs // PAIRS_PER_GROUP)
    while count < settings.num_pairs and groups_played < most_groups:
        requests = []
        for index in range(min(64, most_groups - groups_played)):
            level = levels[(groups_played + index) % len(levels)]
            requests.append(
                EpisodeRequest(level, seeds[level][int(rng.integers(len(seeds[level])))])
            )
        groups = collect_rollouts(
            environment,
            backend,
            policy.renderer,
            requests,
            group_size=settings.group_size,
            sampling=settings.sampling,
            seed=context.seed + groups_played,
            failures=failures,
        )
        groups_played += len(groups)
        correct = [rollout for group in groups for rollout in group.rollouts if rollout.success]
        successes += len(correct)
        guesses += sum(rollout.trajectory.is_grounded is False for rollout in correct)
        for request, group in zip(requests, groups, strict=True):
            pairs = build_pairs_from_groups([group], PAIRS_PER_GROUP, context.seed)
            if pairs:
                by_question.append((_build_question_key(environment, request), pairs))
                count += len(pairs)
        context.tracker.progress(
            min(count, settings.num_pairs), settings.num_pairs, "pairs from rollouts"
        )
    train, heldout = by_question, by_question[:0]
    if len({question for question, _ in by_question}) > 1:
        train, heldout, _ = split_by_prompt(
            by_question, lambda entry: entry[0], HELDOUT_SHARE, context.seed
        )
    sides = [[pair for _, pairs in part for pair in pairs] for part in (train, heldout)]
    if _resolve_pair_use(context) == "kto" and all(sides):
        labelled = [list_labelled_sides(part) for part in sides]
        sides = [build_mismatched_pairs(part, context.seed, labelled[0]) for part in labelled]
    for name, part in zip(PAIR_FILES, sides, strict=True):
        _write_pair_texts(context.folder / name, part, policy.tokenizer)
    rollouts = max(1, groups_played * settings.group_size - failures.total)
    guess_note = f", {guesses / rollouts:.1%} by guesses, which form no pair" if guesses else ""
    failure_note = f", {failures.total} failed ({FAILED_EPISODES})" if failures.total else ""
    return StagePairs(
        train=sides[0],
        heldout=sides[1],
        note=f"pairs from {groups_played} episodes of {settings.group_size} rollouts each, of which "
        f"{successes / rollouts:.1%} succeeded{guess_note}{failure_note}",
    )


def _write_pair_texts(
    path: Path, pairs: Sequence[PreferencePair], tokenizer: PreTrainedTokenizerBase
) -> None:
    """Write pairs as text, including special tokens. The file is for readers, not for training."""
    decoder = CompletionDecoder(tokenizer)
    with replace_file(path, synced=False, errors="backslashreplace") as file:
        for pair in pairs:
            chosen, rejected = (
                decoder.decode_ids(side.completion_ids) for side in (pair.chosen, pair.rejected)
            )
            row: Row = {"prompt_text": tokenizer.decode(pair.chosen.prompt_ids)}
            row |= (
                {"chosen_text": chosen, "rejected_text": rejected}
                if pair.desirable is None
                else {"completion_text": chosen, "label": pair.desirable}
            )
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


def _resolve_pair_use(context: StageContext) -> PreferenceUse:
    """Return the loss of a preference stage, or the use of a reward model."""
    settings: RewardModelSettings | PreferenceSettings = context.settings
    return settings.loss if isinstance(settings, PreferenceSettings) else settings.use


def _build_question_key(environment: Environment, request: EpisodeRequest) -> str:
    """Return the key of the split into training and held-out pairs: the question, or the seed if questions are few."""
    if environment.held_out(request.level).by == "content":
        return environment.question(request.seed, request.level)
    return f"{request.level} {request.seed}"
