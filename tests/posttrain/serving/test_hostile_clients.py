"""Clients that disconnect, idle, read slowly or send invalid requests, and weights that are replaced meanwhile."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from helpers import ROOT
from helpers.serving import TOKEN, make_folder_of_model, offline_answer, running_server
from helpers.waiting import free_ports, wait_for

from rl_core.storage.append_log import read_checked_lines


def is_idle(server):
    return server.state.active == server.state.waiting == server.state.parked == 0


def open_raw_connection(server, head, body=b""):
    """Open a connection and send these bytes."""
    connection = socket.create_connection(("127.0.0.1", server.settings.port))
    connection.sendall(head + body)
    return connection


def format_head(length, path="/v1/chat/completions"):
    return (
        f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {TOKEN}\r\nContent-Length: {length}\r\n\r\n"
    ).encode()


def encode_long_request(stream, tokens=190):
    """Encode a request that takes long: few of its answers end before the limit."""
    body = {
        "model": "small",
        "messages": [{"role": "user", "content": "x"}],
        "stream": stream,
        "n": 4,
        "max_tokens": tokens,
        "seed": 0,
        "logprobs": True,
        "top_logprobs": 20,
    }
    return json.dumps(body).encode()


LONG_COMPLETION = {
    "model": "small",
    "prompt": [5, 6],
    "n": 4,
    "max_tokens": 190,
    "seed": 0,
    "ignore_eos": True,
    "logprobs": 20,
}


@pytest.mark.parametrize(
    ("path", "body", "code"),
    [
        ("/v1/chat/completions", encode_long_request(False), 499),
        ("/v1/chat/completions", encode_long_request(True), 200),
        ("/v1/completions", json.dumps(LONG_COMPLETION).encode(), 499),
    ],
    ids=["whole", "stream", "tokens"],
)
def test_slots_of_disconnected_client_are_freed(tmp_path, model_folder, path, body, code):
    with running_server(tmp_path, model_folder) as server:
        loop = server.server.engine.loop
        step, is_closed = loop.step, threading.Event()

        def held_step():
            if server.state.active == 4:
                is_closed.wait(20)
            if server.state.active:
                time.sleep(0.02)
            return step()

        loop.step = held_step
        connection = open_raw_connection(server, format_head(len(body), path), body)
        wait_for(lambda: server.state.active == 4, "slots", 20)
        connection.close()
        is_closed.set()
        wait_for(lambda: is_idle(server), "free slots", 20)
        assert server.chat(max_tokens=2)["choices"]
        wait_for(
            lambda: "clients_gone_total 1.0" in server.client.get("/metrics").text, "its count", 20
        )
        count_line = f'requests_total{{code="{code}"}} {2.0 if code == 200 else 1.0}'  # including the chat above
        assert count_line in server.client.get("/metrics").text


def test_too_large_and_invalid_bodies(tmp_path, model_folder):
    with running_server(tmp_path, model_folder, max_body_bytes=2**20, idle_seconds=1.0) as server:
        for body, status in (
            (b'{"model": "' + b"x" * 10 * 2**20, 413),
            (b"\xff\xfe{}", 422),
            (b"{", 422),
            (b"[]", 422),
            (b"", 422),
            (b"[" * 100_000, 422),
            (b'{"model": "small", "messages": [{"role": "user", "content": "\\ud800"}]}', 422),
            (b'{"model": "small", "messages": ' + b"9" * 5000 + b"}", 422),
            (b'{"temperature": NaN, "model": "a"}', 422),
        ):
            response = server.client.post("/v1/chat/completions", content=body)
            assert response.status_code == status and response.json()["error"]["message"], body[:40]
        incomplete = open_raw_connection(server, format_head(1000), b'{"model"')
        assert incomplete.recv(100).startswith(b"HTTP/1.1 408"), "an incomplete body"
        incomplete.close()
        assert is_idle(server) and server.chat(max_tokens=1)


def test_connections_that_send_nothing_are_closed(tmp_path, model_folder):
    """More connections than the server allows: the excess is refused, idle ones are closed, then it serves again."""
    with running_server(tmp_path, model_folder, max_connections=600, idle_seconds=1.0) as server:
        silent = [
            socket.create_connection(("127.0.0.1", server.settings.port)) for _ in range(1000)
        ]
        for connection in silent:
            connection.settimeout(60)
            with contextlib.suppress(ConnectionError):
                assert connection.recv(10) == b""
            connection.close()
        wait_for(lambda: not server.web.server_state.connections, "an end to idling")
        assert server.chat(max_tokens=1)
        incomplete = open_raw_connection(
            server, b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n", b"GET /heal"
        )
        wait_for(lambda: len(server.web.server_state.connections) <= 1, "an end to half a request")
        incomplete.close()


def test_client_that_does_not_read_occupies_no_slot(tmp_path, model_folder):
    with running_server(tmp_path, model_folder, write_seconds=1.0) as server:
        body = encode_long_request(True)
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        connection.connect(("127.0.0.1", server.settings.port))
        connection.sendall(format_head(len(body)) + body)
        wait_for(lambda: server.state.tokens > 0 and is_idle(server), "the end of its answers", 20)
        assert server.chat(max_tokens=2)
        connection.close()


def test_no_answer_is_mixed_while_weights_are_replaced(tmp_path, model_folder):
    """Eight clients, five weight changes: every answer equals the offline engine's on the version that it names."""
    folders = [
        model_folder,
        *(make_folder_of_model(tmp_path / f"model-{seed}", seed) for seed in range(1, 3)),
    ]
    with running_server(tmp_path / "out", model_folder, slots=6, turn_tokens=16) as server:
        models = [
            server.server.model,
            *(server.loaded(folder, n + 1) for n, folder in enumerate(folders[1:])),
        ]
        answers, is_over = [], threading.Event()

        def run_client(number):
            turn = 0
            while not is_over.is_set():
                seed, turn = 1000 * number + turn, turn + 1
                text = f"row {number} {turn}"
                streams = turn % 3 == 0
                if streams:
                    parts = server.stream(text, seed=seed, max_tokens=60)
                    answer = "".join(
                        part["choices"][0]["delta"].get("content") or "" for part in parts
                    )
                    versions = {part["policy_version"] for part in parts}
                else:
                    body = server.chat(text, seed=seed, max_tokens=60)
                    answer, versions = (
                        body["choices"][0]["message"]["content"],
                        {body["choices"][0]["policy_version"]},
                    )
                answers.append((text, seed, answer, versions))

        with ThreadPoolExecutor(8) as pool:
            clients = [pool.submit(run_client, number) for number in range(8)]
            for model in [models[1], models[2], models[0], models[1]]:
                num_before = len(answers)
                wait_for(
                    lambda num_before=num_before: len(answers) > num_before + 10,
                    "answers",
                    30,
                    every=0.005,
                )
                assert server.server.publish_model(model)
            num_before = len(answers)
            wait_for(lambda: len(answers) > num_before + 10, "answers", 30)
            is_over.set()
            for running_client in clients:
                running_client.result(30)
    counts = Counter(version for *_, versions in answers for version in versions)
    assert set(counts) == {0, 1, 2} and all(len(versions) == 1 for *_, versions in answers)
    for text, seed, answer, (version,) in answers:
        expected = offline_answer(models[version], text, seed=seed, tokens=60)
        assert answer == models[version].renderer.action_text(expected.tokens)


def test_version_with_another_tokenizer_is_rejected(tmp_path, model_folder):
    other = make_folder_of_model(tmp_path / "other", texts=["quite another alphabet of words"] * 40)
    with running_server(tmp_path / "out", model_folder) as server:
        assert not server.server.publish_model(server.loaded(other, 1))
        assert server.chat(max_tokens=2)["policy_version"] == 0


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_killed_and_restarted(request, tmp_path, model_folder):
    """The process: a message for a taken port, kill -9 under load, labels and ids that survive it."""
    (port,) = free_ports(1)
    output = tmp_path / "out put ü"
    command = [
        sys.executable,
        "-m",
        "posttrain.cli.main",
        "serve",
        str(model_folder),
        "--port",
        str(port),
        "--output",
        str(output),
        "--name",
        "small",
        "--set",
        "serving.slots=4",
        "--set",
        "model.device=cpu",
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    url = f"http://127.0.0.1:{port}"

    def start_server():
        child = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        request.addfinalizer(child.kill)

        def is_ready():
            with contextlib.suppress(httpx.TransportError):
                return httpx.get(f"{url}/readyz").status_code == 200
            assert child.poll() is None, child.stderr.read()

        wait_for(is_ready, "the server", 150)
        return child

    ids = []
    for number in range(3):
        child = start_server()
        token = (output / "serving" / "token").read_text().strip()
        assert (output / "serving" / "token").stat().st_mode & 0o077 == 0
        client = httpx.Client(
            base_url=url, headers={"Authorization": f"Bearer {token}"}, timeout=30
        )
        body = {
            "model": "small",
            "messages": [{"role": "user", "content": "x"}],
            "max_tokens": 4,
            "seed": 1,
        }
        answer = client.post("/v1/chat/completions", json=body).json()
        ids.append(answer["id"])
        for answer in ids:
            assert (
                client.post("/v1/feedback", json={"id": answer, "score": number}).status_code == 200
            )
        if number == 0:
            refused = subprocess.run(command, env=environment, capture_output=True, text=True)
            assert (
                refused.returncode == 2
                and f"port {port}" in refused.stderr
                and "--port N" in refused.stderr
            )
            assert len(refused.stderr.strip().splitlines()) == 1
        connections = [post_raw(port, token, encode_long_request(False)) for _ in range(8)]
        time.sleep(0.1 * number)
        child.send_signal(signal.SIGKILL if number < 2 else signal.SIGTERM)
        out, errors = child.communicate(timeout=20)
        assert "Traceback" not in errors and url in out
        for connection in connections:
            connection.close()
    lines = [line.record for line in read_checked_lines(output / "serving" / "feedback.jsonl")]
    assert [line["score"] for line in lines] == [0, 1, 1, 2, 2, 2]


def post_raw(port, token, body):
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {token}\r\n"
    connection = socket.create_connection(("127.0.0.1", port))
    connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    return connection


@pytest.mark.slow
@pytest.mark.parametrize("learns", [False, True])
def test_missing_champion_is_one_line(tmp_path, learns):
    command = [
        sys.executable,
        "-m",
        "posttrain.cli.main",
        "serve",
        "demo",
        "--output",
        str(tmp_path / "nothing"),
        *(["--learn"] if learns else []),
    ]
    done = subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 2 and len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert "posttrain run demo" in done.stderr
