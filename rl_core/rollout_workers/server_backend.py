"""A rollout backend over an inference server: tokens come over HTTP; episodes and environments run in this process.

Each turn of a sequence is one request, so a sequence waits only for its own tokens and its own environment. Stop
texts and end tokens are detected here, in the tokens, as in every backend; the server's stopping only saves work.
"""

from __future__ import annotations

import hashlib
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from rl_core.data.token_ids import find_textless_ids
from rl_core.environments.step_pool import Observation, PendingTurn, wait_for_any_turn
from rl_core.errors import BackendError, SamplerMismatch, SettingsError
from rl_core.inference.sampling import RolloutSequence, check_prompt, check_weights
from rl_core.inference.transformers_backend import BackendRow
from rl_core.json_client import ServerErrorResponse, ServerUnavailable, StaleServerResponse
from rl_core.rollout_workers.inference_server import (
    POSTTRAIN_ENGINE,
    InferenceServer,
    ServedTokens,
    ServerDescription,
    check_served_model,
    check_server_tokenizer,
)
from rl_core.rollout_workers.managed_server import ManagedServer
from rl_core.rollout_workers.sampler_probe import encode_probe_texts
from rl_core.rollout_workers.server_weights import ServerWeights, WeightFolders
from rl_core.settings import RolloutSettings, SamplingSettings

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


logger = logging.getLogger(__name__)

T = TypeVar("T")
MAX_RECOVERIES = 8  # per run; more losses of the server end it
_POLL_INTERVAL_S = 0.25  # between two checks for overdue environment steps
_RETRY_INTERVAL_S = 1.0  # between two requests to a server that does not answer
_RESUME_HINT = "the same command resumes"


class ServerBackend:
    """A `RolloutBackend` whose tokens come from an inference server.

    If the server is lost, the backend waits for it, `patience_s` at a time and MAX_RECOVERIES times per run, or starts
    its own again. Then it sends the weights and repeats the unanswered requests. Environments are not affected.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None,
        settings: RolloutSettings,
        *,
        eos_ids: Collection[int],
        max_length: int,
        bound: float | None = None,
        process: ManagedServer | None = None,
    ) -> None:
        """Request the server's description; send no weights.

        Args:
            tokenizer: compared with the server's; None = no comparison.
            max_length: longest sequence of the model in tokens; the server's may be shorter.
            bound: see `ServerWeights`.
            process: restarted when it ends, and closed with the backend; None = somebody else runs the server.
        Raises: SettingsError for a server that cannot sample this model with these settings; BackendError for one
            that does not answer within `patience_s`.
        """
        self.settings = settings.server
        self.server = InferenceServer(settings)
        self._process = process
        self.recoveries = 0  # so far
        # called with a message for every loss
        self.on_event: Callable[[str], None] | None = None
        self._recoveries_left = MAX_RECOVERIES  # in the current run
        self.set_end_tokens(eos_ids)
        self.description: ServerDescription = self._retry_until_available(
            self.server.describe_server
        )
        check_served_model(self.description, model, settings)
        # posttrain's server never samples them
        if tokenizer is not None and self.description.engine != POSTTRAIN_ENGINE:
            size = self.description.shape["vocab_size"]
            self.server.textless_ids = find_textless_ids(tokenizer, size)
        self._is_asleep = self.description.sleeps and self._retry_until_available(
            self.server.is_asleep
        )
        if tokenizer is not None:
            check_server_tokenizer(self.server, self.description, tokenizer)
        self.max_length = min(max_length, self.description.context)
        folders = WeightFolders(model, self.settings.folder)
        prompts = () if tokenizer is None else encode_probe_texts(tokenizer, self.max_length)
        self.weights = ServerWeights(self.server, model, self.description, folders, bound, prompts)
        logger.info(
            "rollouts are sampled by %s at %s", self.description.engine_label, self.server.address
        )

    def set_end_tokens(self, eos_ids: Collection[int]) -> None:
        """Set the tokens that end an action."""
        self._eos_ids = sorted(set(eos_ids))

    def refresh_weights(self) -> None:
        """Mark the model's weights as possibly changed; the next run sends them if they have changed."""
        self.weights.mark_changed()

    def run_sequences(
        self, sequences: Sequence[RolloutSequence], sampling: SamplingSettings
    ) -> None:
        """Play every sequence to its end, from the model's current weights.

        Raises: SamplerMismatch if the server samples from others; BackendError if it is unavailable for too long or
            rejects a request; DataError for a prompt that is too long.
        """
        for sequence in sequences:
            check_prompt(sequence, self.max_length)
        if not sequences:
            return
        check_weights(self.weights.model)
        self._recoveries_left = MAX_RECOVERIES
        self._sync_weights(sampling)
        _ServerRun(self, sampling).run_sequences(sequences)
        self.weights.check_weights_unchanged()

    def put_server_to_sleep(self) -> None:
        """Release the server's memory until the next run, if the settings say so."""
        if self.settings.sleeps and not self._is_asleep:
            self._retry_until_available(self.server.sleep_server)
            self._is_asleep = True

    def collect_metrics(self) -> dict[str, float]:
        """Return the size of the newest weights, the losses so far, and the newest difference from the trainer."""
        return {
            "perf/weight_bytes": float(self.weights.sent_bytes),
            "perf/server_recoveries": float(self.recoveries),
            "policy/server_difference": self.weights.difference,
        }

    def close(self) -> None:
        """Unload what this run loaded, except the weights, and remove written files."""
        self.weights.close()
        self.server.close()
        if self._process is not None:
            self._process.close()

    def _sync_weights(self, sampling: SamplingSettings) -> None:
        """Run `ServerWeights.sync_weights`, again after each loss."""
        while True:
            try:
                if self._is_asleep:
                    self.server.wake_server()
                    self._is_asleep = False
                self.weights.sync_weights(_ProbeBackend(self, self.max_length), sampling)
                return
            except ServerUnavailable as error:
                self.wait_for_recovery(error)
            except ServerErrorResponse as refusal:
                raise _build_refusal_error(refusal) from refusal

    def wait_for_recovery(self, error: ServerUnavailable) -> None:
        """Wait for a lost server.

        Raises: BackendError after `patience_s` or too many losses; SettingsError if its answers do not identify its
            process.
        """
        self._recoveries_left -= 1
        self.recoveries += 1
        text = f"the inference server was lost ({error})"
        if self._recoveries_left < 0:
            raise BackendError(
                f"{text} {MAX_RECOVERIES + 1} times within one collection; {_RESUME_HINT}"
            ) from error
        logger.warning("%s; waiting up to %g s for it", text, self.settings.patience_s)
        if self.on_event is not None:
            self.on_event(text)
        self.server.close()
        state = self._retry_until_available(self.server.read_state, error)
        if isinstance(error, StaleServerResponse) and state.instance == self.weights.instance:
            raise SettingsError(
                f"rollouts.address: {error}, but its workers report process {state.instance}, so answers cannot be "
                "attributed to their weights; start it with deployments/vllm/start.py"
            )
        if (
            state.instance != self.weights.instance
        ):  # a new process: awake, with its initial weights
            self.weights.forget_server_state()
            self._is_asleep = False

    def recover_and_sync_weights(
        self, error: ServerUnavailable, sampling: SamplingSettings
    ) -> None:
        """Wait for a lost server, and send the weights again if it lost them."""
        self.wait_for_recovery(error)
        self._sync_weights(sampling)

    def classify_refusal(self, refusal: ServerErrorResponse) -> ServerUnavailable:
        """Return the loss behind an error of a restarted server: it does not know the adapter (404).

        Raises: BackendError for any other error.
        """
        try:
            is_restarted = (
                refusal.status == 404 and self.server.read_state().instance != self.weights.instance
            )
        except ServerUnavailable as error:
            return error
        if not is_restarted:
            raise _build_refusal_error(refusal) from refusal
        return StaleServerResponse(f"it was restarted: {refusal}")

    def _retry_until_available(
        self, request: Callable[[], T], away: ServerUnavailable | None = None
    ) -> T:
        """Repeat a request until it is answered or `patience_s` have passed; return its result.

        A server of this process that has ended is started again once.
        """
        process = self._process
        end, problem = time.monotonic() + self.settings.patience_s, away
        while True:
            try:
                return request()
            except ServerUnavailable as error:
                problem = error
            except ServerErrorResponse as refusal:
                raise _build_refusal_error(refusal) from refusal
            if process is not None and process.restart_if_ended():
                process, end = None, time.monotonic() + self.settings.patience_s
                continue
            if time.monotonic() >= end:
                raise BackendError(
                    f"the inference server has not answered for {self.settings.patience_s:g} s ({problem}); start it "
                    f"again (docs/scaling.md): {_RESUME_HINT}"
                ) from problem
            time.sleep(min(_RETRY_INTERVAL_S, max(0.0, end - time.monotonic())))

    def request_tokens(self, row: BackendRow, sampling: SamplingSettings) -> ServedTokens:
        """Request the next tokens of a row; called on a pool thread while nothing else touches the row."""
        seed = row.sequence.seed
        if self.description.engine == POSTTRAIN_ENGINE:
            seed_fields = {"seed": seed, "drawn": row.num_sampled}
        else:
            seed_fields = {"seed": _derive_turn_seed(seed, row.num_sampled)}
        return self.server.sample_completion(
            self.weights.name,
            row.ids,
            row.limit - len(row.ids),
            sampling,
            seed_fields,
            self._eos_ids,
        )

    @property
    def eos_ids(self) -> Sequence[int]:
        """Tokens that end an action."""
        return self._eos_ids


def _build_refusal_error(refusal: ServerErrorResponse) -> BackendError:
    return BackendError(f"the inference server refuses a request: {refusal}")


def _derive_turn_seed(seed: int, drawn: int) -> int:
    """Derive a seed of 63 bits, vLLM's limit, for the tokens of a sequence after the first `drawn` ones."""
    digest = hashlib.blake2b(f"{seed}\x1f{drawn}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@dataclass
class _ProbeBackend:
    """A `RolloutBackend` over the server as it is, for the probe that verifies the weights."""

    backend: ServerBackend
    max_length: int

    def run_sequences(
        self, sequences: Sequence[RolloutSequence], sampling: SamplingSettings
    ) -> None:
        """See `RolloutBackend`.

        Raises: also ServerUnavailable.
        """
        _ServerRun(self.backend, sampling, can_recover=False).run_sequences(sequences)

    def refresh_weights(self) -> None:
        """Do nothing: nothing is cached."""

    def set_end_tokens(self, eos_ids: Collection[int]) -> None:
        """See `RolloutBackend`."""
        self.backend.set_end_tokens(eos_ids)


@dataclass
class _ServerRun:
    """One run: rows with a pending request, and rows that wait for their environment.

    Only requests run on other threads.
    """

    backend: ServerBackend
    sampling: SamplingSettings
    can_recover: bool = True
    _ready_rows: deque[BackendRow] = field(default_factory=deque)
    _pending_requests: dict[Future[ServedTokens], BackendRow] = field(default_factory=dict)
    _in_environment: dict[BackendRow, PendingTurn] = field(default_factory=dict)
    # rows whose request was lost, or not sent because of a loss
    _unanswered_rows: list[BackendRow] = field(default_factory=list)
    _unavailable_error: ServerUnavailable | None = None

    def run_sequences(self, sequences: Sequence[RolloutSequence]) -> None:
        """Play every sequence to its end."""
        max_length = self.backend.max_length
        self._ready_rows.extend(
            BackendRow(sequence, self.sampling, max_length) for sequence in sequences
        )
        pool = ThreadPoolExecutor(
            min(self.backend.settings.concurrency, len(self._ready_rows)), "inference-server"
        )
        try:
            while (
                self._ready_rows
                or self._pending_requests
                or self._in_environment
                or self._unanswered_rows
            ):
                self._run_step(pool)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            self.backend.server.close()  # pending requests fail immediately
            raise
        pool.shutdown()

    def _run_step(self, pool: ThreadPoolExecutor) -> None:
        if self._unanswered_rows and not self._pending_requests:
            assert self._unavailable_error is not None
            if not self.can_recover:
                raise self._unavailable_error
            self.backend.recover_and_sync_weights(self._unavailable_error, self.sampling)
            self._ready_rows.extend(self._unanswered_rows)
            self._unanswered_rows, self._unavailable_error = [], None
        while self._ready_rows and not self._unanswered_rows:
            row = self._ready_rows.popleft()
            future = pool.submit(self.backend.request_tokens, row, self.sampling)
            self._pending_requests[future] = row
        if not self._pending_requests:
            if self._in_environment and not self._unanswered_rows:
                wait_for_any_turn(self._in_environment.values())
        else:
            steps = [turn.call.future for turn in self._in_environment.values()]
            done, _ = wait(
                [*self._pending_requests, *steps],
                timeout=_POLL_INTERVAL_S,
                return_when=FIRST_COMPLETED,
            )
            for future in [future for future in self._pending_requests if future in done]:
                self._process_response(self._pending_requests.pop(future), future)
        for row in [row for row, turn in self._in_environment.items() if turn.is_done()]:
            self._continue_row(row, self._in_environment.pop(row).finish_turn())

    def _process_response(self, row: BackendRow, future: Future[ServedTokens]) -> None:
        """Continue a row with the answer to its request, or record that the request was lost."""
        try:
            served = future.result()
        except ServerUnavailable as lost:
            self._requeue_row(row, lost)
            return
        except ServerErrorResponse as refusal:
            self._requeue_row(row, self.backend.classify_refusal(refusal))
            return
        if served.instance != self.backend.weights.instance:
            error = StaleServerResponse(f"it was restarted: process {served.instance} answered")
            self._requeue_row(row, error)
            return
        if not served.tokens:  # when vLLM is stopped, requests that have not begun end this way
            self._requeue_row(row, ServerUnavailable("an answer has no token"))
            return
        self._append_tokens(row, served)

    def _append_tokens(self, row: BackendRow, served: ServedTokens) -> None:
        """Append tokens to a row and continue it.

        Raises: BackendError, SamplerMismatch for invalid tokens.
        """
        vocabulary = self.backend.description.shape["vocab_size"]
        for token, logprob in zip(served.tokens, served.logprobs, strict=True):
            if not 0 <= token < vocabulary:
                raise BackendError(
                    f"the inference server sampled token {token}, and the vocabulary has {vocabulary}"
                )
            if not math.isfinite(logprob):
                raise SamplerMismatch(
                    f"{self.backend.weights.server_label}: it returned {logprob} as the log-prob of a sampled token, "
                    f"so its activations overflow ({self.backend.description.dtype}), or the token comes from another "
                    "distribution. None of its rollouts is used"
                )
            row.add_token(token, logprob)
            if row.has_acted(self.backend.eos_ids):
                turn = row.end_turn(self.backend.eos_ids)
                if isinstance(turn, PendingTurn):
                    self._in_environment[row] = turn
                else:
                    self._continue_row(row, turn)
                return
        self._ready_rows.append(row)  # the server found a stop text that the trainer does not find

    def _requeue_row(self, row: BackendRow, error: ServerUnavailable) -> None:
        """Record a lost request; rows whose request is not sent yet wait for the server too."""
        self._unanswered_rows.append(row)
        self._unavailable_error = error
        for future in [future for future in self._pending_requests if future.cancel()]:
            self._unanswered_rows.append(self._pending_requests.pop(future))

    def _continue_row(self, row: BackendRow, observation: Observation) -> None:
        if row.append_observation(observation):
            self._ready_rows.append(row)
