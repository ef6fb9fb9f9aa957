"""Metric by which a sweep chooses if none is named."""

import json

import pytest

from flows.sweep.plan import resolve_metric
from rl_core.errors import SettingsError
from tasks.config import build_settings


def build_pipeline(tmp_path, **options):
    rows = [json.dumps({"prompt": f"{n} + 1 =", "answer": str(n + 1)}) for n in range(60)]
    (tmp_path / "questions.jsonl").write_text("\n".join(rows))
    options = {"path": str(tmp_path / "questions.jsonl"), **options}
    stages = {
        "sft": {},
        "policy": {"rewards": {"exact": 1.0}},
        "evaluate": {"rewards": {"exact": 1.0}},
    }
    return build_settings(
        {"name": "x", "environment": {"name": "prompts", "options": options}, "stages": stages}
    )


def test_the_reward_decides_without_a_verifier(tmp_path):
    assert resolve_metric(None, build_pipeline(tmp_path)) == "reward"
    assert resolve_metric(None, build_pipeline(tmp_path, verifier="exact")) == "success"
    assert resolve_metric("eval/loss", build_pipeline(tmp_path)) == "eval/loss"
    with pytest.raises(
        SettingsError,
        match=r"--metric success: environment .* has no verifier.*or use --metric reward",
    ):
        resolve_metric("success", build_pipeline(tmp_path))
