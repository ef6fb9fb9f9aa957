"""Every test asserts something."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
ASSERTING = re.compile(r"_*(assert|check|same|refuse|raises|warns|fail|expect)", re.IGNORECASE)


def list_modules(folder: str) -> list[Path]:
    path = ROOT / folder
    return [path] if path.is_file() else sorted(path.rglob("*.py"))


@functools.cache
def parse_module(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


class Checked(NamedTuple):
    """A function of the tests, and what tells that it checks something."""

    name: str
    line: int
    asserts: bool  # an assert statement, `raise AssertionError`, pytest.raises and the like
    called: frozenset[str]  # functions by their plain names


def examine_function(function: ast.FunctionDef) -> Checked:
    asserts, called = False, set()
    for node in ast.walk(function):
        if isinstance(node, ast.Assert) or (
            isinstance(node, ast.Raise) and "AssertionError" in ast.dump(node)
        ):
            asserts = True
        elif isinstance(node, ast.Call):
            if isinstance(node.func, ast.Attribute) and ASSERTING.match(node.func.attr):
                asserts = True
            elif isinstance(node.func, ast.Name):
                asserts = asserts or bool(ASSERTING.match(node.func.id))
                called.add(node.func.id)
    return Checked(function.name, function.lineno, asserts, frozenset(called))


def examine_functions(tree: ast.Module) -> list[Checked]:
    return [examine_function(node) for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]


def find_asserting(checked: list[Checked]) -> set[str]:
    """Return names of functions that assert, directly or by calling one another."""
    names: set[str] = set()
    while (
        more := {
            function.name for function in checked if function.asserts or function.called & names
        }
        - names
    ):
        names |= more
    return names


def find_hollow_tests(trees: dict[str, ast.Module], helpers: list[ast.Module]) -> list[str]:
    """Return test functions without an assertion in themselves, their module's functions or the helpers."""
    shared = find_asserting([function for tree in helpers for function in examine_functions(tree)])
    hollow = []
    for file, tree in trees.items():
        checked = examine_functions(tree)
        known = find_asserting(checked) | shared
        hollow += [
            f"{file}:{function.line}: {function.name}"
            for function in checked
            if function.name.startswith("test_")
            and not function.asserts
            and not function.called & known
        ]
    return hollow


def test_every_test_asserts() -> None:
    trees = {str(path.relative_to(ROOT)): parse_module(path) for path in list_modules("tests")}
    tests = {file: tree for file, tree in trees.items() if Path(file).name.startswith("test_")}
    helpers = [tree for file, tree in trees.items() if file not in tests]
    assert len(tests) > 100
    hollow = find_hollow_tests(tests, helpers)
    assert not hollow, "\n".join(hollow)


def test_the_checks_find_what_they_look_for() -> None:
    empty = ast.parse(
        "def test_a():\n    f()\ndef test_b():\n    assert f()\ndef test_c():\n    g()\n"
    )
    helper = ast.parse("def g():\n    h()\ndef h():\n    assert True\n")
    assert find_hollow_tests({"x": empty}, [helper]) == ["x:1: test_a"]
