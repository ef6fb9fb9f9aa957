"""Policies that a stage plays or reads: as their folder has them, whatever adapters the pipeline trains."""

import threading

from helpers.policy_stage import save_base

from rl_core.models.lora import is_lora
from rl_core.tracking import MemoryTracker
from tasks.config import build_settings
from tasks.pipeline.stage import StageContext
from tasks.stages import evaluate
from tasks.stages.loading import load_frozen_policy, load_policy


class Tracker(MemoryTracker):
    def log_traces(self, *traces, **named):
        pass


def build_pipeline(base, **lora):
    values = {
        "name": "t",
        "environment": {"name": "arithmetic"},
        "model": {"device": "cpu", "path": str(base), "lora": {"rank": 2, **lora}},
        "stages": {
            "evaluate": {"episodes": 3, "sampling": {"max_completion_tokens": 8, "max_turns": 1}}
        },
    }
    return build_settings(values)


def test_an_evaluation_plays_the_weights_that_are_written_without_adapters_and_not_in_few_bits(
    tmp_path,
):
    base = save_base(tmp_path / "base")
    pipeline = build_pipeline(base, quantize="nf4")  # would need a GPU
    context = StageContext(
        name="evaluate",
        settings=pipeline.stages.evaluate,
        inputs={"model.base": base},
        pipeline=pipeline,
        seed=1,
        tracker=Tracker(),
        folder=tmp_path,
        pipeline_run=None,
        fingerprint={},
        stop=threading.Event(),
    )
    assert "success" in evaluate._run_evaluation(context)["models"]["base"]
    adapted = build_pipeline(base)
    assert is_lora(load_policy(base, adapted).model)
    assert not is_lora(load_frozen_policy(base, adapted).model)
