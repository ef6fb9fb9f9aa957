"""Replay of an agent's episode: the agent runs again, and its requests are answered with the recorded answers.

No model is needed. A request continues the conversation whose messages it begins with; any other request begins the
next recorded conversation. Requests that an agent sends side by side are answered in the recorded order.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rl_core.chat.prompts import ParsedAnswer, create_call_id
from rl_core.chat.requests import ChatRequest, parse_chat_request
from rl_core.chat.responses import format_message
from rl_core.data.model_text import replace_unprintable
from rl_core.environments.agent import Agent, AgentCall, AgentEndpoint, AgentFailed, AgentScore
from rl_core.errors import EnvironmentFault, RewardError
from rl_core.rollouts.agent_recorder import (
    EpisodeLimitReached,
    build_message_key,
    build_reply_key,
    export_message,
)
from rl_core.rollouts.agent_server import (
    MODEL_NAME,
    AgentHandler,
    AgentServer,
    CallGate,
    require_call,
)
from rl_core.types import StopReason, Trajectory, Turn

_NUMBER = 0  # of the only session


@dataclass(slots=True)
class _Conversation:
    """Recorded turns of one conversation, and how far they were played."""

    number: int
    turns: list[Turn]
    num_played: int = 0
    history: list[str] = field(default_factory=list)  # keys of the messages so far, reply included


@dataclass
class ReplayedSession:
    """Recorded answers of one episode, and the calls that they answered."""

    trajectory: Trajectory
    number: int = _NUMBER
    score: Any = None  # posted by the agent
    is_closed: bool = False
    limit: StopReason | None = None
    calls: list[AgentCall] = field(default_factory=list)
    differences: list[tuple[str, Any, Any]] = field(default_factory=list)  # subject, recorded, now
    seconds: float = 0.0  # in requests
    started: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self._conversations: list[_Conversation] = []
        for turn in self.trajectory.turns:
            number = int(turn.info.get("conversation", 1))
            if not self._conversations or self._conversations[-1].number != number:
                self._conversations.append(_Conversation(number, []))
            self._conversations[-1].turns.append(turn)

    @property
    def num_unplayed(self) -> int:
        """Number of recorded answers that nothing asked for."""
        return sum(len(c.turns) - c.num_played for c in self._conversations)

    def measure_agent_seconds(self) -> float:
        """Return the seconds since the start outside requests."""
        return time.monotonic() - self.started - self.seconds

    def answer_request(self, request: ChatRequest) -> list[tuple[dict[str, Any], str]]:
        """Return message and finish reason of each choice. Raises: EpisodeLimitReached without a recorded answer."""
        keys = [build_message_key(message) for message in request.messages]
        choices = []
        for choice in range(request.n):
            conversation = self._find_conversation(keys if choice == 0 else [])
            if conversation is None:
                self._refuse_request(request)
            assert conversation is not None
            choices.append(self._play_turn(conversation, request, keys))
        return choices

    def _find_conversation(self, keys: Sequence[str]) -> _Conversation | None:
        continued = [
            c
            for c in self._conversations
            if 0 < c.num_played < len(c.turns) and list(keys[: len(c.history)]) == c.history
        ]
        if continued:
            return max(continued, key=lambda c: len(c.history))
        return next((c for c in self._conversations if not c.num_played), None)

    def _play_turn(
        self, conversation: _Conversation, request: ChatRequest, keys: Sequence[str]
    ) -> tuple[dict[str, Any], str]:
        turn = conversation.turns[conversation.num_played]
        if conversation.num_played:
            before = conversation.turns[conversation.num_played - 1]
            new = request.messages[len(conversation.history) :]
            observation = replace_unprintable("\n".join(message.text for message in new))
            subject = f"observation before call {len(self.calls) + 1}"
            self.differences.append((subject, before.observation, observation))
        reply, reason = _rebuild_reply(turn)
        conversation.num_played += 1
        conversation.history = [*keys, build_reply_key(reply)]
        messages = [export_message(message) for message in request.messages]
        self.calls.append(AgentCall(messages, reply, reason, conversation.number, turn.num_tokens))
        return reply, reason

    def _refuse_request(self, request: ChatRequest) -> None:
        """Refuse a request as the limit that ended the recording did; without one it is a difference."""
        recorded = self.trajectory.stop_reason
        self.limit = StopReason.MAX_TOKENS
        if recorded in (StopReason.MAX_TURNS, StopReason.MAX_TOKENS):
            self.limit = StopReason(recorded)
        else:
            text = request.messages[-1].text if request.messages else ""
            subject = f"call {len(self.calls) + 1}"
            self.differences.append((subject, "none", replace_unprintable(text)))
        raise EpisodeLimitReached(
            "the recording has no further answer", code="context_length_exceeded"
        )

    def require_recorded_answer(self) -> None:
        """Raise AgentFailed if the agent asked, but the recording failed before its first call."""
        if self.differences and not self.calls and not self.trajectory.turns:
            raise AgentFailed(
                "the recording has no answer to its first call, as the episode failed before it; the failure did not "
                "occur again"
            )


def _rebuild_reply(turn: Turn) -> tuple[dict[str, Any], str]:
    """Return the message that was sent for a turn, and its finish reason."""
    calls: list[dict[str, Any]] = [
        {
            "id": create_call_id(),
            "type": "function",
            "function": {
                "name": call.name,
                "arguments": json.dumps(call.arguments, ensure_ascii=False),
            },
        }
        for call in turn.calls
    ]
    answer = ParsedAnswer(None, calls) if calls else ParsedAnswer(turn.action, [])
    reason = str(turn.info.get("finish_reason", "tool_calls" if calls else "stop"))
    return format_message(answer), reason


class _ReplayHandler(AgentHandler):
    """One connection of the replayed agent."""

    def _answer_chat(self, session: Any, body: bytes) -> None:
        began = time.monotonic()
        request = parse_chat_request(body)
        try:
            choices = session.answer_request(request)
        finally:
            session.seconds += time.monotonic() - began
        rows = [
            {"index": index, "message": message, "finish_reason": reason, "logprobs": None}
            for index, (message, reason) in enumerate(choices)
        ]
        header = {"id": f"chatcmpl-{len(session.calls)}", "created": 0, "model": MODEL_NAME}
        usage = dict.fromkeys(("prompt_tokens", "completion_tokens", "total_tokens"), 0)
        if not request.stream:
            body_ = {**header, "object": "chat.completion", "choices": rows, "usage": usage}
            self.send_json(200, body_)
            return
        chunks = [[_build_chunk(row, header)] for row in rows]
        if request.include_usage:
            chunks.append([{**header, "object": _CHUNK, "choices": [], "usage": usage}])
        self.send_chunks(chunks)


_CHUNK = "chat.completion.chunk"


def _build_chunk(row: Mapping[str, Any], header: Mapping[str, Any]) -> dict[str, Any]:
    """Build one chunk that holds a whole choice."""
    delta = dict(row["message"])
    if calls := delta.get("tool_calls"):
        delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(calls)]
    choice = {"index": row["index"], "delta": delta, "finish_reason": row["finish_reason"]}
    return {**header, "object": _CHUNK, "choices": [choice]}


@dataclass(frozen=True, slots=True)
class AgentReplay:
    """Outcome of a replay."""

    session: ReplayedSession
    score: AgentScore | None  # None = the episode failed
    failed_in: str = ""  # as in `FailedEpisode`
    error: str = ""
    log: str = ""


def replay_agent(environment: Agent, trajectory: Trajectory, agent_seed: int) -> AgentReplay:
    """Run the agent of a recorded episode again and score it.

    Args:
        agent_seed: seed of the agent's random numbers.
    Raises: SettingsError for a task that does not exist any more.
    """
    episode = environment.episode(seed=trajectory.seed, level=trajectory.level)
    session = ReplayedSession(trajectory)
    with AgentServer(CallGate(is_open=True), _ReplayHandler) as server:
        key = f"sk-episode-{secrets.token_hex(16)}"
        endpoint = AgentEndpoint(
            server.add_session(key, session),
            key,
            agent_seed,
            session.measure_agent_seconds,
            lambda: False,
            lambda: session.score,
            lambda: session.limit.value if session.limit is not None else "",
        )
        where, log = "the agent", ""
        try:
            with environment.run_agent(episode, endpoint) as result:
                session.is_closed, log = True, result.stderr
                session.require_recorded_answer()
                require_call(len(session.calls), session.limit, result.stderr)
                where = "its reward"
                score = environment.score_episode(episode, session.calls, result)
        except (EnvironmentFault, RewardError) as fault:
            log = fault.log if isinstance(fault, AgentFailed) else log
            return AgentReplay(session, None, where, str(fault), log)
    return AgentReplay(session, score, log=log)
