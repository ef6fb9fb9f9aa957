"""The value of a text as a number, on cases worked by hand; the verifier `numeric` on targets that people wrote."""

from fractions import Fraction

import pytest

from rl_core.environments.answer_checks import build_answer_check
from rl_core.environments.number_values import find_last_value, parse_value
from rl_core.errors import DataError

VALUES = {
    "42": 42,
    "-7": -7,
    "−7": -7,  # noqa: RUF001
    "+7": 7,
    "007": 7,
    "3.50": Fraction(7, 2),
    ".5": Fraction(1, 2),
    "5.": 5,
    "$1,234.50": Fraction(2469, 2),
    "12,34,567": 1234567,
    "12 345": 12345,
    "1 234 567.5": Fraction(2469135, 2),
    "12\u00a0345": 12345,
    "12\u202f345": 12345,
    "12{,}345": 12345,
    "12,\\!345": 12345,
    "12\\,345": 12345,
    "12'345": 12345,
    "3/4": Fraction(3, 4),
    "-3/4": Fraction(-3, 4),
    "3 / 4": Fraction(3, 4),
    "3\u20444": Fraction(3, 4),
    "½": Fraction(1, 2),
    "2½": Fraction(5, 2),
    "1 1/2": Fraction(3, 2),
    "-1 1/2": Fraction(-3, 2),
    "1\\frac{1}{2}": Fraction(3, 2),
    "1 \\frac{1}{2}": Fraction(3, 2),
    "\\frac{3}{4}": Fraction(3, 4),
    "-\\dfrac{3}{4}": Fraction(-3, 4),
    "\\frac{-3}{4}": Fraction(-3, 4),
    "\\frac34": Fraction(3, 4),
    "\\frac{\\frac{1}{2}}{3}": Fraction(1, 6),
    "$\\tfrac{3}{4}$": Fraction(3, 4),
    "\\(\\frac{3}{4}\\)": Fraction(3, 4),
    "\\boxed{\\frac{3}{4}}": Fraction(3, 4),
    "2^10": 1024,
    "2**10": 1024,
    "2^{10}": 1024,
    "2¹⁰": 1024,
    "10^{-3}": Fraction(1, 1000),
    "10⁻³": Fraction(1, 1000),
    "-2^2": -4,
    "(-2)^2": 4,
    "\\left(\\frac{1}{2}\\right)^3": Fraction(1, 8),
    "1e3": 1000,
    "1.5E-2": Fraction(3, 200),
    "6.02 \\times 10^{23}": 602 * 10**21,
    "3 × 10^4": 30000,  # noqa: RUF001
    "3 \\cdot 5": 15,
    "\\sqrt{16}": 4,
    "2\\sqrt{16}": None,
    "\\sqrt{3}": None,
    "√9": 3,
    "x = 5": 5,
    "25%": 25,
    "25\\%": 25,
    "5 km": 5,
    "5km": 5,
    "5 cm^2": 5,
    "5 m²": 5,
    "60 km/h": 60,
    "45^\\circ": 45,
    "45°": 45,
    "5\\text{ cm}": 5,
    "5\\ \\mathrm{kg}": 5,
    "\\text{5}": 5,
    "2 million": 2_000_000,
    "3 dozen eggs": 36,
    "42 dollars a year": 42,
    "2\\sqrt{3}": None,
    "3\\pi": None,
    "3π": None,
    "3 pi": None,
    "3:45": None,
    "3:4": None,
    "2024-01-05": None,
    "3/4/2024": None,
    "1,5": None,
    "1,2,3": None,
    "1, 2": None,
    "1 2": None,
    "(1, 2)": None,
    "[1, 2]": None,
    "1 or 2": None,
    "5 and 6": None,
    "1.234.567": None,
    "1.234,56": None,
    "5x": None,
    "5 x": None,
    "x + 5": None,
    "3 + 4": None,
    "3-4": None,
    "±5": None,
    "> 5": None,
    "5!": None,
    "5i": None,
    "5 more than x": None,
    "3 quarters": None,
    "1 3/2": None,
    "1/0": None,
    "0^-1": None,
    "9^9^9": None,
    "2^0.5": None,
    "10^999999": None,
    "1e99999": None,
    "": None,
    "many": None,
    "nan": None,
    "inf": None,
    "True": None,
    "٣": None,
    "0x10": None,
    "1_000": None,
    "\\frac{3}{": None,
    "((((": None,
}


@pytest.mark.parametrize(("text", "value"), VALUES.items(), ids=map(ascii, VALUES))
def test_the_value_of_a_text(text, value):
    assert parse_value(text) == value


LAST_VALUES = {
    "so 3, thus 1,234.50 dollars": Fraction(2469, 2),
    "so the answer is 3/4.": Fraction(3, 4),
    "12 + 5 = 17": 17,
    "Step 3: 5": 5,
    "The answer is **5**": 5,
    "it is $\\frac{3}{4}$.": Fraction(3, 4),
    "The total is 12 345 euros (see above)": 12345,
    "about 1 1/2 cups": Fraction(3, 2),
    "it makes 2^10": 1024,
    "The area is 25 cm^2": 25,
    "in all 3 × 10^4 people": 30000,  # noqa: RUF001
    "It costs 2 million": 2_000_000,
    "it is −5": -5,  # noqa: RUF001
    "- 5": 5,
    "x = -5": -5,
    "pay $5, then $6!": 6,
    "12, 13, 14": 14,
    "(3, 4)": None,
    "see (5)": 5,
    "5\nHope that helps": 5,
    "20%": 20,
    "the result is 2\\sqrt{3}": None,
    "at 3:45": None,
    "so 3x": None,
    "2x + 3": None,
    "it is 3π": None,
    "none": None,
    "so it is x/4": None,
    "that is 4!": 4,
}


@pytest.mark.parametrize(("text", "value"), LAST_VALUES.items(), ids=map(ascii, LAST_VALUES))
def test_the_last_number_of_free_text(text, value):
    found = find_last_value(text)
    assert (found and found.value) == value


@pytest.mark.parametrize(
    ("target", "answer", "reward"),
    [
        ("3/4", "0.75", 1.0),
        ("3/4", "4", 0.0),
        (r"\frac{3}{4}", r"\boxed{\frac{3}{4}}", 1.0),
        (r"\frac{3}{4}", "4", 0.0),
        ("12 345", "12345", 1.0),
        ("12 345", "345", 0.0),
        ("1 1/2", "1.5", 1.0),
        ("1 1/2", "2", 0.0),
        ("2^10", "1024", 1.0),
        ("2^10", "10", 0.0),
        ("4", r"\boxed{3/4}", 0.0),
        ("4", r"\boxed{x = 3/4}", 0.0),
        ("4", "the answer is 3/4", 0.0),
        ("4", "<answer>3/4</answer>", 0.0),
        ("3", r"\boxed{2\sqrt{3}}", 0.0),
        ("345", "12 345", 0.0),
        ("so\n#### 3/4", "#### 0.75", 1.0),
        (r"Thus \boxed{7}.", "7", 1.0),
        ("5", "<answer>about 5 apples</answer>", 1.0),
        # a percent sign may be left out, or be a division by 100, on one side
        ("50%", "0.5", 1.0),
        ("50%", "50", 1.0),
        ("50%", "50%", 1.0),
        ("50%", "0.5%", 0.0),
        ("20", "20%", 1.0),
        ("0.2", "20%", 1.0),
        ("0.2", "2%", 0.0),
    ],
)
def test_numeric_compares_values(target, answer, reward):
    assert build_answer_check("numeric").score_action(answer, target, {}) == reward


def test_exact_takes_the_whole_last_number():
    check = build_answer_check("exact", {"find": "last_number"})
    assert check.score_action("it is 3/4", "4", {}) == 0.0
    assert check.score_action("it is 3/4.", "3/4", {}) == 1.0
    assert build_answer_check("numeric", {"find": "last_number"}).score_action("3/4", "4", {}) == 0


@pytest.mark.parametrize("target", ["2\\sqrt{3}", "3:45", "1 or 2", "2024-01-05", "nan", "many"])
def test_a_target_that_is_no_number_is_refused(target):
    check = build_answer_check("numeric")
    for refuse in (check.check_row, lambda target, row: check.score_action("3", target, row)):
        with pytest.raises(DataError, match="is not one number"):
            refuse(target, {"prompt": "p"})
