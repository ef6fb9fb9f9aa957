"""Calls as model families write them."""

import contextlib
import json
import random

import pytest

from rl_core.environments.prompts import Prompts
from rl_core.environments.tool_dialects import DIALECTS, find_template_dialects
from rl_core.environments.tools import Tool, Toolset
from rl_core.errors import ToolMisuse
from rl_core.types import ToolCall


def weather(city: str, days: int) -> str:
    """Forecast the weather.

    Args:
        city: where
        days: how long
    """
    return f"{days} dry days in {city}"


def note(
    text: str, tags: list[str] | None = None, urgent: bool = False, weight: float | None = None
) -> str:
    """Keep a note."""
    return text


TOOLS = Toolset([Tool.from_function(weather), Tool.from_function(note)])
OSLO = ToolCall("weather", {"city": "Oslo", "days": 3})
ROME = ToolCall("weather", {"city": "Rome", "days": 1})
JSON = '{"city": "Oslo", "days": 3}'
NAMED = '{"name": "weather", "arguments": {"city": "Oslo", "days": 3}}'
LLAMA = '{"name": "weather", "parameters": {"city": "Oslo", "days": 3}}'
XML = "<function=weather>\n<parameter=city>\nOslo\n</parameter>\n<parameter=days>\n3\n</parameter>\n</function>"
INVOKE = (
    '<invoke name="weather">\n<parameter name="city">Oslo</parameter>\n'
    '<parameter name="days">3</parameter>\n</invoke>'
)
B, U = "\uff5c", "\u2581"
DEEPSEEK = {name: f"<{B}tool{U}{name.replace('_', U)}{B}>" for name in (
    "calls_begin", "calls_end", "call_begin", "call_end", "sep"
)}  # fmt: skip

ONE_CALL = {
    "Hermes": f"<tool_call>\n{NAMED}\n</tool_call>",
    "Qwen3-Coder": f"<tool_call>\n{XML}\n</tool_call>",
    "Qwen3-Coder without its opening tag": f"I look.\n{XML}\n</tool_call>",
    "GLM 4.5": "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n"
    "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>",
    "GLM 4.6, on one line": "<tool_call>weather<arg_key>city</arg_key><arg_value>Oslo</arg_value>"
    "<arg_key>days</arg_key><arg_value>3</arg_value></tool_call>",
    "GLM 4, ChatGLM": f"weather\n{JSON}",
    "Granite 4": f"<tool_call>[{NAMED}]</tool_call>",
    "Granite 3": f"<|tool_call|>[{NAMED}]",
    "Phi-4-mini": f"<|tool_call|>[{NAMED}]<|/tool_call|>",
    "Phi-4-mini, without marks": f"functools[{NAMED}]",
    "SmolLM3, Python tools": "<code>weather(city='Oslo', days=3)</code>",
    "OpenAI": json.dumps({"tool_calls": [{"id": "1", "type": "function", "function": {
        "name": "weather", "arguments": JSON}}]}),
    "function and parameters": NAMED.replace('"name"', '"function"'),
    "LangChain": '{"action": "weather", "action_input": ' + JSON + "}",
    "Llama 3.1": LLAMA,
    "Llama 3.1, python tag": f"<|python_tag|>{LLAMA}<|eom_id|>",
    "Llama 3.1, built-in form": "<|python_tag|>weather.call(city='Oslo', days=3)",
    "Llama 3.1, custom": f"<function=weather>{JSON}</function>",
    "Llama 3.2": "[weather(city='Oslo', days=3)]",
    "Llama 4": "<|python_start|>[weather(city=\"Oslo\", days=3)]<|python_end|>",
    "Mistral 7B": f"[TOOL_CALLS] [{NAMED}]",
    "Mistral Nemo": f"[TOOL_CALLS][{NAMED[:-1]}, \"id\": \"123456789\"}}]</s>",
    "Mistral Small 3.2": f"[TOOL_CALLS]weather[CALL_ID]123456789[ARGS]{JSON}",
    "Magistral": f"[THINK]where?[/THINK][TOOL_CALLS]weather[ARGS]{JSON}",
    "Devstral": f"[TOOL_CALLS]weather{JSON}",
    "DeepSeek V3": f"{DEEPSEEK['calls_begin']}{DEEPSEEK['call_begin']}function{DEEPSEEK['sep']}weather\n"
    f"```json\n{JSON}\n```{DEEPSEEK['call_end']}{DEEPSEEK['calls_end']}",
    "DeepSeek V3.1": f"{DEEPSEEK['calls_begin']}{DEEPSEEK['call_begin']}weather{DEEPSEEK['sep']}{JSON}"
    f"{DEEPSEEK['call_end']}{DEEPSEEK['calls_end']}",
    "DeepSeek V3.2": f'<{B}DSML{B}function_calls>\n<{B}DSML{B}invoke name="weather">\n'
    f'<{B}DSML{B}parameter name="city" string="true">Oslo</{B}DSML{B}parameter>\n'
    f'<{B}DSML{B}parameter name="days" string="false">3</{B}DSML{B}parameter>\n'
    f"</{B}DSML{B}invoke>\n</{B}DSML{B}function_calls>",
    "Kimi K2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0"
    f"<|tool_call_argument_begin|>{JSON}<|tool_call_end|><|tool_calls_section_end|>",
    "gpt-oss": f"<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{JSON}<|call|>",
    "gpt-oss, recipient first": "<|channel|>analysis<|message|>Oslo?<|end|><|start|>assistant to=functions.weather"
    f"<|channel|>commentary json<|message|>{JSON}<|call|>",
    "gpt-oss, decoded without control tokens": f"analysisOslo?assistantcommentary to=functions.weather json{JSON}",
    "MiniMax M1": f"<tool_calls>\n{NAMED}\n</tool_calls>",
    "MiniMax M2": f"<minimax:tool_call>\n{INVOKE}\n</minimax:tool_call>",
    "Seed-OSS": f"<seed:tool_call>\n{XML}\n</seed:tool_call>",
    "Hunyuan": f"<tool_calls>\n<tool_call>weather\n```json\n{JSON}\n```\n</tool_call>\n</tool_calls>",
    "Jamba": f"<tool_calls>[\n  {NAMED}\n]</tool_calls>",
    "LFM2": "<|tool_call_start|>[weather(city=\"Oslo\", days=3)]<|tool_call_end|>",
    "Olmo 3": "<function_calls>\nweather(city=\"Oslo\", days=3)\n</function_calls>",
    "Nemotron": f"<TOOLCALL>[{NAMED}]</TOOLCALL>",
    "Command A": '<|START_ACTION|>[\n  {"tool_call_id": "0", "tool_name": "weather", "parameters": '
    f"{JSON}}}\n]<|END_ACTION|>",
    "Command R": f'Action: ```json\n[\n {{"tool_name": "weather", "parameters": {JSON}}}\n]\n```',
    "Gemma 3": "```tool_code\nweather(city='Oslo', days=3)\n```",
    "Gemma 3, printed": "I look.\n```tool_code\nprint(weather(city='Oslo', days=3))\n```",
    "FunctionGemma": "<start_function_call>call:weather{city:<escape>Oslo<escape>,days:3}<end_function_call>",
    "Gemma 4": '<|tool_call>call:weather{city:<|"|>Oslo<|"|>,days:3}<tool_call|>',
    "Functionary 3.1": f"<function=weather>{JSON}</function>",
    "Functionary 3.2": f">>>weather\n{JSON}",
    "Functionary 3.2, after a message": f">>>all\nI look.\n>>>weather\n{JSON}",
    "Functionary 2": f"<|from|>assistant\n<|recipient|>weather\n<|content|>{JSON}<|stop|>",
    "InternLM 2": f"<|action_start|><|plugin|>{LLAMA}<|action_end|>",
    "Granite 20B": f"<function_call> {NAMED}",
    "Apertus": f'<|tools_prefix|>[{{"weather": {JSON}}}]<|tools_suffix|>',
    "Longcat": f"<longcat_tool_call>{NAMED}</longcat_tool_call>",
    "ReAct": f"Thought: where?\nAction: weather\nAction Input: {JSON}\nObservation: dry",
    "Qwen-Agent": f"\u273fFUNCTION\u273f: weather\n\u273fARGS\u273f: {JSON}\n\u273fRESULT\u273f",
    "xLAM": f"[{NAMED}]",
    "fenced JSON": f"I look:\n```json\n{NAMED}\n```",
    "JSON after prose": f"I look.\n{LLAMA}",
    "Python's notation, places": "[weather('Oslo', days=3)]",
    "Python's notation after prose": "I look.\nweather(city='Oslo', days=3)",
    "numbers as text": NAMED.replace("3", '"3"'),
    "JSON's arguments as text": json.dumps({"name": "weather", "arguments": JSON}),
}  # fmt: skip


@pytest.mark.parametrize("family", ONE_CALL)
def test_one_call_of_every_family(family):
    text = ONE_CALL[family]
    call = TOOLS.parse(text)
    assert call == OSLO
    assert type(call.arguments["days"]) is int
    assert TOOLS.parse(f"<think>\nwhere?\n</think>\n\n{text}") == OSLO
    assert TOOLS.parse(f"<think>\n{text}\n</think>\n\nIt is dry.") is None


SECOND = {"Oslo": "Rome", "3": "1"}


def make_second(text):
    for old, new in SECOND.items():
        text = text.replace(old, new)
    return text


@pytest.mark.parametrize(
    "text",
    [
        ONE_CALL["Hermes"] + make_second(ONE_CALL["Hermes"]),
        ONE_CALL["Qwen3-Coder"] + "\n" + make_second(ONE_CALL["Qwen3-Coder"]),
        ONE_CALL["GLM 4.5"] + make_second(ONE_CALL["GLM 4.5"]),
        f"<tool_call>[{NAMED}, {make_second(NAMED)}]</tool_call>",
        f"<|python_tag|>{LLAMA}; {make_second(LLAMA)}",
        f"{LLAMA}; {make_second(LLAMA)}",
        f"{LLAMA}\n{make_second(LLAMA)}",
        "[weather(city='Oslo', days=3), weather(city='Rome', days=1)]",
        "<function_calls>\nweather(city='Oslo', days=3)\nweather(city='Rome', days=1)\n</function_calls>",
        f"[TOOL_CALLS]weather[ARGS]{JSON}[TOOL_CALLS]weather[ARGS]{make_second(JSON)}",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
        f"{JSON}<|tool_call_end|><|tool_call_begin|>functions.weather:1<|tool_call_argument_begin|>"
        f"{make_second(JSON)}<|tool_call_end|><|tool_calls_section_end|>",
        f"<minimax:tool_call>\n{INVOKE}\n{make_second(INVOKE)}\n</minimax:tool_call>",
        f"<tool_calls>\n{NAMED}\n{make_second(NAMED)}\n</tool_calls>",
        f"<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{JSON}<|call|>"
        f"<|start|>assistant<|channel|>commentary to=functions.weather<|message|>{make_second(JSON)}<|call|>",
        "<start_function_call>call:weather{city:<escape>Oslo<escape>,days:3}"
        "call:weather{city:<escape>Rome<escape>,days:1}<end_function_call>",
    ],
)
def test_several_calls_of_one_turn(text):
    assert TOOLS.parse_all(text) == [OSLO, ROME]
    with pytest.raises(ToolMisuse, match="more than one tool call"):
        TOOLS.parse(text)


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        # XML has texts alone: converted where the schema takes none
        (
            "<tool_call><function=note><parameter=text>\n3\n</parameter><parameter=tags>\n"
            "['a', 'b']\n</parameter><parameter=urgent>\nTrue\n</parameter><parameter=weight>\n"
            "None\n</parameter></function></tool_call>",
            {"text": "3", "tags": ["a", "b"], "urgent": True},
        ),
        (
            "<tool_call>note<arg_key>text</arg_key><arg_value> a\n\nb </arg_value><arg_key>tags</arg_key>"
            '<arg_value>["x"]</arg_value><arg_key>weight</arg_key><arg_value>1.5</arg_value></tool_call>',
            {"text": " a\n\nb ", "tags": ["x"], "weight": 1.5},
        ),
        (
            '<tool_call>{"name": "note", "arguments": {"text": "<function=a><invoke name=b><arg_key>"}}'
            "</tool_call>",
            {"text": "<function=a><invoke name=b><arg_key>"},
        ),
        (
            '{"name": "note", "arguments": {"text": "<tool_call>"}}',
            {"text": "<tool_call>"},
        ),
        # a call's text may hold the marks of other dialects, and of Python
        (
            '[TOOL_CALLS]note[ARGS]{"text": "write <tool_call> or [x(1)]"}',
            {"text": "write <tool_call> or [x(1)]"},
        ),
        (
            "[note(text='a, b) \\'c\\'', tags=['to=functions.weather'], urgent=true, weight=-1.5)]",
            {"text": "a, b) 'c'", "tags": ["to=functions.weather"], "urgent": True, "weight": -1.5},
        ),
        (
            '<|tool_call>call:note{tags:[<|"|>{b: 1}<|"|>],text:<|"|>a, c:"d"<|"|>}<tool_call|>',
            {"text": 'a, c:"d"', "tags": ["{b: 1}"]},
        ),
    ],
)
def test_values_in_other_notations(text, arguments):
    assert TOOLS.parse(text) == ToolCall("note", arguments)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("<tool_call>weather(city='Oslo', days=</tool_call>", "name(argument=value)"),
        ("[weather(city='Oslo', days=)]", "name(argument=value)"),
        ("[weather(city='Oslo', days=range(3))]", "texts, numbers, lists or dicts"),
        ("[weather('Oslo', 3, 4)]", "takes the arguments ['city', 'days']"),
        ("[weather('Oslo', city='Rome', days=3)]", "city is repeated"),
        ("[wether(city='Oslo', days=3)]", "no tool 'wether'"),
        ("[weather(city='Oslo', **more)]", "named one by one"),
        ("<function=weather><parameter=city>Oslo</function>", "lacks </parameter>"),
        ("<tool_call>weather<arg_key>city</arg_key>Oslo</tool_call>", "<arg_value>"),
        ("<invoke name='weather'><parameter name='city'>Oslo</invoke>", "lacks </parameter>"),
        ("</tool_call>", "not understood"),
        (f"<new_tool_call>weather {JSON}</new_tool_call>", "not understood"),
        ("<|tool_calls_section_begin|>weather", "not understood"),
        ("[TOOL_REQUEST]{}[END_TOOL_REQUEST]", "not understood"),
        ("[TOOL_CALLS]", "valid JSON"),
        ('{"name": "wether", "arguments": {"city": "Oslo"}}', "no tool 'wether'"),
        ('{"name": "weather", "arguments": {"city": "Oslo", "days": 3}', "not valid JSON"),
        ("<|channel|>commentary to=functions.wether json<|message|>{}", "no tool 'wether'"),
        ("<|channel|>commentary to=functions.weather json<|message|>{'city'", "not valid JSON"),
        (f">>>weather\n{JSON[:-1]}", "not valid JSON"),
        ("<tool_call><function=weather><parameter=city>Oslo</parameter><parameter=days>few"
         "</parameter></function></tool_call>", 'days must be a whole number, not "few"'),
    ],
)  # fmt: skip
def test_a_call_that_is_not_understood_is_an_error(text, part):
    with pytest.raises(ToolMisuse) as caught:
        TOOLS.parse_all(text)
    assert part in str(caught.value)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    "text",
    [
        "The weather(Oslo) is dry.",
        "It goes from=2 to=functions or to=5.",
        "[1, 2, 3]",
        "[x(1), y(2)]",
        '{"name": "Ann", "age": 3}',
        '{"city": "Oslo", "days": 3}',
        "Action: wait and see",
        "```python\nprint(1)\n```",
        "def weather2(city):\n    return city\n\nprint(weather2('Oslo'))",
        ">> 3 > 2",
        "Use a tool call when in doubt.",
    ],
)
def test_answers_stay_answers(text):
    assert TOOLS.parse_all(text) == []


@pytest.mark.parametrize("family", ["Hermes", "Mistral Nemo", "Qwen3-Coder", "Gemma 3", "ReAct"])
def test_without_tools_every_text_is_an_answer(family):
    assert Toolset([]).parse_all(ONE_CALL[family]) == []


def test_no_text_raises_anything_else():
    pieces = [*ONE_CALL.values(), "[", "{", "(", '"', "<", ">", "|", "\n", "=", "\\u", "-" * 300]
    generator = random.Random(7)
    for _ in range(3000):
        chosen = [generator.choice(pieces) for _ in range(generator.randint(1, 4))]
        cut = [
            piece[generator.randrange(len(piece)) :][: generator.randint(1, 80)] for piece in chosen
        ]
        try:
            calls = TOOLS.parse_all("".join(cut))
        except ToolMisuse:
            continue
        assert all(call.name in TOOLS.tools for call in calls)
    for flood in (
        "[weather(" * 3000,
        "<tool_call>" * 9000,
        "<parameter=a>" * 9000,
        "-" * 30000 + "1",
    ):
        for opening in ("", "<function=weather>", "<|python_tag|>[weather(city="):
            with contextlib.suppress(ToolMisuse):
                TOOLS.parse_all(opening + flood)


def test_the_template_s_dialect_comes_first():
    assert find_template_dialects("{{ '[TOOL_CALLS]' }}") == ("mistral",)
    assert find_template_dialects("<tool_call>\n<function=name>") == ("hermes", "function_tags")
    assert find_template_dialects("{{ '<|channel|>commentary' }}") == ("harmony",)
    assert len({dialect.name for dialect in DIALECTS}) == len(DIALECTS)
    tools = Toolset([Tool.from_function(note)])
    within = '<|python_tag|>{"name": "note", "parameters": {"text": "[TOOL_CALLS]"}}'
    assert tools.parse(within) == ToolCall("note", {"text": "[TOOL_CALLS]"})  # opens first
    both = [f'{{"name": "note", "arguments": {{"text": "{text}"}}}}' for text in "ab"]
    text = f"<TOOLCALL>[{both[0]}]</TOOLCALL><tool_call>{both[1]}</tool_call>"
    episode_tools = tools.bind()
    assert episode_tools.parse(text) == ToolCall("note", {"text": "a"})
    tools.follow_template("<tool_call> and [TOOL_CALLS]")
    assert episode_tools.parse(text) == ToolCall("note", {"text": "b"})
    assert episode_tools.parse(within) == ToolCall("note", {"text": "[TOOL_CALLS]"})


def test_the_policy_reads_the_error(tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "Where is it dry?"}) + "\n")
    environment = Prompts(path=str(rows), tools=[weather], heldout=0)
    episode = environment.episode(0, environment.levels[0])
    episode.reset()
    step = episode.step("<new_tool_call>weather Oslo</new_tool_call>")
    assert step.is_error and not step.terminated
    assert "not understood" in step.messages[0]["content"]
    step = episode.step(ONE_CALL["Kimi K2"])
    assert step.messages[0]["content"] == "3 dry days in Oslo"
    assert episode.step("Oslo").answer == "Oslo"
