"""Command `posttrain init`: write a commented starter config, environment and reward."""

from __future__ import annotations

import argparse
import keyword
import os
import shlex
from pathlib import Path

from rl_core.errors import SettingsError
from rl_core.storage.atomic_files import make_folder, write_text_atomic
from tasks.shipped import locate_templates

TEMPLATE_FILES = ("config.yaml", "environment.py", "reward.py")

EXAMPLES = ("init my_task",)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument(
        "folder", metavar="FOLDER", help="a new folder; its name becomes that of the pipeline"
    )


def run_command(arguments: argparse.Namespace) -> int:
    """Write a starter config, environment and reward."""
    print(write_starter_project(Path(arguments.folder)))
    return 0


def write_starter_project(folder: Path) -> str:
    """Write the files into a new or empty folder; return the next commands.

    The folder's name becomes that of the pipeline and of a Python package, so it must be an identifier.
    Raises: SettingsError for an invalid name, or if one of the files exists already.
    """
    name = folder.resolve().name
    if len(name) > 64:
        raise SettingsError(
            f"{name[:64]}...: is too long a name; at most 64 letters, digits and underscores"
        )
    if not name.isidentifier() or not name.isascii() or keyword.iskeyword(name):
        raise SettingsError(
            f"{folder}: '{name}' cannot be imported by Python; use letters, digits and underscores, as in my_task"
        )
    if folder.exists() and not folder.is_dir():
        raise SettingsError(f"{folder}: is a file; name a new folder")
    existing = [file for file in TEMPLATE_FILES if os.path.lexists(folder / file)]
    if existing:
        raise SettingsError(
            f"{folder}: has {', '.join(existing)} already, which would be overwritten; name a new folder"
        )
    make_folder(folder)
    for file in TEMPLATE_FILES:
        text = (locate_templates() / file).read_text(encoding="utf-8").replace("@FOLDER@", name)
        write_text_atomic(folder / file, text.replace("FOLDER/config.yaml", f"{name}/config.yaml"))
    parent = folder.resolve().parent
    lines = [f"{folder}: wrote {', '.join(TEMPLATE_FILES)}"]
    if parent != Path.cwd():
        lines.append(f"cd {shlex.quote(str(parent))}")
    return "\n".join([*lines, f"posttrain run {name}/config.yaml"])
