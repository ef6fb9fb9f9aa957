"""Small pipeline of the crash test with every kind of stage, which takes a few seconds."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["KINDS", "Kind", "command", "write_agent", "write_inputs"]

SAMPLING = {"max_completion_tokens": 12, "max_turns": 1, "slots": 16}
CONFIG, OUTPUT, FOLDER = "CONFIG", "OUTPUT", "FOLDER"  # stand for their paths in a command
TRAINING = {"batch_size": 4, "warmup_steps": 1, "checkpoint_every": 1, "eval_every": 2}

STAGES: dict[str, Any] = {
    "prepare_data": {"num_demonstrations": 24, "levels": ["easy"], "heldout_fraction": 0.25},
    "sft": {"max_steps": 4, "learning_rate": 5e-3, **TRAINING, "batch_size": 9, "keep_epochs": 1},
    "distill": {
        "teacher": {"model": "models:/small/1"},
        "iterations": 2,
        "prompts_per_iteration": 1,
        "group_size": 2,
        "warmup_steps": 1,
        "checkpoint_every": 1,
        "levels": ["easy"],
        "sampling": SAMPLING,
    },
    "preference": {"max_steps": 3, "micro_batch_tokens": 512, **TRAINING},
    "reward_model": {"max_steps": 3, **TRAINING},
    "policy": {
        "iterations": 4,
        "prompts_per_iteration": 1,
        "group_size": 2,
        "warmup_steps": 1,
        "checkpoint_every": 1,
        "eval_every": 2,
        "eval_episodes": 2,
        "rewards": {"task": 1.0, "learned": 0.5, "length": -0.01},
        "sampling": SAMPLING,
        "curriculum": [{"name": "easy", "levels": {"easy": 1}}],
    },
    "evaluate": {"episodes": 6, "levels": ["easy"], "greedy": False, "sampling": SAMPLING},
    "analyze": {"bootstrap_samples": 100, "side_by_side": 1},
    "promote": {"min_success": 0.0, "min_episodes": 2, "min_gain": -1.0, "bootstrap_samples": 100},
}


@dataclass(frozen=True)
class Kind:
    """Kind of run: its command, its stages, and the folder in which it starts."""

    without: tuple[str, ...] = ()  # stages
    starts: str = "database"  # or nothing, or another kind, in whose final folder it starts
    seed: int = 0
    what: tuple[str, ...] = ("run", CONFIG)
    overrides: tuple[str, ...] = ()
    ended: str = ""  # fault that ends it if another kind starts from it


_TRAINED = ("distill", "preference", "reward_model", "policy")
_SHORT = (*_TRAINED, "analyze")
_ASKED = ("stages.promote.approve=manual", "stages.promote.approval_timeout_seconds=1")
# The user's program plays the episodes: two calls, a file, and a score that it prints.
AGENT = """
import json, os, urllib.request

task = json.loads(os.environ["TASK"])


def ask(messages):
    body = json.dumps({"model": "policy", "messages": messages, "max_tokens": 8}).encode()
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body)
    request.add_header("Authorization", "Bearer " + os.environ["OPENAI_API_KEY"])
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]


messages = [{"role": "user", "content": task["question"]}]
messages += [ask(messages), {"role": "user", "content": "sure?"}]
messages.append(ask(messages))
open("said.json", "w").write(json.dumps(messages))
print(json.dumps({"reward": sum(map(ord, messages[1]["content"] + messages[3]["content"])) % 5 / 4}))
"""
_AGENT_SAMPLING = json.dumps({**SAMPLING, "max_completion_tokens": 80, "max_turns": 3})
_AGENT_OPTIONS = {
    "command": "python FOLDER/agent.py",
    "tasks": "FOLDER/tasks.jsonl",
    "heldout": 0.25,
    "demonstrations": "messages",
}
_AGENT = (
    "environment=" + json.dumps({"name": "agent", "options": _AGENT_OPTIONS}),
    "stages.prepare_data.preferences=null",
    "stages.policy.rewards={task: 1.0}",
    f"stages.policy.sampling={_AGENT_SAMPLING}",
    f"stages.evaluate.sampling={_AGENT_SAMPLING}",
)
KINDS = {
    "pipeline": Kind(starts="nothing", overrides=("stages.gguf={type: f32}",)),
    "training": Kind(without=("analyze",)),
    "analysis": Kind(without=_TRAINED),
    "empty": Kind(without=(*_SHORT, "evaluate", "promote"), starts="nothing"),
    "first": Kind(without=_SHORT),
    "again": Kind(without=_SHORT, starts="first", seed=1),  # its model meets the champion
    "approval": Kind(without=_SHORT, starts="first", seed=1, overrides=_ASKED),
    "retrain": Kind(without=_SHORT, starts="first", what=("retrain", CONFIG, "--force")),
    "check": Kind(without=_SHORT, starts="first", what=("evaluate-champion", CONFIG)),
    "asked": Kind(
        without=_SHORT, starts="first", seed=1, overrides=_ASKED[:1], ended="approval.asked:1:kill"
    ),  # a template: killed while it waits
    "approved": Kind(
        without=_SHORT, starts="asked", what=("promote", CONFIG, "--approve", "small")
    ),
    "by hand": Kind(
        without=_SHORT,
        starts="approval",
        what=("promote", CONFIG, "--version", "VERSION"),
    ),
    "agent": Kind(without=(*_TRAINED[:3], "analyze"), overrides=_AGENT),
    "third": Kind(without=_SHORT, starts="again", seed=2),
    "gc": Kind(starts="third", what=("store", "gc", "--output", OUTPUT, "--keep", "1", "--yes")),
}


def write_inputs(folder: Path) -> Path:
    """Write the configuration and its data; return the path of the configuration."""
    folder.mkdir(parents=True, exist_ok=True)
    draw = random.Random(0)
    rows = []
    for _ in range(16):
        a, b = draw.randint(1, 9), draw.randint(1, 9)
        rows.append(
            {
                "prompt": f"{a} + {b} = ?",
                "chosen": f"answer {a + b}",
                "rejected": f"answer {a + b + draw.randint(1, 5)}",
            }
        )
    data = folder / "preferences.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    stages = {**STAGES, "prepare_data": {**STAGES["prepare_data"], "preferences": str(data)}}
    config = {
        "name": "small",
        "seed": 0,
        "threads": 1,
        "output": str(folder / "work" / "outputs"),
        "environment": {"name": "arithmetic"},
        "model": {"preset": "nano", "vocab_size": 300, "context": 192},
        "tracking": {"traces": 2, "system_metrics_seconds": 0},
        "stages": stages,
    }
    path = folder / "small.yaml"
    path.write_text(json.dumps(config, indent=1))  # JSON is YAML
    return path


def write_agent(folder: Path) -> None:
    """Write the program and the tasks of the kind `agent`."""
    draw = random.Random(1)
    tasks = [_build_task(n, draw) for n in range(40)]
    (folder / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
    (folder / "agent.py").write_text(AGENT)


def _build_task(number: int, draw: random.Random) -> dict[str, Any]:
    """Build a task of the agent, with the messages that it would send."""
    a, b = draw.randint(1, 9), draw.randint(1, 9)
    question = f"{number}: {a} + {b} = ?"
    turns = [("user", question), ("assistant", f"answer {a + b}"), ("user", "sure?")]
    messages = [
        {"role": role, "content": text} for role, text in (*turns, ("assistant", f"{a + b}"))
    ]
    return {"question": question, "level": "easy", "messages": messages}


def command(config: Path, kind: str = "pipeline", version: int = 2) -> list[str]:
    """Build the arguments of the command line that runs it. `version`: to be promoted by hand."""
    run_kind = KINDS[kind]
    placeholders = {
        CONFIG: str(config),
        OUTPUT: str(config.parent / "work" / "outputs"),
        "VERSION": str(version),
    }
    arguments = [placeholders.get(part, part) for part in run_kind.what]
    if run_kind.what[0] in ("store", "evaluate-champion") or "--approve" in run_kind.what:
        return arguments
    changed = [
        *(f"stages.{stage}=null" for stage in run_kind.without),
        f"seed={run_kind.seed}",
        *(text.replace(FOLDER, str(config.parent)) for text in run_kind.overrides),
    ]
    quiet = ["--quiet"] if run_kind.what[0] in ("run", "retrain") else []
    return [*arguments, *quiet, *(part for setting in changed for part in ("--set", setting))]
