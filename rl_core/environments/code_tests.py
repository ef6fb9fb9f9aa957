"""Tests of programs as data sets write them, read and checked before any program runs.

| form | example |
|---|---|
| statements | `["assert add(1, 2) == 3"]`, or one text |
| pairs of input and output | `{"inputs": ["1 2\\n"], "outputs": ["3\\n"]}`, `[{"input": ..., "output": ...}]` |
| calls (APPS, TACO) | `{"fn_name": "add", "inputs": [[1, 2]], "outputs": [3]}` |
| HumanEval | `def check(candidate): ...`, with the column `entry_point` |
| pytest, unittest | functions `test_*`, classes `Test*` and subclasses of `unittest.TestCase` |

Each may be JSON text. What is in no such form, calls nothing of the program or cannot fail is refused.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rl_core.environments.code_test_analysis import (
    TestCode,
    find_main_guards,
    is_test_case_class,
    list_support_statements,
    list_test_methods,
)
from rl_core.errors import DataError

_FUNCTION_COLUMNS = ("entry_point", "fn_name", "func_name", "function_name")
_INPUT_KEYS, _OUTPUT_KEYS = ("input", "stdin"), ("output", "stdout", "expected_output")
# Modules by whose names tests import the program.
_PROGRAM_MODULES = (
    *("solution", "solutions", "candidate", "main", "submission", "program", "answer"),
    *("module", "my_module", "your_module"),
)


@dataclass(frozen=True)
class ProgramTests:
    """Tests of one row in one of three forms: `pairs`, `calls` of a function, or `steps` of Python."""

    pairs: list[dict[str, str]] = field(default_factory=list)  # input, output
    function: str = ""  # called with `arguments`, or named by the row
    arguments: list[list[Any]] = field(default_factory=list)
    expected: list[Any] = field(default_factory=list)
    steps: list[tuple[str, bool]] = field(default_factory=list)  # source; True = it is a test
    modules: list[str] = field(default_factory=list)  # imported by the steps
    program_modules: list[str] = field(default_factory=list)  # by these names, the program

    @property
    def num_tests(self) -> int:
        """Number of results."""
        steps = sum(is_test for _, is_test in self.steps)
        return len(self.pairs) or len(self.expected) or steps

    def build_request(self, program: str) -> dict[str, Any]:
        """Build the request for `code_child.py`."""
        return {"program": program, **vars(self)}


def read_program_tests(tests: Any, row: Mapping[str, Any]) -> ProgramTests:
    """Read the tests of a row. Raises: DataError with the reason why they cannot be used."""
    function = next((row[n] for n in _FUNCTION_COLUMNS if isinstance(row.get(n), str)), "")
    try:
        key = json.dumps(tests, sort_keys=True)
    except (TypeError, ValueError, RecursionError):
        raise DataError(f"{type(tests).__name__} is neither text, a list nor an object") from None
    return _read_cached_tests(key, function)


@functools.lru_cache(maxsize=4096)
def _read_cached_tests(key: str, function: str) -> ProgramTests:
    return _read_tests(json.loads(key), function)


def _read_tests(tests: Any, function: str) -> ProgramTests:
    if isinstance(tests, str):
        tests = _decode_text(tests)
    if isinstance(tests, str):
        return _read_steps([tests], function)
    if isinstance(tests, Mapping):
        return _read_object(tests, function)
    if isinstance(tests, list) and tests:
        if all(isinstance(test, str) for test in tests):
            return _read_steps(tests, function)
        if all(isinstance(test, Mapping) for test in tests):
            return _read_cases(tests, function)
    raise DataError(
        'they must be Python statements (text, or a list of texts), {"inputs": [...], "outputs": [...]} with or '
        'without fn_name, or [{"input": text, "output": text}]'
    )


def _decode_text(text: str) -> Any:
    """Return the list or object that a text holds as JSON or as a Python literal; else the text."""
    if not text.strip():
        raise DataError("they are empty")
    if text.lstrip()[0] not in "[{":
        return text
    for decode in (json.loads, ast.literal_eval):
        try:
            value = decode(text.strip())
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            continue
        if isinstance(value, list | dict):
            return json.loads(json.dumps(value))
    return text


def _read_object(tests: Mapping[str, Any], function: str) -> ProgramTests:
    """Read {"inputs", "outputs"}, a single case, or an object that holds a list of cases."""
    for name in ("test_cases", "tests"):
        if isinstance(tests.get(name), list | str) and tests[name]:
            return _read_tests(tests[name], str(tests.get("fn_name") or function))
    inputs, outputs = tests.get("inputs"), tests.get("outputs")
    if inputs is None and isinstance(_find_value(tests, _INPUT_KEYS), list):
        inputs, outputs = _find_value(tests, _INPUT_KEYS), _find_value(tests, _OUTPUT_KEYS)
    if inputs is None:
        return _read_cases([tests], function)
    if not isinstance(inputs, list) or not isinstance(outputs, list) or not inputs:
        raise DataError("inputs and outputs must be lists that are not empty")
    if len(inputs) != len(outputs):
        raise DataError(f"{len(inputs)} inputs and {len(outputs)} outputs")
    named = tests.get("fn_name")
    if isinstance(named, str) and named:
        return _read_calls(named, inputs, outputs)
    if all(_join_lines(value) is not None for value in (*inputs, *outputs)):
        return _read_pairs(inputs, outputs)
    if not function:
        raise DataError(
            "inputs that are no text are arguments of a function; name it in fn_name or in the column entry_point"
        )
    return _read_calls(function, inputs, outputs)


def _read_cases(tests: Sequence[Mapping[str, Any]], function: str) -> ProgramTests:
    """Read [{"input", "output"}]; with a type `functional` or `function_call` they are calls."""
    inputs = [_find_value(test, _INPUT_KEYS) for test in tests]
    outputs = [_find_value(test, _OUTPUT_KEYS) for test in tests]
    for number, (test, value, output) in enumerate(zip(tests, inputs, outputs, strict=True), 1):
        if value is None or output is None:
            raise DataError(
                f"test {number} has the keys {', '.join(map(str, test)) or 'none'}; expected input and output"
            )
    kinds = {str(test.get("type") or test.get("testtype") or "stdin") for test in tests}
    names = {str(test.get("fn_name") or function) for test in tests}
    if kinds <= {"functional", "function_call"}:
        if len(names) != 1 or "" in names:
            raise DataError(
                "they call a function; name one in fn_name or in the column entry_point"
            )
        return _read_calls(names.pop(), inputs, outputs)
    if not kinds <= {"stdin", "stdin_stdout"}:
        raise DataError(f"tests of the types {', '.join(sorted(kinds))}; expected stdin")
    return _read_pairs(inputs, outputs)


def _find_value(test: Mapping[str, Any], names: Iterable[str]) -> Any:
    return next((test[name] for name in names if test.get(name) is not None), None)


def _join_lines(value: Any) -> str | None:
    if isinstance(value, list) and value and all(isinstance(line, str) for line in value):
        return "\n".join(value)
    return value if isinstance(value, str) else None


def _read_pairs(inputs: Sequence[Any], outputs: Sequence[Any]) -> ProgramTests:
    pairs = []
    for number, (given, output) in enumerate(zip(inputs, outputs, strict=True), 1):
        texts = _join_lines(given), _join_lines(output)
        if texts[0] is None or texts[1] is None:
            raise DataError(f"input and output of test {number} must be text")
        pairs.append({"input": texts[0], "output": texts[1]})
    if not any(pair["output"].strip() for pair in pairs):
        raise DataError("no test expects an output, so a program that does nothing passes")
    return ProgramTests(pairs=pairs)


def _read_calls(function: str, inputs: Sequence[Any], outputs: Sequence[Any]) -> ProgramTests:
    if not function.isidentifier():
        raise DataError(f"fn_name {function[:40]!r} is not the name of a function")
    arguments, expected = [], []
    for number, (given, output) in enumerate(zip(inputs, outputs, strict=True), 1):
        if isinstance(given, str):  # one JSON value a line
            try:
                given = [json.loads(line) for line in given.strip().split("\n")]
                output = json.loads(output) if isinstance(output, str) else output
            except ValueError:
                raise DataError(
                    f"the arguments of call {number} are no JSON values, one a line"
                ) from None
        if not isinstance(given, list):
            raise DataError(f"the arguments of call {number} are no list")
        arguments.append(given)
        expected.append(output)
    return ProgramTests(function=function, arguments=arguments, expected=expected)


def _read_steps(sources: Sequence[str], function: str) -> ProgramTests:
    """Read Python tests. Raises: DataError for what is no Python, calls nothing of the program or cannot fail."""
    trees = [
        _parse_source(source, number, len(sources)) for number, source in enumerate(sources, 1)
    ]
    code = TestCode(trees, function, _PROGRAM_MODULES)
    for name in sorted(code.modules):
        if name.split(".")[0] not in sys.stdlib_module_names and not _is_installed(name):
            raise DataError(f"they import {name}, which is not installed")
    steps: list[tuple[str, bool]] = []
    for number, (source, tree) in enumerate(zip(sources, trees, strict=True), 1):
        place = f"test {number}" if len(trees) > 1 else "the test"
        steps += _split_steps(source, tree, code, function, place)
    if not any(is_test for _, is_test in steps):
        raise DataError("they define and call nothing that asserts, so every program passes")
    return ProgramTests(
        function=function,
        steps=steps,
        modules=sorted(code.modules),
        program_modules=sorted(code.program_modules),
    )


def _parse_source(source: str, number: int, count: int) -> ast.Module:
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        place = f"test {number}: " if count > 1 else ""
        line = f"line {error.lineno}: " if isinstance(error, SyntaxError) else ""
        reason = error.msg if isinstance(error, SyntaxError) else error
        raise DataError(f"{place}{line}neither Python nor JSON: {reason}") from None


def _split_steps(
    source: str, tree: ast.Module, code: TestCode, function: str, place: str
) -> list[tuple[str, bool]]:
    """Split one text into what it defines and its tests. Raises: DataError."""
    calls = [*_list_function_calls(tree, code, function), *_list_class_calls(tree)]
    if not calls:
        return [(source, code.check_test(tree.body, place))]
    guards = find_main_guards(tree)
    body = [statement for statement in tree.body if statement not in guards]
    steps = [(ast.unparse(ast.Module(body, [])), False)]
    for call in calls:
        if not code.check_test(call.statements, call.name):
            raise DataError(f"{call.name} asserts nothing, so every program passes")
        steps.append((call.source, True))
    return steps


class _TestCall(NamedTuple):
    name: str
    source: str  # statement that runs it
    statements: list[ast.stmt]  # what it runs


def _list_function_calls(tree: ast.Module, code: TestCode, function: str) -> list[_TestCall]:
    """List the calls of functions `test_*` and of HumanEval's `check`."""
    calls = []
    for node in tree.body:
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        required = len(node.args.posonlyargs + node.args.args) - len(node.args.defaults)
        if node.name in code.called_names:
            continue
        if node.name == "check" and required == 1:
            if not function:
                raise DataError(
                    "they define check(candidate) and never call it; name the function in the column entry_point"
                )
            _parse_source(f"check({function})", 1, 1)
            code.add_program_name([*node.args.posonlyargs, *node.args.args][0].arg)
            calls.append(_TestCall("check", f"check({function})", node.body))
        elif node.name.startswith("test"):
            if problem := _describe_unusable_function(node, required):
                raise DataError(f"{node.name} {problem}")
            calls.append(_TestCall(node.name, f"{node.name}()", node.body))
    return calls


def _list_class_calls(tree: ast.Module) -> list[_TestCall]:
    """List the calls of the methods of test classes."""
    calls = []
    for node in tree.body:
        if not isinstance(node, ast.ClassDef):
            continue
        is_unittest = is_test_case_class(node)
        if not is_unittest and not node.name.startswith("Test"):
            continue
        for method in list_test_methods(node):
            name = f"{node.name}.{method.name}"
            required = len(method.args.args) - len(method.args.defaults) - 1
            if is_unittest:
                problem = _describe_unusable_method(node, method)
            else:
                problem = _describe_unusable_function(method, required)
            if problem:
                raise DataError(f"{name} {problem}")
            call = _UNITTEST_CALL if is_unittest else _PYTEST_CALL
            statements = [*list_support_statements(node), *method.body]
            source = call.format(cls=node.name, method=method.name)
            calls.append(_TestCall(name, source, statements))
    return calls


def _describe_unusable_function(node: ast.FunctionDef | ast.AsyncFunctionDef, required: int) -> str:
    """Return why a test function cannot be called as it is; "" if it can."""
    if isinstance(node, ast.AsyncFunctionDef):
        return "is a coroutine, which needs a plugin; write asyncio.run(...) into a plain function"
    if _is_generator(node):
        return "is a generator, whose assertions never run"
    if node.decorator_list:
        return (
            f"is decorated with {ast.unparse(node.decorator_list[0])[:60]}; write plain functions"
        )
    if required > 0 or any(default is None for default in node.args.kw_defaults):
        return "takes arguments, and there are no fixtures; write plain functions"
    return ""


def _describe_unusable_method(
    node: ast.ClassDef, method: ast.FunctionDef | ast.AsyncFunctionDef
) -> str:
    """Return why a test of unittest cannot count; "" if it can."""
    is_async = any("Async" in ast.unparse(base) for base in node.bases)
    if isinstance(method, ast.AsyncFunctionDef) and not is_async:
        return "is a coroutine, which TestCase never awaits; use IsolatedAsyncioTestCase"
    if _is_generator(method):
        return "is a generator, whose assertions never run"
    for decorator in (*node.decorator_list, *method.decorator_list):
        text = ast.unparse(decorator)
        if "skip" in text or "expectedFailure" in text:
            return f"is decorated with {text[:60]}, so it says nothing about a program"
    return ""


def _is_generator(node: ast.AST) -> bool:
    return any(isinstance(child, ast.Yield | ast.YieldFrom) for child in ast.walk(node))


_UNITTEST_CALL = """
import unittest as _unittest
_result = _unittest.TestResult()
_unittest.TestSuite([{cls}("{method}")]).run(_result)
assert _result.wasSuccessful() and _result.testsRun == 1 and not _result.skipped
assert not _result.expectedFailures
"""
_PYTEST_CALL = """
_case = {cls}()
getattr(_case, "setup_method", lambda *_: None)()
_case.{method}()
"""


@functools.lru_cache(maxsize=1024)
def _is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name.split(".")[0]) is not None
    except (ImportError, ValueError):
        return False
