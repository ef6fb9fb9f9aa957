"""Client of one WebSocket connection that exchanges JSON texts, with the standard library alone.

One request at a time: `exchange` sends a text message and returns the next one of the server. Pings are answered,
fragments joined. Loopback addresses and all others are connected to directly, never through a proxy.
Source: RFC 6455, https://www.rfc-editor.org/rfc/rfc6455.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import os
import socket
import ssl
import struct
import threading
import time
from typing import Any
from urllib.parse import urlsplit

from rl_core.errors import BackendError

_ACCEPT_SUFFIX = "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"  # RFC 6455, section 1.3
_CONTINUATION, _TEXT, _BINARY, _CLOSE, _PING, _PONG = 0x0, 0x1, 0x2, 0x8, 0x9, 0xA
MAX_MESSAGE_BYTES = 64 * 2**20
_MAX_HEADER_BYTES = 2**16


class WebSocketError(BackendError):
    """A connection that cannot be opened, broke, timed out, or sent something else than JSON texts."""


class WebSocketClient:
    """One open connection. Requests of several threads wait for each other."""

    def __init__(self, url: str, timeout_s: float) -> None:
        """Connect and shake hands.

        Args:
            url: ws:// or wss:// (or http:// or https://, which mean the same).
            timeout_s: of the whole attempt.
        Raises: WebSocketError.
        """
        self.url = url
        self._lock = threading.Lock()
        self._buffer = bytearray()
        self._deadline = time.monotonic() + timeout_s
        parts = urlsplit(url)
        is_secure = parts.scheme in ("wss", "https")
        if parts.scheme not in ("ws", "wss", "http", "https") or not parts.hostname:
            raise WebSocketError(f"{url}: the address has to begin with ws:// or wss://")
        address = (parts.hostname, parts.port or (443 if is_secure else 80))
        try:
            self._socket = socket.create_connection(address, timeout_s)
        except OSError as error:
            raise WebSocketError(f"{url}: no connection: {error}") from error
        try:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if is_secure:
                context = ssl.create_default_context()
                self._socket = context.wrap_socket(self._socket, server_hostname=parts.hostname)
            target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
            self._shake_hands(parts.netloc.rpartition("@")[2], target)
        except (OSError, ssl.SSLError) as error:
            self.close()
            raise WebSocketError(f"{url}: no connection: {_describe_error(error)}") from error
        except WebSocketError:
            self.close()
            raise

    def exchange(self, message: Any, timeout_s: float) -> Any:
        """Send a message as JSON and return the server's next one, decoded.

        The connection is closed after any error, since an answer that comes late would be taken for another one's.
        Raises: WebSocketError.
        """
        with self._lock:
            self._deadline = time.monotonic() + timeout_s
            try:
                self._send_frame(_TEXT, json.dumps(message).encode())
                return json.loads(self._receive_message())
            except WebSocketError:
                self.close()
                raise
            except (OSError, ValueError, RecursionError) as error:
                self.close()
                raise WebSocketError(f"{self.url}: {_describe_error(error)}") from error

    def close(self) -> None:
        """Close the connection, politely if it is idle, without waiting for an answer."""
        if self._lock.acquire(blocking=False):
            try:
                self._deadline = time.monotonic() + 1.0
                with contextlib.suppress(OSError):
                    self._send_frame(_CLOSE, struct.pack(">H", 1000))
            finally:
                self._lock.release()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes a thread that waits for an answer
        with contextlib.suppress(OSError):
            self._socket.close()

    def _shake_hands(self, host: str, target: str) -> None:
        key = base64.b64encode(os.urandom(16)).decode()
        lines = [
            f"GET {target} HTTP/1.1",
            f"Host: {host}",
            "Upgrade: websocket",
            "Connection: Upgrade",
            f"Sec-WebSocket-Key: {key}",
            "Sec-WebSocket-Version: 13",
        ]
        self._socket.sendall("\r\n".join([*lines, "", ""]).encode("latin-1"))
        while b"\r\n\r\n" not in self._buffer:
            if len(self._buffer) > _MAX_HEADER_BYTES:
                raise WebSocketError(f"{self.url}: its answer is no HTTP response")
            self._receive_bytes()
        head, _, rest = bytes(self._buffer).partition(b"\r\n\r\n")
        self._buffer = bytearray(rest)
        status, *headers = head.decode("latin-1").split("\r\n")
        values = {
            name.strip().lower(): value.strip()
            for name, _, value in (line.partition(":") for line in headers)
        }
        digest = hashlib.sha1((key + _ACCEPT_SUFFIX).encode(), usedforsecurity=False).digest()
        code = status.partition(" ")[2][:3]
        if code != "101":
            raise WebSocketError(f"{self.url}: is no WebSocket; the server answered {status[:80]}")
        if values.get("sec-websocket-accept") != base64.b64encode(digest).decode():
            raise WebSocketError(f"{self.url}: the server's handshake does not belong to this key")

    def _receive_message(self) -> bytes:
        """Receive the next text message; answer pings on the way."""
        message, is_begun = bytearray(), False
        while True:
            is_final, opcode, payload = self._receive_frame()
            if opcode == _PING:
                self._send_frame(_PONG, payload)
            elif opcode == _CLOSE:
                reason = payload[2:].decode(errors="replace")
                code = struct.unpack(">H", payload[:2])[0] if len(payload) >= 2 else 1005
                raise WebSocketError(
                    f"{self.url}: the server closed the connection (code {code}{': ' * bool(reason)}{reason})"
                )
            elif opcode == _PONG:
                continue
            elif opcode == _BINARY:
                raise WebSocketError(f"{self.url}: the server sent binary data; JSON is expected")
            elif (opcode == _CONTINUATION) != is_begun:
                raise WebSocketError(f"{self.url}: the server sent fragments in a wrong order")
            else:
                message += payload
                is_begun = True
                if len(message) > MAX_MESSAGE_BYTES:
                    raise WebSocketError(f"{self.url}: a message of over {MAX_MESSAGE_BYTES} bytes")
                if is_final:
                    return bytes(message)

    def _receive_frame(self) -> tuple[bool, int, bytes]:
        """Receive one frame: (it is its message's last, opcode, payload)."""
        first, second = self._take(2)
        length = second & 0x7F
        if length == 126:
            (length,) = struct.unpack(">H", self._take(2))
        elif length == 127:
            (length,) = struct.unpack(">Q", self._take(8))
        if length > MAX_MESSAGE_BYTES:
            raise WebSocketError(f"{self.url}: a message of over {MAX_MESSAGE_BYTES} bytes")
        mask = self._take(4) if second & 0x80 else b""
        payload = self._take(length)
        return bool(first & 0x80), first & 0x0F, _mask_bytes(payload, mask) if mask else payload

    def _send_frame(self, opcode: int, payload: bytes) -> None:
        """Send a frame; those of a client are masked."""
        length = len(payload)
        if length < 126:
            head = struct.pack(">BB", 0x80 | opcode, 0x80 | length)
        elif length < 2**16:
            head = struct.pack(">BBH", 0x80 | opcode, 0x80 | 126, length)
        else:
            head = struct.pack(">BBQ", 0x80 | opcode, 0x80 | 127, length)
        mask = os.urandom(4)
        self._socket.settimeout(max(0.001, self._deadline - time.monotonic()))
        self._socket.sendall(head + mask + _mask_bytes(payload, mask))

    def _take(self, count: int) -> bytes:
        """Take bytes from the stream."""
        while len(self._buffer) < count:
            self._receive_bytes()
        data = bytes(self._buffer[:count])
        del self._buffer[:count]
        return data

    def _receive_bytes(self) -> None:
        time_left = self._deadline - time.monotonic()
        if time_left <= 0:
            raise WebSocketError(f"{self.url}: no answer in time")
        self._socket.settimeout(time_left)
        try:
            data = self._socket.recv(2**16)
        except TimeoutError:
            raise WebSocketError(f"{self.url}: no answer in time") from None
        if not data:
            raise WebSocketError(f"{self.url}: the server closed the connection")
        self._buffer += data


def _mask_bytes(data: bytes, mask: bytes) -> bytes:
    """XOR data with the repeated mask of four bytes."""
    if not data:
        return data
    repeated = (mask * (len(data) // 4 + 1))[: len(data)]
    mixed = int.from_bytes(data, "big") ^ int.from_bytes(repeated, "big")
    return mixed.to_bytes(len(data), "big")


def _describe_error(error: Exception) -> str:
    return str(error) or type(error).__name__
