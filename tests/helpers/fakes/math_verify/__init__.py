"""The part of math-verify 0.9 used by the verifier: fractions and decimals alone."""

import re
import time
from fractions import Fraction


def parse(text, parsing_timeout=5):
    if "HANG" in text:
        time.sleep(600)
    text = re.sub(r"\\frac\{(\d+)\}\{(\d+)\}", r"\1/\2", text)
    return [Fraction(number) for number in re.findall(r"-?\d+(?:/\d+|\.\d+)?", text)][-1:]


def verify(gold, target, timeout_seconds=5):
    return bool(target) and gold[-1] == target[-1]
