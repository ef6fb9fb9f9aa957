"""One check of the settings and one key per stage between a command and the end of its run."""

from collections import Counter

import yaml

from posttrain.cli import run_setup
from posttrain.cli.main import main
from tasks import config
from tasks.pipeline import stage_key

PIPELINE = {
    "name": "once",
    "threads": 1,
    "environment": {"name": "arithmetic"},
    "model": {"preset": "nano", "vocab_size": 320, "context": 128},
    "tracking": {"system_metrics_seconds": 0.0, "traces": 0},
    "stages": {
        "prepare_data": {"num_demonstrations": 40, "levels": ["easy"]},
        "sft": {"max_steps": 4, "batch_size": 4, "checkpoint_every": 2},
    },
}


def count_calls(monkeypatch, module, name, counts, label):
    real = getattr(module, name)

    def counted(*arguments, **options):
        counts[label(*arguments)] += 1
        return real(*arguments, **options)

    monkeypatch.setattr(module, name, counted)


def test_settings_are_checked_once_and_each_key_is_collected_once(
    prefect_api, tmp_path, monkeypatch, capsys
):
    """Count in a first run, a run in which every stage is cached, one that a checkpoint precedes, and one stage."""
    monkeypatch.setattr(run_setup, "configure_prefect", lambda settings: None)
    counts = Counter()
    count_calls(monkeypatch, config, "_check_settings", counts, lambda *_: "settings")
    count_calls(monkeypatch, stage_key, "collect_stage_key", counts, lambda stage, *_: stage)
    path = tmp_path / "once.yaml"
    path.write_text(yaml.safe_dump({**PIPELINE, "output": str(tmp_path / "out")}))
    once = {"settings": 1, "prepare_data": 1, "sft": 1}
    for expected_banner in ("once: prepare data -> sft\noutput", "cached   prepare data, sft"):
        counts.clear()
        assert main(["run", str(path)]) == 0
        assert expected_banner in capsys.readouterr().out
        assert counts == once

    stages = tmp_path / "out" / "once" / "stages"
    (finished,) = [folder for folder in (stages / "sft").iterdir() if folder.suffix == ""]
    (finished / "summary.json").write_text("damaged")
    counts.clear()
    assert main(["run", str(path), "--quiet"]) == 0
    assert counts == once

    # The settings of one stage are other settings, which are checked as well.
    counts.clear()
    assert main(["run", str(path), "--only", "sft"]) == 0
    assert counts == {**once, "settings": 2}
