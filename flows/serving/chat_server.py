"""State that all routes share: the model, its serving loop, sinks, ids of answers."""

from __future__ import annotations

import asyncio
import hmac
import logging
import queue
import secrets
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from starlette.requests import Request

from flows.service.http.signed_files import Signer
from flows.serving.answering import Answering
from flows.serving.chat_prompts import PromptMaker
from flows.serving.environment_sessions import EnvironmentSessions
from flows.serving.feedback_journal import FeedbackJournal
from flows.serving.refused import RefusedRequest
from flows.serving.served_model import ServedModel
from flows.serving.server_metrics import ServerMetrics
from rl_core.data.chat import ChatRenderer
from rl_core.inference.served_answers import AnswerSink, FeedbackSink, ServedAnswer
from rl_core.settings import EnvironmentSettings, ServingSettings, VotingSettings

__all__ = ["ChatServer", "server_of"]

T = TypeVar("T")
log = logging.getLogger(__name__)
_PREFIX = "chatcmpl-"
_MOST_RECORDS = 10_000  # requests whose answers wait for a slow sink; further ones are not recorded


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
        self._signer = Signer(folder)
        self.answering: Answering | None = None
        self.model: ServedModel | None = None
        self.prompts: PromptMaker | None = None
        self.session_renderer: ChatRenderer | None = None
        self.waits_for = "the model is being loaded"
        self._rendering = ThreadPoolExecutor(1, thread_name_prefix="serving-prompts")
        self._waiting = ThreadPoolExecutor(8, thread_name_prefix="serving-waits")
        self.answers: AnswerSink | None = None
        self._records: queue.Queue[list[ServedAnswer] | None] = queue.Queue(_MOST_RECORDS)
        self._handed = self._taken = 0  # requests handed to the taker, and taken by it
        self._has_taken = threading.Condition()
        self._recorder: threading.Thread | None = None
        if answers is not None:
            self.take_answers(answers)

    # -- the model -----------------------------------------------------------------------------------------------------

    def begin(self, model: ServedModel) -> None:
        """Serve a model from now on. Raises: NonFiniteTensor, OutOfMemory, DataError."""
        self.prompts = PromptMaker(model.renderer, model.context, self.settings.tools)
        self.session_renderer = ChatRenderer(model.renderer.tokenizer, model.renderer.settings)
        self.model = model
        self.answering = Answering(model, self.settings)

    def take_answers(self, answers: AnswerSink, feedback: FeedbackSink | None = None) -> None:
        """Hand everything that is served from now on to a taker, and labels to another one."""
        self.answers = answers
        self.feedback = feedback or self.feedback
        if self._recorder is None:
            self._recorder = threading.Thread(target=self._record, name="serving-records", daemon=True)
            self._recorder.start()

    def publish(self, model: ServedModel) -> bool:
        """Have requests that begin from now on answered by other weights of the same tokenizer.

        Returns: False = it reads and writes other tokens, for which the server has to be started anew.
        """
        assert self.model is not None and self.answering is not None
        is_alike = model.renderer is self.model.renderer or model.text_digest == self.model.text_digest
        if not is_alike or model.context != self.model.context:
            return False
        self.answering.publish(model)
        self.model = model
        return True

    @property
    def is_ready(self) -> bool:
        """True = requests are answered."""
        return self.answering is not None and self.answering.is_alive

    def ready(self) -> tuple[Answering, PromptMaker]:
        """The parts that answer. Raises: RefusedRequest (503) before there is a model, or after the engine ended."""
        if self.answering is None or self.prompts is None:
            raise RefusedRequest(503, self.waits_for, code="not_ready", retry_after=5)
        if not self.answering.is_alive:
            raise RefusedRequest(503, "the engine has ended; the server's log says why", code="not_ready")
        return self.answering, self.prompts

    def close(self) -> None:
        """End all threads; what has not ended fails."""
        if self.answering is not None:
            self.answering.close()
        self.sessions.close()
        for pool in (self._rendering, self._waiting):
            pool.shutdown(wait=False, cancel_futures=True)
        if self._recorder is not None:
            self._records.put(None)
            self._recorder.join(10)

    # -- callers -------------------------------------------------------------------------------------------------------

    def check_token(self, request: Request) -> None:
        """Raises: RefusedRequest (401) without the token."""
        kind, _, given = request.headers.get("authorization", "").partition(" ")
        if kind.lower() != "bearer" or not hmac.compare_digest(given.strip().encode(), self._token.encode()):
            what = "the API key is another one" if given else "there is no API key in the request"
            raise RefusedRequest(
                401, f"{what}; the server's is in {self.folder / 'token'} (Authorization: Bearer ...)",
                code="invalid_api_key",
            )  # fmt: skip

    def check_model(self, name: str) -> None:
        """Raises: RefusedRequest (404) for another model than the one that is served."""
        if name != self.name:
            raise RefusedRequest(
                404, f"there is no model '{name[:200]}' here; '{self.name}' is served", param="model",
                code="model_not_found",
            )  # fmt: skip

    # -- ids of answers ------------------------------------------------------------------------------------------------

    def new_id(self) -> str:
        """Id of an answer; known again by its signature, by a server that was started anew as well."""
        mark = secrets.token_hex(12)
        return f"{_PREFIX}{mark}{self._signature(mark)}"

    def is_own_id(self, answer_id: str) -> bool:
        """True = this server, or one before it in the folder, gave an answer that id."""
        mark = answer_id.removeprefix(_PREFIX)[:24]
        return hmac.compare_digest(answer_id.encode(), f"{_PREFIX}{mark}{self._signature(mark)}".encode())

    def _signature(self, mark: str) -> str:
        return self._signer.sign(f"answer {mark}", 0)[:16]

    # -- threads -------------------------------------------------------------------------------------------------------

    async def render(self, function: Callable[..., T], *arguments: Any) -> T:
        """A call that takes processor time, on the thread for prompts."""
        return await asyncio.get_running_loop().run_in_executor(self._rendering, partial(function, *arguments))

    async def wait_for(self, function: Callable[..., T], *arguments: Any) -> T:
        """A call that waits for a disk or an environment, in a thread."""
        return await asyncio.get_running_loop().run_in_executor(self._waiting, partial(function, *arguments))

    # -- records -------------------------------------------------------------------------------------------------------

    @property
    def top(self) -> int:
        """Most likely tokens that are recorded for the taker of answers."""
        return self.answers.top if self.answers is not None else 0

    def record(self, answers: Sequence[ServedAnswer]) -> None:
        """Hand the answers to one request to their taker, later and on another thread."""
        if self.answers is None or not answers:
            return
        try:
            self._records.put_nowait(list(answers))
            self._handed += 1
        except queue.Full:
            log.warning("an answer is not recorded: %d wait for the sink", _MOST_RECORDS)

    def wait_recorded(self, seconds: float = 10.0) -> None:
        """Wait until everything that was handed over by now is taken: a label may follow its answer at once."""
        wanted = self._handed
        with self._has_taken:
            self._has_taken.wait_for(lambda: self._taken >= wanted, seconds)

    def _record(self) -> None:
        assert self.answers is not None
        while (answers := self._records.get()) is not None:
            try:
                self.answers.record(answers)
            except Exception:
                log.exception("an answer could not be recorded")
            with self._has_taken:
                self._taken += 1
                self._has_taken.notify_all()


def server_of(request: Request) -> ChatServer:
    """The server of a request."""
    server: ChatServer = request.app.state.server
    return server
