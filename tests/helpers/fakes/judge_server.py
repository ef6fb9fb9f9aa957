"""Judge of known accuracy behind OpenAI's dialect on loopback: honest about the truth, wrong at a set rate.

A verdict follows from the texts it judges, so that it is the same in every run; two orders of a pair get independent
errors unless `favours_first`.
"""

from __future__ import annotations

import contextlib
import json
import random
import re
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

_TAGGED = re.compile(r"<(question|answer(?: \w+)?) (\w+)>\n(.*?)\n</\1 \2>", re.DOTALL)
Grade = Callable[
    [str, str, str], float
]  # question, answer, whole prompt -> quality, the higher the better


def read_tagged(prompt: str) -> tuple[str, list[tuple[str, str]]]:
    """Return the question, and (label, text) of each answer in the order shown."""
    tagged = [(name, text) for name, _, text in _TAGGED.findall(prompt)]
    answers = [(name.removeprefix("answer").strip(), text) for name, text in tagged[1:]]
    return tagged[0][1], answers


def answer_prompt(prompt: str, grade: Grade, accuracy: float, favours_first: float) -> str:
    """Write the judge's reply to a prompt of any mode but score."""
    question, answers = read_tagged(prompt)
    dice = random.Random(prompt)
    if "Grade the answer on each criterion" in prompt:
        names = re.findall(r"^- ([^:\n]+)", prompt, re.MULTILINE)
        quality = grade(question, answers[0][1], prompt)
        scores = {
            name: 10 * (quality if dice.random() < accuracy else 1 - quality) for name in names
        }
        return f"Reasons.\n```json\n{json.dumps(scores)}\n```"
    if '"ranking"' in prompt:
        noisy = [
            (grade(question, text, prompt) if dice.random() < accuracy else dice.random(), label)
            for label, text in answers
        ]
        ranks: dict[float, list[int]] = {}
        for quality, label in noisy:
            ranks.setdefault(quality, []).append(int(label))
        return "So: " + json.dumps({"ranking": [ranks[q] for q in sorted(ranks, reverse=True)]})
    first, second = (grade(question, text, prompt) for _, text in answers)
    if dice.random() < favours_first:
        return "better: A"
    if first == second:
        return "**better:** tie"
    right, wrong = ("A", "B") if first > second else ("B", "A")
    return f"better: {right if dice.random() < accuracy else wrong}"


class JudgeServer(ThreadingHTTPServer):
    """Server of the judge; `prompts` holds the questions it was asked."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, grade: Grade, accuracy: float = 1.0, favours_first: float = 0.0) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.grade, self.accuracy, self.favours_first = grade, accuracy, favours_first
        self.reply: Callable[[str], str] = lambda prompt: answer_prompt(
            prompt, self.grade, self.accuracy, self.favours_first
        )
        self.prompts: list[str] = []
        self.watch: Callable[[dict[str, object]], None] = lambda body: None  # of each request
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: JudgeServer
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.watch(body)
        prompt = body["messages"][-1]["content"]
        self.server.prompts.append(prompt)
        choice = {"message": {"content": self.server.reply(prompt)}, "finish_reason": "stop"}
        data = json.dumps({"choices": [choice]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: object) -> None:
        pass


@contextlib.contextmanager
def run_judge_server(
    grade: Grade, accuracy: float = 1.0, favours_first: float = 0.0
) -> Iterator[JudgeServer]:
    server = JudgeServer(grade, accuracy, favours_first)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
