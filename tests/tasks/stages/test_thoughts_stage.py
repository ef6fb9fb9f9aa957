"""The stage `thoughts` by itself: its files, and its failure if thoughts are not genuine."""

import dataclasses
import json
import threading

import pytest
import torch

from rl_core.data.tokenizer import train_tokenizer
from rl_core.environments import make_environment
from rl_core.errors import CheckFailed, SettingsError
from rl_core.models import causal_lm
from rl_core.rollouts.heldout_episodes import draw_heldout_requests
from rl_core.settings import EvaluationSettings, ModelSettings, SamplingSettings, ThoughtsSettings
from rl_core.thoughts import genuineness_check
from tasks.config import build_settings
from tasks.pipeline.stage import StageContext
from tasks.pipeline.stage_result import RECENT_ROLLOUTS
from tasks.stages import thoughts

SETTINGS = ThoughtsSettings(
    iterations=2,
    episodes_per_iteration=4,
    eval_every=1,
    validation_episodes=6,
    check_episodes=12,
    bootstrap_samples=100,
    max_thought_tokens=200,
    sampling=SamplingSettings(max_completion_tokens=100),
    require_genuine=False,
)


class Tracker:
    """Keeps what it is given."""

    def __init__(self):
        self.rows, self.artifacts = [], []

    def log_metrics(self, metrics, step):
        self.rows.append(metrics)

    def log_artifact(self, path, folder=""):
        self.artifacts.append(path.name)

    def progress(self, *arguments):
        pass


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Write an untrained policy, which never thinks and hardly ever answers."""
    environment = make_environment("reckoning")
    texts = [
        m["content"] for seed in range(50) for m in environment.demonstration(seed, "easy").messages
    ]
    tokenizer = train_tokenizer(texts, 300)
    folder = tmp_path_factory.mktemp("base")
    causal_lm.save(
        causal_lm.create_model(ModelSettings(preset="nano", context=128), tokenizer, 0),
        tokenizer,
        folder,
    )
    return folder


def build_context(base, folder, settings=SETTINGS, **model):
    pipeline = build_settings(
        {
            "name": "t",
            "environment": {"name": "reckoning"},
            "model": {"device": "cpu", "path": str(base), **model},
            "stages": {"thoughts": {}},
        }
    )
    return StageContext(
        name="thoughts",
        pipeline_run=None,
        settings=settings,
        inputs={"model": base},
        pipeline=pipeline,
        seed=1,
        tracker=Tracker(),
        folder=folder,
        fingerprint={},
        stop=threading.Event(),
    )


GAINS = {
    "own": [[1.0], [1.1], [0.9]] * 2,
    "shuffled": [[-1.0], [-0.9], [-1.2]] * 2,
    "filler": [[0.0], [0.1], [0.0]] * 2,
    "truncated": [[0.2], [0.4], [0.3]] * 2,
}


def test_it_writes_a_model_and_all_numbers(base, tmp_path, monkeypatch):
    monkeypatch.setattr(genuineness_check, "measure_gains", lambda *a, **k: GAINS)
    context = build_context(base, tmp_path)
    summary = thoughts._run_thought_training(context)
    assert summary["genuine"] is True and summary["iterations"] == 2
    for text in (
        "own +1.00 [",
        "shuffled -1.03 [",
        "filler +0.03 [",
        "truncated +0.30 [",
        "genuine",
    ):
        assert text in summary["note"]
    for name in ("own", "shuffled", "filler", "truncated"):
        assert f"thoughts/gain_{name}_low" in summary["metrics"]
    assert any("thoughts/drop_filler_low" in row for row in context.tracker.rows)
    stored = json.loads((tmp_path / "thoughts.json").read_text())
    assert stored["genuine"] is True and stored["gains"]["own"]["difference"] == pytest.approx(1.0)
    assert context.tracker.artifacts == ["thoughts.json"]
    played = [json.loads(line) for line in (tmp_path / RECENT_ROLLOUTS).read_text().splitlines()]
    assert [row["iteration"] for row in played] == [0] * 4 + [1] * 4  # for the live page
    measured = [row["reward/mean"] for row in context.tracker.rows if "thoughts/gain" in row]
    for iteration in (0, 1):
        rows = [row for row in played if row["iteration"] == iteration]
        turns = [len(row["turns"]) for row in rows]
        total = sum(
            row["rewards"]["thought_gain"] * count for row, count in zip(rows, turns, strict=True)
        )
        assert total / sum(turns) == pytest.approx(measured[iteration], abs=1e-6)
    model, _ = causal_lm.load_model(tmp_path / "model", ModelSettings(device="cpu"))
    assert not any("baseline" in name for name in model.state_dict())


def test_with_adapters_the_model_is_exported_merged(base, tmp_path, monkeypatch):
    monkeypatch.setattr(genuineness_check, "measure_gains", lambda *a, **k: GAINS)
    settings = dataclasses.replace(SETTINGS, learning_rate=1e-2, warmup_steps=0, answer_coef=1.0)
    thoughts._run_thought_training(build_context(base, tmp_path, settings, lora={"rank": 4}))
    before, _ = causal_lm.load_model(base, ModelSettings(device="cpu"))
    after, _ = causal_lm.load_model(tmp_path / "model", ModelSettings(device="cpu"))
    start, end = before.state_dict(), after.state_dict()
    assert start.keys() == end.keys()  # a plain model, without adapter names
    moved = {name for name in start if not torch.equal(start[name], end[name])}
    assert moved and all("_proj" in name for name in moved)
    assert (tmp_path / "model" / "adapter").is_dir()


@pytest.mark.parametrize("model", [{}, {"lora": {"rank": 4}}], ids=["whole", "adapters"])
def test_the_kl_refers_to_the_stage_s_model(base, tmp_path, monkeypatch, model):
    monkeypatch.setattr(genuineness_check, "measure_gains", lambda *a, **k: GAINS)
    settings = dataclasses.replace(
        SETTINGS,
        kl_coef=0.1,
        learning_rate=1e-2,
        warmup_steps=0,
        check_every_episodes=8,
        stop_when_genuine=True,
    )
    context = build_context(base, tmp_path, settings, **model)
    summary = thoughts._run_thought_training(context)
    values = [row["policy/ref_kl"] for row in context.tracker.rows if "policy/ref_kl" in row]
    assert abs(values[0]) < 1e-6 < values[1]
    assert [
        row["thoughts/check_genuine"]
        for row in context.tracker.rows
        if "thoughts/check_genuine" in row
    ] == [1.0]
    assert summary["stop_reason"].startswith(
        "thoughts are genuine on the validation episodes, after 8"
    )


def test_it_is_tested_on_episodes_that_chose_nothing_and_on_others_for_each_key(base, tmp_path):
    few = dataclasses.replace(SETTINGS, validation_episodes=30, check_episodes=30)
    environment = make_environment("reckoning")
    pool = {level: environment.seeds_of("heldout", level)[:20] for level in environment.levels}
    environment.seeds_of = lambda split, level: pool[level]  # 60 episodes in all
    validation = draw_heldout_requests(environment, EvaluationSettings(episodes=30), 1)

    def asked(key):
        context = dataclasses.replace(
            build_context(base, tmp_path, few), fingerprint={"stage key": key}
        )
        return thoughts._select_check_episodes(context, environment, validation)

    assert not set(asked("a")) & set(validation) and len(set(asked("a"))) == 30
    assert asked("a") == asked("a") != asked("b")
    few = dataclasses.replace(few, check_episodes=60)
    with pytest.raises(
        SettingsError, match=r"check_episodes: level .* validation_episodes takes 10 of them"
    ):
        asked("a")


def test_thoughts_that_are_not_genuine_fail_the_stage(base, tmp_path, monkeypatch):
    values = {**GAINS, "filler": GAINS["own"]}  # filler helps as much: it was the length
    monkeypatch.setattr(genuineness_check, "measure_gains", lambda *a, **k: values)
    settings = dataclasses.replace(SETTINGS, require_genuine=True)
    context = build_context(base, tmp_path / "strict", settings)
    with pytest.raises(
        CheckFailed, match=r"filler \+1\.00 .*filler thoughts do not lose significantly"
    ):
        thoughts._run_thought_training(context)
    assert context.tracker.artifacts == ["thoughts.json"]  # the numbers are kept all the same
    assert (
        thoughts._run_thought_training(build_context(base, tmp_path / "lenient"))["genuine"]
        is False
    )
