"""Demonstrations as training sequences: calls, thoughts, turns with loss, and a history without thoughts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers.chat_templates import (
    DATED,
    HERMES,
    OPENS_AND_STRIPS,
    OPENS_KEEPS_LAST,
    SWITCHED,
    family,
)

from rl_core.data.chat import ChatRenderer
from rl_core.data.records import read_demonstrations, read_prompts
from rl_core.data.training_sequences import build_training_sequences
from rl_core.environments.tools import Tool, Toolset
from rl_core.errors import DataError, RecordsError
from rl_core.settings import ModelSettings

THINK = ("<think>", "</think>")
CALL = ("<tool_call>", "</tool_call>")
ZOOM = Toolset([Tool("zoom", "a cell", {"row": int}, lambda row: row)])


def make_user_message(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def make_assistant_message(text: str, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **fields}


def make_call(row: int, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "zoom", "arguments": {"row": row}}, **fields}


def read_row(*messages: dict[str, Any], **columns: Any) -> dict[str, Any]:
    return read_demonstrations([{"messages": list(messages), **columns}]).rows[0]


def decode_ids(renderer: ChatRenderer, ids: list[int]) -> str:
    return renderer.tokenizer.decode(
        ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
    )


def decode_loss_tokens(renderer: ChatRenderer, sequence: tuple[list[int], list[bool]]) -> str:
    return decode_ids(renderer, [token for token, learns in zip(*sequence, strict=True) if learns])


TALKS = {
    "answers": (
        [
            make_user_message("u"),
            make_assistant_message("a b"),
            make_user_message("v"),
            make_assistant_message("red"),
        ],
        None,
    ),
    "system": (
        [
            {"role": "developer", "content": "s"},
            make_user_message("u"),
            make_assistant_message("red"),
        ],
        None,
    ),
    "call": (
        [
            make_user_message("u"),
            make_assistant_message("", tool_calls=[make_call(2)]),
            {"role": "tool", "content": "red"},
            make_assistant_message("red"),
        ],
        None,
    ),
    "words and calls": (
        [
            make_user_message("u"),
            make_assistant_message("so", tool_calls=[make_call(1), make_call(2)]),
            {"role": "tool", "content": "a"},
            make_assistant_message("b"),
        ],
        ZOOM.schema(),
    ),
    "parts": (
        [
            make_user_message("u"),
            make_assistant_message([{"type": "text", "text": "a "}, {"type": "text", "text": "b"}]),
        ],
        None,
    ),  # type: ignore[arg-type]
    "json": (
        [make_user_message("u"), make_assistant_message("", tool_calls=[make_call(2, id="1")])],
        None,
    ),
}


@pytest.mark.parametrize("name", TALKS)
@pytest.mark.parametrize("markers", [(), CALL])
@pytest.mark.parametrize("history", ["keep", "template"])
def test_ids_and_loss_mask_are_those_of_the_template(
    name: str, markers: tuple[str, ...], history: Any
) -> None:
    messages, tools = TALKS[name]
    row = read_row(*messages, **({"tools": tools} if tools else {}))
    renderer = ChatRenderer(family(HERMES, markers), ModelSettings(history_thoughts=history))
    ((ids, mask),) = build_training_sequences(renderer, row["messages"], row.get("tools"))
    encoded = renderer.tokenizer.apply_chat_template(
        row["messages"],
        tools=tools,
        tokenize=True,
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    assert sum(mask) > 0 and ids == encoded["input_ids"][: len(ids)]
    assert mask == [bool(flag) for flag in encoded["assistant_masks"][: len(ids)]]
    assert decode_ids(renderer, encoded["input_ids"][len(ids) :]) == "\n" and not any(
        encoded["assistant_masks"][len(ids) :]
    )


def test_a_call_is_written_as_the_template_does_and_read_by_the_tools() -> None:
    renderer = ChatRenderer(family(HERMES, CALL))
    arguments = '{"row": 2}'  # OpenAI sends the JSON text
    spelt = {"id": "c1", "type": "function", "function": {"name": "zoom", "arguments": arguments}}
    row = read_row(
        make_user_message("u"), {"role": "assistant", "content": None, "tool_calls": [spelt]}
    )
    text = decode_loss_tokens(renderer, build_training_sequences(renderer, row["messages"])[0])
    assert text == '<tool_call>{"name": "zoom", "arguments": {"row": 2}}</tool_call><|im_end|>'
    parsed = ZOOM.parse(text.removesuffix("<|im_end|>"))
    assert parsed is not None and parsed.arguments == {"row": 2}


def test_a_call_that_the_template_leaves_out_is_written_in_tags() -> None:
    renderer = ChatRenderer(family(DATED))
    row = read_row(
        make_user_message("u"),
        make_assistant_message("so", tool_calls=[make_call(2)]),
        {"role": "tool", "content": "7"},
        make_assistant_message("7"),
    )
    text = decode_loss_tokens(renderer, build_training_sequences(renderer, row["messages"])[0])
    assert (
        text
        == 'so\n<tool_call>{"name": "zoom", "arguments": {"row": 2}}</tool_call><|im_end|>7<|im_end|>'
    )
    assert ZOOM.parse(renderer.render_assistant_text(row["messages"][1])) is not None
    history = decode_ids(renderer, renderer.prompt_ids(row["messages"][:3]))
    assert '"arguments": {"row": 2}}' in history, "nor is it lost as part of a prompt"


def test_a_call_that_the_template_writes_as_two_turns_is_written_in_tags() -> None:
    twice = HERMES.replace(
        "{% endfor %}<|im_end|>{% end",
        "<|im_end|>\n<|im_start|>assistant\n{% endfor %}<|im_end|>{% end",
    )
    renderer = ChatRenderer(family(twice, CALL))
    assert renderer.facts.renders_calls == ""
    text = renderer.render_assistant_text(
        read_row(make_user_message("u"), make_assistant_message("", tool_calls=[make_call(2)]))[
            "messages"
        ][1]
    )
    assert text == '<tool_call>{"name": "zoom", "arguments": {"row": 2}}</tool_call>'


@pytest.mark.parametrize("template", [OPENS_KEEPS_LAST, OPENS_AND_STRIPS])
@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_is_the_thought_of_the_turn(template: str, name: str) -> None:
    renderer = ChatRenderer(family(template, THINK))
    row = read_row(make_user_message("u"), make_assistant_message("red", **{name: "look"}))
    sequence = build_training_sequences(renderer, row["messages"])[0]
    assert decode_ids(renderer, sequence[0]) == (
        "<|im_start|>user\nu<|im_end|>\n<|im_start|>assistant\n<think>\nlook\n</think>\n\nred<|im_end|>"
    )
    assert decode_loss_tokens(renderer, sequence) == "look\n</think>\n\nred<|im_end|>"
    in_content = read_row(
        make_user_message("u"), make_assistant_message("<think>\nlook\n</think>\n\nred")
    )
    assert build_training_sequences(renderer, in_content["messages"])[0] == sequence


def test_reasoning_before_a_call() -> None:
    renderer = ChatRenderer(family(OPENS_KEEPS_LAST, (*THINK, *CALL)))
    row = read_row(
        make_user_message("u"),
        make_assistant_message("", reasoning_content="look", tool_calls=[make_call(2)]),
    )
    assert decode_loss_tokens(renderer, build_training_sequences(renderer, row["messages"])[0]) == (
        'look\n</think>\n\n<tool_call>\n{"name": "zoom", "arguments": {"row": 2}}\n</tool_call><|im_end|>'
    )
    with pytest.raises(
        DataError, match=r"^reasoning_content: the chat template does not render it"
    ):
        build_training_sequences(
            ChatRenderer(family(DATED)),
            read_row(make_user_message("u"), make_assistant_message("a", reasoning_content="b"))[
                "messages"
            ],
        )


def test_reasoning_has_the_form_of_the_template() -> None:
    """Check a form other than <think> on separate lines, and arguments as JSON text."""
    template = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}:"
        "{% if m.get('reasoning_content') %}[THINK]{{ m['reasoning_content'] }}[/THINK]{% endif %}{{ m['content'] }}"
        "{% for call in m.get('tool_calls') or [] %}{{ '[TOOL_CALLS]' + call.function.name + '[ARGS]' }}"
        "{{ call.function.arguments + '' }}{% endfor %}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant:{% endif %}"
    )
    renderer = ChatRenderer(family(template, ("[THINK]", "[/THINK]", "[TOOL_CALLS]", "[ARGS]")))
    assert renderer.facts.renders_calls == "text" and len(renderer.facts.markers) == 4
    row = read_row(
        make_user_message("u"),
        make_assistant_message("so", reasoning_content="look", tool_calls=[make_call(2)]),
    )
    ((ids, mask),) = build_training_sequences(renderer, row["messages"])
    text = decode_loss_tokens(renderer, (ids, mask))
    assert text == '[THINK]look[/THINK]so[TOOL_CALLS]zoom[ARGS]{"row": 2}<|im_end|>'
    assert all(
        ids.count(renderer.tokenizer.convert_tokens_to_ids(marker)) == 1
        for marker in renderer.facts.markers
    )
    parsed = ZOOM.parse(renderer.action_text(ids[mask.index(True) :]))
    assert parsed is not None and parsed.arguments == {"row": 2}


TWO = (
    make_user_message("u"),
    make_assistant_message("<think>\nlook\n</think>\n\nzoom"),
    {"role": "tool", "content": "t"},
    make_assistant_message("<think>\nso\n</think>\n\nred"),
    make_user_message("v"),
    make_assistant_message("<think>\nnow\n</think>\n\nblue"),
)


@pytest.mark.parametrize(
    ("template", "cuts"), [(OPENS_KEEPS_LAST, [2, 1]), (OPENS_AND_STRIPS, [1, 1, 1])]
)
def test_a_history_that_loses_its_thoughts_is_several_sequences(
    template: str, cuts: list[int]
) -> None:
    """Check that every turn is trained on once, after exactly what a server would render before it."""
    tokenizer = family(template, THINK)
    renderer = ChatRenderer(tokenizer, ModelSettings(history_thoughts="template"))
    row = read_row(*TWO)
    sequences = build_training_sequences(renderer, row["messages"])
    turns = [index for index, message in enumerate(TWO) if message["role"] == "assistant"]
    assert [
        sum(token == renderer.eos_id for token, learns in zip(*s, strict=True) if learns)
        for s in sequences
    ] == cuts
    served = []
    for index in turns:
        prompt = tokenizer.apply_chat_template(
            list(TWO[:index]), tokenize=True, add_generation_prompt=True
        )["input_ids"]
        expected_text = str(TWO[index]["content"]).removeprefix("<think>\n")
        served.append(
            (
                prompt,
                [*tokenizer(expected_text, add_special_tokens=False)["input_ids"], renderer.eos_id],
            )
        )
    trained = []
    for ids, mask in sequences:
        starts = [
            position for position in range(1, len(ids)) if mask[position] and not mask[position - 1]
        ]
        for start in starts:
            stop = next(
                (position for position in range(start, len(ids)) if not mask[position]), len(ids)
            )
            trained.append((ids[:start], ids[start:stop]))
    assert trained == served


def test_retained_thoughts_are_one_sequence_as_in_a_rollout() -> None:
    renderer = ChatRenderer(family(OPENS_AND_STRIPS, THINK))
    row = read_row(*TWO)
    ((ids, _),) = build_training_sequences(renderer, row["messages"])
    pieces = [renderer.prompt_ids(row["messages"][:1])]
    for index in (1, 3, 5):
        pieces.append(renderer.action_ids(row["messages"][index]["content"]))
        pieces += [renderer.observation_ids(row["messages"][index + 1 : index + 2])] * (index < 5)
    assert ids == [token for piece in pieces for token in piece]


@pytest.mark.parametrize("history", ["keep", "template"])
def test_thoughts_and_the_loss_mask_of_the_template(history: Any) -> None:
    template = SWITCHED.replace(
        "<|im_start|>assistant\n{% if loop.index0 > ns.last %}",
        "<|im_start|>assistant\n{% generation %}{% if loop.index0 > ns.last %}",
    ).replace("{% endfor %}<|im_end|>\n", "{% endfor %}<|im_end|>{% endgeneration %}{{ '\n' }}")
    row = read_row(*TWO[:2], *TWO[2:4])
    renderer = ChatRenderer(family(template, THINK), ModelSettings(history_thoughts=history))
    ((ids, mask),) = build_training_sequences(renderer, row["messages"])
    encoded = renderer.tokenizer.apply_chat_template(
        row["messages"], tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    assert (ids, mask) == (
        encoded["input_ids"][: len(ids)],
        [bool(flag) for flag in encoded["assistant_masks"][: len(ids)]],
    )
    assert decode_loss_tokens(renderer, (ids, mask)).count("<think>") == 2


def test_messages_after_which_the_template_rewrites_the_history() -> None:
    renderer = ChatRenderer(
        family(OPENS_KEEPS_LAST, THINK), ModelSettings(history_thoughts="template")
    )
    assert not renderer.needs_history_rewrite([{"role": "tool", "content": "t"}]), (
        "its thoughts stay through results of tools"
    )
    assert renderer.needs_history_rewrite([make_user_message("v")])  # type: ignore[list-item]
    keeping_renderer = ChatRenderer(family(OPENS_KEEPS_LAST, THINK))
    assert not keeping_renderer.needs_history_rewrite([make_user_message("v")])  # type: ignore[list-item]


def test_turns_that_carry_loss() -> None:
    renderer = ChatRenderer(family(HERMES))
    turns = [
        make_user_message("u"),
        make_assistant_message("a"),
        make_user_message("v"),
        make_assistant_message("b"),
        make_user_message("w"),
        make_assistant_message("c"),
    ]
    of = lambda *messages, **options: decode_loss_tokens(  # noqa: E731
        renderer, build_training_sequences(renderer, read_row(*messages)["messages"], **options)[0]
    )
    assert of(*turns) == "a<|im_end|>b<|im_end|>c<|im_end|>"
    assert of(*turns, loss_on="last") == "c<|im_end|>"
    assert (
        of(*turns[:3], make_assistant_message("b", weight=0), *turns[4:])
        == "a<|im_end|>c<|im_end|>"
    )
    assert (
        of(make_user_message("u"), make_assistant_message("a", train=False), *turns[2:4])
        == "b<|im_end|>"
    )
    assert (
        of(make_user_message("u"), make_assistant_message("a", train=True, weight=1.0))
        == "a<|im_end|>"
    )
    with pytest.raises(DataError, match="no assistant message carries loss"):
        build_training_sequences(
            renderer,
            [
                make_user_message("u"),
                make_assistant_message("a"),
                make_user_message("v"),
                make_assistant_message("b", weight=0),
            ],
            loss_on="last",
        )  # type: ignore[list-item]


def test_a_turn_without_loss_is_context_in_its_sequence_alone() -> None:
    renderer = ChatRenderer(
        family(OPENS_AND_STRIPS, THINK), ModelSettings(history_thoughts="template")
    )
    row = read_row(*TWO)
    sequences = build_training_sequences(renderer, row["messages"], loss_on="last")
    assert [decode_loss_tokens(renderer, sequence) for sequence in sequences] == [
        "now\n</think>\n\nblue<|im_end|>"
    ]


REFUSED = [
    (
        [make_user_message("u"), make_assistant_message("a", audio="x")],
        r"messages\[1\].audio: is not understood and would be lost; known for ass",
    ),
    (
        [{"role": "user", "content": "u", "weight": 0}, make_assistant_message("a")],
        r"messages\[0\].weight: is not understood",
    ),
    (
        [{"from": "human", "value": "u"}, make_assistant_message("a")],
        r"messages\[0\].role: is missing",
    ),
    (
        [make_user_message("u"), make_assistant_message("a", function_call={"name": "f"})],
        r"function_call: is not understood .*write it as tool_ca",
    ),
    (
        [make_user_message("u"), make_assistant_message("a", weight=0.5)],
        r"messages\[1\].weight: must be 0 or 1, found a number \(0.5\)",
    ),
    (
        [make_user_message("u"), make_assistant_message("a", weight=0)],
        r"messages: carries no loss: every assistant message has weight 0",
    ),
    (
        [make_user_message("u"), make_assistant_message("a", weight=1, train=False)],
        r"messages\[1\].train: contradicts weight",
    ),
    (
        [make_user_message("u"), make_assistant_message("a", reasoning="b", thinking="c")],
        r"messages\[1\].thinking: differs from reasoning",
    ),
    (
        [{"role": "user", "content": [{"type": "image_url"}]}, make_assistant_message("a")],
        r"content\[0\]: must be a file, a data URL or an image",
    ),
    (
        [make_user_message("u"), make_assistant_message("", tool_calls=[{"name": "f"}])],
        r"messages\[1\].tool_calls\[0\]: must be",
    ),
    (
        [make_user_message("u"), make_assistant_message("", tool_calls=[make_call(1, cost=2)])],
        r"tool_calls\[0\].cost: is not understood",
    ),
    ([make_user_message("u"), make_assistant_message("")], r"messages\[1\].content: is empty"),
]


@pytest.mark.parametrize(("messages", "reason"), REFUSED)
def test_what_is_not_understood_is_refused_by_name_with_its_line(
    messages: list[dict[str, Any]], reason: str, tmp_path: Path
) -> None:
    import json

    good = {"messages": [make_user_message("u"), make_assistant_message("a")]}
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in (good, {"messages": messages})))
    with pytest.raises(RecordsError, match=rf"rows.jsonl:2: .*{reason}"):
        read_demonstrations(path)


def test_nulls_of_a_parquet_file_are_not_fields(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")

    rows = [
        {
            "messages": [
                make_user_message("u"),
                make_assistant_message("a", weight=0),
                make_user_message("v"),
                make_assistant_message("b", tool_calls=[make_call(1)]),
            ]
        },
        {"messages": [make_user_message("u"), make_assistant_message("c")]},
    ]
    path = tmp_path / "rows.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    assert [row["messages"] for row in read_demonstrations(path).rows] == [
        row["messages"] for row in rows
    ]


def test_nulls_within_json_text_are_preserved() -> None:
    text = {"name": "zoom", "arguments": '{"row": null, "in": {"cell": null}}'}
    schema = '{"name": "zoom", "parameters": {"properties": {"row": {"default": null}}}}'
    row = read_row(
        make_user_message("u"),
        make_assistant_message("", tool_calls=[{"type": "function", "function": text}]),
        {"role": "tool", "content": "t"},
        make_assistant_message(
            "", tool_calls='[{"function": {"name": "zoom", "arguments": {"row": null}}}]'
        ),
        tools=f'[{{"type": "function", "function": {schema}}}]',
    )
    first, second = (message["tool_calls"][0]["function"] for message in row["messages"][1::2])
    assert first["arguments"] == {"row": None, "in": {"cell": None}}
    assert second["arguments"] == {"row": None}
    assert row["tools"][0]["function"]["parameters"] == {"properties": {"row": {"default": None}}}


def test_prompts_take_the_same_messages() -> None:
    history = [
        make_user_message("u"),
        make_assistant_message("", tool_calls=[make_call(2)]),
        {"role": "tool", "content": "t", "tool_call_id": "1"},
    ]
    (row,) = read_prompts([{"prompt": history}]).rows
    renderer = ChatRenderer(family(HERMES))
    assert '<tool_call>{"name": "zoom", "arguments": {"row": 2}}' in decode_ids(
        renderer, renderer.prompt_ids(row["prompt"])
    )
    with pytest.raises(RecordsError, match=r"prompt\[0\].colour: is not understood"):
        read_prompts([{"prompt": [{**make_user_message("u"), "colour": "red"}]}])


def test_a_call_that_ends_with_another_token_is_refused() -> None:
    template = HERMES.replace(
        "<|im_end|>{% endgeneration %}",
        "{{ '<|call|>' if m.tool_calls else '<|im_end|>' }}{% endgeneration %}",
    )
    renderer = ChatRenderer(family(template, ("<|call|>",)))
    assert "<|call|>" not in renderer.facts.markers
    with pytest.raises(DataError, match=r"does not end a message with tool_calls by <\|im_end\|>"):
        build_training_sequences(
            renderer,
            read_row(make_user_message("u"), make_assistant_message("", tool_calls=[make_call(1)]))[
                "messages"
            ],
        )
