"""Metric reference compared with the names that training logs and the sources contain, in both directions."""

import ast
import fnmatch
import functools
import re
from pathlib import Path

import pytest
import torch
from helpers import thinkers, tiny
from helpers.letters import make_trainer
from helpers.vector_worlds import walkers
from transformers import LlamaForSequenceClassification

from rl_core.analysis.metric_reference import METRIC_GROUPS, MetricDescription
from rl_core.data.chat import ChatRenderer
from rl_core.data.pairs import PairSide, PreferencePair
from rl_core.data.tokenizer import train_tokenizer
from rl_core.environments.answer_checks import ANSWER_CHECKS
from rl_core.inference.teacher import LocalTeacher
from rl_core.networks.trainer import NetworkTrainer, PlayedEpisodes
from rl_core.rewards.orchestrator import REWARD_COMPONENTS, RewardOrchestrator
from rl_core.settings import (
    CriticSettings,
    CurriculumStage,
    ExitCondition,
    NetworkSettings,
    PreferenceSettings,
    ReplaySettings,
    RewardModelSettings,
    RewardSettings,
    RollbackSettings,
    SFTSettings,
)
from rl_core.settings.distillation import DistilledPolicySettings
from rl_core.storage.checkpoint import CheckpointStore
from rl_core.timing import ENCLOSING_SPANS
from rl_core.tracking import MemoryTracker
from rl_core.trainers.policy_gradient.cross_vocabulary import AlignedTeacher
from rl_core.trainers.preference import PreferenceTrainer
from rl_core.trainers.reward_model import RewardModelTrainer
from rl_core.trainers.sft import SFTTrainer
from rl_core.training.loop import run_loop

ROOT = Path(__file__).resolve().parents[3]
ROWS = [metric for group in METRIC_GROUPS for metric in group.metrics]
PREFIXES = [group.title.partition("`")[2].rstrip("/`") for group in METRIC_GROUPS]
FIELD = re.compile(r"\{\w+\}")
INTERNAL = {"policy/importance_square_mean"}  # removed before anything is logged


@functools.cache
def compile_pattern(row_name):
    """Compile the expression that the names of a row match."""
    parts = re.split(r"(\{\w+\})", row_name)
    patterns = (
        ".+" if part == "{metric}" else "[^/]+" if part.startswith("{") else re.escape(part)
        for part in parts
    )
    return re.compile("".join(patterns))


def is_match(row, name):
    """Return whether the row describes a logged name."""
    return compile_pattern(row.name).fullmatch(name) is not None


def find_metric(name):
    """Find the row of a logged name: an exact one first, else the one with the longest text outside its fields."""
    return max(
        (row for row in ROWS if is_match(row, name)),
        key=lambda row: len(FIELD.sub("", row.name)),
        default=None,
    )


def collect_logged_names(trainer, iterations, **options):
    tracker = MemoryTracker()
    run_loop(trainer, trainer.settings, iterations=iterations, tracker=tracker, **options)
    return {name for _, row in tracker.metrics for name in row}


def run_supervised():
    small = {"warmup_steps": 0, "batch_size": 2, "eval_every": 1}
    rows = [([1, 2, 1, 2], [False, False, True, True]), ([3, 4, 3], [False, True, True])]
    sft = SFTTrainer(
        tiny.nano(), tiny.PAD, rows, rows, SFTSettings(**small, grokfast_lambda=2.0), 7
    )
    scorer = tiny.nano(model_class=LlamaForSequenceClassification, num_labels=1)
    pairs = [PreferencePair(PairSide([1, 2], [3], [True]), PairSide([1, 2], [4], [True]))] * 2
    preference = PreferenceTrainer(
        tiny.nano(), tiny.PAD, pairs, pairs, PreferenceSettings(**small, sft_coef=1.0), 7
    )
    sides = [([1, 2, 3], [1, 2, 4])] * 2
    reward = RewardModelTrainer(scorer, tiny.PAD, sides, sides, RewardModelSettings(**small), 7)
    return (
        collect_logged_names(sft, 2)
        | collect_logged_names(preference, 2)
        | collect_logged_names(reward, 2)
    )


def run_policy(tokenizer, folder):
    steps = folder.with_name("steps.py")
    steps.write_text("def check(steps, trajectory):\n    return [1.0] * len(steps)\n")
    process = {"function": f"{steps}:check"}
    rewards = RewardOrchestrator(
        {
            name: 1.0 for name in REWARD_COMPONENTS if name not in ANSWER_CHECKS and name != "judge"
        },  # these log no additional name
        scorer=lambda rows: [float(len(row)) for row in rows],
        options=RewardSettings(window=3, process=process),
        decode=tokenizer.decode,
    )
    watched = ExitCondition(metric="success_rate", window=1, threshold=0.0)
    slope = ExitCondition(metric="reward/mean", statistic="slope", window=2, threshold=1e9)
    stages = (
        CurriculumStage(name="one", levels={"low": 1.0}, exit_conditions=(watched,)),
        CurriculumStage(
            name="two", levels={"low": 1.0, "high": 1.0}, exit_conditions=(slope, watched)
        ),
    )
    every = make_trainer(
        tokenizer,
        rewards=rewards,
        algorithm="ppo",
        critic=CriticSettings(value_clip_eps=0.2),
        epochs=2,
        kl_max=1.0,
        importance="token",
        replay=ReplaySettings(iterations=2, share=0.5),
        curriculum=stages,
        rollback=RollbackSettings(window=1),
        checkpoint_every=1,
        prompts_per_iteration=3,
    )
    frozen = make_trainer(tokenizer).policy
    with torch.no_grad():  # a teacher that equals the policy has nothing to teach
        for weight in frozen.parameters():
            weight.mul_(1.5)
    group = make_trainer(
        tokenizer, algorithm="dapo", kl_coef=0.1, reference=frozen, prompts_per_iteration=2
    )
    taught = make_trainer(
        tokenizer, kind=DistilledPolicySettings, teacher=LocalTeacher(frozen), gamma=0.0
    )
    renderer = ChatRenderer(tokenizer)
    aligned = make_trainer(
        tokenizer,
        kind=DistilledPolicySettings,
        teacher=AlignedTeacher(LocalTeacher(frozen), renderer, renderer, "theirs"),
        divergence="gold",
        gamma=0.0,
        prompts_per_iteration=2,
    )
    return (
        collect_logged_names(every, 4, checkpoints=CheckpointStore(folder))
        | collect_logged_names(group, 2)
        | collect_logged_names(taught, 1)
        | collect_logged_names(aligned, 1)
    )


def run_network():
    settings = NetworkSettings(
        num_environments=2,
        rollout_steps=8,
        epochs=2,
        minibatches=2,
        eval_episodes=2,
        advantages="vtrace",
        replay=1,
        desired_kl=0.01,
    )
    trainer = NetworkTrainer(None, settings, 0, name="Walk", vector=walkers(2, continuous=True))
    trainer.evaluate = lambda: PlayedEpisodes(
        [1, 2], [3.0, 4.0], [5, 6], [False, True]
    ).compute_metrics()
    return collect_logged_names(trainer, 3)


@pytest.fixture(scope="module")
def names(tmp_path_factory):
    """Return everything that small runs of all trainers log."""
    folder = tmp_path_factory.mktemp("checkpoints")
    renderer = thinkers.renderer_of_texts()
    thoughts = thinkers.make_trainer(
        renderer, thinkers.teach(renderer), eval_every=1, check_every_episodes=12
    )
    return (
        run_supervised()
        | run_policy(train_tokenizer(["abc xyz"], 300), folder)
        | collect_logged_names(thoughts, 1)
        | run_network()
    )


def test_every_logged_name_is_documented(names):
    assert len(names) > 100  # the runs logged the expected names
    assert sorted(name for name in names if find_metric(name) is None) == []


@functools.cache
def collect_constants():
    """Collect strings and f-strings of the sources, with `*` for a value in an f-string."""
    results = set()
    for package in ("rl_core", "tasks", "flows", "posttrain"):
        for path in sorted((ROOT / package).rglob("*.py")):
            text = path.read_text()
            if "= MetricGroup(" in text:  # the reference itself
                continue
            tree = ast.parse(text)
            inner = {
                id(part)
                for node in ast.walk(tree)
                if isinstance(node, ast.JoinedStr)
                for part in node.values
            }
            for node in ast.walk(tree):
                if isinstance(node, ast.JoinedStr):
                    results.add(
                        "".join(
                            part.value if isinstance(part, ast.Constant) else "*"
                            for part in node.values
                        )
                    )
                elif (
                    isinstance(node, ast.Constant)
                    and isinstance(node.value, str)
                    and id(node) not in inner
                ):
                    results.add(node.value)
    return results


def test_every_name_in_the_sources_is_documented():
    pattern = re.compile(rf"({'|'.join(PREFIXES)})/[\w*/.]+")
    actual = {text for text in collect_constants() if pattern.fullmatch(text)}
    actual = {
        text for text in actual if text[-1] not in "/_"
    } - INTERNAL  # those are prefixes, searched in names
    assert len(actual) > 80
    known = {FIELD.sub("x", row.name) for row in ROWS}
    # A name that contains a value is known if it can be a row; the runs above show which rows it is.
    unknown = [
        text for text in actual if find_metric(text) is None and not fnmatch.filter(known, text)
    ]
    assert sorted(unknown) == []


def test_every_row_is_logged_by_something(names):
    """Check the runs above; what they do not reach (a GPU, a whole pipeline) must end in a name of the sources."""
    fragments = {part for text in collect_constants() for part in re.split(r"[*/]", text)}
    for row in ROWS:
        if any(is_match(row, name) and find_metric(name) is row for name in names):
            continue
        if row.name.startswith("online/"):
            continue  # compared with the sources both ways in test_online_metric_names.py
        last = row.name.rpartition("/")[2]
        pieces = [piece for piece in FIELD.split(last) if piece]
        if row.name.startswith("perf/"):
            fragments |= {
                f"{text}_seconds" for text in ENCLOSING_SPANS
            }  # spans, each logged by its name
        assert all(piece in fragments for piece in pieces), (
            f"{row.name} is documented, but nothing logs it"
        )


def test_rows_are_unique_and_whole():
    assert len({row.name for row in ROWS}) == len(ROWS)
    for group in METRIC_GROUPS:
        for row in group.metrics:
            assert (
                row.name.startswith(f"{PREFIXES[METRIC_GROUPS.index(group)]}/")
                or group is METRIC_GROUPS[-1]
            ), row.name
            assert row.unit and row.meaning.endswith("."), row.name
            assert not row.worry or row.worry.endswith("."), row.name


def test_the_nearest_row_matches():
    assert (
        find_metric("train/success_rate_by_level/hard").name
        == "train/success_rate_by_level/{level}"
    )
    assert find_metric("reward/mean").name == "reward/mean"  # not the component `mean`
    assert find_metric("eval/sft/success_rate").name == "eval/{model}/success_rate"
    assert find_metric("train/unheard_of") is None
    row = MetricDescription("a/{b}", "-", "c")
    assert is_match(row, "a/x.y") and not is_match(row, "a/")
