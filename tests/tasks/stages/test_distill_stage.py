"""The stage `distill` by itself: what it leaves, that it resumes, and that the teacher is one of its inputs."""

import threading
from types import SimpleNamespace

import pytest
import torch
from helpers.teacher_server import serve_teacher

from rl_core.data.tokenizer import train_tokenizer
from rl_core.environments import make_environment
from rl_core.models import causal_lm
from rl_core.settings import ModelSettings
from rl_core.tracking import MemoryTracker
from tasks.config import build_settings
from tasks.pipeline.stage import StageContext
from tasks.pipeline.stage_folder import REWARD_RECORD
from tasks.stages import distill


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Create the folders of a student and a teacher with one tokenizer."""
    texts = [
        m["content"]
        for seed in range(50)
        for m in make_environment("arithmetic").demonstration(seed, "easy").messages
    ]
    tokenizer = train_tokenizer(texts, 300)
    folders = [tmp_path_factory.mktemp(name) for name in ("student", "teacher")]
    for seed, folder in enumerate(folders):
        causal_lm.save(
            causal_lm.create_model(ModelSettings(preset="nano", context=128), tokenizer, seed),
            tokenizer,
            folder,
        )
    return folders


def build_pipeline(student, **teacher):
    stage = {
        "iterations": 2,
        "prompts_per_iteration": 4,
        "checkpoint_every": 1,
        "learning_rate": 0.01,
        "teacher": teacher,
        "levels": ["easy"],
        "sampling": {"max_completion_tokens": 20, "max_turns": 2},
    }
    return build_settings(
        {
            "name": "t",
            "environment": {"name": "arithmetic"},
            "model": {"device": "cpu", "path": str(student)},
            "stages": {"distill": stage},
        }
    )


def build_context(student, folder, pipeline, **inputs):
    folder.mkdir()
    return StageContext(
        name="distill",
        settings=pipeline.stages.distill,
        inputs={"model": student, **inputs},
        pipeline=pipeline,
        seed=1,
        tracker=MemoryTracker(),
        folder=folder,
        pipeline_run=SimpleNamespace(threads=1),
        fingerprint={},
        stop=threading.Event(),
    )


def read_weights(folder):
    model, _ = causal_lm.load_model(folder / "model", ModelSettings(device="cpu"))
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def test_a_teacher_here_and_the_same_one_behind_a_server_leave_the_same_model(models, tmp_path):
    student, teacher = models
    pipeline = build_pipeline(
        student, model="models:/somebody@champion"
    )  # resolved to a folder, an input of the stage
    here = distill._run_distillation(
        build_context(student, tmp_path / "here", pipeline, teacher=teacher)
    )
    loaded, _ = causal_lm.load_model(teacher, ModelSettings(device="cpu"))
    with serve_teacher(loaded.eval()) as (url, _):
        pipeline = build_pipeline(student, model="served", url=url, tokenizer=str(teacher))
        there = distill._run_distillation(build_context(student, tmp_path / "there", pipeline))
    assert here["metrics"]["policy/teacher_kl"] == pytest.approx(
        there["metrics"]["policy/teacher_kl"], abs=1e-4
    )
    assert torch.allclose(
        read_weights(tmp_path / "here"), read_weights(tmp_path / "there"), atol=1e-4
    )
    start = torch.cat(
        [
            p.flatten()
            for p in causal_lm.load_model(student, ModelSettings(device="cpu"))[0].parameters()
        ]
    )
    assert not torch.allclose(read_weights(tmp_path / "here"), start, atol=1e-3)
    kl = here["metrics"]["policy/teacher_kl"]
    assert (
        here["note"]
        == f"2 iterations (as many as were set); KL to the teacher {kl:.3f} nats per token at the end"
    )
    assert len((tmp_path / "here" / REWARD_RECORD).read_text().splitlines()) == 8


def test_the_teacher_is_an_input_of_the_stage(models, monkeypatch):
    student, _ = models
    seen = []
    monkeypatch.setattr(
        distill,
        "run_stage",
        lambda run, name, body, *, inputs: seen.append((name, inputs)),
    )

    def run_of(**named):
        resolve = lambda place: (f"folder of {place}", place)  # noqa: E731
        return SimpleNamespace(
            settings=build_pipeline(student, **named), models=SimpleNamespace(resolve_model=resolve)
        )

    distill.distill_from_teacher(run_of(model="models:/big@champion"), student, None)
    distill.distill_from_teacher(run_of(model="served", url="http://127.0.0.1:1"), student, None)
    assert seen == [
        ("distill", {"model": student, "teacher": "folder of models:/big@champion"}),
        ("distill", {"model": student}),
    ]
