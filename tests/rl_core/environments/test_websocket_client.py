"""The WebSocket client against frames made by hand (RFC 6455), and against the package `websockets`."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from websockets.sync.server import serve

from rl_core.environments.websocket_client import WebSocketClient, WebSocketError, _mask_bytes

SUFFIX = "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"


def build_frame(opcode: int, payload: bytes, *, is_final: bool = True) -> bytes:
    """Build a frame as a server sends it, without a mask."""
    first = (0x80 if is_final else 0) | opcode
    if len(payload) < 126:
        return bytes([first, len(payload)]) + payload
    if len(payload) < 2**16:
        return bytes([first, 126]) + struct.pack(">H", len(payload)) + payload
    return bytes([first, 127]) + struct.pack(">Q", len(payload)) + payload


def read_frame(stream: socket.socket) -> tuple[int, bytes]:
    """Read a frame of a client: (opcode, payload); the mask is undone by hand."""
    first, second = stream.recv(2, socket.MSG_WAITALL)
    assert second & 0x80, "clients mask their frames"
    length = second & 0x7F
    if length == 126:
        (length,) = struct.unpack(">H", stream.recv(2, socket.MSG_WAITALL))
    mask = stream.recv(4, socket.MSG_WAITALL)
    payload = stream.recv(length, socket.MSG_WAITALL) if length else b""
    return first & 0x0F, bytes(byte ^ mask[index % 4] for index, byte in enumerate(payload))


@contextlib.contextmanager
def serve_script(
    answer: Callable[[socket.socket], None], accept: str = "", status: str = "101 Switching"
) -> Iterator[str]:
    """Shake hands with one client, read its first frame and let `answer` go on; yield the address."""
    server = socket.create_server(("127.0.0.1", 0))
    failures: list[BaseException] = []

    def run() -> None:
        stream, _ = server.accept()
        with stream:
            head = b""
            while b"\r\n\r\n" not in head:
                head += stream.recv(4096)
            lines = head.decode().split("\r\n")
            assert lines[0] == "GET /base/ws?a=1 HTTP/1.1" and "Upgrade: websocket" in lines
            key = next(x for x in lines if x.startswith("Sec-WebSocket-Key: "))[19:]
            digest = hashlib.sha1((key + SUFFIX).encode()).digest()
            value = accept or base64.b64encode(digest).decode()
            stream.sendall(
                f"HTTP/1.1 {status}\r\nUpgrade: websocket\r\nSec-WebSocket-Accept: {value}\r\n\r\n".encode()
            )
            try:
                if status.startswith("101") and not accept:
                    answer(stream)
            except BaseException as error:
                failures.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield f"ws://127.0.0.1:{server.getsockname()[1]}/base/ws?a=1"
    finally:
        thread.join(5)
        server.close()
    assert not failures, failures


def test_fragments_and_pings() -> None:
    def answer(stream: socket.socket) -> None:
        assert read_frame(stream) == (1, b'{"do": "x"}')
        stream.sendall(build_frame(1, b'{"a": ', is_final=False))
        stream.sendall(build_frame(9, b"still there?") + build_frame(10, b""))
        stream.sendall(build_frame(0, b"[1, ", is_final=False) + build_frame(0, b"2]}"))
        assert read_frame(stream) == (10, b"still there?")
        assert read_frame(stream) == (8, struct.pack(">H", 1000))

    with serve_script(answer) as url:
        client = WebSocketClient(url, 5.0)
        assert client.exchange({"do": "x"}, 5.0) == {"a": [1, 2]}
        client.close()


@pytest.mark.parametrize(
    ("data", "part"),
    [
        (build_frame(8, struct.pack(">H", 1011) + b"broke"), r"code 1011: broke"),
        (build_frame(8, b""), "code 1005"),
        (build_frame(2, b"{}"), "binary data"),
        (build_frame(0, b"{}"), "fragments in a wrong order"),
        (build_frame(1, b"{", is_final=False) + build_frame(1, b"}"), "wrong order"),
        (build_frame(1, b"no json"), "Expecting value"),
        (build_frame(1, b"[" * 100_000), "url|recursion|Expecting"),
        (bytes([0x81, 127]) + struct.pack(">Q", 2**40), "a message of over"),
        (bytes([0x81, 5]) + b"{", "the server closed the connection"),
        (b"", "the server closed the connection"),
    ],
)
def test_what_is_no_answer_is_an_error(data: bytes, part: str) -> None:
    def answer(stream: socket.socket) -> None:
        read_frame(stream)
        stream.sendall(data)

    with serve_script(answer) as url:
        client = WebSocketClient(url, 5.0)
        with pytest.raises(WebSocketError, match=part):
            client.exchange({}, 5.0)
        with pytest.raises(WebSocketError):  # closed after an error
            client.exchange({}, 5.0)


def test_a_silent_server_times_out() -> None:
    event = threading.Event()

    def answer(stream: socket.socket) -> None:
        read_frame(stream)
        event.wait(5)

    with serve_script(answer) as url:
        client = WebSocketClient(url, 5.0)
        started_at = time.monotonic()
        with pytest.raises(WebSocketError, match="no answer in time"):
            client.exchange({}, 0.2)
        assert 0.15 < time.monotonic() - started_at < 3
        event.set()


def test_close_wakes_a_waiting_thread() -> None:
    def answer(stream: socket.socket) -> None:
        read_frame(stream)
        assert stream.recv(1) == b""

    with serve_script(answer) as url:
        client = WebSocketClient(url, 5.0)
        threading.Timer(0.2, client.close).start()
        started_at = time.monotonic()
        with pytest.raises(WebSocketError):
            client.exchange({}, 20.0)
        assert time.monotonic() - started_at < 5


def test_handshakes_that_fail() -> None:
    def answer(_: socket.socket) -> None:
        pass

    with (
        serve_script(answer, accept="AAAA") as url,
        pytest.raises(WebSocketError, match="does not belong to this key"),
    ):
        WebSocketClient(url, 5.0)
    with (
        serve_script(answer, status="404 Not Found") as url,
        pytest.raises(WebSocketError, match=r"the server answered HTTP/1\.1 404 Not Found"),
    ):
        WebSocketClient(url, 5.0)
    with pytest.raises(WebSocketError, match="has to begin with ws://"):
        WebSocketClient("ftp://127.0.0.1/ws", 5.0)
    with pytest.raises(WebSocketError, match="no connection"):
        WebSocketClient("ws://127.0.0.1:9/ws", 5.0)


@pytest.mark.parametrize("length", [0, 1, 3, 4, 5, 127])
def test_masks_by_hand(length: int) -> None:
    data, mask = bytes(range(length)), b"\x00\xff\x10\x01"
    expected = bytes(byte ^ mask[index % 4] for index, byte in enumerate(data))
    assert _mask_bytes(data, mask) == expected


@pytest.mark.parametrize("size", [1, 125, 126, 65_535, 65_536, 3_000_000])
def test_every_length_against_the_package(size: int) -> None:
    with serve(
        lambda stream: [stream.send(text) for text in stream], "127.0.0.1", 0, max_size=None
    ) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"ws://127.0.0.1:{server.socket.getsockname()[1]}/"
        client = WebSocketClient(url, 5.0)
        message = {"text": "ä" + "x" * size}
        assert client.exchange(message, 20.0) == message
        assert client.exchange([size], 20.0) == [size]
        client.close()
