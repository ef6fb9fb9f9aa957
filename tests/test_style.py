"""House style that no linter checks: docstrings as noun phrases, tests with an assertion."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NOUN_CLAUSE = re.compile(r"(What|Whether|Where|Who|Whose|How|Which)\b")
PLACES = ("flows", "rl_core", "tasks", "tests")
ASSERTING = re.compile(r"_*(assert|check|same|refuse|raises|warns|fail|expect)", re.IGNORECASE)


def modules(place: str) -> list[Path]:
    path = ROOT / place
    return [path] if path.is_file() else sorted(path.rglob("*.py"))


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, text) of every docstring."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield node.body[0].lineno, text


def noun_clauses(source: str) -> list[int]:
    """Lines of the docstrings that begin with What, Whether, Where, Who or How."""
    return [line for line, text in docstrings(ast.parse(source)) if NOUN_CLAUSE.match(text)]


def functions(tree: ast.Module) -> list[ast.FunctionDef]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]


def asserts(function: ast.FunctionDef, known: set[str]) -> bool:
    """True for an assert statement, `raise AssertionError`, pytest.raises and the like, or a call of a known name."""
    for node in ast.walk(function):
        if isinstance(node, ast.Assert) or (isinstance(node, ast.Raise) and "AssertionError" in ast.dump(node)):
            return True
        if isinstance(node, ast.Call):
            called = node.func
            if isinstance(called, ast.Attribute) and ASSERTING.match(called.attr):
                return True
            if isinstance(called, ast.Name) and (ASSERTING.match(called.id) or called.id in known):
                return True
    return False


def asserting(trees: list[ast.Module]) -> set[str]:
    """Names of functions that assert, directly or by calling one another."""
    found: set[str] = set()
    while True:
        names = {function.name for tree in trees for function in functions(tree) if asserts(function, found)}
        if names <= found:
            return found
        found |= names


def hollow(trees: dict[str, ast.Module], helpers: list[ast.Module]) -> list[str]:
    """Test functions without an assertion of their own, of their module's functions or of the helpers."""
    shared = asserting(helpers)
    found = []
    for place, tree in trees.items():
        known = asserting([tree]) | shared
        found += [
            f"{place}:{function.lineno}: {function.name}"
            for function in functions(tree)
            if function.name.startswith("test_") and not asserts(function, known)
        ]
    return found


@pytest.mark.parametrize("place", PLACES)
def test_docstrings_are_noun_phrases(place: str) -> None:
    paths = modules(place)
    assert paths, f"{place} does not exist"
    found = [f"{path.relative_to(ROOT)}:{line}" for path in paths for line in noun_clauses(path.read_text())]
    assert not found, "\n".join(found)


def test_every_test_asserts() -> None:
    parsed = {str(path.relative_to(ROOT)): ast.parse(path.read_text()) for path in modules("tests")}
    tests = {place: tree for place, tree in parsed.items() if Path(place).name.startswith("test_")}
    helpers = [tree for place, tree in parsed.items() if place not in tests]
    assert len(tests) > 100
    found = hollow(tests, helpers)
    assert not found, "\n".join(found)


def test_the_checks_find_what_they_look_for() -> None:
    source = '"""Fine."""\ndef f():\n    """What it does."""\nclass C:\n    """Whatever, fine."""\n'
    assert noun_clauses(source) == [3]
    empty = ast.parse("def test_a():\n    f()\ndef test_b():\n    assert f()\ndef test_c():\n    g()\n")
    helper = ast.parse("def g():\n    h()\ndef h():\n    assert True\n")
    assert hollow({"x": empty}, [helper]) == ["x:1: test_a"]
