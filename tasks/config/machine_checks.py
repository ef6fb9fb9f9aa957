"""Checks of a configuration against this machine: data files, model folders, an output folder, a device.

Rows of the data files that a configuration names, checked before a run of theirs is made.

Memory that settings ask for at least, estimated before anything is allocated, against what the machine has.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

from rl_core.data.files import DATA_SUFFIXES, list_data_files
from rl_core.data.records import TABLE_SUFFIXES, check_first_rows
from rl_core.errors import CheckpointError, SettingsError
from rl_core.machine_memory import measure_machine_memory
from rl_core.settings import DataSettings, EnvironmentSettings, ModelSettings, Settings
from rl_core.settings.common import PRESETS
from tasks import stage_registry
from tasks.config.problems import ConfigProblem, Key, join_key
from tasks.config.settings import PipelineSettings

SettingsT = TypeVar("SettingsT", bound=Settings)

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_REGISTERED_REFERENCE = re.compile(r"models:/[^/@]+(@[\w.-]+|/[\w.-]+)")

# What to say when a file is missing that the shipped configs name, but that this project does not carry.
_DOWNLOAD_HINTS = {
    "gsm8k": (
        "this project carries no data: save grade_school_math/data/train.jsonl of the repository "
        "openai/grade-school-math there (one JSON object a line with question, answer and, if you like, final)"
    ),
    "preferences": (
        "this project carries no data: save pairs there, one JSON object a line with prompt, chosen, rejected"
    ),
    "demonstrations": "save them there, one JSON object a line with messages, or with prompt and completion",
}


def resolve_files(
    settings: PipelineSettings, folder: Path
) -> tuple[PipelineSettings, list[ConfigProblem]]:
    """Make the data and model paths absolute and check what the settings need from this machine.

    A relative path is looked up from the current folder, then from `folder`, the one that the config file is in.
    """
    problems: list[ConfigProblem] = []
    finder = _FileFinder(folder, problems)
    stages = settings.stages
    data = stages.prepare_data
    if data is not None:
        stages = replace_unchecked(stages, prepare_data=_resolve_data_files(data, finder))
    if stages.distill is not None and stages.distill.teacher.url is None:
        teacher = stages.distill.teacher
        place = _resolve_model_folder(
            teacher.model, ("stages", "distill", "teacher", "model"), finder
        )
        stages = replace_unchecked(
            stages,
            distill=replace_unchecked(
                stages.distill, teacher=replace_unchecked(teacher, model=place)
            ),
        )
    environment = _resolve_environment_files(settings.environment, finder)
    model = replace_unchecked(
        settings.model, path=_resolve_model_folder(settings.model.path, ("model", "path"), finder)
    )
    model = _resolve_template_file(model, finder)
    _check_output_folder(settings.output, settings.name, problems)
    _check_device(settings.model, problems)
    _check_rope_context(model, problems)
    return replace_unchecked(
        settings, stages=stages, environment=environment, model=model
    ), problems


def replace_unchecked(settings: SettingsT, **changed: Any) -> SettingsT:
    """`dataclasses.replace` without the checks: what they found was reported, and finding goes on."""
    result = object.__new__(type(settings))
    for field in dataclasses.fields(settings):
        object.__setattr__(
            result, field.name, changed.get(field.name, getattr(settings, field.name))
        )
    return result


class _FileFinder:
    """Looks files up and notes what is not there."""

    def __init__(self, folder: Path, problems: list[ConfigProblem]) -> None:
        self.folder = folder
        self.problems = problems

    def list_candidates(self, name: str) -> list[Path]:
        """Candidates for a path of the config: from the current folder, then from the config's own."""
        path = _expand_home(name)
        places = (
            [path] if path.is_absolute() else [Path.cwd() / path, self.folder.absolute() / path]
        )
        return list(dict.fromkeys(Path(os.path.normpath(place)) for place in places))

    def find_path(self, name: str) -> Path | None:
        """The first place at which something lies."""
        return next((place for place in self.list_candidates(name) if _path_exists(place)), None)

    def resolve_data_file(
        self, name: str, key: Key, advice: str = "", *, folder: bool = False
    ) -> str:
        """The absolute path of a data file, or `folder` of some; what is wrong with it becomes a problem."""
        path = self.find_path(name)
        if path is None:
            tried = " and ".join(str(place) for place in self.list_candidates(name))
            text = f"{name!r} is no file; looked at {tried}; {advice or 'it must be a JSONL, CSV or Parquet file'}"
            self.problems.append(
                ConfigProblem(key, f"{text}, or name another place with --set {join_key(key)}=FILE")
            )
            return name
        if path.is_dir() and folder:
            suffixes = TABLE_SUFFIXES if key[0] == "environment" else DATA_SUFFIXES
            if not list_data_files(path, suffixes):
                kinds = ", ".join(suffixes)
                self.problems.append(
                    ConfigProblem(key, f"{path} is a folder without a data file in it ({kinds})")
                )
        elif path.is_dir():
            self.problems.append(
                ConfigProblem(
                    key, f"{path} is a folder; give the path of a JSONL, CSV or Parquet file in it"
                )
            )
        elif not path.is_file():
            self.problems.append(
                ConfigProblem(key, f"{path} is no regular file (a pipe, a socket or a device)")
            )
        elif not os.access(path, os.R_OK):
            self.problems.append(
                ConfigProblem(key, f"{path} cannot be read; change its permissions")
            )
        elif path.stat().st_size == 0:
            self.problems.append(
                ConfigProblem(key, f"{path} is empty; it must hold one JSON object a line")
            )
        return str(path)


def _expand_home(name: str) -> Path:
    """The path with `~` put in; as it is where there is no such user."""
    with contextlib.suppress(RuntimeError):
        return Path(name).expanduser()
    return Path(name)


def _is_creatable(path: Path) -> bool:
    """False = a name in it is longer than the file system takes."""
    try:
        path.lstat()
    except OSError as error:
        return error.errno != errno.ENAMETOOLONG
    except ValueError:
        return False
    return True


def _path_exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # too long a name, a NUL in it
        return False


def _resolve_data_files(data: DataSettings, finder: _FileFinder) -> DataSettings:
    changed = {}
    for name in ("demonstrations", "preferences"):
        path = getattr(data, name)
        if path is not None:
            key = ("stages", "prepare_data", name)
            changed[name] = finder.resolve_data_file(
                path, key, _DOWNLOAD_HINTS.get(name, ""), folder=True
            )
    return replace_unchecked(data, **changed)


def _resolve_environment_files(
    environment: EnvironmentSettings, finder: _FileFinder
) -> EnvironmentSettings:
    """An environment's option `path` names its data file; `prompts` takes a folder too, and a file held out."""
    options = dict(environment.options)
    takes_tables = environment.name == "prompts"
    for name in ("path", "heldout") if takes_tables else ("path",):
        path = options.get(name)
        if not isinstance(path, str) or (takes_tables and options.get("revision") is not None):
            continue
        key = ("environment", "options", name)
        advice = _DOWNLOAD_HINTS.get(environment.name, "")
        if takes_tables and _HUB_NAME.fullmatch(path) and "/" in path:
            advice = (
                "a data set of the hub needs options.revision too, the 40 hex digits of a commit"
            )
        options[name] = finder.resolve_data_file(path, key, advice, folder=takes_tables)
    return replace_unchecked(environment, options=options)


def _resolve_model_folder(name: str | None, key: Key, finder: _FileFinder) -> str | None:
    """A folder becomes an absolute path; hub names and registered models are left for the stage to look up."""
    if name is None:
        return None
    if name.startswith("models:"):
        if not _REGISTERED_REFERENCE.fullmatch(name):
            text = (
                f"{name!r} is no registered model; write models:/NAME@ALIAS or models:/NAME/VERSION"
            )
            finder.problems.append(ConfigProblem(key, text))
        return name
    path = finder.find_path(name)
    if path is None:
        if not _HUB_NAME.fullmatch(name):
            tried = " and ".join(str(place) for place in finder.list_candidates(name))
            text = f"{name!r} is no model folder (looked at {tried}) and no hub name; give one of the two"
            finder.problems.append(ConfigProblem(key, f"{text}, or models:/NAME@ALIAS"))
        return name
    if not path.is_dir():
        finder.problems.append(
            ConfigProblem(key, f"{path} is a file; give the folder that holds config.json")
        )
    elif not (path / "config.json").is_file():
        # A stage writes its model into model/, and with LoRA the adapter alone into a folder in there.
        near = path.parent if (path / "adapter_config.json").is_file() else path / "model"
        hint = f"; did you mean {near}?" if (near / "config.json").is_file() else ""
        finder.problems.append(
            ConfigProblem(key, f"{path} holds no config.json, so it is no model folder{hint}")
        )
    return str(path)


def _resolve_template_file(model: ModelSettings, finder: _FileFinder) -> ModelSettings:
    """The file of an own chat template becomes an absolute path."""
    if model.chat_template is None:
        return model
    path = finder.find_path(model.chat_template)
    if path is None or not path.is_file():
        tried = " and ".join(str(place) for place in finder.list_candidates(model.chat_template))
        text = f"{model.chat_template!r} is no file (looked at {tried}); name a Jinja file that holds a chat template"
        finder.problems.append(ConfigProblem(("model", "chat_template"), text))
        return model
    return replace_unchecked(model, chat_template=str(path))


def _check_output_folder(output: str, name: str, problems: list[ConfigProblem]) -> None:
    """The output folder, and what pipeline `name` writes in it, can be made and written; nothing is made here."""
    path = _expand_home(output).absolute()
    nearest = next((place for place in (path, *path.parents) if _path_exists(place)), None)
    key = ("output",)
    if nearest is None or not _is_creatable(path):
        problems.append(
            ConfigProblem(key, f"{output[:200]!r} cannot be a folder; give another path")
        )
    elif not nearest.is_dir():
        problems.append(ConfigProblem(key, f"{nearest} is a file; give a folder"))
    elif "?" in str(path):  # of the databases in it; what follows would be taken for options
        problems.append(
            ConfigProblem(
                key,
                f"{path} holds a '?', which the address of a database cannot; give another path",
            )
        )
    else:
        inside = [
            path / part for part in (name, "mlflow", "prefect")
        ]  # somebody else may have made them
        for place in (nearest, *filter(_path_exists, inside)):
            if not os.access(place, os.W_OK | os.X_OK):
                problems.append(
                    ConfigProblem(key, f"{place} cannot be written into; give another folder")
                )


def _check_device(model: ModelSettings, problems: list[ConfigProblem]) -> None:
    if model.device != "cuda":
        return
    import torch  # a second or more: only where the answer depends on it

    if not torch.cuda.is_available():
        problems.append(
            ConfigProblem(("model", "device"), "cuda, but torch sees no GPU here; use auto or cpu")
        )


def _check_rope_context(model: ModelSettings, problems: list[ConfigProblem]) -> None:
    if model.rope_context is None:
        return
    config = _read_model_config(model) if model.path is not None else {}
    if config is None:
        return  # reported already, or it has to be downloaded first
    if not _has_length_dependent_rope(config):
        text = "the rotary frequencies of this model do not depend on the length; leave it out"
        problems.append(ConfigProblem(("model", "rope_context"), text))
        return
    try:
        _compute_longest_context(model)
    except SettingsError as error:
        problems.append(
            ConfigProblem(
                ("model", "rope_context"), str(error).removeprefix("model.rope_context: ")
            )
        )


def read_context_length(model: ModelSettings) -> int | None:
    """Longest sequence of the model, in tokens; None where it cannot be known without a download."""
    if model.path is None:
        return model.context
    config = _read_model_config(model)
    if config is None:
        return None
    if _has_length_dependent_rope(config):
        with contextlib.suppress(SettingsError):
            return _compute_longest_context(model)
    length = config.get("max_position_embeddings")
    return length if isinstance(length, int) and length > 0 else None


def read_model_shape(model: ModelSettings) -> dict[str, int]:
    """Vocabulary, width and depth of the model, as far as they are known without a download."""
    config = (_read_model_config(model) if model.path is not None else None) or {}
    config = config.get("text_config", config)
    found = {name: config.get(name) for name in ("vocab_size", "hidden_size", "num_hidden_layers")}
    return {name: value for name, value in found.items() if isinstance(value, int)}


_TRANSPOSED_MODEL_TYPES = (
    "gpt2",
    "openai-gpt",
)  # their layers hold the weights the other way round (transformers' Conv1D)


def compute_adapter_rank(model: ModelSettings) -> int:
    """Rank of the adapter that an inference server will be sent; 0 = none, or merged weights in its place.

    As `rl_core.models.lora.is_servable_adapter` tells of a loaded model.
    """
    if model.lora is None:
        return 0
    config = (_read_model_config(model) if model.path is not None else None) or {}
    return 0 if config.get("model_type") in _TRANSPOSED_MODEL_TYPES else model.lora.served_rank


def _read_model_config(model: ModelSettings) -> dict[str, Any] | None:
    """The configuration in the model's folder, where there is one."""
    try:
        config = json.loads((Path(str(model.path)) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return config if isinstance(config, dict) else None


def _has_length_dependent_rope(config: dict[str, Any]) -> bool:
    """True = its rotary frequencies are of no kind that certainly does not depend on the length."""
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kinds = [
        part.get("rope_type", part.get("type", "default"))
        for part in (parameters, *parameters.values())
        if isinstance(part, dict)
    ]
    return any(kind not in ("default", "linear", "llama3", "proportional") for kind in kinds)


def _compute_longest_context(model: ModelSettings) -> int | None:
    """Longest sequence by transformers' reading of the configuration, which takes seconds to import."""
    from rl_core.models.causal_lm import read_context_length

    try:
        return read_context_length(str(model.path), model)
    except CheckpointError:  # reported where the model is loaded
        return None


NUM_CHECKED_ROWS = 1000
MAX_FULLY_CHECKED_BYTES = 64 * 2**20  # a file up to here is read whole, which takes seconds


def describe_checked_files(settings: PipelineSettings) -> list[str]:
    """One line per data file, after a check of its first FIRST_ROWS rows, for people.

    Raises: DataError for bad rows among them, which a run would refuse as well.
    """
    lines = []
    for kind, path in _list_data_files(settings):
        rows = _check_first_rows(settings, kind, path, NUM_CHECKED_ROWS)
        checked = f"first {rows} rows" if rows == NUM_CHECKED_ROWS else f"all {rows} rows"
        lines.append(f"{path} ({kind}, {checked} checked)")
    return lines


def refuse_bad_rows(settings: PipelineSettings) -> None:
    """Raise DataError for rows that the data stage would refuse, while no folder and no run have been made for it.

    Larger files are looked at up to their first FIRST_ROWS rows; with `on_bad_row: skip` nothing is refused here.
    """
    data = settings.stages.prepare_data
    if data is None or data.on_bad_row == "skip":
        return
    for kind, path in _list_data_files(settings):
        found = path.stat()
        uses = tuple(settings.stages.preference_uses) if kind == "preferences" else ()
        _check_file_rows(kind, path, (found.st_mtime_ns, found.st_size, found.st_ino), uses)


@functools.lru_cache(maxsize=64)  # by a command, then by the flow that it runs
def _check_file_rows(
    kind: str, path: Path, state: tuple[int, int, int], uses: tuple[str, ...]
) -> None:
    check_first_rows(
        kind, path, 2**62 if state[1] <= MAX_FULLY_CHECKED_BYTES else NUM_CHECKED_ROWS, "stop", uses
    )


def _list_data_files(settings: PipelineSettings) -> list[tuple[str, Path]]:
    data = settings.stages.prepare_data
    if data is None:
        return []
    named = (("demonstrations", data.demonstrations), ("preferences", data.preferences))
    return [(kind, path) for kind, place in named if place for path in list_data_files(Path(place))]


def _check_first_rows(settings: PipelineSettings, kind: str, path: Path, max_rows: int) -> int:
    data = settings.stages.prepare_data
    assert data is not None
    uses = settings.stages.preference_uses if kind == "preferences" else ()
    return check_first_rows(kind, path, max_rows, data.on_bad_row, uses)


GIB = 2**30
# Of a rollout in Python's lists: a reference and an object for its id and log-probability, a reference for its mask.
TOKEN_BYTES = 8 + 28 + 8 + 24 + 8
EPISODE_BYTES = 4096  # of an episode with its trajectory, before its first token
WEIGHT_VERSIONS = (
    4  # in the object store of rollout workers: that of the start, and three on their way
)
TRAINED_WEIGHT_BYTES = 16  # float32 weight, gradient and the two moments of Adam


def check_memory(settings: PipelineSettings) -> Iterator[ConfigProblem]:
    """Settings whose rollouts of one iteration, or whose model from a preset, cannot fit into this machine."""
    memory = measure_machine_memory()
    for key, count, words, sampling in _list_rollout_loads(settings):
        tokens = sampling.max_completion_tokens
        need = count * (EPISODE_BYTES + tokens * TOKEN_BYTES)
        if need > memory:
            yield ConfigProblem(
                key,
                f"{words} of up to {tokens:,} tokens take up to {_format_gib(need)}, and this machine has {_format_gib(memory)}; "
                "lower this, or sampling.max_completion_tokens",
            )
    if settings.model.path is None:
        yield from _check_preset_memory(settings, memory)


def _list_rollout_loads(settings: PipelineSettings) -> Iterator[tuple[Key, int, str, Any]]:
    """(key, rollouts held at once, their words, sampling) of every stage that keeps rollouts in memory."""
    stages = settings.stages
    for name in stage_registry.list_policy_stages():
        block: Any = getattr(stages, name, None)
        if hasattr(block, "prompts_per_iteration"):
            count = block.prompts_per_iteration * block.group_size
            words = (
                f"{block.prompts_per_iteration:,} x {block.group_size:,} rollouts of one iteration"
            )
            yield ("stages", name, "group_size"), count, words, block.sampling
    if stages.evaluate is not None:
        count = stages.evaluate.episodes * stages.evaluate.samples
        words = f"{stages.evaluate.episodes:,} x {stages.evaluate.samples:,} rollouts of one model"
        yield ("stages", "evaluate", "episodes"), count, words, stages.evaluate.sampling


def _check_preset_memory(settings: PipelineSettings, memory: int) -> Iterator[ConfigProblem]:
    model, shape = settings.model, PRESETS[settings.model.preset]
    embeddings = model.vocab_size * shape["hidden_size"] * TRAINED_WEIGHT_BYTES
    if embeddings > memory:
        yield ConfigProblem(
            ("model", "vocab_size"),
            f"embeddings of {model.vocab_size:,} tokens x {shape['hidden_size']} take {_format_gib(embeddings)} with "
            f"gradients and optimizer state, and this machine has {_format_gib(memory)}; lower this (the demo has 512)",
        )
    heads = shape["num_key_value_heads"] * shape["hidden_size"] // shape["num_attention_heads"]
    slots = max((block.sampling.slots for block in _list_sampling_stages(settings)), default=0)
    cache = slots * model.context * shape["num_hidden_layers"] * 2 * heads * 4
    if cache > memory:
        yield ConfigProblem(
            ("model", "context"),
            f"keys and values of {slots:,} slots x {model.context:,} tokens take {_format_gib(cache)}, and this machine has "
            f"{_format_gib(memory)}; lower this, or sampling.slots",
        )


def _list_sampling_stages(settings: PipelineSettings) -> Iterator[Any]:
    for name in settings.stages.active:
        block = getattr(settings.stages, name)
        if hasattr(block, "sampling"):
            yield block


def estimate_weight_bytes(model: ModelSettings) -> int:
    """Bytes of the model's weights and of the versions of them that are on their way to workers at a time, at least.

    Of a folder its files, of a preset its shape; 0 where the model is still to be downloaded.
    """
    if model.path is not None:
        return sum(file.stat().st_size for file in Path(model.path).glob("*.safetensors"))
    shape = PRESETS[model.preset]
    width, inner, layers = (
        shape["hidden_size"],
        shape["intermediate_size"],
        shape["num_hidden_layers"],
    )
    of_values = width * shape["num_key_value_heads"] // shape["num_attention_heads"]
    layer = 2 * width * width + 2 * width * of_values + 3 * width * inner
    return 4 * WEIGHT_VERSIONS * (model.vocab_size * width + layers * layer)


def _format_gib(size: int) -> str:
    return f"{size / GIB:,.1f} GiB"
