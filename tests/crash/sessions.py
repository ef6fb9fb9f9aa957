"""Crash test of `posttrain serve --record`: the server is killed under load; no scored session is lost or doubled.

    PYTHONPATH=.:tests python -m crash.sessions --output DIR --kills 100

Clients of two tenants open sessions, ask and score. A score without an answer is posted again to the next server, as a
client would. Every server is forked from this process, which has imported everything.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from helpers.serving import make_folder_of_model
from helpers.waiting import free_ports

from posttrain.serving.served_model import ModelSource
from posttrain.serving.server_process import ServingConfig, serve_model
from posttrain.web.tokens import load_or_create_token
from rl_core.settings import ModelSettings, ServingSettings
from rl_core.storage.append_log import read_records

__all__ = ["run"]

CLIENTS = 4
LONGEST_S = 1.5  # from the first answer of a server to its kill


@dataclass
class Book:
    """Scores as the clients know them."""

    acknowledged: dict[str, float] = field(default_factory=dict)
    pending: dict[str, float] = field(default_factory=dict)  # posted, without an answer
    lost: set[str] = field(default_factory=set)  # posted, then unknown to the next server
    repeated: int = 0  # scores of which a killed server had written the line


def run(folder: Path, kills: int, seed: int) -> dict[str, Any]:
    """Kill a server so many times; return counts. Raises: AssertionError for a lost or doubled session."""
    draw, book = random.Random(seed), Book()
    model = make_folder_of_model(folder / "model")
    (port,) = free_ports(1)
    settings = ServingSettings(port=port, slots=4, context=128, threads=1, record=True)
    config = ServingConfig(
        settings, "small", ModelSource(str(model), folder), ModelSettings(device="cpu")
    )
    token = load_or_create_token(config.folder)
    headers = {"Authorization": f"Bearer {token}"}
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", headers=headers, timeout=30) as client:
        for number in range(kills + 1):
            pid = _fork_server(config, folder / "server.log")
            try:
                _wait_until_ready(client, pid)
                _post_again(client, book)
                ends = [
                    threading.Thread(target=_play, args=(client, book, f"{number}-{i}", i % 2))
                    for i in range(CLIENTS)
                ]
                for end in ends:
                    end.start()
                time.sleep(draw.uniform(0.05, LONGEST_S))
            finally:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            for end in ends:
                end.join()
    return _check_file(config.folder / "recorded" / "episodes.jsonl", book, kills)


def _fork_server(config: ServingConfig, log: Path) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(output, 1)
        os.dup2(output, 2)
        serve_model(config, say=lambda text: print(text, flush=True))
    finally:
        os._exit(70)


def _wait_until_ready(client: httpx.Client, pid: int) -> None:
    while True:
        assert os.waitpid(pid, os.WNOHANG) == (0, 0), "the server ended; see server.log"
        try:
            if client.get("/readyz").status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.02)


def _post_again(client: httpx.Client, book: Book) -> None:
    for session, reward in list(book.pending.items()):
        response = client.post(f"/v1/sessions/{session}/score", json={"reward": reward})
        del book.pending[session]
        if response.status_code == 404:
            book.lost.add(session)  # the kill came before its line
            continue
        assert response.json()["repeated"], response.text
        book.repeated += 1
        book.acknowledged[session] = reward


def _play(client: httpx.Client, book: Book, task: str, tenant: int) -> None:
    """Play sessions until the server dies."""
    number = 0
    while True:
        number += 1
        try:
            body = {"task": f"{task}-{number}", "tenant": f"tenant {tenant}"}
            session = client.post("/v1/sessions", json=body).raise_for_status().json()
            asked = {"model": "x", "messages": [{"role": "user", "content": "x"}], "max_tokens": 8}
            headers = {"Authorization": f"Bearer {session['api_key']}"}
            path = f"/v1/sessions/{session['id']}"
            answer = client.post(f"{path}/chat/completions", json=asked, headers=headers)
            answer.raise_for_status()
            book.pending[session["id"]] = float(number)
            scored = client.post(f"{path}/score", json={"reward": float(number)})
            assert scored.status_code == 200, scored.text
            book.acknowledged[session["id"]] = book.pending.pop(session["id"])
        except httpx.TransportError:
            return


def _check_file(path: Path, book: Book, kills: int) -> dict[str, Any]:
    rows = [(row["session"], row["reward"]) for row in read_records(path)]
    names = [name for name, _ in rows]
    assert len(set(names)) == len(names), "a session counts twice"
    in_file = dict(rows)
    lost = [name for name, reward in book.acknowledged.items() if in_file.get(name) != reward]
    assert not lost, f"acknowledged, but not in the file: {lost}"
    assert not book.lost & set(names), "a session that a server did not know is in the file"
    unknown = set(names) - set(book.acknowledged) - set(book.pending)
    assert not unknown, f"in the file, but never scored: {unknown}"
    return {
        "kills": kills,
        "acknowledged": len(book.acknowledged),
        "written before the kill, acknowledged after it": book.repeated,
        "killed before the line": len(book.lost),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m crash.sessions", description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("outputs/session-crash-test"))
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    print(json.dumps(run(options.output.resolve(), options.kills, options.seed), indent=1))
    sys.exit(0)
