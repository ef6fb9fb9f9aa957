"""Request bodies: OpenAI's chat format, and vLLM's format for completions and a trainer's commands.

Types and ranges are checked. Parameters that would change the answer and are not supported are refused.
"""

from __future__ import annotations

import json
import math
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
)

from posttrain.serving.errors import ServingHTTPError
from posttrain.web.request_body import describe_first_error
from rl_core.chat.answer_rules import (
    RULE_PARAMETERS,
    AnswerRules,
    parse_answer_rules,
    select_callable_tools,
)
from rl_core.chat.requests import (
    MAX_TOP_LOGPROBS,
    TOOL_NAME_PATTERN,
    ChatMessage,
    ChatRequestError,
    drop_ineffective_parameters,
)
from rl_core.data.images import join_parts
from rl_core.settings.common import MIN_TEMPERATURE

B = TypeVar("B", bound=BaseModel)


def _refuse_tiny_temperature(value: float) -> float:
    if 0 < value < MIN_TEMPERATURE:
        raise ValueError(f"must be 0 or at least {MIN_TEMPERATURE:g}")
    return value


# Clients send null for what is not set, within objects, too.
NullableText = Annotated[str, BeforeValidator(lambda value: "" if value is None else value)]
NullableFlag = Annotated[bool, BeforeValidator(lambda value: False if value is None else value)]
NullableObject = Annotated[
    dict[str, Any], BeforeValidator(lambda value: {} if value is None else value)
]
ShortText = Annotated[str, Field(max_length=1000)]
FiniteFloat = Annotated[float, Field(allow_inf_nan=False)]
Temperature = Annotated[FiniteFloat, Field(ge=0, le=5), AfterValidator(_refuse_tiny_temperature)]
Name = Annotated[str, Field(min_length=1, max_length=1000)]
StopText = Annotated[str, Field(min_length=1, max_length=1000)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
MAX_SEED = 2**63


class StrictBody(BaseModel):
    """A JSON object without unknown keys; strings are not converted to numbers."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, protected_namespaces=())


class _LenientBody(BaseModel):
    """A JSON object whose unknown keys are ignored, such as a message that a client sends back."""

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)


class ContentPart(_LenientBody):
    """A part of text of a message's content."""

    type: Literal["text"]
    text: str


class ImageAddress(_LenientBody):
    """The address of an image: a data URL, or a file of `serving.images_folder`."""

    url: Annotated[str, Field(min_length=1)]


class ImagePart(_LenientBody):
    """A part of a message's content that is an image."""

    type: Literal["image_url"]
    image_url: ImageAddress


class CalledFunction(_LenientBody):
    """Name and JSON arguments of a function call."""

    name: ShortText
    arguments: str


class MessageCall(_LenientBody):
    """A tool call in an assistant message."""

    id: ShortText = ""
    type: Literal["function"] = "function"
    function: CalledFunction


class MessageBody(_LenientBody):
    """One message of the conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Annotated[ImagePart | ContentPart, Field(discriminator="type")]] | None = (
        None
    )
    name: ShortText | None = None
    tool_calls: list[MessageCall] | None = None
    tool_call_id: ShortText | None = None

    @property
    def text(self) -> str:
        """The content as one text, images as markers."""
        if isinstance(self.content, list):
            return join_parts(
                [part.model_dump() for part in self.content], lambda number, source: str(source)
            )[0]
        return self.content or ""

    @property
    def images(self) -> list[str]:
        """Addresses of the images in the content."""
        parts = self.content if isinstance(self.content, list) else []
        return [part.image_url.url for part in parts if isinstance(part, ImagePart)]

    def to_chat_message(self) -> ChatMessage:
        """Return the message in the library's form."""
        calls = [call.model_dump() for call in self.tool_calls or ()]
        return ChatMessage(self.role, self.text, self.name, calls, self.tool_call_id, self.images)


class FunctionBody(_LenientBody):
    """A tool's declaration: name, description, JSON schema of its arguments."""

    name: Annotated[str, Field(pattern=TOOL_NAME_PATTERN)]
    description: NullableText = ""
    parameters: NullableObject = {}


class ToolBody(_LenientBody):
    """A tool, in the form that `Toolset.schema` returns."""

    type: Literal["function"]
    function: FunctionBody


class StreamOptions(_LenientBody):
    """Options of a streamed response."""

    include_usage: NullableFlag = False


class EpisodeBody(StrictBody):
    """An episode to play on the server: the environment responds to the model's actions."""

    name: ShortText
    level: ShortText | None = None
    seed: Annotated[int, Field(ge=0, lt=MAX_SEED)] = 0
    max_turns: Annotated[int, Field(ge=1, le=1000)] = 6


class ChatBody(StrictBody):
    """A chat request. Extensions of OpenAI's format: top_k, min_p, deadline_seconds, environment, vote."""

    model: ShortText
    messages: Annotated[list[MessageBody], Field(max_length=10_000)]
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    max_tokens: Annotated[int, Field(ge=1, le=2**31)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, le=2**31)] | None = None
    stop: StopText | Annotated[list[StopText], Field(max_length=16)] | None = None
    seed: Annotated[int, Field(ge=-MAX_SEED, lt=MAX_SEED)] | None = None
    temperature: Temperature | None = None
    top_p: Annotated[FiniteFloat, Field(gt=0, le=1)] | None = None
    tools: Annotated[list[ToolBody], Field(max_length=128)] | None = None
    # auto, none, required, a function or allowed_tools; others are refused when the rules are parsed
    tool_choice: Literal["auto", "none", "required"] | str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    response_format: dict[str, Any] | None = None
    logit_bias: dict[str, Any] | None = None
    presence_penalty: FiniteFloat | None = None
    frequency_penalty: FiniteFloat | None = None
    reasoning_effort: ShortText | None = None
    user: ShortText | None = None
    top_k: Annotated[int, Field(ge=0, le=2**31)] | None = None
    min_p: Annotated[FiniteFloat, Field(ge=0, le=1)] | None = None
    deadline_seconds: Annotated[FiniteFloat, Field(gt=0)] | None = None
    environment: EpisodeBody | None = None
    vote: bool = False

    @property
    def stop_texts(self) -> tuple[str, ...]:
        """The stop texts as a tuple."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def chat_messages(self) -> list[ChatMessage]:
        """The messages in the library's form."""
        return [message.to_chat_message() for message in self.messages]

    @property
    def tool_schemas(self) -> list[dict[str, Any]]:
        """Schemas of the tools that the answer may call. Raises: ChatRequestError."""
        schemas = [tool.model_dump() for tool in self.tools or ()]
        return select_callable_tools(self.tool_choice, schemas)

    def parse_rules(self) -> AnswerRules:
        """Parse what the request demands of the answer's tokens. Raises: ServingHTTPError."""
        try:
            return parse_answer_rules({name: getattr(self, name) for name in RULE_PARAMETERS})
        except ChatRequestError as error:
            raise convert_request_error(error) from None

    @property
    def max_answer_tokens(self) -> int | None:
        """The most tokens of an answer; None = not set."""
        if self.max_completion_tokens is not None:
            return self.max_completion_tokens
        return self.max_tokens


class FeedbackBody(StrictBody):
    """A label for an answer: correct answer, score or thumb, with a comment."""

    id: Annotated[str, Field(min_length=1, max_length=200)]
    choice: Annotated[int, Field(ge=0)] = 0
    answer: Annotated[str, Field(max_length=10_000)] | None = None
    score: FiniteFloat | None = None
    thumb: Literal["up", "down"] | None = None
    comment: Annotated[str, Field(max_length=10_000)] = ""
    user: ShortText | None = None


class CompletionBody(StrictBody):
    """A completion request in OpenAI's format. Extensions: vLLM's (token ids), `drawn`, 128-bit seeds."""

    model: Name
    # text, token ids, or a list of them; checked when it is read
    prompt: Annotated[str, Field(max_length=2**22)] | Annotated[list[Any], Field(max_length=2**20)]
    max_tokens: Annotated[int, Field(ge=0, le=2**31)] = 16
    n: Annotated[int, Field(ge=1)] = 1
    stream: Literal[False] | bool = False
    stream_options: StreamOptions | None = None
    echo: bool = False
    temperature: Temperature = 1.0
    top_p: Annotated[FiniteFloat, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=0, le=2**31)] = 0
    min_p: Annotated[FiniteFloat, Field(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[FiniteFloat, Field(ge=1, le=1)] = 1.0  # only 1 is supported
    logit_bias: dict[str, Any] | None = None
    presence_penalty: FiniteFloat | None = None
    frequency_penalty: FiniteFloat | None = None
    seed: Annotated[int, Field(ge=-MAX_SEED, lt=2**128)] | None = None
    # Number of random draws of the seed that earlier requests have used.
    drawn: Annotated[int, Field(ge=0, le=2**31)] = 0
    stop: StopText | Annotated[list[StopText], Field(max_length=16)] = []
    stop_token_ids: Annotated[list[TokenId], Field(max_length=2**18)] = []
    ignore_eos: bool = False
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    add_special_tokens: bool = True  # has no effect on a prompt of token ids
    user: Annotated[str, Field(max_length=1000)] = ""

    @property
    def stop_texts(self) -> tuple[str, ...]:
        """The stop texts as a tuple."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def parse_rules(self) -> AnswerRules:
        """Parse what the request demands of the answer's tokens. Raises: ChatRequestError."""
        names = ("logit_bias", "presence_penalty", "frequency_penalty")
        return parse_answer_rules({name: getattr(self, name) for name in names})


class TokenizeBody(StrictBody):
    """A request for the token ids of a text."""

    model: Name
    prompt: Annotated[str, Field(max_length=2**20)]
    add_special_tokens: bool = True


class CollectiveRpcBody(StrictBody):
    """A command of a trainer to the server; `WeightController` lists the supported methods."""

    method: Name
    kwargs: dict[str, str] = {}
    args: list[str] = []
    timeout: Annotated[FiniteFloat, Field(gt=0)] | None = None  # seconds


class LoadAdapterBody(StrictBody):
    """A request to load an adapter."""

    lora_name: Name
    lora_path: Name


class UnloadAdapterBody(StrictBody):
    """A request to unload an adapter."""

    lora_name: Name


def convert_request_error(error: ChatRequestError) -> ServingHTTPError:
    """Convert the refusal of a chat request to an error response."""
    return ServingHTTPError(error.status, str(error), param=error.param, code=error.code)


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not finite")


def _parse_finite_float(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text[:40]} is not finite")
    return value


def parse_json_object(body: bytes) -> dict[str, Any]:
    """Parse the body of a request. Raises: ServingHTTPError (422) unless it is a JSON object of finite numbers."""
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ServingHTTPError(
            422, f"the body is not UTF-8: byte {error.start} is {body[error.start]:#04x}"
        ) from None
    try:
        parameters = json.loads(
            text, parse_constant=_refuse_constant, parse_float=_parse_finite_float
        )
    except (ValueError, RecursionError) as error:
        raise ServingHTTPError(422, f"the body is not JSON: {str(error)[:200]}") from None
    if not isinstance(parameters, dict):
        raise ServingHTTPError(422, "the body must be a JSON object")
    return parameters


def parse_json_body(kind: type[B], body: bytes) -> B:
    """Parse and check the body of a request. Raises: ServingHTTPError (422) that names the field."""
    return validate_body(kind, parse_json_object(body))


def validate_body(kind: type[B], parameters: dict[str, Any]) -> B:
    """Check the parameters of a request. Raises: ServingHTTPError (422) that names the field."""
    # OpenAI's clients send null for what is not set
    parameters = {name: value for name, value in parameters.items() if value is not None}
    if kind is CompletionBody:
        parameters = _drop_completion_parameters(parameters)
    if kind is ChatBody:
        try:
            parameters = drop_ineffective_parameters(parameters)
        except ChatRequestError as error:
            raise convert_request_error(error) from None
    try:
        return kind.model_validate_json(json.dumps(parameters))
    except RecursionError:
        raise ServingHTTPError(422, "the body is nested too deeply") from None
    except ValidationError as error:
        name, message = describe_first_error(error, parameters)
        raise ServingHTTPError(
            422, f"{name or 'the body'}: {message}", param=name or None
        ) from None


def _drop_completion_parameters(parameters: dict[str, Any]) -> dict[str, Any]:
    """Drop `best_of` and `suffix` where they change nothing. Raises: ServingHTTPError (422) elsewhere."""
    without_effect = {"best_of": parameters.get("n", 1), "suffix": ""}
    for name, value in without_effect.items():
        if name in parameters and json.dumps(parameters[name]) != json.dumps(value):
            raise ServingHTTPError(422, f"{name}: is not supported here; leave it out", param=name)
    return {name: value for name, value in parameters.items() if name not in without_effect}
