"""Command `posttrain validate`: check a configuration without running anything."""

from __future__ import annotations

import argparse
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

from flows.runtime.terminal import escape_control_characters
from posttrain.cli import run_setup
from posttrain.cli.arguments import add_config_argument
from rl_core.errors import ModelError, PosttrainError, SettingsError
from rl_core.models.gguf_files import find_gguf_file, read_gguf_header
from rl_core.models.named_models import is_hub_gguf_file, list_named_models

if TYPE_CHECKING:
    from rl_core.settings import ModelSettings
    from tasks.config import PipelineSettings

EXAMPLES = ("validate demo", "validate demo --set stages.policy.group_size=16 --show")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    add_config_argument(parser)
    parser.add_argument(
        "--show", action="store_true", help="print all settings, defaults included, as YAML"
    )
    parser.add_argument(
        "--import-code",
        action="store_true",
        help="import the code that it names by import path (environment, rewards, loss), which runs those modules, "
        "and check options, signatures and levels with it",
    )


def run_command(arguments: argparse.Namespace) -> int:
    """Check a configuration and print a summary of its pipeline."""
    settings = run_setup.load_pipeline_settings(
        arguments, import_code=arguments.import_code, check_servers=True
    )
    from tasks.config import digest_settings, dump_settings, list_code_paths
    from tasks.config.machine_checks import describe_checked_files

    if arguments.show:
        import yaml

        print(yaml.safe_dump(dump_settings(settings), sort_keys=False, allow_unicode=True), end="")
        return 0
    try:
        _check_chat_template(settings.model)
    except PosttrainError as error:
        key = "model.path" if isinstance(error, ModelError) else "model.chat_template"
        text = str(error).removeprefix(f"{key}: ")
        raise SettingsError(f"{arguments.config}: {key}: {text}") from error
    data = describe_checked_files(settings)
    code = ", ".join(list_code_paths(settings))
    is_unimported = bool(code) and not arguments.import_code
    if is_unimported:
        from rl_core.user_code.digest import digest_user_code

        try:
            digest_user_code(list_code_paths(settings))  # locates the code without running it
        except SettingsError as error:
            raise SettingsError(f"{arguments.config}: {error}") from error
    omission = ", but for code that was not imported" if is_unimported else ""
    lines = [
        f"{arguments.config}: OK{omission}",
        f"  pipeline  {settings.name} (settings {digest_settings(settings)})",
        f"  stages    {' -> '.join(settings.stages.active)}",
        f"  model     {_describe_model_source(settings)}",
        *(f"  data      {line}" for line in data),
    ]
    if _needs_environment(settings):
        names = [environment.name for _, environment in settings.list_environment_blocks()]
        if settings.environments:
            names = [
                f"{entry.resolved_label} ({entry.name}, weight {entry.weight:g})"
                for entry in settings.environments
            ]
        lines.append(f"  acts in   {', '.join(names)}")
    if code:
        state = "found, not imported: --import-code" if is_unimported else "imported"
        lines.append(f"  code      {code} ({state})")
    lines.append(f"  writes to {Path(settings.output).absolute() / settings.name}")
    for line in lines:
        print(_wrap_summary_line(escape_control_characters(line)))
    return 0


def _check_chat_template(model: ModelSettings) -> None:
    """Examine the chat template of a folder or of the settings, as stages do. Raises: PosttrainError.

    A hub's tokenizer is not loaded: a template that the settings name for it is only rendered.
    """
    is_folder = model.path is not None and Path(model.path).is_dir()
    if not is_folder and model.chat_template is None:
        return
    from rl_core.data.chat import ChatRenderer
    from rl_core.data.chat_template import ChatTemplate, refuse_unusable_template
    from rl_core.data.tokenizer import train_tokenizer
    from rl_core.models.causal_lm import load_tokenizer, set_chat_template

    if is_folder:
        ChatRenderer(load_tokenizer(str(model.path), model), model)
        return
    tokenizer = train_tokenizer(["a conversation"], model.vocab_size)
    set_chat_template(tokenizer, model)
    if model.path is None:
        ChatRenderer(tokenizer, model)
        return
    refuse_unusable_template(ChatTemplate(tokenizer, model))


def _wrap_summary_line(line: str) -> str:
    """Wrap a line of the summary between words if it is wider than the terminal."""
    from flows.runtime.terminal import detect_terminal_columns

    columns = detect_terminal_columns()
    if columns is None or len(line) <= max(36, columns):
        return line
    return textwrap.fill(
        line,
        max(36, columns),
        subsequent_indent=" " * 12,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _describe_model_source(settings: PipelineSettings) -> str:
    path = settings.model.path
    if path is None:
        return f"preset {settings.model.preset}, from scratch"
    if path.startswith("models:"):
        return f"{path} (registered; looked up when it runs)"
    if Path(path).is_dir():
        return path
    named = list_named_models().get(path)
    if named is not None:
        return f"{path} ({named.about}; downloaded once)"
    if is_hub_gguf_file(path):
        return f"{path} (GGUF file on the hub; looked up when it runs)"
    gguf_file = find_gguf_file(path)
    if gguf_file is not None:
        return f"{path} (GGUF: {read_gguf_header(gguf_file).describe()})"
    return f"{path} (no folder here, so a Hugging Face name; looked up when it runs)"


def _needs_environment(settings: PipelineSettings) -> bool:
    """Return whether a stage plays episodes or calls the environment's demonstrator."""
    stages = settings.stages
    data = stages.prepare_data
    independent = {"prepare_data"}
    if data is not None and data.demonstrations:
        independent.add("sft")
    if data is not None and data.preferences:
        independent |= {"preference", "reward_model"}
    return bool(set(stages.active) - independent)
