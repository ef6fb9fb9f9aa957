"""Markdown extension of the documentation site: equations become MathML, pictures come from the copy in docs/pictures.

Browsers draw MathML themselves, so a page with `$...$` and `$$...$$` loads neither script nor font and works offline.
A picture is a link to its file, which a phone shows at full size. A Git host that knows dollar maths shows the same
equations in the Markdown files, and the pictures of tests/benchmarks/pictures/.
"""

from __future__ import annotations

import re
import xml.etree.ElementTree as etree
from typing import Any

from latex2mathml.converter import convert
from markdown import Markdown
from markdown.extensions import Extension
from markdown.inlinepatterns import InlineProcessor
from markdown.preprocessors import Preprocessor

__all__ = ["SiteExtension", "makeExtension"]

DISPLAY = r"(?<!\\)\$\$(.+?)\$\$"
INLINE = r"(?<![\\$\w])\$(?![\s$])([^$\n]*?[^$\s\\])\$(?![\w$])"
AFTER_CODE = 185  # below `code` (190), so that dollars in code stay; above escapes (180), which would eat backslashes
PART = re.compile(r"((?:Args|Returns|Raises|Source)(?:, (?:Returns|Raises))?):(?= )")
PICTURES = (
    "../tests/benchmarks/pictures/"  # seen from docs/; `make docs` copies them to docs/pictures/
)
PICTURE = re.compile(r"(?<!\[)!\[[^\]]*\]\(([^\s)]+)\)")  # not in a link


class _Math(InlineProcessor):
    def __init__(self, pattern: str, md: Markdown, display: str) -> None:
        super().__init__(pattern, md)
        self.display = display

    def handleMatch(  # type: ignore[override]  # noqa: N802  # Markdown's name
        self, m: re.Match[str], data: str
    ) -> tuple[etree.Element | str, int, int]:
        """A placeholder of the equation's MathML."""
        mathml = convert(" ".join(m.group(1).split()), display=self.display)
        if self.display == "block":
            mathml = f'<span class="equation">{mathml}</span>'
        return self.md.htmlStash.store(mathml), m.start(0), m.end(0)


class _Lines(Preprocessor):
    def run(self, lines: list[str]) -> list[str]:
        """Link pictures of the benchmarks to the site's copies; make a docstring's one-line parts paragraphs."""
        changed: list[str] = []
        for line in lines:
            line = line.replace(f"]({PICTURES}", "](pictures/").replace(
                f"](../{PICTURES}", "](../pictures/"
            )
            line = PICTURE.sub(r"[\g<0>](\1)", line)
            if match := PART.match(line):
                line = f"**{match[1]}:**{line[match.end() :]}"
                changed.append("")
            changed.append(line)
        return changed


class SiteExtension(Extension):
    """Registers the patterns."""

    def extendMarkdown(self, md: Markdown) -> None:  # noqa: N802
        """Called by Markdown."""
        md.inlinePatterns.register(_Math(DISPLAY, md, "block"), "math-display", AFTER_CODE + 1)
        md.inlinePatterns.register(_Math(INLINE, md, "inline"), "math-inline", AFTER_CODE)
        md.preprocessors.register(
            _Lines(md), "lines", 20
        )  # after fenced code (25), which keeps its text


def makeExtension(**options: Any) -> SiteExtension:  # noqa: N802
    """Entry point of the extension."""
    return SiteExtension(**options)
