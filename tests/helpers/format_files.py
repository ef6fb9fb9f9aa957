"""The files of `tests/helpers/data_formats/`: their rows as tokens, and the same from TRL, recorded."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from helpers import ROOT
from rl_core.data.chat import ChatRenderer
from rl_core.data.formats import RowKind
from rl_core.data.pairs import build_row_sides
from rl_core.data.records import Records, read_demonstrations, read_preferences
from rl_core.data.tokenizer import train_tokenizer
from rl_core.data.training_sequences import build_training_sequences

FOLDER = ROOT / "tests/helpers/data_formats"
RECORDED = ROOT / "tests/helpers/peers/trl_masks.json"
TEMPLATE = (
    "{% if tools %}{{ '<|system|>' + (tools | tojson) + '<|end|>' }}{% endif %}"
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' }}{% if message['role'] == 'assistant' %}"
    "{% generation %}{% if message.get('reasoning_content') %}"
    "{{ '<think>' + message['reasoning_content'] + '</think>' }}{% endif %}"
    "{{ message['content'] or '' }}{% for call in message.get('tool_calls') or [] %}"
    "{{ '<tool_call>' + (call['function'] | tojson) + '</tool_call>' }}{% endfor %}{{ '<|end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

Sides = list[tuple[list[int], list[bool]]]  # token ids and loss mask of each sequence of a row


@dataclass(frozen=True)
class FormatFile:
    """One file: its format, and the trainer of TRL that such rows are for."""

    name: str
    label: str  # of the table
    kind: RowKind
    trainer: str  # sft, dpo or kto

    @property
    def path(self) -> Path:
        """The file."""
        return FOLDER / f"{self.name}.jsonl"


FILES = (
    FormatFile("messages", "messages", "demonstrations", "sft"),
    FormatFile("messages_openai", "messages, with OpenAI's fields", "demonstrations", "sft"),
    FormatFile("messages_tools", "messages with tools", "demonstrations", "sft"),
    FormatFile("prompt_completion", "prompt and completion", "demonstrations", "sft"),
    FormatFile("conversational", "prompt and completion, conversational", "demonstrations", "sft"),
    FormatFile("sharegpt", "ShareGPT", "demonstrations", "sft"),
    FormatFile("sharegpt_tools", "ShareGPT with calls", "demonstrations", "sft"),
    FormatFile("alpaca", "Alpaca", "demonstrations", "sft"),
    FormatFile("dolly", "Dolly", "demonstrations", "sft"),
    FormatFile("text", "text", "demonstrations", "sft"),
    FormatFile("pairs", "pairs", "preferences", "dpo"),
    FormatFile("pairs_conversational", "pairs, conversational", "preferences", "dpo"),
    FormatFile("pairs_turns", "pairs, a side of several turns", "preferences", "dpo"),
    FormatFile("implicit_prompt", "pairs, implicit prompt", "preferences", "dpo"),
    FormatFile("ultrafeedback_binarized", "UltraFeedback, binarized", "preferences", "dpo"),
    FormatFile("sharegpt_pairs", "ShareGPT, pairs", "preferences", "dpo"),
    FormatFile("alpaca_pairs", "Alpaca, pairs", "preferences", "dpo"),
    FormatFile("hh_rlhf", "HH-RLHF", "preferences", "dpo"),
    FormatFile("orca_dpo", "Orca-DPO", "preferences", "dpo"),
    FormatFile("orca_dpo_distilabel", "Orca-DPO, distilabel", "preferences", "dpo"),
    FormatFile("kto", "KTO", "preferences", "kto"),
    FormatFile("kto_conversational", "KTO, conversational", "preferences", "kto"),
    FormatFile("kto_messages", "KTO, messages", "preferences", "kto"),
)


def make_renderer(texts: list[str], vocab_size: int) -> ChatRenderer:
    """Make the renderer of a tokenizer trained on the texts, with a template from which TRL's masks can be taken."""
    tokenizer = train_tokenizer(texts, vocab_size)
    tokenizer.chat_template = TEMPLATE
    return ChatRenderer(tokenizer)


def small_renderer() -> ChatRenderer:
    """Return the same renderer for the files of the folder, every time."""
    return make_renderer([file.path.read_text() for file in FILES] * 3, 400)


def read_raw_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows as they stand in a file."""
    return [json.loads(line) for line in path.read_text().split("\n") if line]


def read(path: Path, kind: RowKind) -> Records:
    """Return the rows as they are loaded."""
    return read_demonstrations(path) if kind == "demonstrations" else read_preferences(path)


def sides_of(row: dict[str, Any], renderer: ChatRenderer) -> Sides:
    """Return token ids and loss mask of each sequence of a loaded row."""
    if "messages" in row:
        return build_training_sequences(renderer, row["messages"], row.get("tools"))
    return [
        (side.ids, [False] * len(side.prompt_ids) + side.loss_mask)
        for side, _ in build_row_sides(row, renderer)
    ]


def list_loss_positions(mask: list[bool]) -> list[int]:
    """Return the positions of the tokens that carry loss."""
    return [position for position, learns in enumerate(mask) if learns]


def read_recorded_masks() -> dict[str, Any]:
    """Return the results of `tests/benchmarks/trl_masks.py`."""
    results: dict[str, Any] = json.loads(RECORDED.read_text())
    return results
