"""Model versions: a Hugging Face folder as an MLflow model, byte for byte, and its entry in the registry.

MLflow's `transformers.save_model` loads the weights to write them again, asks the hub for a licence, and refuses a
folder with transformers 5.23. Therefore the flavor's description is written here, around hard links to the files as the
stage published them. `mlflow.transformers.load_model`, `mlflow.pyfunc.load_model` and `from_pretrained` on `model/` all
read the result. With a chat template, `pyfunc` and `mlflow models serve` take messages and render them: a policy is
MLflow's task llm/v1/chat, a reward model is scored by `tasks/tracking/reward_scoring.py`.

    MLmodel  requirements.txt  python_env.yaml  conda.yaml  input_example.json  serving_input_example.json
    model/                 config.json, *.safetensors, tokenizer files, ...: the stage's folder
    components/tokenizer/  a second copy of the tokenizer, where the flavor looks for it
    code/                  of a reward model with a chat template: the program that scores conversations
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import re
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rl_core.data.chat import ChatRenderer
from rl_core.errors import DataError, SettingsError
from rl_core.storage.atomic_files import make_folder
from rl_core.storage.faults import inject_fault
from rl_core.storage.folders import link_file, link_tree
from tasks.tracking.journal import SCRATCH_PREFIX
from tasks.tracking.store import TrackingStore, is_missing_error
from tasks.tracking.values import build_metric_store_name, list_pinned_versions, sanitize_store_name

if TYPE_CHECKING:
    from mlflow.entities import LoggedModel
    from mlflow.models import ModelSignature


log = logging.getLogger(__name__)

UPLOAD_PREFIX = ".artifact.uploading."  # name prefix of a file while MLflow writes it
Kind = Literal["policy", "reward_model"]
MODEL_TASKS: dict[str, tuple[str, str]] = {
    "policy": ("text-generation", "TextGenerationPipeline"),
    "reward_model": ("text-classification", "TextClassificationPipeline"),
}
_CHAT_TASK = "llm/v1/chat"  # MLflow's name
_VERSIONS_TAG = "mlflow.modelVersions"  # of a logged model: its registered versions, which its page shows as links
_SCORING_MODULE = "posttrain_reward_scoring"  # name of reward_scoring in an artifact
_MAX_NEW_TOKENS = 512  # of an answer whose request names no limit
MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.\- ]{0,99}")
PICKLE_SUFFIXES = {
    ".bin",
    ".ckpt",
    ".dill",
    ".joblib",
    ".msgpack",
    ".npy",
    ".npz",
    ".pickle",
    ".pkl",
    ".pt",
    ".pt2",
    ".pth",
}
TOKENIZER_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "chat_template*",
    "sentencepiece*",
    "spiece*",
)


def find_local_artifacts(uri: str | None, identity: str) -> Path | None:
    """Return the artifact folder of one run or model if it is on this machine and named by its id."""
    from mlflow.utils.file_utils import local_file_uri_to_path

    if not uri or ("://" in uri and not uri.startswith("file://")):
        return None
    path = Path(local_file_uri_to_path(uri))
    if path.name == "artifacts":
        path = path.parent
    is_named_by_id = path.is_absolute() and path.name == identity
    return path if is_named_by_id and path.is_dir() and not path.is_symlink() else None


def clear_broken_uploads(folder: Path, before: float) -> int:
    """Delete files that processes killed during an upload left in a run's folder; return their number.

    Args:
        before: seconds since the epoch; later files may belong to an upload that is still running.
    """
    num_deleted = 0
    for path in folder.rglob(f"{UPLOAD_PREFIX}*"):
        with contextlib.suppress(OSError):
            if path.lstat().st_mtime < before:
                path.unlink()
                num_deleted += 1
    return num_deleted


def check_model_folder(folder: Path) -> None:
    """Refuse a model folder that is incomplete or contains anything that loading could execute.

    Raises: DataError naming the file.
    """
    if not (folder / "config.json").is_file():
        raise DataError(f"{folder} is no Hugging Face model folder: config.json is missing")
    if not list(folder.glob("*.safetensors")):
        raise DataError(f"{folder} holds no *.safetensors")
    for path in sorted(folder.rglob("*")):
        if path.is_symlink():
            raise DataError(f"{path} is a link; a model folder holds files only")
        if path.is_file() and (
            path.suffix in PICKLE_SUFFIXES or path.suffix == ".py" or _is_pickled(path)
        ):
            raise DataError(
                f"{path} may execute code when it is loaded; a model folder holds safetensors and JSON only"
            )


def _is_pickled(path: Path) -> bool:
    with path.open("rb") as file:
        head = file.read(2)
    # A pickle of protocol 2 to 5; a zip is what torch.save writes.
    return head[:2] == b"PK" or (head[:1] == b"\x80" and len(head) == 2 and 2 <= head[1] <= 5)


def digest_model(folder: Path) -> str:
    """Return the SHA-256 over the names and bytes of all files, sorted by name."""
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        digest.update(path.relative_to(folder).as_posix().encode() + b"\0")
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def write_mlflow_model(
    source: Path,
    target: Path,
    kind: Kind,
    *,
    input_example: str | None = None,
    model_id: str | None = None,
) -> None:
    """Write the MLflow model `target` around the Hugging Face folder `source`. Files are hard links where possible."""
    import transformers
    from mlflow import pyfunc
    from mlflow.models import Model

    check_model_folder(source)
    config = json.loads((source / "config.json").read_text())
    task, pipeline = MODEL_TASKS[kind]
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(source), local_files_only=True)
    link_tree(source, target / "model")
    (target / "components" / "tokenizer").mkdir(parents=True)
    for pattern in TOKENIZER_FILES:
        for path in source.glob(pattern):
            link_file(path, target / "components" / "tokenizer" / path.name)
    is_chat = bool(tokenizer.chat_template)
    text = input_example or "Hello"
    messages = [{"role": "user", "content": text}]
    if kind == "reward_model":
        messages.append({"role": "assistant", "content": "Hi"})
    chat = {"messages": messages}
    example = chat if is_chat else [text]
    serving_example = chat if is_chat else {"inputs": example}
    (target / "input_example.json").write_text(json.dumps(example))
    (target / "serving_input_example.json").write_text(json.dumps(serving_example, indent=2))
    description = Model(
        model_id=model_id,
        signature=_build_signature(kind, is_chat=is_chat),
        metadata={"task": _CHAT_TASK} if is_chat and kind == "policy" else None,
    )
    description.saved_input_example_info = {
        "artifact_path": "input_example.json",
        "serving_input_path": "serving_input_example.json",
        "type": "json_object",
    }
    dtype = config.get("dtype") or config.get("torch_dtype") or "float32"
    description.add_flavor(
        "transformers",
        transformers_version=transformers.__version__,
        code=None,
        task=task,
        instance_type=pipeline,
        torch_dtype=f"torch.{dtype}",
        pipeline_model_type=config["architectures"][0],
        source_model_name=source.name,
        model_binary="model",
        components=["tokenizer"],
        tokenizer_type=type(tokenizer).__name__,
        **({"inference_task": _CHAT_TASK} if is_chat and kind == "policy" else {}),
    )
    pyfunc.add_to_model(
        description,
        **_prepare_loader(target, kind, tokenizer),
        conda_env="conda.yaml",
        python_env="python_env.yaml",
    )
    description.model_size_bytes = sum(
        path.stat().st_size for path in (target / "model").rglob("*") if path.is_file()
    )
    description.save(str(target / "MLmodel"))
    _write_requirements(target)


def _prepare_loader(target: Path, kind: Kind, tokenizer: Any) -> dict[str, Any]:
    """Return what `pyfunc` loads the model with; write the program that scores a reward model's conversations."""
    is_chat = bool(tokenizer.chat_template)
    model_config: dict[str, Any] | None = None
    loader: dict[str, Any] = {"loader_module": "mlflow.transformers"}
    if kind == "reward_model" and is_chat:
        make_folder(target / "code")
        program = Path(__file__).with_name("reward_scoring.py").read_text(encoding="utf-8")
        (target / "code" / f"{_SCORING_MODULE}.py").write_text(program, encoding="utf-8")
        loader = {"loader_module": _SCORING_MODULE, "code": "code"}
        model_config = {"end_of_turn": ChatRenderer(tokenizer).facts.end_of_turn}
    elif kind == "reward_model":
        # A reward is the head's raw output; by default the pipeline would apply a sigmoid.
        model_config = {"function_to_apply": "none"}
    elif is_chat:
        model_config = {
            "do_sample": True,  # otherwise a request's temperature, top_p and top_k are ignored
            "max_new_tokens": min(_MAX_NEW_TOKENS, max(1, tokenizer.model_max_length // 2)),
            "add_special_tokens": False,  # the template writes them
        }
    return {**loader, "model_config": model_config}


def _build_signature(kind: Kind, *, is_chat: bool) -> ModelSignature:
    from mlflow.models import ModelSignature
    from mlflow.types import ColSpec, DataType, ParamSchema, ParamSpec, Schema
    from mlflow.types.llm import CHAT_MODEL_INPUT_SCHEMA, CHAT_MODEL_OUTPUT_SCHEMA

    inputs = Schema([ColSpec(DataType.string)])
    if kind == "reward_model":
        outputs = Schema([ColSpec(DataType.string, "label"), ColSpec(DataType.double, "score")])
        if is_chat:
            columns: dict[str, Any] = {
                "messages": CHAT_MODEL_INPUT_SCHEMA.input_dict()["messages"].type,
                "prompt": DataType.string,
                "completion": DataType.string,
                "text": DataType.string,
            }
            inputs = Schema([ColSpec(type_, name, False) for name, type_ in columns.items()])
        return ModelSignature(inputs=inputs, outputs=outputs)
    if is_chat:
        return ModelSignature(inputs=CHAT_MODEL_INPUT_SCHEMA, outputs=CHAT_MODEL_OUTPUT_SCHEMA)
    params = ParamSchema(
        [
            ParamSpec("max_new_tokens", DataType.long, 64),
            ParamSpec("do_sample", DataType.boolean, False),
        ]
    )
    return ModelSignature(inputs=inputs, outputs=Schema([ColSpec(DataType.string)]), params=params)


def _write_requirements(target: Path) -> None:
    pins = list_pinned_versions("mlflow", "torch", "transformers", "safetensors", "tokenizers")
    python = ".".join(str(part) for part in sys.version_info[:3])
    (target / "requirements.txt").write_text("\n".join(pins) + "\n")
    (target / "python_env.yaml").write_text(
        f"python: {python}\nbuild_dependencies:\n- pip\ndependencies:\n- -r requirements.txt\n"
    )
    lines = "".join(f"  - {pin}\n" for pin in pins)
    (target / "conda.yaml").write_text(
        f"name: mlflow-env\nchannels:\n- conda-forge\ndependencies:\n- python={python}\n- pip\n- pip:\n{lines}"
    )


def check_model_registration(folder: Path, kind: str, registered_name: str) -> None:
    """Refuse a folder that cannot become a version.

    Raises: SettingsError for an invalid name or kind; DataError as `check_model_folder`.
    """
    if not MODEL_NAME.fullmatch(registered_name):
        raise SettingsError(
            f"registered model name '{registered_name}': letters, digits, space and _ . - only, at most 100, "
            "and a letter or digit first"
        )
    if kind not in MODEL_TASKS:
        raise SettingsError(f"model kind '{kind}' is none of {', '.join(MODEL_TASKS)}")
    check_model_folder(folder)


def register_logged_model(
    store: TrackingStore,
    run_id: str,
    folder: Path,
    kind: Kind,
    registered_name: str,
    *,
    metrics: dict[str, float],
    points: Mapping[str, tuple[int, int]],
    tags: dict[str, Any],
    input_example: str | None,
    step: int,
    description: str,
    scratch: Path,
) -> int:
    """Store the folder as a logged model of the run and as a new registered version; return the version's number.

    A killed attempt is continued: the same model from the same run is one model, and its metrics are logged once.
    Args:
        points: (step, time in ms) of each metric in the run's curves, where MLflow logs it as well; others are left
            out.
        scratch: folder for temporaries.
    """
    check_model_registration(folder, kind, registered_name)
    digest = digest_model(folder)
    text_tags = {name: str(value) for name, value in tags.items() if value is not None}
    text_tags |= {"kind": kind, "model_digest": digest}
    with store.translate_errors("store a model"):
        _ensure_registered_model(store, registered_name, kind)
        existing = store.client.search_model_versions(
            f"name = '{registered_name}' and run_id = '{run_id}'"
        )
        for version in existing:
            if version.tags.get("model_digest") == digest:
                experiment_id = store.client.get_run(run_id).info.experiment_id
                logged = _find_earlier_attempt(store, experiment_id, run_id, digest)
                if logged is not None:
                    _link_version(store, logged.model_id, registered_name, version.version)
                return int(version.version)
        model_id = _upload_logged_model(
            store, run_id, folder, kind, registered_name, text_tags, input_example, scratch
        )
        _attach_to_run(store, run_id, model_id, metrics, points, step)
        # A local registry would look up a models:/ source in the process-wide store, which may be a different one.
        source = f"models:/{model_id}"
        if store.is_local:
            source = store.client.get_logged_model(model_id).artifact_location
        created = store.client.create_model_version(
            registered_name,
            source,
            run_id=run_id,
            tags=text_tags,
            model_id=model_id,
            description=description or _describe_version(kind, metrics, text_tags),
            await_creation_for=30,
        )
        inject_fault("model.versioned")
        _link_version(store, model_id, registered_name, created.version)
    return int(created.version)


def _link_version(store: TrackingStore, model_id: str, name: str, version: str | int) -> None:
    """Link a version from the page of its logged model. A tracking server does that itself, a database does not."""
    link = {"name": name, "version": str(version)}
    tags = store.client.get_logged_model(model_id).tags
    links = [
        {**other, "version": str(other["version"])}
        for other in json.loads(tags.get(_VERSIONS_TAG, "[]"))
    ]
    if link not in links:
        store.client.set_logged_model_tags(model_id, {_VERSIONS_TAG: json.dumps([*links, link])})


def _ensure_registered_model(store: TrackingStore, name: str, kind: Kind) -> None:
    from mlflow.exceptions import MlflowException

    try:
        store.client.get_registered_model(name)
    except MlflowException as error:
        if not is_missing_error(error):
            raise
        plural = "Policies" if kind == "policy" else "Reward models"
        note = f"{plural} trained by posttrain. `champion` passed the promotion gate last; `challenger` did not (yet)."
        try:
            store.client.create_registered_model(name, tags={"kind": kind}, description=note)
        except MlflowException as creation_error:
            if creation_error.error_code != "RESOURCE_ALREADY_EXISTS":  # another process was faster
                raise


def _upload_logged_model(
    store: TrackingStore,
    run_id: str,
    folder: Path,
    kind: Kind,
    name: str,
    tags: dict[str, str],
    input_example: str | None,
    scratch: Path,
) -> str:
    experiment_id = store.client.get_run(run_id).info.experiment_id
    logged = _find_earlier_attempt(store, experiment_id, run_id, tags["model_digest"])
    if logged is None:
        logged = store.client.create_logged_model(
            experiment_id,
            name=sanitize_store_name(name).replace("/", "-"),
            source_run_id=run_id,
            tags=tags,
            model_type=kind,
        )
    elif str(logged.status) == "READY":
        return str(logged.model_id)
    else:
        artifacts = find_local_artifacts(logged.artifact_location, logged.model_id)
        if artifacts is not None:
            clear_broken_uploads(artifacts, time.time())
    inject_fault("model.made")
    make_folder(scratch)
    with tempfile.TemporaryDirectory(prefix=SCRATCH_PREFIX, dir=scratch) as temporary:
        target = Path(temporary) / "artifact"
        target.mkdir()
        try:
            write_mlflow_model(
                folder, target, kind, input_example=input_example, model_id=logged.model_id
            )
            store.client.log_model_artifacts(logged.model_id, str(target))
            inject_fault("model.uploaded")
        except BaseException:
            store.client.finalize_logged_model(logged.model_id, "FAILED")
            raise
    store.client.finalize_logged_model(logged.model_id, "READY")
    inject_fault("model.ready")
    return str(logged.model_id)


def _find_earlier_attempt(
    store: TrackingStore, experiment_id: str, run_id: str, digest: str
) -> LoggedModel | None:
    """Find the logged model of an attempt that was killed before its version was created."""
    models = store.client.search_logged_models([experiment_id], f"tags.`model_digest` = '{digest}'")
    return next((model for model in models if model.source_run_id == run_id), None)


def _attach_to_run(
    store: TrackingStore,
    run_id: str,
    model_id: str,
    metrics: dict[str, float],
    points: Mapping[str, tuple[int, int]],
    step: int,
) -> None:
    """Link the model to its run as an output, with its metrics, so that models can be ranked."""
    from mlflow.entities import LoggedModelOutput, Metric

    outputs = store.client.get_run(run_id).outputs
    if model_id not in [output.model_id for output in (outputs.model_outputs if outputs else ())]:
        store.client.log_outputs(run_id, [LoggedModelOutput(model_id, step)])
    entries = [
        Metric(
            build_metric_store_name(name),
            float(value),
            points[name][1],
            points[name][0],
            model_id=model_id,
        )
        for name, value in metrics.items()
        if name in points
    ]
    if entries:
        store.client.log_batch(run_id, metrics=entries, synchronous=True)


def _describe_version(kind: Kind, metrics: dict[str, float], tags: dict[str, str]) -> str:
    """Describe a version in one line, which the list of versions shows as plain text."""
    parent = f" from version {tags['parent_version']}" if tags.get("parent_version") else ""
    numbers = ", ".join(f"{name} {value:.4g}" for name, value in sorted(metrics.items())[:6])
    return f"{tags.get('stage', kind)}{parent}" + (f": {numbers}" if numbers else "")
