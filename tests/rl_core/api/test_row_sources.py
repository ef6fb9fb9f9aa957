"""Rows from tables and lists, settings from dicts, in every public function that takes them."""

import dataclasses
import math

import pandas as pd
import pytest

import rl_core
from rl_core.api.data import resolve_environment
from rl_core.data.records import read_demonstrations, read_preferences, read_prompts
from rl_core.errors import DataError, SettingsError
from rl_core.trainers.sft import SFTTrainer

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


def test_a_repr_says_what_the_output_holds(policy, tmp_path):
    """A new training on the folder of a finished run said only "not started"."""
    output = tmp_path / "run"

    def create(**settings):
        return rl_core.sft(policy, CONVERSATIONS, settings=settings, output=output)

    def read_state(training):
        return repr(training).splitlines()[1]

    assert read_state(create(max_steps=2)) == "  iteration 0 of 2, not started"
    create(max_steps=2).run()
    finished = "  iteration 0 of 2, not started; its output holds a finished run, which run() loads"
    assert read_state(create(max_steps=2)) == finished
    assert read_state(create(max_steps=3)).endswith(
        "of 3, not started; its output holds a run, which run() resumes from iteration 2"
    )
    (output / "checkpoints" / "checkpoint-00000001" / "state.json").write_text("{")
    assert read_state(create(max_steps=3)).endswith("which run() resumes from a checkpoint")


def test_a_mistake_in_a_dict_names_the_setting(policy):
    with pytest.raises(SettingsError, match=r"epochz: SFTSettings has no such setting"):
        rl_core.sft(policy, CONVERSATIONS, settings={"epochz": 1})
    with pytest.raises(SettingsError, match="max_completion_tokenz: SamplingSettings"):
        rl_core.evaluate(policy, prompts=["a"], settings={"sampling": {"max_completion_tokenz": 4}})


def test_a_mistake_in_a_dict_is_named_with_its_path(policy, tmp_path):
    """Check dicts in all arguments that take settings, and blocks within settings, also in lists of them."""
    exits = [{"metric": "success_rate", "window": 2, "treshold": 1.0}]
    stages = [{"name": "a", "levels": {"easy": 1.0}, "exit_conditions": exits}]
    for call, message in (
        (lambda: rl_core.load_policy({"path": "x", "lora": {"rnk": 2}}), r"^model\.lora\.rnk: "),
        (lambda: rl_core.load_policy({"pth": "x"}), r"^model\.pth: .* did you mean 'path'"),
        (lambda: rl_core.load_policy("x", {"dtyp": "float32"}), r"^settings\.dtyp: "),
        (lambda: rl_core.create_policy(["a"], {"preste": "nano"}), r"^settings\.preste: "),
        (lambda: rl_core.generate(policy, ["a"], sampling={"topp": 1}), r"^sampling\.topp: "),
        (lambda: rl_core.PolicySettings(sampling={"topp": 1}), r"^sampling\.topp: "),
        (
            lambda: rl_core.grpo(policy, prompts=["a"], settings={"curriculum": stages}),
            r"^curriculum\.0\.exit_conditions\.0\.treshold: ExitCondition has no such setting; "
            "did you mean 'threshold'",
        ),
        (lambda: rl_core.PolicySettings(sampling={"temperature": -1}), r"^sampling\.temperature: "),
        (
            lambda: rl_core.RewardOrchestrator({"task": 1}, options={"cod": {}}),
            r"^options\.cod: RewardSettings",
        ),
        (
            lambda: rl_core.analyze({"a": tmp_path}, tmp_path, {"measure": []}),
            "^measure: AnalysisSettings",
        ),
        (
            lambda: SFTTrainer(policy.model, 0, [], [], {"epochz": 1}, 0),
            "^epochz: SFTSettings",
        ),
        (
            lambda: rl_core.sft(policy, CONVERSATIONS, settings=rl_core.PolicySettings()),
            r"expected rl_core\.SFTSettings or a dict of its settings, found PolicySettings",
        ),
    ):
        with pytest.raises(SettingsError, match=message):
            call()


def test_settings_from_a_dict_are_those_from_objects(policy, tmp_path):
    stages = [{"name": "a", "levels": {"easy": 1.0}, "exit_conditions": [{"metric": "x"}]}]
    stage = rl_core.CurriculumStage(
        name="a", levels={"easy": 1.0}, exit_conditions=(rl_core.ExitCondition(metric="x"),)
    )
    expected = rl_core.PolicySettings(
        curriculum=(stage,), replay=rl_core.ReplaySettings(share=0.5), importance="token"
    )
    assert (
        rl_core.PolicySettings(curriculum=stages, replay={"share": 0.5}, importance="token")
        == expected
    )
    assert dataclasses.replace(rl_core.PolicySettings(), curriculum=tuple(stages)).curriculum == (
        stage,
    )
    folder = policy.save(tmp_path / "model")
    lora = {"rank": 2, "target_modules": ["q_proj"]}
    model = {"path": str(folder), "lora": lora, "device": "cpu"}
    training = rl_core.sft(model, CONVERSATIONS, settings={"epochs": 1}, output=tmp_path / "out")
    (config,) = training.model.peft_config.values()
    assert config.r == 2 and set(config.target_modules) == {"q_proj"}
    origin = rl_core.load_policy(model).origin
    assert origin == rl_core.ModelSettings(
        path=str(folder),
        lora=rl_core.LoraSettings(rank=2, target_modules=("q_proj",)),
        device="cpu",
    )
    size = {"group_size": 2, "prompts_per_iteration": 1, "iterations": 1, "kl_coef": 0.1}
    sampling = {"max_completion_tokens": 4}
    trained = rl_core.grpo(
        model,
        prompts=["a"],
        reward=lambda ts: [0.0] * len(ts),
        settings={**size, "sampling": sampling},
    )
    assert trained.trainer.settings.sampling.max_completion_tokens == 4
    with pytest.raises(
        SettingsError, match="a reward model trains all its weights; leave lora out"
    ):
        rl_core.reward_model(model, PAIRS)
    start = {"path": str(folder), "device": "cpu"}
    scored = rl_core.reward_model(start, PAIRS, settings={"epochs": 1})
    assert scored.trainer.settings.epochs == 1 and scored.model.config.num_labels == 1
    assert rl_core.create_policy(["a b"], {"preset": "nano", "vocab_size": 300}).origin == (
        rl_core.ModelSettings(preset="nano", vocab_size=300)
    )
