"""`posttrain check resume`: interruptions of a pipeline that takes a second, and of real ones (slow)."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from posttrain.cli.main import main
from posttrain.verification import verify_resume
from posttrain.verification.interrupted_runs import (
    PipelineCommand,
    VerificationRun,
    run_in_slices,
    run_uninterrupted,
    run_with_kills,
)
from posttrain.verification.run_differences import compare_run_folders
from rl_core.errors import CheckFailed
from tasks.config import load_settings

ROOT = Path(__file__).resolve().parents[3]

# A pipeline of one stage with four steps of 0.15 s, each saved; SIGTERM ends it with 143.
SCRIPT = """
import json, os, random, shutil, signal, sys, time
from pathlib import Path
from rl_core.storage import faults
from rl_core.storage.append_log import encode_checked_line

home = Path(next(a for a in sys.argv if a.startswith("output=")).removeprefix("output=")) / "t"
signal.signal(signal.SIGTERM, lambda *_: os._exit(143))
folder, tracking = home / "stages/sft/k.open", home / "stages/sft/k.tracking"
final, again = folder.with_name("k"), folder.exists()
if final.exists():
    sys.exit(0)
(folder / "checkpoints/checkpoint-00000000").mkdir(parents=True, exist_ok=True)
(tracking / ".tracking").mkdir(parents=True, exist_ok=True)
state = folder / "checkpoints/checkpoint-00000000/state.json"
done = json.loads(state.read_text())["loop"]["iteration"] if state.exists() else 0
lines = (tracking / "metrics.jsonl").read_bytes().splitlines(keepends=True) if done else []
(tracking / "metrics.jsonl").write_bytes(b"".join(lines[:done]))  # as in a resumed run: later points are written again
for step in range(done, 4):
    faults.inject_fault("loop.step")
    time.sleep(0.15)
    (tracking / ".tracking/progress.json").write_text(json.dumps({"done": step + 1, "total": 4}))
    with (tracking / "metrics.jsonl").open("ab") as file:
        file.write(encode_checked_line({"step": step, "metrics": {"train/loss": LOSS, "perf/step_seconds": 0.15}}))
    if step % 2:
        state.with_suffix(".new").write_text(json.dumps({"loop": {"iteration": step + 1}}))
        state.with_suffix(".new").replace(state)
        (folder / "checkpoints/LATEST").write_text("checkpoint-00000000")
(folder / "metrics.jsonl").write_bytes((tracking / "metrics.jsonl").read_bytes())
(folder / "manifest.json").write_text("{}")
left = home.with_name(f"left-{os.getpid()}")
(folder / "checkpoints").rename(left)  # in one step: a kill in between would find no checkpoint
folder.rename(final)
shutil.rmtree(left)
"""


class OneStage(PipelineCommand):
    """Run the script instead of `posttrain run`."""

    def start_process(self, output, log, extra_environment):
        with log.open("ab") as file:
            return subprocess.Popen(
                [sys.executable, "-c", self.config, f"output={output}"],
                stdout=file,
                stderr=file,
                start_new_session=True,
                env={**self.environment, "PYTHONPATH": str(ROOT), **extra_environment},
            )


def make_command(loss="1.0 / (1 + step)"):
    return OneStage(SCRIPT.replace("LOSS", loss), [], "t")


def test_kills_at_moments_and_fault_points_end_in_the_same_files(tmp_path):
    lines = []
    baseline = run_uninterrupted(make_command(), tmp_path, 60.0, lines.append)
    trial = run_with_kills(
        make_command(), tmp_path, baseline, 3, random.Random(0), 60.0, lines.append
    )
    assert 1 <= len(trial.interruptions) <= 3
    assert trial.interruptions[0].description.startswith("killed after ")
    assert all(
        interruption.stage in ("sft", "") and interruption.iterations <= 2
        for interruption in trial.interruptions
    )
    comparison = compare_run_folders(baseline.home, trial.home)
    assert comparison.differences == [] and comparison.points == 4
    assert any(
        re.fullmatch(
            r"whole, process 1: \d+ s, k.tracking .*|whole, process 1: \d+ s, sft \d/4", line
        )
        for line in lines
    )


def test_a_fault_point_kills_and_the_repeated_work_is_counted(tmp_path):
    class AtFourthStep(OneStage):
        def start_process(self, output, log, extra_environment):
            fault = (
                {"POSTTRAIN_FAULT": "loop.step:4:kill"} if not (Path(output) / "t").exists() else {}
            )
            return super().start_process(output, log, {**extra_environment, **fault})

    fourth_step = AtFourthStep(make_command().config, [], "t")
    baseline = run_uninterrupted(make_command(), tmp_path, 60.0, lambda text: None)
    trial = run_with_kills(
        fourth_step, tmp_path, baseline, 1, random.Random(0), 600.0, lambda text: None
    )
    (interruption,) = trial.interruptions
    if interruption.iterations:  # three were done, two saved; unless the random moment came first
        assert (interruption.iterations, interruption.stage) == (
            1,
            "sft",
        ) and interruption.lost_seconds == pytest.approx(0.15)
    assert compare_run_folders(baseline.home, trial.home).differences == []


def test_slices_too_short_for_progress_are_refused(tmp_path):
    with pytest.raises(CheckFailed, match=r"3 slices of 0\.05 s in a row ended without progress"):
        run_in_slices(make_command(), tmp_path, 0.05, 60.0, lambda text: None)


def test_a_run_that_hangs_after_a_kill_ends_at_the_limit(tmp_path):
    """Limit the whole run: it was restarted again and again, each time for as long as the limit."""
    lines = []
    baseline = VerificationRun(tmp_path / "whole" / "t", seconds=0.6, first_progress=0.1)
    with pytest.raises(CheckFailed, match=r"the run under kills takes longer than 2 s"):
        run_with_kills(
            make_command("time.sleep(60)"),
            tmp_path,
            baseline,
            1,
            random.Random(0),
            2.0,
            lines.append,
        )
    assert re.match(
        r"killed, process 1: \d s, (starting|sft 1/4)", lines[0]
    )  # a slow machine polls once more


def test_a_pipeline_that_fails_or_never_ends_is_not_verified(tmp_path):
    with pytest.raises(CheckFailed, match=r"(?s)exit code 1:\n.*ZeroDivisionError"):
        run_uninterrupted(make_command("1 / 0"), tmp_path, 60.0, lambda text: None)
    (tmp_path / "other").mkdir()
    with pytest.raises(CheckFailed, match=r"takes longer than 0 s"):
        run_uninterrupted(make_command(), tmp_path / "other", 0.2, lambda text: None)


@pytest.mark.parametrize(
    ("loss", "code", "message"),
    [
        ("1.0 / (1 + step)", verify_resume.EXIT_EQUAL, "the same to the last bit: 1 files"),
        (
            "__import__('random').random()",
            verify_resume.EXIT_DIFFERENT,
            "NOT deterministic: the update",
        ),
        (
            "1 / 0",
            verify_resume.EXIT_NOT_VERIFIED,
            "not verified: the uninterrupted run ends with exit code 1",
        ),
        (
            "1 / (1 - again)",
            verify_resume.EXIT_DIFFERENT,
            "NOT the same: the process after interruption 1 ends with exit code 1",
        ),
    ],
)
def test_verdicts_and_exit_codes(tmp_path, monkeypatch, capsys, loss, code, message):
    monkeypatch.setattr(
        verify_resume, "PipelineCommand", lambda config, overrides, name: make_command(loss)
    )
    settings = load_settings(
        str(ROOT / "configs/test.yaml"), [f"output={tmp_path / 'out'}", "name=t"]
    )
    assert (
        verify_resume.verify_resume("x", [], settings, verify_resume.VerificationPlan(kills=2))
        == code
    )
    output = capsys.readouterr().out
    assert message in output and output.startswith(
        "t: uninterrupted, then killed 2 times; at most 60 min\nfiles "
    )
    folders = list((tmp_path / "out").glob("verify-*"))
    assert len(folders) == (code != verify_resume.EXIT_EQUAL) and (
        code == verify_resume.EXIT_EQUAL or str(folders[0]) in output
    )


def test_a_shorter_pipeline_is_proposed_but_not_used(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(
        verify_resume, "PipelineCommand", lambda config, overrides, name: make_command()
    )
    settings = load_settings(
        str(ROOT / "configs/demo.yaml"), [f"output={tmp_path / 'out'}", "name=t"]
    )
    assert (
        verify_resume.verify_resume(
            "x", [], settings, verify_resume.VerificationPlan(minutes=0.3 / 60)
        )
        == verify_resume.EXIT_NOT_VERIFIED
    )
    text = capsys.readouterr().out
    assert "takes longer than" in text and "--set stages.policy.iterations=8" in text


def test_stores_of_the_user_are_not_used(monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://team")
    monkeypatch.setenv("PREFECT_API_URL", "http://team/api")
    assert (
        not {"MLFLOW_TRACKING_URI", "PREFECT_API_URL"}
        & PipelineCommand("x", [], "t").environment.keys()
    )
    settings = load_settings(str(ROOT / "configs/demo.yaml"), ["stages.promote.approve=manual"])
    assert verify_resume._build_isolation_overrides(settings) == [
        "tracking.uri=null",
        "stages.promote.approve=auto",
    ]
    isolated = load_settings(
        str(ROOT / "configs/demo.yaml"),
        ["tracking.uri=http://x", *verify_resume._build_isolation_overrides(settings)],
    )
    assert isolated.tracking.uri is None and isolated.stages.promote.approve == "auto"


@pytest.mark.parametrize("arguments", [["--kills", "0"], ["--slices", "-1"], ["--minutes", "x"]])
def test_wrong_options(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["check", "resume", "demo", *arguments])
    assert caught.value.code == 2 and arguments[0] in capsys.readouterr().err


def test_a_process_stops_itself_after_a_time():
    script = """
        import time
        from flows.runtime.stopping import TerminatedBySignal, stop_requested, schedule_sigterm, unwind_on_sigterm
        unwind_on_sigterm()
        schedule_sigterm(0.2)
        try:
            time.sleep(60)
        except TerminatedBySignal:
            raise SystemExit(143 if stop_requested.is_set() else 1)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], cwd=ROOT, timeout=60, check=False
    )
    assert done.returncode == 128 + signal.SIGTERM


SHORT = [
    "threads=1",
    "stages.prepare_data.num_demonstrations=200",
    "stages.sft.epochs=1",
    "stages.policy.iterations=6",
    "stages.policy.prompts_per_iteration=4",
    "stages.policy.checkpoint_every=2",
    "stages.evaluate.episodes=10",
    "stages.promote.min_success=0.0",
    "stages.promote.min_episodes=2",
    "tracking.system_metrics_seconds=0",
]
EDITS = {
    "reward": ("reward.py", "    return [", "    import random\n\n    return [random.random() "),
    "observed": (
        "environment.py",
        "reward=float(success),",
        "reward=float(success) + 0.01 * (random.random() < 0.5),",
    ),
    "data": (
        "environment.py",
        "rng.choice(episode.digits)",
        'next(iter({"d" + d for d in episode.digits}))[1:]',
    ),
    "opening": ("environment.py", "rng.randrange(10)", "random.randrange(10)"),
}


@pytest.fixture
def posttrain(tmp_path):
    """Return a function that runs the command in a new process."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop("PYTHONHASHSEED", None)
    return lambda *arguments: subprocess.run(
        [sys.executable, "-P", "-m", "posttrain.cli.main", *arguments],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("edit", "code", "message"),
    [
        ("", 0, "the same to the last bit"),
        ("reward", 1, "NOT deterministic: the reward function my_task.reward:brevity"),
        ("observed", 1, "NOT deterministic: the environment's reward"),
        ("data", 1, "NOT deterministic: the prepared data"),
        ("opening", 1, "NOT deterministic: the environment's opening messages"),
    ],
)
def test_a_pipeline_of_the_user(tmp_path, posttrain, edit, code, message):
    assert posttrain("init", "my_task").returncode == 0
    if edit:
        file, old, new = EDITS[edit]
        path = tmp_path / "my_task" / file
        assert path.read_text().count(old) == 1
        path.write_text(path.read_text().replace(old, new))
    options = [argument for override in SHORT for argument in ("--set", override)]
    done = posttrain("verify-resume", "my_task/config.yaml", "--kills", "2", *options)
    assert (done.returncode, message in done.stdout) == (code, True), done.stdout + done.stderr
    suspects = {"reward": "reward.py:", "data": "environment.py:", "observed": "environment.py:"}
    assert suspects.get(edit, "") in done.stdout
    assert (
        json.dumps(sorted(path.name for path in (tmp_path / "outputs").iterdir())).count("verify-")
        == code
    )


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_slices_of_a_shipped_pipeline(posttrain):
    """Send SIGTERM after every 30 s to the smallest pipeline, made long enough for several slices."""
    overrides = (
        "stages.sft.max_steps=4000",
        "stages.sft.epochs=600",
        "stages.sft.checkpoint_every=20",
        "stages.reward_model=null",
        "stages.policy.rewards={task: 1.0}",
        "stages.policy.checkpoint_every=1",
        "stages.analyze=null",
    )
    done = posttrain(
        "verify-resume",
        "test",
        "--slices",
        "30",
        *(part for value in overrides for part in ("--set", value)),
    )
    assert done.returncode == 0 and "the same to the last bit" in done.stdout, (
        done.stdout + done.stderr
    )
    costs = re.search(
        r"interrupted run: [\d.]+ s in (\d+) processes, .* s \(.*%\); \d+ repeated iterations",
        done.stdout,
    )
    assert costs is not None and int(costs[1]) >= 3, done.stdout
