"""Lines of the user's own code that may depend on chance: global random numbers, clocks, sets, listings of folders."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rl_core.errors import PosttrainError
from rl_core.user_code import user_code_digests

__all__ = ["Suspect", "suspects_in"]

_CLOCKS = ("time", "time_ns", "perf_counter", "monotonic", "now", "utcnow", "today")
_LISTINGS = ("os.listdir", "os.scandir", "glob.glob", "os.walk")
_MOST = 5


@dataclass(frozen=True)
class Suspect:
    """A line that may be the reason."""

    file: str
    line: int
    code: str
    why: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} has `{self.code}`: {self.why}"


def suspects_in(paths: Sequence[str]) -> list[Suspect]:
    """Suspect lines of the modules behind import paths ('package.module:name') and of the user's that those import."""
    try:
        modules = user_code_digests([path for path in paths if ":" in path])
    except PosttrainError:
        return []
    found: list[Suspect] = []
    for name in modules:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.origin is not None:
            found += _of_file(Path(spec.origin))
    return found[:_MOST]


def _of_file(path: Path) -> list[Suspect]:
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError):
        return []
    found = []
    sorted_ones = {id(arg) for node in ast.walk(tree) if _name(node) == "sorted" for arg in getattr(node, "args", [])}
    for node, why in _suspicious(tree, sorted_ones):
        found.append(Suspect(path.name, node.lineno, ast.unparse(node).splitlines()[0][:80], why))
    return sorted(found, key=lambda suspect: suspect.line)


def _suspicious(tree: ast.AST, sorted_ones: set[int]) -> Iterator[tuple[ast.expr, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and (why := _why(node, _name(node), id(node) in sorted_ones)):
            yield node, why
        elif isinstance(node, ast.For | ast.comprehension) and _is_set(node.iter):
            yield node.iter, "the order of a set of texts differs from process to process (PYTHONHASHSEED)"


def _why(node: ast.Call, name: str, is_sorted: bool) -> str:
    module, _, last = name.rpartition(".")
    if module in ("random", "np.random", "numpy.random") and last not in ("Random", "default_rng", "Generator"):
        return "numbers of a generator that is global: unseeded, or moved by whoever else draws from it"
    if last in ("Random", "default_rng", "SystemRandom") and not node.args and not node.keywords:
        return "a generator without a seed"
    if module in ("time", "datetime", "datetime.datetime", "date") and last in _CLOCKS:
        return "the time"
    if name in ("uuid.uuid4", "uuid.uuid1", "os.urandom", "secrets.token_hex", "id", "torch.rand", "torch.randn"):
        return "differs from process to process"
    if name == "hash":
        return "the hash of a text differs from process to process (PYTHONHASHSEED)"
    if (name in _LISTINGS or last in ("iterdir", "rglob")) and not is_sorted:
        return "a folder's listing has no order"
    if name in ("list", "tuple", "enumerate", "iter", "next") and node.args and _is_set(node.args[0]):
        return "the order of a set of texts differs from process to process (PYTHONHASHSEED)"
    return ""


def _is_set(node: ast.expr) -> bool:
    return isinstance(node, ast.Set | ast.SetComp) or _name(node) in ("set", "frozenset")


def _name(node: ast.AST) -> str:
    """'random.random' of a call of it; "" for anything else."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name | ast.Attribute):
        return ""
    return ast.unparse(node.func)
