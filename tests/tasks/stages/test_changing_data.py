"""Data files that are written to while they are read: refused, and never kept under the key of their old content."""

import json

import pytest
from helpers.stage_doubles import PipelineRun, Tracker

from rl_core.data import records
from rl_core.errors import DataError
from tasks.pipeline.stage_key import digest_input
from tasks.stages.prepare_data import prepare_data

MODEL = {"preset": "nano", "vocab_size": 300}


def line(number):
    messages = [
        {"role": "user", "content": f"{number} + 1"},
        {"role": "assistant", "content": str(number + 1)},
    ]
    return json.dumps({"messages": messages}) + "\n"


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text("".join(map(line, range(20))))
    return path


def grow(path):
    with path.open("a") as file:
        file.write(line(99))


def test_a_file_that_grows_while_its_rows_are_read(data):
    before = digest_input(data)

    def check(rows):
        if len(data.read_text().splitlines()) == 20:
            grow(data)
        return [""] * len(rows)

    with pytest.raises(DataError, match=r"data\.jsonl: was changed while it was read"):
        records.read_demonstrations(data, check_rows=check)
    whole = records.read_demonstrations(data, check_rows=check)
    assert len(whole.rows) == 21 and whole.digest == digest_input(data) != before


def test_a_row_that_was_half_there_is_not_blamed(data):
    def check(rows):
        data.write_text(line(1) + line(2)[:-9])
        return ["is cut off"] * len(rows)

    with pytest.raises(DataError, match=r"data\.jsonl: was changed while it was read"):
        records.read_demonstrations(data, check_rows=check)


def test_a_file_that_grew_after_the_stage_got_its_key(data, tmp_path, monkeypatch):
    monkeypatch.setattr(Tracker, "log_dataset", lambda *arguments: None, raising=False)
    stages = {"prepare_data": {"demonstrations": str(data)}, "sft": {}}
    read = records.read_demonstrations

    def late(path, **options):
        grow(path)
        return read(path, **options)

    pipeline_run = PipelineRun(tmp_path / "stages", stages=stages, model=MODEL)
    pipeline_run.parent = Tracker()
    with monkeypatch.context() as patch:
        patch.setattr(records, "read_demonstrations", late)
        with pytest.raises(DataError, match=r"data\.jsonl: was changed while it was read"):
            prepare_data(pipeline_run, None)
    assert list(tmp_path.glob("stages/*/*/manifest.json")) == []
    assert prepare_data(pipeline_run, None).summary["demonstrations_file"]["rows"] == 21


def test_data_prepared_without_demonstrations_is_prepared_again_for_sft(tmp_path, monkeypatch):
    """`posttrain stage prepare_data`, then `posttrain stage sft`: the first one has no stage to demonstrate for."""
    monkeypatch.setattr(Tracker, "log_dataset", lambda *arguments: None, raising=False)

    def prepare(**stages):
        data = {"num_demonstrations": 20, "levels": ["easy"]}
        stages = {"prepare_data": data, **stages}
        pipeline_run = PipelineRun(tmp_path / "stages", stages=stages, model=MODEL)
        pipeline_run.parent = Tracker()
        return prepare_data(pipeline_run, None)

    without = prepare()
    assert not list(without.path.glob("demonstrations_*"))
    with_sft = prepare(sft={})
    assert (with_sft.key, with_sft.cached) == (without.key, False)
    rows = (with_sft.path / "demonstrations_train.jsonl").read_text().splitlines()
    assert len(rows) == with_sft.summary["demonstrations"]["num_train_rows"] > 10
    assert prepare(sft={}).cached and prepare().cached  # more than needed is no reason
    kinds = [
        json.loads(line)["kind"]
        for line in (without.path.parent / "decisions.jsonl").read_text().splitlines()
    ]
    assert kinds == ["first", "incomplete", "cached", "cached"]
