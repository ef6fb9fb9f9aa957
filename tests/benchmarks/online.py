"""Online learning under a shift of its traffic, without a guardrail, and under attack.

    python tests/benchmarks/online.py --output DIR --part shift [--model FOLDER] [--seeds 3] [--requests 2000]
    python tests/benchmarks/online.py --output DIR --part guardrails [--arm NAME] [--seed 0]
    python tests/benchmarks/online.py --output DIR --part coefficient [--arm NAME] [--seed 0]
    python tests/benchmarks/online.py --output DIR --part table

In this process, with the parts that a service has (sessions with votes, the log, the update worker, the gate), without
HTTP; requests come in batches, and the live snapshot answers them. One JSON file per run, which is not made again; one
that was interrupted starts over. Without --model the policy is trained first: SFT on the levels of --levels. Success is
taken at --points times, of a snapshot that was measured already not again. Part coefficient records the traffic of a
model that does not learn, once for each seed, and replays it with the settings of every arm. Load is online_load.py,
kills are online_faults.py.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from online_table import format_table

ROOT = Path(__file__).resolve().parents[2]
SHIFT = {
    "consensus": {"feedback": 0.0},
    "feedback 10%": {"feedback": 0.1},
    "no learning": {"learns": False},
    "feedback 10% recorded answers": {"feedback": 0.1, "rollouts": {"samples": 0}},
    "feedback 10% every consensus": {"feedback": 0.1, "labels": {"min_precision": 0.0}},
    "feedback 100%": {"feedback": 1.0},
}
FREE = {"kl_max": 1e6, "kl_coef": 1e-4, "kl_band": {"maximum": 1.01e-4}}
GUARDRAILS = {
    "all": {},
    "without behaviour": {"update": FREE},
    "without magnitude": {"update": {"max_grad_norm": 1e6}},
    "without time": {"update": {"ema_decay": 1e-6}},
    "without gate": {"gate": False},
}
# liars: share of the callers whose feedback, on all their requests, is false. crowd: share of the requests that come
# from one caller, who lies as well.
ATTACKS = {"none": {}, "false feedback": {"liars": 0.2}, "one caller": {"crowd": 0.5}}
# Changes of the shipped settings. rate: learning rate, at most five times as high where the error is large.
COEFFICIENT = {
    "shipped": {"rate": 1e-5},
    "target 0.002": {"rate": 1e-5, "update_kl_target": 0.002},
    "rate 3e-4": {"rate": 3e-4},
    "rate 3e-3": {"rate": 3e-3},
    "rate 3e-3, without KL": {"rate": 3e-3, **FREE},
}
SAMPLES, BATCH, CALLERS = 5, 16, 20
LEVELS = ("hard", "medium", "easy")


@dataclass(frozen=True, slots=True)
class Size:
    """Length of a run, and what is measured in it."""

    requests: int
    episodes: int  # held-out ones of each level, the same for every snapshot
    points: int  # times at which success is taken
    looks: int  # of the gate after each batch, at most
    rate: float  # base learning rate


def make_model(folder: Path, levels: str) -> Path:
    """Train the demo's policy by SFT on these levels, in equal shares."""
    done = folder / "model-path"
    if not done.is_file():
        command = [
            sys.executable,
            "-m",
            "posttrain.cli.main",
            "run",
            "demo",
            "--set",
            f"output={folder}",
            "--set",
            f"stages.prepare_data.levels=[{levels}]",
        ]
        for stage in ("reward_model", "policy", "evaluate", "analyze", "promote"):
            command += ["--set", f"stages.{stage}=null"]
        subprocess.run(command, check=True, cwd=ROOT)
        (model,) = (folder / "demo" / "stages" / "sft").glob("*/model")
        done.write_text(str(model))
    return Path(done.read_text())


class Service:
    """A service without HTTP: what answers, what learns, what decides."""

    def __init__(
        self, folder: Path, model: Path, arm: dict[str, Any], seed: int, size: Size
    ) -> None:
        from rl_core.api.policy import load_policy
        from rl_core.environments import make_environment
        from rl_core.online.build_worker import BUFFER_FOLDER, SNAPSHOTS_FOLDER, build_update_worker
        from rl_core.online.canary_gate import CanaryGate
        from rl_core.online.experience_writer import ExperienceWriter
        from rl_core.online.weight_snapshots import WeightSnapshots
        from rl_core.settings import ModelSettings

        self.folder, self.arm, self.seed, self.size = folder, arm, seed, size
        self.settings = make_online_settings(folder, model, arm, seed, size.rate)
        kind = ModelSettings(path=str(model), device="cpu")
        self.policy, self.judge = load_policy(kind), load_policy(kind)
        self.environment = make_environment("pixel_grid", {"unsupported_reward": 0.5})
        self.snapshots = WeightSnapshots(folder / SNAPSHOTS_FOLDER, cached=4)
        self.worker = build_update_worker(self.settings, folder)
        self.answers = ExperienceWriter(folder / BUFFER_FOLDER, self.settings, self.environment)
        self.gate = CanaryGate(folder, self.settings, self.judge, self.environment, self.snapshots)
        self.live, self.taken, self.updates = 0, 0, list[dict[str, Any]]()
        self.measured: dict[
            int, dict[str, float]
        ] = {}  # success by level of snapshots that were measured

    def serve(self, number: int, level: str) -> None:
        """Answer one batch of requests, with feedback as the arm says."""
        from rl_core.inference.serving_requests import FeedbackLabel
        from rl_core.online.canary_gate import is_canary
        from rl_core.rollouts.collect import collect_rollouts
        from rl_core.rollouts.episode_sequence import EpisodeRequest

        rng = random.Random(f"{self.seed}/{number}")
        requests = []
        while len(requests) < BATCH:
            seed = rng.randrange(2**30)
            if not is_canary(self.environment, level, seed):
                requests.append(EpisodeRequest(level, seed))
        self.take_live()
        groups = collect_rollouts(
            self.environment,
            self.policy.backend(),
            self.policy.renderer,
            requests,
            group_size=SAMPLES,
            sampling=make_sampling(1.0),
            seed=self.seed * 10_007 + number,
            policy_version=self.live,
        )
        for index, group in enumerate(groups):
            request, number_of = f"r{number}-{index}", rng.randrange(CALLERS)
            is_crowd = rng.random() < self.arm.get("crowd", 0.0)
            is_liar = is_crowd or number_of < CALLERS * self.arm.get("liars", 0.0)
            caller = "crowd" if is_crowd else f"c{number_of}"
            self.answers.record_answers(
                [
                    _read_answer(request, i, rollout, caller)
                    for i, rollout in enumerate(group.rollouts)
                ]
            )
            if rng.random() < self.arm.get("feedback", 0.1) or is_liar:
                target = group.rollouts[0].trajectory.target
                answers = [rollout.trajectory.answer or "" for rollout in group.rollouts]
                others = [answer for answer in answers if answer.strip() and answer != target]
                label = (others[0] if others else "nothing") if is_liar else target
                self.answers.accept_label(request, 0, FeedbackLabel(answer=str(label)))

    def take_live(self) -> None:
        """Switch to answering with the live snapshot."""
        from rl_core.models.trainable_weights import load_trainable_weights

        live = self.snapshots.read_live_version() or 0
        if live != self.live:
            load_trainable_weights(self.policy.model, self.snapshots.load_weights(live))
            self.live = live

    def learn(self) -> None:
        """Run all updates that are due, then a few looks of the gate."""
        if not self.arm.get("learns", True):
            return
        while self.worker.step():
            self.note()
        self.show()
        if not self.arm.get("gate", True):
            newest = self.snapshots.list_versions()[-1]
            if newest != self.snapshots.read_live_version():
                self.answers.append_orders([{"order": "live", "version": newest}])
                self.worker.step()
            return
        for _ in range(self.size.looks):
            self.gate.step()
            self.hand_orders()

    def note(self) -> None:
        """Record the numbers of the last update, once."""
        note_update(self.worker, self.updates)

    def hand_orders(self) -> None:
        new = [entry for entry in self.gate.orders if entry["number"] > self.taken]
        if new:
            self.taken = new[-1]["number"]
            self.answers.append_orders([entry["order"] for entry in new])
            while self.worker.step():
                self.note()
            self.show()

    def show(self) -> None:
        from rl_core.online.service_files import METRICS_FILE
        from rl_core.storage.atomic_files import write_text_unsynced

        write_text_unsynced(
            self.folder / METRICS_FILE,
            json.dumps({"paused": self.worker.paused, **self.worker.collect_metrics()}),
        )

    def success(self, version: int) -> dict[str, float]:
        """Return the success of a snapshot on held-out episodes of each level, greedy."""
        from rl_core.models.trainable_weights import load_trainable_weights

        if version not in self.measured:
            load_trainable_weights(self.judge.model, self.snapshots.load_weights(version))
            self.measured[version] = measure_success(
                self.judge, self.environment, self.size.episodes
            )
        return self.measured[version]


def note_update(worker: Any, updates: list[dict[str, Any]]) -> None:
    """Append the numbers of the worker's last update, once."""
    report = worker.last_report
    if report is None or (updates and report.number == updates[-1]["number"]):
        return
    buffered = [worker.buffer.find_experience(request) for request in report.requests]
    ages = [report.number - b.experience.policy_version for b in buffered if b is not None]
    updates.append(
        {
            "number": report.number,
            "refused": report.refused,
            "learning_rate": report.learning_rate,
            "norm": report.gradients.get("norm"),
            "error": report.error,
            "age": statistics.fmean(ages or [0]),
            "next_coefficient": worker.learner.kl_coef,
            **report.kl_control,
        }
    )


def measure_success(policy: Any, environment: Any, episodes: int) -> dict[str, float]:
    """Return the success on held-out episodes of each level, greedy."""
    return {level: _compute_success(policy, environment, level, episodes) for level in LEVELS}


def _compute_success(policy: Any, environment: Any, level: str, episodes: int) -> float:
    from rl_core.evaluation import evaluate
    from rl_core.rollouts.heldout_episodes import draw_heldout_requests
    from rl_core.settings import EvaluationSettings

    requests = draw_heldout_requests(
        environment, EvaluationSettings(episodes=episodes, levels=(level,)), 4711
    )
    return evaluate(
        environment,
        policy.backend(),
        policy.renderer,
        requests,
        samples=1,
        sampling=make_sampling(0.0),
        seed=0,
    ).success_rate


def make_sampling(temperature: float) -> Any:
    from rl_core.settings import SamplingSettings

    return SamplingSettings(temperature=temperature, max_completion_tokens=64, max_turns=6)


def make_online_settings(
    folder: Path, model: Path, arm: dict[str, Any], seed: int, rate: float
) -> Any:
    from rl_core.settings import (
        EnvironmentSettings,
        KLBandSettings,
        ModelSettings,
        OnlineBufferSettings,
        OnlineGateSettings,
        OnlineLabelSettings,
        OnlineRolloutSettings,
        OnlineServiceSettings,
        OnlineSettings,
        OnlineUpdateSettings,
        VotingSettings,
    )

    update = {
        "learning_rate": rate,
        "max_learning_rate": 2 * rate,
        "min_learning_rate": rate / 100,
        "batch_size": 16,
        "first_update": 16,
        "update_every": 8,
        "snapshot_every": 8,
        "ema_decay": 0.9,
    }
    buffer = {"capacity": 256}  # so that the cap of one caller binds within a run
    labels = {"min_confidence": 0.6}
    if "shipped" in arm:  # everything else as shipped
        update, buffer, labels = dict(arm["shipped"]), {}, {}
        if rate := update.pop("rate", None):
            update |= {"learning_rate": rate, "max_learning_rate": 5 * rate}
    update |= arm.get("update", {})
    band = KLBandSettings(**update.pop("kl_band", {}))
    return OnlineSettings(
        folder=str(folder),
        model=ModelSettings(path=str(model), device="cpu"),
        seed=seed,
        environment=EnvironmentSettings(name="pixel_grid", options={"unsupported_reward": 0.5}),
        buffer=OnlineBufferSettings(**buffer),
        voting=VotingSettings(max_samples=SAMPLES, min_samples=SAMPLES),
        labels=OnlineLabelSettings(**{**labels, **arm.get("labels", {})}),
        rollouts=OnlineRolloutSettings(sampling=make_sampling(1.0), **arm.get("rollouts", {})),
        update=OnlineUpdateSettings(**update, kl_band=band),
        service=OnlineServiceSettings(record_top=0),
        gate=OnlineGateSettings(
            margin=arm.get("margin", 0.05),
            alpha=0.1,
            episodes_per_look=60,
            max_episodes=2000,
            sampling=make_sampling(0.0),
        ),
    )


def _read_answer(request: str, choice: int, rollout: Any, caller: str) -> Any:
    from rl_core.inference.serving_requests import ServedAnswer

    trajectory = rollout.trajectory
    return ServedAnswer(
        answer_id=request,
        choice=choice,
        policy_version=trajectory.policy_version,
        prompt_ids=rollout.prompt_ids,
        completion_ids=rollout.completion_ids,
        sampler_logprobs=rollout.sampler_logprobs,
        temperature=1.0,
        text="",
        finish_reason="stop",
        caller=caller,
        rollout=rollout,
        max_votes=SAMPLES,
    )


def run_arm(path: Path, model: Path, arm: dict[str, Any], seed: int, size: Size) -> None:
    """Run one service from its first request to the last; write its numbers to a file."""
    if path.is_file():
        return
    import torch

    torch.set_num_threads(1)
    folder = path.with_suffix(".service")
    shutil.rmtree(folder, ignore_errors=True)  # of a run that was cut off
    began, processor, curve = time.time(), time.process_time(), []
    service, batches = Service(folder, model, arm, seed, size), size.requests // BATCH
    measured = {round(batches * point / max(1, size.points - 1)) for point in range(size.points)}
    with service.answers, service.worker:
        for number in range(batches + 1):
            if number in measured:
                service.take_live()
                point = {
                    "requests": number * BATCH,
                    "live": service.live,
                    **service.success(service.live),
                }
                curve.append(point)
                print(path.stem, point, f"{time.process_time() - processor:.0f} s", flush=True)
            if number < batches:
                service.serve(number, "hard")
                service.learn()
        newest = service.snapshots.list_versions()[-1]
        result = {
            "newest": {"version": newest, **service.success(newest)},
            "requests": size.requests,
            "episodes": size.episodes,
            "processor_seconds": time.process_time() - processor,
            "arm": arm,
            "seed": seed,
            "curve": curve,
            "updates": service.updates,
            "metrics": service.worker.collect_metrics(),
            "rate": size.rate,
            "decisions": service.gate.decisions,
            "load": os.getloadavg(),
            "seconds": time.time() - began,
            "answers": dict(service.answers.counts),
            "model": str(model),
            "paused": service.worker.paused,
        }
    path.write_text(json.dumps(result, indent=1))
    shutil.rmtree(folder)


def record_traffic(folder: Path, model: Path, seed: int, size: Size) -> None:
    """Record the answers and labels of a service that does not learn, and the success of its model."""
    if (folder / "success.json").is_file():
        return
    import torch

    torch.set_num_threads(1)
    shutil.rmtree(folder, ignore_errors=True)
    service = Service(folder, model, {"learns": False}, seed, size)
    with service.answers, service.worker:
        for number in range(size.requests // BATCH):
            service.serve(number, "hard")
        success = service.success(0)
    (folder / "success.json").write_text(json.dumps(success))


def replay_arm(
    path: Path, model: Path, traffic: Path, arm: dict[str, Any], seed: int, size: Size
) -> None:
    """Learn from recorded traffic; write numbers and the success of the average at the end to a file."""
    if path.is_file():
        return
    import torch

    from rl_core.api.policy import load_policy
    from rl_core.environments import make_environment
    from rl_core.models.trainable_weights import load_trainable_weights
    from rl_core.online.build_worker import BUFFER_FOLDER, build_update_worker
    from rl_core.settings import ModelSettings

    torch.set_num_threads(1)
    folder = path.with_suffix(".service")
    shutil.rmtree(folder, ignore_errors=True)
    processor, updates = time.process_time(), list[dict[str, Any]]()
    worker = build_update_worker(
        make_online_settings(folder, model, arm, seed, size.rate),
        folder,
        log=traffic / BUFFER_FOLDER,
    )
    with worker:
        while worker.step():
            note_update(worker, updates)
        judge = load_policy(ModelSettings(path=str(model), device="cpu"))
        load_trainable_weights(judge.model, worker.learner.copy_served_weights())
        environment = make_environment("pixel_grid", {"unsupported_reward": 0.5})
        result = {
            "start": json.loads((traffic / "success.json").read_text()),
            "newest": measure_success(judge, environment, size.episodes),
            "requests": size.requests,
            "episodes": size.episodes,
            "arm": arm,
            "seed": seed,
            "updates": updates,
            "metrics": worker.collect_metrics(),
            "paused": worker.paused,
            "processor_seconds": time.process_time() - processor,
        }
    print(path.stem, result["newest"], f"{result['processor_seconds']:.0f} s", flush=True)
    path.write_text(json.dumps(result, indent=1))
    shutil.rmtree(folder)


def run_offline(path: Path, model: Path, seed: int, size: Size) -> None:
    """Train GRPO on as many hard episodes, with the environment's rewards."""
    if path.is_file():
        return
    import torch

    from rl_core import grpo, load_policy
    from rl_core.environments import make_environment
    from rl_core.settings import CurriculumStage, ModelSettings, PolicySettings

    torch.set_num_threads(1)
    processor = time.process_time()
    policy = load_policy(ModelSettings(path=str(model), device="cpu"))
    environment = make_environment("pixel_grid", {"unsupported_reward": 0.5})
    before = measure_success(policy, environment, size.episodes)
    settings = PolicySettings(
        algorithm="grpo",
        iterations=size.requests // BATCH,
        prompts_per_iteration=BATCH,
        group_size=SAMPLES,
        learning_rate=3e-4,
        sampling=make_sampling(1.0),
        curriculum=(CurriculumStage(name="hard", levels={"hard": 1.0}),),
    )
    grpo(policy, environment=environment, settings=settings, seed=seed).run()
    after = measure_success(policy, environment, size.episodes)
    result = {
        "curve": [{"requests": 0, **before}, {"requests": size.requests, **after}],
        "newest": after,
        "seed": seed,
        "requests": size.requests,
        "episodes": size.episodes,
        "model": str(model),
        "processor_seconds": time.process_time() - processor,
        "seconds": 0.0,
    }
    print(path.stem, before, after, f"{result['processor_seconds']:.0f} s", flush=True)
    path.write_text(json.dumps(result, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument(
        "--part", choices=("shift", "guardrails", "coefficient", "table"), required=True
    )
    parser.add_argument("--model", type=Path)
    parser.add_argument(
        "--levels", default="easy, medium", help="of the demonstrations that SFT imitates"
    )
    parser.add_argument(
        "--arm", action="append", help="of shift or guardrails: this one alone; several times"
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--seed", type=int, help="this one alone")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--episodes", type=int, default=500)
    parser.add_argument("--points", type=int, default=7)
    parser.add_argument("--looks", type=int, default=6)
    parser.add_argument("--rate", type=float, default=1e-4)
    options = parser.parse_args()
    output: Path = options.output.resolve()
    output.mkdir(parents=True, exist_ok=True)
    if options.part == "table":
        return print(format_table(output))
    size = Size(options.requests, options.episodes, options.points, options.looks, options.rate)
    model = (options.model or make_model(output / "training", options.levels)).resolve()
    arms = {f"shift {name}": arm for name, arm in SHIFT.items()}
    if options.part == "guardrails":
        arms = {
            f"{rail}, attack {attack}": {"margin": 0.02, **GUARDRAILS[rail], **ATTACKS[attack]}
            for attack in ATTACKS
            for rail in GUARDRAILS
        }
    if options.part == "coefficient":
        arms = {name: {"shipped": changes} for name, changes in COEFFICIENT.items()}
    for seed in range(options.seeds) if options.seed is None else [options.seed]:
        for name, arm in arms.items():
            if not options.arm or name in options.arm:
                path = output / f"{name.replace(' ', '_')}.seed{seed}.json"
                if options.part == "coefficient":
                    traffic = output / f"traffic.seed{seed}"
                    record_traffic(traffic, model, seed, size)
                    replay_arm(path, model, traffic, arm, seed, size)
                else:
                    run_arm(path, model, arm, seed, size)
        if options.part == "shift" and (not options.arm or "offline" in options.arm):
            run_offline(output / f"offline_GRPO.seed{seed}.json", model, seed, size)


if __name__ == "__main__":
    main()
