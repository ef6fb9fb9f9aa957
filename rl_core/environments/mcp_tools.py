"""Tools of MCP servers, through the official package `mcp`; each episode has separate sessions.

    mcp: {files: {command: [python, server.py]}, search: {url: "http://127.0.0.1:8000/mcp", tools: [find]}}

A server on standard input and output starts with an episode's first call and ends with the episode; the client connects
to a server behind a URL (streamable HTTP). The tools are listed once, in a dedicated session.
Source: Model Context Protocol, https://modelcontextprotocol.io/specification.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import json
import logging
import os
import threading
import weakref
from collections.abc import AsyncIterator, Coroutine, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar

from rl_core.environments.optional_packages import import_optional_package
from rl_core.environments.tools import Tool, Toolset
from rl_core.errors import EnvironmentFault, SettingsError, suggest_name
from rl_core.tracking import replace_invalid_characters

logger = logging.getLogger(__name__)

T = TypeVar("T")
MAX_PAGES = 100  # of a server's tool list
_OPTIONS = ("command", "url", "env", "cwd", "tools", "timeout_s", "start_timeout_s")
_connection_futures: set[Any] = set()  # of open connections, cancelled at the end of the process
_loop_lock = threading.Lock()
_CLIENT_LOGGER = "mcp.client.stdio"  # of the package
_server_name: ContextVar[str] = ContextVar("mcp_server", default="")  # of the running task
_noisy_servers: set[str] = set()  # whose invalid output was reported


@dataclass(frozen=True)
class _ServerOptions:
    """Options of one server."""

    name: str
    command: tuple[str, ...]  # () = has a URL
    url: str
    env: Mapping[str, str]
    cwd: str | None
    tools: tuple[str, ...] | None  # None = all
    timeout_s: float
    start_timeout_s: float


class McpToolset(Toolset):
    """Tools of MCP servers, together with other tools."""

    def __init__(self, servers: Mapping[str, Any], others: Iterable[Tool] = ()) -> None:
        """Parse the options; nothing is started yet.

        Raises: SettingsError for invalid options, or without the package.
        """
        import_optional_package("mcp", "mcp", "options.mcp:")
        self._servers = [_parse_server_options(name, options) for name, options in servers.items()]
        self._others = list(others)
        self._session: _McpSession | None = None
        self._context, self._dialects = (), []
        self._lock = threading.Lock()
        self._tools_by_name: dict[str, Tool] | None = None

    @property
    def _tools(self) -> dict[str, Tool]:  # type: ignore[override]
        """Tools by name, listed on first use. Raises: EnvironmentFault if a server does not start."""
        with self._lock:
            if self._tools_by_name is None:
                tools = [_ignore_session(tool) for tool in self._others]
                session = _McpSession(self._servers)
                try:
                    for server in self._servers:
                        listed = session.list_tools(server)
                        tools += _build_server_tools(server, listed, {tool.name for tool in tools})
                finally:
                    session.close()
                self._tools_by_name = {tool.name: tool for tool in tools}
            return self._tools_by_name

    def session(self) -> Toolset:
        """Return the tools with a new session, opened by the first call."""
        return _EpisodeToolset(self._tools, _McpSession(self._servers), self._dialects)


class _EpisodeToolset(Toolset):
    """The tools of one episode."""

    def __init__(self, tools: dict[str, Tool], session: _McpSession, dialects: list[str]) -> None:
        self._tools, self._context, self._session = tools, (session,), session
        self._dialects = dialects

    def close(self) -> None:
        """Close the session."""
        self._session.close()


class _McpSession:
    """Connections to several servers, each opened on first use. Thread-safe."""

    def __init__(self, servers: Sequence[_ServerOptions]) -> None:
        self._servers = {server.name: server for server in servers}
        self._connections: dict[str, _ServerConnection] = {}
        self._lock = threading.Lock()
        self._is_closed = False

    def call_tool(self, server: str, tool: str, arguments: dict[str, Any]) -> str:
        """Return the text of a tool's result.

        Raises: EnvironmentFault if the server does not start; _ToolCallFailed.
        """
        return self._open_connection(server).call_tool(tool, arguments)

    def list_tools(self, server: _ServerOptions) -> list[Any]:
        """List the server's tools."""
        return self._open_connection(server.name).list_tools()

    def close(self) -> None:
        """Ask every connection to close, without waiting."""
        with self._lock:
            self._is_closed = True
            connections, self._connections = list(self._connections.values()), {}
        for connection in connections:
            connection.close()

    def _open_connection(self, name: str) -> _ServerConnection:
        with self._lock:
            if self._is_closed:
                raise EnvironmentFault(f"MCP server '{name}': the episode is over")
            if name not in self._connections:
                self._connections[name] = _ServerConnection(self._servers[name])
            return self._connections[name]


class _ToolCallFailed(Exception):
    """A call that failed; the message is shown to the policy."""


class _ServerConnection:
    """Client of one server, in a task of the shared event loop that both opens and closes it."""

    def __init__(self, server: _ServerOptions) -> None:
        """Block until the server answers. Raises: EnvironmentFault."""
        self._server, self._loop = server, _ensure_event_loop()
        # On other systems the server's standard error is discarded.
        is_linux = hasattr(os, "memfd_create")
        self._stderr_fd = os.memfd_create("stderr") if is_linux else os.open(os.devnull, os.O_RDWR)
        weakref.finalize(self, os.close, self._stderr_fd)
        self._client: Any = None
        self._stop: asyncio.Event | None = None
        ready: asyncio.Future[None] = _run_in_loop(self._loop, _create_future())
        task = asyncio.run_coroutine_threadsafe(self._run_connection(ready), self._loop)
        _connection_futures.add(task)
        try:
            _run_in_loop(
                self._loop, asyncio.wait_for(asyncio.shield(ready), server.start_timeout_s)
            )
        except BaseException as error:
            task.cancel()  # it may still be waiting for the server
            reason = _format_error_reason(error)
            if isinstance(error, TimeoutError):
                reason = f"it did not answer within {server.start_timeout_s:g} s (start_timeout_s)"
            if last_line := _read_last_stderr_line(self._stderr_fd):
                reason += f"; last line on stderr: {last_line}"
            address = " ".join(server.command) or server.url
            raise EnvironmentFault(
                f"MCP server '{server.name}' ({address}) cannot be used: {reason}"
            ) from error

    def call_tool(self, tool: str, arguments: dict[str, Any]) -> str:
        """Return the text of a result. Raises: _ToolCallFailed."""
        seconds = self._server.timeout_s
        with contextlib.suppress(OSError):
            os.ftruncate(self._stderr_fd, 0)  # a memfd occupies memory
        try:
            result = _run_in_loop(
                self._loop, asyncio.wait_for(self._client.call_tool(tool, arguments), seconds)
            )
        except TimeoutError:
            raise _ToolCallFailed(f"{tool} did not answer within {seconds:g} seconds") from None
        except Exception as error:
            raise _ToolCallFailed(_format_error_reason(error)) from error
        text = _extract_result_text(result)
        if getattr(result, "is_error", None) or getattr(result, "isError", None):
            raise _ToolCallFailed(text)
        return text

    def list_tools(self) -> list[Any]:
        """List all tools, page by page. Raises: EnvironmentFault."""

        async def read_pages() -> list[Any]:
            tools: list[Any] = []
            cursor = None
            for _ in range(MAX_PAGES):
                page = await self._client.list_tools(cursor=cursor)
                tools += page.tools
                cursor = getattr(page, "next_cursor", None) or getattr(page, "nextCursor", None)
                if not cursor:
                    break
            return tools

        try:
            listing = asyncio.wait_for(read_pages(), self._server.start_timeout_s)
            return _run_in_loop(self._loop, listing)
        except Exception as error:
            raise EnvironmentFault(
                f"MCP server '{self._server.name}' lists no tools: {_format_error_reason(error)}"
            ) from error

    def close(self) -> None:
        """Ask the task to end."""
        self._loop.call_soon_threadsafe(
            lambda: self._stop.set() if self._stop is not None else None
        )

    async def _run_connection(self, ready: asyncio.Future[None]) -> None:
        _server_name.set(self._server.name)  # the package's tasks inherit it
        logging.getLogger(_CLIENT_LOGGER).addFilter(_report_invalid_output_once)
        self._stop = asyncio.Event()
        try:
            async with AsyncExitStack() as stack:
                self._client = await stack.enter_async_context(
                    _create_client(self._server, self._stderr_fd)
                )
                if not ready.done():
                    ready.set_result(None)
                await self._stop.wait()
        except BaseException as error:
            if not ready.done():
                ready.set_exception(
                    error if isinstance(error, Exception) else EnvironmentFault(repr(error))
                )
            if not isinstance(error, Exception):
                raise


def _report_invalid_output_once(record: logging.LogRecord) -> bool:
    """Replace the package's traceback for each invalid line on a server's stdout by one warning for the server."""
    if "JSONRPC" not in record.getMessage():
        return True
    name = _server_name.get()
    if name not in _noisy_servers:
        _noisy_servers.add(name)
        logger.warning(
            "MCP server '%s' writes lines to its standard output that are no messages of the protocol; they are "
            "skipped (its logs belong on standard error)",
            name,
        )
    return False


def _create_client(server: _ServerOptions, stderr_fd: int) -> Any:
    """Create the package's client of a server; the server's standard error goes to `stderr_fd`.

    Version 1 of the package, which OpenEnv and others need, has no `Client`, but the session within it.
    """
    import mcp

    if server.url:
        return mcp.Client(server.url) if hasattr(mcp, "Client") else _open_session(server.url)
    parameters = mcp.StdioServerParameters(
        command=server.command[0],
        args=list(server.command[1:]),
        env=dict(server.env),
        cwd=server.cwd,
    )
    streams = mcp.stdio_client(parameters, errlog=os.fdopen(stderr_fd, "w", closefd=False))
    return mcp.Client(streams) if hasattr(mcp, "Client") else _open_session(streams)


@contextlib.asynccontextmanager
async def _open_session(target: Any) -> AsyncIterator[Any]:
    """Open a session of version 1 of the package, at a URL or over streams."""
    import mcp
    from mcp.client import streamable_http

    streams = streamable_http.streamablehttp_client(target) if isinstance(target, str) else target
    async with streams as (reading, writing, *_), mcp.ClientSession(reading, writing) as session:
        await session.initialize()
        yield session


async def _create_future() -> asyncio.Future[None]:
    return asyncio.get_running_loop().create_future()


@functools.cache
def _start_event_loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True, name="MCP sessions").start()
    atexit.register(_cancel_sessions)
    return loop


def _ensure_event_loop() -> asyncio.AbstractEventLoop:
    """Return the event loop shared by all sessions, which runs in a background thread."""
    with _loop_lock:
        _connection_futures.difference_update(
            [future for future in _connection_futures if future.done()]
        )
        return _start_event_loop()


def _cancel_sessions() -> None:
    """Cancel open connections at the end of the process."""
    pending = [future for future in _connection_futures if not future.done()]
    for future in pending:
        future.cancel()


def _run_in_loop(loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, T]) -> T:
    return asyncio.run_coroutine_threadsafe(coroutine, loop).result()


def _read_last_stderr_line(stderr_fd: int) -> str:
    """Return the last line that a server wrote to standard error."""
    size = os.fstat(stderr_fd).st_size
    tail = os.pread(stderr_fd, 4096, max(0, size - 4096)).decode(errors="replace")
    lines = tail.strip().splitlines()
    return lines[-1].strip()[:300] if lines else ""


def _format_error_reason(error: BaseException) -> str:
    """Return the message of an error, or of the first one in a group."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return str(error)[:500] or type(error).__name__


def _extract_result_text(result: Any) -> str:
    """Return the text parts of a result, else its structured content; other kinds are named."""
    parts = [
        getattr(part, "text", None) or f"[{getattr(part, 'type', 'content')}]"
        for part in result.content
    ]
    structured = getattr(result, "structured_content", None) or getattr(
        result, "structuredContent", None
    )
    if not parts and structured is not None:
        return json.dumps(structured)
    return "\n".join(parts)


def _build_server_tools(
    server: _ServerOptions, listed: Sequence[Any], used_names: set[str]
) -> list[Tool]:
    """Build the tools of a server that the options select. Raises: SettingsError for a name that it does not have."""
    known = {tool.name: tool for tool in listed}
    for name in server.tools or ():
        if name not in known:
            raise SettingsError(
                f"options.mcp.{server.name}.tools: no tool '{name}'; {suggest_name(name, known)}"
            )
    clean_name = functools.partial(replace_invalid_characters, valid="A-Za-z0-9_-", merge=False)
    tools: list[Tool] = []
    for name, tool in known.items():
        if server.tools is not None and name not in server.tools:
            continue
        schema = getattr(tool, "input_schema", None) or getattr(tool, "inputSchema", None) or {}
        definitions = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
        properties = {
            key: {**value, **definitions} for key, value in schema.get("properties", {}).items()
        }
        shown_name = clean_name(name)[:64]
        if shown_name in used_names:
            shown_name = f"{clean_name(server.name)}_{shown_name}"[:64]
        required = schema.get("required", ())
        tools.append(
            Tool(
                shown_name,
                tool.description or name,
                properties,
                functools.partial(_call_session_tool, server.name, name),
                optional=tuple(key for key in properties if key not in required),
                waits=True,
            )
        )
    return tools


def _call_session_tool(server: str, tool: str, session: _McpSession, /, **arguments: Any) -> str:
    return session.call_tool(server, tool, arguments)


def _ignore_session(tool: Tool) -> Tool:
    """Wrap a tool so that it is called without the session to which the toolset is bound."""

    def function(_: _McpSession, /, **arguments: Any) -> Any:
        return tool.function(**arguments)

    return Tool(
        tool.name,
        tool.description,
        tool.parameters,
        function,
        tool.timeout_s,
        tool.max_output_chars,
        tool.optional,
    )


def _parse_server_options(name: str, options: Any) -> _ServerOptions:
    key_path = f"options.mcp.{name}"
    if not isinstance(options, Mapping):
        raise SettingsError(f"{key_path}: must be {{command: [PROGRAM, ...]}} or {{url: ADDRESS}}")
    for key in options:
        if key not in _OPTIONS:
            raise SettingsError(f"{key_path}.{key}: no such option; {suggest_name(key, _OPTIONS)}")
    command, url = options.get("command", ()), options.get("url", "")
    command = command.split() if isinstance(command, str) else command
    if (
        bool(command) == bool(url)
        or not all(isinstance(word, str) for word in command)
        or not isinstance(url, str)
    ):
        raise SettingsError(f"{key_path}: give either command, a list of words, or url")
    limits = {
        key: options.get(key, default)
        for key, default in (("timeout_s", 30.0), ("start_timeout_s", 60.0))
    }
    for key, value in limits.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e6:
            raise SettingsError(f"{key_path}.{key}: {value!r} must be a number of seconds above 0")
    tools = options.get("tools")
    return _ServerOptions(
        name,
        tuple(command),
        url,
        {str(k): str(v) for k, v in (options.get("env") or {}).items()},
        options.get("cwd"),
        None if tools is None else tuple(tools),
        float(limits["timeout_s"]),
        float(limits["start_timeout_s"]),
    )
