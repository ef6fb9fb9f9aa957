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

from rl_core.environments.step_pool import Observation, PendingTurn, wait_for_any
from rl_core.errors import BackendError, SamplerMismatch, SettingsError
from rl_core.inference.sampling import RolloutSequence, check_prompt, check_weights
from rl_core.inference.transformers_backend import BackendRow
from rl_core.rollout_workers.http_connections import ServerAway, ServerRefusal, StaleAnswer
from rl_core.rollout_workers.server_checks import check_model, check_tokenizer
from rl_core.rollout_workers.server_dialect import OWN, InferenceServer, ServedTokens, ServerDescription
from rl_core.rollout_workers.server_weights import ServerWeights
from rl_core.rollout_workers.weight_folders import WeightFolders
from rl_core.settings import RolloutSettings, SamplingSettings

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["ServerBackend"]

logger = logging.getLogger(__name__)

T = TypeVar("T")
RECOVERIES = 8  # of one run: a server that is lost more often ends it
_LOOK_S = 0.25  # between two looks at overdue environment steps
_ASK_AGAIN_S = 1.0  # between two questions to a server that does not answer


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
        self.on_event: Callable[[str], None] | None = None  # told of every loss, in words for people
        self._left = RECOVERIES  # of the present run
        self.end_at(eos_ids)
        self.description: ServerDescription = self._patiently(self.server.describe)
        check_model(self.description, model, settings)
        self._is_asleep = self.description.sleeps and self._patiently(self.server.is_asleep)
        if tokenizer is not None:
            check_tokenizer(self.server, self.description, tokenizer)
        self.max_length = min(max_length, self.description.context)
        folders = WeightFolders(model, self.settings.folder)
        self.weights = ServerWeights(self.server, model, self.description, folders, bound)
        logger.info("rollouts are sampled by %s at %s", self.description.words, self.server.address)

    def end_at(self, eos_ids: Collection[int]) -> None:
        """Tokens that end an action from now on."""
        self._eos_ids = sorted(set(eos_ids))

    def refresh(self) -> None:
        """Notice that the model's weights may have changed; the next run sends them, if they have."""
        self.weights.refresh()

    def run(self, sequences: Sequence[RolloutSequence], sampling: SamplingSettings) -> None:
        """Play every sequence to its end, from the model's present weights.

        Raises: SamplerMismatch where the server samples from others; BackendError for one that is away for too long, or
            refuses; DataError for a prompt that is too long.
        """
        for sequence in sequences:
            check_prompt(sequence, self.max_length)
        if not sequences:
            return
        check_weights(self.weights.model)
        self._left = RECOVERIES
        self._bring(sampling)
        _Play(self, sampling).play(sequences)
        self.weights.check_unchanged()

    def rest(self) -> None:
        """Have the server give up its memory until the next run, where the settings say so."""
        if self.settings.sleeps and not self._is_asleep:
            self._patiently(self.server.sleep)
            self._is_asleep = True

    def metrics(self) -> dict[str, float]:
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

    def _bring(self, sampling: SamplingSettings) -> None:
        """`ServerWeights.bring`, again after each loss."""
        while True:
            try:
                if self._is_asleep:
                    self.server.wake()
                    self._is_asleep = False
                self.weights.bring(_Asker(self, self.max_length), sampling)
                return
            except ServerAway as away:
                self.recover(away)
            except ServerRefusal as refusal:
                raise _refused(refusal) from refusal

    def recover(self, away: ServerAway) -> None:
        """Wait for a server that was lost.

        Raises: BackendError after `patience_s`, or too many losses; SettingsError for one that cannot say who answers.
        """
        self._left -= 1
        self.recoveries += 1
        text = f"the inference server was lost ({away})"
        if self._left < 0:
            raise BackendError(f"{text} {RECOVERIES + 1} times within one collection; {_RESUMES}") from away
        logger.warning("%s; waiting up to %g s for it", text, self.settings.patience_s)
        if self.on_event is not None:
            self.on_event(text)
        self.server.close()
        state = self._patiently(self.server.state, away)
        if isinstance(away, StaleAnswer) and state.instance == self.weights.instance:
            raise SettingsError(
                f"rollouts.address: {away}, and its workers are of {state.instance}, so its answers cannot be told "
                "from those of other weights; start it with deployments/vllm/start.py"
            )
        if state.instance != self.weights.instance:  # a new process, with the weights of its start, awake
            self.weights.forget()
            self._is_asleep = False

    def recover_and_bring(self, away: ServerAway, sampling: SamplingSettings) -> None:
        """`recover`, and the weights again where they were lost."""
        self.recover(away)
        self._bring(sampling)

    def loss_behind(self, refusal: ServerRefusal) -> ServerAway:
        """The loss of a server that refuses since it was started again: it does not know the adapter (404).

        Raises: BackendError for any other refusal.
        """
        try:
            is_another = refusal.status == 404 and self.server.state().instance != self.weights.instance
        except ServerAway as away:
            return away
        if not is_another:
            raise _refused(refusal) from refusal
        return StaleAnswer(f"it was started again: {refusal}")

    def _patiently(self, ask: Callable[[], T], away: ServerAway | None = None) -> T:
        """Result of a question, asked until it is answered or `patience_s` are over."""
        end, problem = time.monotonic() + self.settings.patience_s, away
        while True:
            try:
                return ask()
            except ServerAway as error:
                problem = error
            except ServerRefusal as refusal:
                raise _refused(refusal) from refusal
            if time.monotonic() >= end:
                raise BackendError(
                    f"the inference server does not answer for {self.settings.patience_s:g} s ({problem}); start it "
                    f"again (docs/inference-servers.md): {_RESUMES}"
                ) from problem
            time.sleep(min(_ASK_AGAIN_S, max(0.0, end - time.monotonic())))

    def ask(self, row: BackendRow, sampling: SamplingSettings) -> ServedTokens:
        """The next tokens of a row; called on a thread, while nothing else touches it."""
        seed = row.sequence.seed
        if self.description.engine == OWN:
            drawn = {"seed": seed, "drawn": row.num_sampled}
        else:
            drawn = {"seed": _seed_of_turn(seed, row.num_sampled)}
        return self.server.complete(
            self.weights.name, row.ids, row.limit - len(row.ids), sampling, drawn, self._eos_ids
        )

    @property
    def eos_ids(self) -> Sequence[int]:
        """Tokens that end an action."""
        return self._eos_ids


_RESUMES = "the same command resumes"


def _refused(refusal: ServerRefusal) -> BackendError:
    return BackendError(f"the inference server refuses a request: {refusal}")


def _seed_of_turn(seed: int, drawn: int) -> int:
    """63 bits, as many as vLLM takes, for the tokens of a sequence after the first `drawn` ones."""
    digest = hashlib.blake2b(f"{seed}\x1f{drawn}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@dataclass
class _Asker:
    """A `RolloutBackend` that asks a server as it is: for the probe, which proves the weights."""

    backend: ServerBackend
    max_length: int

    def run(self, sequences: Sequence[RolloutSequence], sampling: SamplingSettings) -> None:
        """See `RolloutBackend`. Raises: ServerAway, too."""
        _Play(self.backend, sampling, recovers=False).play(sequences)

    def refresh(self) -> None:
        """Nothing is kept."""

    def end_at(self, eos_ids: Collection[int]) -> None:
        """See `RolloutBackend`."""
        self.backend.end_at(eos_ids)


@dataclass
class _Play:
    """One run: rows that are asked for, and rows that wait for their environment. Only requests leave the thread."""

    backend: ServerBackend
    sampling: SamplingSettings
    recovers: bool = True
    _todo: deque[BackendRow] = field(default_factory=deque)
    _asked: dict[Future[ServedTokens], BackendRow] = field(default_factory=dict)
    _in_environment: dict[BackendRow, PendingTurn] = field(default_factory=dict)
    _owed: list[BackendRow] = field(default_factory=list)  # their request was lost, or not sent after a loss
    _away: ServerAway | None = None

    def play(self, sequences: Sequence[RolloutSequence]) -> None:
        """Every sequence to its end."""
        most = self.backend.max_length
        self._todo.extend(BackendRow(sequence, self.sampling, most) for sequence in sequences)
        pool = ThreadPoolExecutor(min(self.backend.settings.concurrency, len(self._todo)), "inference-server")
        try:
            while self._todo or self._asked or self._in_environment or self._owed:
                self._step(pool)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            self.backend.server.close()  # requests under way fail at once
            raise
        pool.shutdown()

    def _step(self, pool: ThreadPoolExecutor) -> None:
        if self._owed and not self._asked:
            assert self._away is not None
            if not self.recovers:
                raise self._away
            self.backend.recover_and_bring(self._away, self.sampling)
            self._todo.extend(self._owed)
            self._owed, self._away = [], None
        while self._todo and not self._owed:
            row = self._todo.popleft()
            self._asked[pool.submit(self.backend.ask, row, self.sampling)] = row
        if not self._asked:
            if self._in_environment and not self._owed:
                wait_for_any(self._in_environment.values())
        else:
            steps = [turn.call.future for turn in self._in_environment.values()]
            done, _ = wait([*self._asked, *steps], timeout=_LOOK_S, return_when=FIRST_COMPLETED)
            for future in [future for future in self._asked if future in done]:
                self._take(self._asked.pop(future), future)
        for row in [row for row, turn in self._in_environment.items() if turn.done()]:
            self._go_on(row, self._in_environment.pop(row).result())

    def _take(self, row: BackendRow, future: Future[ServedTokens]) -> None:
        """Go on with a row after the answer to its request, or note that it was lost."""
        try:
            served = future.result()
        except ServerAway as away:
            self._owe(row, away)
            return
        except ServerRefusal as refusal:
            self._owe(row, self.backend.loss_behind(refusal))
            return
        if served.instance != self.backend.weights.instance:
            self._owe(row, StaleAnswer(f"it was started again: an answer is of process {served.instance}"))
            return
        if not served.tokens:  # vLLM ends what it has not begun in this way when it is stopped
            self._owe(row, ServerAway("an answer has no token"))
            return
        self._add(row, served)

    def _add(self, row: BackendRow, served: ServedTokens) -> None:
        """Go on with a row after its next tokens. Raises: BackendError, SamplerMismatch for those that cannot be."""
        vocabulary = self.backend.description.shape["vocab_size"]
        for token, logprob in zip(served.tokens, served.logprobs, strict=True):
            if not 0 <= token < vocabulary:
                raise BackendError(f"the inference server sampled token {token}, and the vocabulary has {vocabulary}")
            if not math.isfinite(logprob):
                raise SamplerMismatch(
                    f"{self.backend.weights.who}: it tells {logprob} as the log-prob of a token that it sampled, so "
                    f"its activations overflow ({self.backend.description.dtype}), or the token is of another "
                    "distribution. None of its rollouts is used"
                )
            row.add(token, logprob)
            if row.has_acted(self.backend.eos_ids):
                turn = row.end_turn(self.backend.eos_ids)
                if isinstance(turn, PendingTurn):
                    self._in_environment[row] = turn
                else:
                    self._go_on(row, turn)
                return
        self._todo.append(row)  # it saw a stop text where the trainer sees none

    def _owe(self, row: BackendRow, away: ServerAway) -> None:
        """Note a lost request; those that have not been sent wait for the server, too."""
        self._owed.append(row)
        self._away = away
        for future in [future for future in self._asked if future.cancel()]:
            self._owed.append(self._asked.pop(future))

    def _go_on(self, row: BackendRow, observation: Observation) -> None:
        if row.goes_on(observation):
            self._todo.append(row)
