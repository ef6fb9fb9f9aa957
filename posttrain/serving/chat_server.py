"""State of a chat server: the model and its engine, the answer sink, feedback, metrics, answer ids."""

from __future__ import annotations

import asyncio
import logging
import queue
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from hmac import compare_digest
from pathlib import Path
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.requests import Request

from posttrain.serving.environment_sessions import EnvironmentSessions
from posttrain.serving.errors import ServingHTTPError
from posttrain.serving.recorded_sessions import RecordedSessions
from posttrain.serving.served_model import EngineThread, ServedModel
from posttrain.web.signed_urls import UrlSigner
from posttrain.web.tokens import has_bearer_token, split_authorization
from rl_core.chat.prompts import PromptBuilder
from rl_core.data.chat import ChatRenderer
from rl_core.inference.server_loop import ServerLoopState
from rl_core.inference.serving_requests import AnswerSink, FeedbackLabel, FeedbackSink, ServedAnswer
from rl_core.settings import EnvironmentSettings, ServingSettings, VotingSettings
from rl_core.storage.append_log import AppendLog
from rl_core.storage.atomic_files import make_folder
from rl_core.storage.faults import inject_fault
from rl_core.trackers.prometheus import format_prometheus_name

T = TypeVar("T")
log = logging.getLogger(__name__)

_ID_PREFIX = "chatcmpl-"
_MAX_QUEUED_RECORDS = (
    10_000  # requests queued for a slow answer sink; further ones are not recorded
)
_MAX_RECENT_ANSWERS = 4096  # the most answers used for rates and quantiles
_TIME_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class FeedbackJournal:
    """A `FeedbackSink` that appends each label to a file of JSON lines before the request is acknowledged.

    Each line has a checksum and the fields answer_id, choice, those of the label, and the time in seconds since 1970.
    """

    def __init__(self, path: Path) -> None:
        """Open the journal. Cut off a last line torn by a crash, which was never acknowledged."""
        self.path = path
        make_folder(path.parent)
        self._log = AppendLog(path, synced=True)
        self._log.truncate_tail()

    def accept_label(self, answer_id: str, choice: int, label: FeedbackLabel) -> None:
        """Append a label; see `FeedbackSink`."""
        record = {"answer_id": answer_id, "choice": choice, **label.to_json(), "time": time.time()}
        self._log.append_record(record)
        inject_fault("feedback.kept")


class ServerMetrics:
    """Counts of requests and tokens, response times, and the current state of the serving loop, for Prometheus."""

    def __init__(self) -> None:
        registry = self._registry = CollectorRegistry()

        def name(text: str) -> str:
            return format_prometheus_name(f"serving_{text}")

        self.requests = Counter(
            name("requests"),
            "Requests for answers, by status of the response.",
            ["code"],
            registry=registry,
        )
        self.tokens = Counter(
            name("tokens"), "Tokens of answered requests.", ["kind"], registry=registry
        )
        self.request_seconds = Histogram(
            name("request_seconds"),
            "Time from a request to the end of its answer.",
            buckets=_TIME_BUCKETS,
            registry=registry,
        )
        self.first_part_seconds = Histogram(
            name("first_part_seconds"),
            "Time from a request to the first part of its stream.",
            buckets=_TIME_BUCKETS,
            registry=registry,
        )
        self.client_disconnects = Counter(
            name("clients_gone"),
            "Requests whose client disconnected before the answer.",
            registry=registry,
        )
        self.feedback = Counter(name("feedback"), "Labels accepted.", registry=registry)
        self._recent: deque[tuple[float, float, int]] = deque(maxlen=_MAX_RECENT_ANSWERS)
        self._gauges = {
            field: Gauge(name(field), description, registry=registry)
            for field, description in (
                ("policy_version", "Version of the weights that answer new requests."),
                ("versions", "Sets of weights in memory."),
                ("waiting", "Answers that wait for a slot."),
                ("active", "Answers in slots."),
                ("parked", "Answers that have yielded their slot and continue later."),
                ("capacity", "Slots."),
                ("parkings", "Times that an answer yielded its slot."),
                ("reloads", "Times that new weights were published."),
            )
        }

    def count_answer(self, seconds: float, prompt_tokens: int, completion_tokens: int) -> None:
        """Count an answered request."""
        self.tokens.labels("prompt").inc(prompt_tokens)
        self.tokens.labels("completion").inc(completion_tokens)
        self.request_seconds.observe(seconds)
        self._recent.append((time.monotonic(), seconds, completion_tokens))

    def compute_recent_rates(self, window: float = 60.0) -> dict[str, float]:
        """Compute answers and tokens per second and latency quantiles over the last `window` seconds."""
        now = time.monotonic()
        recent = [answer for answer in list(self._recent) if now - answer[0] <= window]
        covered = window
        if len(self._recent) == _MAX_RECENT_ANSWERS and recent:  # older ones were dropped
            covered = max(1e-3, min(window, now - recent[0][0]))
        rates = {
            "online/answers_per_second": len(recent) / covered,
            "online/tokens_per_second": sum(answer[2] for answer in recent) / covered,
        }
        latencies = sorted(answer[1] for answer in recent)
        for percent in (50, 90, 99) if latencies else ():
            index = min(len(latencies) - 1, len(latencies) * percent // 100)
            rates[f"online/latency_p{percent}_seconds"] = latencies[index]
        return rates

    def render_metrics(self, state: ServerLoopState | None) -> bytes:
        """Render all metrics in Prometheus' text format; `state` is None without an engine."""
        if state is not None:
            for field, gauge in self._gauges.items():
                gauge.set(getattr(state, field))
        return generate_latest(self._registry)


class ChatServer:
    """The server of one model."""

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
        """Create a server without a model.

        Args:
            folder: holds the token, the feedback journal, recorded episodes and downloads.
            answers: sink of served answers.
        Raises: FolderBusy if it is to record, and another server records into the folder.
        """
        self.voting = voting or VotingSettings()
        self.settings, self.name, self.folder = settings, name, folder
        self._token = token
        self.metrics = ServerMetrics()
        self.sessions = EnvironmentSessions(environment)
        self.feedback: FeedbackSink = feedback or FeedbackJournal(folder / "feedback.jsonl")
        self._signer = UrlSigner(folder)
        self.recorded = RecordedSessions(settings, folder) if settings.record else None
        self.engine: EngineThread | None = None
        self.model: ServedModel | None = None
        self.prompt_builder: PromptBuilder | None = None
        self.session_renderer: ChatRenderer | None = None
        self.not_ready_reason = "the model is being loaded"
        self._prompt_executor = ThreadPoolExecutor(1, thread_name_prefix="serving-prompts")
        self._blocking_executor = ThreadPoolExecutor(8, thread_name_prefix="serving-waits")
        self.answers: AnswerSink | None = None
        self._records: queue.Queue[list[ServedAnswer] | None] = queue.Queue(_MAX_QUEUED_RECORDS)
        self._num_queued = self._num_recorded = 0  # requests handed to the sink; recorded by it
        self._recorded_condition = threading.Condition()
        self._recorder: threading.Thread | None = None
        if answers is not None:
            self.attach_answer_sink(answers)

    def start_serving(self, model: ServedModel) -> None:
        """Serve a model from now on. Raises: NonFiniteTensor, OutOfMemory, DataError."""
        folder = self.settings.images_folder
        self.prompt_builder = PromptBuilder(
            model.renderer,
            model.context,
            self.settings.tools,
            images_folder=None if folder is None else Path(folder),
        )
        self.session_renderer = ChatRenderer(model.renderer.tokenizer, model.renderer.settings)
        self.model = model
        self.engine = EngineThread(model, self.settings)

    def attach_answer_sink(self, answers: AnswerSink, feedback: FeedbackSink | None = None) -> None:
        """Record all answers served from now on in `answers`, and labels in `feedback` if set."""
        self.answers = answers
        self.feedback = feedback or self.feedback
        if self._recorder is None:
            self._recorder = threading.Thread(
                target=self._record_queued_answers, name="serving-records", daemon=True
            )
            self._recorder.start()

    def publish_model(self, model: ServedModel) -> bool:
        """Answer new requests with other weights of the same tokenizer.

        Returns: False = the model has another tokenizer, chat template or context; serving it takes a restart.
        """
        assert self.model is not None and self.engine is not None
        has_same_text = (
            model.renderer is self.model.renderer or model.text_digest == self.model.text_digest
        )
        if not has_same_text or model.context != self.model.context:
            return False
        self.engine.publish_model(model)
        self.model = model
        return True

    @property
    def is_ready(self) -> bool:
        """True = requests are answered."""
        return self.engine is not None and self.engine.is_alive

    def require_ready(self) -> tuple[EngineThread, PromptBuilder]:
        """Return engine and prompt builder. Raises: ServingHTTPError (503) without a model or a running engine."""
        if self.engine is None or self.prompt_builder is None:
            raise ServingHTTPError(503, self.not_ready_reason, code="not_ready", retry_after=5)
        if not self.engine.is_alive:
            raise ServingHTTPError(
                503, "the engine has ended; the server's log says why", code="not_ready"
            )
        return self.engine, self.prompt_builder

    def close(self) -> None:
        """Stop all threads; open requests fail."""
        if self.engine is not None:
            self.engine.close_loop()
        self.sessions.close_pool()
        for pool in (self._prompt_executor, self._blocking_executor):
            pool.shutdown(wait=False, cancel_futures=True)
        if self._recorder is not None:
            self._records.put(None)
            self._recorder.join(10)
        if self.recorded is not None:
            self.recorded.close()

    def check_token(self, request: Request) -> None:
        """Refuse a request without the server's API key. Raises: ServingHTTPError (401)."""
        if has_bearer_token(request, self._token):
            return
        _, credentials = split_authorization(request)
        reason = "the API key is wrong" if credentials else "the request has no API key"
        raise ServingHTTPError(
            401,
            f"{reason}; the server's key is in {self.folder / 'token'} (Authorization: Bearer ...)",
            code="invalid_api_key",
        )

    def check_model(self, name: str) -> None:
        """Refuse the name of a model that is not served. Raises: ServingHTTPError (404)."""
        if name != self.name:
            raise ServingHTTPError(
                404,
                f"there is no model '{name[:200]}' here; '{self.name}' is served",
                param="model",
                code="model_not_found",
            )

    def create_answer_id(self) -> str:
        """Create a signed answer id, which the server recognises even after a restart."""
        nonce = secrets.token_hex(12)
        return f"{_ID_PREFIX}{nonce}{self._sign_nonce(nonce)}"

    def is_issued_id(self, answer_id: str) -> bool:
        """Return whether a server of this folder issued the id."""
        nonce = answer_id.removeprefix(_ID_PREFIX)[:24]
        issued_id = f"{_ID_PREFIX}{nonce}{self._sign_nonce(nonce)}"
        return compare_digest(answer_id.encode(), issued_id.encode())

    def _sign_nonce(self, nonce: str) -> str:
        return self._signer.sign_subject(f"answer {nonce}", 0)[:16]

    async def run_on_prompt_thread(self, function: Callable[..., T], *arguments: Any) -> T:
        """Run a CPU-bound call on the single prompt thread."""
        return await asyncio.get_running_loop().run_in_executor(
            self._prompt_executor, partial(function, *arguments)
        )

    async def run_blocking(self, function: Callable[..., T], *arguments: Any) -> T:
        """Run a call that waits for a disk or an environment on a pool thread."""
        return await asyncio.get_running_loop().run_in_executor(
            self._blocking_executor, partial(function, *arguments)
        )

    @property
    def num_top_tokens(self) -> int:
        """The number of most likely tokens recorded for the answer sink."""
        return self.answers.num_top_tokens if self.answers is not None else 0

    def enqueue_answers(self, answers: Sequence[ServedAnswer]) -> None:
        """Queue the answers to one request for the answer sink's thread."""
        if self.answers is None or not answers:
            return
        try:
            self._records.put_nowait(list(answers))
            self._num_queued += 1
        except queue.Full:
            log.warning("an answer is not recorded: %d wait for the sink", _MAX_QUEUED_RECORDS)

    def wait_until_recorded(self, seconds: float = 10.0) -> None:
        """Wait until all answers queued so far are recorded; a label may arrive right after its answer."""
        num_wanted = self._num_queued
        with self._recorded_condition:
            self._recorded_condition.wait_for(lambda: self._num_recorded >= num_wanted, seconds)

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
    """Return the server that a request belongs to."""
    server: ChatServer = request.app.state.server
    return server
