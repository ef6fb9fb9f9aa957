"""The metric that a sweep chooses by, where it is not named."""

import json

import pytest

from flows.sweep.plan import metric_of
from rl_core.errors import SettingsError
from tasks.config import from_dict


def pipeline(tmp_path, **options):
    rows = [json.dumps({"prompt": f"{n} + 1 =", "answer": str(n + 1)}) for n in range(60)]
    (tmp_path / "questions.jsonl").write_text("\n".join(rows))
    options = {"path": str(tmp_path / "questions.jsonl"), **options}
    stages = {"sft": {}, "policy": {"rewards": {"exact": 1.0}}, "evaluate": {"rewards": {"exact": 1.0}}}
    return from_dict({"name": "x", "environment": {"name": "prompts", "options": options}, "stages": stages})


def test_where_nothing_tells_success_the_reward_decides(tmp_path):
    assert metric_of(None, pipeline(tmp_path)) == "reward"
    assert metric_of(None, pipeline(tmp_path, verifier="exact")) == "success"
    assert metric_of("eval/loss", pipeline(tmp_path)) == "eval/loss"
    with pytest.raises(SettingsError, match=r"--metric success: nothing tells it.*or choose by --metric reward"):
        metric_of("success", pipeline(tmp_path))
