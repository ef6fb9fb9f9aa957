"""Static analysis of Python tests: what of the program they use, and whether they can fail.

Only code that runs counts: statements, and the functions and classes that they reach. Code behind `return`, in
`if False`, or in a `try` that swallows its assertions does not.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Collection, Iterator, Sequence

from rl_core.errors import DataError

_BUILTINS = frozenset(dir(builtins)) | {"__name__", "__file__", "__doc__"}
_DYNAMIC = frozenset({"globals", "locals", "vars", "eval", "exec"})  # may reach anything
# Calls that any function with the right name survives.
_IDLE_CALLS = frozenset({"callable", "hasattr", "print", "type", "isinstance", "id", "repr", "str"})
_SWALLOWING = frozenset({"Exception", "BaseException", "AssertionError"})
_ASSERTION_PREFIXES = ("assert", "fail", "raises")
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_DEFINITIONS = (*_FUNCTIONS, ast.ClassDef)
_PREPARING = (ast.Import, ast.ImportFrom, ast.Assign, ast.AnnAssign, *_DEFINITIONS)
Function = ast.FunctionDef | ast.AsyncFunctionDef


class TestCode:
    """All texts of a row's tests together, which share their names."""

    __test__ = False  # not a test of this project

    def __init__(
        self, trees: Sequence[ast.Module], function: str, program_modules: Collection[str]
    ) -> None:
        """Collect names.

        Args:
            function: the program's function that the row names, "" = none.
            program_modules: names by which tests import the program.
        """
        self._function = function
        self.modules: set[str] = set()  # imported, without the program
        self.program_modules: set[str] = set()
        self.called_names: set[str] = set()  # called at module level, outside definitions
        self._definitions: dict[str, Function | ast.ClassDef] = {}
        self._bound: set[str] = set()
        self._imported: set[str] = set()  # from the program
        # A statement outside of definitions that uses the program, on behalf of later texts.
        self._assigned_uses: set[str] = set()
        for tree in trees:
            self._collect_names(tree, program_modules)
        for tree in trees:
            for statement in tree.body:
                if not isinstance(statement, _DEFINITIONS):
                    self.called_names |= {
                        call.func.id
                        for call in ast.walk(statement)
                        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name)
                    }
        self._bound -= self._imported
        for tree in trees:
            self._collect_assigned_uses(tree)

    def _collect_names(self, tree: ast.Module, program_modules: Collection[str]) -> None:
        for statement in tree.body:
            if isinstance(statement, _DEFINITIONS):
                self._definitions[statement.name] = statement
        for node in ast.walk(tree):
            if isinstance(node, _DEFINITIONS):
                self._bound.add(node.name)
            elif isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
                self._bound.add(node.id)
            elif isinstance(node, ast.arg):
                self._bound.add(node.arg)
            elif isinstance(node, ast.ExceptHandler) and node.name:
                self._bound.add(node.name)
            elif isinstance(node, ast.Import | ast.ImportFrom):
                self._collect_import(node, program_modules)

    def _collect_import(
        self, node: ast.Import | ast.ImportFrom, program_modules: Collection[str]
    ) -> None:
        for alias in node.names:
            module = alias.name if isinstance(node, ast.Import) else node.module or ""
            name = (alias.asname or alias.name).split(".")[0]
            if module in program_modules or module == self._function != "":
                self.program_modules.add(module)
                self._imported.add(name)
            else:
                self.modules.add(module)
                self._bound.add(name)

    def _collect_assigned_uses(self, tree: ast.Module) -> None:
        """Collect the variables that hold results of the program, as in `result = add(1, 2)`."""
        kinds = (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.NamedExpr)
        assignments = [node for node in ast.walk(tree) if isinstance(node, kinds)]
        for node in (*assignments, *assignments):  # twice: a variable may hold a part of another
            if node.value is not None and self._uses_program(node.value):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                self._assigned_uses |= {
                    name.id
                    for target in targets
                    for name in ast.walk(target)
                    if isinstance(name, ast.Name)
                }

    def _is_program_name(self, name: str) -> bool:
        if name in self._assigned_uses or name in self._imported or name in _DYNAMIC:
            return True
        if name == self._function and name not in self._definitions:
            return True
        return name not in self._bound and name not in _BUILTINS

    def _uses_program(self, node: ast.AST) -> bool:
        return any(
            isinstance(child, ast.Name) and self._is_program_name(child.id)
            for child in ast.walk(node)
        )

    def add_program_name(self, name: str) -> None:
        """Count a name as the program's: the parameter of a function that is called with it."""
        self._assigned_uses.add(name)

    def check_test(self, statements: Sequence[ast.stmt], name: str) -> bool:
        """Return whether statements are a test; False = they only prepare one (imports, definitions, values).

        Raises: DataError for a test that calls nothing of the program or cannot fail.
        """
        nodes = list(self._iter_reached_nodes(statements))
        has_assertion = any(
            isinstance(node, ast.Assert | ast.Raise) or _is_assertion_call(node)
            for node, _ in nodes
        )
        if not has_assertion and all(
            isinstance(statement, _PREPARING) or _is_docstring(statement)
            for statement in statements
        ):
            return False
        if not has_assertion:
            raise DataError(f"{name} asserts nothing, so every program passes")
        if not any(self._tests_program(node) for node, _ in nodes):
            hint = (
                ""
                if self._function
                else "; if its function is named like a builtin, set entry_point"
            )
            raise DataError(f"{name} calls nothing of the program{hint}")
        if not any(is_effective and _can_fail(node) for node, is_effective in nodes):
            raise DataError(f"{name} cannot fail: its assertions hold for every program")
        return True

    def _tests_program(self, node: ast.AST) -> bool:
        """Return whether a node calls the program, or compares what it holds."""
        if isinstance(node, ast.Call):
            function = node.func.id if isinstance(node.func, ast.Name) else ""
            return function not in _IDLE_CALLS and self._uses_program(node)
        if isinstance(node, ast.Compare):
            is_identity = all(isinstance(op, ast.Is | ast.IsNot) for op in node.ops)
            return not is_identity and self._uses_program(node)
        return False

    def _iter_reached_nodes(self, statements: Sequence[ast.stmt]) -> Iterator[tuple[ast.AST, bool]]:
        """Yield (node, False = an assertion in it is swallowed) of what runs with the statements."""
        reached: set[str] = set()
        pending: list[tuple[Sequence[ast.stmt], bool]] = [(statements, True)]
        while pending:
            block, is_effective = pending.pop()
            for node, effective in _iter_run_nodes(block, is_effective):
                yield node, effective
                if not isinstance(node, ast.Name) or node.id in reached:
                    continue
                definition = self._definitions.get(node.id)
                if definition is not None:
                    reached.add(node.id)
                    pending += [(body, effective) for body in _list_bodies(definition)]


def _list_bodies(definition: Function | ast.ClassDef) -> list[list[ast.stmt]]:
    """List the bodies of a function, or of a class and of its methods."""
    if not isinstance(definition, ast.ClassDef):
        return [definition.body]
    methods = [node for node in ast.walk(definition) if isinstance(node, _FUNCTIONS)]
    return [definition.body, *(method.body for method in methods)]


def _iter_run_nodes(
    statements: Sequence[ast.stmt], is_effective: bool
) -> Iterator[tuple[ast.AST, bool]]:
    """Yield the nodes of statements that run, without bodies of definitions and dead code."""
    for statement in statements:
        if isinstance(statement, _DEFINITIONS):
            for node in (*statement.decorator_list,):
                yield from ((child, is_effective) for child in ast.walk(node))
            continue
        blocks = [
            (name, block)
            for name in ("body", "orelse", "finalbody")
            if isinstance(block := getattr(statement, name, None), list)
        ]
        if not blocks:
            yield from ((child, is_effective) for child in ast.walk(statement))
        else:
            yield statement, is_effective
            for name, value in ast.iter_fields(statement):
                if name in ("test", "iter", "items", "subject", "target"):
                    for part in value if isinstance(value, list) else [value]:
                        yield from ((child, is_effective) for child in ast.walk(part))
            swallows = isinstance(statement, ast.Try) and any(map(_swallows, statement.handlers))
            for name, block in blocks:
                if not _is_dead(statement, name):
                    is_swallowed = swallows and name == "body"
                    yield from _iter_run_nodes(block, is_effective and not is_swallowed)
            for part in (*getattr(statement, "handlers", ()), *getattr(statement, "cases", ())):
                yield from _iter_run_nodes(part.body, is_effective)
        if isinstance(statement, ast.Return | ast.Raise | ast.Break | ast.Continue):
            return


def _is_dead(statement: ast.stmt, name: str) -> bool:
    """Return whether a block never runs: under a constant condition, or over an empty literal."""
    if isinstance(statement, ast.If | ast.While) and isinstance(statement.test, ast.Constant):
        return bool(statement.test.value) == (name == "orelse")
    if isinstance(statement, ast.For) and name == "body":
        return isinstance(statement.iter, ast.List | ast.Tuple) and not statement.iter.elts
    return False


def _swallows(handler: ast.ExceptHandler) -> bool:
    """Return whether a handler catches assertions and lets the test pass."""
    names = (
        {node.id for node in ast.walk(handler.type) if isinstance(node, ast.Name)}
        if handler.type
        else set()
    )
    if handler.type is not None and not names & _SWALLOWING:
        return False
    nodes = [node for node, _ in _iter_run_nodes(handler.body, True)]
    return not any(isinstance(node, ast.Raise) or _can_fail(node) for node in nodes)


def _get_called_name(node: ast.Call) -> str:
    if isinstance(node.func, ast.Attribute):
        return node.func.attr
    return node.func.id if isinstance(node.func, ast.Name) else ""


def _is_assertion_call(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call):
        return False
    name = _get_called_name(node).lower()
    return name.startswith(_ASSERTION_PREFIXES) or (
        name in ("exit", "quit", "_exit")
        and any(not _is_constant(arg) or _read_constant(arg) for arg in node.args)
    )


def _can_fail(node: ast.AST) -> bool:
    """Return whether a node is an assertion that some program fails."""
    if isinstance(node, ast.Raise):
        return True
    if isinstance(node, ast.Assert):
        return not _always_holds(node.test)
    if not _is_assertion_call(node):
        return False
    assert isinstance(node, ast.Call)
    name, args = _get_called_name(node).lower(), node.args
    if not name.startswith("assert") or not args:
        return True
    if name in ("asserttrue", "assert_", "assert_true"):
        return not _always_holds(args[0])
    if name in ("assertequal", "assertequals", "assert_equal", "assertis") and len(args) > 1:
        return ast.dump(args[0]) != ast.dump(args[1]) and not all(map(_is_constant, args[:2]))
    return not all(map(_is_constant, args))


def _always_holds(test: ast.expr) -> bool:
    """Return whether a condition is true whatever the program does."""
    if isinstance(test, ast.Tuple | ast.List | ast.Set):
        return bool(test.elts)  # assert (condition, "message")
    if isinstance(test, ast.JoinedStr | ast.Lambda):
        return True
    if isinstance(test, ast.BoolOp):
        combine = any if isinstance(test.op, ast.Or) else all
        return combine(map(_always_holds, test.values))
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return isinstance(test.operand, ast.Constant) and not test.operand.value
    if isinstance(test, ast.Compare) and len(test.ops) == 1:
        reflexive = isinstance(test.ops[0], ast.Eq | ast.Is | ast.LtE | ast.GtE)
        if reflexive and ast.dump(test.left) == ast.dump(test.comparators[0]):
            return True
    if not _is_constant(test):
        return False
    return not isinstance(test, ast.Constant) or bool(test.value)


def _is_constant(node: ast.expr) -> bool:
    """Return whether an expression holds no name and no call."""
    return not any(isinstance(child, ast.Name | ast.Call) for child in ast.walk(node))


def _read_constant(node: ast.expr) -> object:
    return node.value if isinstance(node, ast.Constant) else True


def _is_docstring(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Pass) or (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    )


def find_main_guards(tree: ast.Module) -> list[ast.stmt]:
    """Find `if __name__ == "__main__":` blocks and calls of a runner, as `unittest.main()`, at module level."""
    return [
        statement
        for statement in tree.body
        if (isinstance(statement, ast.If) and ast.unparse(statement.test).startswith("__name__ =="))
        or (
            isinstance(statement, ast.Expr)
            and isinstance(statement.value, ast.Call)
            and ast.unparse(statement.value.func) in ("unittest.main", "pytest.main", "main")
        )
    ]


def list_support_statements(node: ast.ClassDef) -> list[ast.stmt]:
    """List the statements of a class and of its methods that are no tests, such as `setUp`."""
    statements = [statement for statement in node.body if not isinstance(statement, _FUNCTIONS)]
    for method in node.body:
        if isinstance(method, _FUNCTIONS) and not method.name.startswith("test"):
            statements += method.body
    return statements


def is_test_case_class(node: ast.ClassDef) -> bool:
    """Return whether a class derives from unittest's TestCase by name."""
    return any(ast.unparse(base).endswith("TestCase") for base in node.bases)


def list_test_methods(node: ast.ClassDef) -> list[Function]:
    """List the methods of a class that are tests."""
    return [
        method
        for method in node.body
        if isinstance(method, _FUNCTIONS) and method.name.startswith("test")
    ]
