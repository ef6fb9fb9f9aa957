"""Text from files and arguments, made safe to print on a terminal."""

from __future__ import annotations

import re

__all__ = ["visible"]

# Control characters, which move the cursor, rename the window or ring (C0 without tab and line feed, DEL, C1); marks
# that turn the direction of writing round; halves of surrogate pairs, which no terminal's encoding has.
_UNSEEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def visible(text: str) -> str:
    """The text with those characters as escapes, such as \\x1b."""
    return _UNSEEN.sub(lambda match: ascii(match.group())[1:-1], text)
