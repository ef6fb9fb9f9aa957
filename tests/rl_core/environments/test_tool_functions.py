"""Functions of every kind as tools: they work, or are refused in one line when the toolset is built."""

from __future__ import annotations

import asyncio
import functools
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from rl_core.environments.prompts import Prompts
from rl_core.environments.tools import Tool, Toolset
from rl_core.errors import EnvironmentFault, SettingsError
from rl_core.types import ToolCall

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path


async def fetch(city: str, days: int = 1) -> str:
    """Fetch the weather."""
    await asyncio.sleep(0.01)
    if city == "Atlantis":
        raise ValueError("no such city")
    if city == "end":
        raise SystemExit
    return f"{city} {days}"


class LookUp:
    """Look into a table."""

    def __init__(self, table: dict[str, int]) -> None:
        self.table = table

    def __call__(self, key: str, /, default: int = 0) -> int:
        return self.table.get(key, default)


class AsyncLookUp:
    async def __call__(self, key: str) -> str:
        """Look it up."""
        return key * 2


def add(left: int, right: int, /, *, scale: int = 1) -> int:
    """Add.

    Args:
        left: the first
    """
    return (left + right) * scale


def total(values: Sequence[int], names: Mapping[str, int] | None = None) -> int:
    """Sum up."""
    return sum(values)


def run(tool: Any, **arguments: Any) -> tuple[str, bool]:
    toolset = Toolset([Tool.from_function(tool)])
    return toolset.run(ToolCall(next(iter(toolset.tools)), arguments))


def test_asynchronous_functions_are_awaited() -> None:
    assert run(fetch, city="Oslo", days=2) == ("Oslo 2", False)
    assert run(fetch, city="Atlantis") == ("error: no such city", True)
    assert run(fetch, city="end") == ("error: SystemExit", True)
    assert run(fetch, city="Rome") == ("Rome 1", False)  # the loop still runs
    assert run(AsyncLookUp(), key="ab") == ("abab", False)
    assert run(functools.partial(fetch, "Oslo"), days=3) == ("Oslo 3", False)

    async def within() -> tuple[str, bool]:  # a caller with its own loop
        return run(fetch, city="Bern")

    assert asyncio.run(within()) == ("Bern 1", False)
    direct = Toolset([Tool("get", "", {"city": str}, lambda city: fetch(city))])
    assert direct.run(ToolCall("get", {"city": "Oslo"})) == ("Oslo 1", False)
    bound = Toolset([Tool("get", "", {"city": str}, add_context)]).bind("now in")
    assert bound.run(ToolCall("get", {"city": "Oslo"})) == ("now in Oslo", False)


async def add_context(context: str, city: str) -> str:
    return f"{context} {city}"


def test_calls_of_one_turn_are_awaited_together() -> None:
    together = threading.Barrier(2, timeout=10)

    async def meet(name: str) -> str:
        await asyncio.get_running_loop().run_in_executor(None, together.wait)
        return name

    toolset = Toolset([Tool.from_function(meet)])
    results = toolset.run_all([ToolCall("meet", {"name": "a"}), ToolCall("meet", {"name": "b"})])
    assert results == [("a", False), ("b", False)]


def test_a_late_asynchronous_call_is_cancelled() -> None:
    cancelled = threading.Event()

    async def hang() -> str:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.set()
            raise
        return ""

    began = time.monotonic()
    toolset = Toolset([Tool.from_function(hang, timeout_s=0.2)])
    assert toolset.run(ToolCall("hang", {})) == (
        "error: hang did not answer within 0.2 seconds",
        True,
    )
    assert cancelled.wait(5) and time.monotonic() - began < 10


def test_partials_objects_and_positional_parameters_work() -> None:
    assert run(LookUp({"a": 5}), key="a") == ("5", False)
    assert run(LookUp({}), key="b", default=7) == ("7", False)
    (tool,) = Toolset([Tool.from_function(LookUp({}))]).tools.values()
    assert (tool.name, tool.description) == ("look_up", "Look into a table.")
    assert run(add, left=1, right=2, scale=10) == ("30", False)
    assert run(add, left=1, right=2) == ("3", False)
    partial = Tool.from_function(functools.partial(add, 4, scale=2))
    assert (partial.name, partial.description) == ("add", "Add.")
    assert list(partial.parameters) == ["right"]  # what the author has set is not the policy's
    assert run(functools.partial(add, 4, scale=2), right=1) == ("10", False)


def test_hints_imported_for_type_checking() -> None:
    parameters = Tool.from_function(total).parameters
    assert parameters["values"] == {"type": "array", "items": {"type": "integer"}}
    assert parameters["names"]["anyOf"][0]["additionalProperties"] == {"type": "integer"}

    def read(path: Path) -> str:
        return ""

    with pytest.raises(
        SettingsError, match="argument path has the type Path, which is not known"
    ) as caught:
        Tool.from_function(read)
    assert "\n" not in str(caught.value)

    def pick(choice: Color) -> str:  # type: ignore[name-defined]  # noqa: F821
        return ""

    with pytest.raises(SettingsError, match="import it outside 'if TYPE_CHECKING'"):
        Prompts([{"prompt": "a"}], tools=[pick])

    def bare(values: list, more: Sequence, table: Mapping) -> None:  # type: ignore[type-arg]
        return None

    assert [schema["type"] for schema in Tool.from_function(bare).parameters.values()] == [
        "array",
        "array",
        "object",
    ]


async def count_async(limit: int) -> Any:
    for number in range(limit):
        yield number


def count(limit: int) -> Any:
    yield from range(limit)


class Counter:
    def __call__(self, limit: int) -> Any:
        yield limit


@pytest.mark.parametrize(
    ("tool", "part"),
    [
        (count_async, "tool 'count_async': yields its results"),
        (count, "tool 'count': yields its results"),
        (functools.partial(count, 3), "tool 'count': yields its results"),
        (Counter(), "tool 'counter': yields its results"),
        (LookUp, "tool 'LookUp': is a class"),
        (lambda x: x, "no type hint"),
        (max, "tool 'max'"),
    ],
)
def test_what_cannot_work_is_refused_when_the_toolset_is_built(tool: Any, part: str) -> None:
    with pytest.raises(SettingsError) as caught:
        Prompts([{"prompt": "a"}], tools=[tool])
    assert part in str(caught.value) and "\n" not in str(caught.value)


def test_a_generator_that_only_a_call_shows_is_a_fault_of_the_environment() -> None:
    for hidden in (lambda: count(2), lambda: count_async(2)):
        with pytest.raises(EnvironmentFault, match="generator, which is no text"):
            Toolset([Tool("hidden", "", {}, hidden)]).run(ToolCall("hidden", {}))
    with pytest.raises(SettingsError, match="yields its results"):
        Tool("count", "", {"limit": int}, count)


def test_asynchronous_tools_block() -> None:
    assert Prompts([{"prompt": "a"}], tools=[fetch]).blocking
    assert not Prompts([{"prompt": "a"}], tools=[total]).blocking
