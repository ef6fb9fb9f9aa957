"""A rollout backend over an inference server: tokens over HTTP, episodes and their environments in this process.

Each turn of a sequence is one request, so that a sequence waits for nothing but its own tokens and its own environment.
Stop texts and ends are looked for here, in the tokens, as everywhere; the server's own stopping only saves work.
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
from rl_core.rollout_workers.server_weights import ServerWeights, WeightFolders
from rl_core.settings import RolloutSettings, SamplingSettings

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


logger = logging.getLogger(__name__)

T = TypeVar("T")
MAX_RECOVERIES = 8  # of one run: a server that is lost more often ends it
_POLL_INTERVAL_S = 0.25  # between two looks at overdue environment steps
_RETRY_INTERVAL_S = 1.0  # between two questions to a server that does not answer


class ServerBackend:
    """A `RolloutBackend` whose tokens come from an inference server.

    A server that is gone is waited for, `patience_s` at a time and RECOVERIES times in a run; it gets the weights
    again, and the turns that it owed are asked for anew. Environments notice nothing.
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
    ) -> None:
        """Ask the server who it is; nothing is sent yet.

        Args:
            tokenizer: compared with the server's; None = not.
            max_length: longest sequence of the model, in tokens; that of the server may be shorter.
            bound: see `ServerWeights`.
        Raises: SettingsError for a server that cannot sample this model as `settings` say; BackendError for one that
            does not answer within `patience_s`.
        """
        self.settings = settings.server
        self.server = InferenceServer(settings)
        self.recoveries = 0  # since the beginning
        # told of every loss, in words for people
        self.on_event: Callable[[str], None] | None = None
        self._recoveries_left = MAX_RECOVERIES  # of the present run
        self.set_end_tokens(eos_ids)
        self.description: ServerDescription = self._retry_until_available(
            self.server.describe_server
        )
        check_served_model(self.description, model, settings)
        self._is_asleep = self.description.sleeps and self._retry_until_available(
            self.server.is_asleep
        )
        if tokenizer is not None:
            check_server_tokenizer(self.server, self.description, tokenizer)
        self.max_length = min(max_length, self.description.context)
        folders = WeightFolders(model, self.settings.folder)
        self.weights = ServerWeights(self.server, model, self.description, folders, bound)
        logger.info(
            "rollouts are sampled by %s at %s", self.description.engine_label, self.server.address
        )

    def set_end_tokens(self, eos_ids: Collection[int]) -> None:
        """Tokens that end an action from now on."""
        self._eos_ids = sorted(set(eos_ids))

    def refresh_weights(self) -> None:
        """Notice that the model's weights may have changed; the next run sends them, if they have."""
        self.weights.mark_changed()

    def run_sequences(
        self, sequences: Sequence[RolloutSequence], sampling: SamplingSettings
    ) -> None:
        """Play every sequence to its end, from the model's present weights.

        Raises: SamplerMismatch where the server samples from others; BackendError for one that is away for too long, or
            refuses; DataError for a prompt that is too long.
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
        """Have the server give up its memory until the next run, where the settings say so."""
        if self.settings.sleeps and not self._is_asleep:
            self._retry_until_available(self.server.sleep_server)
            self._is_asleep = True

    def collect_metrics(self) -> dict[str, float]:
        """Size of the newest weights, losses since the beginning, and the newest difference to the trainer."""
        return {
            "perf/weight_bytes": float(self.weights.sent_bytes),
            "perf/server_recoveries": float(self.recoveries),
            "policy/server_difference": self.weights.difference,
        }

    def close(self) -> None:
        """Leave the server as it was found, but for the weights in it, and remove what was written."""
        self.weights.close()
        self.server.close()

    # A server that may be away

    def _sync_weights(self, sampling: SamplingSettings) -> None:
        """`ServerWeights.bring`, again after each loss."""
        while True:
            try:
                if self._is_asleep:
                    self.server.wake_server()
                    self._is_asleep = False
                self.weights.sync_weights(_ProbeBackend(self, self.max_length), sampling)
                return
            except ServerUnavailable as away:
                self.wait_for_recovery(away)
            except ServerErrorResponse as refusal:
                raise _build_refusal_error(refusal) from refusal

    def wait_for_recovery(self, error: ServerUnavailable) -> None:
        """Wait for a server that was lost.

        Raises: BackendError after `patience_s`, or too many losses; SettingsError for one that cannot say who answers.
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
                f"rollouts.address: {error}, and its workers are of {state.instance}, so its answers cannot be told "
                "from those of other weights; start it with deployments/vllm/start.py"
            )
        if (
            state.instance != self.weights.instance
        ):  # a new process, with the weights of its start, awake
            self.weights.forget_server_state()
            self._is_asleep = False

    def recover_and_sync_weights(
        self, error: ServerUnavailable, sampling: SamplingSettings
    ) -> None:
        """`recover`, and the weights again where they were lost."""
        self.wait_for_recovery(error)
        self._sync_weights(sampling)

    def classify_refusal(self, refusal: ServerErrorResponse) -> ServerUnavailable:
        """The loss of a server that refuses since it was started again: it does not know the adapter (404).

        Raises: BackendError for any other refusal.
        """
        try:
            is_another = (
                refusal.status == 404 and self.server.read_state().instance != self.weights.instance
            )
        except ServerUnavailable as away:
            return away
        if not is_another:
            raise _build_refusal_error(refusal) from refusal
        return StaleServerResponse(f"it was started again: {refusal}")

    def _retry_until_available(
        self, request: Callable[[], T], away: ServerUnavailable | None = None
    ) -> T:
        """Result of a question, asked until it is answered or `patience_s` are over."""
        end, problem = time.monotonic() + self.settings.patience_s, away
        while True:
            try:
                return request()
            except ServerUnavailable as error:
                problem = error
            except ServerErrorResponse as refusal:
                raise _build_refusal_error(refusal) from refusal
            if time.monotonic() >= end:
                raise BackendError(
                    f"the inference server does not answer for {self.settings.patience_s:g} s ({problem}); start it "
                    f"again (docs/inference-servers.md): {_RESUME_HINT}"
                ) from problem
            time.sleep(min(_RETRY_INTERVAL_S, max(0.0, end - time.monotonic())))

    def request_tokens(self, row: BackendRow, sampling: SamplingSettings) -> ServedTokens:
        """The next tokens of a row; called on a thread, while nothing else touches it."""
        seed = row.sequence.seed
        if self.description.engine == POSTTRAIN_ENGINE:
            drawn = {"seed": seed, "drawn": row.num_sampled}
        else:
            drawn = {"seed": _derive_turn_seed(seed, row.num_sampled)}
        return self.server.sample_completion(
            self.weights.name, row.ids, row.limit - len(row.ids), sampling, drawn, self._eos_ids
        )

    @property
    def eos_ids(self) -> Sequence[int]:
        """Tokens that end an action."""
        return self._eos_ids


_RESUME_HINT = "the same command resumes"


def _build_refusal_error(refusal: ServerErrorResponse) -> BackendError:
    return BackendError(f"the inference server refuses a request: {refusal}")


def _derive_turn_seed(seed: int, drawn: int) -> int:
    """63 bits, as many as vLLM takes, for the tokens of a sequence after the first `drawn` ones."""
    digest = hashlib.blake2b(f"{seed}\x1f{drawn}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@dataclass
class _ProbeBackend:
    """A `RolloutBackend` that asks a server as it is: for the probe, which proves the weights."""

    backend: ServerBackend
    max_length: int

    def run_sequences(
        self, sequences: Sequence[RolloutSequence], sampling: SamplingSettings
    ) -> None:
        """See `RolloutBackend`. Raises: ServerAway, too."""
        _ServerRun(self.backend, sampling, can_recover=False).run_sequences(sequences)

    def refresh_weights(self) -> None:
        """Nothing is kept."""

    def set_end_tokens(self, eos_ids: Collection[int]) -> None:
        """See `RolloutBackend`."""
        self.backend.set_end_tokens(eos_ids)


@dataclass
class _ServerRun:
    """One run: rows that are asked for, and rows that wait for their environment. Only requests leave the thread."""

    backend: ServerBackend
    sampling: SamplingSettings
    can_recover: bool = True
    _ready_rows: deque[BackendRow] = field(default_factory=deque)
    _pending_requests: dict[Future[ServedTokens], BackendRow] = field(default_factory=dict)
    _in_environment: dict[BackendRow, PendingTurn] = field(default_factory=dict)
    # their request was lost, or not sent after a loss
    _unanswered_rows: list[BackendRow] = field(default_factory=list)
    _unavailable_error: ServerUnavailable | None = None

    def run_sequences(self, sequences: Sequence[RolloutSequence]) -> None:
        """Every sequence to its end."""
        most = self.backend.max_length
        self._ready_rows.extend(BackendRow(sequence, self.sampling, most) for sequence in sequences)
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
            self.backend.server.close()  # requests under way fail at once
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
            self._pending_requests[pool.submit(self.backend.request_tokens, row, self.sampling)] = (
                row
            )
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
        """Go on with a row after the answer to its request, or note that it was lost."""
        try:
            served = future.result()
        except ServerUnavailable as away:
            self._requeue_row(row, away)
            return
        except ServerErrorResponse as refusal:
            self._requeue_row(row, self.backend.classify_refusal(refusal))
            return
        if served.instance != self.backend.weights.instance:
            self._requeue_row(
                row,
                StaleServerResponse(
                    f"it was started again: an answer is of process {served.instance}"
                ),
            )
            return
        if not served.tokens:  # vLLM ends what it has not begun in this way when it is stopped
            self._requeue_row(row, ServerUnavailable("an answer has no token"))
            return
        self._append_tokens(row, served)

    def _append_tokens(self, row: BackendRow, served: ServedTokens) -> None:
        """Go on with a row after its next tokens. Raises: BackendError, SamplerMismatch for those that cannot be."""
        vocabulary = self.backend.description.shape["vocab_size"]
        for token, logprob in zip(served.tokens, served.logprobs, strict=True):
            if not 0 <= token < vocabulary:
                raise BackendError(
                    f"the inference server sampled token {token}, and the vocabulary has {vocabulary}"
                )
            if not math.isfinite(logprob):
                raise SamplerMismatch(
                    f"{self.backend.weights.server_label}: it tells {logprob} as the log-prob of a token that it sampled, so "
                    f"its activations overflow ({self.backend.description.dtype}), or the token is of another "
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
        self._ready_rows.append(row)  # it saw a stop text where the trainer sees none

    def _requeue_row(self, row: BackendRow, error: ServerUnavailable) -> None:
        """Note a lost request; those that have not been sent wait for the server, too."""
        self._unanswered_rows.append(row)
        self._unavailable_error = error
        for future in [future for future in self._pending_requests if future.cancel()]:
            self._unanswered_rows.append(self._pending_requests.pop(future))

    def _continue_row(self, row: BackendRow, observation: Observation) -> None:
        if row.append_observation(observation):
            self._ready_rows.append(row)
