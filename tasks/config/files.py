"""Checks of a configuration against this machine: data files, model folders, an output folder, a device."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import re
from pathlib import Path
from typing import Any, TypeVar

from rl_core.data.files import DATA_SUFFIXES, data_files
from rl_core.data.prompt_files import TABLE_SUFFIXES
from rl_core.errors import CheckpointError, SettingsError
from rl_core.settings import DataSettings, EnvironmentSettings, ModelSettings, Settings
from tasks.config.problems import Key, Problem, dotted
from tasks.config.settings import PipelineSettings

__all__ = ["context_of", "replaced", "resolve_files", "shape_of"]

S = TypeVar("S", bound=Settings)

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_REGISTERED = re.compile(r"models:/[^/@]+(@[\w.-]+|/[\w.-]+)")

# What to say when a file is missing that the shipped configs name, but that this project does not carry.
_WHERE_TO_GET = {
    "gsm8k": (
        "this project carries no data: save grade_school_math/data/train.jsonl of the repository "
        "openai/grade-school-math there (one JSON object a line with question, answer and, if you like, final)"
    ),
    "preferences": (
        "this project carries no data: save pairs there, one JSON object a line with prompt, chosen, rejected"
    ),
    "demonstrations": "save them there, one JSON object a line with messages, or with prompt and completion",
}


def resolve_files(settings: PipelineSettings, folder: Path) -> tuple[PipelineSettings, list[Problem]]:
    """Make the data and model paths absolute and check what the settings need from this machine.

    A relative path is looked up from the current folder, then from `folder`, the one that the config file is in.
    """
    problems: list[Problem] = []
    finder = _Finder(folder, problems)
    stages = settings.stages
    data = stages.prepare_data
    if data is not None:
        stages = replaced(stages, prepare_data=_with_data_files(data, finder))
    if stages.distill is not None and stages.distill.teacher.url is None:
        teacher = stages.distill.teacher
        place = _model_folder(teacher.model, ("stages", "distill", "teacher", "model"), finder)
        stages = replaced(stages, distill=replaced(stages.distill, teacher=replaced(teacher, model=place)))
    environment = _with_environment_file(settings.environment, finder)
    model = replaced(settings.model, path=_model_folder(settings.model.path, ("model", "path"), finder))
    model = _with_template_file(model, finder)
    _check_output(settings.output, settings.name, problems)
    _check_device(settings.model, problems)
    _check_rope_context(model, problems)
    return replaced(settings, stages=stages, environment=environment, model=model), problems


def replaced(settings: S, **changed: Any) -> S:
    """`dataclasses.replace` without the checks: what they found was reported, and finding goes on."""
    result = object.__new__(type(settings))
    for field in dataclasses.fields(settings):
        object.__setattr__(result, field.name, changed.get(field.name, getattr(settings, field.name)))
    return result


class _Finder:
    """Looks files up and notes what is not there."""

    def __init__(self, folder: Path, problems: list[Problem]) -> None:
        self.folder = folder
        self.problems = problems

    def candidates(self, name: str) -> list[Path]:
        """Candidates for a path of the config: from the current folder, then from the config's own."""
        path = _expanded(name)
        places = [path] if path.is_absolute() else [Path.cwd() / path, self.folder.absolute() / path]
        return list(dict.fromkeys(Path(os.path.normpath(place)) for place in places))

    def find(self, name: str) -> Path | None:
        """The first place at which something lies."""
        return next((place for place in self.candidates(name) if _exists(place)), None)

    def data_file(self, name: str, key: Key, advice: str = "", *, folder: bool = False) -> str:
        """The absolute path of a data file, or `folder` of some; what is wrong with it becomes a problem."""
        path = self.find(name)
        if path is None:
            tried = " and ".join(str(place) for place in self.candidates(name))
            text = f"{name!r} is no file; looked at {tried}; {advice or 'it must be a JSONL, CSV or Parquet file'}"
            self.problems.append(Problem(key, f"{text}, or name another place with --set {dotted(key)}=FILE"))
            return name
        if path.is_dir() and folder:
            suffixes = TABLE_SUFFIXES if key[0] == "environment" else DATA_SUFFIXES
            if not data_files(path, suffixes):
                kinds = ", ".join(suffixes)
                self.problems.append(Problem(key, f"{path} is a folder without a data file in it ({kinds})"))
        elif path.is_dir():
            self.problems.append(
                Problem(key, f"{path} is a folder; give the path of a JSONL, CSV or Parquet file in it")
            )
        elif not path.is_file():
            self.problems.append(Problem(key, f"{path} is no regular file (a pipe, a socket or a device)"))
        elif not os.access(path, os.R_OK):
            self.problems.append(Problem(key, f"{path} cannot be read; change its permissions"))
        elif path.stat().st_size == 0:
            self.problems.append(Problem(key, f"{path} is empty; it must hold one JSON object a line"))
        return str(path)


def _expanded(name: str) -> Path:
    """The path with `~` put in; as it is where there is no such user."""
    with contextlib.suppress(RuntimeError):
        return Path(name).expanduser()
    return Path(name)


def _can_be_made(path: Path) -> bool:
    """False = a name in it is longer than the file system takes."""
    try:
        path.lstat()
    except OSError as error:
        return error.errno != errno.ENAMETOOLONG
    except ValueError:
        return False
    return True


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # too long a name, a NUL in it
        return False


def _with_data_files(data: DataSettings, finder: _Finder) -> DataSettings:
    changed = {}
    for name in ("demonstrations", "preferences"):
        path = getattr(data, name)
        if path is not None:
            key = ("stages", "prepare_data", name)
            changed[name] = finder.data_file(path, key, _WHERE_TO_GET.get(name, ""), folder=True)
    return replaced(data, **changed)


def _with_environment_file(environment: EnvironmentSettings, finder: _Finder) -> EnvironmentSettings:
    """An environment's option `path` names its data file; `prompts` takes a folder too, and a file held out."""
    options = dict(environment.options)
    takes_tables = environment.name == "prompts"
    for name in ("path", "heldout") if takes_tables else ("path",):
        path = options.get(name)
        if not isinstance(path, str) or (takes_tables and options.get("revision") is not None):
            continue
        key = ("environment", "options", name)
        advice = _WHERE_TO_GET.get(environment.name, "")
        if takes_tables and _HUB_NAME.fullmatch(path) and "/" in path:
            advice = "a data set of the hub needs options.revision too, the 40 hex digits of a commit"
        options[name] = finder.data_file(path, key, advice, folder=takes_tables)
    return replaced(environment, options=options)


def _model_folder(name: str | None, key: Key, finder: _Finder) -> str | None:
    """A folder becomes an absolute path; hub names and registered models are left for the stage to look up."""
    if name is None:
        return None
    if name.startswith("models:"):
        if not _REGISTERED.fullmatch(name):
            text = f"{name!r} is no registered model; write models:/NAME@ALIAS or models:/NAME/VERSION"
            finder.problems.append(Problem(key, text))
        return name
    path = finder.find(name)
    if path is None:
        if not _HUB_NAME.fullmatch(name):
            tried = " and ".join(str(place) for place in finder.candidates(name))
            text = f"{name!r} is no model folder (looked at {tried}) and no hub name; give one of the two"
            finder.problems.append(Problem(key, f"{text}, or models:/NAME@ALIAS"))
        return name
    if not path.is_dir():
        finder.problems.append(Problem(key, f"{path} is a file; give the folder that holds config.json"))
    elif not (path / "config.json").is_file():
        # A stage writes its model into model/, and with LoRA the adapter alone into a folder in there.
        near = path.parent if (path / "adapter_config.json").is_file() else path / "model"
        hint = f"; did you mean {near}?" if (near / "config.json").is_file() else ""
        finder.problems.append(Problem(key, f"{path} holds no config.json, so it is no model folder{hint}"))
    return str(path)


def _with_template_file(model: ModelSettings, finder: _Finder) -> ModelSettings:
    """The file of an own chat template becomes an absolute path."""
    if model.chat_template is None:
        return model
    path = finder.find(model.chat_template)
    if path is None or not path.is_file():
        tried = " and ".join(str(place) for place in finder.candidates(model.chat_template))
        text = f"{model.chat_template!r} is no file (looked at {tried}); name a Jinja file that holds a chat template"
        finder.problems.append(Problem(("model", "chat_template"), text))
        return model
    return replaced(model, chat_template=str(path))


def _check_output(output: str, name: str, problems: list[Problem]) -> None:
    """The output folder, and what pipeline `name` writes in it, can be made and written; nothing is made here."""
    path = _expanded(output).absolute()
    nearest = next((place for place in (path, *path.parents) if _exists(place)), None)
    key = ("output",)
    if nearest is None or not _can_be_made(path):
        problems.append(Problem(key, f"{output[:200]!r} cannot be a folder; give another path"))
    elif not nearest.is_dir():
        problems.append(Problem(key, f"{nearest} is a file; give a folder"))
    elif "?" in str(path):  # of the databases in it; what follows would be taken for options
        problems.append(Problem(key, f"{path} holds a '?', which the address of a database cannot; give another path"))
    else:
        inside = [path / part for part in (name, "mlflow", "prefect")]  # somebody else may have made them
        for place in (nearest, *filter(_exists, inside)):
            if not os.access(place, os.W_OK | os.X_OK):
                problems.append(Problem(key, f"{place} cannot be written into; give another folder"))


def _check_device(model: ModelSettings, problems: list[Problem]) -> None:
    if model.device != "cuda":
        return
    import torch  # a second or more: only where the answer depends on it

    if not torch.cuda.is_available():
        problems.append(Problem(("model", "device"), "cuda, but torch sees no GPU here; use auto or cpu"))


def _check_rope_context(model: ModelSettings, problems: list[Problem]) -> None:
    if model.rope_context is None:
        return
    config = _model_config(model) if model.path is not None else {}
    if config is None:
        return  # reported already, or it has to be downloaded first
    if not _may_follow_the_length(config):
        text = "the rotary frequencies of this model do not depend on the length; leave it out"
        problems.append(Problem(("model", "rope_context"), text))
        return
    try:
        _longest(model)
    except SettingsError as error:
        problems.append(Problem(("model", "rope_context"), str(error).removeprefix("model.rope_context: ")))


def context_of(model: ModelSettings) -> int | None:
    """Longest sequence of the model, in tokens; None where it cannot be known without a download."""
    if model.path is None:
        return model.context
    config = _model_config(model)
    if config is None:
        return None
    if _may_follow_the_length(config):
        with contextlib.suppress(SettingsError):
            return _longest(model)
    length = config.get("max_position_embeddings")
    return length if isinstance(length, int) and length > 0 else None


def shape_of(model: ModelSettings) -> dict[str, int]:
    """Vocabulary, width and depth of the model, as far as they are known without a download."""
    config = (_model_config(model) if model.path is not None else None) or {}
    config = config.get("text_config", config)
    found = {name: config.get(name) for name in ("vocab_size", "hidden_size", "num_hidden_layers")}
    return {name: value for name, value in found.items() if isinstance(value, int)}


_TRANSPOSED = ("gpt2", "openai-gpt")  # their layers hold the weights the other way round (transformers' Conv1D)


def adapter_rank(model: ModelSettings) -> int:
    """Rank of the adapter that an inference server will be sent; 0 = none, or merged weights in its place.

    As `rl_core.models.lora.serves_alone` tells of a loaded model.
    """
    if model.lora is None:
        return 0
    config = (_model_config(model) if model.path is not None else None) or {}
    return 0 if config.get("model_type") in _TRANSPOSED else model.lora.served_rank


def _model_config(model: ModelSettings) -> dict[str, Any] | None:
    """The configuration in the model's folder, where there is one."""
    try:
        config = json.loads((Path(str(model.path)) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return config if isinstance(config, dict) else None


def _may_follow_the_length(config: dict[str, Any]) -> bool:
    """True = its rotary frequencies are of no kind that certainly does not depend on the length."""
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kinds = [
        part.get("rope_type", part.get("type", "default"))
        for part in (parameters, *parameters.values())
        if isinstance(part, dict)
    ]
    return any(kind not in ("default", "linear", "llama3", "proportional") for kind in kinds)


def _longest(model: ModelSettings) -> int | None:
    """Longest sequence by transformers' reading of the configuration, which takes seconds to import."""
    from rl_core.models.causal_lm import context_length

    try:
        return context_length(str(model.path), model)
    except CheckpointError:  # reported where the model is loaded
        return None
