"""Names that only the source tells: texts in it that name files, tags, events and variables."""

from __future__ import annotations

import ast
import functools
import importlib.metadata
import re
import sys
import tomllib
from collections.abc import Callable
from typing import Any

import matplotlib

from helpers import ROOT

Names = dict[str, str]  # name -> what belongs to it: a default, a type, parameters; "" = nothing

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGES = tuple(
    name.rstrip("*") for name in PROJECT["tool"]["setuptools"]["packages"]["find"]["include"]
)


@functools.cache
def parse_sources() -> tuple[ast.Module, ...]:
    """Return the syntax trees of all modules of the packages."""
    paths = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    return tuple(ast.parse(path.read_text()) for path in paths)


def scan_literals(pattern: str) -> set[str]:
    """Return the texts in the source that match a pattern as a whole."""
    matches: Callable[[str], Any] = re.compile(pattern).fullmatch
    return {
        node.value
        for tree in parse_sources()
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and matches(node.value)
    }


def scan_calls(function: str, keyword: str = "") -> set[str]:
    """Return the texts that calls of a function have as first argument, or in a keyword."""
    found = set()
    for tree in parse_sources():
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
        for call in calls:
            if ast.unparse(call.func).rpartition(".")[2] != function:
                continue
            named = [argument.value for argument in call.keywords if argument.arg == keyword]
            given = named if keyword else call.args[:1]
            found |= {one.value for one in given if isinstance(one, ast.Constant)}
    return {text for text in found if isinstance(text, str)}


def list_environment_variables() -> Names:
    """Return the environment variables of the project that code and deployments name."""
    found = scan_literals(r"POSTTRAIN_[A-Z][A-Z_]*[A-Z]")
    for path in (ROOT / "deployments").rglob("*"):
        if path.is_file():
            found |= set(
                re.findall(r"POSTTRAIN_[A-Z][A-Z_]*[A-Z]", path.read_text(errors="replace"))
            )
    return dict.fromkeys(found, "")


def list_file_names() -> Names:
    """Return the file names that the code names, its own sources left out."""
    endings = "json|jsonl|yaml|db|log|html|csv|md|png|svg|parquet|arrow|safetensors|lock|holder|txt"
    return dict.fromkeys(scan_literals(rf"\.?[\w.-]*\w\.(?:{endings})"), "")


def list_dotted_names(listed: set[str], peers: set[str]) -> Names:
    """Return the dotted names in the code that have no list of their own, as tags and events.

    Args:
        listed: names that other lists have.
        peers: names of other frameworks, whose beginnings are none of ours.
    """
    found = scan_literals(r"[a-z][a-z0-9_]*(?:\.[a-z][A-Za-z0-9_]*)+\.?")
    return {
        name: ""
        for name in found
        if name.rstrip(".") not in listed
        and not is_code_name(name)
        and not any(peer.startswith(name) for peer in peers)
    }


def is_code_name(name: str) -> bool:
    """Return True for a name of a module or of something in it, of this project or another one."""
    head, _, rest = name.rstrip(".").partition(".")
    if name.rpartition(".")[2] in ("py", "c", "h", "toml", "tar", "proto"):
        return True
    if head in PACKAGES:
        place = ROOT / head / rest.replace(".", "/")
        return place.exists() or place.with_suffix(".py").exists()
    foreign = head in sys.stdlib_module_names or head in find_installed_modules()
    return foreign or name in matplotlib.rcParams


@functools.cache
def find_installed_modules() -> frozenset[str]:
    """Return the top-level modules of other projects: installed ones, and those of our extras."""
    project = PROJECT["project"]
    extras = [name for names in project["optional-dependencies"].values() for name in names]
    named = {re.split(r"[^\w-]", text)[0] for text in [*project["dependencies"], *extras]}
    return frozenset({*importlib.metadata.packages_distributions(), *named} - set(PACKAGES))
