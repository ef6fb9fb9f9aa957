"""Preference rows that a later stage cannot use are refused before anything is trained."""

import json

import pytest
import yaml

from posttrain.cli import main as cli
from rl_core.errors import DataError
from tasks.config import build_settings
from tasks.pipeline.stage_result import StageResult
from tasks.stages import prepare_data

PAIR = {"prompt": "p", "chosen": "a", "rejected": "b"}
LABELLED = {"prompt": "which one?", "completion": "a", "label": True}


def settings(path, loss="dpo", **stages):
    named = {"prepare_data": {"preferences": str(path)}, "preference": {"loss": loss}, **stages}
    return {
        "name": "t",
        "environment": {"name": "arithmetic"},
        "model": {"path": "no/model"},
        "stages": named,
    }


@pytest.fixture
def refused(tmp_path, monkeypatch):
    """Message of a refusal: of the data stage, whose rows are those of an earlier run with another loss."""

    def message(row, *arguments, **stages):
        for split, rows in (("train", [PAIR, row]), ("heldout", [PAIR])):
            text = "".join(json.dumps(row) + "\n" for row in rows)
            (tmp_path / f"preferences_{split}.jsonl").write_text(text)
        typed = build_settings(settings("rows.jsonl", *arguments, **stages), check_files=False)
        finished = StageResult("prepare_data", str(tmp_path), "", "", True, 0.0, "", {})
        monkeypatch.setattr(prepare_data, "run_stage", lambda *_, **__: finished)
        run = type("Run", (), {"settings": typed})()
        try:
            assert prepare_data.prepare_data(run, "no/model") is finished
        except DataError as error:
            return str(error)
        return ""

    return message


def test_labels_and_margins_are_refused_right_after_the_data_stage(refused):
    """Regression: the preference stage refused them, after SFT was trained."""
    place = "rows.jsonl: the row with the prompt 'which one?': "
    assert (
        refused(LABELLED) == place + "has a label, which only the loss kto takes; dpo needs pairs"
    )
    assert refused(LABELLED, "kto") == ""
    assert "reward_model needs pairs" in refused(LABELLED, "kto", reward_model={})
    margin = {**PAIR, "margin": 1.0}
    assert refused(margin).endswith("margin: only a reward model takes margins, not the loss dpo")
    assert refused(margin, preference=None, reward_model={}) == refused(PAIR) == ""


def test_validate_names_the_line_that_no_stage_can_use(tmp_path, capsys):
    """Regression: it printed `fine`."""
    path, config = tmp_path / "rows.jsonl", tmp_path / "c.yaml"
    path.write_text(json.dumps(PAIR) + "\n" + json.dumps(LABELLED) + "\n")
    config.write_text(yaml.safe_dump(settings(path)))
    assert cli.main(["validate", str(config)]) == 2
    assert (
        f"{path}:2: has a label, which only the loss kto takes; dpo needs pairs"
        in capsys.readouterr().err
    )
    assert cli.main(["validate", str(config), "-s", "stages.preference.loss=kto"]) == 0
