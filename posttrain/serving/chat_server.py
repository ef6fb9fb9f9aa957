"""Labels of answers in a journal: one checksummed line each, on the disk before the caller is told.

Metrics of the server in Prometheus' text format.

State that all routes share: the model, its serving loop, sinks, ids of answers.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import queue
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.requests import Request

from posttrain.serving.chat_prompts import PromptBuilder
from posttrain.serving.environment_sessions import EnvironmentSessions
from posttrain.serving.errors import ServingHTTPError
from posttrain.serving.served_model import EngineThread, ServedModel
from posttrain.web.signed_urls import UrlSigner
from rl_core.data.chat import ChatRenderer
from rl_core.inference.server_loop import ServerLoopState
from rl_core.inference.serving_requests import AnswerSink, FeedbackLabel, FeedbackSink, ServedAnswer
from rl_core.settings import EnvironmentSettings, ServingSettings, VotingSettings
from rl_core.storage.atomic_files import append_bytes, make_folder, truncate_file
from rl_core.storage.faults import inject_fault
from rl_core.storage.line_logs import encode_checked_line, read_checked_lines
from rl_core.trackers.prometheus import format_prometheus_name


class FeedbackJournal:
    """A `FeedbackSink` over a file of JSON lines: answer_id, choice, the label, and seconds since 1970."""

    def __init__(self, path: Path) -> None:
        """A last line that a kill tore off, which nobody was told of, is cut off."""
        self.path = path
        self._lock = threading.Lock()
        make_folder(path.parent)
        if path.is_file():
            end = 0
            for line in read_checked_lines(path):
                end = line.end
            if end < path.stat().st_size:
                truncate_file(path, end)

    def accept_label(self, answer_id: str, choice: int, label: FeedbackLabel) -> None:
        """See `FeedbackSink`."""
        record = {"answer_id": answer_id, "choice": choice, **label.to_json(), "time": time.time()}
        with self._lock:
            append_bytes(self.path, encode_checked_line(record), synced=True)
        inject_fault("feedback.kept")


_TIME_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_MAX_RECENT_ANSWERS = 4096  # answers that rates and quantiles are taken over, at most


class ServerMetrics:
    """Counts of requests and tokens, times, and the state of the serving loop at the moment of asking."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()

        def name(text: str) -> str:
            return format_prometheus_name(f"serving_{text}")

        own = self._registry
        self.requests = Counter(
            name("requests"),
            "Requests for answers, by status of the response.",
            ["code"],
            registry=own,
        )
        self.tokens = Counter(
            name("tokens"), "Tokens of answered requests.", ["kind"], registry=own
        )
        self.request_seconds = Histogram(
            name("request_seconds"),
            "Time from a request to the end of its answer.",
            buckets=_TIME_BUCKETS,
            registry=own,
        )
        self.first_part_seconds = Histogram(
            name("first_part_seconds"),
            "Time from a request to the first part of its stream.",
            buckets=_TIME_BUCKETS,
            registry=own,
        )
        self.client_disconnects = Counter(
            name("clients_gone"), "Requests whose client left before the answer.", registry=own
        )
        self.feedback = Counter(name("feedback"), "Labels that were taken.", registry=own)
        self._recent: deque[tuple[float, float, int]] = deque(maxlen=_MAX_RECENT_ANSWERS)
        self._gauges = {
            field: Gauge(name(field), about, registry=own)
            for field, about in (
                ("policy_version", "Version of the weights that answer new requests."),
                ("versions", "Sets of weights in memory."),
                ("waiting", "Answers that wait for a slot."),
                ("active", "Answers in slots."),
                ("parked", "Answers that have left their slot to others and go on later."),
                ("capacity", "Slots."),
                ("parkings", "Times that an answer left its slot to others."),
                ("reloads", "Times that weights were taken over."),
            )
        }

    def count_answer(self, seconds: float, prompt_tokens: int, completion_tokens: int) -> None:
        """Count an answered request."""
        self.tokens.labels("prompt").inc(prompt_tokens)
        self.tokens.labels("completion").inc(completion_tokens)
        self.request_seconds.observe(seconds)
        self._recent.append((time.monotonic(), seconds, completion_tokens))

    def compute_recent_rates(self, window: float = 60.0) -> dict[str, float]:
        """Answers and tokens a second, and quantiles of the time to an answer, over the last seconds."""
        now = time.monotonic()
        found = [entry for entry in list(self._recent) if now - entry[0] <= window]
        covered = window
        if len(self._recent) == _MAX_RECENT_ANSWERS and found:  # the newest ones alone are known
            covered = max(1e-3, min(window, now - found[0][0]))
        numbers = {
            "online/answers_per_second": len(found) / covered,
            "online/tokens_per_second": sum(entry[2] for entry in found) / covered,
        }
        times = sorted(entry[1] for entry in found)
        for percent in (50, 90, 99) if times else ():
            numbers[f"online/latency_p{percent}_seconds"] = times[
                min(len(times) - 1, len(times) * percent // 100)
            ]
        return numbers

    def render_metrics(self, state: Callable[[], ServerLoopState] | None) -> bytes:
        """Everything, as Prometheus reads it."""
        if state is not None:
            now = state()
            for field, gauge in self._gauges.items():
                gauge.set(getattr(now, field))
        return generate_latest(self._registry)


T = TypeVar("T")
log = logging.getLogger(__name__)
_ID_PREFIX = "chatcmpl-"
_MAX_QUEUED_RECORDS = (
    10_000  # requests whose answers wait for a slow sink; further ones are not recorded
)


class ChatServer:
    """One model's server."""

    def __init__(
        self,
        settings: ServingSettings,
        name: str,
        folder: Path,
        token: str,
        *,
        environment: EnvironmentSettings | None = None,
        answers: AnswerSink | None = None,
        feedback: FeedbackSink | None = None,
        voting: VotingSettings | None = None,
    ) -> None:
        """`folder`: of the token, the journal of labels, and downloads. `answers`: taker of what was served."""
        self.voting = voting or VotingSettings()
        self.settings, self.name, self.folder = settings, name, folder
        self._token = token
        self.metrics = ServerMetrics()
        self.sessions = EnvironmentSessions(environment)
        self.feedback: FeedbackSink = feedback or FeedbackJournal(folder / "feedback.jsonl")
        self._signer = UrlSigner(folder)
        self.engine: EngineThread | None = None
        self.model: ServedModel | None = None
        self.prompt_builder: PromptBuilder | None = None
        self.session_renderer: ChatRenderer | None = None
        self.not_ready_reason = "the model is being loaded"
        self._prompt_executor = ThreadPoolExecutor(1, thread_name_prefix="serving-prompts")
        self._blocking_executor = ThreadPoolExecutor(8, thread_name_prefix="serving-waits")
        self.answers: AnswerSink | None = None
        self._records: queue.Queue[list[ServedAnswer] | None] = queue.Queue(_MAX_QUEUED_RECORDS)
        self._num_queued = self._num_recorded = 0  # requests handed to the taker, and taken by it
        self._recorded_condition = threading.Condition()
        self._recorder: threading.Thread | None = None
        if answers is not None:
            self.attach_answer_sink(answers)

    # -- the model -----------------------------------------------------------------------------------------------------

    def start_serving(self, model: ServedModel) -> None:
        """Serve a model from now on. Raises: NonFiniteTensor, OutOfMemory, DataError."""
        self.prompt_builder = PromptBuilder(model.renderer, model.context, self.settings.tools)
        self.session_renderer = ChatRenderer(model.renderer.tokenizer, model.renderer.settings)
        self.model = model
        self.engine = EngineThread(model, self.settings)

    def attach_answer_sink(self, answers: AnswerSink, feedback: FeedbackSink | None = None) -> None:
        """Hand everything that is served from now on to a taker, and labels to another one."""
        self.answers = answers
        self.feedback = feedback or self.feedback
        if self._recorder is None:
            self._recorder = threading.Thread(
                target=self._record_queued_answers, name="serving-records", daemon=True
            )
            self._recorder.start()

    def publish_model(self, model: ServedModel) -> bool:
        """Have requests that begin from now on answered by other weights of the same tokenizer.

        Returns: False = it reads and writes other tokens, for which the server has to be started anew.
        """
        assert self.model is not None and self.engine is not None
        is_alike = (
            model.renderer is self.model.renderer or model.text_digest == self.model.text_digest
        )
        if not is_alike or model.context != self.model.context:
            return False
        self.engine.publish_model(model)
        self.model = model
        return True

    @property
    def is_ready(self) -> bool:
        """True = requests are answered."""
        return self.engine is not None and self.engine.is_alive

    def require_ready(self) -> tuple[EngineThread, PromptBuilder]:
        """The parts that answer. Raises: RefusedRequest (503) before there is a model, or after the engine ended."""
        if self.engine is None or self.prompt_builder is None:
            raise ServingHTTPError(503, self.not_ready_reason, code="not_ready", retry_after=5)
        if not self.engine.is_alive:
            raise ServingHTTPError(
                503, "the engine has ended; the server's log says why", code="not_ready"
            )
        return self.engine, self.prompt_builder

    def close(self) -> None:
        """End all threads; what has not ended fails."""
        if self.engine is not None:
            self.engine.close_loop()
        self.sessions.close_pool()
        for pool in (self._prompt_executor, self._blocking_executor):
            pool.shutdown(wait=False, cancel_futures=True)
        if self._recorder is not None:
            self._records.put(None)
            self._recorder.join(10)

    # -- callers -------------------------------------------------------------------------------------------------------

    def check_token(self, request: Request) -> None:
        """Raises: RefusedRequest (401) without the token."""
        kind, _, given = request.headers.get("authorization", "").partition(" ")
        if kind.lower() != "bearer" or not hmac.compare_digest(
            given.strip().encode(), self._token.encode()
        ):
            what = "the API key is another one" if given else "there is no API key in the request"
            raise ServingHTTPError(
                401,
                f"{what}; the server's is in {self.folder / 'token'} (Authorization: Bearer ...)",
                code="invalid_api_key",
            )

    def check_model(self, name: str) -> None:
        """Raises: RefusedRequest (404) for another model than the one that is served."""
        if name != self.name:
            raise ServingHTTPError(
                404,
                f"there is no model '{name[:200]}' here; '{self.name}' is served",
                param="model",
                code="model_not_found",
            )

    # -- ids of answers ------------------------------------------------------------------------------------------------

    def create_answer_id(self) -> str:
        """Id of an answer; known again by its signature, by a server that was started anew as well."""
        mark = secrets.token_hex(12)
        return f"{_ID_PREFIX}{mark}{self._sign_answer_mark(mark)}"

    def is_issued_id(self, answer_id: str) -> bool:
        """True = this server, or one before it in the folder, gave an answer that id."""
        mark = answer_id.removeprefix(_ID_PREFIX)[:24]
        return hmac.compare_digest(
            answer_id.encode(), f"{_ID_PREFIX}{mark}{self._sign_answer_mark(mark)}".encode()
        )

    def _sign_answer_mark(self, mark: str) -> str:
        return self._signer.sign_subject(f"answer {mark}", 0)[:16]

    # -- threads -------------------------------------------------------------------------------------------------------

    async def run_on_prompt_thread(self, function: Callable[..., T], *arguments: Any) -> T:
        """A call that takes processor time, on the thread for prompts."""
        return await asyncio.get_running_loop().run_in_executor(
            self._prompt_executor, partial(function, *arguments)
        )

    async def run_blocking(self, function: Callable[..., T], *arguments: Any) -> T:
        """A call that waits for a disk or an environment, in a thread."""
        return await asyncio.get_running_loop().run_in_executor(
            self._blocking_executor, partial(function, *arguments)
        )

    # -- records -------------------------------------------------------------------------------------------------------

    @property
    def num_top_tokens(self) -> int:
        """Most likely tokens that are recorded for the taker of answers."""
        return self.answers.num_top_tokens if self.answers is not None else 0

    def enqueue_answers(self, answers: Sequence[ServedAnswer]) -> None:
        """Hand the answers to one request to their taker, later and on another thread."""
        if self.answers is None or not answers:
            return
        try:
            self._records.put_nowait(list(answers))
            self._num_queued += 1
        except queue.Full:
            log.warning("an answer is not recorded: %d wait for the sink", _MAX_QUEUED_RECORDS)

    def wait_until_recorded(self, seconds: float = 10.0) -> None:
        """Wait until everything that was handed over by now is taken: a label may follow its answer at once."""
        wanted = self._num_queued
        with self._recorded_condition:
            self._recorded_condition.wait_for(lambda: self._num_recorded >= wanted, seconds)

    def _record_queued_answers(self) -> None:
        assert self.answers is not None
        while (answers := self._records.get()) is not None:
            try:
                self.answers.record_answers(answers)
            except Exception:
                log.exception("an answer could not be recorded")
            with self._recorded_condition:
                self._num_recorded += 1
                self._recorded_condition.notify_all()


def find_chat_server(request: Request) -> ChatServer:
    """The server of a request."""
    server: ChatServer = request.app.state.server
    return server
