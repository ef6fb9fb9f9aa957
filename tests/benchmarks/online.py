"""Online learning under a shift of its traffic, without a guardrail, and under attack.

    python tests/benchmarks/online.py --output DIR --part shift [--model FOLDER] [--seeds 3] [--requests 2000]
    python tests/benchmarks/online.py --output DIR --part guardrails [--arm NAME]
    python tests/benchmarks/online.py --output DIR --part table

In this process, with the parts that a service has (sessions with votes, the log, the update worker, the gate), without
HTTP; requests come in batches, and the live snapshot answers them. One JSON file per run, which is not made again.
Without --model the policy is trained first: SFT on easy and medium levels alone. Load is online_load.py, kills are
online_faults.py.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SHIFT = {"consensus": {"feedback": 0.0}, "feedback 10%": {"feedback": 0.1}, "no learning": {"learns": False},
         "feedback 100%": {"feedback": 1.0}}  # fmt: skip
FREE = {"kl_limit": 1e6, "kl_coef": 1e-4, "kl_coef_max": 1.01e-4}
GUARDRAILS = {
    "all": {}, "without behaviour": {"update": FREE}, "without magnitude": {"update": {"max_grad_norm": 1e6}},
    "without time": {"update": {"ema_decay": 1e-6}}, "without gate": {"gate": False},
}  # fmt: skip
# liars: share of the callers whose feedback, on all their requests, is false. crowd: share of the requests that come
# from one caller, who lies as well.
ATTACKS = {"none": {}, "false feedback": {"liars": 0.2}, "one caller": {"crowd": 0.5}}
SAMPLES, BATCH, LOOKS, CALLERS = 5, 16, 6, 20
T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)  # Student, two-sided, 1 to 9 degrees


def make_model(folder: Path) -> Path:
    """The demo's policy after SFT on easy and medium levels."""
    done = folder / "model-path"
    if not done.is_file():
        command = [sys.executable, "-m", "flows.cli.main", "run", "demo", "--set", f"output={folder}", "--set",
                   "stages.prepare_data.levels=[easy, medium]"]  # fmt: skip
        for stage in ("reward_model", "policy", "evaluate", "analyze", "promote"):
            command += ["--set", f"stages.{stage}=null"]
        subprocess.run(command, check=True, cwd=ROOT)
        (found,) = (folder / "demo" / "stages" / "sft").glob("*/model")
        done.write_text(str(found))
    return Path(done.read_text())


class Service:
    """A service without HTTP: what answers, what learns, what decides."""

    def __init__(self, folder: Path, model: Path, arm: dict[str, Any], seed: int) -> None:
        from rl_core.api.policy import load_policy
        from rl_core.environments import make
        from rl_core.online.answer_log import AnswerLog
        from rl_core.online.assembly import BUFFER, SNAPSHOTS, assemble_worker
        from rl_core.online.canary_gate import CanaryGate
        from rl_core.online.weight_snapshots import WeightSnapshots
        from rl_core.settings import ModelSettings

        self.folder, self.arm, self.seed = folder, arm, seed
        self.settings = online_settings(folder, model, arm, seed)
        kind = ModelSettings(path=str(model), device="cpu")
        self.policy, self.judge = load_policy(kind), load_policy(kind)
        self.environment = make("pixel_grid", {"unsupported_reward": 0.5})
        self.snapshots = WeightSnapshots(folder / SNAPSHOTS)
        self.worker = assemble_worker(self.settings, folder)
        self.answers = AnswerLog(folder / BUFFER, self.settings, self.environment)
        self.gate = CanaryGate(folder, self.settings, self.judge, self.environment, self.snapshots)
        self.live, self.taken, self.updates = 0, 0, list[dict[str, Any]]()

    def serve(self, number: int, level: str) -> None:
        """One batch of requests, with feedback as the arm says."""
        from rl_core.inference.served_answers import FeedbackLabel
        from rl_core.online.canary_episodes import is_canary
        from rl_core.rollouts.collect import collect
        from rl_core.rollouts.episode_sequence import EpisodeRequest

        rng = random.Random(f"{self.seed}/{number}")
        asked = []
        while len(asked) < BATCH:
            seed = rng.randrange(2**30)
            if not is_canary(self.environment, level, seed):
                asked.append(EpisodeRequest(level, seed))
        self.take_live()
        groups = collect(
            self.environment, self.policy.backend(), self.policy.renderer, asked, group_size=SAMPLES,
            sampling=sampling(1.0), seed=self.seed * 10_007 + number, policy_version=self.live,
        )  # fmt: skip
        for index, group in enumerate(groups):
            request, number_of = f"r{number}-{index}", rng.randrange(CALLERS)
            is_crowd = rng.random() < self.arm.get("crowd", 0.0)
            is_liar = is_crowd or number_of < CALLERS * self.arm.get("liars", 0.0)
            caller = "crowd" if is_crowd else f"c{number_of}"
            self.answers.record([_answer(request, i, rollout, caller) for i, rollout in enumerate(group.rollouts)])
            if rng.random() < self.arm.get("feedback", 0.1) or is_liar:
                target = group.rollouts[0].trajectory.target
                others = [r.trajectory.answer for r in group.rollouts if r.trajectory.answer not in (None, target)]
                told = (others[0] if others else "nothing") if is_liar else target
                self.answers.accept(request, 0, FeedbackLabel(answer=str(told)))

    def take_live(self) -> None:
        """Answer with the live snapshot from now on."""
        from rl_core.models.trainable_weights import load_trainable_weights

        live = self.snapshots.live() or 0
        if live != self.live:
            load_trainable_weights(self.policy.model, self.snapshots.weights(live))
            self.live = live

    def learn(self) -> None:
        """Everything that is due, then a few looks of the gate."""
        if not self.arm.get("learns", True):
            return
        while self.worker.step():
            self.note()
        self.show()
        if not self.arm.get("gate", True):
            newest = self.snapshots.versions()[-1]
            if newest != self.snapshots.live():
                self.answers.order([{"order": "live", "version": newest}])
                self.worker.step()
            return
        for _ in range(LOOKS):
            self.gate.step()
            self.hand_orders()

    def note(self) -> None:
        """The numbers of the last update, once."""
        report = self.worker.last_report
        if report is not None and report.number > (self.updates[-1]["number"] if self.updates else 0):
            ages = [report.number - self.worker.buffer.find(r).experience.policy_version for r in report.requests
                    if self.worker.buffer.find(r) is not None]  # fmt: skip
            self.updates.append({
                "number": report.number, "refused": report.refused, "learning_rate": report.learning_rate,
                "norm": report.gradients.get("norm"), "error": report.error, "age": statistics.fmean(ages or [0]),
                **report.kl_control,
            })  # fmt: skip

    def hand_orders(self) -> None:
        new = [entry for entry in self.gate.orders if entry["number"] > self.taken]
        if new:
            self.taken = new[-1]["number"]
            self.answers.order([entry["order"] for entry in new])
            while self.worker.step():
                self.note()
            self.show()

    def show(self) -> None:
        from rl_core.online.service_files import METRICS
        from rl_core.storage.single_files import write_text_unsynced

        write_text_unsynced(self.folder / METRICS, json.dumps(self.worker.metrics()))

    def success(self, level: str, episodes: int) -> float:
        """Success of the live snapshot on held-out episodes, greedy."""
        return success_of(self.policy, self.environment, level, episodes)


def success_of(policy: Any, environment: Any, level: str, episodes: int) -> float:
    from rl_core.evaluation import evaluate
    from rl_core.rollouts.heldout_requests import heldout_requests
    from rl_core.settings import EvaluationSettings

    requests = heldout_requests(environment, EvaluationSettings(episodes=episodes, levels=(level,)), 4711)
    return evaluate(environment, policy.backend(), policy.renderer, requests, samples=1, sampling=sampling(0.0),
                    seed=0).success_rate  # fmt: skip


def sampling(temperature: float) -> Any:
    from rl_core.settings import SamplingSettings

    return SamplingSettings(temperature=temperature, max_completion_tokens=64, max_turns=6)


def online_settings(folder: Path, model: Path, arm: dict[str, Any], seed: int) -> Any:
    from rl_core.settings import (
        EnvironmentSettings,
        ModelSettings,
        OnlineBufferSettings,
        OnlineGateSettings,
        OnlineLabelSettings,
        OnlineServiceSettings,
        OnlineSettings,
        OnlineUpdateSettings,
        VotingSettings,
    )

    update = {"learning_rate": 1e-4, "max_learning_rate": 2e-4, "min_learning_rate": 1e-6, "batch_size": 16,
              "first_update": 16, "update_every": 8, "snapshot_every": 8, "ema_decay": 0.9}  # fmt: skip
    update |= arm.get("update", {})
    return OnlineSettings(
        folder=str(folder), model=ModelSettings(path=str(model), device="cpu"), seed=seed,
        environment=EnvironmentSettings(name="pixel_grid", options={"unsupported_reward": 0.5}),
        buffer=OnlineBufferSettings(capacity=256),  # so that the cap of one caller binds within a run
        voting=VotingSettings(max_samples=SAMPLES, min_samples=SAMPLES), labels=OnlineLabelSettings(min_confidence=0.6),
        update=OnlineUpdateSettings(**update), service=OnlineServiceSettings(record_top=0),
        gate=OnlineGateSettings(margin=0.05, alpha=0.1, episodes_per_look=120, sampling=sampling(0.0)),
    )  # fmt: skip


def _answer(request: str, choice: int, rollout: Any, caller: str) -> Any:
    from rl_core.inference.served_answers import ServedAnswer

    trajectory = rollout.trajectory
    return ServedAnswer(
        answer_id=request, choice=choice, policy_version=trajectory.policy_version, prompt_ids=rollout.prompt_ids,
        completion_ids=rollout.completion_ids, sampler_logprobs=rollout.sampler_logprobs, temperature=1.0, text="",
        finish_reason="stop", caller=caller, rollout=rollout, max_votes=SAMPLES,
    )  # fmt: skip


def run_arm(place: Path, model: Path, arm: dict[str, Any], seed: int, requests: int, episodes: int) -> None:
    """One service from its first request to the last; its numbers into a file."""
    if place.is_file():
        return
    import torch

    from rl_core.models.trainable_weights import load_trainable_weights

    torch.set_num_threads(1)
    began, curve = time.time(), []
    service = Service(place.with_suffix(".service"), model, arm, seed)
    with service.answers, service.worker:
        for number in range(requests // BATCH + 1):
            if number % max(1, requests // BATCH // 6) == 0 or number == requests // BATCH:
                service.take_live()
                point = {"requests": number * BATCH, "live": service.live}
                curve.append(point | {level: service.success(level, episodes) for level in ("hard", "medium", "easy")})
                print(place.stem, curve[-1], flush=True)
            if number < requests // BATCH:
                service.serve(number, "hard")
                service.learn()
        newest = service.snapshots.versions()[-1]
        load_trainable_weights(service.policy.model, service.snapshots.weights(newest))
        learned = {level: service.success(level, episodes) for level in ("hard", "medium", "easy")}
        found = {
            "newest": {"version": newest, **learned}, "requests": requests, "episodes": episodes,
            "processor_seconds": time.process_time(), "arm": arm, "seed": seed, "curve": curve,
            "updates": service.updates,
            "metrics": service.worker.metrics(), "decisions": service.gate.decisions, "load": os.getloadavg(),
            "seconds": time.time() - began, "answers": dict(service.answers.counts), "model": str(model),
        }  # fmt: skip
    place.write_text(json.dumps(found, indent=1))


def offline(place: Path, model: Path, seed: int, requests: int, episodes: int) -> None:
    """GRPO on as many hard episodes, with the environment's own rewards."""
    if place.is_file():
        return
    from rl_core import grpo, load_policy
    from rl_core.environments import make
    from rl_core.settings import CurriculumStage, ModelSettings, PolicySettings

    policy, environment = load_policy(ModelSettings(path=str(model), device="cpu")), make(
        "pixel_grid", {"unsupported_reward": 0.5}
    )  # fmt: skip
    before = {level: success_of(policy, environment, level, episodes) for level in ("hard", "medium", "easy")}
    settings = PolicySettings(
        algorithm="grpo", iterations=requests // BATCH, prompts_per_iteration=BATCH, group_size=SAMPLES,
        learning_rate=3e-4, sampling=sampling(1.0), curriculum=(CurriculumStage(name="hard", levels={"hard": 1.0}),),
    )  # fmt: skip
    grpo(policy, environment=environment, settings=settings, seed=seed).run()
    after = {level: success_of(policy, environment, level, episodes) for level in ("hard", "medium", "easy")}
    place.write_text(json.dumps({"before": before, "after": after, "requests": requests, "seed": seed}))


def table(output: Path) -> str:
    """Markdown of all runs: means over seeds with 95% intervals of Student's t, and a picture."""
    rows = ["| run | seeds | hard: change | easy, medium: change | lowest live level, against the start | newest "
            "snapshot, hard: change | live snapshots | updates taken | mean KL, updates 51 on | pseudo-labels right |",
            "|---|---|---|---|---|---|---|---|---|---|"]  # fmt: skip
    arms: dict[str, list[dict[str, Any]]] = {}
    for path in sorted(output.glob("*.seed*.json")):
        arms.setdefault(path.name.partition(".seed")[0], []).append(json.loads(path.read_text()))
    for name, runs in arms.items():
        taken = [r["metrics"].get("online/update_success_rate", 1.0) for r in runs]
        late = [[u["mean_kl"] for u in r["updates"][50:] if "mean_kl" in u] for r in runs]
        right = [r["metrics"].get("online/pseudo_label_precision") for r in runs]
        rows.append("| " + " | ".join([
            name.replace("_", " "), str(len(runs)), _points([_change(r, ("hard",)) for r in runs]),
            _points([_change(r, ("easy", "medium")) for r in runs]), _points([_lowest(r) for r in runs]),
            _points([r["newest"]["hard"] - r["curve"][0]["hard"] for r in runs]),
            ", ".join(str(sum(d["verdict"] == "promoted" for d in r["decisions"])) for r in runs),
            f"{statistics.mean(taken):.1%}", ", ".join(f"{statistics.mean(k):.3f}" for k in late if k) or "-",
            ", ".join(f"{share:.0%}" for share in right if share is not None) or "-",
        ]) + " |")  # fmt: skip
    picture(output, arms)
    return "\n".join(rows)


def _change(run: dict[str, Any], levels: tuple[str, ...]) -> float:
    """Success at the end against the start, mean over levels."""
    first, last = run["curve"][0], run["curve"][-1]
    return statistics.mean(last[level] - first[level] for level in levels)


def _lowest(run: dict[str, Any]) -> float:
    """Largest fall of the live snapshot's success over all levels together, at any time."""
    levels = ("easy", "medium", "hard")
    return min(statistics.mean(point[x] - run["curve"][0][x] for x in levels) for point in run["curve"])


def _points(values: list[float]) -> str:
    """Mean in points with the half-width of its 95% interval, in points."""
    if len(values) < 2:
        return f"{100 * values[0]:+.1f}"
    half = T_95[len(values) - 2] * statistics.stdev(values) / len(values) ** 0.5
    return f"{100 * statistics.mean(values):+.1f} ± {100 * half:.1f}"


def picture(output: Path, arms: dict[str, list[dict[str, Any]]]) -> None:
    """Success on held-out hard episodes over the requests, by arm."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4))
    for number, (name, runs) in enumerate(arms.items()):
        for run in runs:
            x, y = [p["requests"] for p in run["curve"]], [100 * p["hard"] for p in run["curve"]]
            axes.plot(x, y, marker="o", color=f"C{number}", label=name if run is runs[0] else None)
    axes.set_xlabel("requests of hard level")
    axes.set_ylabel("success of the live snapshot on held-out hard episodes, %")
    axes.legend()
    figure.tight_layout()
    figure.savefig(output / "online.png", dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--part", choices=("shift", "guardrails", "table"), required=True)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--arm", action="append", help="of shift or guardrails: this one alone; several times")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--episodes", type=int, default=500)
    given = parser.parse_args()
    output: Path = given.output.resolve()
    output.mkdir(parents=True, exist_ok=True)
    if given.part == "table":
        return print(table(output))
    model = (given.model or make_model(output / "training")).resolve()
    arms = {f"shift {name}": arm for name, arm in SHIFT.items()}
    if given.part == "guardrails":
        arms = {f"{rail}, attack {attack}": {**GUARDRAILS[rail], **ATTACKS[attack]}
                for rail in GUARDRAILS for attack in ATTACKS}  # fmt: skip
    for seed in range(given.seeds):
        for name, arm in arms.items():
            if not given.arm or name in given.arm:
                place = output / f"{name.replace(' ', '_')}.seed{seed}.json"
                run_arm(place, model, arm, seed, given.requests, given.episodes)
        if given.part == "shift" and (not given.arm or "offline" in given.arm):
            offline(output / f"offline-{seed}.json", model, seed, given.requests, given.episodes)


if __name__ == "__main__":
    main()
