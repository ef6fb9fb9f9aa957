"""Rows from tables and lists, settings from dicts, in every public function that takes them."""

import math

import pandas as pd
import pytest

import rl_core
from rl_core.api.data import resolve_environment
from rl_core.data.records import read_demonstrations, read_preferences, read_prompts
from rl_core.errors import DataError, SettingsError

CONVERSATIONS = [
    [{"role": "user", "content": f"{n} + 1 = ?"}, {"role": "assistant", "content": str(n + 1)}]
    for n in range(8)
]
PAIRS = [{"prompt": f"say {n}", "chosen": "yes", "rejected": "no"} for n in range(8)]


class FakeDataset:
    """What `datasets.Dataset` has: columns, a length and rows; no Sequence."""

    def __init__(self, rows):
        self._rows = rows
        self.column_names = list(rows[0])

    def __len__(self):
        return len(self._rows)

    def __iter__(self):
        return iter(self._rows)


@pytest.fixture(scope="module")
def policy():
    return rl_core.create_policy(["a b"], rl_core.ModelSettings(preset="nano", vocab_size=300))


def test_tables_and_lists_are_the_same_rows():
    rows = [{"messages": messages} for messages in CONVERSATIONS]
    expected = read_demonstrations(rows).rows
    for source in (CONVERSATIONS, pd.DataFrame(rows), FakeDataset(rows)):
        assert list(read_demonstrations(source).rows) == list(expected)
    for source in (pd.DataFrame(PAIRS), FakeDataset(PAIRS)):
        assert list(read_preferences(source).rows) == list(read_preferences(PAIRS).rows)
    opening = [messages[:1] for messages in CONVERSATIONS]
    assert [row["prompt"] for row in read_prompts(opening).rows] == opening
    frame = pd.DataFrame({"prompt": ["a", "b"], "answer": [1, 2], "note": ["x", math.nan]})
    assert list(read_prompts(frame).rows) == [
        {"prompt": "a", "answer": 1, "note": "x"},
        {"prompt": "b", "answer": 2},
    ]
    environment, _ = resolve_environment(None, frame, None)
    assert environment.episode(1, "all").target == "2"


def test_tables_that_are_none_are_refused():
    frame = pd.DataFrame([["a", "b", "c"]], columns=["prompt", "answer", "answer"])
    with pytest.raises(DataError, match="has the column 'answer' twice"):
        read_prompts(frame)
    with pytest.raises(
        DataError, match=r"holds the splits train, test; pass one, as data\['train'\]"
    ):
        read_prompts({"train": FakeDataset(PAIRS), "test": FakeDataset(PAIRS)})
    with pytest.raises(DataError, match=r"a pandas DataFrame or a datasets.Dataset, found int"):
        read_prompts(3)


def test_every_function_takes_them(policy):
    frame, prompts = pd.DataFrame(PAIRS), FakeDataset([{"prompt": row["prompt"]} for row in PAIRS])
    sampling = {"max_completion_tokens": 4}
    policy_settings = {"iterations": 1, "group_size": 2, "sampling": sampling}

    def size(trajectories):
        return [float(t.num_action_tokens) for t in trajectories]

    trainings = [
        rl_core.sft(policy, CONVERSATIONS, heldout=CONVERSATIONS[:2], settings={"epochs": 1}),
        rl_core.dpo(policy, frame, heldout=frame.head(2), settings={"epochs": 1}),
        rl_core.reward_model(policy, frame, settings={"epochs": 1}),
        rl_core.grpo(policy, prompts=prompts, reward=size, settings=policy_settings),
        rl_core.ppo(policy, prompts=frame[["prompt"]], reward=size, settings=policy_settings),
    ]
    for training in trainings:
        lines = repr(training).splitlines()
        assert len(lines) == 3 and max(map(len, lines)) < 100
        assert "not started" in lines[1] and "output: none" in lines[2]
    assert trainings[3].settings.sampling.max_completion_tokens == 4
    evaluation = {"samples": 2, "sampling": sampling}
    result = rl_core.evaluate(policy, prompts=prompts, reward=size, settings=evaluation)
    assert result.samples == 16
    assert len(rl_core.generate(policy, prompts, sampling=sampling)) == 8


def test_a_mistake_in_a_dict_names_the_setting(policy):
    with pytest.raises(SettingsError, match=r"epochz: SFTSettings has no such setting"):
        rl_core.sft(policy, CONVERSATIONS, settings={"epochz": 1})
    with pytest.raises(SettingsError, match="max_completion_tokenz: SamplingSettings"):
        rl_core.evaluate(policy, prompts=["a"], settings={"sampling": {"max_completion_tokenz": 4}})
