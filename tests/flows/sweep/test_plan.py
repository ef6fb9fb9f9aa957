"""The metric that a sweep chooses by, where it is not named."""

import json

import pytest

from flows.sweep.plan import resolve_metric
from rl_core.errors import SettingsError
from tasks.config import build_settings


def pipeline(tmp_path, **options):
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


def test_where_nothing_tells_success_the_reward_decides(tmp_path):
    assert resolve_metric(None, pipeline(tmp_path)) == "reward"
    assert resolve_metric(None, pipeline(tmp_path, verifier="exact")) == "success"
    assert resolve_metric("eval/loss", pipeline(tmp_path)) == "eval/loss"
    with pytest.raises(
        SettingsError, match=r"--metric success: nothing tells it.*or choose by --metric reward"
    ):
        resolve_metric("success", pipeline(tmp_path))
