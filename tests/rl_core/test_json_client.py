"""JSON over keep-alive connections: cuts, incomplete answers, idle connections that the server has closed."""

import contextlib
import socket
import threading

import pytest
from helpers.waiting import wait_for

from rl_core.json_client import JsonConnections, ServerUnavailable
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
                connection.sendall(answer)
                if answer is not OK and answer is not BUSY:
                    return

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
