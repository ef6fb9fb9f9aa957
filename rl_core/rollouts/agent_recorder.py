"""The record of one agent's episode: its calls, the contexts that they form, and the rollout built from them.

A call whose messages begin with those of an earlier call and the reply to it continues that call's token ids; nothing
is tokenised twice. Any other history begins a new context. Calls that were in flight together are ordered by their
content, so the record does not depend on which of them came first.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from rl_core.chat.answer_rules import AnswerRules
from rl_core.chat.prompts import ParsedAnswer, PromptBuilder, RenderedChat
from rl_core.chat.requests import (
    ChatRequest,
    ChatRequestError,
    build_message_key,
    build_reply_key,
    export_message,
)
from rl_core.data.model_text import convert_to_plain_json, replace_unprintable
from rl_core.environments.agent import AgentCall, AgentEpisode, AgentScore
from rl_core.inference.sampling import compute_sequence_seed
from rl_core.inference.serving_requests import AnswerSequence
from rl_core.inference.token_rules import TokenRules
from rl_core.settings import SamplingSettings
from rl_core.types import Message, Rollout, StopReason, ToolCall, Trajectory, Turn

_HistoryKey = tuple[str, ...]  # one text per message, equal for equal messages
# Wave of the call, number of answers that its context has before it, digest of its content, number of equal calls
# before it, choice. A wave is a set of calls that were in flight together.
_Order = tuple[int, int, str, int, int]


class EpisodeLimitReached(ChatRequestError):
    """A call beyond the limits of the run's sampling."""


@dataclass(eq=False, slots=True)
class RecordedAnswer:
    """One sampled answer; a request with `n` choices has several."""

    order: _Order  # position in the record
    parent: RecordedAnswer | None  # whose context it continues
    prompt_ids: list[int]
    tokens: list[int]
    logprobs: list[float]  # of the tokens, nats, under the distribution that they were drawn from
    sampling: SamplingSettings
    text: str
    parsed: ParsedAnswer
    messages: list[dict[str, Any]]  # of the request
    reply: dict[str, Any]
    finish_reason: str
    is_cut: bool  # True = cut by a limit of the run, not of the agent
    policy_version: int | None = None  # of the weights that sampled it
    has_rules: bool = False  # True = drawn under a grammar, biases or penalties

    @property
    def num_inherited(self) -> int:
        """Number of tokens of its prompt that are its parent's prompt and answer."""
        return 0 if self.parent is None else len(self.parent.prompt_ids) + len(self.parent.tokens)

    @property
    def num_counted_tokens(self) -> int:
        """Tokens that count towards sampling.max_completion_tokens: all but prompts of new contexts."""
        observed = 0 if self.parent is None else len(self.prompt_ids) - self.num_inherited
        return observed + len(self.tokens)


@dataclass(frozen=True, slots=True)
class PreparedCall:
    """A checked request, ready to be sampled."""

    order: tuple[int, int, str, int]  # of its answers, without their choice
    request: ChatRequest
    rendered: RenderedChat
    history: _HistoryKey
    schemas: str
    parent: RecordedAnswer | None
    prompt_ids: list[int]
    sampling: SamplingSettings
    seed: int
    is_limited: bool  # True = the run's limit is lower than the agent's max_tokens
    token_rules: TokenRules | None = None
    has_grammar: bool = False

    def compute_choice_seed(self, choice: int) -> int:
        """Return the seed of one choice."""
        return compute_sequence_seed(self.seed, choice)


@dataclass(frozen=True, slots=True)
class SampledChoice:
    """One sampled choice of a call, and the message that is sent back."""

    sequence: AnswerSequence
    parsed: ParsedAnswer
    text: str
    reply: dict[str, Any]
    finish_reason: str
    policy_version: int | None
    has_rules: bool = False


@dataclass(slots=True)
class _Clock:
    """Seconds in which no call was in flight."""

    agent_seconds: float = 0.0
    idle_since: float | None = None  # None = a call is in flight, or the agent has not begun

    def begin_idle(self) -> None:
        self.idle_since = time.monotonic()

    def end_idle(self) -> None:
        if self.idle_since is not None:
            self.agent_seconds += time.monotonic() - self.idle_since
            self.idle_since = None

    def measure(self) -> float:
        since = self.idle_since
        return self.agent_seconds + (0.0 if since is None else time.monotonic() - since)


@dataclass(slots=True)
class AgentSession:
    """One episode that is being played. Thread-safe: an agent may send several requests at once."""

    number: int  # of the episode, among those that are played together
    episode: AgentEpisode
    seed: int  # of the sampling
    sample: int  # index within its group
    sampling: SamplingSettings  # of the run
    prompts: PromptBuilder
    context: int  # most tokens of a prompt and its answer
    # True = temperature, top_p, top_k, min_p, biases and penalties of requests are ignored
    uses_run_sampling: bool
    # False = a tool_choice that demands a call is treated as auto: the policy decides, and learns from what follows
    obeys_tool_choice: bool = False
    answers: list[RecordedAnswer] = field(default_factory=list)
    score: Any = None  # posted by the agent
    limit: StopReason | None = None  # of the run's sampling, once a call was refused for it
    is_closed: bool = False
    _known: dict[tuple[str, _HistoryKey], list[RecordedAnswer]] = field(default_factory=dict)
    _times_seen: Counter[str] = field(default_factory=Counter)
    _num_calls: int = 0
    _in_flight: set[tuple[int, int, str, int]] = field(default_factory=set)  # orders of calls
    _wave: int = 0  # number of times that a call began while no other was in flight
    _clock: _Clock = field(default_factory=_Clock)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def agent_seed(self) -> int:
        """Seed for random numbers of the agent."""
        return self.seed % 2**31

    def start_clock(self) -> None:
        """Start to count the agent's computing time."""
        self._clock.begin_idle()

    def measure_agent_seconds(self) -> float:
        """Return the seconds since the start in which the agent did not wait for the policy."""
        with self._lock:
            return self._clock.measure()

    def close(self) -> None:
        """Refuse further calls; those in flight are not recorded."""
        with self._lock:
            self.is_closed = True

    def begin_call(self, request: ChatRequest) -> PreparedCall:
        """Check a request and build its prompt; `finish_call` or `abandon_call` must follow.

        Raises: ChatRequestError; EpisodeLimitReached beyond max_turns, max_completion_tokens or the context.
        """
        rendered = self._render(request)
        rules = self._choose_rules(request)
        token_rules = None
        if rules != AnswerRules():
            token_rules = self.prompts.compile_rules(rules, request.tools)
        schemas = json.dumps(request.tools, sort_keys=True)
        history = tuple(map(build_message_key, request.messages))
        with self._lock:
            if self._num_calls >= self.sampling.max_turns:
                self._refuse_beyond(
                    StopReason.MAX_TURNS,
                    f"the episode has used its {self.sampling.max_turns} calls (sampling.max_turns)",
                )
            parent, prompt_ids = self._build_prompt(rendered, schemas, history)
            wave = self._wave + (not self._in_flight)
            max_tokens, is_limited = self._limit_answer(request, wave, parent, prompt_ids)
            sampling = self._choose_sampling(request, max_tokens)
            digest = _digest_call(prompt_ids, schemas, sampling, request.stop, rules)
            depth = 0 if parent is None else parent.order[1] + 1
            order = (wave, depth, digest, self._times_seen[digest])
            self._wave = wave
            self._times_seen[digest] += 1
            self._num_calls += 1
            self._in_flight.add(order)
            self._clock.end_idle()
            seed = compute_sequence_seed(self.seed, "call", digest, order[3])
            return PreparedCall(
                order,
                request,
                rendered,
                history,
                schemas,
                parent,
                prompt_ids,
                sampling,
                seed,
                is_limited,
                token_rules,
                rules.has_grammar,
            )

    def finish_call(self, call: PreparedCall, choices: Sequence[SampledChoice]) -> None:
        """Record the choices of a call."""
        with self._lock:
            self._end_flight(call)
            if self.is_closed:
                return
            for number, choice in enumerate(choices):
                sequence = choice.sequence
                answer = RecordedAnswer(
                    order=(*call.order, number),
                    parent=call.parent,
                    prompt_ids=call.prompt_ids,
                    tokens=sequence.tokens,
                    logprobs=sequence.logprobs,
                    sampling=call.sampling,
                    text=choice.text,
                    parsed=choice.parsed,
                    messages=[export_message(message) for message in call.request.messages],
                    reply=choice.reply,
                    finish_reason=choice.finish_reason,
                    is_cut=sequence.hit_limit and call.is_limited,
                    policy_version=choice.policy_version,
                    has_rules=choice.has_rules,
                )
                self.answers.append(answer)
                key = (call.schemas, (*call.history, build_reply_key(choice.reply)))
                self._known.setdefault(key, []).append(answer)

    def abandon_call(self, call: PreparedCall) -> None:
        """Take note that a call ended, with or without an answer."""
        with self._lock:
            self._end_flight(call)

    def _end_flight(self, call: PreparedCall) -> None:
        if call.order not in self._in_flight:
            return
        self._in_flight.remove(call.order)
        if not self._in_flight:
            self._clock.begin_idle()

    def _render(self, request: ChatRequest) -> RenderedChat:
        try:
            return self.prompts.render_messages(
                request.messages, request.tools, request.rules.reasoning_effort
            )
        except ChatRequestError as error:
            raise self._note_context_limit(error) from None

    def _build_prompt(
        self, rendered: RenderedChat, schemas: str, history: _HistoryKey
    ) -> tuple[RecordedAnswer | None, list[int]]:
        """Return the answer that the request continues, if any, and the tokens of its prompt."""
        try:
            for length in range(len(history) - 1, 0, -1):
                known = self._known.get((schemas, history[:length]))
                if not known or history[length].startswith('["assistant"'):
                    continue
                parent = min(known, key=lambda answer: answer.order)
                ids = self.prompts.extend_context(
                    rendered,
                    self._count_rendered(rendered, history, length),
                    self._end_turn(parent),
                )
                if ids is not None:
                    return parent, ids
                break
            return None, self.prompts.encode_prompt(rendered)
        except ChatRequestError as error:
            raise self._note_context_limit(error) from None

    @staticmethod
    def _count_rendered(rendered: RenderedChat, history: _HistoryKey, length: int) -> int:
        """Return how many rendered messages the first `length` of the request are: tools may add a system message."""
        return len(rendered.conversation.messages) - (len(history) - length)

    def _end_turn(self, answer: RecordedAnswer) -> list[int]:
        """Return the tokens of a context up to the end of its last turn, which a limit may have cut off."""
        renderer = self.prompts.renderer
        is_ended = answer.tokens[-1] in renderer.eos_ids
        return [*answer.prompt_ids, *answer.tokens, *([] if is_ended else [renderer.eos_id])]

    def _limit_answer(
        self,
        request: ChatRequest,
        wave: int,
        parent: RecordedAnswer | None,
        prompt_ids: list[int],
    ) -> tuple[int, bool]:
        """Return the most tokens of an answer, and whether that is less than the agent asked for.

        Answers to calls of the same wave do not count, so that the limit does not depend on which came first.
        """
        earlier = (answer for answer in self.answers if answer.order[0] < wave)
        used = sum(answer.num_counted_tokens for answer in earlier)
        if parent is not None:
            used += len(prompt_ids) - len(parent.prompt_ids) - len(parent.tokens)
        room = min(self.sampling.max_completion_tokens - used, self.context - len(prompt_ids))
        if room < 1:
            self._refuse_beyond(
                StopReason.MAX_TOKENS,
                f"the episode has used its {self.sampling.max_completion_tokens} tokens "
                "(sampling.max_completion_tokens)",
            )
        if request.max_tokens is not None and request.max_tokens <= room:
            return request.max_tokens, False
        return room, True

    def _choose_sampling(self, request: ChatRequest, max_tokens: int) -> SamplingSettings:
        run = self.sampling
        values: dict[str, Any] = {
            name: getattr(run, name) for name in ("temperature", "top_p", "top_k", "min_p")
        }
        if not self.uses_run_sampling:
            for name in values:
                if (value := getattr(request, name)) is not None:
                    values[name] = value
        return SamplingSettings(**values, max_completion_tokens=max_tokens, max_turns=1)

    def _choose_rules(self, request: ChatRequest) -> AnswerRules:
        rules = request.rules
        if not self.obeys_tool_choice:
            rules = replace(rules, is_call_required=False, tool=None)
        if self.uses_run_sampling:
            rules = replace(rules, bias=(), presence_penalty=0.0, frequency_penalty=0.0)
        return rules

    def _refuse_beyond(self, limit: StopReason, message: str) -> None:
        self.limit = self.limit or limit
        raise EpisodeLimitReached(message, code="context_length_exceeded")

    def _note_context_limit(self, error: ChatRequestError) -> ChatRequestError:
        """Return the error; a prompt that is too long ends the episode at its limit."""
        if error.code != "context_length_exceeded":
            return error
        self.limit = self.limit or StopReason.MAX_TOKENS
        return EpisodeLimitReached(str(error), param=error.param, code=error.code)

    # -- the finished record -------------------------------------------------------------------------------------------

    @property
    def stop_reason(self) -> StopReason:
        """Why the episode ended, if its agent did not fail."""
        if self.limit is not None:
            return self.limit
        if any(answer.is_cut for answer in self.answers):
            return StopReason.MAX_TOKENS
        return StopReason.TERMINATED

    def list_calls(self) -> list[AgentCall]:
        """List the recorded answers for reward functions, in order."""
        numbers = {
            id(answer): number
            for number, context in enumerate(self._list_contexts(), start=1)
            for answer in context
        }
        return [
            AgentCall(
                answer.messages,
                answer.reply,
                answer.finish_reason,
                numbers[id(answer)],
                len(answer.tokens),
            )
            for answer in self._list_ordered()
        ]

    def build_rollout(self, environment: str, score: AgentScore, policy_version: int) -> Rollout:
        """Build the rollout of an episode with at least one answer: its contexts one after the other."""
        contexts = self._list_contexts()
        temperature = self._find_row_temperature()
        prompt_ids = contexts[0][0].prompt_ids
        completion, mask, logprobs, starts = list[int](), list[bool](), list[float](), list[int]()
        for number, context in enumerate(contexts):
            if number:
                starts.append(len(completion))
            for position, answer in enumerate(context):
                if number or position:
                    observed = answer.prompt_ids[answer.num_inherited if position else 0 :]
                    completion += observed
                    mask += [False] * len(observed)
                    logprobs += [0.0] * len(observed)
                counts = self._is_trained(answer, temperature)
                completion += answer.tokens
                mask += [counts] * len(answer.tokens)
                logprobs += answer.logprobs if counts else [0.0] * len(answer.tokens)
        trajectory = self.build_trajectory(environment, score, self.stop_reason)
        trajectory.temperature, trajectory.policy_version = temperature, policy_version
        answers = [answer for context in contexts for answer in context]
        for turn, answer in zip(trajectory.turns, answers, strict=True):
            turn.is_trained = self._is_trained(answer, temperature)
        trajectory.num_prompt_tokens = len(prompt_ids)
        trajectory.num_completion_tokens = len(completion)
        trajectory.num_action_tokens = sum(mask)
        trajectory.mean_logprob = sum(logprobs) / max(1, sum(mask))
        return Rollout(
            prompt_ids=prompt_ids,
            completion_ids=completion,
            loss_mask=mask,
            sampler_logprobs=logprobs,
            trajectory=trajectory,
            is_truncated=self.stop_reason is not StopReason.TERMINATED,
            context_starts=starts,
        )

    def format_sequences(self) -> list[dict[str, Any]]:
        """Format the contexts for a file of recorded episodes (`rl_core/data/recorded_rows.py`).

        `logprobs` are those of the sampled tokens; `versions` and `temperatures` are those of the answers.
        """
        return [_format_context(context) for context in self._list_contexts()]

    def list_main_messages(self) -> list[dict[str, Any]]:
        """List the messages of the first context, up to its last reply."""
        last = self._list_contexts()[0][-1]
        return [*last.messages, last.reply]

    def build_trajectory(
        self, environment: str, score: AgentScore | None, stop_reason: StopReason
    ) -> Trajectory:
        """Build the trajectory of an episode, which may have failed."""
        episode, turns = self.episode, list[Turn]()
        contexts = self._list_contexts()
        ordered = self._list_ordered()
        numbers = {id(answer): number for number, answer in enumerate(ordered, start=1)}
        for number, context in enumerate(contexts, start=1):
            for answer, following in zip(context, [*context[1:], None], strict=True):
                info: dict[str, Any] = {}
                if len(contexts) > 1:
                    info = {"call": numbers[id(answer)], "conversation": number}
                if answer.finish_reason == "length":
                    info["finish_reason"] = "length"
                turns.append(_build_turn(answer, following, info))
        if turns:
            turns[0].info["agent_seed"] = self.agent_seed
        reward = score.reward if score is not None else 0.0
        if turns and score is not None and score.info:
            turns[-1].info |= convert_to_plain_json(score.info)
        answers = [answer for answer in ordered if not answer.parsed.calls]
        return Trajectory(
            environment=environment,
            level=episode.level,
            kind=episode.kind,
            seed=episode.seed,
            prompt=episode.prompt,
            target=episode.target,
            turns=turns,
            answer=replace_unprintable(answers[-1].text) if answers else None,
            success=score.success if score is not None else False,
            reward=reward,
            rewards={"task": reward},
            stop_reason=stop_reason,
            sample=self.sample,
            temperature=self.sampling.temperature,
            row=convert_to_plain_json(episode.row),
        )

    def list_opening_messages(self) -> list[Message]:
        """List the messages of the first call, for the record of a failure."""
        return [
            Message(role=m["role"], content=replace_unprintable(m["content"]))
            for answer in self._list_ordered()[:1]
            for m in answer.messages
        ]

    def _list_ordered(self) -> list[RecordedAnswer]:
        """List the answers in the order of the record."""
        return sorted(self.answers, key=lambda answer: answer.order)

    def _list_contexts(self) -> list[list[RecordedAnswer]]:
        """List the contexts in order of their first answers; an answer's first continuation stays in its context."""
        contexts: list[list[RecordedAnswer]] = []
        context_of: dict[int, list[RecordedAnswer]] = {}
        for answer in self._list_ordered():
            context = context_of.get(id(answer.parent)) if answer.parent is not None else None
            if context is None or context[-1] is not answer.parent:
                context = []
                contexts.append(context)
            context.append(answer)
            context_of[id(answer)] = context
        return contexts

    def _find_row_temperature(self) -> float:
        """Return the temperature with the most sampled tokens: a row of the trainer has one."""
        if self.sampling.temperature == 0:
            return 0.0
        counts: Counter[float] = Counter()
        for answer in self.answers:
            if self._can_train(answer):
                counts[answer.sampling.temperature] += len(answer.tokens)
        if not counts:
            return self.sampling.temperature
        return max(counts, key=lambda temperature: (counts[temperature], -temperature))

    def _can_train(self, answer: RecordedAnswer) -> bool:
        is_restricted = answer.sampling.is_restricted or answer.has_rules
        return answer.sampling.temperature > 0 and not is_restricted

    def _is_trained(self, answer: RecordedAnswer, temperature: float) -> bool:
        """Return whether an answer's tokens carry loss: not if they were drawn otherwise than the row says."""
        if self.sampling.temperature == 0 or self.sampling.is_restricted:
            return True  # an evaluation, which only counts them
        return self._can_train(answer) and answer.sampling.temperature == temperature


def _format_context(context: Sequence[RecordedAnswer]) -> dict[str, Any]:
    ids, runs = list[int](), list[int]()
    for position, answer in enumerate(context):
        observed = answer.prompt_ids[answer.num_inherited if position else 0 :]
        ids += [*observed, *answer.tokens]
        runs += [len(observed), len(answer.tokens)]
    formatted: dict[str, Any] = {
        "ids": ids,
        "runs": runs,
        "logprobs": [logprob for answer in context for logprob in answer.logprobs],
        "versions": [answer.policy_version for answer in context],
        "temperatures": [answer.sampling.temperature for answer in context],
    }
    if any(answer.has_rules for answer in context):
        formatted["has_rules"] = [answer.has_rules for answer in context]
    return formatted


def _build_turn(
    answer: RecordedAnswer, following: RecordedAnswer | None, info: dict[str, Any]
) -> Turn:
    calls = [
        ToolCall(
            replace_unprintable(call["function"]["name"]),
            convert_to_plain_json(json.loads(call["function"]["arguments"])),
        )
        for call in answer.parsed.calls
    ]
    observation = None
    if following is not None:
        new_messages = following.messages[len(answer.messages) + 1 :]
        observation = replace_unprintable("\n".join(m["content"] for m in new_messages))
    return Turn(
        action=replace_unprintable(answer.text),
        tool_call=calls[0] if calls else None,
        observation=observation,
        is_error=answer.parsed.call_error is not None,
        num_tokens=len(answer.tokens),
        more_calls=calls[1:],
        info=info,
    )


def _digest_call(
    prompt_ids: list[int],
    schemas: str,
    sampling: SamplingSettings,
    stop: tuple[str, ...],
    rules: AnswerRules,
) -> str:
    content = [prompt_ids, schemas, list(stop), sampling.temperature, sampling.top_p]
    content += [sampling.top_k, sampling.min_p, sampling.max_completion_tokens]
    if rules != AnswerRules():  # other calls have the digests of versions without rules
        content.append(asdict(rules))
    return hashlib.blake2b(json.dumps(content).encode(), digest_size=16).hexdigest()
