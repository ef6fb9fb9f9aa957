"""No text that a policy writes ends a run: from the call's parser to trajectories, rewards, tables and the report."""

import json
import math

import pytest
from helpers.chat_templates import TEXTS
from helpers.reward_rollouts import walk
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from rl_core.analysis import analyze, read_trajectories, write_trajectories
from rl_core.data.chat import ChatRenderer
from rl_core.data.model_text import MAX_DEPTH, convert_to_plain_json, replace_unprintable
from rl_core.data.tokenizer import train_tokenizer
from rl_core.environments.calculator import CALCULATOR, extract_final_answer
from rl_core.environments.environment import Environment, Episode, Step
from rl_core.environments.question_episodes import QuestionEpisode, read_tagged_answer
from rl_core.environments.step_pool import wait_for_observation
from rl_core.environments.tools import Tool, Toolset
from rl_core.errors import ToolMisuse
from rl_core.readers import read_trajectories as read_table
from rl_core.rewards.components import FormatReward, ToolUseReward
from rl_core.rewards.rollout_log import RecentRollouts, RewardRecord
from rl_core.rewards.state_components import CoherenceReward
from rl_core.rollouts.collect import collect_rollouts
from rl_core.rollouts.episode_sequence import EpisodeRequest
from rl_core.settings import (
    AnalysisSettings,
    CoherenceSettings,
    FormatSettings,
    SamplingSettings,
    ToolUseSettings,
)
from rl_core.types import ToolCall

ENDS_TRAINING = '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>'
DIGITS = "9" * 5000
TOOLS = Toolset(
    [
        CALCULATOR,
        Tool("zoom", "part", {"row": int, "col": float, "why": str}, lambda row, col, why: why),
    ]
)
PIECES = [
    "<tool_call>",
    "</tool_call>",
    "[TOOL_CALLS]",
    "[ARGS]",
    "<|python_tag|>",
    "<think>",
    "</think>",
    "<answer>",
    "</answer>",
    "answer ",
    "#### ",
    "calculator ",
    "zoom ",
    '{"name": "zoom", "arguments": ',
    '{"name": "calculator", ',
    '"arguments": {"row": 1, "col": 1, "why": "\\ud800"}}',
    '"function": ',
    '"parameters": ',
    "{",
    "}",
    "[",
    "]",
    '"',
    ":",
    ",",
    "\\ud800",
    "\\udc00",
    "\\u0000",
    "\0",
    "\x1b[2J",
    "\u2028",
    "\r",
    "\n",
    "\x85",
    DIGITS,
    "1e999",
    "-1e-999",
    "NaN",
    "-Infinity",
    "1" + "/3" * 90,
    "(" * 40,
    "[" * 900,
    "]" * 900,
    '{"a":' * 600,
    "é" * 50,
    "\U0001f600",
    '{"row": 1, "row": 2, "col": 0, "why": ""}',
    "null",
    "true",
    " ",
    "%" * 99,
    "**9**9**9",
    "<|im_end|>",
]
hostile_text = st.one_of(
    st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=8)), max_size=9).map("".join),
    st.recursive(
        st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=9)),
        lambda inner: st.one_of(
            st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=9), inner, max_size=4)
        ),
        max_leaves=12,
    ).map(
        lambda value: f'<tool_call>{{"name": "zoom", "arguments": {json.dumps(value)}}}</tool_call>'
    ),
)
bounded = settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


class Parrot(Environment):
    """An environment that returns what the policy wrote, decoded, wherever an environment may put it."""

    name, levels, blocking, tools = "parrot", ("easy",), False, Toolset([])

    def episode(self, seed, level):
        return ParrotEpisode(seed, level)


class ParrotEpisode(Episode):
    def reset(self):
        return [{"role": "user", "content": "say something \ud83d"}]

    def act(self, text):
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            value = text
        content = value if isinstance(value, str) else repr(value)[:200]
        call = ToolCall(
            content[:20],
            value
            if isinstance(value, dict)
            else {"value": value, "\ud800": math.nan, "n": 9**9999},
        )
        message = {"role": "tool", "content": content, "name": content[:5]}
        return Step(messages=[message], tool_call=call, answer=content, success=False)


class Questions(Parrot):
    """The calculator's question-and-answer episodes."""

    name = "questions"

    def episode(self, seed, level):
        return QuestionEpisode(seed, level, kind="sum", prompt="1 + 1", target="2", tools=TOOLS)


@pytest.fixture(scope="module")
def renderer():
    return ChatRenderer(train_tokenizer([*TEXTS, *map(repr, PIECES[:20])], vocab_size=400))


def play(environment, renderer, text):
    """Play two turns in which the policy writes `text`; return the rollout."""

    class Typist:
        max_length = 10**6

        def run_sequences(self, sequences, sampling):
            for sequence in sequences:
                # sampled ids contain no surrogate
                ids = renderer.action_ids(replace_unprintable(text))
                logprobs = [-0.5] * len(ids)
                while wait_for_observation(sequence.take_action(ids, logprobs, False)) is not None:
                    pass

    sampling = SamplingSettings(max_completion_tokens=10**6, max_turns=2)
    (group,) = collect_rollouts(
        environment,
        Typist(),
        renderer,
        [EpisodeRequest("easy", 1)],
        group_size=1,
        sampling=sampling,
        seed=0,
    )
    return group.rollouts[0]


@bounded
@example(ENDS_TRAINING)
@example(
    '<tool_call>{"name": "zoom", "arguments": {"row": ' + "[" * 480 + "]" * 480 + "}}</tool_call>"
)
@example(
    '<tool_call>{"name": "zoom", "arguments": {"row": '
    + "9" * 4300
    + ', "col": 1, "why": ""}}</tool_call>'
)
@given(hostile_text)
def test_a_call_is_parsed_or_refused_with_a_writable_message(text):
    try:
        call = TOOLS.parse(text)
        output = "" if call is None else TOOLS.run(call)[0]
    except ToolMisuse as misuse:
        output = str(misuse)
    assert len(output.encode("utf-8")) < 4000  # lone surrogates cannot be encoded
    for answer in (extract_final_answer(text), read_tagged_answer(text)):
        assert answer is None or len(answer) <= len(text)


def test_half_of_a_surrogate_pair_in_a_call_is_misuse():
    with pytest.raises(ToolMisuse, match="half of a surrogate pair"):
        TOOLS.parse(ENDS_TRAINING)
    # arguments as JSON text, as OpenAI writes them
    inner = json.dumps({"row": 1, "col": 1, "why": "\ud800"})
    with pytest.raises(ToolMisuse, match="half of a surrogate pair"):
        TOOLS.parse(json.dumps({"name": "zoom", "arguments": inner}))
    call = TOOLS.parse(
        '{"name": "zoom", "arguments": {"row": 1, "col": 1, "why": "\\ud83d\\ude00"}}'
    )
    assert call.arguments["why"] == "\U0001f600"  # a complete pair is one character


@bounded
@example(ENDS_TRAINING)
@example('"\\ud800"')
@example('{"\\ud800": NaN, "x": [1e999, {"y": "\\udfff"}]}')
@example('{"a": ' * 300 + "1" + "}" * 300)
@example("9" * 4300)
@example("answer ")  # ends one of the episodes
@given(text=hostile_text)
def test_whatever_is_written_is_played_stored_read_back_scored_and_reported(
    renderer, tmp_path_factory, text
):
    folder = tmp_path_factory.mktemp("run")
    rollouts = [play(environment, renderer, text) for environment in (Questions(), Parrot())]
    path = folder / "trajectories.jsonl"
    assert write_trajectories(path, [rollout.trajectory for rollout in rollouts]) == 2
    assert list(read_trajectories(path)) == [rollout.trajectory for rollout in rollouts]

    RecentRollouts(folder / "recent_rollouts.jsonl")(0, rollouts)
    RewardRecord(folder / "rewards.jsonl")(0, rollouts)
    turns = sum(len(rollout.trajectory.turns) for rollout in rollouts)
    for table in (read_table(path), read_table(folder / "recent_rollouts.jsonl", turns=True)):
        assert len(table) == (
            turns if "turn" in table else len(rollouts)
        ) and table.to_csv().encode("utf-8")
    values = [
        *FormatReward(FormatSettings(pattern=r"(\w|\s)*"))(rollouts),
        *ToolUseReward(ToolUseSettings(bonus=0.1))(rollouts),
        *CoherenceReward(CoherenceSettings())(rollouts, [walk([1.0], [1.0], [1.0])] * 2),
    ]
    assert all(math.isfinite(value) for value in values)


def test_hostile_trajectories_are_analysed(tmp_path, renderer):
    texts = [ENDS_TRAINING, '"\\ud800"', DIGITS, "[" * 900, "\0\x1b[2J</script><script>", *PIECES]
    trajectories = [play(Parrot(), renderer, text).trajectory for text in texts]
    for seed, trajectory in enumerate(trajectories):
        trajectory.seed = seed
        trajectory.turns[0].action += "\ud800"  # as in files of older versions
    write_trajectories(tmp_path / "t.jsonl", trajectories)
    analysis = analyze(
        {"one": tmp_path / "t.jsonl", "two": tmp_path / "t.jsonl"},
        tmp_path / "out",
        AnalysisSettings(bootstrap_samples=100, side_by_side=len(texts)),
    )
    page = analysis.report.read_text(encoding="utf-8")
    assert page.count("<article ") == len(texts) and "<script" not in page and "\0" not in page


def test_bare_json_by_hand():
    deep = value = []
    for _ in range(500):
        value.append([])
        value = value[0]
    converted = convert_to_plain_json(
        {
            "a": "x\ud800\0",
            1: math.inf,
            "n": 2**1024,
            "t": (True, None, 1.5),
            "deep": deep,
            "o": {1j},
        }
    )
    assert (
        converted["a"] == "x?\ufffd"
        and converted["1"] == "inf"
        and converted["n"] == "(an integer of 1025 bits)"
    )
    assert converted["t"] == [True, None, 1.5] and converted["o"] == "{1j}"
    assert json.dumps(converted["deep"]).count("[") == MAX_DEPTH - 1
    assert convert_to_plain_json(converted) == converted  # idempotent


def test_unclosed_tags_are_read_in_one_pass():
    assert read_tagged_answer("<answer>a<answer>b</answer> <answer> c\n</answer><answer>d") == "c"
    assert read_tagged_answer("<answer>" * 9 + "\nanswer 4") == "4"
    # a regular expression would need the square of 1.6 million steps
    assert read_tagged_answer("<answer>" * 200_000) is None
