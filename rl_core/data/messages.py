"""Validation of chat messages in data files: OpenAI's fields, with tool calls, tool results, thoughts and weights.

Messages of rows of other formats: ShareGPT's turns, Alpaca's instruction, the dialogues of HH-RLHF.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rl_core.data.files import BadRow, describe_value, read_json, read_text, refuse_unstorable
from rl_core.data.images import (
    IMAGE_MARKER,
    MAX_IMAGES,
    find_image_source,
    is_image_part,
    join_parts,
    load_image,
)
from rl_core.errors import DataError

_ROLES = ("system", "user", "assistant", "tool")
_ALIASES = {"developer": "system"}  # OpenAI's newer name
_REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")  # as they are called by APIs
_FIELDS_BY_ROLE = {
    "assistant": (*_REASONING_FIELDS, "tool_calls", "weight", "train"),
    "tool": ("tool_call_id", "name"),
}
_HINTS = {
    "function_call": "write it as tool_calls: [{'type': 'function', 'function': {'name': ..., 'arguments': {...}}}]",
    "from": "ShareGPT's name for role",
    "value": "ShareGPT's name for content",
}


def validate_messages(
    value: object, name: str, *, with_images: bool = False
) -> list[dict[str, Any]]:
    """Return messages with role and content, and OpenAI's other fields if they hold something.

    Content parts of type text are joined, arguments of calls become objects, the role developer becomes system, `train`
    becomes a weight, and null fields are dropped, except within JSON text. Every other field is refused: nothing of a
    message
    is lost. Parts of type image, whose files were loaded (`load_row_images`), become markers and data URLs.
    Args:
        with_images: images are allowed, other than in assistant messages.
    Raises: BadRow naming the field.
    """
    if not isinstance(value, list):
        raise BadRow(name, f"must be a list of objects, found {describe_value(value)}")
    if not value:
        raise BadRow(name, "is empty")
    return [
        _validate_message(message, f"{name}[{index}]", with_images)
        for index, message in enumerate(value)
    ]


def validate_tools(raw: object, name: str = "tools") -> list[dict[str, Any]]:
    """Return a row's tool schemas: a list of {"type": "function", "function": {...}}, or its JSON text.

    Bare functions {"name", "parameters", ...}, as in Glaive's data, are taken as such schemas.
    Raises: BadRow naming the field.
    """
    value = read_json(raw, name) if isinstance(raw, str) else raw
    if not isinstance(value, list):
        raise BadRow(name, f"must be a list of tool schemas, found {describe_value(raw)}")
    tools = []
    for index, tool in enumerate(value):
        if isinstance(tool, Mapping) and "name" in tool and "function" not in tool:
            tool = {"function": tool}
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise BadRow(
                f"{name}[{index}]", "must be {'type': 'function', 'function': {'name': ..., ...}}"
            )
        refuse_unstorable(tool, f"{name}[{index}]")
        tools.append({"type": "function", **(tool if isinstance(raw, str) else _drop_nulls(tool))})
    return tools


def _validate_message(message: object, place: str, with_images: bool) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise BadRow(
            place, f"must be an object with role and content, found {describe_value(message)}"
        )
    fields = {
        name: value for name, value in message.items() if value is not None
    }  # Parquet fills in nulls
    role = read_text(fields, "role", f"{place}.role")
    role = _ALIASES.get(role, role)
    if role not in _ROLES:
        raise BadRow(
            f"{place}.role", f"must be one of {', '.join(_ROLES)}, found {describe_value(role)}"
        )
    allowed = ("role", "content", *_FIELDS_BY_ROLE.get(role, ()))
    if with_images and role != "assistant" and isinstance(fields.get("images"), list):
        allowed = (*allowed, "images")  # as files of the data stage have them
    unknown = next((name for name in fields if name not in allowed), None)
    if unknown is not None:
        hint = _HINTS.get(str(unknown), f"known for {role}: {', '.join(allowed)}")
        raise BadRow(f"{place}.{unknown}", f"is not understood and would be lost; {hint}")
    others = (
        _read_assistant_fields(fields, place)
        if role == "assistant"
        else {n: fields[n] for n in allowed[2:] if n in fields}
    )
    for name in ("tool_call_id", "name"):
        if name in others:
            read_text(others, name, f"{place}.{name}")
    may_be_empty = role == "tool" or "tool_calls" in others
    content, images = _read_content(
        message, f"{place}.content", may_be_empty, with_images and role != "assistant"
    )
    if images:
        others["images"] = images
    return {"role": role, "content": content, **others}


def _read_content(
    fields: Mapping[str, Any], place: str, may_be_empty: bool, with_images: bool
) -> tuple[str, list[str]]:
    """Return the text of a message, its parts joined, and the data URLs of its images."""
    content = fields.get("content")
    if may_be_empty and content is None:
        return "", []
    if not isinstance(content, list):
        return read_text(fields, "content", place, may_be_empty=may_be_empty), []
    for index, part in enumerate(content):
        is_text = (
            isinstance(part, Mapping)
            and part.get("type") == "text"
            and isinstance(part.get("text"), str)
        )
        if is_text or (with_images and is_image_part(part)):
            continue
        kind = part.get("type") if isinstance(part, Mapping) else None
        description = f"a part of type {kind!r}" if isinstance(kind, str) else describe_value(part)
        if is_image_part(part):
            description += (
                "; images are read in demonstrations and prompts, not in assistant messages"
            )
        raise BadRow(
            f"{place}[{index}]", f"must be {{'type': 'text', 'text': ...}}, found {description}"
        )
    text, images = join_parts(content, lambda index, source: str(source))
    return read_text({"content": text}, "content", place, may_be_empty=may_be_empty), images


def load_row_images(
    row: dict[str, Any], folder: Path | None, *, may_be_unused: bool = False
) -> dict[str, Any]:
    """Return a row whose messages hold the data URL of each image, instead of a file's name or an image of Pillow.

    Parts of type image without a source, and markers in texts, stand for the images of the column `images`, in order,
    as TRL and verl write rows.
    Args:
        folder: of relative paths; None = the current one.
        may_be_unused: a column `images` may be for something else, if no message has a place for them.
    Raises: BadRow naming the field.
    """
    lists = [
        name for name in ("messages", "prompt", "completion") if isinstance(row.get(name), list)
    ]
    column = row.get("images")
    column = column if isinstance(column, list) else [] if column is None else [column]
    if may_be_unused and column and IMAGE_MARKER in str(row.get("prompt")) and not lists:
        raise BadRow(
            "prompt",
            f"is a text with the marker {IMAGE_MARKER}, and images are shown in messages: "
            "[{'role': 'user', 'content': ...}]",
        )
    num_places = 0  # for images of the column

    def take_image(place: str) -> str:
        nonlocal num_places
        num_places += 1
        if num_places > len(column):
            return ""  # refused below
        return _load_part(column[num_places - 1], folder, place)

    loaded = dict(row)
    has_images = False
    for name in lists:
        loaded[name] = [
            _load_message_images(
                message, f"{name}[{index}]", folder, take_image if column else None
            )
            for index, message in enumerate(row[name])
        ]
        has_images |= any(new is not old for new, old in zip(loaded[name], row[name], strict=True))
    if not num_places and (has_images or may_be_unused or not lists or not column):
        return loaded
    if num_places != len(column):
        raise BadRow(
            "images",
            f"holds {len(column)} images, and the messages have {num_places} parts or markers "
            f"{IMAGE_MARKER} for them",
        )
    del loaded["images"]
    return loaded


def _load_message_images(
    message: Any, place: str, folder: Path | None, take_image: Callable[[str], str] | None
) -> Any:
    """Return a message of a row with its images; `take_image` gives the next one of the row's column, if it has one."""
    content = message.get("content") if isinstance(message, Mapping) else None
    if isinstance(message, Mapping) and isinstance(message.get("images"), list):
        num_markers = str(content).count(IMAGE_MARKER)
        urls = [
            _load_part(source, folder, f"{place}.images[{number}]")
            for number, source in enumerate(message["images"])
        ]
        if num_markers != len(urls):
            raise BadRow(
                f"{place}.images",
                f"holds {len(urls)} images, and the content has {num_markers} markers {IMAGE_MARKER} for them",
            )
        return {**message, "images": urls}
    if isinstance(content, list) and any(map(is_image_part, content)):
        if sum(map(is_image_part, content)) > MAX_IMAGES:
            raise BadRow(f"{place}.content", f"has more than {MAX_IMAGES} images")
        parts = []
        for number, part in enumerate(content):
            if is_image_part(part):
                source, part_place = find_image_source(part), f"{place}.content[{number}]"
                if source is None and take_image is not None:
                    url = take_image(part_place)
                else:
                    url = _load_part(source, folder, part_place)
                part = {"type": "image", "image": url}
            parts.append(part)
        return {**message, "content": parts}
    num_markers = content.count(IMAGE_MARKER) if isinstance(content, str) else 0
    if take_image is None or not num_markers or message.get("role") == "assistant":
        return message
    if num_markers > MAX_IMAGES:
        raise BadRow(f"{place}.content", f"has more than {MAX_IMAGES} images")
    return {**message, "images": [take_image(f"{place}.content") for _ in range(num_markers)]}


def _load_part(source: object, folder: Path | None, place: str) -> str:
    """Return the data URL of an image. Raises: BadRow naming the field."""
    try:
        return load_image(source, folder or Path())
    except DataError as error:
        raise BadRow(place, str(error)) from None


def _read_assistant_fields(fields: Mapping[str, Any], place: str) -> dict[str, Any]:
    known: dict[str, Any] = {}
    thoughts = {
        name: read_text(fields, name, f"{place}.{name}", may_be_empty=True)
        for name in _REASONING_FIELDS
        if name in fields
    }
    if len(set(thoughts.values())) > 1:
        raise BadRow(
            f"{place}.{list(thoughts)[1]}", f"differs from {next(iter(thoughts))}; keep one of them"
        )
    thought = next(iter(thoughts.values()), "").strip()
    if thought:
        known["reasoning_content"] = thought
    if "tool_calls" in fields:
        known["tool_calls"] = _validate_calls(fields["tool_calls"], f"{place}.tool_calls")
        if not known["tool_calls"]:
            del known["tool_calls"]
    weight = _read_loss_weight(fields, place)
    return known if weight == 1 else {**known, "weight": 0}


def _read_loss_weight(fields: Mapping[str, Any], place: str) -> int:
    """Return 1 = the message carries loss, 0 = it does not."""
    weights = {name: fields[name] for name in ("weight", "train") if name in fields}
    for name, value in weights.items():
        if value not in (0, 1):  # True and False equal 1 and 0
            raise BadRow(f"{place}.{name}", f"must be 0 or 1, found {describe_value(value)}")
    if len({int(value) for value in weights.values()}) > 1:
        raise BadRow(f"{place}.train", "contradicts weight; keep one of them")
    return int(next(iter(weights.values()), 1))


def _validate_calls(raw: object, place: str) -> list[dict[str, Any]]:
    value = read_json(raw, place) if isinstance(raw, str) else raw
    if not isinstance(value, list):
        raise BadRow(place, f"must be a list of calls, found {describe_value(raw)}")
    calls = []
    for index, call in enumerate(value):
        where, is_text = f"{place}[{index}]", isinstance(raw, str)
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping):
            raise BadRow(
                where, "must be {'type': 'function', 'function': {'name': ..., 'arguments': {...}}}"
            )
        unknown = [
            n
            for n, v in call.items()
            if v is not None and n not in ("type", "id", "function", "index")
        ]
        unknown += [
            f"function.{n}"
            for n, v in function.items()
            if v is not None and n not in ("name", "arguments")
        ]
        if unknown:
            raise BadRow(f"{where}.{unknown[0]}", "is not understood and would be lost; remove it")
        name = read_text(function, "name", f"{where}.function.name")
        arguments = function.get("arguments") or {}
        if isinstance(arguments, str):
            arguments, is_text = read_json(arguments, f"{where}.function.arguments"), True
        if not isinstance(arguments, Mapping):
            raise BadRow(
                f"{where}.function.arguments",
                f"must be an object or its JSON text, found {describe_value(arguments)}",
            )
        refuse_unstorable(arguments, f"{where}.function.arguments")
        arguments = arguments if is_text else _drop_nulls(arguments)  # JSON text says what it means
        call_fields = {"type": "function", "function": {"name": name, "arguments": arguments}}
        calls.append(call_fields | ({"id": str(call["id"])} if call.get("id") is not None else {}))
    return calls


def _drop_nulls(value: Any) -> Any:
    """Return a plain copy without nulls.

    Objects of a Parquet column share fields, so other rows' fields appear as nulls.
    """
    if isinstance(value, Mapping):
        return {name: _drop_nulls(item) for name, item in value.items() if item is not None}
    return [_drop_nulls(item) for item in value] if isinstance(value, list) else value


Row = dict[str, Any]

_SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "prompter": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "model": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
    "function_call": "call",
    "tool_call": "call",
}
HH_TURN = re.compile(r"\n\n(Human|Assistant): ?")


def build_user_message(text: str) -> Row:
    """Build a message of the user."""
    return {"role": "user", "content": text}


def build_assistant_message(text: str) -> Row:
    """Build a message of the assistant."""
    return {"role": "assistant", "content": text}


def drop_message_loss(message: Any) -> Any:
    """Return an assistant message of a prompt, which carries no loss."""
    return (
        {**message, "weight": 0}
        if isinstance(message, Mapping) and message.get("role") == "assistant"
        else message
    )


def wrap_in_list(value: Any) -> list[Any]:
    """Return one message as a list of one."""
    return [value] if isinstance(value, Mapping) else list(value)


def convert_sharegpt(row: Row, name: str) -> list[Row]:
    """Convert a conversation that ends with an answer to messages."""
    messages = convert_sharegpt_turns(row, name)
    if messages[-1].get("role") == "user":
        raise BadRow(
            f"{name}[{len(row[name]) - 1}].from",
            f"is the user's turn at the end, so nobody answers it; cut it: jq -c '.{name} |= .[:-1]' FILE > NEW",
        )
    return messages


def convert_sharegpt_turns(row: Row, name: str) -> list[Row]:
    """Convert turns {"from", "value"} to messages, the row's system message first."""
    turns = row[name]
    if not isinstance(turns, list) or not turns:
        raise BadRow(name, f"must be a list of turns, found {describe_value(turns)}")
    system = row.get("system")
    messages: list[Row] = (
        [{"role": "system", "content": system}]
        if isinstance(system, str) and system.strip()
        else []
    )
    for index, turn in enumerate(turns):
        place = f"{name}[{index}]"
        if not isinstance(turn, Mapping):
            raise BadRow(
                place, f"must be an object with from and value, found {describe_value(turn)}"
            )
        messages.append(dict(turn) if "role" in turn else _convert_sharegpt_turn(turn, place))
    return messages


def _convert_sharegpt_turn(turn: Mapping[str, Any], place: str) -> Row:
    """Convert a turn {"from", "value"} to a message, with whatever else the turn has."""
    fields = {name: value for name, value in turn.items() if value is not None}
    word = read_text(fields, "from", f"{place}.from")
    role = _SHAREGPT_ROLES.get(word.lower())
    if role is None:
        raise BadRow(
            f"{place}.from", f"must be one of {', '.join(_SHAREGPT_ROLES)}, found {word!r}"
        )
    others = {name: value for name, value in fields.items() if name not in ("from", "value")}
    text = read_text(fields, "value", f"{place}.value", may_be_empty=role == "tool")
    return {
        **(_parse_call_turn(text, place) if role == "call" else {"role": role, "content": text}),
        **others,
    }


def _parse_call_turn(text: str, place: str) -> Row:
    """Parse a turn that calls tools: JSON {"name", "arguments"}, or a list of them."""
    try:
        calls = json.loads(text)
    except ValueError as error:
        raise BadRow(f"{place}.value", f"is no call in JSON: {error}") from None
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"type": "function", "function": call}
            for call in (calls if isinstance(calls, list) else [calls])
        ],
    }


def convert_alpaca(row: Row, context: str) -> list[Row]:
    """Convert a row: instruction, a blank line and the input are the user's message; system and history come first."""
    messages: list[Row] = []
    if isinstance(row.get("system"), str) and row["system"].strip():
        messages.append({"role": "system", "content": row["system"]})
    for index, pair in enumerate(row.get("history") or []):
        if not isinstance(pair, list) or len(pair) != 2:
            raise BadRow(
                f"history[{index}]",
                f"must be a question and an answer, found {describe_value(pair)}",
            )
        messages += [build_user_message(pair[0]), build_assistant_message(pair[1])]
    prompt = read_text(row, "instruction")
    if row.get(context):
        prompt += "\n\n" + read_text(row, context)
    return [*messages, build_user_message(prompt)]


def parse_hh_turns(row: Row, name: str) -> list[Row]:
    r"""Parse the turns of a text "\n\nHuman: ... \n\nAssistant: ..."."""
    text = read_text(row, name)
    parts = HH_TURN.split(text)
    if len(parts) < 5 or parts[0].strip():
        raise BadRow(name, "is no dialogue of the human and the assistant")
    roles = {"Human": "user", "Assistant": "assistant"}
    turns = [
        {"role": roles[who], "content": content.strip()}
        for who, content in zip(parts[1::2], parts[2::2], strict=True)
    ]
    if turns[-1]["role"] != "assistant":
        raise BadRow(name, "ends with the human's turn")
    empty = next((index for index, turn in enumerate(turns) if not turn["content"]), None)
    if empty is not None:
        raise BadRow(name, f"turn {empty + 1} is empty")
    return turns
