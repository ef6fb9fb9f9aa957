"""The judge, against a local server that fails, hangs, floods, trickles and sends nonsense."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from helpers.reward_rollouts import group, rollout, say

from rl_core import json_client
from rl_core.errors import RewardError, SettingsError
from rl_core.rewards.orchestrator import RewardOrchestrator
from rl_core.settings import JudgeSettings, RewardSettings


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked, self.headers_seen = [], []
        self.behave = lambda handler, number, text: handler.say("score: 5")
        self.busy = self.most_busy = 0
        self.lock = threading.Lock()
        self.let_go = threading.Event()
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server = self.server
        with server.lock:
            server.asked.append(body)
            server.headers_seen.append(dict(self.headers))
            number = len(server.asked)
            server.busy += 1
            server.most_busy = max(server.most_busy, server.busy)
        try:
            server.behave(self, number, body["messages"][-1]["content"])
        except OSError:  # the client disconnected
            pass
        finally:
            with server.lock:
                server.busy -= 1

    def say(self, content, status=200, raw=None, **headers):
        body = (
            raw
            if raw is not None
            else json.dumps({"choices": [{"message": {"content": content}}]}).encode()
        )
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass


@pytest.fixture
def server():
    running = Server()
    thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield running
    running.let_go.set()
    running.shutdown()
    thread.join()
    running.server_close()


@pytest.fixture
def judge(server, tmp_path):
    """Return a function that scores replies and returns their rewards and the metrics."""

    def score_replies(replies, max_failed_share=0.0, **changed):
        options = {
            "url": server.url,
            "model": "j",
            "retries": 2,
            "retry_delay_s": 0.01,
            "cache": str(tmp_path),
            "prompt": "{prompt}|{completion}|{target}|{gold} {{}}",
            "timeout_s": 5.0,
        }
        settings = RewardSettings(
            judge=JudgeSettings(**{**options, **changed}), max_failed_share=max_failed_share
        )
        rollouts = []
        for seed, reply in enumerate(replies):
            judged = rollout([say(reply)], seed=seed)
            judged.trajectory.row = {"gold": "g"}
            rollouts.append(judged)
        metrics = RewardOrchestrator({"judge": 1.0}, options=settings).score([group(*rollouts)])
        return [None if judged.is_masked else judged.reward for judged in rollouts], metrics

    return score_replies


def test_scores_are_scaled_requested_once_and_cached(server, judge):
    server.behave = lambda handler, number, text: handler.say(
        f"First score: 3. In the end\nscore: {len(text) - 8}"
    )
    rewards, metrics = judge(["", "a", "a"])
    # prompt "p", target "t", column "g": "p||t|g {}" has 9 characters, "p|a|t|g {}" has 10
    assert rewards == [0.1, 0.2, 0.2]
    assert metrics["reward/judge/asked"] == 2.0  # two of the three are the same question
    (sent, *_) = server.asked
    assert (sent["model"], sent["temperature"], "url" in sent) == ("j", 0.0, False)
    rewards, metrics = judge(["a", ""])
    assert (rewards, metrics["reward/judge/cached"], metrics["reward/judge/asked"]) == (
        [0.2, 0.1],
        2.0,
        0.0,
    )
    assert len(server.asked) == 2
    judge(["a"], temperature=0.5)  # a different request to the server
    assert len(server.asked) == 3


def test_transient_failures_are_retried(server, judge, monkeypatch):
    monkeypatch.setattr(json_client, "MAX_RETRY_WAIT_S", 0.05)  # the server requests seven seconds

    def answer_request(handler, number, text):
        if number == 1:
            handler.say("", status=503, raw=b"busy", **{"Retry-After": "7"})
        else:
            handler.say("I cannot say" if number == 2 else "score: 10")

    server.behave = answer_request
    assert judge(["a"])[0] == [1.0]
    assert len(server.asked) == 3


NONSENSE = {
    "no score": lambda handler, number, text: handler.say("nice"),
    "beyond the scale": lambda handler, number, text: handler.say("score: 11"),
    "no text": lambda handler, number, text: handler.say(None),
    "no JSON": lambda handler, number, text: handler.say("", raw=b"<html>"),
    "another JSON": lambda handler, number, text: handler.say("", raw=b"[1]"),
    "deep JSON": lambda handler, number, text: handler.say("", raw=b"[" * 100_000),
    "cut off": lambda handler, number, text: handler.say("", raw=b"{", **{"Content-Length": "100"}),
    "server error": lambda handler, number, text: handler.say("", status=500, raw=b"x" * 10_000),
}


@pytest.mark.parametrize("behave", NONSENSE.values(), ids=NONSENSE)
def test_nonsense_is_never_a_zero(server, judge, behave):
    server.behave = behave
    with pytest.raises(
        RewardError, match=r"seed 0.*reward 'judge' could not judge it: .*did not answer in 3 tries"
    ):
        judge(["a"])
    assert len(server.asked) == 3
    server.behave = lambda handler, number, text: handler.say("score: 0")
    assert judge(["a"])[0] == [0.0]  # no nonsense was cached


def test_failures_are_left_out_of_the_loss_up_to_a_share(server, judge):
    def answer_request(handler, number, text):
        handler.say("score: 8" if "bad" not in text else "?")

    server.behave = answer_request
    rewards, metrics = judge(["good", "bad"], max_failed_share=0.5)
    assert rewards == [0.8, None]
    assert metrics["reward/judge/failed"] == 1.0 and metrics["reward/masked_rate"] == 0.5
    assert metrics["reward/judge"] == 0.8  # the failure does not count as zero in the mean
    with pytest.raises(RewardError, match="reward 'judge' could not judge it"):
        judge(["good", "bad"])


def test_a_server_that_hangs_or_trickles_is_abandoned(server, judge):
    def hang_request(handler, number, text):
        server.let_go.wait(60)

    def trickle_blanks(handler, number, text):
        handler.send_response(200)
        handler.end_headers()
        while not server.let_go.wait(0.02):
            handler.wfile.write(b" ")
            handler.wfile.flush()

    for behave in (hang_request, trickle_blanks):
        server.behave = behave
        with pytest.raises(RewardError, match="did not answer in 1 tries"):
            judge(["a"], timeout_s=0.2, retries=0)
    assert len(server.asked) == 2


def test_a_flood_is_cut_off(server, judge, monkeypatch):
    monkeypatch.setattr(json_client, "MAX_REPLY_BYTES", 2**20)

    def send_flood(handler, number, text):
        handler.send_response(200)
        handler.end_headers()
        while not server.let_go.is_set():
            handler.wfile.write(b"x" * 2**16)

    server.behave = send_flood
    with pytest.raises(RewardError, match="longer than 1 MiB"):
        judge(["a"], retries=0)


def test_refusals_and_redirections_are_not_retried(server, judge, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY_FOR_TEST", "secret")
    for status in (401, 302):
        server.behave = lambda handler, number, text, status=status: handler.say(
            "", status=status, raw=b"no", Location="http://127.0.0.1:9/"
        )
        with pytest.raises(RewardError, match=f"refuses the request: {status}") as error:
            judge(["a"], key_variable="JUDGE_KEY_FOR_TEST")
        assert "secret" not in str(error.value)
    assert len(server.asked) == 2
    assert server.headers_seen[0]["Authorization"] == "Bearer secret"
    with pytest.raises(RewardError, match="the environment variable NOT_SET_FOR_TEST is not set"):
        judge(["a"], key_variable="NOT_SET_FOR_TEST")


def test_concurrent_requests_are_bounded(server, judge):
    both = threading.Barrier(2)

    def answer_request(handler, number, text):
        both.wait(30)  # passes only if two requests are here at the same time
        handler.say("score: 1")

    server.behave = answer_request
    assert judge([f"reply {n}" for n in range(6)], concurrency=2)[0] == [0.1] * 6
    assert server.most_busy == 2


def test_settings_are_checked(judge):
    with pytest.raises(SettingsError, match=r"needs reward_options.judge.url and model"):
        RewardOrchestrator({"judge": 1.0})
    with pytest.raises(SettingsError, match="is not an http"):
        judge(["a"], url="file:///etc/passwd")
    with pytest.raises(SettingsError, match="has no group"):
        JudgeSettings(pattern="score")
    options = RewardSettings(
        judge=JudgeSettings(url="http://127.0.0.1:9", model="j", prompt="{question} {{x}}")
    )
    rewards = RewardOrchestrator({"judge": 1.0}, options=options)
    rewards.check_columns(("question",))
    with pytest.raises(
        SettingsError,
        match=r"'{question}' is none of prompt, completion, target, questions; did you",
    ):
        rewards.check_columns(("questions",))
