"""Rules for answers in OpenAI's chat requests: response_format, tool_choice, logit_bias, penalties."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rl_core.errors import DataError

MAX_BIASED_TOKENS = 1024  # entries of logit_bias
MAX_BIAS, MAX_PENALTY = 100.0, 2.0  # OpenAI's limits
RULE_PARAMETERS = (
    "response_format",
    "tool_choice",
    "logit_bias",
    "presence_penalty",
    "frequency_penalty",
    "reasoning_effort",
)
_EFFORT = re.compile(r"[a-z]{1,20}")


class ChatRequestError(DataError):
    """A chat request that cannot be answered.

    Args:
        param: the request parameter at fault.
        code: machine-readable reason.
        status: of the HTTP response.
    """

    def __init__(
        self, message: str, *, param: str | None = None, code: str | None = None, status: int = 422
    ) -> None:
        super().__init__(message)
        self.param, self.code, self.status = param, code, status


@dataclass(frozen=True, slots=True)
class AnswerRules:
    """Checked rules of a request; None = not set."""

    # of the JSON value that the answer has to be
    schema: Mapping[str, Any] | bool | None = None
    is_call_required: bool = False
    tool: str | None = None  # the only one that may be called
    bias: tuple[tuple[int, float], ...] = ()
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    reasoning_effort: str | None = None  # a variable of the chat template

    @property
    def has_grammar(self) -> bool:
        """True = a grammar restricts the answer."""
        return self.schema is not None or self.is_call_required


def parse_answer_rules(values: Mapping[str, Any]) -> AnswerRules:
    """Parse the parameters in `RULE_PARAMETERS`; other keys are ignored. Raises: ChatRequestError."""
    is_call_required, tool = _parse_tool_choice(values.get("tool_choice"))
    return AnswerRules(
        schema=_parse_response_format(values.get("response_format")),
        is_call_required=is_call_required,
        tool=tool,
        bias=parse_bias(values.get("logit_bias")),
        presence_penalty=_parse_penalty(values, "presence_penalty"),
        frequency_penalty=_parse_penalty(values, "frequency_penalty"),
        reasoning_effort=_parse_effort(values.get("reasoning_effort")),
    )


def _parse_response_format(value: Any) -> Mapping[str, Any] | bool | None:
    """Return the schema that an answer has to fulfil; None = any text."""
    kind = value.get("type") if isinstance(value, Mapping) else None
    if value is None or kind == "text":
        return None
    if kind == "json_object":
        return {"type": "object"}
    if kind != "json_schema":
        raise ChatRequestError(
            "response_format: type must be text, json_object or json_schema",
            param="response_format",
            status=400,
        )
    declared = value.get("json_schema")
    schema = declared.get("schema", {"type": "object"}) if isinstance(declared, Mapping) else None
    if not isinstance(schema, Mapping | bool):
        raise ChatRequestError(
            "response_format: json_schema needs a schema, which is a JSON object",
            param="response_format",
            status=400,
        )
    return schema


def _parse_tool_choice(value: Any) -> tuple[bool, str | None]:
    """Return whether a call is required, and the tool if there is only one to call."""
    if value in (None, "auto", "none"):
        return False, None
    if value == "required":
        return True, None
    if isinstance(value, Mapping) and value.get("type") == "allowed_tools":
        return _read_allowed_tools(value)[0] == "required", None
    name = _read_function_name(value)
    if name is None:
        raise ChatRequestError(
            "tool_choice: must be auto, none, required, a function with its name, or allowed_tools",
            param="tool_choice",
        )
    return True, name


def select_callable_tools(
    tool_choice: Any, tools: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Return the tools that an answer may call: none, all of them, or those that `allowed_tools` names.

    Raises: ChatRequestError; 400 for a tool that the request does not have.
    """
    if tool_choice == "none":
        return []
    if not isinstance(tool_choice, Mapping) or tool_choice.get("type") != "allowed_tools":
        return list(tools)
    _, names = _read_allowed_tools(tool_choice)
    known = [tool["function"]["name"] for tool in tools]
    for name in names:
        if name not in known:
            raise ChatRequestError(
                f"tool_choice: there is no tool '{name[:80]}'", param="tool_choice", status=400
            )
    return [tool for tool, name in zip(tools, known, strict=True) if name in names]


def _read_allowed_tools(value: Mapping[str, Any]) -> tuple[str, list[str]]:
    """Return mode and names of `allowed_tools`, which the responses API writes without a level in between."""
    allowed = value.get("allowed_tools", value)
    tools = allowed.get("tools") if isinstance(allowed, Mapping) else None
    names = [_read_function_name(tool) for tool in tools] if isinstance(tools, list) else []
    chosen = [name for name in names if name is not None]
    if not chosen or len(chosen) < len(names) or allowed.get("mode") not in ("auto", "required"):
        raise ChatRequestError(
            "tool_choice: allowed_tools needs mode auto or required, and tools, a list of functions with their names",
            param="tool_choice",
        )
    return allowed["mode"], chosen


def _read_function_name(value: Any) -> str | None:
    """Return the name in {"type": "function", ...} of the chat or the responses API; None = there is none."""
    if not isinstance(value, Mapping) or value.get("type") != "function":
        return None
    function = value.get("function")
    name = function.get("name") if isinstance(function, Mapping) else value.get("name")
    return name if isinstance(name, str) and name else None


def parse_bias(value: Any) -> tuple[tuple[int, float], ...]:
    """Parse logit_bias, a mapping from token ids to numbers. Raises: ChatRequestError."""
    if value is None:
        return ()
    if not isinstance(value, Mapping) or len(value) > MAX_BIASED_TOKENS:
        raise ChatRequestError(
            f"logit_bias: must map at most {MAX_BIASED_TOKENS} token ids to numbers",
            param="logit_bias",
        )
    bias = []
    for token, amount in value.items():
        is_id = isinstance(token, str) and token.isascii() and token.isdigit() and len(token) < 10
        if not is_id or not _is_number_within(amount, MAX_BIAS):
            raise ChatRequestError(
                f"logit_bias: must map token ids to numbers from -{MAX_BIAS:g} to {MAX_BIAS:g}",
                param="logit_bias",
            )
        if amount:
            bias.append((int(token), float(amount)))
    if len({token for token, _ in bias}) < len(bias):
        raise ChatRequestError("logit_bias: a token is named twice", param="logit_bias")
    return tuple(sorted(bias))


def _parse_penalty(values: Mapping[str, Any], name: str) -> float:
    value = values.get(name)
    if value is None:
        return 0.0
    if not _is_number_within(value, MAX_PENALTY):
        raise ChatRequestError(
            f"{name}: must be a number from -{MAX_PENALTY:g} to {MAX_PENALTY:g}", param=name
        )
    return float(value)


def _is_number_within(value: Any, limit: float) -> bool:
    return (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and math.isfinite(value)
        and abs(value) <= limit
    )


def _parse_effort(value: Any) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str) or _EFFORT.fullmatch(value) is None:
        raise ChatRequestError(
            "reasoning_effort: must be a word such as low, medium or high",
            param="reasoning_effort",
        )
    return value
