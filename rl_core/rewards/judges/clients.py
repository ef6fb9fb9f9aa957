"""Requests to a judge: to a server or to a model in this process, with a cache on disk and a budget of calls."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import logging
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from rl_core.data.chat import ChatRenderer
from rl_core.data.token_ids import find_textless_ids
from rl_core.errors import BackendError, CheckpointError, RewardError, SettingsError
from rl_core.json_client import RequestLimits, build_openai_address, post_adapted
from rl_core.models import causal_lm
from rl_core.models.named_models import resolve_local_model
from rl_core.models.rotary import read_model_max_length
from rl_core.rewards.judges.replies import read_reply
from rl_core.settings import JudgeSettings, ModelSettings, SamplingSettings
from rl_core.storage.atomic_files import make_folder, resolve_cache_folder, write_json_atomic
from rl_core.storage.manifest import digest_folder
from rl_core.types import Message

if TYPE_CHECKING:
    from rl_core.chat.grammars import GrammarCompiler
    from rl_core.inference.serving_requests import AnswerSequence
    from rl_core.inference.token_rules import TokenRules

logger = logging.getLogger(__name__)

ReadVerdict = Callable[[str], Any]
_WRITES_PER_COUNT = 256  # replies between two counts of the cache's files


@dataclass(frozen=True, slots=True)
class JudgeQuestion:
    """Messages to a judge, and the reader of its reply, which raises ValueError for one without a verdict."""

    messages: list[Message]
    read: ReadVerdict
    schema: Mapping[str, Any] | None = None  # JSON schema of the whole reply; None = any text


class CallBudget:
    """Calls that a run may send. Thread-safe."""

    def __init__(self, limit: int | None) -> None:
        self.limit, self.spent = limit, 0
        self._lock = threading.Lock()

    def spend_call(self) -> None:
        """Count a call. Raises: RewardError if the budget is spent."""
        with self._lock:
            if self.limit is not None and self.spent >= self.limit:
                raise RewardError(
                    f"the judge's budget of {self.limit:,} calls is spent (reward_options.judge.max_calls); its "
                    "judgements are cached: raise it and resume, or judge less (fewer samples or orders, opponents)"
                )
            self.spent += 1


class ReplyCache:
    """Replies of a judge on disk, by digest of the question; the oldest are deleted beyond a number."""

    def __init__(self, folder: Path, entries: int) -> None:
        self.folder, self._entries = folder, entries
        self._lock, self._num_writes = threading.Lock(), 0

    def read_verdict(self, key: str, read: ReadVerdict) -> Any | None:
        """Return the verdict of a cached reply; None = there is none, or it cannot be read."""
        try:
            cached = json.loads(self._resolve_path(key).read_text(encoding="utf-8"))
            return read(cached["reply"]) if "finish_reason" in cached else None
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None

    def write_reply(self, key: str, reply: str, finish_reason: str | None) -> None:
        """Store a complete reply; a disk that refuses it is a warning."""
        path = self._resolve_path(key)
        try:
            make_folder(path.parent)
            write_json_atomic(path, {"reply": reply, "finish_reason": finish_reason})
        except CheckpointError as error:
            logger.warning("judgements cannot be cached in %s: %s", self.folder, error)
        with self._lock:
            if self._num_writes % min(self._entries, _WRITES_PER_COUNT) == 0:
                self._delete_oldest()
            self._num_writes += 1

    def _resolve_path(self, key: str) -> Path:
        return self.folder / key[:2] / f"{key}.json"

    def _delete_oldest(self) -> None:
        stamped = []
        for file in self.folder.glob("??/*.json"):
            with suppress(OSError):  # another process deleted it
                stamped.append((file.stat().st_mtime_ns, file))
        for _, file in sorted(stamped)[: max(0, len(stamped) - self._entries)]:
            with suppress(OSError):
                file.unlink()


class JudgeClient(ABC):
    """Sender of questions to one judge."""

    def __init__(self, settings: JudgeSettings) -> None:
        self.settings = settings
        self.budget = CallBudget(settings.max_calls)
        folder = Path(settings.cache).expanduser() if settings.cache else None
        self.cache = ReplyCache(
            folder or resolve_cache_folder("judgements"), settings.cache_entries
        )

    @abstractmethod
    def describe_request(self, question: JudgeQuestion) -> dict[str, Any]:
        """Return all that a reply depends on."""

    @abstractmethod
    def request_verdicts(
        self, questions: Mapping[str, JudgeQuestion]
    ) -> Iterator[tuple[str, Any, str]]:
        """Ask, cache complete replies with a verdict, and yield (key, verdict, reason of its failure or "").

        Raises: RewardError if the budget is spent.
        """

    def compute_key(self, question: JudgeQuestion) -> str:
        """Compute the digest of a question."""
        request = self.describe_request(question)
        return hashlib.sha256(json.dumps(request, sort_keys=True).encode()).hexdigest()


class ServerClient(JudgeClient):
    """Judge behind an OpenAI-compatible URL. Failed requests and replies without a verdict are repeated."""

    def __init__(self, settings: JudgeSettings) -> None:
        """Check the address. Raises: SettingsError."""
        super().__init__(settings)
        if settings.url is None or settings.model is None:
            raise SettingsError(
                "rewards.judge: needs reward_options.judge.url and model, the model's name on the server; or path, a "
                "judge that runs in this process"
            )
        if not settings.url.startswith(("http://", "https://")):
            raise SettingsError(
                f"rewards.judge: reward_options.judge.url '{settings.url}' is not an http:// or https:// address"
            )
        self._url = build_openai_address(settings.url, "chat/completions")

    def describe_request(self, question: JudgeQuestion) -> dict[str, Any]:
        """Return address and body of the request."""
        request: dict[str, Any] = {
            "url": self._url,
            "model": self.settings.model,
            "messages": list(question.messages),
            "max_tokens": self.settings.max_tokens,
            "temperature": self.settings.temperature,
        }
        if question.schema is not None:
            request["response_format"] = {
                "type": "json_schema",
                "json_schema": {"name": "verdict", "strict": True, "schema": question.schema},
            }
        return request

    def request_verdicts(
        self, questions: Mapping[str, JudgeQuestion]
    ) -> Iterator[tuple[str, Any, str]]:
        """Ask concurrently; see `JudgeClient`. A caller that stops iterating cancels the other requests."""
        stop = threading.Event()
        pool = ThreadPoolExecutor(self.settings.concurrency)
        try:
            pending: dict[Future[Any], str] = {
                pool.submit(self._request_verdict, key, question, stop): key
                for key, question in questions.items()
            }
            for future in as_completed(pending):
                try:
                    yield pending[future], future.result(), ""
                except BackendError as error:
                    yield pending[future], None, str(error)
        finally:
            stop.set()
            pool.shutdown(wait=False, cancel_futures=True)

    def _request_verdict(self, key: str, question: JudgeQuestion, stop: threading.Event) -> Any:
        """Request one verdict and cache its reply. Raises: BackendError; RewardError without budget."""
        settings = self.settings

        def read(answer: Any) -> tuple[str, str | None, Any]:
            reply, finish_reason = read_reply(answer)
            return reply, finish_reason, question.read(reply)

        body = self.describe_request(question)
        del body["url"]
        reply, finish_reason, verdict = post_adapted(
            self._url,
            body,
            RequestLimits(settings.timeout_s, settings.retries, settings.retry_delay_s),
            parse_response=read,
            headers=self._build_headers(),
            stop=stop,
            before_attempt=self.budget.spend_call,
        )
        self.cache.write_reply(key, reply, finish_reason)
        return verdict

    def _build_headers(self) -> dict[str, str]:
        name = self.settings.key_variable
        if name is None:
            return {}
        key = os.environ.get(name)
        if not key:
            raise BackendError(
                f"reward_options.judge.key_variable: the environment variable {name} is not set"
            )
        headers = {"Authorization": f"Bearer {key}"}
        if (urlsplit(self._url).hostname or "").endswith(".azure.com"):
            headers["api-key"] = key
        return headers


class LocalClient(JudgeClient):
    """Judge that runs in this process on the engine of rollouts. Its model is loaded at the first question.

    The same question gets the same reply: at temperature 0 the likeliest tokens, else tokens drawn from the digest of
    the question. A reply without a verdict is therefore not asked for again.
    """

    def __init__(self, settings: JudgeSettings) -> None:
        """Prepare; nothing is loaded yet. Raises: SettingsError without the package that `structured` needs."""
        super().__init__(settings)
        assert settings.path is not None
        self._path = settings.path
        self._loaded: tuple[Any, ChatRenderer] | None = None
        self._weights = ""  # digest of the folder
        self._grammars: GrammarCompiler | None = None
        if settings.structured and importlib.util.find_spec("llguidance") is None:
            raise SettingsError(
                "reward_options.judge.structured: replies are restricted by the package 'llguidance', which is not "
                "installed; install it with: python -m posttrain.install --extras structured"
            )

    def describe_request(self, question: JudgeQuestion) -> dict[str, Any]:
        """Return the digest of the model, messages and sampling."""
        if not self._weights:
            source = _resolve_judge_folder(self._path)
            self._weights = digest_folder(source) if Path(source).is_dir() else f"hub {source}"
        request: dict[str, Any] = {
            "weights": self._weights,
            "messages": list(question.messages),
            "max_tokens": self.settings.max_tokens,
            "temperature": self.settings.temperature,
        }
        if question.schema is not None:
            request["schema"] = question.schema
        return request

    def request_verdicts(
        self, questions: Mapping[str, JudgeQuestion]
    ) -> Iterator[tuple[str, Any, str]]:
        """Answer `concurrency` questions at a time; see `JudgeClient`."""
        # Imported here: only a judge in this process needs the engine.
        from rl_core.inference.engine import create_rollout_backend
        from rl_core.inference.serving_requests import AnswerSequence

        model, renderer = self._load_model()
        config: Any = model.config.get_text_config()
        limit = read_model_max_length(model)
        backend = create_rollout_backend(
            model,
            eos_ids=renderer.eos_ids,
            pad_id=renderer.pad_id,
            max_length=limit,
            textless_ids=find_textless_ids(renderer.tokenizer, config.vocab_size),
        )
        settings, slots = self.settings, self.settings.concurrency
        sampling = SamplingSettings(
            temperature=settings.temperature,
            max_completion_tokens=settings.max_tokens,
            slots=slots,
            max_turns=1,
        )
        keys = list(questions)
        for start in range(0, len(keys), slots):
            sequences: dict[str, AnswerSequence] = {}
            for key in keys[start : start + slots]:
                prompt_ids = renderer.prompt_ids(questions[key].messages)
                if len(prompt_ids) + settings.max_tokens > limit:
                    yield (
                        key,
                        None,
                        (
                            f"the question of {len(prompt_ids)} tokens and max_tokens {settings.max_tokens} exceed the "
                            f"judge's context of {limit}"
                        ),
                    )
                    continue
                self.budget.spend_call()
                sequences[key] = AnswerSequence(prompt_ids, int(key[:15], 16))
            if sequences and settings.structured:
                rules = [self._compile_rules(questions[key], renderer) for key in sequences]
                _run_with_rules(backend, list(sequences.values()), rules, sampling, limit)
            elif sequences:
                backend.run_sequences(list(sequences.values()), sampling)
            for key, sequence in sequences.items():
                if sequence.hit_limit:
                    yield key, None, "the reply was cut; raise max_tokens"
                    continue
                reply = renderer.action_text(sequence.tokens)
                try:
                    verdict = questions[key].read(reply)
                except ValueError as error:
                    yield key, None, str(error)
                    continue
                self.cache.write_reply(key, reply, "stop")
                yield key, verdict, ""

    def _compile_rules(self, question: JudgeQuestion, renderer: ChatRenderer) -> TokenRules:
        """Compile the grammar of a reply. Raises: RewardError for a tokenizer or schema that is not supported."""
        from rl_core.chat.answer_rules import ChatRequestError
        from rl_core.chat.grammars import GrammarCompiler
        from rl_core.inference.token_rules import TokenRules

        if self._grammars is None:
            self._grammars = GrammarCompiler(
                renderer.tokenizer,
                sorted(renderer.eos_ids),
                opens_thought=bool(renderer.opened_thought),
            )
        try:
            grammar = self._grammars.compile_answer(
                question.schema, {}, is_tagged=False, param="reward_options.judge.structured"
            )
        except ChatRequestError as error:
            raise RewardError(str(error)) from error
        return TokenRules(grammar)

    def _load_model(self) -> tuple[Any, ChatRenderer]:
        """Load model and tokenizer once; weights are shared with other frozen models of this process."""
        from rl_core.references.pool import get_frozen_models

        if self._loaded is None:
            source, settings = _resolve_judge_folder(self._path), ModelSettings(path=self._path)
            model = get_frozen_models().load_model(source, settings)
            tokenizer = causal_lm.load_tokenizer(source, settings)
            self._loaded = model, ChatRenderer(tokenizer, settings)
        return self._loaded


def _run_with_rules(
    backend: Any,
    sequences: Sequence[AnswerSequence],
    rules: Sequence[TokenRules],
    sampling: SamplingSettings,
    context: int,
) -> None:
    """Answer prompts whose replies follow rules. Raises: RulesFailed, errors of the engine."""
    from rl_core.inference.continuous_batching import ContinuousBatcher
    from rl_core.inference.engine import Engine
    from rl_core.inference.fallback_batching import FallbackBatcher
    from rl_core.inference.server_loop import ServerLoop, ServerLoopLimits
    from rl_core.inference.serving_requests import RequestSlots, ServedRequest

    batcher: Any = ContinuousBatcher if isinstance(backend, Engine) else FallbackBatcher
    opened: list[RequestSlots] = []

    def open_slots(wake: Callable[[], None]) -> RequestSlots:
        options = backend.build_request_options()
        opened.append(batcher(**options, slots=sampling.slots, context=context, wake=wake))
        return opened[-1]

    loop = ServerLoop(open_slots, 0, lambda events: None, ServerLoopLimits(max_waiting=2**31))
    requests = [
        ServedRequest(sequence, sampling, rules=rule)
        for sequence, rule in zip(sequences, rules, strict=True)
    ]
    try:
        loop.submit_requests(requests)
        while loop.step():
            pass
    finally:
        for slots in opened:
            slots.release_memory()
    for request in requests:
        if request.error is not None:
            raise request.error


def _resolve_judge_folder(path: str) -> str | Path:
    """Return the folder of a named model, a GGUF file, or a stage's result; any other path or hub name unchanged."""
    local = resolve_local_model(path)
    if local is not None:
        return local
    folder = Path(path).expanduser()
    has_model = (folder / "model").is_dir() and not (folder / "config.json").is_file()
    return folder / "model" if has_model else folder if folder.is_dir() else path


def create_judge_client(settings: JudgeSettings) -> JudgeClient:
    """Create the client of a judge. Raises: SettingsError for a judge that is not named."""
    return LocalClient(settings) if settings.path is not None else ServerClient(settings)
