"""Fuzzing targets: each reads an input, and raises for anything but a clean result or one of our errors.

A clean result can be stored: written as JSON in UTF-8, and read again as the same.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from helpers import chat_templates

from rl_core.analysis.trajectories import read_trajectories
from rl_core.data import records
from rl_core.data.chat import ChatRenderer
from rl_core.data.files import BadRow
from rl_core.data.messages import validate_messages, validate_tools
from rl_core.data.tokenizer import train_tokenizer
from rl_core.environments.calculator import CALCULATOR, extract_final_answer
from rl_core.environments.question_episodes import read_tagged_answer
from rl_core.environments.tools import Tool, Toolset
from rl_core.errors import DataError, PosttrainError, SettingsError, ToolMisuse
from rl_core.readers import iter_metrics, iter_rewards
from rl_core.rollouts.rollout_files import _read_token_rows
from rl_core.storage.append_log import read_checked_lines
from tasks.config import build_settings, digest_settings, dump_settings, load_settings

__all__ = ["CORPUS", "SOURCES", "TARGETS", "read_corpus"]

CORPUS = Path(__file__).with_name("corpus")
MAX_MESSAGE = 50_000
TOOLS = Toolset(
    [
        CALCULATOR,
        Tool("zoom", "part", {"row": int, "col": float, "why": str}, lambda row, col, why: why),
    ]
)
# Files whose lines count as covered, by target.
SOURCES = {
    "config": ("tasks/config/", "rl_core/settings/"),
    "data": (
        "rl_core/data/files",
        "rl_core/data/records",
        "rl_core/data/messages",
        "rl_core/analysis/trajectories",
        "rl_core/readers",
        "rl_core/storage/append_log",
        "rl_core/rollouts/rollout_files",
    ),
    "tool_call": (
        "rl_core/environments/tools",
        "rl_core/environments/calculator",
        "rl_core/environments/answer_checks",
        "rl_core/environments/number_values",
        "rl_core/environments/question_episodes",
        "rl_core/data/model_text",
    ),
    "chat": (
        "rl_core/data/chat",
        "rl_core/data/messages",
        "rl_core/data/model_text",
        "rl_core/data/formats",
    ),
    "template": ("rl_core/data/template_report", "rl_core/data/chat"),
}


def read_corpus(target: str) -> list[bytes]:
    """Return the stored inputs of a target, sorted by name."""
    return [path.read_bytes() for path in sorted((CORPUS / target).iterdir())]


@functools.cache
def _make_scratch_folder() -> Path:
    folder = tempfile.mkdtemp(
        prefix="fuzz-", dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    )
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def _write_file(name: str, data: bytes) -> Path:
    path = _make_scratch_folder() / name
    path.write_bytes(data)
    return path


def _check_message(error: Exception) -> None:
    text = str(error)
    assert 0 < len(text) < MAX_MESSAGE, f"a message of {len(text)} characters"


def read_config(data: bytes) -> None:
    """Read a configuration: settings that stay the same when they are stored, or problems with their places."""
    path = _write_file("config.yaml", data)
    try:
        settings = load_settings(path, check_files=False, import_code=False)
    except SettingsError as error:
        _check_message(error)
        assert "config.yaml" in str(error), "the message names no place"
        return
    values = json.loads(
        json.dumps(dump_settings(settings), allow_nan=False, ensure_ascii=False).encode()
    )
    again = build_settings(values, check_files=False, import_code=False)
    assert digest_settings(again) == digest_settings(settings)


def _consume(rows: Iterable[Any]) -> None:
    for row in rows:
        assert row is not None


_READERS: tuple[Callable[[Path], object], ...] = (
    lambda path: _consume(read_trajectories(path)),
    lambda path: _consume(iter_metrics(path)),
    lambda path: _consume(iter_rewards(path)),
    lambda path: _consume(_read_token_rows(path)),
    lambda path: _consume(read_checked_lines(path)),
)
_RECORDS: tuple[Callable[..., records.Records], ...] = (
    records.read_demonstrations,
    records.read_preferences,
    records.read_prompts,
    records.read_questions,
)


def read_data(data: bytes) -> None:
    """Read lines by every reader; valid rows can be stored and are then read as the same."""
    path = _write_file("data.jsonl", data)
    for read in _READERS:
        try:
            read(path)
        except DataError as error:
            _check_message(error)
    for read_records in _RECORDS:
        try:
            rows_read = read_records(path, on_bad_row="skip")
        except DataError as error:
            _check_message(error)
            continue
        stored = "".join(
            json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n" for row in rows_read.rows
        )
        again = read_records(_write_file("again.jsonl", stored.encode("utf-8")))
        assert again.rows == rows_read.rows


def read_tool_call(data: bytes) -> None:
    """Read a policy's text: a call that runs, misuse, or no call; and answers within it."""
    text = data.decode("utf-8", "replace")
    try:
        call = TOOLS.parse(text)
        output = "" if call is None else TOOLS.run(call)[0]
    except ToolMisuse as misuse:
        output = str(misuse)
    assert len(output.encode("utf-8")) < 9000
    for answer in (extract_final_answer(text), read_tagged_answer(text)):
        assert answer is None or len(answer) <= len(text)


@functools.cache
def _make_renderers() -> tuple[ChatRenderer, ...]:
    renderer = ChatRenderer(train_tokenizer(chat_templates.TEXTS, vocab_size=300))
    kinds = (
        chat_templates.OPENS_AND_STRIPS,
        chat_templates.OPENS_KEEPS_LAST,
        chat_templates.HERMES,
    )
    return (renderer, *(ChatRenderer(chat_templates.family(kind)) for kind in kinds))


def _try(function: Callable[[], Any]) -> Any:
    try:
        return function()
    except (DataError, SettingsError) as error:
        _check_message(error)
        return None


def read_chat(data: bytes) -> None:
    """Render messages of a data file through every kind of chat template to token ids and a mask."""
    try:
        row = json.loads(data)
        messages = validate_messages(row["messages"], "messages")
        tools = validate_tools(row["tools"]) if row.get("tools") else []
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError, BadRow):
        return
    for renderer in _make_renderers():
        with_tools = _try(lambda renderer=renderer: renderer.with_tools(tools)) or renderer
        opening: Any = [message for message in messages if message["role"] != "assistant"]
        prompt_ids = _try(lambda r=with_tools, messages=opening: r.prompt_ids(messages))
        assert prompt_ids is None or all(token >= 0 for token in prompt_ids)
        encoded = _try(lambda r=with_tools: r.encode_conversation(messages))
        if encoded is not None:
            ids, mask = encoded
            assert len(ids) == len(mask) and (
                any(mask) or all(m.get("weight") == 0 for m in messages if m["role"] == "assistant")
            )
        for message in messages:
            ids = _try(lambda r=with_tools, m=message: r.action_ids(m["content"]))
            assert ids is None or ids[-1] == with_tools.eos_id
            if ids is not None:
                with_tools.action_text(ids).encode("utf-8")


@functools.cache
def _make_tokenizer() -> Any:
    return chat_templates.family(chat_templates.HERMES)


def read_template(data: bytes) -> None:
    """Examine and use a chat template, unless it is refused."""
    tokenizer = _make_tokenizer()
    tokenizer.chat_template = data.decode("utf-8", "replace")
    renderer = _try(lambda: ChatRenderer(tokenizer))
    if renderer is None:
        return
    ids = _try(lambda: renderer.prompt_ids([{"role": "user", "content": "zoom 2 3"}]))
    assert ids is None or all(0 <= token < len(tokenizer) for token in ids)


TARGETS: dict[str, Callable[[bytes], None]] = {
    "config": read_config,
    "data": read_data,
    "tool_call": read_tool_call,
    "chat": read_chat,
    "template": read_template,
}
assert issubclass(SettingsError, PosttrainError)
