"""Export verification: a folder that is not the trained and evaluated model is refused with its figure."""

import contextlib
import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers.exports import in_this_process
from helpers.waiting import wait_for
from safetensors.torch import load_file, save_file

from rl_core.data.tokenizer import train_tokenizer
from rl_core.errors import BackendError, DataError, ExportMismatch
from rl_core.models import causal_lm, export_verification
from rl_core.models.export_records import (
    TokenRecord,
    read_records,
    record_evaluated_logprobs,
    record_trained_logprobs,
    score_records,
    write_records,
)
from rl_core.models.export_verification import (
    compare_logprobs,
    score_in_fresh_process,
    verify_export,
)
from rl_core.settings import ExportSettings, LoraSettings, ModelSettings, SamplingSettings

KIND = ModelSettings(preset="nano", context=64, device="cpu")
ADAPTED = dataclasses.replace(KIND, lora=LoraSettings(rank=4))


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["abc xyz"], 300)


def create_trained_model(tokenizer, settings):
    """Create a model away from its initial weights, as after training."""
    model = causal_lm.create_model(settings, tokenizer, 0)
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                # so small that twice the adapter has twice the effect
                size = 0.1 if settings.lora is None else 0.003
                parameter += size * torch.randn(parameter.shape, generator=draw)
    return model


class Export:
    """A model, its folder, and the records of its training and evaluation, at temperature 0.7."""

    def __init__(self, folder, tokenizer, settings):
        self.folder, self.tokenizer, self.settings = folder, tokenizer, settings
        self.model = create_trained_model(tokenizer, settings)
        causal_lm.save(self.model, tokenizer, folder)
        ids = [3 * i % 60 for i in range(20)]
        evaluated = score_records(self.model, [TokenRecord(ids, [5, 6, 7, 18, 19], [], 0.7)])
        self.records = {**record_trained_logprobs(self.model), "evaluated": evaluated}

    def prove(self, *, fresh=False, **settings):
        """Verify as the stage does, by default in this process, because a fresh one takes seconds to start."""
        models = [(self.folder, self.records)]
        call = score_in_fresh_process if fresh else in_this_process
        (answer,) = call(models, self.settings, ExportSettings(**settings))
        return verify_export(
            "policy", self.folder, self.records, answer, ExportSettings(**settings)
        )

    def write(self, model):
        shutil.rmtree(self.folder)
        causal_lm.save(model, self.tokenizer, self.folder)

    def change_weights(self, change):
        path = self.folder / "model.safetensors"
        weights = load_file(path)
        change(weights)
        save_file(weights, path, metadata={"format": "pt"})


@pytest.fixture(scope="module")
def exports(tokenizer, tmp_path_factory):
    return {
        kind: Export(tmp_path_factory.mktemp(kind) / "model", tokenizer, settings)
        for kind, settings in (("full", KIND), ("lora", ADAPTED))
    }


@pytest.fixture
def export(exports, tmp_path):
    """Return a function that copies an export, so that a test may change it."""

    def copy_export(kind):
        original = exports[kind]
        copied = object.__new__(Export)
        vars(copied).update(
            vars(original), folder=tmp_path / "model", records=dict(original.records)
        )
        shutil.copytree(original.folder, copied.folder)
        return copied

    return copy_export


def check_refusal(export, message):
    with pytest.raises(ExportMismatch, match=message) as raised:
        export.prove()
    print(str(raised.value)[:500])
    return str(raised.value)


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_a_correct_export_is_verified(exports, kind):
    facts = exports[kind].prove(fresh=kind == "lora")  # in a process without this project
    assert facts["trained"]["max"] < 1e-4 and facts["evaluated"]["max"] < 1e-4
    assert (facts["trained"]["tokens"], facts["evaluated"]["tokens"]) == (120, 5)
    assert facts["class"] == "LlamaForCausalLM" and facts["bound"] == 1e-3


def test_initial_weights_are_refused(export, tokenizer):
    copied = export("full")
    copied.write(causal_lm.create_model(KIND, tokenizer, 0))
    check_refusal(
        copied,
        r"differ from the trained model's by up to \d\S* nats, \d\S* on average over 120 tokens \(limits 0\.0",
    )


def test_an_evaluation_at_another_temperature(export):
    copied = export("full")
    copied.records["evaluated"] = [
        dataclasses.replace(row, temperature=1.0) for row in copied.records["evaluated"]
    ]
    check_refusal(
        copied,
        r"differ from the evaluated model's by up to \d\S* nats, \d\S* on average over 5 tokens",
    )


def scale_adapter(export, factor):
    """Create the model with an adapter of `factor` times this one's effect."""
    model = create_trained_model(export.tokenizer, export.settings)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                parameter *= factor
    return model


@pytest.mark.parametrize(
    ("factor", "shows"),
    [
        (0.0, r"it shows -?0\.00 of the adapter's effect.*base model is \S*e-0[67] "),
        (2.0, r"it shows (1\.9|2\.)"),
    ],
)
def test_a_merge_that_is_the_base_and_one_that_is_twice_the_adapter(export, factor, shows):
    copied = export("lora")
    copied.write(scale_adapter(copied, factor))
    check_refusal(copied, rf"differ from the trained model's by up to \d\S* nats.*{shows}")


def test_an_older_adapter(export):
    copied = export("lora")
    copied.write(scale_adapter(copied, 0.5))
    check_refusal(copied, r"trained model's by up to \d\S* nats.*it shows 0\.[3-6]")


def test_a_head_that_was_dropped(export):
    copied = export("full")
    config = json.loads((copied.folder / "config.json").read_text())
    (copied.folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    check_refusal(
        copied,
        "1 weights of LlamaForCausalLM are missing, and transformers initialises them, first lm_head.weight",
    )


def test_a_head_that_is_tied_wrongly(export):
    copied = export("full")
    config = json.loads((copied.folder / "config.json").read_text())
    (copied.folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    copied.change_weights(
        lambda weights: weights.update({"lm_head.weight": weights["model.embed_tokens.weight"] * 0})
    )
    check_refusal(copied, r"trained model's by up to \d\S* nats")


def test_unexpected_weights_and_other_shapes(export):
    copied = export("full")
    copied.change_weights(lambda weights: weights.update({"value_head.weight": torch.ones(2)}))
    check_refusal(
        copied, "1 weights of LlamaForCausalLM do not belong to it, .* first value_head.weight"
    )
    copied.change_weights(lambda weights: weights.pop("value_head.weight"))
    copied.change_weights(lambda weights: weights.update({"model.norm.weight": torch.ones(2)}))
    check_refusal(copied, "have another shape, .* first model.norm.weight")


def test_what_transformers_cannot_load_and_a_process_without_an_answer(
    export, monkeypatch, tmp_path
):
    copied = export("full")
    (copied.folder / "config.json").write_text("{}")
    with pytest.raises(ExportMismatch, match="transformers alone cannot load it"):
        copied.prove()
    with pytest.raises(BackendError, match=r"model: not loaded within 0\.01 s by a fresh process"):
        copied.prove(fresh=True, timeout_seconds=0.01)
    dead = tmp_path / "dead.py"
    dead.write_text("import os; os._exit(9)")
    monkeypatch.setattr("rl_core.models.export_verification._PROGRAM", dead)
    with pytest.raises(BackendError, match="ended with 9 and no answer"):
        copied.prove(fresh=True)


def test_differences_by_hand():
    records = [TokenRecord([1, 2, 3], [1, 2], [-1.0, -2.0]), TokenRecord([1, 2], [1], [-3.0])]
    difference = compare_logprobs(records, [[-1.5, -2.0], [-2.0]])
    assert (difference.largest, difference.mean, difference.tokens) == (1.0, 0.5, 3)
    assert compare_logprobs(records, [[float("nan"), -2.0], [-3.0]]).largest == float("inf")
    with pytest.raises(ExportMismatch, match="no tokens to compare"):
        compare_logprobs([], [])


def build_rollout(prompt, completion, mask, logprobs, temperature=0.7, starts=()):
    return SimpleNamespace(
        prompt_ids=prompt,
        completion_ids=completion,
        loss_mask=mask,
        sampler_logprobs=logprobs,
        temperature=temperature,
        context_starts=list(starts),
        images=[],
    )


def test_records_of_an_evaluation(tokenizer, tmp_path):
    rollouts = [
        build_rollout([1, 2], [3, 4, 5, 6], [True, False, True, False], [-1.0, 0.0, -2.0, 0.0]),
        build_rollout([1], [2], [False], [0.0]),  # no sampled token
        build_rollout([1], [2], [True], [-1.0], starts=[1]),  # several contexts
        build_rollout([9], [8], [True], [-4.0], temperature=0.0),  # greedy: at temperature 1
    ]
    records = record_evaluated_logprobs(None, rollouts, SamplingSettings(temperature=0.7))
    assert records == [
        TokenRecord([1, 2, 3, 4, 5], [2, 4], [-1.0, -2.0], 0.7),
        TokenRecord([9, 8], [1], [-4.0], 1.0),
    ]
    write_records(tmp_path / "r.json", {"policy": records})
    assert (
        read_records(tmp_path / "r.json") == {"policy": records}
        and read_records(tmp_path / "none.json") == {}
    )
    (tmp_path / "r.json").write_text('{"policy": [{"ids": 1}]}')
    with pytest.raises(DataError, match=r"r\.json: invalid record of log-probs"):
        read_records(tmp_path / "r.json")
    model = causal_lm.create_model(
        KIND, tokenizer, 0
    )  # a restricted sampler's log-probs are not the model's
    restricted = record_evaluated_logprobs(
        model, rollouts, SamplingSettings(temperature=0.7, top_p=0.5)
    )
    assert restricted == score_records(model, records) and restricted[0].logprobs[0] < -3


PARENT = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-P", sys.argv[1], str(os.getpid())], stdin=subprocess.DEVNULL)
print(child.pid, flush=True)
time.sleep(600)
"""


def test_the_fresh_process_ends_with_the_run_that_is_killed(tmp_path):
    """Otherwise it would load all models and hold their memory while the resumed run needs it."""
    (tmp_path / "torch.py").write_text("import time\ntime.sleep(600)\n")  # takes long to import
    program = str(export_verification._PROGRAM)
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, program],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    ) as parent:
        child = int(parent.stdout.readline())
        parent.kill()

    def has_ended():
        try:
            state = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return True
        return state == "Z"

    try:
        assert not has_ended(), "it waits for its imports"
        wait_for(has_ended, "the end of the fresh process", seconds=20.0)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, 9)
