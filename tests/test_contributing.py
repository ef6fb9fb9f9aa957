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
    block = TEXT.split("a line above it in this list:\n\n")[1].split("\n\n`tests/")[0]
    listed: dict[str, list[set[str]]] = {}
    package = ""
    for line in block.splitlines():
        words = line.split()
        if words[0] in PACKAGES and not line.startswith(" " * 8):
            package, words = words[0], words[1:]
        listed.setdefault(package, []).append(set(words))
    expected = {
        package: [level - {""} for level in levels if level != {""}]
        for package, levels in LEVELS.items()
    }
    assert listed == expected


def test_the_page_is_short():
    assert len(TEXT.encode()) < 12_000


def test_every_name_of_code_exists():
    """Check names in backticks that have an underscore or two capitals; `NAME` stands for any."""
    named = {
        name
        for code in re.findall(r"`([^`\n]+)`", TEXT)
        for name in re.findall(r"(?<![\w/.])[A-Za-z_]\w+", code)
    }
    named = {
        name
        for name in named
        if "_" in name or re.search(r"[a-z][A-Z]", name)
        if "NAME" not in name
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
    assert len(named) > 20 and sorted(named - known - {path.stem for path in sources}) == []
