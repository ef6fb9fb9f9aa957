"""Parsing, limits and description of tools."""

import asyncio
import json
import threading
import time

import pytest

from rl_core import time_limits
from rl_core.environments.tools import Tool, Toolset
from rl_core.errors import PosttrainError, SettingsError, ToolMisuse
from rl_core.types import ToolCall


def make_tools(**options):
    return Toolset(
        [
            Tool(
                "zoom",
                "look at a cell",
                {"row": int, "column": int},
                lambda row, column: f"{row}/{column}",
                **options,
            ),
            Tool(
                "say",
                "repeat",
                {"times": int, "text": str},
                lambda times, text: text * times,
                **options,
            ),
            Tool("scale", "double", {"value": float}, lambda value: 2 * value, **options),
            Tool("now", "no arguments", {}, lambda: "noon", **options),
        ]
    )


@pytest.mark.parametrize(
    ("text", "name", "arguments"),
    [
        ("zoom 2 3", "zoom", {"row": 2, "column": 3}),
        ("I look there.\n\n  zoom  -2   +3  \n\n", "zoom", {"row": -2, "column": 3}),
        (
            "say 2 a  b c",
            "say",
            {"times": 2, "text": "a  b c"},
        ),  # trailing text takes the rest of the line
        ("scale 1.5e1", "scale", {"value": 15.0}),
        ("now", "now", {}),
        ("<think>zoom 1 1</think>now", "now", {}),
        (
            'x <tool_call>{"name": "zoom", "arguments": {"column": 3, "row": 2}}</tool_call>',
            "zoom",
            {"row": 2, "column": 3},
        ),
        (
            '<tool_call>\n{"name": "scale", "arguments": {"value": 3}}\n</tool_call>',
            "scale",
            {"value": 3.0},
        ),
        ('<tool_call>{"name": "now"}</tool_call>', "now", {}),
        (
            '<tool_call>{"id": "1", "type": "function", "function": '
            '{"name": "zoom", "arguments": "{\\"row\\": 2, \\"column\\": 3}"}}</tool_call>',
            "zoom",
            {"row": 2, "column": 3},
        ),
        (
            '<tool_call>{"function": {"name": "scale", "arguments": {"value": 3}}}</tool_call>',
            "scale",
            {"value": 3.0},
        ),
        ('{"name": "scale", "parameters": {"value": 3}}', "scale", {"value": 3.0}),
        ('<think>x</think>\n<|python_tag|>{"name": "now", "parameters": {}}', "now", {}),
        ('[TOOL_CALLS][{"name": "scale", "arguments": {"value": 3}}]', "scale", {"value": 3.0}),
        ('[TOOL_CALLS] zoom[ARGS]{"row": 2, "column": 3}', "zoom", {"row": 2, "column": 3}),
    ],
)
def test_calls_are_parsed(text, name, arguments):
    call = make_tools().parse(text)
    assert call == ToolCall(name, arguments)
    assert [type(value) for value in call.arguments.values()] == [
        type(call.arguments[key]) for key in arguments
    ]
    assert list(call.arguments) == list(
        arguments
    )  # in the tool's order, whatever the JSON's order was


@pytest.mark.parametrize(
    "text",
    [
        "",
        "  \n ",
        "answer red",
        "zoom 2 3\nanswer red",
        "Zoom 2 3",
        "zoomed 2 3",
        "I would zoom 2 3",
        "<think><tool_call>{</tool_call></think> answer 3",
        "<think>\nI could\nzoom 2 3",
        '{"name": "red", "arguments": 1}',
        '{"answer": 3}',
        "{zoom 2 3}",
        '{"name": ["zoom"], "arguments": {}}',
    ],
)
def test_what_is_no_call_is_none(text):
    assert make_tools().parse(text) is None


def hermes(value):
    return f"<tool_call>{value if isinstance(value, str) else json.dumps(value)}</tool_call>"


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("zoom 2", "takes 2 arguments, not 1; usage: zoom ROW COLUMN"),
        ("zoom 2 3 4", "takes 2 arguments, not 3"),
        ("zoom", "takes 2 arguments, not 0"),
        ("now 3", "takes 0 arguments, not 1"),
        ("zoom 2 red", "column must be a whole number, not 'red'"),
        ("zoom 2 3.0", "column must be a whole number"),
        ("zoom 1_0 3", "row must be a whole number"),
        ("zoom ３ 3", "row must be a whole number"),  # noqa: RUF001
        ("zoom " + "9" * 5000 + " 3", "row must be a whole number"),
        ("scale nan", "value must be a number"),
        ("scale inf", "value must be a number"),
        ("scale 1e999", "value must be a number"),
        ("say 2", "takes 2 arguments, not 1"),
        (hermes({"name": "zom", "arguments": {}}), "no tool 'zom'; did you mean 'zoom'?"),
        (
            hermes({"name": "zoom", "arguments": {"row": 1}}),
            "takes the arguments ['row', 'column']",
        ),
        (
            hermes({"name": "zoom", "arguments": {"row": 1, "column": 2, "x": 3}}),
            "takes the arguments",
        ),
        (
            hermes({"name": "zoom", "arguments": {"row": "one", "column": 2}}),
            'row must be a whole number, not "one"',
        ),
        (
            hermes({"name": "zoom", "arguments": {"row": True, "column": 2}}),
            "row must be a whole number",
        ),
        (
            hermes({"name": "zoom", "arguments": {"row": 1.0, "column": 2}}),
            "row must be a whole number",
        ),
        (
            hermes({"name": "zoom", "arguments": {"row": 10**30, "column": 2}}),
            "row must be a whole number",
        ),
        (hermes({"name": "say", "arguments": {"times": 1, "text": 3}}), "text must be text"),
        (hermes({"name": "scale", "arguments": {"value": True}}), "value must be a number"),
        (hermes('{"name": "scale", "arguments": {"value": NaN}}'), "not valid JSON"),
        (hermes('{"name": "scale", "arguments": {"value": 1e999}}'), "value must be a number"),
        (hermes('{"name": "zoom"'), "not valid JSON"),
        (hermes("[" * 100000), "not valid JSON"),
        (hermes('{"name": "scale", "arguments": {"value": ' + "9" * 5000 + "}}"), "not valid JSON"),
        (hermes("[1]"), 'must be {"name": ..., "arguments": {...}}'),
        (hermes({"name": 3}), "must be"),
        (hermes({"name": "zoom", "arguments": [2, 3]}), "takes the arguments"),
        (hermes({"name": "zoom", "arguments": "2, 3"}), "not valid JSON"),
        (hermes({"name": "zoom", "arguments": "[2, 3]"}), "takes the arguments"),
        (hermes({"function": {"arguments": {}}}), "must be"),
        (hermes({"function": "now"}), "must be"),
        ('<tool_call>{"name": "now"}', "not closed"),
        (hermes({"name": "now"}) * 2, "more than one tool call"),
        ('[TOOL_CALLS][{"name": "now"}, {"name": "now"}]', "more than one tool call"),
        ('<|python_tag|>{"name": "nowhere"}', "no tool 'nowhere'"),
        ("[TOOL_CALLS]now[ARGS]{", "not valid JSON"),
    ],
)
def test_misuse_says_what_was_wrong(text, part):
    with pytest.raises(ToolMisuse) as caught:
        make_tools().parse(text)
    assert part in str(caught.value)
    assert isinstance(caught.value, PosttrainError)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("style", ["line", "hermes"])
def test_format_is_the_inverse_of_parse(style):
    toolset = make_tools()
    for call in (
        ToolCall("zoom", {"row": 2, "column": -3}),
        ToolCall("say", {"times": 1, "text": "3 + 4"}),
        ToolCall("now", {}),
    ):
        assert toolset.parse(toolset.format(call, style)) == call


def test_context_reaches_functions_and_is_not_shared():
    toolset = Toolset([Tool("peek", "", {"at": int}, lambda hidden, at: hidden[at])])
    first, second = toolset.bind("ab"), toolset.bind("xy")
    assert first.run(ToolCall("peek", {"at": 1})) == ("b", False)
    assert second.run(ToolCall("peek", {"at": 1})) == ("y", False)
    assert toolset.run(ToolCall("peek", {"at": 1}))[
        1
    ]  # without its context: an error, not an exception
    assert first.run(ToolCall("peek", {"at": 7})) == ("error: string index out of range", True)
    assert first.run(ToolCall("pek", {})) == ("error: no tool 'pek'; did you mean 'peek'?", True)


@pytest.mark.parametrize("timeout_s", [None, 30.0])
def test_what_a_tool_does_wrong_becomes_an_error_observation(timeout_s):
    def leave():
        raise SystemExit

    def cancel():
        raise asyncio.CancelledError

    def fail(text):
        raise ValueError(text)

    toolset = Toolset(
        [
            Tool("cancel", "", {}, cancel, timeout_s=timeout_s),
            Tool("leave", "", {}, leave, timeout_s=timeout_s),
            Tool("fail", "", {"text": str}, fail, timeout_s=timeout_s, max_output_chars=50),
            Tool(
                "flood",
                "",
                {"size": int},
                lambda size: "x" * size,
                timeout_s=timeout_s,
                max_output_chars=50,
            ),
            Tool("odd", "", {}, lambda: "a\ud800b", timeout_s=timeout_s),
        ]
    )
    assert toolset.run(ToolCall("leave", {})) == ("error: SystemExit", True)
    assert toolset.run(ToolCall("cancel", {})) == ("error: CancelledError", True)
    assert toolset.run(ToolCall("fail", {"text": "no such row"})) == ("error: no such row", True)
    assert len(toolset.run(ToolCall("fail", {"text": "y" * 10**6}))[0]) == len("error: ") + 50
    assert toolset.run(ToolCall("flood", {"size": 50})) == ("x" * 50, False)
    assert toolset.run(ToolCall("flood", {"size": 51})) == (
        "error: flood gave 51 characters; at most 50 are shown",
        True,
    )
    assert toolset.run(ToolCall("odd", {})) == ("a?b", False)


def test_a_hanging_tool_is_left_behind(monkeypatch):
    release = threading.Event()
    threads = []

    def hang():
        threads.append(threading.current_thread())
        release.wait(30)

    monkeypatch.setattr(time_limits, "MAX_HUNG", 2)
    toolset = Toolset([Tool("hang", "", {}, hang, timeout_s=0.05)])
    try:
        for _ in range(2):
            assert toolset.run(ToolCall("hang", {})) == (
                "error: hang did not answer within 0.05 seconds",
                True,
            )
        assert toolset.run(ToolCall("hang", {})) == (
            "error: hang is out of service; 2 earlier calls still hang",
            True,
        )
        assert len(threads) == 2 and all(thread.daemon for thread in threads)
    finally:
        release.set()
    for thread in threads:
        thread.join(10)
    quick = Toolset([Tool("quick", "", {}, lambda: "here", timeout_s=30.0)])
    assert quick.run(ToolCall("quick", {})) == (
        "here",
        False,
    )  # once they end, timed tools work again


def test_quick_tools_run_on_the_callers_thread():
    seen = []
    toolset = Toolset([Tool("look", "", {}, lambda: seen.append(threading.current_thread()))])
    toolset.run(ToolCall("look", {}))
    assert seen == [threading.current_thread()]


def test_keyboard_interrupt_is_not_swallowed():
    def interrupt():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Toolset([Tool("stop", "", {}, interrupt)]).run(ToolCall("stop", {}))


def test_schema_and_instructions():
    toolset = make_tools()
    assert toolset.schema()[0] == {
        "type": "function",
        "function": {
            "name": "zoom",
            "description": "look at a cell",
            "parameters": {
                "type": "object",
                "properties": {"row": {"type": "integer"}, "column": {"type": "integer"}},
                "required": ["row", "column"],
            },
        },
    }
    kinds = [entry["function"]["parameters"]["properties"] for entry in toolset.schema()]
    assert kinds[1:3] == [
        {"times": {"type": "integer"}, "text": {"type": "string"}},
        {"value": {"type": "number"}},
    ]
    assert "zoom ROW COLUMN: look at a cell" in toolset.instructions()
    assert "<tool_call>" in toolset.instructions(
        "hermes"
    ) and '"name": "zoom"' in toolset.instructions("hermes")


@pytest.mark.parametrize(
    "options",
    [
        {"name": "two words"},
        {"name": ""},
        {"parameters": {"x": set}},
        {"parameters": {"a b": int}},
        {"timeout_s": 0.0},
        {"optional": ("x",)},
        {"timeout_s": float("nan")},
        {"max_output_chars": 0},
    ],
)
def test_bad_tools_are_refused(options):
    with pytest.raises(SettingsError):
        Tool(
            **{
                "name": "zoom",
                "description": "",
                "parameters": {},
                "function": time.time,
                **options,
            }
        )


def test_names_are_unique():
    tool = Tool("zoom", "", {}, time.time)
    with pytest.raises(SettingsError, match="share a name"):
        Toolset([tool, tool])


BOTH, PUT = {"words": ["a", "b"], "exact": True}, {"place": {"at": [1, 2]}, "mode": "b"}


def rich_tools(**options):
    def find(
        words: list[str],
        exact: bool = False,
        limit: int | None = None,
        filters: dict[str, float] | None = None,
    ):
        """Find texts.

        More about it.

        Args:
            words: the words to look for
        """
        return [words, exact, limit, filters]

    nested = {
        "type": "object",
        "properties": {"at": {"$ref": "#/$defs/point"}},
        "required": ["at"],
        "additionalProperties": False,
        "$defs": {
            "point": {"type": "array", "items": {"type": "integer", "minimum": 0}, "maxItems": 2}
        },
    }
    return Toolset(
        [
            Tool.from_function(find, **options),
            Tool(
                "put",
                "put it",
                {"place": nested, "mode": {"enum": ["a", "b"]}},
                lambda **arguments: arguments,
                **options,
            ),
        ]
    )


def test_a_function_s_hints_and_docstring_are_its_schema():
    function = rich_tools().schema()[0]["function"]
    assert (function["name"], function["description"]) == ("find", "Find texts.")
    assert function["parameters"]["required"] == ["words"]
    assert function["parameters"]["properties"]["words"] == {
        "type": "array",
        "items": {"type": "string"},
        "description": "the words to look for",
    }
    assert function["parameters"]["properties"]["limit"] == {
        "anyOf": [{"type": "integer"}, {"type": "null"}]
    }
    assert rich_tools().tools["find"].usage == "find WORDS [EXACT] [LIMIT] [FILTERS]"
    with pytest.raises(SettingsError, match="the argument x has no type hint"):
        Tool.from_function(lambda x: x)


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        (hermes({"name": "find", "arguments": BOTH}), BOTH),
        (hermes({"name": "find", "arguments": {"words": [], "exact": None}}), {"words": []}),
        ('find ["a"] True', {"words": ["a"], "exact": True}),
        ('find ["a"]', {"words": ["a"]}),
        (hermes({"name": "put", "arguments": PUT}), PUT),
    ],
)
def test_lists_truth_values_objects_and_what_may_be_left_out(text, arguments):
    tools = rich_tools()
    call = tools.parse(text)
    assert call.arguments == arguments
    for style in ("line", "hermes"):
        assert tools.parse(tools.format(call, style)) == call


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"words": "a"}, 'find: words must be a list, not "a"'),
        ({"words": [1]}, r"find: words\[0\] must be text, not 1"),
        ({"words": [], "exact": 1}, "find: exact must be true or false, not 1"),
        (
            {"words": [], "limit": 1.5},
            "find: limit must be a whole number, not 1.5; or .* must be null",
        ),
        ({"words": [], "filters": {"x": "y"}}, "find: filters.x must be a number"),
        ({}, r"takes the arguments .* of which \['exact', 'limit', 'filters'\] may be left out"),
        ({"words": [], "other": 1}, "takes the arguments"),
    ],
)
def test_arguments_that_do_not_fit_their_schema(arguments, message):
    with pytest.raises(ToolMisuse, match=message):
        rich_tools().parse(hermes({"name": "find", "arguments": arguments}))


@pytest.mark.parametrize(
    ("place", "mode", "message"),
    [
        ({"at": [1, -1]}, "a", r"place.at\[1\] must be at least 0, not -1"),
        ({"at": [1, 2, 3]}, "a", "place.at must have 0 to 2 items, not 3"),
        ({}, "a", "place lacks 'at'"),
        ({"at": [], "to": 1}, "a", "place has no field 'to', only at"),
        ({"at": []}, "c", 'mode must be one of "a", "b", not "c"'),
    ],
)
def test_nested_schemas_are_checked(place, mode, message):
    with pytest.raises(ToolMisuse, match=message):
        rich_tools().parse(hermes({"name": "put", "arguments": {"place": place, "mode": mode}}))


def test_several_calls_of_a_turn_run_concurrently_and_answer_in_order():
    both = threading.Barrier(2)

    def meet(name: str):
        both.wait(30)  # neither continues alone
        return name

    tools = Toolset([Tool.from_function(meet, timeout_s=60.0)])
    text = hermes({"name": "meet", "arguments": {"name": "a"}}) + hermes(
        {"name": "meet", "arguments": {"name": "b"}}
    )
    mistral = '[TOOL_CALLS]meet[ARGS]{"name": "a"}[TOOL_CALLS]meet[ARGS]{"name": "b"}'
    for written in (
        text,
        mistral,
        "[TOOL_CALLS]" + json.dumps([{"name": "meet", "arguments": {"name": n}} for n in "ab"]),
    ):
        calls = tools.parse_all(written)
        assert [call.arguments["name"] for call in calls] == ["a", "b"]
        assert tools.run_all(calls) == [("a", False), ("b", False)]
    with pytest.raises(ToolMisuse, match="more than one tool call in a turn"):
        tools.parse(text)
    with pytest.raises(ToolMisuse, match="18 tool calls in a turn; make at most 16"):
        tools.parse_all(text * 9)
    with pytest.raises(ToolMisuse, match="no tool 'meat'"):  # one wrong call: none is run
        tools.parse_all(text + hermes({"name": "meat", "arguments": {}}))
