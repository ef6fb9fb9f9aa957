"""HTTP server on the loopback address that answers the chat requests of agents from the policy and records them.

    POST /e/EPISODE/v1/chat/completions     plain, streamed, with tools, n choices
    POST /e/EPISODE/v1/reward               a number, or {"reward": number, "success": bool, ...}
    GET  /e/EPISODE/v1/models

Each episode has an address and a key; a request with the key of another episode is refused.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import logging
import queue
import re
import select
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NoReturn, Protocol

from rl_core.chat.prompts import ParsedAnswer
from rl_core.chat.requests import ChatRequestError, parse_chat_request
from rl_core.chat.responses import ChunkFormatter
from rl_core.environments.agent import AgentFailed
from rl_core.inference.server_loop import ServerLoop
from rl_core.inference.serving_requests import (
    AnswerSequence,
    EngineFault,
    RequestEnded,
    RequestProgress,
    ServedRequest,
)
from rl_core.rollouts.agent_calls import (
    build_call_formatter,
    build_call_requests,
    list_sampled_choices,
)
from rl_core.rollouts.agent_recorder import AgentSession, EpisodeLimitReached, PreparedCall
from rl_core.types import StopReason

logger = logging.getLogger(__name__)

MODEL_NAME = "policy"
MAX_BODY_BYTES = 16 * 2**20
_MAX_SKIPPED_BYTES = 2**30  # of a larger body
_PATH = re.compile(r"/e/(\d+)(?:/v1)?/(chat/completions|reward|models(?:/[^/?]*)?)/?(?:\?.*)?")
_READ_TIMEOUT_S = 3600.0  # for the rest of a request, and between two requests of a connection
_POLL_S = 0.5  # between checks whether a waiting client has disconnected
_END = b"0\r\n\r\n"  # of a chunked body

_Event = RequestProgress | RequestEnded


class _Refused(Exception):
    """A response with an error status."""

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code


class Session(Protocol):
    """Episode whose requests are answered."""

    number: int
    score: Any  # posted by the agent
    is_closed: bool


class _ClientGone(Exception):
    """The client closed its connection before its answer."""


class CallGate:
    """The way of calls into the loop.

    Where numbers depend on which sequences are decoded together, calls of a closed gate wait until no other call is
    decoded and every agent that runs has one waiting. What is decoded together then does not depend on the agents'
    speed, unless an agent itself sends calls side by side.
    """

    def __init__(self, *, is_open: bool) -> None:
        self.loop: ServerLoop | None = None
        self._is_open = is_open
        self._lock = threading.Lock()
        self._num_open_calls: dict[int, int] = {}  # by episode: sequences without an end
        self._waiting: list[tuple[int, list[ServedRequest]]] = []  # episode and call

    def change_episode(self, ended: int | None, begun: int | None) -> None:
        """Take note that an episode has ended and that another has begun."""
        with self._lock:
            if ended is not None:
                self._num_open_calls.pop(ended, None)
            if begun is not None:
                self._num_open_calls[begun] = 0
            self._release_calls()

    def submit_call(self, episode: int, requests: list[ServedRequest]) -> None:
        """Have a call sampled. Raises: EngineFault after the end of the loop."""
        assert self.loop is not None
        if self._is_open:
            self.loop.submit_requests(requests)
            return
        with self._lock:
            if episode in self._num_open_calls:
                self._num_open_calls[episode] += len(requests)
            self._waiting.append((episode, requests))
            self._release_calls()

    def cancel_call(self, episode: int, requests: Sequence[ServedRequest]) -> None:
        """Drop the sequences of a call that have not ended."""
        assert self.loop is not None
        with self._lock:
            for waiting in self._waiting:
                if waiting[1] and waiting[1][0] in requests:
                    self._waiting.remove(waiting)
                    self._count_ended(episode, len(requests))
                    self._release_calls()
                    return
        for request in requests:
            if not request.has_ended:
                self.loop.cancel_request(request)

    def note_end(self, episode: int) -> None:
        """Take note of the end of a sequence, before its agent gets to know it."""
        with self._lock:
            self._count_ended(episode, 1)
            self._release_calls()

    def _count_ended(self, episode: int, count: int) -> None:
        if episode in self._num_open_calls:
            self._num_open_calls[episode] -= count

    def _release_calls(self) -> None:
        num_waiting = sum(len(requests) for _, requests in self._waiting)
        is_idle = sum(self._num_open_calls.values()) <= num_waiting
        if not self._waiting or not is_idle or not all(self._num_open_calls.values()):
            return
        assert self.loop is not None
        calls = sorted(self._waiting, key=lambda call: call[0])
        self._waiting = []
        self.loop.submit_requests([request for _, requests in calls for request in requests])


class AgentServer(ThreadingHTTPServer):
    """The server of one collection of rollouts."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 1024

    def __init__(self, gate: CallGate, handler: type[AgentHandler] | None = None) -> None:
        """Bind a free port of the loopback address.

        Args:
            handler: None = calls are answered by the gate's loop.
        """
        super().__init__(("127.0.0.1", 0), handler or AgentHandler)
        self.gate = gate
        self._sessions: dict[int, tuple[str, Session]] = {}  # by number: key and session
        self._thread = threading.Thread(
            target=self.serve_forever, args=(0.1,), name="agent server", daemon=True
        )

    def __enter__(self) -> AgentServer:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.shutdown()
        self.server_close()

    def add_session(self, key: str, session: Session) -> str:
        """Accept an episode's requests; return their base URL."""
        self._sessions[session.number] = key, session
        return f"http://127.0.0.1:{self.server_address[1]}/e/{session.number}/v1"

    def find_session(self, number: int, authorization: str) -> Session:
        """Return the session that address and key name. Raises: _Refused (401, 403)."""
        scheme, _, token = authorization.partition(" ")
        key, session = self._sessions.get(number, ("", None))
        is_right = scheme.lower() == "bearer" and hmac.compare_digest(
            token.strip().encode(), key.encode()
        )
        if session is None or not is_right:
            raise _Refused(
                401, "the key (OPENAI_API_KEY) is not that of this episode (OPENAI_BASE_URL)"
            )
        if session.is_closed:
            raise _Refused(403, "the episode has ended")
        return session

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log an error of a connection; clients may close theirs at any time."""
        logger.debug("a connection of an agent failed", exc_info=True)


@dataclass(frozen=True, slots=True)
class _CallOwner:
    """Episode and queue of events of the thread that waits for a sequence."""

    episode: int
    events: queue.SimpleQueue[_Event]


def require_call(num_calls: int, limit: StopReason | None, stderr: str) -> None:
    """Refuse an episode without an answered call. Raises: AgentFailed."""
    if num_calls:
        return
    if limit is not None:
        raise AgentFailed(f"the agent's first call is beyond the limits of the run ({limit})")
    raise AgentFailed(
        "the agent ended without a call of the policy; is its client's address OPENAI_BASE_URL?",
        stderr,
    )


def deliver_events(gate: CallGate, events: Sequence[_Event]) -> None:
    """Hand events of the loop to the threads that wait for them; on the loop's thread."""
    for event in events:
        owner: _CallOwner = event.request.owner
        if isinstance(event, RequestEnded):
            gate.note_end(owner.episode)
        owner.events.put(event)


class AgentHandler(BaseHTTPRequestHandler):
    """One connection of an agent."""

    protocol_version = "HTTP/1.1"
    timeout = _READ_TIMEOUT_S
    disable_nagle_algorithm = True
    server: AgentServer

    def do_GET(self) -> None:
        """Answer a GET request."""
        self._respond(self._answer_get)

    def do_POST(self) -> None:
        """Answer a POST request."""
        self._respond(self._answer_post)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: an agent's requests are recorded."""

    def _respond(self, answer: Callable[[], None]) -> None:
        try:
            answer()
        except _Refused as error:
            self._send_error(error)
        except EpisodeLimitReached as error:
            self._send_error(_Refused(400, str(error), error.param, error.code))
        except ChatRequestError as error:
            self._send_error(_Refused(error.status, str(error), error.param, error.code))
        except (_ClientGone, ConnectionError, TimeoutError):
            self.close_connection = True
        except Exception as error:
            logger.exception("a request of an agent failed")
            self._send_error(_Refused(500, f"{type(error).__name__}: {error}"[:500]))

    def _match_path(self) -> tuple[Session, str]:
        match = _PATH.fullmatch(self.path)
        if match is None:
            raise _Refused(404, f"{self.path[:200]}: is not served here")
        session = self.server.find_session(int(match[1]), self.headers.get("Authorization", ""))
        return session, match[2]

    def _answer_get(self) -> None:
        _, route = self._match_path()
        if not route.startswith("models"):
            raise _Refused(405, "use POST")
        model = {"id": MODEL_NAME, "object": "model", "created": 0, "owned_by": "posttrain"}
        is_list = route == "models"
        self.send_json(200, {"object": "list", "data": [model]} if is_list else model)

    def _answer_post(self) -> None:
        body = self._read_body()  # in any case, because the connection stays open
        session, route = self._match_path()
        if route == "reward":
            session.score = _parse_score(body)
            self.send_json(200, {"object": "reward"})
        elif route == "chat/completions":
            self._answer_chat(session, body)
        else:
            raise _Refused(405, "use GET")

    def _read_body(self) -> bytes:
        if "chunked" in self.headers.get("Transfer-Encoding", ""):
            return self._read_chunks()
        try:
            length = int(self.headers.get("Content-Length") or 0)
        except ValueError:
            length = -1
        if length < 0:
            self.close_connection = True
            raise _Refused(400, "Content-Length is no length")
        if length > MAX_BODY_BYTES:
            self._refuse_large_body(length)
        return self.rfile.read(length)

    def _refuse_large_body(self, length: int) -> NoReturn:
        """Refuse a body, after reading most of it: a client reads no response before it has sent all."""
        self.close_connection = True
        length = min(length, _MAX_SKIPPED_BYTES)
        while length > 0 and (skipped := len(self.rfile.read(min(length, 2**20)))):
            length -= skipped
        raise _Refused(413, f"a body has at most {MAX_BODY_BYTES} bytes")

    def _read_chunks(self) -> bytes:
        body = bytearray()
        while True:
            digits = self.rfile.readline(1024).split(b";")[0].strip()
            if re.fullmatch(rb"[0-9a-fA-F]{1,16}", digits) is None:
                self.close_connection = True
                raise _Refused(400, "a chunk of the body has no length")
            size = int(digits, 16)
            if len(body) + size > MAX_BODY_BYTES:
                self._refuse_large_body(size)
            body += self.rfile.read(size)
            self.rfile.readline(1024)
            if not size:
                return bytes(body)

    def _answer_chat(self, session: Session, body: bytes) -> None:
        assert isinstance(session, AgentSession)
        request = parse_chat_request(body)
        call = session.begin_call(request)
        try:
            sampled = _SampledCall(self.server, session, call, self._check_client)
            if request.stream:
                self.send_chunks(sampled.iter_chunks())
            else:
                self.send_json(200, sampled.wait_for_response())
        finally:
            session.abandon_call(call)

    def send_chunks(self, parts: Iterable[list[dict[str, Any]]]) -> None:
        """Send chunks as they come; an error before the first one is an ordinary error response."""
        has_begun = False
        for chunks in parts:
            if not has_begun:
                has_begun = True
                self.send_response(200)
                self.send_header("Content-Type", "text/event-stream")
                self.send_header("Cache-Control", "no-store")
                self.send_header("Transfer-Encoding", "chunked")
                self.end_headers()
            for chunk in chunks:
                self._send_chunk(f"data: {json.dumps(chunk, ensure_ascii=False)}\n\n")
        self._send_chunk("data: [DONE]\n\n")
        self.wfile.write(_END)

    def _send_chunk(self, text: str) -> None:
        data = text.encode()
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")

    def _check_client(self) -> None:
        """Raise _ClientGone if the client has closed the connection."""
        poller = select.poll()
        poller.register(self.connection, select.POLLIN)
        if poller.poll(0) and not self.connection.recv(1, socket.MSG_PEEK):
            raise _ClientGone

    def send_json(self, status: int, body: Any, headers: dict[str, str] | None = None) -> None:
        """Send a JSON body."""
        data = json.dumps(body, ensure_ascii=False).encode()
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _send_error(self, error: _Refused) -> None:
        kind = "authentication_error" if error.status in (401, 403) else "invalid_request_error"
        detail = {
            "message": str(error),
            "type": kind if error.status < 500 else "server_error",
            "param": error.param,
            "code": error.code,
        }
        with contextlib.suppress(OSError):
            # Official clients check this header before they retry.
            self.send_json(error.status, {"error": detail}, {"x-should-retry": "false"})


class _SampledCall:
    """One call while it is sampled."""

    def __init__(
        self,
        server: AgentServer,
        session: AgentSession,
        call: PreparedCall,
        check_client: Callable[[], None],
    ) -> None:
        self._gate, self._session, self._call = server.gate, session, call
        self._check_client = check_client
        self._events: queue.SimpleQueue[_Event] = queue.SimpleQueue()
        self._requests = build_call_requests(session, call, caller=str(id(session)))
        for request in self._requests:
            request.owner = _CallOwner(session.number, self._events)
        self._formatter = build_call_formatter(session, call, MODEL_NAME)

    def wait_for_response(self) -> dict[str, Any]:
        """Sample the call, record it and return the body of its response."""
        for _ in self._iter_events():
            pass
        answers = [self._formatter.parse_answer(s) for s in self._list_sequences()]
        self._record(answers)
        return self._formatter.format_response(self._requests, answers)

    def iter_chunks(self) -> Iterator[list[dict[str, Any]]]:
        """Sample the call and yield lists of chunks; it is recorded before the last ones."""
        chunks = ChunkFormatter(self._formatter, self._requests)
        for event in self._iter_events():
            if isinstance(event, RequestProgress) and (formatted := chunks.format_progress(event)):
                yield formatted
        answers = [self._formatter.parse_answer(s) for s in self._list_sequences()]
        self._record(answers)
        for request, answer in zip(self._requests, answers, strict=True):
            yield chunks.format_end(request, answer)
        if self._call.request.include_usage:
            yield [chunks.format_usage(self._requests)]

    def _iter_events(self) -> Iterator[_Event]:
        """Yield progress until every choice has ended. Raises: _Refused, _ClientGone."""
        num_open = len(self._requests)
        try:
            self._gate.submit_call(self._session.number, self._requests)
            while num_open:
                try:
                    event = self._events.get(timeout=_POLL_S)
                except queue.Empty:
                    self._check_client()
                    if self._session.is_closed:
                        raise _ClientGone from None
                    continue
                yield event
                if isinstance(event, RequestEnded):
                    num_open -= 1
                    if event.request.error is not None:
                        raise _Refused(503, str(event.request.error), code="engine")
        except EngineFault as error:
            raise _Refused(503, str(error), code="engine") from None
        finally:
            if num_open:
                self._gate.cancel_call(self._session.number, self._requests)

    def _list_sequences(self) -> list[AnswerSequence]:
        sequences = [request.sequence for request in self._requests]
        return [sequence for sequence in sequences if isinstance(sequence, AnswerSequence)]

    def _record(self, answers: Sequence[ParsedAnswer]) -> None:
        self._session.finish_call(
            self._call, list_sampled_choices(self._formatter, self._requests, answers)
        )


def _parse_score(body: bytes) -> Any:
    """Parse a posted score; its values are checked with the reward. Raises: ChatRequestError."""
    try:
        value = json.loads(body.decode("utf-8"), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ChatRequestError(f"the body is not JSON: {str(error)[:200]}") from None
    reward = value.get("reward") if isinstance(value, dict) else value
    if isinstance(reward, bool) or not isinstance(reward, int | float):
        raise ChatRequestError('the body must be a number or {"reward": number}', param="reward")
    return value


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not finite")
