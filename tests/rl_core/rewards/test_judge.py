"""The judge, against a local server that fails, hangs, floods, trickles and sends nonsense."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from helpers.reward_rollouts import group, rollout, say

from rl_core import json_client
from rl_core.errors import RewardError, SettingsError
from rl_core.rewards.judges.replies import read_score
from rl_core.rewards.orchestrator import RewardOrchestrator
from rl_core.settings import JudgeSettings, RewardSettings


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked, self.headers_seen, self.paths = [], [], []
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
            server.paths.append(self.path)
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

    def say(self, content, status=200, raw=None, finish_reason="stop", **headers):
        choice = {"message": {"content": content}, "finish_reason": finish_reason}
        body = raw if raw is not None else json.dumps({"choices": [choice]}).encode()
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
    "cut from 10": lambda handler, number, text: handler.say("score: 1", finish_reason="length"),
    "a filter": lambda handler, number, text: handler.say(
        "score: 1", finish_reason="content_filter"
    ),
    "a cut thought": lambda handler, number, text: handler.say(
        "<think>score: 2", finish_reason="length"
    ),
    "in its thought": lambda handler, number, text: handler.say("<think>score: 2</think>I cannot."),
    "below the scale": lambda handler, number, text: handler.say("score: -3"),
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


SCORES = [
    ((0, 10), "score: 1e-1", 0.1),
    ((0, 10), "score: .5", 0.5),
    ((0, 10), "Score (0-10): 7", 7),
    ((0, 10), "**Score** (out of 10): 8", 8),
    ((0, 10), "**Score (0-10):** 7", 7),
    ((0, 10), "Score [0 to 10] = **7.5**", 7.5),
    ((0, 10), "Score out of 10: 7", 7),
    ((0, 10), "Score on a scale from 0 to 10: 7", 7),
    ((0, 10), "The score is 9", 9),
    ((0, 10), "the score is: 9.", 9),
    ((0, 10), "score: 8. The maximal score 10 was not given as", 8),
    ((0, 10), "score: 8. The maximal score is 10.", 8),
    ((0, 10), "Score: 8\nMaximum score: 10", 8),
    ((0, 10), "score: 8/10", 8),
    ((0, 10), "score: 8 out of 10", 8),
    ((0, 100), "score: 8/10", None),
    ((0, 10), "Style score: 3\nFinal score: 6", 6),
    ((0, 10), '{"reason": "fine", "score": 7}', 7),
    ((0, 10), "{'score': '7'}", 7),
    ((0, 10), "`score: 7`", 7),
    ((0, 10), "Score:\n\n7", 7),
    ((0, 10), "Well done.\nScore 7", 7),
    ((0, 10), "score: $7$", 7),
    ((0, 10), "SCORE: +7", 7),
    ((0, 10), "score: 7,5", None),
    ((0, 10), "score: 7-8", None),
    ((0, 10), "score: 7 - 8", None),
    ((0, 10), "score: 1e", None),
    ((0, 10), "score: 7th", None),
    ((0, 10), "score: NUMBER", None),
    ((0, 10), "the score is not 9", None),
    ((0, 10), "the best score is 9", None),
    ((0, 10), "I would score 10 others lower than this", None),
    ((0, 10), "underscore: 7", None),
    ((0, 10), "score: -3", None),
    ((0, 10), "score: 1e99999", None),
    ((0, 10), "score: nan", None),
    ((-1, 1), "score: -1", -1),
    ((-1, 1), "score: −0.5", -0.5),  # noqa: RUF001
    ((-1, 1), "**score**: **-.5**", -0.5),
    ((0, 10), "<think>it could be score: 2 perhaps; but", None),
    ((0, 10), "<think>score: 2</think>I cannot judge this.", None),
    ((0, 10), "<think>score: 2</think>score: 3", 3),
    ((0, 10), "score: 2</think>score: 3", 3),
    ((0, 10), "", None),
]


@pytest.mark.parametrize(("scale", "reply", "score"), SCORES)
def test_the_score_of_a_reply(scale, reply, score):
    settings = JudgeSettings(lowest=scale[0], highest=scale[1])
    if score is None:
        with pytest.raises(ValueError, match="score"):
            read_score(reply, settings)
    else:
        expected = (score - scale[0]) / (scale[1] - scale[0])
        assert read_score(reply, settings) == pytest.approx(expected, abs=1e-12)


def test_a_pattern_of_the_user_counts_as_it_is():
    settings = JudgeSettings(pattern=r"grade (\S+)")
    assert read_score("<think>grade 1</think>grade 3, no: grade 4", settings) == 0.4
    with pytest.raises(ValueError, match="holds no score"):
        read_score("score: 4", settings)


def test_a_reply_in_parts_is_read_without_its_thought(server, judge):
    parts = [{"type": "thinking", "thinking": "score: 1"}, {"type": "text", "text": "score: 6"}]
    server.behave = lambda handler, number, text: handler.say(parts)
    assert judge(["a"])[0] == [0.6]


def test_replies_that_an_earlier_version_cached_are_asked_for_again(server, judge, tmp_path):
    judge(["a"])
    (cached,) = tmp_path.rglob("*.json")
    assert json.loads(cached.read_text()) == {"reply": "score: 5", "finish_reason": "stop"}
    cached.write_text(json.dumps({"reply": "score: 1"}))  # perhaps cut from 10
    assert judge(["a"])[0] == [0.5]
    assert len(server.asked) == 2


def test_parameters_that_a_model_refuses_are_adapted_once(server, judge, monkeypatch):
    monkeypatch.setattr(json_client, "_refused_parameters", {})

    def answer_request(handler, number, text):
        body = server.asked[number - 1]
        error = None
        if "max_tokens" in body:
            error = {
                "message": "Unsupported parameter: 'max_tokens' is not supported with this model."
            }
        elif "temperature" in body:
            error = {"message": "Unsupported value", "param": "temperature"}
        if error:
            handler.say("", status=400, raw=json.dumps({"error": error}).encode())
        else:
            handler.say("score: 8")

    server.behave = answer_request
    assert judge(["a"], max_tokens=77)[0] == [0.8]
    sent = [{name: body.get(name) for name in PARAMETERS} for body in server.asked]
    assert sent == [
        {"max_tokens": 77, "max_completion_tokens": None, "temperature": 0.0},
        {"max_tokens": None, "max_completion_tokens": 77, "temperature": 0.0},
        {"max_tokens": None, "max_completion_tokens": 77, "temperature": None},
    ]
    assert judge(["b"], max_tokens=77)[0] == [0.8]
    assert len(server.asked) == 4  # remembered
    assert judge(["a"], max_tokens=77)[0] == [0.8]
    assert len(server.asked) == 4  # cached under the request as configured
    judge(["b"], max_tokens=77, model="other")
    assert len(server.asked) == 7  # another model


PARAMETERS = ("max_tokens", "max_completion_tokens", "temperature")


def test_a_refusal_that_stays_is_reported(server, judge, monkeypatch):
    monkeypatch.setattr(json_client, "_refused_parameters", {})
    text = b'{"error": {"message": "max_tokens or max_completion_tokens is too large"}}'
    server.behave = lambda handler, number, prompt: handler.say("", status=400, raw=text)
    with pytest.raises(RewardError, match=r"refuses the request: 400 .*too large"):
        judge(["a"])
    assert len(server.asked) == 2
    assert json_client._refused_parameters == {}
    server.behave = lambda handler, number, prompt: handler.say("", status=400, raw=b"bad model")
    with pytest.raises(RewardError, match=r"refuses the request: 400 .*bad model"):
        judge(["a"])
    assert len(server.asked) == 3


@pytest.mark.parametrize(
    ("base", "address"),
    [
        ("http://h:1", "http://h:1/v1/chat/completions"),
        ("http://h:1/", "http://h:1/v1/chat/completions"),
        ("http://h:1/v1", "http://h:1/v1/chat/completions"),
        ("http://h:1/v1/", "http://h:1/v1/chat/completions"),
        ("https://h/v1beta/openai", "https://h/v1beta/openai/chat/completions"),
        ("https://h/v1beta/openai/", "https://h/v1beta/openai/chat/completions"),
        ("https://h/api/paas/v4", "https://h/api/paas/v4/chat/completions"),
        ("https://h/openai/v1/", "https://h/openai/v1/chat/completions"),
        (
            "https://r.openai.azure.com/openai/deployments/d?api-version=2024-10-21",
            "https://r.openai.azure.com/openai/deployments/d/chat/completions?api-version=2024-10-21",
        ),
        ("https://h/v1/chat/completions", "https://h/v1/chat/completions"),
    ],
)
def test_a_base_address_with_a_path_is_kept(base, address):
    assert json_client.build_openai_address(base, "chat/completions") == address


def test_the_address_reaches_the_server(server, judge):
    for path in ("", "/v1", "/v1beta/openai", "/v4", "/openai/deployments/d?api-version=1"):
        judge(["a"], url=server.url + path)
    assert server.paths == [
        "/v1/chat/completions",
        "/v1beta/openai/chat/completions",  # /v1 is the first, which is cached
        "/v4/chat/completions",
        "/openai/deployments/d/chat/completions?api-version=1",
    ]
