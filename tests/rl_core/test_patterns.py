"""Bounds of users' regular expressions: what fits compiles, what does not is refused before it is compiled."""

import pytest

from rl_core.environments.answer_checks import build_answer_check
from rl_core.errors import DataError, SettingsError
from rl_core.settings.patterns import MAX_COMPILED_STEPS, bound_compiled_steps, compile_pattern


@pytest.mark.parametrize(
    ("pattern", "least", "most"),
    [  # required steps by hand: characters and classes, times the required repeats; groups and braces on top
        ("abc", 3, 3),
        ("a{3}", 3, 6),
        ("a{3,}", 3, 7),
        ("a{0,999}", 1, 9),
        ("(ab){3}", 6, 12),
        ("((a{9}){9}){9}", 729, 1400),
        (r"(\(a{9}\)){9}", 99, 160),
        (r"([)]{9}){9}", 81, 160),
        ("[a{9}]{2}", 2, 6),
        ("(?:a{9})(?#){9}", 81, 130),
        ("(a){e<=3}{9}", 9, 40),
        ("(?:x{2}){3}|(?:y{4}){5}", 26, 70),
        ("a)b{2}", 4, 8),
        ("(a(b{2}", 3, 9),
    ],
)
def test_the_bound_is_above_the_required_steps_and_near_them(pattern, least, most):
    assert least <= bound_compiled_steps(pattern) <= most


@pytest.mark.parametrize(
    "pattern",
    [
        r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}",
        r"<think>.{200,20000}</think>\s*<answer>(?:\d{1,3}(?:,\d{3})*|\d+)(?:\.\d+)?</answer>",
        r"(?:[A-Za-z0-9+/=]{76}\n){20,}",
        r"(?x) ( \d{4} - \d{2} - \d{2} )  # a date",
        r".{50000,}",
        r"((a{0,999}){0,999}){0,999}",
    ],
)
def test_patterns_that_people_write_compile(pattern):
    assert compile_pattern(pattern).pattern == pattern


def test_the_bound_is_checked_before_compiling(monkeypatch):
    monkeypatch.setattr("regex.compile", lambda *arguments: pytest.fail("compiled"))
    with pytest.raises(SettingsError, match=r"^'\(\(a.* steps, more than 100000"):
        compile_pattern("((a{999}){999}){999}")
    with pytest.raises(SettingsError, match="more than 100000"):
        compile_pattern("(" * 60 + "a" + "){999999999}" * 60)
    with pytest.raises(SettingsError, match="more than 100000"):
        compile_pattern("a" * (MAX_COMPILED_STEPS + 1))


@pytest.mark.parametrize("pattern", ["((a{999}){999}){999}", "(" * 2000 + ")" * 2000, "a(b"])
def test_a_pattern_of_a_row_is_refused_with_its_reason(pattern):
    with pytest.raises(DataError, match=r"verifier 'regex': '.* (steps|groups|expression)"):
        build_answer_check("regex").score_action("a", pattern, {"prompt": "p"})
