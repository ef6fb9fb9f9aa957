"""Tests of programs in the forms that data sets use: a wrong program earns 0, a right one 1, or the row is refused."""

import json
import textwrap

import pytest

from rl_core.environments.answer_checks import build_answer_check
from rl_core.errors import DataError

RIGHT, WRONG = "def add(a, b): return a + b", "def add(a, b): return 0"
READS = "a, b = map(int, input().split())\nprint(a + b)"
PAIRS = {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7\n"]}
CALLS = {"fn_name": "add", "inputs": [[1, 2], [2, 2]], "outputs": [[3], 4]}
CHECK = "METADATA = {}\n\ndef check(candidate):\n    assert candidate(1, 2) == 3\n"
UNITTEST = """
import unittest
from solution import add

class AddTest(unittest.TestCase):
    def setUp(self):
        self.one = 1
    def test_small(self):
        self.assertEqual(add(self.one, 2), 3)
    def test_large(self):
        self.assertEqual(add(100, 2), 102)

if __name__ == "__main__":
    unittest.main()
"""
CLASS = """
class TestAdd:
    def setup_method(self):
        self.one = 1
    def test_it(self):
        assert add(self.one, 2) == 3
"""


@pytest.fixture(scope="module")
def code():
    return build_answer_check("code", {"timeout_s": 10.0})


@pytest.fixture(scope="module")
def partial():
    return build_answer_check("code", {"timeout_s": 10.0, "partial": True})


FORMS = {
    "pairs as JSON": (json.dumps(PAIRS), "print('no')", READS),
    "pairs": (PAIRS, "pass", READS),
    "pairs as a Python literal": (str(PAIRS), "pass", READS),
    "pairs of lists of lines": ({"inputs": [["1 2"]], "outputs": [["3"]]}, "print(4)", READS),
    "a list of pairs as JSON": ('[{"input": "1 2\\n", "output": "3\\n"}]', "pass", READS),
    "CodeContests": ({"input": ["1 2"], "output": ["3"]}, "print(1)", READS),
    "nested cases": (
        {
            "language": "python",
            "test_cases": [{"type": "stdin_stdout", "input": "1 2", "output": "3"}],
        },
        "print(1)",
        READS,
    ),
    "calls as JSON": (json.dumps(CALLS), WRONG, RIGHT),
    "calls": (CALLS, WRONG, RIGHT),
    "calls of a method": (
        CALLS,
        "class Solution: pass",
        "class Solution:\n    def add(self, a, b): return a + b",
    ),
    "calls, JSON a line": (
        {"fn_name": "add", "inputs": ["1\n2"], "outputs": ["3"]},
        WRONG,
        RIGHT,
    ),
    "a call that returns a list": (
        {"fn_name": "pair", "inputs": [[1]], "outputs": [[1, 1]]},
        "def pair(x): return [x]",
        "def pair(x): return (x, x)",
    ),
    "a call that returns an object": (
        {"fn_name": "table", "inputs": [[2]], "outputs": [{"1": [True], "2": 0.3}]},
        "def table(x): return {1: [1], 2: 0.3}",
        "def table(x): return {1: [True], x: 0.1 + 0.2}",
    ),
    "HumanEval": (CHECK, WRONG, RIGHT),
    "HumanEval with its call": (CHECK + "check(add)", WRONG, RIGHT),
    "pytest": ("def test_add():\n    assert add(1, 2) == 3\n", WRONG, RIGHT),
    "pytest, imported": (
        "import pytest\nimport solution\nfrom solution import add\n\n\ndef test_add():\n    assert add(1, 2) == 3\n\n\n"
        "def test_other():\n    with pytest.raises(TypeError):\n        solution.add(1)\n",
        WRONG,
        RIGHT,
    ),
    "pytest class": (CLASS, WRONG, RIGHT),
    "unittest": (UNITTEST, WRONG, RIGHT),
    "asserts as JSON": ('["assert add(1, 2) == 3", "assert add(2, 2) == 4"]', WRONG, RIGHT),
    "preparation and a loop": (
        [
            "import math",
            "cases = [(1, 2, 3)]",
            "for a, b, c in cases:\n    assert math.isclose(add(a, b), c)",
        ],
        WRONG,
        RIGHT,
    ),
    "a variable": (["result = add(1, 2)", "assert result == 3"], WRONG, RIGHT),
    "an exception": (
        "try:\n    add(None, 1)\nexcept TypeError:\n    pass\nelse:\n    assert False",
        WRONG,
        RIGHT,
    ),
}


@pytest.mark.parametrize(("tests", "wrong", "right"), FORMS.values(), ids=FORMS)
def test_the_forms_of_tests(code, tests, wrong, right):
    row = {"tests": tests, "entry_point": "add"}
    code.check_row("", row)
    assert code.score_action(wrong, "", row) == 0.0
    assert code.score_action(right, "", row) == 1.0


def test_functions_named_like_builtins_and_methods(code):
    row = {"tests": ["assert sum(10, 15) == 6"]}
    with pytest.raises(DataError, match="if its function is named like a builtin, set entry_point"):
        code.check_row("", row)
    row["entry_point"] = "sum"
    assert code.score_action("def sum(a, b): return 6", "", row) == 1.0
    assert code.score_action("def sum(a, b): return 7", "", row) == 0.0
    row = {"tests": CHECK, "entry_point": "Solution().add"}  # as LeetCode's
    program = "class Solution:\n    def add(self, a, b): return a + b"
    assert code.score_action(program, "", row) == 1.0
    assert code.score_action(program.replace("+", "-"), "", row) == 0.0
    with pytest.raises(DataError, match="neither Python nor JSON"):
        code.check_row("", {"tests": CHECK, "entry_point": "a b"})


def test_shares_count_tests_only(partial):
    small = "def add(a, b): return 3"
    for tests, share in (
        (json.dumps({**CALLS, "outputs": [3, 4]}), 0.5),
        (UNITTEST, 0.5),
        (["import math", "assert add(1, 2) == 3", "assert add(2, 2) == 4"], 0.5),
        (PAIRS, 0.0),
    ):
        assert partial.score_action(small, "", {"tests": tests}) == share
    # what prepares the tests has to work
    broken = ["x = add(1, 2)[0]", "assert add(1, 2) == 3"]
    assert partial.score_action(RIGHT, "", {"tests": broken}) == 0.0


REFUSED = {
    "nothing": ("", "are empty"),
    "null": (None, "must be Python statements"),
    "a number": (5, "must be Python statements"),
    "no test": ([], "must be Python statements"),
    "an object of something else": ({"a": 1}, "test 1 has the keys a; expected input and output"),
    "JSON of something else": ('{"a": 1}', "has the keys a"),
    "other lengths": ({"inputs": ["1"], "outputs": []}, "1 inputs and 0 outputs"),
    "no inputs": ({"inputs": [], "outputs": []}, "must be lists that are not empty"),
    "no output is expected": (
        [{"input": "1", "output": " \n"}],
        "a program that does nothing passes",
    ),
    "arguments without a function": ({"inputs": [[1]], "outputs": [2]}, "name it in fn_name"),
    "no name": (
        {"fn_name": "a b", "inputs": [[1]], "outputs": [2]},
        "is not the name of a function",
    ),
    "functional without a function": (
        [{"input": "1", "output": "2", "testtype": "functional"}],
        "name one in fn_name",
    ),
    "an unknown type": ([{"input": "1", "output": "2", "type": "file"}], "tests of the types file"),
    "no Python": ("assert add(1, 2 == 3", "neither Python nor JSON"),
    "text": ("it should add", "neither Python nor JSON"),
    "a value": ("42", "asserts nothing"),
    "a comparison": ("add(1, 2) == 3", "asserts nothing"),
    "a call": ("add(1, 2)", "asserts nothing"),
    "one of the tests": (["assert add(1, 2) == 3", "add(1, 2)"], "test 2 asserts nothing"),
    "imports": ("import math", "define and call nothing that asserts"),
    "an uncalled function": (
        "def verify():\n    assert add(1, 2) == 3",
        "call nothing that asserts",
    ),
    "HumanEval without a function": (CHECK, "name the function in the column entry_point"),
    "its own function": (f"{RIGHT}\nassert add(1, 2) == 3", "calls nothing of the program"),
    "constants": ("assert 1 + 2 == 3", "calls nothing of the program"),
    "only a name": ("assert add", "calls nothing of the program"),
    "that it exists": ("assert callable(add)", "calls nothing of the program"),
    "a true constant": ("add(1, 2)\nassert True", "cannot fail"),
    "a tuple": ('assert (add(1, 2) == 3, "wrong")', "cannot fail"),
    "or true": ("assert add(1, 2) == 3 or True", "cannot fail"),
    "equal to itself": ("assert add(1, 2) == add(1, 2)", "cannot fail"),
    "swallowed": ("try:\n    assert add(1, 2) == 3\nexcept Exception:\n    pass", "cannot fail"),
    "swallowed bare": ("try:\n    assert add(1, 2) == 3\nexcept:\n    print('bad')", "cannot fail"),
    "dead": ("if False:\n    assert add(1, 2) == 3\nadd(1, 2)", "asserts nothing"),
    "behind return": (
        "def test_add():\n    add(1, 2)\n    return\n    assert add(1, 2) == 3",
        "asserts nothing",
    ),
    "over nothing": ("for x in []:\n    assert add(1, 2) == 3", "asserts nothing"),
    "a coroutine": ("async def test_add():\n    assert add(1, 2) == 3", "is a coroutine"),
    "a generator": ("def test_add():\n    assert add(1, 2) == 3\n    yield", "is a generator"),
    "a fixture": ("def test_add(one):\n    assert add(one, 2) == 3", "takes arguments"),
    "a mark": (
        "import pytest\n@pytest.mark.skip\ndef test_add():\n    assert add(1, 2) == 3",
        "is decorated with pytest.mark.skip",
    ),
    "an empty unittest": (
        "import unittest\nclass T(unittest.TestCase):\n    def test_add(self): add(1, 2)",
        "T.test_add asserts nothing",
    ),
    "a constant unittest": (
        "import unittest\nclass T(unittest.TestCase):\n"
        "    def test_add(self):\n        add(1, 2)\n        self.assertTrue(True)",
        "T.test_add cannot fail",
    ),
    "a skipped unittest": (
        "import unittest\nclass T(unittest.TestCase):\n    @unittest.skip('x')\n"
        "    def test_add(self): self.assertEqual(add(1, 2), 3)",
        "so it says nothing about a program",
    ),
    "an unknown module": (
        "import no_such_module_here\nassert add(1, 2) == 3",
        "import no_such_module_here, which is not installed",
    ),
    "check without a use": (
        "def check(candidate):\n    assert add is not None",
        "name the function",
    ),
}


@pytest.mark.parametrize(("tests", "reason"), REFUSED.values(), ids=REFUSED)
def test_refused_rows(code, tests, reason):
    row = {"prompt": "p", "tests": tests}
    with pytest.raises(
        DataError, match="column 'tests' of the row of 'p' cannot be used: "
    ) as error:
        code.check_row("", row)
    assert reason in str(error.value)
    assert "\n" not in str(error.value)
    with pytest.raises(DataError):
        code.score_action(RIGHT, "", row)


def test_a_check_that_ignores_its_candidate_is_refused(code):
    row = {"tests": "def check(candidate):\n    x = 3\n    assert x == 3", "entry_point": "add"}
    with pytest.raises(DataError, match="check calls nothing of the program"):
        code.check_row("", row)


STATEMENTS = ["assert add(1, 2) == 3", "assert add(5, 5) == 10"]
ATTACKS = {
    "markers": "print('OK'); print('passed'); print('[true, true]')",
    "exit": "import sys; sys.exit(0)",
    "hard exit": "import os; os._exit(0)",
    "exit in the function": "import os\ndef add(a, b): os._exit(0)",
    "leave in the function": "def add(a, b): raise SystemExit(0)",
    "exec": "import builtins\nbuiltins.exec = lambda *a: None\ndef add(a, b): return 0",
    "compile": "import builtins\nreal = compile\nbuiltins.compile = lambda *a: real('1', 't', 'exec')",
    "own builtins": "__builtins__ = {'add': 0}\ndef add(a, b): return 0",
    "names of frames": """
        import sys
        frame = sys._getframe()
        while frame:
            for name, value in list(frame.f_locals.items()):
                if callable(value) and name in ('report', 'finish', 'end'):
                    value([True, True])
                if isinstance(value, list) and frame.f_code.co_name == 'main':
                    value += [True, True]
            frame = frame.f_back
    """,
    "a token in frames": """
        import gc, json, os
        for item in gc.get_objects():
            if isinstance(item, dict) and 'token' in item:
                os.write(item['report'], json.dumps([item['token'], [True, True]]).encode())
        os._exit(0)
    """,
    "forged reports": """
        import os
        for n in range(3, 64):
            for text in (b'["", true, 3, []]\\n', b'["", [true, true]]'):
                try: os.write(n, text)
                except OSError: pass
        os._exit(0)
    """,
    "memory of the parent": """
        import os
        for name in ('mem', 'fd/0', 'fd/1', 'fd/3', 'fd/4', 'fd/5', 'fd/6', 'fd/7'):
            try: os.write(os.open(f'/proc/{os.getppid()}/{name}', os.O_RDWR), b'x')
            except OSError: continue
            while True: pass  # would be seen as timed out
        os._exit(0)
    """,
}


@pytest.mark.parametrize("program", ATTACKS.values(), ids=ATTACKS)
def test_attacks_earn_nothing(code, program):
    code.counts.clear()
    program = textwrap.dedent(program)
    for tests in (STATEMENTS, CALLS, PAIRS, UNITTEST, CHECK):
        row = {"tests": tests, "entry_point": "add"}
        assert code.score_action(program, "", row) == 0.0
    assert code.counts == {}


def test_helpers_of_tests_cannot_be_redefined(code):
    isclose = "import math\nassert math.isclose(add(1, 2), 3)"
    attacks = {
        "import unittest\nunittest.TestCase.assertEqual = lambda *a: None": UNITTEST,
        "import unittest\nunittest.TestCase.assertEqual.__code__ = (lambda *a: None).__code__": UNITTEST,
        "import unittest\nunittest.TestResult.wasSuccessful = lambda *a: True": UNITTEST,
        "import unittest\nunittest.TestCase.run = lambda *a: None": UNITTEST,
        "import math\nmath.isclose = lambda *a: True": isclose,
        "import sys, types\nsys.modules['math'] = types.SimpleNamespace(isclose=lambda *a: True)": isclose,
        "import builtins\nbuiltins.abs = lambda x: 0": "assert abs(add(1, 2) - 3) < 1e-6",
        "def abs(x): return 0": "assert abs(add(1, 2) - 3) < 1e-6",
        "def all(x): return True": "assert all(add(n, 1) == n + 1 for n in range(3))",
        "def check(candidate): pass": CHECK,
        "def test_add(): pass": "def test_add():\n    assert add(1, 2) == 3\n",
        "class Any:\n    def __eq__(self, o): return True\n    def __call__(self, *a): return True\n"
        "import math\nmath.isclose = Any()": isclose,
    }
    for attack, tests in attacks.items():
        row = {"tests": tests, "entry_point": "add"}
        assert code.score_action(f"{WRONG}\n{attack}", "", row) == 0.0, attack
    for tests in dict.fromkeys(attacks.values()):  # and untouched ones pass
        assert code.score_action(RIGHT, "", {"tests": tests, "entry_point": "add"}) == 1.0, tests


def test_results_of_calls_are_compared_outside_of_the_program(code):
    """A value that equals everything, and one that reads what is expected, earn nothing."""
    anything = (
        "class Any(int):\n    def __eq__(self, o): return True\n    __hash__ = int.__hash__\n"
    )
    assert code.score_action(f"{anything}def add(a, b): return Any()", "", {"tests": CALLS}) == 0.0
    peeking = """
    import gc
    def add(a, b):
        for item in gc.get_objects():
            if isinstance(item, dict) and 'outputs' in item or 'expected' in item:
                return (item.get('outputs') or item.get('expected'))[0]
    """
    assert code.score_action(textwrap.dedent(peeking), "", {"tests": CALLS}) == 0.0


def test_output_that_is_written_at_the_end_counts(code):
    program = (
        "import sys, io, os, atexit\nout = io.StringIO()\nsys.stdout = out\n"
        "atexit.register(lambda: os.write(1, out.getvalue().encode()))\n" + READS
    )
    assert code.score_action(program, "", {"tests": PAIRS}) == 1.0
