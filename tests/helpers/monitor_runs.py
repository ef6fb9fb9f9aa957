"""Output folders made by hand, as a run leaves them; numbers that can be checked by eye."""

import contextlib
import json
import os
import platform
import signal
import subprocess
import sys
from pathlib import Path

from helpers import ROOT

START = (
    1_800_000_000  # seconds since the epoch; far from now, so that nothing looks fresh by accident
)

CONFIG = {
    "environment": {"name": "pixel_grid", "options": {}},
    "stages": {
        "sft": {"epochs": 1},
        "thoughts": None,
        "policy": {
            "iterations": 10,
            "curriculum": [
                {
                    "name": "easy",
                    "levels": {"easy": 3, "hard": 1},
                    "exit_conditions": [
                        {
                            "metric": "success_rate",
                            "window": 2,
                            "comparison": ">=",
                            "threshold": 0.75,
                        }
                    ],
                },
                {"name": "hard", "levels": {"hard": 1}},
            ],
        },
        "evaluate": {},
    },
}

MOVES = [
    {
        "kind": "advance",
        "iteration": 2,
        "from": "easy",
        "to": "hard",
        "why": "success_rate 0.8 >= 0.75 over 2",
        "metrics": {"success_rate": 0.8},
    },
    {
        "kind": "rollback",
        "iteration": 4,
        "from": "hard",
        "to": "easy",
        "why": "0.1 below 0.6",
        "metrics": {},
    },
]

EPISODES = [
    {
        "level": "easy",
        "kind": "digit",
        "seed": 7,
        "sample": 0,
        "prompt": "digit at row 1 column 1?",
        "target": "5",
        "answer": "5",
        "success": True,
        "reward": 1.0,
        "rewards": {"task": 1.0},
        "stop_reason": "terminated",
        "turns": [
            {
                "action": "zoom 1 1",
                "tool_call": {"name": "zoom", "arguments": {"row": 1, "column": 1}},
                "observation": "5 red",
                "is_error": False,
            },
            {"action": "answer 5", "tool_call": None, "observation": None, "is_error": False},
        ],
    },
    {
        "level": "hard",
        "kind": "digit",
        "seed": 8,
        "sample": 0,
        "prompt": "<b>2nd</b></script>",
        "target": "1",
        "answer": None,
        "success": False,
        "reward": 0.0,
        "rewards": {"task": 0.0},
        "stop_reason": "max_turns",
        "turns": [
            {
                "action": "zoom",
                "tool_call": {"name": "zoom", "arguments": {}},
                "observation": "error: ...",
                "is_error": True,
            },
            {"action": "zom", "tool_call": None, "observation": "error: no tool", "is_error": True},
            {
                "action": "zoom 2 2",
                "tool_call": {"name": "zoom", "arguments": {"row": 2, "column": 2}},
                "observation": "1 red",
                "is_error": False,
            },
        ],
    },
]


def write_lines(path: Path, rows, *, torn: str = "") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write("".join(json.dumps(row) + "\n" for row in rows) + torn)


def write_journal(
    folder: Path,
    name: str,
    *,
    started: float,
    ended: float | None = None,
    status: str = "FINISHED",
    parent: Path | None = None,
    events=(),
    metrics=(),
    torn: str = "",
) -> None:
    """Write a journal; `metrics`: (step, seconds after the start, {name: value})."""
    rows = [
        {
            "op": "start",
            "time": started * 1000,
            "name": name,
            "key": "k",
            "parent_folder": str(parent or "") or None,
        }
    ]
    rows += [{"time": started * 1000, **event} for event in events]
    if ended is not None:
        rows.append({"op": "end", "time": ended * 1000, "status": status})
    write_lines(folder / ".tracking" / "events.jsonl", rows)
    write_lines(
        folder / "metrics.jsonl",
        [
            {"step": step, "time": (started + after) * 1000, "metrics": values}
            for step, after, values in metrics
        ],
        torn=torn,
    )


def make_run(
    output: Path,
    started: str = "2027-01-15 08:00:00",
    *,
    status: str = "",
    pid: int | None = None,
    begun: float = START,
    name: str = "demo",
) -> Path:
    """Make a run at iteration 5 of 10 of its policy; `status` "" = not ended. Returns the pipeline's folder."""
    home = output / name
    parent = home / "runs" / started.replace(" ", "-").replace(":", "-")
    ended = begun + 100 if status else None
    config = {"op": "text", "name": "config.json", "text": json.dumps(CONFIG)}
    load = [
        (index, 5 * index, {"system/process_cpu_percentage": 100.0 + index}) for index in range(3)
    ]
    write_journal(
        parent,
        f"{name} · {started}",
        started=begun,
        ended=ended,
        status=status or "FINISHED",
        events=[config],
        metrics=load,
    )
    sft = [
        (step, step, {"train/loss": 2.0 / step, "perf/tokens_per_second": 100.0})
        for step in range(1, 5)
    ]
    write_journal(
        home / "stages/sft/aaaa.tracking",
        "sft",
        started=begun + 1,
        ended=begun + 10,
        parent=parent,
        metrics=sft,
    )
    finished = home / "stages/sft/aaaa"
    finished.mkdir(parents=True)
    (finished / "summary.json").write_text(json.dumps({"note": "4 steps"}))
    played = home / "stages/policy/bbbb.tracking"
    rows = [
        (
            i,
            2.0 * i,
            {
                "reward/mean": 0.1 * i,
                "train/success_rate": 0.2 * i,
                "curriculum/stage": float(i in (3, 4)),
                "curriculum/watched": 0.25 * i,
                "tool/calls": 1.0,
                "reward/alarm": 0.0,
            },
        )
        for i in range(1, 6)
    ]
    moves = {"op": "text", "name": "curriculum.json", "text": json.dumps({"history": MOVES})}
    write_journal(
        played,
        "policy",
        started=begun + 11,
        ended=ended,
        status=status or "FINISHED",
        parent=parent,
        events=[moves, {"op": "params", "params": {"iterations": "10"}}],
        metrics=rows,
        torn='{"step":6,"time":18000',
    )
    progress = {"done": 5, "total": 10, "message": "reward/mean 0.5", "time": 0}
    (played / ".tracking/progress.json").write_text(json.dumps(progress))
    being_written = home / "stages/policy/bbbb.open"
    write_lines(
        being_written / "recent_rollouts.jsonl",
        [{"iteration": 4, **row} for row in EPISODES],
        torn='{"iter',
    )
    record = {
        "started": started,
        "run_id": None,
        "config_digest": "d",
        "only": None,
        "status": status or "running",
        "pid": pid if pid is not None else os.getpid(),
        "host": platform.node(),
    }
    (home / "run.json").write_text(json.dumps(record))
    return home


@contextlib.contextmanager
def run_page(output, port):
    """Run the page of a folder; yield its address and process id."""
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "posttrain.cli.main",
            "ui",
            "--live",
            "--output",
            str(output),
            "--port",
            str(port),
        ],
        cwd=ROOT,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        },
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process.stdout.readline().split()[1], process.pid
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(30)
