"""Make the outputs that `test_outputs_of_earlier_version.py` opens.

    python tests/upgrade/make_fixtures.py

They are those of the version that this runs with, so it is called once, before a change that a
reader of old outputs could notice. All is made in one folder, whose path the test replaces.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import sqlite3
import sys
import tarfile
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]
    import conftest  # noqa: F401 threads and network, as in the tests

import torch
from crash.forks import Forks, Request
from crash.servers import environment, prefect_server
from helpers.frozen_scenes import learn_online, use_training_routes
from helpers.rating import room_of
from helpers.service import make_base
from helpers.service_http import running_service

from rl_core.online.experience_log import ExperienceLogReader
from rl_core.online.weight_snapshots import WeightSnapshots
from rl_core.preferences.rating_journal import RatingJournal
from rl_core.settings import LoraSettings
from tasks.lifecycle.retraining import read_retrainings
from tasks.tracking import Tracking

FIXTURES = Path(__file__).parent / "fixtures"
ROOT = Path("/tmp/posttrain-earlier-version")  # stands in the outputs
PRESET = {"preset": "nano", "vocab_size": 300, "context": 192}
LORA = {"rank": 2, "target_modules": ["q_proj", "down_proj"]}
SAMPLING = {"max_completion_tokens": 12, "max_turns": 1, "slots": 16}
TRAINING = {"batch_size": 4, "warmup_steps": 1, "checkpoint_every": 2, "eval_every": 2}
DATA = {"num_demonstrations": 24, "levels": ["easy"], "heldout_fraction": 0.25}
PAIRS = {**DATA, "preferences": "pairs.jsonl"}
SFT = {**TRAINING, "max_steps": 4, "learning_rate": 5e-3}
ROLLOUTS = {
    "iterations": 4,
    "prompts_per_iteration": 1,
    "group_size": 2,
    "warmup_steps": 1,
    "checkpoint_every": 2,
    "sampling": SAMPLING,
}
POLICY = {
    **ROLLOUTS,
    "eval_every": 2,
    "eval_episodes": 2,
    "rewards": {"task": 1.0, "length": -0.01},
    "curriculum": [{"name": "easy", "levels": {"easy": 1}}],
}
EVALUATE = {"episodes": 6, "levels": ["easy"], "greedy": False, "sampling": SAMPLING}
# Of a model that answers, as thoughts are examined before answers alone.
TAUGHT = {
    "prepare_data": {**DATA, "num_demonstrations": 200},
    "sft": {**SFT, "max_steps": 60, "epochs": 20, "batch_size": 16, "checkpoint_every": 100},
}
THOUGHTS = {
    "iterations": 4,
    "episodes_per_iteration": 4,
    "eval_every": 2,
    "checkpoint_every": 2,
    "validation_episodes": 6,
    "check_episodes": 12,
    "bootstrap_samples": 100,
    "max_thought_tokens": 200,
    "require_genuine": False,
    "sampling": {"max_completion_tokens": 100},
}
ANALYZE = {"bootstrap_samples": 100, "side_by_side": 1}
PROMOTE = {"min_success": 0.0, "min_episodes": 2, "min_gain": -1.0, "bootstrap_samples": 100}

FINISHED = {
    "prepare_data": DATA,
    "sft": SFT,
    "policy": POLICY,
    "evaluate": EVALUATE,
    "analyze": ANALYZE,
    "promote": PROMOTE,
}
# Stage -> stages of its pipeline, and the point at which the pipeline is killed.
INTERRUPTED: dict[str, tuple[dict[str, Any], str]] = {
    "prepare_data": ({"prepare_data": DATA, "sft": SFT}, "data.rows:2:kill"),
    "sft": ({"prepare_data": DATA, "sft": SFT}, "loop.saved:1:kill"),
    "distill": (
        {
            "prepare_data": DATA,
            "distill": {**ROLLOUTS, "levels": ["easy"], "teacher": {"model": "models:/finished/2"}},
        },
        "loop.saved:1:kill",
    ),
    "preference": (
        {"prepare_data": PAIRS, "preference": {**TRAINING, "epochs": 2}},
        "loop.saved:1:kill",
    ),
    "reward_model": (
        {"prepare_data": PAIRS, "reward_model": {**TRAINING, "epochs": 2}},
        "loop.saved:1:kill",
    ),
    "policy": ({"prepare_data": DATA, "policy": POLICY}, "loop.saved:1:kill"),
    "thoughts": ({"prepare_data": DATA, "thoughts": THOUGHTS}, "loop.saved:1:kill"),
    "evaluate": (
        {"prepare_data": DATA, "sft": SFT, "evaluate": EVALUATE},
        "evaluation.played:1:kill",
    ),
    "analyze": (
        {"prepare_data": DATA, "sft": SFT, "evaluate": EVALUATE, "analyze": ANALYZE},
        "analysis.probed:1:kill",
    ),
    "export": (
        {"prepare_data": DATA, "sft": SFT, "evaluate": EVALUATE, "export": {}},
        "export.proved:1:kill",
    ),
    "promote": (
        {"prepare_data": DATA, "sft": SFT, "evaluate": EVALUATE, "promote": PROMOTE},
        "gate.decided:1:kill",
    ),
}


def write_config(
    name: str,
    stages: dict[str, Any],
    *,
    environment: str = "arithmetic",
    model: str | None = None,
) -> Path:
    """Write a pipeline's configuration; return its path. `model`: whose adapters are trained."""
    config = {
        "name": name,
        "seed": 0,
        "threads": 1,
        "output": "outputs",
        "environment": {"name": environment},
        "model": {"path": model, "lora": LORA} if model else PRESET,
        "tracking": {"traces": 2, "system_metrics_seconds": 0},
        "stages": stages,
    }
    path = ROOT / "pipelines" / f"{name}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(config, indent=1))  # JSON is YAML
    return path


ROUNDING = '''\
"""User-defined stage, as in docs/bring-your-own.md."""

from dataclasses import dataclass

import torch

from rl_core.models import causal_lm
from rl_core.settings import Settings, setting
from tasks.stage_registry import OwnStage
from tasks.stages.loading import load_policy


@dataclass(frozen=True, kw_only=True)
class RoundingSettings(Settings):
    """Settings of the stage."""

    dtype: str = setting("bfloat16", doc="kind of number that weights are rounded to")


def round_weights(context):
    """Round weights to 16 bits."""
    policy = load_policy(context.inputs["model"], context.pipeline)
    with torch.no_grad():
        for weight in policy.model.parameters():
            weight.copy_(weight.to(getattr(torch, context.settings.dtype)))
    causal_lm.save(policy.model, policy.tokenizer, context.folder / "model")
    return {"note": f"weights rounded to {context.settings.dtype}"}


STAGE = OwnStage(round_weights, RoundingSettings, takes=("model",), gives="policy")
'''


# ------------------------------------------------------------------------------------ pipelines


def make_pipelines() -> dict[str, Any]:
    """Run pipelines to their end and to a kill; return their expected contents."""
    folder = ROOT / "pipelines"
    configs = {
        "finished": write_config("finished", FINISHED),
        "taught": write_config("taught", TAUGHT, environment="reckoning"),
    }
    # Adapters make small files; two stages train full models.
    adapted = dict.fromkeys(("distill", "preference", "reward_model"), "models:/finished/1")
    for stage, (stages, _) in INTERRUPTED.items():
        name = f"killed-{stage.replace('_', '-')}"
        configs[stage] = write_config(name, stages, model=adapted.get(stage))
    thoughts = {"environment": "reckoning", "model": "models:/taught/1"}
    configs["thoughts"] = write_config("killed-thoughts", INTERRUPTED["thoughts"][0], **thoughts)
    asking = {**PROMOTE, "approve": "manual", "approval_timeout_seconds": 1e9}
    configs["asked"] = write_config("asked", {**INTERRUPTED["evaluate"][0], "promote": asking})
    (folder / "rounding.py").write_text(ROUNDING)
    rows = [
        {"prompt": f"{n} + 1 = ?", "chosen": f"answer {n + 1}", "rejected": f"answer {n}"}
        for n in range(16)
    ]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    custom = {"rounding": {"use": "rounding.py:STAGE", "settings": {"dtype": "float16"}}}
    configs["custom"] = write_config("custom", {"prepare_data": DATA, "sft": SFT, "custom": custom})
    os.chdir(folder)
    with prefect_server() as api, Forks(environment(api)) as forks:
        run_command(forks, ["run", str(configs["finished"])])
        run_command(forks, ["retrain", str(configs["finished"]), "--force"])
        run_command(forks, ["run", str(configs["custom"])])
        run_command(forks, ["run", str(configs["taught"])])
        for stage, (_, fault) in INTERRUPTED.items():
            run_command(forks, ["run", str(configs[stage])], fault)
        run_command(forks, ["run", str(configs["asked"])], "approval.asked:1:kill")
    return describe_pipelines(folder / "outputs")


def run_command(forks: Forks, arguments: list[str], fault: str = "") -> None:
    """Run a command of `posttrain`, which has to end well, or by its fault."""
    output = ROOT / "said.txt"
    result = forks.run(Request([*arguments, "--quiet"], str(output), fault=fault))
    print(f"{' '.join(arguments)} {fault}: {result.code} after {result.seconds:.1f} s", flush=True)
    assert result.code == (-9 if fault else 0), output.read_text()[-3000:]


def describe_pipelines(output: Path) -> dict[str, Any]:
    """Return facts of the finished pipeline: champion, runs and rows of its files."""
    champion = Tracking(None, output, "finished").champion("finished")
    assert champion is not None
    home = output / "finished"
    (policy,) = [path for path in home.glob("stages/policy/*/rewards.jsonl")][:1]
    return {
        "champion": champion.version,
        "model_sha256": champion.tags["model_sha256"],
        "versions": len(Tracking(None, output, "finished").versions("finished")),
        "runs": len(list(home.glob("runs/*"))),
        "policy": policy.parent.name,
        "rewards": len(policy.read_text().splitlines()),
        "retrainings": [record.status for record in read_retrainings(home)],
    }


def strip_pipelines(output: Path) -> None:
    """Remove what no reader needs: pictures, pages, artifacts but models, spare database pages."""
    for path in (output / "mlflow" / "artifacts").iterdir():
        if path.name != "models":
            shutil.rmtree(path)
    with closing(sqlite3.connect(output / "mlflow" / "mlflow.db")) as database:
        database.execute("vacuum")
    for path in sorted(output.rglob("*")):
        if path.suffix in (".png", ".html") or path.name in ("prefect", "logs"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


# --------------------------------------------------------------------- service, online, ratings


def make_service() -> dict[str, Any]:
    """Train over a service; return its run, saved paths and their digests."""
    folder = ROOT / "service"
    base = make_base(folder / "base", tie_word_embeddings=False)
    with running_service(folder / "folder", base) as service:
        run = use_training_routes(service)
        records = service.store.checkpoints(None, 100, 0, run).items
        saved = {
            record.path: {"digest": record.facts["data_digest"], "folder": record.folder}
            for record in records
        }
        run_record = service.store.run(run)
    for about in saved.values():
        about["files"] = digest_weights(folder / "folder" / about["folder"])
    return {
        "run": run,
        "steps": run_record.steps,
        "next_seq": run_record.next_seq,
        "key": service.key.key_id,
        "saved": saved,
    }


def digest_weights(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of each file of tensors in a folder."""
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*.safetensors"))
    }


def make_online() -> dict[str, Any]:
    """Learn online; return the numbers of records and versions."""
    folder = ROOT / "online"
    folder.mkdir()
    learn_online(folder, LoraSettings(rank=2, target_modules=("q_proj", "down_proj")))
    for left in ("replayed", "model-of-start"):
        shutil.rmtree(folder / left)
    snapshots = WeightSnapshots(folder / "service" / "snapshots")
    return {
        "live": snapshots.live(),
        "updates": json.loads((folder / "service/worker.json").read_text())["online/updates"],
        "versions": snapshots.versions(),
        "records": len(list(ExperienceLogReader(folder / "service" / "buffer").read())),
    }


def make_ratings() -> dict[str, Any]:
    """Rate answers; return the number of ratings per person."""
    folder = ROOT / "ratings"
    with room_of(folder, count=8) as room:
        for rater, choices in (("ann", ("left", "tie", "skip", "right")), ("bob", ("right",))):
            for number, choice in enumerate(choices):
                shown = room.question(rater)
                rating = {"item": shown["question"]["item"], "count": number, "choice": choice}
                room.rate(rater, rating, float(number))
        room.undo("ann", 9.0)
    journal = RatingJournal(folder / "ratings.jsonl")
    return {"count": len(journal), "raters": {name: journal.count(name) for name in journal.raters}}


# ------------------------------------------------------------------------------------- archives


def pack_folder(name: str) -> None:
    """Pack a folder; files with the same content, as models that many runs begin with, once."""
    known: dict[str, str] = {}
    with tarfile.open(FIXTURES / f"{name}.tar.gz", "w:gz", compresslevel=9) as archive:
        for path in sorted((ROOT / name).rglob("*")):
            info = archive.gettarinfo(path, path.relative_to(ROOT).as_posix())
            info.uid = info.gid = 0
            info.uname = info.gname = ""
            content = path.read_bytes() if path.is_file() else b""
            info.type = (
                tarfile.REGTYPE if path.is_file() else info.type
            )  # not as a link of the disk
            info.size = len(content)
            digest = hashlib.sha256(content).hexdigest()
            if path.suffix == ".safetensors" or path.name == "tokenizer.json":
                if digest in known:
                    info.type, info.linkname, info.size = tarfile.LNKTYPE, known[digest], 0
                known.setdefault(digest, info.name)
            archive.addfile(info, io.BytesIO(content) if info.size else None)


def make_fixtures() -> None:
    """Make all fixtures again."""
    torch.set_num_threads(1)
    shutil.rmtree(ROOT, ignore_errors=True)
    shutil.rmtree(FIXTURES, ignore_errors=True)
    for folder in (ROOT, FIXTURES):
        folder.mkdir(parents=True)
    makers: dict[str, Callable[[], dict[str, Any]]] = {
        "service": make_service,
        "online": make_online,
        "ratings": make_ratings,
        "pipelines": make_pipelines,
    }
    expected = {name: make() for name, make in makers.items()}
    strip_pipelines(ROOT / "pipelines" / "outputs")
    for name in makers:
        pack_folder(name)
    (FIXTURES / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")


if __name__ == "__main__":
    make_fixtures()
