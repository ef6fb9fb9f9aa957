"""From the body of a request to sequences for the engine, checked."""

from __future__ import annotations

import functools
import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from flows.serving.chat_answers import AnswerForm
from flows.serving.chat_bodies import ChatBody
from flows.serving.chat_server import ChatServer
from flows.serving.environment_sessions import Session
from flows.serving.refused import RefusedRequest
from rl_core.environments.tools import Toolset
from rl_core.inference.sampling import RolloutSequence, sequence_seed
from rl_core.inference.served_requests import AnswerSequence, ServedRequest
from rl_core.inference.stop_texts import stop_test
from rl_core.settings import SamplingSettings
from rl_core.types import Conversation

__all__ = ["CheckedChat", "check_chat"]


@dataclass(slots=True)
class CheckedChat:
    """A request for answers that was checked; `more` makes sequences for its answers."""

    server: ChatServer
    body: ChatBody
    form: AnswerForm
    began: float  # seconds of the monotonic clock
    seed: int
    ids: list[int]  # of the prompt; empty with an environment
    count: int  # answers that are asked for: n, or of a vote the most that are sampled

    async def more(self, first: int, count: int) -> list[ServedRequest]:
        """Requests for the samples from index `first` on. Raises: RefusedRequest."""
        samples = range(first, first + count)
        sequences: Sequence[RolloutSequence]
        if self.body.environment is not None:
            sequences = await _sessions(self.server, self.body, self.seed, samples)
            self.form.prompt_tokens += sum(len(sequence.prompt_ids) for sequence in sequences)
        else:
            stops = stop_test(self.form.prompts.renderer.action_text, self.body.stops)
            sequences = [AnswerSequence(self.ids, sequence_seed("chat", self.seed, i), stops) for i in samples]
        return _requests(self.server, self.body, sequences, self.began)


async def check_chat(server: ChatServer, body: ChatBody, began: float) -> CheckedChat:
    """The checked request. Raises: RefusedRequest (422)."""
    _, prompts = server.ready()
    count = _count(server, body)
    if body.top_logprobs and not body.logprobs:
        raise RefusedRequest(422, "top_logprobs: needs logprobs: true", param="top_logprobs")
    ids: list[int] = []
    tools: Toolset | None = None
    conversation: Conversation | None = None
    if body.environment is None:
        made = await server.render(prompts.make, body)
        ids, tools, conversation = made.ids, made.tools, made.conversation
    assert server.model is not None
    form = AnswerForm(
        answer_id=server.new_id(), model=server.name, prompts=prompts, tools=tools, stops=body.stops,
        logprobs=bool(body.logprobs), num_top=body.top_logprobs or 0, prompt_tokens=len(ids), base=server.model.base,
        conversation=conversation,
    )  # fmt: skip
    seed = body.seed if body.seed is not None else secrets.randbits(64)
    return CheckedChat(server, body, form, began, seed, ids, count)


def _count(server: ChatServer, body: ChatBody) -> int:
    """Number of answers that may be sampled."""
    most = min(server.settings.max_choices, server.settings.max_waiting)
    if not body.vote:
        count = body.n or 1
        if count > most:
            raise RefusedRequest(422, f"n: {count} choices; at most {most}", param="n")
        return count
    for name in ("stream", "n", "tools", "logprobs"):
        if getattr(body, name) and (name, body.n) != ("n", 1):
            raise RefusedRequest(422, f"{name}: is not supported with vote, which gives one answer", param=name)
    if body.temperature == 0:
        raise RefusedRequest(422, "vote: needs a temperature above 0; greedy answers are all the same", param="vote")
    return min(server.voting.max_samples, most)


def _requests(
    server: ChatServer, body: ChatBody, sequences: Sequence[RolloutSequence], began: float
) -> list[ServedRequest]:
    assert server.model is not None
    sampling = _sampling(body, server.model.context)
    most, asked = server.settings.request_seconds, body.deadline_seconds or math.inf
    seconds = min(most, asked)
    limit = f"deadline_seconds: {asked:g}" if asked < most else f"the server's serving.request_seconds: {most:g}"
    top = max(server.top, (body.top_logprobs or 0) if body.logprobs else 0)
    return [
        ServedRequest(
            sequence, sampling, caller=body.user or "", deadline=began + seconds, limit=limit, top=top,
            streams=bool(body.stream), has_stops=bool(body.stops),
        )
        for sequence in sequences
    ]  # fmt: skip


def _sampling(body: ChatBody, context: int) -> SamplingSettings:
    return _made_sampling(
        1.0 if body.temperature is None else float(body.temperature), float(body.top_p or 1.0), body.top_k or 0,
        float(body.min_p or 0.0), min(body.most_tokens or context, context),
        body.environment.max_turns if body.environment is not None else 1,
        body.stops if body.environment is not None else (),
    )  # fmt: skip


@functools.lru_cache(maxsize=4096)
def _made_sampling(
    temperature: float, top_p: float, top_k: int, min_p: float, most: int, turns: int, stops: tuple[str, ...]
) -> SamplingSettings:
    return SamplingSettings(
        temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, max_completion_tokens=most, max_turns=turns,
        stop=stops,
    )  # fmt: skip


async def _sessions(server: ChatServer, body: ChatBody, seed: int, samples: range) -> list[Session]:
    """Episodes that have begun. Raises: RefusedRequest (422)."""
    assert body.environment is not None and server.model is not None and server.session_renderer is not None
    for name in ("messages", "tools"):
        if getattr(body, name):
            raise RefusedRequest(422, f"{name}: has to be empty with environment, which brings its own", param=name)
    for name in ("stream", "logprobs"):
        if getattr(body, name):
            raise RefusedRequest(422, f"{name}: is not supported with environment", param=name)
    sampling = _sampling(body, server.model.context)
    renderer, context = server.session_renderer, server.model.context
    return [
        await server.wait_for(
            server.sessions.open, body.environment, renderer, sampling, seed, sample, context
        )
        for sample in samples
    ]  # fmt: skip
