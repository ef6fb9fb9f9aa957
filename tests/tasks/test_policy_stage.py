"""The stage `policy` by itself, with every shipped component but the learned one; and its record of rewards."""

import json
import threading

from rl_core.data.tokenizer import train_tokenizer
from rl_core.environments import make
from rl_core.models import causal_lm
from rl_core.settings import ModelSettings, PolicySettings, RewardSettings, SamplingSettings
from rl_core.tracking import MemoryTracker
from tasks import policy
from tasks.config import from_dict
from tasks.stage import REWARD_RECORD, StageContext, _clear_leftovers

PARTS = ("task", "curiosity", "coherence", "tool_use", "format", "length")


class Tracker(MemoryTracker):
    def log_dict(self, value, name):
        pass


def test_every_part_of_every_rollout_is_on_disk(tmp_path, monkeypatch):
    texts = [m["content"] for seed in range(50) for m in make("arithmetic").demonstration(seed, "easy").messages]
    tokenizer = train_tokenizer(texts, 300)
    base, folder = tmp_path / "base", tmp_path / "stage"
    causal_lm.save(causal_lm.create(ModelSettings(preset="nano", context=128), tokenizer, 0), tokenizer, base)
    folder.mkdir()
    settings = PolicySettings(
        iterations=2, prompts_per_iteration=3, group_size=2, checkpoint_every=1, patience=None, eval_every=0,
        rewards=dict.fromkeys(PARTS, 0.5), reward_options=RewardSettings(clip=1.0),
        sampling=SamplingSettings(max_completion_tokens=90, max_turns=3),
    )  # fmt: skip
    pipeline = from_dict(
        {
            "name": "t",
            "environment": {"name": "arithmetic"},
            "model": {"device": "cpu", "path": str(base)},
            "stages": {"policy": {}},
        }
    )
    monkeypatch.setattr(policy, "_recent_metrics", lambda context: {})
    context = StageContext(
        name="policy", settings=settings, inputs={"model": base}, pipeline=pipeline, seed=1, tracker=Tracker(),
        folder=folder, session=None, fingerprint={}, stop=threading.Event(),
    )  # fmt: skip
    policy._body(context)
    rows = [json.loads(line) for line in (folder / REWARD_RECORD).read_text().splitlines()]
    assert [row["iteration"] for row in rows] == [0] * 6 + [1] * 6
    for row in rows:
        assert set(row["rewards"]) == {*PARTS, *(f"weighted/{name}" for name in PARTS)}
        assert all(abs(value) <= 0.5 for name, value in row["rewards"].items() if name.startswith("weighted/"))
    assert len(context.tracker.series("reward/curiosity")) == 2 == len(context.tracker.series("reward/alarm"))


def test_an_interrupted_stage_keeps_checkpoints_and_record(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "model").mkdir()
    for name in (REWARD_RECORD, "curriculum.json"):
        (tmp_path / name).write_text("")
    _clear_leftovers(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoints", REWARD_RECORD]
