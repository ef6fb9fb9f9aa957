"""Online learning under a shift of its traffic, without a guardrail, under attack, under load and under kills.

    python tests/benchmarks/online.py --output DIR --part shift [--model FOLDER] [--seeds 3] [--requests 2000]
    python tests/benchmarks/online.py --output DIR --part guardrails
    python tests/benchmarks/online.py --output DIR --part load
    python tests/benchmarks/online.py --output DIR --part faults [--kills 200]
    python tests/benchmarks/online.py --output DIR --part table

shift, guardrails: in this process, with the parts that a service has (sessions with votes, the log, the update worker,
the gate), without HTTP; requests come in batches, and the live snapshot answers them. One JSON file per run, which is
not made again. load: `posttrain serve` with and without --learn, under the
clients of tests/benchmarks/serving.py. faults: the slow test of kills, again and again. Without
--model the policy is trained first: SFT on easy and medium levels alone.
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
ATTACKS = {"none": {}, "false feedback": {"liars": 0.2}, "one caller": {"crowd": 0.5}}
SAMPLES, BATCH, LOOKS = 5, 16, 6


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
        self.live, self.taken, self.kls = 0, 0, list[float]()

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
            request = f"r{number}-{index}"
            caller = "crowd" if rng.random() < self.arm.get("crowd", 0.0) else f"c{rng.randrange(20)}"
            self.answers.record([_answer(request, i, rollout, caller) for i, rollout in enumerate(group.rollouts)])
            is_liar = rng.random() < self.arm.get("liars", 0.0)
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
            report = self.worker.last_report
            if report is not None and report.number > len(self.kls):
                self.kls.append(report.kl_control.get("mean_kl", float("nan")))
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

    def hand_orders(self) -> None:
        new = [entry for entry in self.gate.orders if entry["number"] > self.taken]
        if new:
            self.taken = new[-1]["number"]
            self.answers.order([entry["order"] for entry in new])
            while self.worker.step():
                pass
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
        found = {
            "arm": arm, "seed": seed, "curve": curve, "kls": [k for k in service.kls if k == k],
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


def load(output: Path, model: Path, threads: int) -> None:
    """Answers a second and latencies at 1, 8 and 64 clients, with and without learning beside."""
    import serving

    config = output / "learn.yaml"
    config.write_text(
        f"name: measured\noutput: {output / 'out'}\nenvironment: {{name: pixel_grid}}\n"
        f"model: {{path: {model}, device: cpu}}\n"
        f"serving: {{model: {model}, name: measured, threads: {threads}}}\nstages: {{evaluate: {{}}}}\n"
        "online: {environment: {name: chat}, service: {run_gate: false}, labels: {min_confidence: 0.2, min_votes: 1}}\n"
    )
    found: dict[str, Any] = {"load": os.getloadavg()}
    for name, more in (("serving", []), ("learning", ["--learn"])):
        port = 8790 + len(more)
        command = [sys.executable, "-m", "flows.cli.main", "serve", str(config), "--port", str(port), *more]
        log = output / f"{name}.log"
        with serving.process(command, threads, log, f"http://127.0.0.1:{port}/readyz", {}):
            token = (output / "out" / "serving" / "token").read_text().strip()
            for clients in (1, 8, 64):
                found[f"{name} {clients}"] = ask(f"http://127.0.0.1:{port}/v1", token, clients)
                print(name, clients, found[f"{name} {clients}"], flush=True)
    (output / "load.json").write_text(json.dumps(found, indent=1))


def ask(url: str, token: str, clients: int, seconds: float = 20.0) -> dict[str, float]:
    """Answers a second and quantiles of the time to one; every client asks again at once, two choices each."""
    import asyncio

    import openai

    times: list[float] = []

    async def client(number: int, until: float, one: Any) -> None:
        while time.monotonic() < until:
            began = time.monotonic()
            await one.chat.completions.create(
                model="measured", messages=[{"role": "user", "content": f"colour at row {number} column 2?"}], n=2,
                max_completion_tokens=32, user=f"u{number}",
            )  # fmt: skip
            times.append(time.monotonic() - began)

    async def all_of_them() -> None:
        async with openai.AsyncOpenAI(base_url=url, api_key=token, max_retries=0) as one:
            until = time.monotonic() + seconds
            await asyncio.gather(*(client(number, until, one) for number in range(clients)))

    asyncio.run(all_of_them())
    times.sort()
    return {"answers_per_second": 2 * len(times) / seconds, "p50": times[len(times) // 2],
            "p99": times[min(len(times) - 1, len(times) * 99 // 100)]}  # fmt: skip


def faults(output: Path, kills: int) -> None:
    """The slow test of kills until this many (it kills worker and server twice each)."""
    rounds = []
    test = "tests/flows/online/test_learning_service.py::test_worker_and_server_killed_under_load_lose_nothing"
    for number in range(max(1, kills // 4)):
        done = subprocess.run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", test], cwd=ROOT,
                              capture_output=True, text=True)  # fmt: skip
        rounds.append(done.returncode)
        print(number, done.stdout.splitlines()[-1:], flush=True)
        (output / "faults.json").write_text(json.dumps({"kills": 4 * len(rounds), "failed": sum(map(bool, rounds))}))


def table(output: Path) -> str:
    """Markdown of all runs: means over seeds with their range, and a picture."""
    rows = ["| run | seeds | hard before | hard after | easy, medium: change | updates taken | KL in band after 50 |",
            "|---|---|---|---|---|---|---|"]  # fmt: skip
    arms: dict[str, list[dict[str, Any]]] = {}
    for path in sorted(output.glob("*.seed*.json")):
        arms.setdefault(path.name.partition(".seed")[0], []).append(json.loads(path.read_text()))
    for name, runs in arms.items():
        first, last = [r["curve"][0] for r in runs], [r["curve"][-1] for r in runs]
        old = [min(b[x] - a[x] for x in ("easy", "medium")) for a, b in zip(first, last, strict=True)]
        taken = statistics.mean(r["metrics"].get("online/update_success_rate", 1.0) for r in runs)
        late = [k for r in runs for k in r["kls"][50:]]
        band = f"{sum(0.04 <= k <= 0.06 for k in late) / len(late):.0%}" if late else "-"
        rows.append(f"| {name} | {len(runs)} | {_mean(first, 'hard')} | {_mean(last, 'hard')} | "
                    f"{min(old):+.1%} at worst | {taken:.1%} | {band} |")  # fmt: skip
    picture(output, arms)
    return "\n".join(rows)


def _mean(points: list[dict[str, float]], name: str) -> str:
    values = [point[name] for point in points]
    spread = f" ({min(values):.1%} to {max(values):.1%})" if len(values) > 1 else ""
    return f"{statistics.mean(values):.1%}{spread}"


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
    parser.add_argument("--part", choices=("shift", "guardrails", "load", "faults", "table"), required=True)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--arm", help="of shift or guardrails: this one alone")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--episodes", type=int, default=500)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    output: Path = given.output.resolve()
    output.mkdir(parents=True, exist_ok=True)
    if given.part == "faults":
        return faults(output, given.kills)
    if given.part == "table":
        return print(table(output))
    model = (given.model or make_model(output / "training")).resolve()
    if given.part == "load":
        return load(output, model, given.threads)
    arms = {f"shift {name}": arm for name, arm in SHIFT.items()}
    if given.part == "guardrails":
        arms = {f"{rail}, attack {attack}": {**GUARDRAILS[rail], **ATTACKS[attack]}
                for rail in GUARDRAILS for attack in ATTACKS}  # fmt: skip
    for seed in range(given.seeds):
        for name, arm in arms.items():
            if given.arm in (None, name):
                place = output / f"{name.replace(' ', '_')}.seed{seed}.json"
                run_arm(place, model, arm, seed, given.requests, given.episodes)
        if given.part == "shift" and given.arm in (None, "offline"):
            offline(output / f"offline-{seed}.json", model, seed, given.requests, given.episodes)


if __name__ == "__main__":
    main()
