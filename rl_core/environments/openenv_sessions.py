"""Sessions of an OpenEnv server: one WebSocket connection holds one environment instance.

A server admits a limited number of sessions (often one), while all episodes of a collection are open at once. A session
whose episode waits for the policy is therefore parked when another episode needs its place: its connection closes, and
its next action first replays the episode, from the reset with its seed. A replay that differs from what the episode saw
is refused.
Source: OpenEnv 0.10, `openenv/core/env_server` (messages reset, step, mcp, close at /ws; GET /schema and /health).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from rl_core.environments.agent_process import resolve_command
from rl_core.environments.websocket_client import WebSocketClient, WebSocketError
from rl_core.errors import EnvironmentFault, SettingsError
from rl_core.json_client import RequestError, fetch_json, find_health_problem
from rl_core.processes.children import START_LINE, spawn_server, stop_child

_POLL_S = 0.1
_CAPACITY_POLL_S = 0.05  # between attempts at a server that has no place left
_CAPACITY_PATIENCE_S = 0.5  # a server notices a closed connection later
_SESSION_ERRORS = ("CAPACITY_REACHED", "FACTORY_ERROR", "SESSION_ERROR")
_LOG_CHARACTERS = 500  # of a server's log, in messages
# Environment variables passed to a server: no tokens, keys or folders.
_VARIABLES = ("PATH", "LANG", "LC_ALL", "TZ", "HOME")


class StepRefused(Exception):
    """An action that the server could not execute.

    `code` is VALIDATION_ERROR (it does not fit the action's schema) or EXECUTION_ERROR (the environment raised).
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class OpenEnvServer:
    """A server at a URL, or one that this process starts at its first use and ends with itself."""

    def __init__(
        self,
        url: str,
        command: str,
        *,
        cwd: str | None,
        variables: Mapping[str, str],
        max_sessions: int | None,
        timeout_s: float,
        start_timeout_s: float,
    ) -> None:
        """Check the options; nothing is started or requested yet.

        Args:
            command: command line of the server; {port} in it becomes a free port.
            variables: environment variables of the command, besides PATH and the like.
            max_sessions: most sessions at a time; None = as many as the server admits.
        Raises: SettingsError.
        """
        if bool(url) == bool(command):
            raise SettingsError(
                "options: give either url, the address of a running server, or command, which starts one"
            )
        if url and urlsplit(url).scheme not in ("http", "https", "ws", "wss"):
            raise SettingsError(f"options.url: '{url}' must begin with http:// or https://")
        if command and "{port}" not in command:
            raise SettingsError(
                "options.command: must name its port as {port}, as in 'uvicorn my_env.server.app:app --port {port}'"
            )
        if max_sessions is not None and max_sessions < 1:
            raise SettingsError(f"options.max_sessions: {max_sessions} must be at least 1")
        for name, value in (("timeout_s", timeout_s), ("start_timeout_s", start_timeout_s)):
            if not 0 < value < 1e6:
                raise SettingsError(f"options.{name}: {value} must be a number of seconds above 0")
        self._url, self._command, self._cwd = url.rstrip("/"), command, cwd
        self._variables = dict(variables)
        self._timeout_s, self._start_timeout_s = timeout_s, start_timeout_s
        self._start_lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._log: Path | None = None
        self._places = threading.Condition()
        self._max_sessions = max_sessions
        self._connected: list[OpenEnvSession] = []  # the least recently used first

    def fetch(self, path: str) -> Any:
        """Send a GET. Raises: EnvironmentFault."""
        url = self._find_address() + path
        try:
            return fetch_json(url, timeout_s=self._timeout_s)
        except RequestError as error:
            raise EnvironmentFault(f"OpenEnv server: {error}{self._quote_log()}") from error

    def open_session(self, reset: Mapping[str, Any]) -> OpenEnvSession:
        """Return a session that begins with these parameters of the reset; it connects when it is first used."""
        return OpenEnvSession(self, reset)

    def list_tools(self) -> list[dict[str, Any]]:
        """List the name, description and JSON schema of the arguments of each MCP tool. Raises: EnvironmentFault."""
        session = self.open_session({})
        try:
            reply = session.send_rpc("tools/list", {})
        finally:
            session.close()
        tools = reply.get("tools", []) if isinstance(reply, Mapping) else reply
        return [
            {
                "name": tool["name"],
                "description": tool.get("description") or "",
                "parameters": tool.get("inputSchema") or tool.get("input_schema") or {},
            }
            for tool in tools
        ]

    def connect(self, session: OpenEnvSession) -> WebSocketClient:
        """Connect a session, after parking others as long as the server has no place. Raises: EnvironmentFault."""
        parts = urlsplit(self._find_address())
        scheme = "wss" if parts.scheme in ("https", "wss") else "ws"
        url = urlunsplit((scheme, parts.netloc, parts.path + "/ws", "", ""))
        started_at = time.monotonic()
        while True:
            self._take_place(session, started_at)
            try:
                client, problem = self._try_to_connect(url)
            except WebSocketError as error:
                self.release(session)
                raise EnvironmentFault(f"OpenEnv server: {error}{self._quote_log()}") from error
            except BaseException:
                self.release(session)
                raise
            if client is not None:
                return client
            self.release(session)
            self._check_time(started_at, problem)
            if time.monotonic() > started_at + _CAPACITY_PATIENCE_S:
                with self._places:  # other clients hold places; give up one of this process
                    self._park_one()
            time.sleep(_CAPACITY_POLL_S)

    def mark_used(self, session: OpenEnvSession) -> None:
        """Note that a connected session was used last."""
        with self._places:
            if session in self._connected:
                self._connected.remove(session)
                self._connected.append(session)

    def release(self, session: OpenEnvSession) -> None:
        """Give a session's place back."""
        with self._places:
            if session in self._connected:
                self._connected.remove(session)
            self._places.notify_all()

    def _has_place(self) -> bool:
        return self._max_sessions is None or len(self._connected) < self._max_sessions

    def _park_one(self) -> bool:
        """Park the least recently used session that no thread is using; return False if there is none."""
        return any(session.park() for session in list(self._connected))

    def _take_place(self, session: OpenEnvSession, started_at: float) -> None:
        with self._places:
            while not self._has_place():
                if not self._park_one() and not self._places.wait(_POLL_S):
                    self._check_time(started_at, "all sessions of this process are busy")
            self._connected.append(session)

    def _try_to_connect(self, url: str) -> tuple[WebSocketClient | None, str]:
        """Return a connection, or None and the problem if the server has no place now.

        Raises: WebSocketError without a connection; EnvironmentFault for a server without an environment.
        """
        client = WebSocketClient(url, self._timeout_s)
        try:
            reply = client.exchange({"type": "state"}, self._timeout_s)
        except WebSocketError as error:  # a full server closes the connection at once
            return None, str(error)
        data = reply.get("data", {}) if isinstance(reply, dict) else {}
        code, message = data.get("code"), str(data.get("message", reply))
        if code not in _SESSION_ERRORS:
            return (
                client,
                "",
            )  # the state, or the error of an environment that has none before its reset
        client.close()
        if code != "CAPACITY_REACHED":
            raise EnvironmentFault(f"OpenEnv server: no session: {message}{self._quote_log()}")
        known = data.get("max_sessions")
        with self._places:
            if isinstance(known, int) and (
                self._max_sessions is None or known < self._max_sessions
            ):
                self._max_sessions = max(1, known)
        return None, message

    def _check_time(self, started_at: float, problem: str) -> None:
        if time.monotonic() > started_at + self._timeout_s:
            raise EnvironmentFault(
                f"OpenEnv server: no session became free within {self._timeout_s:g} s (options.timeout_s); other "
                f"clients may hold them: raise the server's max_concurrent_envs ({problem})"
            )

    def _find_address(self) -> str:
        """Return the server's address; start it if this process does. Raises: EnvironmentFault."""
        if not self._command:
            return self._url
        with self._start_lock:
            if self._process is not None and self._process.poll() is not None:
                raise EnvironmentFault(
                    f"OpenEnv server: it ended (exit status {self._process.returncode}){self._quote_log()}"
                )
            if self._process is None:
                self._start_server()
            return self._url

    def _start_server(self) -> None:
        folder = Path(tempfile.mkdtemp(prefix="posttrain-openenv-"))
        self._log = folder / "server.log"
        port = _find_free_port()
        words = resolve_command(self._command.replace("{port}", str(port)))
        variables = {name: os.environ[name] for name in _VARIABLES if name in os.environ}
        cwd = Path(self._cwd) if self._cwd else Path.cwd()
        self._process = spawn_server(words, {**variables, **self._variables}, cwd, self._log)
        self._url = f"http://127.0.0.1:{port}"
        end = weakref.finalize(self, _end_server, self._process, folder)
        deadline = time.monotonic() + self._start_timeout_s
        while problem := find_health_problem(f"{self._url}/health"):
            status = self._process.poll()
            if status is not None or time.monotonic() > deadline:
                text = self._quote_log()
                end()
                if status is not None:
                    raise EnvironmentFault(
                        f"OpenEnv server: it ended at its start (exit status {status}): {' '.join(words)}{text}"
                    )
                raise EnvironmentFault(
                    f"OpenEnv server: not up within {self._start_timeout_s:g} s (options.start_timeout_s), {problem}: "
                    f"{' '.join(words)}{text}"
                )
            time.sleep(_POLL_S)

    def _quote_log(self) -> str:
        """Quote the last lines of the server's log, if this process started it."""
        if self._log is None:
            return ""
        with contextlib.suppress(OSError):
            text = self._log.read_text(errors="replace").rpartition(START_LINE)[2]
            text = text.partition("\n")[2].strip()[-_LOG_CHARACTERS:]
            return f"; the end of its log: {text}" if text else ""
        return ""


class OpenEnvSession:
    """One episode at the server. Used by one thread at a time; `park` may come from another."""

    def __init__(self, server: OpenEnvServer, reset: Mapping[str, Any]) -> None:
        self._server, self._reset = server, dict(reset)
        self._client: WebSocketClient | None = None
        self._lock = threading.Lock()  # held while it is in use
        # (request, answer) of the reset and of every step so far
        self._history: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._is_closed = False

    def begin(self) -> dict[str, Any]:
        """Reset; return {observation, reward, done, metadata}. Raises: EnvironmentFault."""
        try:
            return self._use(
                lambda client: self._play(client, {"type": "reset", "data": self._reset})
            )
        except StepRefused as error:
            raise EnvironmentFault(f"OpenEnv server: reset failed: {error}") from error

    def step(self, action: Mapping[str, Any]) -> dict[str, Any]:
        """Execute an action; return {observation, reward, done, metadata}. Raises: StepRefused, EnvironmentFault."""
        return self._use(lambda client: self._play(client, {"type": "step", "data": dict(action)}))

    def send_rpc(self, method: str, parameters: Mapping[str, Any]) -> Any:
        """Return the result of an MCP request; it is not part of the episode. Raises: EnvironmentFault."""
        request = {"jsonrpc": "2.0", "id": 1, "method": method, "params": dict(parameters)}
        reply = self._use(
            lambda client: _exchange(client, {"type": "mcp", "data": request}, self._server)
        )
        data = reply.get("data", {})
        if reply.get("type") == "error" or data.get("error"):
            raise EnvironmentFault(
                f"OpenEnv server: {method}: {(data.get('error') or data).get('message', data)}"
            )
        return data.get("result")

    def park(self) -> bool:
        """Close the connection; the next use replays the episode. Return False if a thread is using it."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            return self._disconnect()
        finally:
            self._lock.release()

    def close(self) -> None:
        """Close the session for good."""
        self._is_closed = True
        client = self._client
        if not self._lock.acquire(blocking=False):  # a step hangs
            if client is not None:
                client.close()
            self._server.release(self)
            return
        try:
            self._disconnect()
        finally:
            self._lock.release()

    def _use(self, function: Callable[[WebSocketClient], dict[str, Any]]) -> dict[str, Any]:
        with self._lock:
            if self._is_closed:
                raise EnvironmentFault("OpenEnv server: the episode's session is closed")
            if self._client is None:
                self._client = self._server.connect(self)
                self._replay(self._client)
            self._server.mark_used(self)
            return function(self._client)

    def _play(self, client: WebSocketClient, request: dict[str, Any]) -> dict[str, Any]:
        answer = _read_answer(_exchange(client, request, self._server))
        self._history.append((request, answer))
        return answer

    def _replay(self, client: WebSocketClient) -> None:
        for number, (request, before) in enumerate(self._history):
            try:
                now = _read_answer(_exchange(client, request, self._server))
            except StepRefused as error:
                raise EnvironmentFault(
                    f"OpenEnv server: replaying an episode failed: {error}"
                ) from error
            if now != before:
                place = f"its step {number}" if number else "its reset"
                raise EnvironmentFault(
                    f"OpenEnv server: an episode that lost its place was replayed, and {place} gave another result. "
                    "The environment does not depend on the seed alone, so it needs as many sessions as episodes "
                    "that are played at once: raise the server's max_concurrent_envs (and options.max_sessions)"
                )

    def _disconnect(self) -> bool:
        client, self._client = self._client, None
        if client is None:
            return False
        client.close()
        self._server.release(self)
        return True


def _exchange(
    client: WebSocketClient, request: Mapping[str, Any], server: OpenEnvServer
) -> dict[str, Any]:
    try:
        reply = client.exchange(request, server._timeout_s)
    except WebSocketError as error:
        raise EnvironmentFault(f"OpenEnv server: {error}{server._quote_log()}") from error
    if not isinstance(reply, dict) or not isinstance(reply.get("data"), dict):
        raise EnvironmentFault(
            f"OpenEnv server: it sent no message of the protocol: {reply!r:.200}"
        )
    return reply


def _read_answer(reply: Mapping[str, Any]) -> dict[str, Any]:
    """Return the data of an observation. Raises: StepRefused for an error; EnvironmentFault for anything else."""
    data: dict[str, Any] = reply["data"]
    if reply.get("type") == "error":
        details = "; ".join(
            f"{'.'.join(map(str, error.get('loc', ())))}: {error.get('msg', '')}"
            for error in data.get("errors", ())
            if isinstance(error, Mapping)
        )
        raise StepRefused(str(data.get("code", "")), details or str(data.get("message", data)))
    if reply.get("type") != "observation" or not isinstance(data.get("observation"), dict):
        raise EnvironmentFault(f"OpenEnv server: it sent no observation: {reply!r:.200}")
    return data


def _end_server(process: subprocess.Popen[bytes], folder: Path) -> None:
    stop_child(process, 5.0)
    shutil.rmtree(folder, ignore_errors=True)


def _find_free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])
