"""Command `posttrain export`: write a model for other programs: a Hugging Face folder, an adapter, or a GGUF file."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from posttrain.cli.arguments import add_output_option
from rl_core.errors import SettingsError
from rl_core.models.named_models import find_hub_problem, resolve_local_model
from rl_core.storage.atomic_files import copy_tree
from rl_core.storage.folders import publish_folder

if TYPE_CHECKING:
    from rl_core.models.gguf_export import GgufType

EXAMPLES = (
    "export models:/demo@champion --to champion",
    "export demo-7f3a --to policy    (the model of a run)",
    "export models:/demo@champion --to champion --format gguf --type q8_0",
    "export outputs/demo/stages/policy --to adapter --format adapter",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="models:/NAME@ALIAS, a run, a finished stage's or a model folder, a GGUF file, or a hub name",
    )
    parser.add_argument("--to", metavar="FOLDER", required=True, help="folder that is created")
    parser.add_argument(
        "--format",
        choices=("hf", "adapter", "gguf"),
        default="hf",
        help="hf: weights, tokenizer and template as they are stored; adapter: the LoRA adapter alone; gguf: one file "
        "for llama.cpp and ollama, proven by reading it back",
    )
    parser.add_argument(
        "--type",
        choices=("f32", "bf16", "q8_0"),
        default="q8_0",
        help="of the matrices in a GGUF file",
    )
    add_output_option(parser)


def run_command(arguments: argparse.Namespace) -> int:
    """Export a model."""
    from posttrain.cli.model_references import format_model_name

    target = Path(arguments.to)
    if target.exists():
        raise SettingsError(f"--to {target}: exists already; name a new folder")
    with tempfile.TemporaryDirectory(prefix="posttrain-") as scratch:
        folder = _resolve_model_folder(arguments.model, Path(arguments.output), Path(scratch))
        if arguments.format == "gguf":
            name = format_model_name(arguments.model)
            print(_export_gguf_file(folder, target, name, arguments.type))
            return 0
        source = Path(folder)
        if arguments.format == "adapter":
            source /= "adapter"
        if (
            not (source / "config.json").is_file()
            and not (source / "adapter_config.json").is_file()
        ):
            raise SettingsError(f"{arguments.model}: {_explain_missing_files(folder, arguments)}")
        publish_folder(target, lambda path: copy_tree(source, path), {"kind": "model"})
    print(f"{target}: {sum(file.stat().st_size for file in target.rglob('*')) / 1e6:,.1f} MB")
    return 0


def _explain_missing_files(folder: str, arguments: argparse.Namespace) -> str:
    """Explain why the model has no files of the format to copy."""
    if Path(folder).is_dir():
        return (
            "has no folder adapter, so all of its weights were trained; export it with --format hf"
        )
    if problem := find_hub_problem(folder):
        return f"there is no such folder, and {problem}"
    command = f"hf download {folder} --local-dir {arguments.to}"
    return f"is a model of the hub, which is not copied; fetch it with `{command}`, or use --format gguf"


def _resolve_model_folder(model: str, output: Path, scratch: Path) -> str:
    """Return the model's folder, or its hub name."""
    from posttrain.cli.model_references import resolve_model_references, resolve_run_model

    model = resolve_run_model(model, output)
    path = next(iter(resolve_model_references([model]).values()), None)
    if path is None:
        raise SettingsError(
            f"{model}: is no model; name models:/NAME@ALIAS, a folder with config.json, a GGUF file or a hub name"
        )
    if path.startswith("models:/"):
        from tasks.tracking import Tracking

        return str(Tracking(None, output).registry.resolve_model(path, scratch))
    return str(resolve_local_model(path, report=print) or path)


def _export_gguf_file(folder: str, target: Path, name: str, kind: GgufType) -> str:
    """Write a GGUF file with its Modelfile into a new folder, read it back and describe the comparison."""
    from transformers.utils.logging import disable_progress_bar

    from rl_core.models.gguf_export import export_gguf_folder

    disable_progress_bar()
    proofs = []
    publish_folder(
        target,
        lambda path: proofs.append(export_gguf_folder(folder, path, name, kind)),
        {"kind": "gguf"},
    )
    return (
        f"{target / proofs[0].file}: {proofs[0].describe()}\n"
        f"{target / 'Modelfile'}: for `ollama create {name} -f {target / 'Modelfile'}`"
    )
