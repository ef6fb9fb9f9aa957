"""Export verification of reward models: the written folder has the trained model's scores, whatever its head."""

import json
import math
from contextlib import nullcontext

import pytest
import torch
from helpers.exports import in_this_process
from safetensors.torch import load_file, save_file

from rl_core.data.tokenizer import train_tokenizer
from rl_core.errors import DataError, ExportMismatch
from rl_core.models import causal_lm
from rl_core.models.export_records import (
    TRAINED_SCORES_FILE,
    ScoreRecord,
    read_scores,
    record_fixed_scores,
    write_scores,
)
from rl_core.models.export_verification import score_in_fresh_process, verify_scores
from rl_core.models.heads import HeadShape, create_reward_model, load_reward_model
from rl_core.settings import ExportSettings, ModelSettings

KIND = ModelSettings(preset="nano", context=64, device="cpu")
MATRIX, DEEP = HeadShape(), HeadShape(layers=3, width=8)


@pytest.fixture
def written(tmp_path):
    """Return a function that writes a reward model with this head; it returns the folder and the scores of the live
    model.
    """
    tokenizer = train_tokenizer(["abc xyz"], 300)
    causal_lm.save(causal_lm.create_model(KIND, tokenizer, 0), tokenizer, tmp_path / "start")

    def write(shape):
        model, _ = create_reward_model(tmp_path / "start", KIND, seed=5, shape=shape)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.05 * torch.randn(
                    parameter.shape, generator=torch.Generator().manual_seed(1)
                )
        causal_lm.save(model, tokenizer, tmp_path / "model")
        return tmp_path / "model", record_fixed_scores(model)

    return write


def verify(folder, records, call=in_this_process, **settings):
    (answer,) = call([], KIND, ExportSettings(**settings), [(folder, records)])
    return verify_scores("reward_model", folder, records, answer, ExportSettings(**settings))


@pytest.mark.parametrize("shape", [MATRIX, DEEP], ids=["matrix", "layers"])
def test_a_written_reward_model_has_the_scores(written, shape):
    folder, records = written(shape)
    assert len({len(record.ids) for record in records}) == len(records) == 8, "several lengths"
    facts = verify(folder, records, score_in_fresh_process if shape is DEEP else in_this_process)
    assert facts["trained"]["max"] < 1e-4 and facts["trained"]["sequences"] == 8
    assert facts["class"] == "LlamaForSequenceClassification"


@pytest.mark.parametrize(
    ("shape", "last"),
    [(MATRIX, "score.weight"), (DEEP, "score.4.weight")],
    ids=["matrix", "layers"],
)
def test_another_head_and_another_trunk_are_refused_by_their_figure(written, shape, last):
    folder, records = written(shape)
    path = folder / "model.safetensors"
    weights = load_file(path)
    for name in (last, "model.norm.weight"):
        save_file({**weights, name: 2 * weights[name]}, path, metadata={"format": "pt"})
        with pytest.raises(
            ExportMismatch, match=r"its scores differ from the trained model's by up to \d"
        ) as raised:
            verify(folder, records)
        assert str(folder) in str(raised.value)


def test_a_head_that_was_dropped_is_named(written):
    folder, records = written(MATRIX)
    path = folder / "model.safetensors"
    save_file(
        {k: v for k, v in load_file(path).items() if k != "score.weight"},
        path,
        metadata={"format": "pt"},
    )
    with pytest.raises(
        ExportMismatch,
        match=r"1 weights of LlamaForSequenceClassification are missing.*score\.weight",
    ):
        verify(folder, records)


def test_limits_count_in_units_of_the_largest_score(written):
    folder, records = written(MATRIX)
    unit = max(abs(row.score) for row in records)
    assert unit > 1, "otherwise the unit is 1"
    for share, refused in ((0.002, True), (0.0001, False)):
        moved = [ScoreRecord(row.ids, row.score + share * unit) for row in records]
        with pytest.raises(ExportMismatch) if refused else nullcontext():
            verify(folder, moved)
    assert verify(folder, records)["bound"] == pytest.approx(1e-3 * unit)


def test_nan_is_refused_and_without_records_only_weights_are_checked(written):
    folder, records = written(MATRIX)
    with pytest.raises(ExportMismatch, match="by up to inf"):
        verify(folder, [ScoreRecord(records[0].ids, math.nan)])
    assert "trained" not in verify(folder, [])


def test_sequences_do_not_end_in_padding(written, monkeypatch):
    folder, records = written(MATRIX)
    model, _ = load_reward_model(folder, KIND)
    model.config.pad_token_id = records[2].ids[-1]
    del model.config.vocab_size
    # as in Gemma3Config, which has it in its text model's config
    monkeypatch.delattr(type(model.config), "vocab_size")
    padded = record_fixed_scores(model)
    assert padded[2].ids[-1] == records[2].ids[-1] + 1 and padded[2].ids[:-1] == records[2].ids[:-1]


def test_records_are_restored(tmp_path):
    records = [ScoreRecord([1, 2], 0.25), ScoreRecord([3], -1.5)]
    write_scores(tmp_path / TRAINED_SCORES_FILE, records)
    assert (
        read_scores(tmp_path / TRAINED_SCORES_FILE) == records
        and read_scores(tmp_path / "none.json") == []
    )
    (tmp_path / TRAINED_SCORES_FILE).write_text(json.dumps([{"ids": [1]}]))
    with pytest.raises(DataError, match=r"trained_scores\.json: invalid record of scores"):
        read_scores(tmp_path / TRAINED_SCORES_FILE)
