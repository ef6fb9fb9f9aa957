"""JavaScript, CSS and HTML of the pages: valid, self-contained, and part of the package."""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from html.parser import HTMLParser
from pathlib import Path

import pytest
from helpers import ROOT

SUFFIXES = {".js", ".css", ".html"}
ASSETS = sorted(path for path in (ROOT / "posttrain").rglob("*") if path.suffix in SUFFIXES)
NODE = shutil.which("node")
SVG_NAMESPACE = "http://www.w3.org/2000/svg"  # a name, which browsers do not request
VOID_TAGS = {"meta", "link", "input"}


def list_assets(suffix: str) -> list[pytest.param]:
    paths = [path for path in ASSETS if path.suffix == suffix]
    assert paths
    return [pytest.param(path, id=str(path.relative_to(ROOT))) for path in paths]


def remove_strings_and_comments(text: str) -> str:
    text = re.sub(r"/\*.*?\*/|//[^\n]*", "", text, flags=re.DOTALL)
    return re.sub(r"'(?:\\.|[^'\\])*'|\"(?:\\.|[^\"\\])*\"", "", text)


def check_brackets(text: str) -> None:
    stack = []
    for character in text:
        if character in "([{":
            stack.append({"(": ")", "[": "]", "{": "}"}[character])
        elif character in ")]}":
            assert stack and stack.pop() == character, character
    assert not stack


class BalancedTags(HTMLParser):
    """Parser that fails on end tags without a start tag."""

    def __init__(self) -> None:
        super().__init__()
        self.open_tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag not in VOID_TAGS:
            self.open_tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open_tags.pop() == tag


@pytest.mark.parametrize("path", list_assets(".js"))
@pytest.mark.skipif(NODE is None, reason="needs node")
def test_javascript_has_valid_syntax(path: Path) -> None:
    assert NODE is not None
    done = subprocess.run([NODE, "--check", str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("path", list_assets(".css"))
def test_css_has_balanced_brackets(path: Path) -> None:
    check_brackets(remove_strings_and_comments(path.read_text()))


@pytest.mark.parametrize("path", list_assets(".html"))
def test_html_has_balanced_tags(path: Path) -> None:
    parser = BalancedTags()
    parser.feed(path.read_text())
    parser.close()
    assert parser.open_tags == []


@pytest.mark.parametrize("path", ASSETS, ids=lambda path: str(path.relative_to(ROOT)))
def test_assets_name_no_external_address(path: Path) -> None:
    text = path.read_text().replace(SVG_NAMESPACE, "")
    assert not re.search(r"https?://|@import|(?:src|href)=[\"']?//|url\(\s*[\"']?//", text)


@pytest.mark.parametrize("path", ASSETS, ids=lambda path: str(path.relative_to(ROOT)))
def test_assets_are_package_data(path: Path) -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    package = ".".join(path.parent.relative_to(ROOT).parts)
    patterns = settings["tool"]["setuptools"]["package-data"][package]
    assert any(path.match(pattern) for pattern in patterns)


def test_the_checks_fail_on_bad_assets() -> None:
    with pytest.raises(AssertionError):
        check_brackets(remove_strings_and_comments("a{b:'}'"))
    with pytest.raises(AssertionError):
        BalancedTags().feed("<div><b></div>")
