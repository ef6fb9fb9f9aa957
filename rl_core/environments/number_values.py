r"""Values of texts as exact numbers: decimals, fractions, mixed numbers, powers, LaTeX, groups of digits, units.

    value   = ["x ="] [currency] sign product [unit]
    product = power (("*" | "\times" | "\cdot") power)* ["/" power]
    power   = atom ["^" exponent]
    atom    = number | mixed number | "\frac{value}{value}" | "\sqrt{square}" | "(" value ")"

A text that could mean something else has no value: sums, lists, dates, ratios (3:4), irrational numbers, '5x', '1,5'.
"""

from __future__ import annotations

import math
import re
from fractions import Fraction
from typing import NamedTuple

MAX_CHARS = 400  # of a value
MAX_DEPTH = 20  # nested fractions and brackets
MAX_BITS = 4096  # of a power
_MULTIPLIERS = {
    "dozen": 12,
    "hundred": 100,
    "thousand": 10**3,
    "million": 10**6,
    "billion": 10**9,
    "trillion": 10**12,
}
# Words behind a number that change its value, or say that it is only part of it.
_NO_UNITS = frozenset(
    re.findall(
        "[a-z]+",
        """
    and or to of is not plus minus times over by less more than at per pi e mod root squared cubed factorial half
    halves third thirds quarter quarters fourth fourths fifth fifths sixth sixths seventh sevenths eighth eighths
    ninth ninths tenth tenths hundredth hundredths thousandth thousandths score pair pairs inf infinity sqrt log ln
    exp sin cos tan theta alpha beta
    """,
    )
)
_LETTER_UNITS = frozenset("mgshLlNJWVA")  # a single letter may be a variable
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺", "0123456789-+")
_VULGAR = {
    "½": "1/2",
    "⅓": "1/3",
    "⅔": "2/3",
    "¼": "1/4",
    "¾": "3/4",
    "⅕": "1/5",
    "⅖": "2/5",
    "⅗": "3/5",
    "⅘": "4/5",
    "⅙": "1/6",
    "⅚": "5/6",
    "⅛": "1/8",
    "⅜": "3/8",
    "⅝": "5/8",
    "⅞": "7/8",
}
_CHARACTERS = str.maketrans(
    {
        **dict.fromkeys("\u00a0\u2007\u2008\u2009\u202f\u2005\u2006", " "),
        **dict.fromkeys("−‐‑–﹣－", "-"),  # noqa: RUF001
        **dict.fromkeys("×·⋅∙∗", "*"),  # noqa: RUF001
        **dict.fromkeys("⁄∕÷", "/"),  # noqa: RUF001
        **dict.fromkeys("€£¥", ""),
        "’": "'",  # noqa: RUF001
    }
)
_REWRITES = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"([⁻⁺]?[⁰¹²³⁴⁵⁶⁷⁸⁹]+)", lambda match: f"^{{{match[1].translate(_SUPERSCRIPTS)}}}"),
        (f"[{''.join(_VULGAR)}]", lambda match: f" {_VULGAR[match[0]]} "),
        (r"\\(?:left|right|displaystyle|limits|bigl?|bigr)(?![A-Za-z])", ""),
        (r"\\\$|\$", ""),
        (r",?\\!,?", lambda match: "," if "," in match[0] else ""),
        (r"\{,\}", ","),
        (r"\\[,;: ]|~", " "),
        (r"\\[()\[\]]", " "),
        (r"\\%", "%"),
        (r"\^\s*(?:\\circ|\{\s*\\circ\s*\})|\\degree|°", " degrees"),
        (r"\\(?:times|cdot|ast)(?![A-Za-z])", "*"),
        (r"\\div(?![A-Za-z])", "/"),
        (r"\\[dtc]frac", r"\\frac"),
        (r"√\s*([0-9]+)", r"\\sqrt{\1}"),
        (r"(?<=[0-9)}])\s*\*\*\s*(?=[-+({0-9])", "^"),
    )
)
_TEXT_COMMAND = re.compile(r"\\(?:text|textbf|mathrm|mathbf|mbox|operatorname)\s*\{([^{}]*)\}")
_BOXED = re.compile(r"\\(?:boxed|fbox)\s*\{(.*)\}", re.DOTALL)
_VARIABLE = re.compile(r"[A-Za-z](?:_\{?\w+\}?)?\s*=(?!=)")
_CURRENCY = re.compile(r"(?:US|USD|EUR|GBP)\s*(?=[-+]?[0-9.])")
_DIGITS = (
    r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]{1,3}(?: [0-9]{3})+(?![0-9]|\s*/)|[0-9]{1,3}(?:'[0-9]{3})+(?![0-9])"
    r"|[0-9]{1,2}(?:,[0-9]{2})+,[0-9]{3}(?![0-9])|[0-9]+)"
)
_NUMBER = rf"(?:{_DIGITS}(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]{{1,3}}(?![0-9]))?"
_TOKEN = re.compile(
    rf"\s*(?:(?P<number>{_NUMBER})|(?P<command>\\frac|\\sqrt)|(?P<sign>[-+*/^(){{}}]))"
)
_MIXED = re.compile(r"\s+([0-9]+)\s*/\s*([0-9]+)")
_UNIT = re.compile(
    r"\s*(?P<word>%|[A-Za-zµμΩ][A-Za-zµμΩ'.]*)(?:\^\{?[-0-9]+\}?)?"
    r"(?P<per>(?:\s*/\s*[A-Za-zµμΩ]+(?:\^\{?[-0-9]+\}?)?)*)"
)

_FUNCTIONS = r"(?:sqrt|log|ln|exp|sin|cos|tan|pi)\b"
_BREAK = re.compile(
    r"\\(?:approx|implies|Rightarrow|rightarrow|to|quad|qquad|therefore|boxed|because|le|ge|leq|geq)(?![A-Za-z])"
    r"|[=≈≃→⇒<>|;\n!?]|[,.:](?=\s|$)"
    rf"|/?\s*(?<![\\A-Za-z])(?!{_FUNCTIONS})(?P<word>[A-Za-zµμΩ]{{2,}})(?:\^\{{?[-0-9]+\}}?)?"
    r"|(?<![^\s(])[A-Za-z](?:\^\{?[-0-9]+\}?)?(?=[\s).,]+(?![-+*/^])|$)"  # 'a', 'I', and units
)
_BULLET = re.compile(r"^\s*[-+*•]\s+", re.MULTILINE)
_MINUS = re.compile(r"\b(?:minus|negative)\s+(?=[0-9.])", re.IGNORECASE)
_TUPLE = re.compile(r"[(\[{](?:[^()\[\]{}A-Za-z\n]*[0-9]\s*,)+[^()\[\]{}A-Za-z\n]*[)\]}]")
_LIST = re.compile(r"[^A-Za-z]*[0-9]\s*(?:,\s|;|\b(?:and|or)\b)[^A-Za-z]*[0-9][^A-Za-z]*")
_EDGES = "*_`\"'“”,.:;~&# \t\r"
_BRACKETS = {"(": ")", "[": "]", "{": "}"}


class FoundValue(NamedTuple):
    """A number in a text."""

    value: Fraction  # without its percent sign
    text: str
    is_percent: bool = False


class _NoValueError(ValueError):
    """The text has no value."""


def parse_value(text: str) -> Fraction | None:
    """Return the value of a text that is one number, as '-3/4', '1 1/2', '2^10', '$1,234 a year'; else None.

    A percent sign counts as a unit: '25%' is 25, see `read_value`.
    """
    found = read_value(text)
    return None if found is None else found.value


def read_value(text: str) -> FoundValue | None:
    """Return the value of a text that is one number, and whether it is a percentage; else None."""
    if len(text) > MAX_CHARS:
        return None
    cleaned = _clean_text(text.strip())
    if match := _BOXED.fullmatch(cleaned):
        cleaned = match[1].strip()
    cleaned = _CURRENCY.sub("", _VARIABLE.sub("", cleaned, count=1), count=1).strip()
    parser = _ValueParser(cleaned)
    try:
        value = parser.parse_value(0)
        factor, is_percent = _parse_unit(cleaned[parser.position :])
    except (_NoValueError, ZeroDivisionError, OverflowError):
        return None
    return FoundValue(value * factor, text.strip(), is_percent)


def _clean_text(text: str) -> str:
    """Rewrite LaTeX and Unicode into the characters that the parser reads."""
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    text = _TEXT_COMMAND.sub(r"\1", text.translate(_CHARACTERS))
    return text.strip()


def _parse_unit(rest: str) -> tuple[int, bool]:
    """Return the factor of the words behind a number, and whether they are a percent sign. Raises: _NoValueError."""
    factor, is_percent, position, count = 1, False, 0, 0
    while position < len(rest) and rest[position:].strip():
        match = _UNIT.match(rest, position)
        if match is None or count == 5:
            raise _NoValueError
        word = match["word"].rstrip(".").lower()
        begins_apart = rest[position].isspace()
        if match["word"] == "%" or word == "percent":
            if count or match["per"]:
                raise _NoValueError
            is_percent = True
        elif word in _MULTIPLIERS and begins_apart and not match["per"]:
            factor *= _MULTIPLIERS[word]
        elif word in _NO_UNITS or (
            len(word) == 1
            and (match["word"] not in _LETTER_UNITS or not begins_apart)
            and not (count and word == "a")
        ):
            raise _NoValueError
        position, count = match.end(), count + 1
    return factor, is_percent


class _ValueParser:
    """Recursive-descent parser of one value; `position` is behind it afterwards."""

    def __init__(self, text: str) -> None:
        self.text, self.position = text, 0

    def _peek(self) -> re.Match[str] | None:
        return _TOKEN.match(self.text, self.position)

    def _take_sign(self, signs: str) -> str:
        match = self._peek()
        if match is None or match["sign"] is None or match["sign"] not in signs:
            return ""
        self.position = match.end()
        return match["sign"]

    def _expect_sign(self, sign: str) -> None:
        if not self._take_sign(sign):
            raise _NoValueError

    def parse_value(self, depth: int) -> Fraction:
        if depth > MAX_DEPTH:
            raise _NoValueError
        sign = self._take_sign("+-")
        value = self._parse_power(depth)
        while self._take_sign("*"):
            value *= self._parse_power(depth)
        match = self._peek()
        if (
            match is not None
            and match["sign"] == "/"
            and self.text[match.end() :].lstrip()[:1] in (*"0123456789.(\\",)
        ):
            self.position = match.end()
            value /= self._parse_power(depth)
        match = self._peek()
        if match is not None and match["sign"] not in (")", "}"):
            raise _NoValueError  # a sum, a second fraction, two numbers side by side
        return -value if sign == "-" else value

    def _parse_power(self, depth: int) -> Fraction:
        base = self._parse_atom(depth)
        if not self._take_sign("^"):
            return base
        if self._take_sign("{"):
            exponent = self.parse_value(depth + 1)
            self._expect_sign("}")
        elif self._take_sign("("):
            exponent = self.parse_value(depth + 1)
            self._expect_sign(")")
        else:
            sign = self._take_sign("+-")
            exponent = self._parse_number() * (-1 if sign == "-" else 1)
        if self._take_sign("^"):
            raise _NoValueError
        bits = max(base.numerator.bit_length(), base.denominator.bit_length())
        if exponent.denominator != 1 or bits * abs(exponent) > MAX_BITS:
            raise _NoValueError
        return Fraction(base ** int(exponent))

    def _parse_atom(self, depth: int) -> Fraction:
        match = self._peek()
        if match is None:
            raise _NoValueError
        if match["command"] == r"\frac":
            return self._parse_fraction(depth)
        if match["command"] == r"\sqrt":
            self.position = match.end()
            return _compute_root(self._parse_braced(depth))
        if match["number"] is None:
            if not self._take_sign("("):
                raise _NoValueError
            value = self.parse_value(depth + 1)
            self._expect_sign(")")
            return value
        whole = self._parse_number()
        is_integer = match["number"].isdigit()
        following = self._peek()
        if is_integer and following is not None and following["command"] == r"\frac":
            return _add_proper_part(whole, self._parse_fraction(depth))
        if is_integer and (part := _MIXED.match(self.text, self.position)):
            self.position = part.end()
            return _add_proper_part(whole, Fraction(int(part[1]), int(part[2])))
        return whole

    def _parse_number(self) -> Fraction:
        match = self._peek()
        if match is None or match["number"] is None:
            raise _NoValueError
        self.position = match.end()
        digits = re.sub("[, ']", "", match["number"])
        mantissa, _, exponent = digits.lower().partition("e")
        return Fraction(mantissa.removesuffix(".")) * Fraction(10) ** int(exponent or 0)

    def _parse_fraction(self, depth: int) -> Fraction:
        match = self._peek()
        assert match is not None
        self.position = match.end()
        numerator = self._parse_braced(depth)
        return numerator / self._parse_braced(depth)

    def _parse_braced(self, depth: int) -> Fraction:
        r"""Parse '{value}', or the one digit that LaTeX takes without braces, as in '\frac12'."""
        if self._take_sign("{"):
            value = self.parse_value(depth + 1)
            self._expect_sign("}")
            return value
        match = re.compile(r"\s*([0-9])").match(self.text, self.position)
        if match is None:
            raise _NoValueError
        self.position = match.end()
        return Fraction(int(match[1]))


def _add_proper_part(whole: Fraction, part: Fraction) -> Fraction:
    if not 0 < part < 1:
        raise _NoValueError
    return whole + part


def _compute_root(value: Fraction) -> Fraction:
    if value < 0:
        raise _NoValueError
    root = Fraction(math.isqrt(value.numerator), math.isqrt(value.denominator))
    if root * root != value:
        raise _NoValueError
    return root


def find_marked_value(text: str) -> FoundValue | None:
    """Return the value of a marked answer: all of it, else its last number; None for a list of numbers."""
    if found := read_value(text):
        return found
    return None if _LIST.fullmatch(_clean_text(text)) else find_last_value(text)


def find_last_value(text: str) -> FoundValue | None:
    """Return the last number of a free text with all that belongs to it: 'is 3/4.' -> 3/4, '2 million' -> 2,000,000.

    None without a number, or if the last one is part of what has no value, as in 'x + 3' and '3:45'.
    """
    cleaned = _clean_text(_BULLET.sub("", text))
    cleaned = _TUPLE.sub(lambda match: re.sub(r",\s+", ",", match[0]), _MINUS.sub("-", cleaned))
    end, word = len(cleaned), ""
    for match in [*reversed([*_BREAK.finditer(cleaned)]), None]:
        start = match.end() if match else 0
        if re.search("[0-9]", cleaned[start:end]):
            return _read_segment(cleaned[start:end], word)
        if match:
            end, word = match.start(), (match["word"] or "").lower()
    return None


def _read_segment(segment: str, word: str) -> FoundValue | None:
    """Read the number between two words; `word` is the one behind it."""
    found = _read_edged_value(segment)
    pieces = segment.split()
    if (
        found is None
        and len(pieces) > 1
        and pieces[-2][-1] not in "+-*/^"
        and pieces[-1][0] not in "+-*/^"
    ):
        found = _read_edged_value(pieces[-1])
    if found is None:
        return None
    factor = _MULTIPLIERS.get(word, 1)
    return FoundValue(found.value * factor, found.text, found.is_percent or word == "percent")


def _read_edged_value(text: str) -> FoundValue | None:
    """Read a value between quotation marks, emphasis, sentence marks, dashes and open brackets."""
    text = text.rstrip(_EDGES + "-").lstrip(_EDGES.replace(".", ""))
    text = re.sub(r"^(?:-\s+|\.+(?![0-9]))|(?<=[0-9])[msghlL]$", "", text)
    for opening, closing in _BRACKETS.items():
        if text.startswith(opening) and (opening == "{" or closing not in text):
            text = text[1:].lstrip()
        if text.endswith(closing) and text.count(closing) > text.count(opening):
            text = text[:-1].rstrip()
    found = read_value(text)
    return None if found is None else found._replace(text=text)
