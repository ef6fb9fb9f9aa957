"""The documents as the tests see them: pages, blocks, headings, commands."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(path for path in DOCS.rglob("*.md") if "tools" not in path.parts)

_FENCE = re.compile(
    r"^(?:<!-- ([^\n]*?) -->\n)?```(\w*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL
)
_LINK = re.compile(r"(!?)\[[^\]]*\]\(([^)\s]+)\)")


@dataclass(frozen=True)
class Block:
    """One fenced block; `note` is the comment on the line before it."""

    page: Path
    language: str
    text: str
    note: str
    line: int

    @property
    def place(self) -> str:
        """Location, for messages and test names."""
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def list_blocks(language: str) -> list[Block]:
    """Return all fenced blocks of a language."""
    blocks = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for match in _FENCE.finditer(text):
            note, kind, body = match.groups()
            if kind == language:
                blocks.append(
                    Block(page, kind, body, note or "", text[: match.start(3)].count("\n") + 1)
                )
    return blocks


def strip_blocks(page: Path) -> str:
    """Return a page without fenced blocks."""
    return _FENCE.sub("", page.read_text(encoding="utf-8"))


def list_links(page: Path) -> list[tuple[bool, str]]:
    """Return (is a picture, target) of every Markdown link outside code."""
    text = re.sub(r"^ {4}.*$", "", strip_blocks(page), flags=re.MULTILINE)
    return [(bool(mark), target) for mark, target in _LINK.findall(re.sub(r"`[^`\n]*`", "", text))]


def list_anchors(page: Path) -> set[str]:
    """Return anchors of a page's headings, as Markdown's toc extension and Git hosts make them."""
    anchors = set()
    for heading in re.findall(r"^#{1,6} (.+)$", strip_blocks(page), re.MULTILINE):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
        slug = re.sub(r"[^\w\s-]", "", text).strip().lower()
        anchors.add(re.sub(r"[-\s]+", "-", slug))
    return anchors


def list_commands() -> list[tuple[str, str]]:
    """Return (place, command line) of every `posttrain ...` in code, also of README: indented and inline."""
    commands = []
    for page in (ROOT / "README.md", *PAGES):
        lines = [
            re.sub(r"\s{2,}#.*", "", line) for line in page.read_text(encoding="utf-8").splitlines()
        ]
        for number, line in enumerate(lines, start=1):
            place = f"{page.relative_to(ROOT)}:{number}"
            if match := re.match(r"(?: {4})?(?:\w+=\S+ )*(posttrain .*)", line):
                commands.append((place, match[1].strip()))
            commands += [(place, text) for text in re.findall(r"(`posttrain [^`]+`)", line)]
    return [
        (place, text)
        for place, text in commands
        if "..." not in text and not text.endswith("posttrain`")
    ]
