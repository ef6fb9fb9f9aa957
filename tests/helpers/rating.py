"""A room of `posttrain label` with items, served on a free port for a browser, and a command that can be killed."""

import contextlib
import json
import os
import subprocess
import sys
import threading
import time

from helpers import ROOT
from posttrain.monitor.server import find_free_port
from posttrain.preferences.rating_routes import build_rating_app
from posttrain.preferences.rating_session import RatingSession
from rl_core.preferences.items import RatedItem
from rl_core.settings import RatingSettings

TOKEN = "a-token-of-the-test"
TURNS = [
    {"role": "assistant", "content": '{"name": "look", "arguments": {"x": 1}}'},
    {"role": "tool", "content": "a red circle <b>not bold</b>"},
    {"role": "assistant", "content": "red"},
]


def items(count, answers=2):
    """Make items with texts, code-like marks, and a trajectory at every fourth position."""
    rated_items = []
    for number in range(count):
        texts = (
            f"the answer is {number}",
            f"perhaps {number + 1}?\n\n  indented\nü \u202e <script>alert(1)</script>",
        )
        first = TURNS if number % 4 == 0 else texts[0]
        rated_items.append(
            RatedItem(
                f"What is {number} + 0?", (first, texts[1])[:answers], ("m/1", "m/2")[:answers]
            )
        )
    return rated_items


def room_of(folder, count=12, answers=2, **options):
    settings = {"overlap": 0.5, "repeat": 0.0, **options}
    return RatingSession(folder, items(count, answers), RatingSettings(**settings), seed=0)


@contextlib.contextmanager
def serve_rating_page(room):
    """Serve the room's page; yield its address with the token."""
    import uvicorn

    port = find_free_port(18330)
    server = uvicorn.Server(
        uvicorn.Config(
            build_rating_app(room, TOKEN), host="127.0.0.1", port=port, log_level="error"
        )
    )
    thread = threading.Thread(target=server.run, daemon=True)
    with room:
        thread.start()
        while not server.started:
            time.sleep(0.01)
        try:
            yield f"http://127.0.0.1:{port}/#token={TOKEN}"
        finally:
            server.should_exit = True
            thread.join(10)


CONFIG = """
name: rated
environment: {name: pixel_grid}
stages: {evaluate: {episodes: 2}}
model: {path: Qwen/nothing-is-loaded}
prefer: {overlap: 0.0, repeat: 0.0}
"""


class Command:
    """`posttrain label` in a separate process, over a file of answers."""

    def __init__(self, folder, count=6):
        (folder / "rated.yaml").write_text(CONFIG)
        rows = [
            {"prompt": i.prompt, "answers": i.answers, "sources": i.sources} for i in items(count)
        ]
        (folder / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        self.folder = folder
        self.process = None

    def start(self, *more):
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        command = [
            sys.executable,
            "-m",
            "posttrain.cli.main",
            "label",
            "rated.yaml",
            "--answers",
            "answers.jsonl",
        ]
        self.process = subprocess.Popen(
            [*command, "--port", "18430", *more],
            cwd=self.folder,
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        for line in self.process.stdout:
            if line.startswith("page"):
                return line.split()[1]
        raise AssertionError("it did not start")
