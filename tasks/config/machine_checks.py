"""Checks of a configuration against this machine: data files and their rows, model folders, output, device, memory.

Memory is a lower bound of what the settings ask for, estimated before anything is allocated.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rl_core.data.files import DATA_SUFFIXES, list_data_files
from rl_core.data.records import TABLE_SUFFIXES, check_first_rows
from rl_core.errors import CheckpointError, ModelError, SettingsError
from rl_core.machine_memory import measure_machine_memory
from rl_core.models.adapter_folder import (
    check_adapter_settings,
    is_adapter_folder,
    read_adapter_folder,
)
from rl_core.models.gguf_files import find_gguf_file, read_gguf_header
from rl_core.models.named_models import is_hub_gguf_file, list_named_models
from rl_core.settings import DataSettings, EnvironmentSettings, ModelSettings
from rl_core.settings.base import replace_unchecked
from rl_core.settings.common import PRESETS
from rl_core.user_code.load import is_import_path
from tasks import stage_registry
from tasks.config.problems import ConfigProblem, Key, join_key
from tasks.config.result_checks import resolve_suite_paths
from tasks.config.settings import PipelineSettings

AGENT_ENVIRONMENTS = ("agent", "harbor")  # an agent asks the policy

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_REGISTERED_REFERENCE = re.compile(r"models:/[^/@]+(@[\w.-]+|/[\w.-]+)")

# Advice for missing files that the shipped configs name but this project does not contain.
_DOWNLOAD_HINTS = {
    "gsm8k": (
        "this project contains no data: save grade_school_math/data/train.jsonl of the repository "
        "openai/grade-school-math there (one JSON object per line with question, answer and optionally final)"
    ),
    "preferences": (
        "this project contains no data: save pairs there, one JSON object per line with prompt, chosen, rejected"
    ),
    "demonstrations": "save them there, one JSON object per line with messages, or with prompt and completion",
}

NUM_CHECKED_ROWS = 1000
MAX_FULLY_CHECKED_BYTES = 64 * 2**20  # smaller files are read completely, which takes seconds

GIB = 2**30
# Per token of a rollout in Python's lists: a reference and an object each for its ID and log-probability, and a
# reference for its mask.
TOKEN_BYTES = 8 + 28 + 8 + 24 + 8
EPISODE_BYTES = 4096  # of an episode with its trajectory, before its first token
WEIGHT_VERSIONS = 4  # in the object store of rollout workers: the initial one, and three in transit
TRAINED_WEIGHT_BYTES = 16  # float32 weight, gradient and the two moments of Adam

# their layers store the transposed weights (transformers' Conv1D)
_TRANSPOSED_MODEL_TYPES = ("gpt2", "openai-gpt")
_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_ATTENTION_NAMES = {"q_proj", "k_proj", "v_proj", "o_proj"}


def resolve_files(
    settings: PipelineSettings, folder: Path
) -> tuple[dict[Key, Any], list[ConfigProblem]]:
    """Find the files that the settings name and check what the settings need from this machine.

    A relative path is looked up from the current folder, then from `folder`, which contains the config file.
    Returns: the absolute paths by the keys that name them; the problems.
    """
    problems: list[ConfigProblem] = []
    finder = _FileFinder(folder, problems)
    paths: dict[Key, Any] = {
        **resolve_suite_paths(settings.stages.suites, finder.find_path, finder.report),
        **_find_data_files(settings.stages.prepare_data, finder),
        **{
            key: path
            for block, environment in settings.list_environment_blocks()
            for key, path in _find_environment_files(block, environment, finder).items()
        },
    }
    models: dict[Key, str | None] = {("model", "path"): settings.model.path}
    distill = settings.stages.distill
    if distill is not None and distill.teacher.url is None:
        models["stages", "distill", "teacher", "model"] = distill.teacher.model
    for key, name in models.items():
        if name is not None:
            paths[key] = _find_model_folder(name, key, finder)
    if (template := _find_template_file(settings.model, finder)) is not None:
        paths["model", "chat_template"] = template
    _check_output_folder(settings.output, settings.name, problems)
    _check_device(settings.model, problems)
    _check_rope_context(replace_unchecked(settings, paths).model, problems)
    _check_continued_adapter(replace_unchecked(settings, paths).model, problems)
    return paths, problems


class _FileFinder:
    """Lookup of files, which reports missing and unusable ones."""

    def __init__(self, folder: Path, problems: list[ConfigProblem]) -> None:
        self.folder = folder
        self.problems = problems

    def list_candidates(self, name: str) -> list[Path]:
        """List the candidates for a path of the config: from the current folder, then from the config's folder."""
        path = _expand_home(name)
        folders = (
            Path.cwd(),
            self.folder.absolute(),
        )  # joining them with an absolute path gives that path
        return list(dict.fromkeys(Path(os.path.normpath(folder / path)) for folder in folders))

    def find_path(self, name: str) -> Path | None:
        """Find the first candidate that exists."""
        return next((path for path in self.list_candidates(name) if _path_exists(path)), None)

    def resolve_data_file(
        self, name: str, key: Key, advice: str = "", *, folder: bool = False
    ) -> str:
        """Return the absolute path of a data file, or of a `folder` of them; report what is wrong with it."""
        path = self.find_path(name)
        if path is None:
            tried = " and ".join(str(candidate) for candidate in self.list_candidates(name))
            text = f"{name!r} is not a file; looked at {tried}; {advice or 'it must be a JSONL, CSV or Parquet file'}"
            self.report(key, f"{text}, or name another path with --set {join_key(key)}=FILE")
            return name
        if path.is_dir() and folder:
            is_environment = str(key[0]).startswith("environment")
            suffixes = TABLE_SUFFIXES if is_environment else DATA_SUFFIXES
            if not list_data_files(path, suffixes):
                self.report(key, f"{path} is a folder without data files ({', '.join(suffixes)})")
        elif path.is_dir():
            self.report(
                key, f"{path} is a folder; give the path of a JSONL, CSV or Parquet file in it"
            )
        elif not path.is_file():
            self.report(key, f"{path} is not a regular file (a pipe, a socket or a device)")
        elif not os.access(path, os.R_OK):
            self.report(key, f"{path} cannot be read; change its permissions")
        elif path.stat().st_size == 0:
            self.report(key, f"{path} is empty; it must contain one JSON object per line")
        return str(path)

    def report(self, key: Key, text: str) -> None:
        """Add a problem."""
        self.problems.append(ConfigProblem(key, text))


def _expand_home(name: str) -> Path:
    """Expand `~` in a path; leave it if there is no such user."""
    with contextlib.suppress(RuntimeError):
        return Path(name).expanduser()
    return Path(name)


def _is_creatable(path: Path) -> bool:
    """Return whether the file system accepts the path: False if a name in it is too long."""
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
    except (OSError, ValueError):  # the name is too long or contains a NUL
        return False


def _find_data_files(data: DataSettings | None, finder: _FileFinder) -> dict[Key, str]:
    paths: dict[Key, str] = {}
    for name in ("demonstrations", "preferences"):
        path = getattr(data, name, None)
        if path is not None:
            key = ("stages", "prepare_data", name)
            advice = _DOWNLOAD_HINTS.get(name, "")
            paths[key] = finder.resolve_data_file(path, key, advice, folder=True)
    return paths


def _find_environment_files(
    block: Key, environment: EnvironmentSettings, finder: _FileFinder
) -> dict[Key, str]:
    """Find an environment's data file, its option `path`; `prompts` also accepts a folder, and a held-out file.

    The files of `agent` are those of its tasks.
    """
    paths: dict[Key, str] = {}
    options = environment.options
    accepts_folder = environment.name == "prompts"
    names = ("path", "heldout") if accepts_folder else ("path",)
    is_agent = environment.name in AGENT_ENVIRONMENTS
    for name in ("tasks", "heldout") if is_agent else names:
        path = options.get(name)
        if not isinstance(path, str) or (accepts_folder and options.get("revision") is not None):
            continue
        if is_agent and is_import_path(path):
            continue
        key = (*block, "options", name)
        advice = _DOWNLOAD_HINTS.get(environment.name, "")
        if accepts_folder and _HUB_NAME.fullmatch(path) and "/" in path:
            advice = (
                "a data set of the hub also needs options.revision, the 40 hex digits of a commit"
            )
        paths[key] = finder.resolve_data_file(path, key, advice, folder=accepts_folder)
    return paths


def _find_folder_of_others(name: str, finder: _FileFinder) -> Path | None:
    """Return the existing folder that ORGANIZATION/MODEL would lie in, unless it holds models as downloads do."""
    if name.count("/") != 1:
        return None
    for candidate in finder.list_candidates(name):
        folder = candidate.parent
        if folder.is_dir() and not any(folder.glob("*/config.json")):
            return folder
    return None


def _find_model_folder(name: str, key: Key, finder: _FileFinder) -> str:
    """Return a model folder's absolute path; leave hub names and registered models for the stage to look up."""
    if name.startswith("models:"):
        if not _REGISTERED_REFERENCE.fullmatch(name):
            text = "is not a registered model; write models:/NAME@ALIAS or models:/NAME/VERSION"
            finder.report(key, f"{name!r} {text}")
        return name
    if name in list_named_models() or is_hub_gguf_file(name):
        return name
    path = finder.find_path(name)
    if path is None:
        if not _HUB_NAME.fullmatch(name) or name.lower().endswith(".gguf"):
            tried = " and ".join(str(candidate) for candidate in finder.list_candidates(name))
            text = f"{name!r} is neither a model folder (looked at {tried}) nor a hub name; give one of the two"
            finder.report(key, f"{text}, or models:/NAME@ALIAS")
        elif folder := _find_folder_of_others(name, finder):
            finder.report(
                key,
                f"{folder} has no '{Path(name).name}'; give a model folder, or the name of a hub model",
            )
        return name
    try:
        gguf_file = find_gguf_file(path)
        if gguf_file is not None:
            read_gguf_header(gguf_file)
            return str(gguf_file)
    except CheckpointError as error:
        finder.report(key, str(error))
        return str(path)
    if not path.is_dir():
        text = "is a file, but no GGUF file; give the folder that contains config.json"
        finder.report(key, f"{path} {text}")
    elif is_adapter_folder(path):
        _check_adapter_folder(path, key, finder)
    elif not (path / "config.json").is_file():
        suggestion = path / "model"  # where a stage writes its model
        hint = f"; did you mean {suggestion}?" if (suggestion / "config.json").is_file() else ""
        finder.report(key, f"{path} contains no config.json, so it is not a model folder{hint}")
    return str(path)


def _check_adapter_folder(path: Path, key: Key, finder: _FileFinder) -> None:
    """Report an adapter that no run can start from."""
    try:
        if key != ("model", "path"):
            raise ModelError(f"{path} is an adapter; name a folder with a complete model")
        read_adapter_folder(path)
    except ModelError as error:
        finder.report(key, str(error))


def _find_template_file(model: ModelSettings, finder: _FileFinder) -> str | None:
    """Return the absolute path of a custom chat template; None without one."""
    if model.chat_template is None:
        return None
    path = finder.find_path(model.chat_template)
    if path is None or not path.is_file():
        candidates = finder.list_candidates(model.chat_template)
        tried = " and ".join(str(candidate) for candidate in candidates)
        text = f"is not a file (looked at {tried}); name a Jinja file that contains a chat template"
        finder.report(("model", "chat_template"), f"{model.chat_template!r} {text}")
        return None
    return str(path)


def _check_output_folder(output: str, name: str, problems: list[ConfigProblem]) -> None:
    """Check that the output folder and the folders of pipeline `name` in it are writable. Create nothing."""
    path = _expand_home(output).absolute()
    nearest = next((folder for folder in (path, *path.parents) if _path_exists(folder)), None)
    key = ("output",)
    if nearest is None or not _is_creatable(path):
        problems.append(
            ConfigProblem(key, f"{output[:200]!r} cannot be a folder; give another path")
        )
    elif not nearest.is_dir():
        problems.append(ConfigProblem(key, f"{nearest} is a file; give a folder"))
    elif "?" in str(path):  # in the URL of a database the rest would be read as options
        problems.append(
            ConfigProblem(
                key, f"{path} contains a '?', which a database URL cannot; give another path"
            )
        )
    else:
        # another user may have created these
        subfolders = [path / part for part in (name, "mlflow", "prefect")]
        for folder in (nearest, *filter(_path_exists, subfolders)):
            if not os.access(folder, os.W_OK | os.X_OK):
                problems.append(
                    ConfigProblem(key, f"{folder} is not writable; give another folder")
                )


def _check_device(model: ModelSettings, problems: list[ConfigProblem]) -> None:
    if model.device != "cuda":
        return
    import torch  # imported here: it takes a second or more

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
        text = "the rotary frequencies of this model do not depend on the length; remove this key"
        problems.append(ConfigProblem(("model", "rope_context"), text))
        return
    try:
        _compute_longest_context(model)
    except SettingsError as error:
        text = str(error).removeprefix("model.rope_context: ")
        problems.append(ConfigProblem(("model", "rope_context"), text))


def _check_continued_adapter(model: ModelSettings, problems: list[ConfigProblem]) -> None:
    """Report settings of another adapter than the one that `model.path` holds."""
    if model.path is None or model.lora is None or not is_adapter_folder(model.path):
        return
    try:
        check_adapter_settings(read_adapter_folder(model.path), model.lora)
    except SettingsError as error:
        name, _, text = str(error).partition(": ")
        problems.append(ConfigProblem(("model", "lora", name.removeprefix("lora.")), text))
    except ModelError:
        pass  # reported where the folder is looked up


def read_context_length(model: ModelSettings) -> int | None:
    """Read the longest sequence of the model, in tokens; None if it cannot be known without a download."""
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
    """Read the model's vocabulary, width and depth, as far as they are known without a download."""
    config = (_read_model_config(model) if model.path is not None else None) or {}
    config = config.get("text_config", config)
    shape = {name: config.get(name) for name in ("vocab_size", "hidden_size", "num_hidden_layers")}
    return {name: value for name, value in shape.items() if isinstance(value, int)}


def compute_adapter_rank(model: ModelSettings) -> int:
    """Compute the rank of the adapter for an inference server; 0 = no adapter, or merged weights instead.

    `rl_core.models.lora.is_servable_adapter` does the same for a loaded model.
    """
    if model.lora is None:
        return 0
    config = (_read_model_config(model) if model.path is not None else None) or {}
    if config.get("model_type") in _TRANSPOSED_MODEL_TYPES:
        return 0
    text = config.get("text_config", config)
    targets = {*model.lora.target_modules} - _ATTENTION_NAMES  # never empty for all-linear
    has_experts = any(text.get(name) for name in _EXPERT_COUNTS)
    return 0 if has_experts and targets else model.lora.served_rank


def _read_model_config(model: ModelSettings) -> dict[str, Any] | None:
    """Read the configuration in the model's folder, if there is one; of a GGUF file what its header says."""
    named = list_named_models().get(str(model.path))
    if named is not None:
        return named.config
    try:
        gguf_file = find_gguf_file(str(model.path))
        if gguf_file is not None:
            return read_gguf_header(gguf_file).build_config()
    except CheckpointError:  # reported already
        return None
    try:
        folder = Path(str(model.path))
        if is_adapter_folder(folder):
            folder = Path(read_adapter_folder(folder).base)
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, ModelError):
        return None
    return config if isinstance(config, dict) else None


def find_unwritable_model(model: ModelSettings) -> str | None:
    """Explain why the initial model is not written as GGUF; None if it is, or no file here tells."""
    if model.path is None:
        return None
    from rl_core.models.gguf_export import explain_unwritable_config, explain_unwritable_tokenizer

    config = _read_model_config(model)
    if config is None:
        return None
    problem = explain_unwritable_config(config)
    if problem is None:
        with contextlib.suppress(OSError, ValueError, AttributeError):
            text = (Path(model.path) / "tokenizer.json").read_text(encoding="utf-8")
            problem = explain_unwritable_tokenizer(json.loads(text))
    return problem


def _has_length_dependent_rope(config: dict[str, Any]) -> bool:
    """Return whether the rotary frequencies may depend on the sequence length."""
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kinds = [
        part.get("rope_type", part.get("type", "default"))
        for part in (parameters, *parameters.values())
        if isinstance(part, dict)
    ]
    return any(kind not in ("default", "linear", "llama3", "proportional") for kind in kinds)


def _compute_longest_context(model: ModelSettings) -> int | None:
    """Compute the longest sequence as transformers reads the configuration, which takes seconds to import."""
    from rl_core.models.causal_lm import read_context_length

    try:
        return read_context_length(str(model.path), model)
    except CheckpointError:  # reported where the model is loaded
        return None


def describe_checked_files(settings: PipelineSettings) -> list[str]:
    """Check the first NUM_CHECKED_ROWS rows of each data file and return one line per file.

    Raises: DataError for bad rows among them, which a run would refuse as well.
    """
    lines = []
    for kind, path in _list_data_files(settings):
        rows = _check_first_rows(settings, kind, path, NUM_CHECKED_ROWS)
        checked = f"first {rows} rows" if rows == NUM_CHECKED_ROWS else f"all {rows} rows"
        lines.append(f"{path} ({kind}, {checked} checked)")
    return lines


def refuse_bad_rows(settings: PipelineSettings) -> None:
    """Refuse rows that the data stage would refuse, before a folder or run is created for it.

    Of larger files only the first NUM_CHECKED_ROWS rows are checked. With `on_bad_row: skip` nothing is refused here.
    Raises: DataError.
    """
    data = settings.stages.prepare_data
    if data is None or data.on_bad_row == "skip":
        return
    for kind, path in _list_data_files(settings):
        stat = path.stat()
        uses = tuple(settings.stages.preference_uses) if kind == "preferences" else ()
        _check_file_rows(kind, path, (stat.st_mtime_ns, stat.st_size, stat.st_ino), uses)


@functools.lru_cache(maxsize=64)  # called by a command, then by the flow that it runs
def _check_file_rows(
    kind: str, path: Path, state: tuple[int, int, int], uses: tuple[str, ...]
) -> None:
    """Check a file's rows; `state` is its modification time, size and inode."""
    max_rows = 2**62 if state[1] <= MAX_FULLY_CHECKED_BYTES else NUM_CHECKED_ROWS
    check_first_rows(kind, path, max_rows, "stop", uses)


def _list_data_files(settings: PipelineSettings) -> list[tuple[str, Path]]:
    data = settings.stages.prepare_data
    if data is None:
        return []
    sources = (("demonstrations", data.demonstrations), ("preferences", data.preferences))
    return [
        (kind, path) for kind, source in sources if source for path in list_data_files(Path(source))
    ]


def _check_first_rows(settings: PipelineSettings, kind: str, path: Path, max_rows: int) -> int:
    data = settings.stages.prepare_data
    assert data is not None
    uses = settings.stages.preference_uses if kind == "preferences" else ()
    return check_first_rows(kind, path, max_rows, data.on_bad_row, uses)


def check_memory(settings: PipelineSettings) -> Iterator[ConfigProblem]:
    """Yield settings whose rollouts of one iteration, or whose preset model, cannot fit into this machine's memory."""
    memory = measure_machine_memory()
    for key, count, description, sampling in _list_rollout_loads(settings):
        tokens = sampling.max_completion_tokens
        need = count * (EPISODE_BYTES + tokens * TOKEN_BYTES)
        if need > memory:
            yield ConfigProblem(
                key,
                f"{description} of up to {tokens:,} tokens take up to {_format_gib(need)}, and this machine has "
                f"{_format_gib(memory)}; lower this, or sampling.max_completion_tokens",
            )
    if settings.model.path is None:
        yield from _check_preset_memory(settings, memory)


def _list_rollout_loads(settings: PipelineSettings) -> Iterator[tuple[Key, int, str, Any]]:
    """Yield (key, number of rollouts in memory, description, sampling) of every stage that holds rollouts."""
    stages = settings.stages
    for name in stage_registry.list_policy_stages():
        block: Any = getattr(stages, name, None)
        if hasattr(block, "prompts_per_iteration"):
            count = block.prompts_per_iteration * block.group_size
            description = (
                f"{block.prompts_per_iteration:,} x {block.group_size:,} rollouts of one iteration"
            )
            yield ("stages", name, "group_size"), count, description, block.sampling
    if stages.evaluate is not None:
        count = stages.evaluate.episodes * stages.evaluate.samples
        description = (
            f"{stages.evaluate.episodes:,} x {stages.evaluate.samples:,} rollouts of one model"
        )
        yield ("stages", "evaluate", "episodes"), count, description, stages.evaluate.sampling


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
            f"keys and values of {slots:,} slots x {model.context:,} tokens take {_format_gib(cache)}, and this "
            f"machine has {_format_gib(memory)}; lower this, or sampling.slots",
        )


def _list_sampling_stages(settings: PipelineSettings) -> Iterator[Any]:
    for name in settings.stages.active:
        block = getattr(settings.stages, name)
        if hasattr(block, "sampling"):
            yield block


def estimate_weight_bytes(model: ModelSettings) -> int:
    """Estimate a lower bound of the bytes of the model's weights in the object store of workers.

    For a folder it is the size of its files, for a preset its shape times WEIGHT_VERSIONS; 0 if the model is still to
    be downloaded.
    """
    if model.path is not None:
        with contextlib.suppress(CheckpointError):
            if (gguf_file := find_gguf_file(model.path)) is not None:
                return 4 * read_gguf_header(gguf_file).num_parameters
        return sum(file.stat().st_size for file in Path(model.path).glob("*.safetensors"))
    shape = PRESETS[model.preset]
    width, inner_width = shape["hidden_size"], shape["intermediate_size"]
    kv_width = width * shape["num_key_value_heads"] // shape["num_attention_heads"]
    layer = 2 * width * width + 2 * width * kv_width + 3 * width * inner_width
    num_weights = model.vocab_size * width + shape["num_hidden_layers"] * layer
    return 4 * WEIGHT_VERSIONS * num_weights


def _format_gib(size: int) -> str:
    return f"{size / GIB:,.1f} GiB"
