"""Bodies of requests, checked: types, ranges, and parameters that have no effect here."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from flows.serving.refused import RefusedRequest

__all__ = ["ChatBody", "ChatMessage", "EpisodeBody", "FeedbackBody", "ToolBody", "read_json_body"]

B = TypeVar("B", bound=BaseModel)
Text = Annotated[str, Field(max_length=1000)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
MAX_TOP = 20  # of the dialect
MAX_SEED = 2**63

# Parameters that the dialect knows and that would change the answer. Only what changes nothing is taken.
_WITHOUT_EFFECT: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0, 0.0), "presence_penalty": (0, 0.0), "logit_bias": ({},), "functions": ([],),
    "function_call": ("none", "auto"), "modalities": (["text"],), "audio": (), "prediction": (),
    "response_format": ({"type": "text"},), "reasoning_effort": (), "verbosity": (), "web_search_options": (),
}  # fmt: skip
# Parameters about accounts and storage: nothing here has either.
_IGNORED = (
    "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
)  # fmt: skip


class _Strict(BaseModel):
    """A JSON object without unknown keys; numbers are numbers."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, protected_namespaces=())


class _Open(BaseModel):
    """A JSON object whose unknown keys do not matter, such as a message that a client sends back."""

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)


class ContentPart(_Open):
    """A part of a message's content; only text is read."""

    type: Literal["text"]
    text: str


class CalledFunction(_Open):
    """Name and JSON arguments of a call."""

    name: Text
    arguments: str


class MessageCall(_Open):
    """A call in an assistant message."""

    id: Text = ""
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatMessage(_Open):
    """One message of the conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    name: Text | None = None
    tool_calls: list[MessageCall] | None = None
    tool_call_id: Text | None = None

    @property
    def text(self) -> str:
        """Its content as one text."""
        if isinstance(self.content, list):
            return "".join(part.text for part in self.content)
        return self.content or ""


class FunctionBody(_Open):
    """A tool's declaration: name, description, JSON schema of its arguments."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_-]{0,63}$")]
    description: str = ""
    parameters: dict[str, Any] = {}


class ToolBody(_Open):
    """A tool, in the form that `Toolset.schema` gives."""

    type: Literal["function"]
    function: FunctionBody


class StreamOptions(_Open):
    """Options of a stream."""

    include_usage: bool = False


class EpisodeBody(_Strict):
    """An episode that is played here: the environment answers the model's actions."""

    name: Text
    level: Text | None = None
    seed: Annotated[int, Field(ge=0, lt=MAX_SEED)] = 0
    max_turns: Annotated[int, Field(ge=1, le=1000)] = 6


class ChatBody(_Strict):
    """A request for an answer. Beyond the dialect: top_k, min_p, deadline_seconds, environment, vote."""

    model: Text
    messages: Annotated[list[ChatMessage], Field(max_length=10_000)]
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP)] | None = None
    max_tokens: Annotated[int, Field(ge=1, le=2**31)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, le=2**31)] | None = None
    stop: Annotated[str, Field(min_length=1, max_length=1000)] | Annotated[
        list[Annotated[str, Field(min_length=1, max_length=1000)]], Field(max_length=16)
    ] | None = None  # fmt: skip
    seed: Annotated[int, Field(ge=-MAX_SEED, lt=MAX_SEED)] | None = None
    temperature: Annotated[Finite, Field(ge=0, le=5)] | None = None
    top_p: Annotated[Finite, Field(gt=0, le=1)] | None = None
    tools: Annotated[list[ToolBody], Field(max_length=128)] | None = None
    tool_choice: Literal["auto", "none"] | None = None
    parallel_tool_calls: bool | None = None
    user: Text | None = None
    top_k: Annotated[int, Field(ge=0, le=2**31)] | None = None
    min_p: Annotated[Finite, Field(ge=0, le=1)] | None = None
    deadline_seconds: Annotated[Finite, Field(gt=0)] | None = None
    environment: EpisodeBody | None = None
    vote: bool = False

    @property
    def stops(self) -> tuple[str, ...]:
        """Stop texts."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def most_tokens(self) -> int | None:
        """Tokens of the answer at most; None = not said."""
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens


class FeedbackBody(_Strict):
    """A label for an answer: right answer, score, or thumb, with a comment."""

    id: Annotated[str, Field(min_length=1, max_length=200)]
    choice: Annotated[int, Field(ge=0)] = 0
    answer: Annotated[str, Field(max_length=10_000)] | None = None
    score: Finite | None = None
    thumb: Literal["up", "down"] | None = None
    comment: Annotated[str, Field(max_length=10_000)] = ""
    user: Text | None = None


def read_json_body(kind: type[B], body: bytes) -> B:
    """The checked body of a request. Raises: RefusedRequest (422) naming the field, what was found and is expected."""
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RefusedRequest(422, f"the body is not UTF-8: byte {error.start} is {body[error.start]:#04x}") from None
    try:
        plain = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RefusedRequest(422, f"the body is no JSON: {str(error)[:200]}") from None
    if not isinstance(plain, dict):
        raise RefusedRequest(422, "the body must be a JSON object")
    if kind is ChatBody:
        text = json.dumps(_known(plain))
    try:
        return kind.model_validate_json(text)
    except ValidationError as error:
        found = error.errors(include_url=False, include_context=False)[0]
        place = ".".join(str(part) for part in found["loc"])
        raise RefusedRequest(422, f"{place or 'the body'}: {found['msg']}", param=place or None) from None


def _known(plain: dict[str, Any]) -> dict[str, Any]:
    """Without parameters that change nothing. Raises: RefusedRequest for those that would."""
    kept = {}
    for name, value in plain.items():
        if name in _WITHOUT_EFFECT:
            if value is not None and value not in _WITHOUT_EFFECT[name]:
                raise RefusedRequest(422, f"{name}: is not supported here; leave it out", param=name)
        elif name not in _IGNORED:
            kept[name] = value
    return kept
