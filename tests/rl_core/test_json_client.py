"""JSON over HTTP: closed connections, incomplete answers, idle connections that the server has closed, error forms."""

import contextlib
import socket
import threading
import time
from types import SimpleNamespace

import pytest
from helpers.waiting import free_ports, wait_for

from rl_core.json_client import (
    JsonConnections,
    ServerErrorResponse,
    ServerUnavailable,
    fetch_json,
    find_health_problem,
)
from rl_core.rollout_workers.inference_server import InferenceServer
from rl_core.settings import RolloutSettings, SamplingSettings

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"
BUSY = b"HTTP/1.1 429 Too Many Requests\r\nContent-Length: 2\r\n\r\n{}"
SILENCE = b""


class ScriptedServer:
    """A server with scripted answers in order; the last one repeats.

    After an answer other than OK or BUSY it closes the connection.
    """

    def __init__(self, *answers):
        self.answers, self.num_requests, self.ended = answers, 0, threading.Event()
        self.listening = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.listening.getsockname()[1]}"
        self.url = f"http://{self.address}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self.listening.accept()
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection):
        with contextlib.suppress(OSError), connection, connection.makefile("rb") as lines:
            while lines.readline():
                length = 0
                while header := lines.readline().strip():
                    name, _, value = header.partition(b":")
                    length = int(value) if name.lower() == b"content-length" else length
                lines.read(length)
                answer = self.answers[min(self.num_requests, len(self.answers) - 1)]
                self.num_requests += 1
                if answer is SILENCE:
                    self.ended.wait(60)
                self.send(connection, answer)
                if answer is not OK and answer is not BUSY:
                    return

    def send(self, connection, answer):
        connection.sendall(answer)

    def end(self):
        self.ended.set()
        self.listening.close()


@pytest.fixture
def script():
    servers = []

    def start(*answers):
        servers.append(ScriptedServer(*answers))
        return servers[-1]

    yield start
    for server in servers:
        server.end()


def run_in_thread(call):
    """Run a call in a thread; return the thread and the errors raised."""
    raised = []

    def run():
        try:
            call()
        except ServerUnavailable as error:
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, raised


def test_a_cut_ends_a_request_on_a_used_connection(script):
    """As at Ctrl-C: the request is not retried, unlike after an idle connection that the server has closed."""
    server = script(OK, SILENCE)
    connections = JsonConnections(server.url)
    assert connections.get_json("/", 5.0) == {}
    thread, raised = run_in_thread(lambda: connections.post_json("/", {}, 60.0))
    wait_for(lambda: server.num_requests == 2, "the second request")
    connections.close()
    thread.join(10)
    assert not thread.is_alive() and len(raised) == 1 and server.num_requests == 2


def test_a_cut_ends_a_request_that_has_not_been_sent(script):
    server = script(OK)
    connections = JsonConnections(server.url)
    num_closes = connections.num_closes
    connections.close()
    with pytest.raises(ServerUnavailable, match="was closed"):
        connections.post_json("/", {}, 5.0, num_closes)
    assert server.num_requests == 0 and connections.post_json("/", {}, 5.0) == {}


def test_a_cut_ends_the_wait_for_a_full_queue(script):
    server = script(BUSY)
    client = InferenceServer(RolloutSettings(workers="server", address=server.address))
    thread, raised = run_in_thread(
        lambda: client.sample_completion("policy", [1], 4, SamplingSettings(), {"seed": 1}, [0])
    )
    wait_for(lambda: server.num_requests >= 2, "the second request")
    client.close()
    thread.join(10)
    assert not thread.is_alive() and len(raised) == 1


def test_an_idle_connection_that_the_server_closed_is_no_loss(script):
    server = script(bytes([*OK]), OK)
    connections = JsonConnections(server.url)
    assert connections.get_json("/", 5.0) == connections.get_json("/", 5.0) == {}
    assert server.num_requests == 2


def test_an_incomplete_answer_is_a_loss(script):
    """As from a server that is killed while it sends: a partial text is not parsed."""
    server = script(b'HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{"choices": [{"token_ids": [1')
    with pytest.raises(ServerUnavailable, match="IncompleteRead"):
        JsonConnections(server.url).post_json("/", {}, 5.0)
    assert server.num_requests == 1


LATE = b'HTTP/1.1 503 Busy\r\nRetry-After: 7\r\nContent-Length: 18\r\n\r\n{"detail": "late"}'
REFUSAL = b'HTTP/1.1 422 Bad\r\nContent-Length: 34\r\n\r\n{"error": {"message": "no model"}}'
SENDERS = {
    "single": lambda server, timeout_s: fetch_json(f"{server.url}/x", {}, timeout_s=timeout_s),
    "connection": lambda server, timeout_s: JsonConnections(server.url).post_json(
        "/x", {}, timeout_s
    ),
}


@pytest.mark.parametrize("send", SENDERS.values(), ids=SENDERS)
def test_failures_have_one_form(script, send):
    server = script(LATE)
    with pytest.raises(ServerUnavailable) as late:
        send(server, 5.0)
    assert str(late.value) == f"{server.url}/x: 503 Busy: late"
    assert (late.value.status, late.value.retry_after) == (503, 7.0)
    assert late.value.reason == "503 Busy: late"
    server = script(REFUSAL)
    with pytest.raises(ServerErrorResponse) as refusal:
        send(server, 5.0)
    assert str(refusal.value) == f"{server.url}/x: 422 Bad: no model"
    assert (refusal.value.status, refusal.value.retry_after) == (422, 0.0)
    with pytest.raises(ServerUnavailable, match=r"/x: no response in time$") as timeout:
        send(script(SILENCE), 0.2)
    assert timeout.value.status == 0 and isinstance(timeout.value.__cause__, TimeoutError)
    with pytest.raises(ServerUnavailable, match="/x: IncompleteRead"):
        send(script(OK.replace(b": 2", b": 9")), 5.0)
    closed = SimpleNamespace(url=f"http://127.0.0.1:{free_ports(1)[0]}")
    with pytest.raises(ServerUnavailable, match="/x: ConnectionRefusedError"):
        send(closed, 5.0)


@pytest.mark.parametrize("url", ["file:///etc/hostname", "data:,x", "localhost:80", ""])
def test_an_address_of_another_kind_is_refused(url):
    with pytest.raises(ServerUnavailable, match="the address has to begin with http"):
        fetch_json(url)


@pytest.mark.parametrize("send", SENDERS.values(), ids=SENDERS)
def test_a_timeout_is_that_of_the_whole_attempt(script, send):
    """A body that arrives slowly, but never pauses for as long as the timeout."""
    server = script(OK)
    server.send = lambda connection, answer: [
        (connection.sendall(part), time.sleep(0.05))
        for part in [b"HTTP/1.1 200 OK\r\nContent-Length: 200\r\n\r\n", *[b" "] * 200]
    ]
    start = time.monotonic()
    with pytest.raises(ServerUnavailable, match="no response in time"):
        send(server, 0.3)
    assert time.monotonic() - start < 3


def test_a_server_that_wants_a_token_is_healthy(script):
    assert find_health_problem(script(OK).url) == ""
    assert find_health_problem(script(REFUSAL.replace(b"422", b"401")).url) == ""
    assert find_health_problem(script(REFUSAL).url) == "answered 422"
    closed = f"http://127.0.0.1:{free_ports(1)[0]}"
    assert find_health_problem(closed).startswith("no answer (ConnectionRefusedError")
    assert find_health_problem("nonsense").startswith("no answer (")
