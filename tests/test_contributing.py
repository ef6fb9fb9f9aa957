"""CONTRIBUTING.md names files and rooms that exist."""

import re

from helpers import ROOT
from test_import_rules import LEVELS, PACKAGES

TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def test_every_path_exists():
    paths = re.findall(
        r"`((?:rl_core|tasks|flows|posttrain|tests|configs|deployments)/[^`\s]*)", TEXT
    )
    assert len(paths) > 50
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_the_order_of_rooms_is_the_tested_one():
    block = TEXT.split("its own line or below:\n\n")[1].split("\n\nNo two")[0]
    told: dict[str, list[set[str]]] = {}
    floor = ""
    for line in block.splitlines():
        words = line.split()
        if words[0] in PACKAGES:
            floor, words = words[0], words[1:]
        told.setdefault(floor, []).append(set(words))
    assert told == {
        package: [level for level in LEVELS[package] if level != {""}] for package in PACKAGES
    }


def test_every_name_of_code_exists():
    """Names with an underscore or two capitals in backticks; `NAME` stands for any."""
    told = {
        name
        for code in re.findall(r"`([^`\n]+)`", TEXT)
        for name in re.findall(r"(?<![\w/.])[A-Za-z_]\w+", code)
    }
    told = {
        name for name in told if "_" in name or re.search(r"[a-z][A-Z]", name) if "NAME" not in name
    }
    folders = ("rl_core", "tasks", "flows", "posttrain", "tests", "configs", "deployments", "docs")
    sources = [
        path
        for folder in folders
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".py", ".yaml", ".md")
    ]
    known = {
        word for path in sources for word in re.findall(r"\w+", path.read_text(encoding="utf-8"))
    }
    assert len(told) > 50 and sorted(told - known - {path.stem for path in sources}) == []
