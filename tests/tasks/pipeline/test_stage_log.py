"""The log of a stage: its lines, its bounds, its way into the stage's folder."""

import dataclasses
import logging

import pytest
from helpers.stage_doubles import PipelineRun

from rl_core.errors import DataError, Stopped
from rl_core.settings import SFTSettings
from tasks.pipeline import stage_folder
from tasks.pipeline.stage import run_stage
from tasks.pipeline.stage_folder import StageLog, copy_stage_log


def run_sft(pipeline_run, body, number=1):
    settings = dataclasses.replace(SFTSettings(), batch_size=number)
    return run_stage(pipeline_run, "sft", body, settings=settings, inputs={"model": "org/name"})


def read_texts(path):
    """Return level, logger and text of each line; indented lines unchanged."""
    return [
        line if line.startswith(" ") else line.split(" ", 2)[2]
        for line in path.read_text().splitlines()
    ]


def test_a_stage_s_log_is_in_its_folder_but_not_in_its_digest(tmp_path):
    def body(context, extra=""):
        logging.getLogger("rl_core.training.loop").info("resumed after iteration %d%s", 3, extra)
        logging.getLogger("their_reward").warning("odd \x1b[2J answer\nsecond line")
        logging.getLogger("their_reward").info("below the level of their logger")
        context.tracker.progress(1, 4, "loss 2")
        context.tracker.progress(2, 4, "loss 1.5")  # within ten seconds
        context.tracker.progress(4, 4, "loss 1")
        (context.folder / "words").write_text("w")
        return {}

    runs = PipelineRun(tmp_path / "one"), PipelineRun(tmp_path / "two")
    one = run_sft(runs[0], body)
    two = run_sft(runs[1], lambda context: body(context, ", with more to say"))
    lines = read_texts(one.path / "stage.log")
    assert lines[0].startswith(f"INFO stage: sft begins, key {one.key}, process ")
    assert lines[1:] == [
        "INFO rl_core.training.loop: resumed after iteration 3",
        "WARNING their_reward: odd \\x1b[2J answer",
        "    second line",
        "INFO progress: 1/4: loss 2",
        "INFO progress: 4/4: loss 1",
        "INFO stage: sft has finished after 1.5 s",
    ]
    assert runs[0].trackers[0].texts["stage.log"] == (one.path / "stage.log").read_text()
    assert one.digest == two.digest and len(read_texts(two.path / "stage.log")) == len(lines)
    assert not [h for h in logging.getLogger().handlers if isinstance(h, StageLog)], (
        "no handler remains"
    )


@pytest.mark.parametrize(
    "error", [DataError("bad row"), Stopped("asked", 15), RuntimeError("their bug")]
)
def test_the_log_survives_a_failure_and_the_next_run_appends(tmp_path, error):
    def fails(context):
        if isinstance(error, Stopped):
            context.checkpoints.mkdir()
        raise error

    with pytest.raises(type(error)):
        run_sft(PipelineRun(tmp_path), fails)
    (log_path,) = (tmp_path / "sft").glob("*.tracking/stage.log")
    first = log_path.read_text()
    if isinstance(error, Stopped):
        assert read_texts(log_path)[-1] == "INFO stage: stopped: asked"
    else:
        assert (
            "ERROR stage: failed\n    Traceback" in first
            and f"{type(error).__name__}: {error}" in first
        )
        assert f"its log is {log_path}" in first
    done = run_sft(PipelineRun(tmp_path), lambda context: {})
    content = (done.path / "stage.log").read_text()
    assert content.startswith(first) and "has finished" in content[len(first) :]


def test_a_log_is_bounded_and_a_torn_line_stays_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(stage_folder, "PART_BYTES", 1000)
    with StageLog(tmp_path) as log:
        for number in range(100):
            log.write_message(f"number {number}")
    sizes = [(tmp_path / name).stat().st_size for name in ("stage.log", "stage.log.1")]
    assert max(sizes) <= 1000 and len(list(tmp_path.iterdir())) == 2
    with (tmp_path / "stage.log").open("ab") as file:
        file.write(b"2026-01-01 00:00")  # from a process that was killed within a line
    with StageLog(tmp_path) as log:
        log.write_message("after the kill")
    (tmp_path / "stage").mkdir()
    copy_stage_log(tmp_path, tmp_path / "stage")
    lines = (tmp_path / "stage" / "stage.log").read_text().splitlines()
    assert lines[-1].endswith("stage: after the kill") and "2026-01-01 00:00" in lines
    numbers = [int(line.rpartition(" ")[2]) for line in lines[:-2]]
    assert numbers == list(range(numbers[0], 100)) and numbers[0] > 50, "the newest, without a gap"


def test_a_malformed_message_and_a_full_disk_do_not_raise(tmp_path, monkeypatch):
    with StageLog(tmp_path) as log:
        log.emit(logging.LogRecord("tasks.x", logging.INFO, "x.py", 1, "%d", ("no number",), None))
        # Only to this log: pytest's capture cannot send half a pair from one process to another.
        log.emit(
            logging.LogRecord("tasks.x", logging.INFO, "x.py", 2, "half \ud800 of a pair", (), None)
        )
        monkeypatch.setattr(
            log, "_lines", StageLog(tmp_path / "stage.log")._lines
        )  # a file instead of a folder
        logging.getLogger("tasks.x").info("lost")
    texts = read_texts(tmp_path / "stage.log")
    assert (
        texts[0].startswith("INFO tasks.x: '%d' (TypeError")
        and texts[1] == "INFO tasks.x: half \\ud800 of a pair"
    )
    assert len(texts) == 2


def test_levels_are_put_back(tmp_path):
    logger, root = logging.getLogger("rl_core"), logging.getLogger()
    before = logger.level, root.level, list(root.handlers)
    logger.setLevel(logging.ERROR)
    try:
        with StageLog(tmp_path):
            assert logger.isEnabledFor(logging.INFO)
        assert logger.level == logging.ERROR
    finally:
        logger.setLevel(before[0])
    assert (root.level, root.handlers) == before[1:]
