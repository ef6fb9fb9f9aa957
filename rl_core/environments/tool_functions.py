"""Python functions as tools: what their signatures and hints say, and calls of synchronous and asynchronous ones."""

from __future__ import annotations

import asyncio
import collections.abc
import concurrent.futures
import contextvars
import functools
import inspect
import os
import re
import threading
import types
import typing
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from rl_core.environments.tool_schemas import JSON_TYPES
from rl_core.errors import EnvironmentFault, SettingsError

_ARGUMENT_DOC_LINE = re.compile(r"^\s+\*{0,2}(\w+)(?:\s*\([^)]*\))?:\s*(.+)")
_POLL_S = 0.05  # between looks for the end of a call's time limit
# Names that modules often import for type checking only.
_COMMON_TYPES = {
    name: getattr(module, name) for module in (collections.abc, typing) for name in module.__all__
}


def find_tool_function(tool: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function behind partials and callable objects, which has the hints and the docstring."""
    while isinstance(tool, functools.partial):
        tool = tool.func
    if inspect.isroutine(tool):
        return tool
    kind: Any = type(tool)
    return typing.cast(Callable[..., Any], kind.__call__)


def is_async_tool(tool: Callable[..., Any]) -> bool:
    """Return whether the tool is an `async def`."""
    return inspect.iscoroutinefunction(find_tool_function(tool))


def check_tool_function(name: str, tool: Callable[..., Any]) -> None:
    """Raise SettingsError for a callable whose result is no text."""
    if not callable(tool):
        raise SettingsError(f"tool '{name}': {type(tool).__name__} is no function")
    function = find_tool_function(tool)
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise SettingsError(
            f"tool '{name}': yields its results; return the text for the policy from an ordinary function"
        )


def read_function_parameters(
    tool: Callable[..., Any],
) -> tuple[str, str, dict[str, dict[str, Any]], tuple[str, ...]]:
    """Return name, description, JSON schema by argument, and optional arguments of a function with type hints.

    The description is the docstring up to its first empty line; arguments are described under 'Args:'. Arguments that a
    partial sets by name are not the policy's.
    Raises: SettingsError for an argument without a type hint, or one that JSON does not have.
    """
    if isinstance(tool, type):
        raise SettingsError(f"tool '{tool.__name__}': is a class; pass a function or an object")
    function = find_tool_function(tool)
    name = getattr(function, "__name__", "")
    if name == "__call__":  # of a class
        name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", type(_strip_partials(tool)).__name__).lower()
    check_tool_function(name, tool)
    docstring = inspect.getdoc(function) or ""
    if function is not _strip_partials(tool):
        has_text = function.__doc__ is not None
        docstring = docstring if has_text else inspect.getdoc(type(_strip_partials(tool))) or ""
    descriptions = {
        match[1]: match[2].strip()
        for line in docstring.splitlines()
        if (match := _ARGUMENT_DOC_LINE.match(line))
    }
    try:
        signature = inspect.signature(tool)
    except (TypeError, ValueError):
        raise SettingsError(f"tool '{name}': its arguments are not known; use a function") from None
    hidden = _list_bound_names(tool)
    schemas: dict[str, dict[str, Any]] = {}
    optional = []
    for argument, parameter in signature.parameters.items():
        if argument in hidden:
            continue
        place = f"tool '{name}': the argument {argument}"
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise SettingsError(f"tool '{name}': takes *{argument}; name its arguments one by one")
        if parameter.annotation is parameter.empty:
            raise SettingsError(f"{place} has no type hint")
        schema = _build_hint_schema(_resolve_hint(function, parameter.annotation, place), place)
        if argument in descriptions:
            schema["description"] = descriptions[argument]
        if parameter.default is not parameter.empty:
            optional.append(argument)
        schemas[argument] = schema
    return name, " ".join(docstring.partition("\n\n")[0].split()) or name, schemas, tuple(optional)


def accept_named_arguments(tool: Callable[..., Any]) -> Callable[..., Any]:
    """Return the tool, or, if it has positional-only parameters, a function that takes them by name."""
    positional = [
        parameter
        for parameter in inspect.signature(tool).parameters.values()
        if parameter.kind is parameter.POSITIONAL_ONLY
    ]
    if not positional:
        return tool

    def call_by_name(*context: Any, **arguments: Any) -> Any:
        places = [arguments.pop(each.name, each.default) for each in positional[len(context) :]]
        return tool(*context, *places, **arguments)

    if is_async_tool(tool):

        async def call_async_by_name(*context: Any, **arguments: Any) -> Any:
            return await call_by_name(*context, **arguments)

        return call_async_by_name
    return call_by_name


def _strip_partials(tool: Callable[..., Any]) -> Callable[..., Any]:
    while isinstance(tool, functools.partial):
        tool = tool.func
    return tool


def _list_bound_names(tool: Callable[..., Any]) -> set[str]:
    names: set[str] = set()
    while isinstance(tool, functools.partial):
        names |= set(tool.keywords)
        tool = tool.func
    return names


def _resolve_hint(function: Callable[..., Any], hint: Any, place: str) -> Any:
    """Resolve a hint that is text, as with `from __future__ import annotations`. Raises: SettingsError."""
    function = inspect.unwrap(function)
    known = {**_COMMON_TYPES, **getattr(function, "__globals__", {})}
    if inspect.isfunction(function):
        known |= inspect.getclosurevars(function).nonlocals
    holder = type("Holder", (), {"__annotations__": {"hint": hint}})
    try:
        return typing.get_type_hints(holder, globalns=known, localns={})["hint"]
    except NameError as error:
        raise SettingsError(
            f"{place} has the type {hint}, which is not known when the toolset is built ({error}); import it outside "
            "'if TYPE_CHECKING'"
        ) from None
    except Exception as error:  # an annotation is any expression
        raise SettingsError(f"{place} has the type {hint}, which is none: {error}") from None


def _build_hint_schema(hint: Any, description: str) -> dict[str, Any]:
    """Build the JSON schema of a type hint. Raises: SettingsError."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return {}
    if isinstance(hint, type) and hint in JSON_TYPES:
        return {"type": JSON_TYPES[hint]}
    if hint is type(None):
        return {"type": "null"}
    if origin is typing.Literal:
        return {"enum": list(arguments)}
    if origin in (typing.Union, types.UnionType):
        return {"anyOf": [_build_hint_schema(argument, description) for argument in arguments]}
    kind = origin or hint
    if isinstance(kind, type) and issubclass(kind, Sequence) and not issubclass(kind, str | bytes):
        items = {"items": _build_hint_schema(arguments[0], description)} if arguments else {}
        return {"type": "array", **items}
    if isinstance(kind, type) and issubclass(kind, Mapping) and len(arguments) in (0, 2):
        values = (
            {"additionalProperties": _build_hint_schema(arguments[1], description)}
            if arguments
            else {}
        )
        return {"type": "object", **values}
    raise SettingsError(f"{description} has the type {hint}, which JSON does not have")


# -- calls -------------------------------------------------------------------------------------------------------------


def call_tool_function(function: Callable[..., Any], *context: Any, **arguments: Any) -> str:
    """Call a tool's function and return its result as text; a coroutine is awaited.

    Raises: EnvironmentFault for a generator, whose text is none; whatever the function raises.
    """
    result = function(*context, **arguments)
    if inspect.isawaitable(result):
        result = _wait_for_result(result)
    if inspect.isgenerator(result) or inspect.isasyncgen(result):
        raise EnvironmentFault(f"the tool returned a {type(result).__name__}, which is no text")
    return str(result)


@functools.cache
def _start_event_loop(process_id: int) -> asyncio.AbstractEventLoop:
    """Start the loop of this process, in which all asynchronous tools run; a fork has another one."""
    loop = asyncio.new_event_loop()
    name = f"asynchronous tools of {process_id}"
    threading.Thread(target=loop.run_forever, daemon=True, name=name).start()
    return loop


_loop_lock = threading.Lock()


def _wait_for_result(awaitable: Awaitable[Any]) -> Any:
    """Wait for a result of the shared loop, in the caller's context; a call terminated here is cancelled there."""
    with _loop_lock:
        loop = _start_event_loop(os.getpid())
    context = contextvars.copy_context()
    outcome: concurrent.futures.Future[Any] = concurrent.futures.Future()
    tasks: list[asyncio.Task[None]] = []

    async def set_outcome() -> None:
        try:
            outcome.set_result(await awaitable)
        except asyncio.CancelledError:
            outcome.set_exception(RuntimeError("the call was cancelled"))
        except BaseException as error:  # SystemExit would end the loop
            outcome.set_exception(error)

    def start_task() -> None:
        tasks.append(loop.create_task(set_outcome(), context=context))

    loop.call_soon_threadsafe(start_task)
    try:
        while True:
            try:
                return outcome.result(timeout=_POLL_S)
            except concurrent.futures.TimeoutError:
                if outcome.done():  # the tool raised a TimeoutError
                    raise
    except BaseException:
        if not outcome.done():
            loop.call_soon_threadsafe(lambda: [task.cancel() for task in tasks])
        raise
