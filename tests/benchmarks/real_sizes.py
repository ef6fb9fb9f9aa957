"""Every kind of training once on the pretrained SmolLM2-135M with real rows: tokens/s, peak memory, what it learned.

    python tests/benchmarks/real_sizes.py --output DIR --questions GSM8K.jsonl --pairs PAIRS.jsonl
        [--peer-python VENV/bin/python] [--cases SET,...] [--threads 2] [--steps 8] [--shape qwen2.5-0.5b]

questions: rows {"question", "answer", "final"} as GSM8K has them (arXiv:2110.14168); pairs: rows {"prompt", "chosen",
"rejected"}. A case is STAGE-WEIGHTS-DTYPE, as in sft-lora-bfloat16, in a separate process: steps after the first are
timed, those of DPO with their share of the reference's log-probs, which the constructor computes. Memory is the peak
resident memory of the process. bfloat16 with full weights is `autocast: bfloat16` over float32 masters; with an
adapter, the frozen weights are bfloat16. The peer is TRL (1.16) on the same rows, right after ours.
`--shape` takes random weights of that shape instead, with SmolLM2's tokenizer, written to DIR/model. A finished
case is DIR/cases/*.json and is not run again. At the end: DIR/real_sizes.md. Timings hold on an idle machine.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from compare_speed import describe_processor, read_commit
from speed.protocol import read_peak_mb

MODEL = "smollm2-135m"
SHAPES = {  # width, layers, heads, KV heads, MLP width, vocabulary; tied head
    "qwen2.5-0.5b": (896, 24, 14, 2, 4864, 151_936),
}
STAGES = (
    "sft",
    "sft_micro",
    "reward",
    "dpo",
    "grpo",
    "ppo",
    "thoughts",
    "distill",
    "service",
    "online",
)
WITH_PEER = ("sft", "reward", "dpo", "grpo")
WEIGHTS, DTYPES = ("full", "lora"), ("float32", "bfloat16")
REFUSED = (  # beginnings of cases that do not exist
    "reward-lora",  # a reward model trains all its weights
    "service-full-bfloat16",  # the service trains all weights in float32 alone
)
RANK, LEARNING_RATE = 16, {"full": 2e-5, "lora": 3e-4}
BATCH = {"sft": 8, "sft_micro": 8, "reward": 4, "dpo": 4}  # rows or pairs a step
MICRO_BATCH_TOKENS = 1024  # of sft_micro; the others take the default
PROMPTS, GROUP, NEW_TOKENS = 4, 4, 64  # of an iteration with rollouts
MAX_LENGTH = 512  # longer rows are left out, for both sides
ONLINE_UPDATES = 3
# metric of the first and the last steps that the table shows
SHOWN = {
    "sft": ("train/loss", "loss"),
    "sft_micro": ("train/loss", "loss"),
    "reward": ("train/loss", "loss"),
    "dpo": ("train/loss", "loss"),
    "grpo": ("reward/mean", "reward"),
    "ppo": ("reward/mean", "reward"),
    "thoughts": ("thoughts/gain", "gain of thoughts, nats"),
    "distill": ("policy/teacher_kl", "KL to the teacher"),
    "service": ("loss", "loss"),
    "online": ("kl", "KL of the last update"),
}


def main() -> int:
    options = parse_options()
    if options.case:
        result = run_case(options)
        print("RESULT " + json.dumps(result), flush=True)
        return 0
    output = options.output.resolve()
    (output / "cases").mkdir(parents=True, exist_ok=True)
    failed = 0
    for case in options.cases:
        failed += not measure_case("ours", case, sys.executable, options)
        if options.peer_python and case.split("-")[0] in WITH_PEER:
            failed += not measure_case("trl", case, options.peer_python, options)
    text = format_table(output, options)
    (output / "real_sizes.md").write_text(text)
    print(text)
    return int(failed > 0)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--questions", type=Path, required=True)
    parser.add_argument("--pairs", type=Path, required=True)
    parser.add_argument("--peer-python", default="")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--steps", type=int, default=8, help="the first, which is not timed, included"
    )
    every = [f"{stage}-{kind}-{dtype}" for stage in STAGES for kind in WEIGHTS for dtype in DTYPES]
    every = [case for case in every if not case.startswith(REFUSED)]
    parser.add_argument(
        "--cases",
        default=every,
        type=lambda text: [
            case for case in every if any(re.match(part, case) for part in text.split(","))
        ],
        help="beginnings of cases, separated by commas",
    )
    parser.add_argument("--shape", choices=sorted(SHAPES), help="random weights of this shape")
    parser.add_argument("--case", default="", help="run this case here (a worker's option)")
    parser.add_argument("--side", choices=("ours", "trl"), default="ours")
    return parser.parse_args()


def measure_case(side: str, case: str, python: str, options: argparse.Namespace) -> bool:
    """Run one side of a case in a process of its own; return False if it failed."""
    path = options.output.resolve() / "cases" / f"{case}-{side}.json"
    if path.exists():
        return True
    arguments = [
        "--output",
        options.output,
        "--questions",
        options.questions,
        "--pairs",
        options.pairs,
    ]
    arguments += [
        "--threads",
        options.threads,
        "--steps",
        options.steps,
        "--case",
        case,
        "--side",
        side,
    ]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": str(options.threads),
        "TOKENIZERS_PARALLELISM": "false",
        "TRL_EXPERIMENTAL_SILENCE": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": str(Path(__file__).resolve().parents[2]),
        "REAL_SIZES_MODEL": prepare_model(options),
    }
    load = os.getloadavg()[0]
    done = subprocess.run(
        [python, __file__, *map(str, arguments)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if done.returncode or not lines:
        print(f"{case} ({side}) failed: {done.stderr[-1500:]}", flush=True)
        return False
    result = {**json.loads(lines[-1].removeprefix("RESULT ")), "load_before": round(load, 1)}
    path.write_text(json.dumps(result))
    print(f"{case} ({side}): {result}", flush=True)
    return True


def run_case(options: argparse.Namespace) -> dict[str, Any]:
    """Take the steps of a case in this process; return tokens/s, peak memory and the metric's change."""
    import torch

    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    stage, weights, dtype = options.case.split("-")
    if options.side == "trl":
        return run_trl(stage, weights, dtype, options)
    if stage == "online":
        return run_online(weights, dtype, options)
    take_step, paid_before = build_step(stage, weights, dtype, options)
    return time_steps(take_step, SHOWN[stage][0], options.steps, paid_before)


def time_steps(
    take_step: Callable[[], tuple[int, Mapping[str, float]]],
    metric: str,
    steps: int,
    paid_before: float,
) -> dict[str, Any]:
    """Take and time the steps.

    paid_before: seconds of work for each step that was done before all of them.
    """
    tokens, seconds, values = [], [], []
    for _ in range(steps):
        started = time.perf_counter()
        count, metrics = take_step()
        seconds.append(time.perf_counter() - started + paid_before)
        tokens.append(count)
        values.append(metrics[metric])
    return summarize_steps(tokens, seconds, values)


def summarize_steps(tokens: list[int], seconds: list[float], values: list[float]) -> dict[str, Any]:
    """Return speed after the first step, the peak of this process, and the metric's first and last two values."""
    return {
        "tokens_per_second": round(sum(tokens[1:]) / sum(seconds[1:]), 1),
        "seconds_per_step": round(sum(seconds[1:]) / len(seconds[1:]), 2),
        "first_step_seconds": round(seconds[0], 1),
        "peak_gb": round(read_peak_mb() / 1e3, 2),
        "first": sum(values[:2]) / 2,
        "last": sum(values[-2:]) / 2,
    }


def read_rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def iter_short(
    rows: list[dict[str, Any]], count: int, tokenizer: Any, *names: str
) -> Iterator[dict[str, Any]]:
    """Yield the first rows whose texts are short enough, prompt and each answer together."""
    for row in rows:
        prompt, *answers = (len(tokenizer(row[name])["input_ids"]) for name in names)
        if prompt + max(answers, default=0) <= MAX_LENGTH - 64:  # the template's tokens come on top
            yield row
            count -= 1
        if not count:
            return


def make_rows(stage: str, options: argparse.Namespace, tokenizer: Any) -> list[dict[str, Any]]:
    """Make the rows of a stage, the same ones in the same order for both sides."""
    if stage in ("reward", "dpo"):
        count = BATCH[stage] * options.steps
        return list(
            iter_short(read_rows(options.pairs), count, tokenizer, "prompt", "chosen", "rejected")
        )
    questions = read_rows(options.questions)
    if stage in ("sft", "sft_micro"):
        rows = iter_short(questions, BATCH["sft"] * options.steps, tokenizer, "question", "answer")
        return [{"prompt": row["question"], "completion": row["answer"]} for row in rows]
    rows = iter_short(questions, PROMPTS * options.steps, tokenizer, "question")
    return [
        {"prompt": f"{row['question']} End with the number.", "final": row["final"]} for row in rows
    ]


def score_answer(text: str, final: str) -> float:
    """Return 1 for the right last number, else a little for a short answer that ends with a number."""
    numbers = re.findall(r"\d+", text)
    ends_with_number = bool(re.search(r"\d\W*$", text))
    return (
        float(bool(numbers) and numbers[-1] == final)
        + 0.3 * ends_with_number
        + 0.2 / (1 + len(text) / 100)
    )


def score_trajectories(trajectories: Any) -> list[float]:
    """Score ours as the peer's."""
    return [score_answer(t.completion, t.row["final"]) for t in trajectories]


# --------------------------------------------------------------------------------------------------------------- ours


def build_step(
    stage: str, weights: str, dtype: str, options: argparse.Namespace
) -> tuple[Callable[[], tuple[int, Mapping[str, float]]], float]:
    """Build a function that takes one step and returns its tokens and metrics; and seconds paid before, a step."""
    import rl_core

    lora = rl_core.LoraSettings(rank=RANK, alpha=2 * RANK) if weights == "lora" else None
    stored = dtype if lora is not None else "float32"
    model = rl_core.ModelSettings(path=find_model_folder(), device="cpu", dtype=stored, lora=lora)
    if stage == "service":
        return build_service_step(weights, dtype, options), 0.0
    policy = rl_core.load_policy(model, seed=0)
    rows = make_rows(stage, options, policy.tokenizer)
    loop: dict[str, Any] = {
        "learning_rate": LEARNING_RATE[weights],
        "warmup_steps": 0,
        "schedule": "constant",
        "autocast": "bfloat16" if dtype == "bfloat16" and lora is None else "none",
    }
    rollouts: dict[str, Any] = {
        **loop,
        "iterations": options.steps,
        "sampling": {"max_completion_tokens": NEW_TOKENS, "slots": PROMPTS * GROUP},
    }
    grouped = {**rollouts, "prompts_per_iteration": PROMPTS, "group_size": GROUP}
    started = time.perf_counter()
    if stage in ("sft", "sft_micro"):
        settings = {**loop, "batch_size": BATCH[stage]}
        if stage == "sft_micro":
            settings["micro_batch_tokens"] = MICRO_BATCH_TOKENS
        trained: Any = rl_core.sft(policy, rows, heldout=0.0, settings=settings)
    elif stage == "reward":
        settings = {**loop, "batch_size": BATCH["reward"], "center_coef": 0.0}
        trained = rl_core.reward_model(model, rows, heldout=0.0, settings=settings)
    elif stage == "dpo":
        trained = rl_core.dpo(
            policy, rows, heldout=0.0, settings={**loop, "batch_size": BATCH["dpo"]}
        )
    elif stage in ("grpo", "ppo"):
        settings = {**grouped, "algorithm": stage} | ({"kl_coef": 0.02} if stage == "ppo" else {})
        train = rl_core.grpo if stage == "grpo" else rl_core.ppo
        trained = train(policy, prompts=rows, reward=score_trajectories, settings=settings)
    elif stage == "distill":
        student = train_student(policy, rows_of_sft=make_rows("sft", options, policy.tokenizer))
        trained = rl_core.distill(student, find_model_folder(), prompts=rows, settings=grouped)
    else:
        recorded: list[int] = []
        trained = build_thoughts(policy, rows, rollouts, recorded)
    trainer = trained.trainer
    built = time.perf_counter()

    def take_step() -> tuple[int, Mapping[str, float]]:
        metrics = trainer.step()
        if stage == "thoughts":
            return recorded[-1], metrics
        if "train/tokens" in metrics and not hasattr(trainer, "groups"):
            return int(metrics["train/tokens"]), metrics
        rolled = [rollout for group in trainer.groups for rollout in group.rollouts]
        return sum(len(r.prompt_ids) + len(r.completion_ids) for r in rolled), metrics

    # DPO's constructor computes the reference's log-probs of all pairs
    return take_step, (built - started) / options.steps if stage == "dpo" else 0.0


def train_student(policy: Any, rows_of_sft: list[dict[str, Any]]) -> Any:
    """Move a policy away from the teacher by SFT on solutions, so that there is something to distil."""
    import rl_core

    settings = {
        "learning_rate": 5e-5 if policy.kind.lora is None else 1e-3,
        "batch_size": 8,
        "epochs": 1,
    }
    rl_core.sft(policy, rows_of_sft, heldout=0.0, settings=settings).run()
    return policy


def build_thoughts(
    policy: Any, rows: list[dict[str, Any]], settings: dict[str, Any], recorded: list[int]
) -> Any:
    """Build the training of thoughts before the answers to the questions.

    recorded: receives the tokens of every iteration's rollouts.
    """
    import rl_core
    from rl_core.api.recipes.thoughts import build_thoughts_recipe
    from rl_core.environments.environment import Environment, Episode, Step
    from rl_core.environments.question_episodes import read_answer
    from rl_core.environments.tools import Toolset
    from rl_core.rollouts.episode_sequence import EpisodeRequest

    class Question(Episode):
        def __init__(self, seed: int, level: str) -> None:
            super().__init__(seed, level)
            self.row = rows[seed % len(rows)]
            self.prompt = f'{self.row["prompt"]} Write that line as "answer NUMBER".'
            self.target = self.row["final"]

        def reset(self) -> list[Any]:
            return [{"role": "user", "content": self.prompt}]

        def act(self, text: str) -> Step:
            answer = read_answer(text)
            right = answer == self.target
            return Step(reward=float(right), terminated=True, answer=answer, success=right)

    class Questions(Environment):
        name, levels = "questions", ("all",)
        tools = Toolset()

        def episode(self, seed: int, level: str) -> Question:
            return Question(seed, level)

    def record(_: int, rollouts: Any) -> None:
        recorded.append(sum(len(r.prompt_ids) + len(r.completion_ids) for r in rollouts))

    heldout = [EpisodeRequest(level="all", seed=number) for number in range(4)]
    values = {
        **settings,
        "episodes_per_iteration": PROMPTS * GROUP,
        "max_thought_tokens": NEW_TOKENS - 8,
    }
    typed = rl_core.ThoughtsSettings(
        **{**values, "sampling": rl_core.SamplingSettings(**values["sampling"])}
    )
    return build_thoughts_recipe(policy, Questions(), typed, 0, heldout=heldout, record=record)


def build_service_step(
    weights: str, dtype: str, options: argparse.Namespace
) -> Callable[[], tuple[int, Mapping[str, float]]]:
    """Build a step of the training service's engine: cross-entropy on solutions, an update, without HTTP."""
    import numpy as np
    from transformers import AutoTokenizer

    from rl_core.service.requests import (
        AdamParameters,
        AdapterConfig,
        CreateModel,
        Datum,
        ForwardBackward,
        OptimStep,
    )
    from rl_core.service.training_engine import TrainingEngine
    from rl_core.settings import ServiceEngineSettings

    base = find_model_folder()
    engine = TrainingEngine(ServiceEngineSettings(bases={"base": base}, device="cpu", dtype=dtype))
    adapter = AdapterConfig(rank=RANK, alpha=2.0 * RANK) if weights == "lora" else None
    engine.create_model(CreateModel(model_id="run", base="base", adapter=adapter))
    tokenizer = AutoTokenizer.from_pretrained(base)
    batches = iter(make_rows("sft", options, tokenizer))

    def take_step() -> tuple[int, Mapping[str, float]]:
        data = []
        for _ in range(BATCH["sft"]):
            row = next(batches)
            prompt = tokenizer.apply_chat_template(
                [{"role": "user", "content": row["prompt"]}],
                add_generation_prompt=True,
                return_dict=False,
            )
            ids = np.array(
                [*prompt, *tokenizer(row["completion"])["input_ids"], tokenizer.eos_token_id]
            )
            weights_S = (np.arange(1, len(ids)) >= len(prompt)).astype(np.float32)
            data.append(Datum(ids[:-1], {"target_tokens": ids[1:], "weights": weights_S}))
        request = ForwardBackward(model_id="run", data=tuple(data), loss_fn="cross_entropy")
        result = engine.forward_backward([request])[0]
        update = engine.optim_steps(
            [OptimStep(model_id="run", adam=AdamParameters(learning_rate=LEARNING_RATE[weights]))]
        )[0]
        for outcome in (result, update):
            if isinstance(outcome, Exception):
                raise outcome
        learned = sum(float(datum.inputs["weights"].sum()) for datum in data)
        return sum(len(datum.tokens) for datum in data), {
            "loss": result.metrics["loss:sum"] / learned
        }

    return take_step


ONLINE = """
name: measured
output: {output}
environment: {{name: pixel_grid}}
model: {{path: {model}, device: cpu}}
serving: {{model: {model}, name: measured, threads: 1, port: {port}}}
stages: {{evaluate: {{}}}}
online:
  environment: {{name: chat}}
  model: {{device: cpu, dtype: {dtype}, lora: {lora}}}
  service: {{run_gate: false, standby: false}}
  labels: {{min_confidence: 0.1, min_votes: 1}}
  update: {{autocast: {autocast}, learning_rate: {rate}, first_update: 8}}
"""


def run_online(weights: str, dtype: str, options: argparse.Namespace) -> dict[str, Any]:
    """Serve the model, answer questions by vote, and wait for updates of the worker.

    Tokens/s are those learned in an update; memory is the sum of the peaks of server and worker.
    """
    import psutil

    folder = options.output.resolve() / f"online-{weights}-{dtype}"
    config = folder.with_suffix(".yaml")
    with socket.socket() as chosen:
        chosen.bind(("127.0.0.1", 0))
        port = chosen.getsockname()[1]
    stored = dtype if weights == "lora" else "float32"
    config.write_text(
        ONLINE.format(
            output=folder,
            model=find_model_folder(),
            port=port,
            dtype=stored,
            lora=f"{{rank: {RANK}, alpha: {2 * RANK}}}" if weights == "lora" else "null",
            autocast="bfloat16" if dtype != stored else "none",
            rate=2e-5,
        )
    )
    command = [sys.executable, "-m", "posttrain.cli.main", "serve", str(config), "--learn"]
    with folder.with_suffix(".log").open("w") as log:
        server = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    process = psutil.Process(server.pid)
    try:
        wait_until(lambda: is_ready(port), server)
        key = (folder / "serving" / "token").read_text().strip()
        records = folder / "measured/online"

        def read_updates() -> list[dict[str, Any]]:
            return [
                update
                for path in records.glob("*/update_contribution.jsonl")
                for update in read_rows(path)
            ]

        for row in read_rows(options.questions)[:64]:
            ask_by_vote(port, key, row["question"])
            if len(read_updates()) >= ONLINE_UPDATES:
                break
        wait_until(lambda: len(read_updates()) >= ONLINE_UPDATES, server)
        updates = read_updates()
        processes = [process, *process.children(recursive=True)]
        peak = sum(read_peak_mb_of(child.pid) for child in processes) / 1e3
    finally:
        server.terminate()
        server.wait(60)
    seconds = [b["time"] - a["time"] for a, b in itertools.pairwise(updates)]
    tokens = [update["num_tokens"] for update in updates[1:]]
    kls = [update["kl_control"]["mean_kl"] for update in updates]
    return {
        "tokens_per_second": round(sum(tokens) / sum(seconds), 1),
        "seconds_per_step": round(sum(seconds) / len(seconds), 2),
        "first_step_seconds": None,
        "peak_gb": round(peak, 2),
        "first": kls[0],
        "last": kls[-1],
    }


def is_ready(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=5) as reply:
            return bool(reply.status == 200)
    except OSError:
        return False


def ask_by_vote(port: int, key: str, question: str) -> None:
    body = {
        "model": "measured",
        "messages": [{"role": "user", "content": f"{question} Answer with the number alone."}],
        "max_tokens": NEW_TOKENS,
        "temperature": 1.0,
        "vote": True,
    }
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json", "Authorization": f"Bearer {key}"},
    )
    urllib.request.urlopen(request, timeout=300).read()


def wait_until(
    is_true: Callable[[], bool], server: subprocess.Popen[bytes], seconds: float = 600
) -> None:
    """Wait. Raises: RuntimeError if the server ends or the time is over."""
    deadline = time.monotonic() + seconds
    while not is_true():
        if server.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(
                "the server ended or made no progress; see its log in the output folder"
            )
        time.sleep(0.5)


def read_peak_mb_of(pid: int) -> float:
    """Return the highest resident memory of a process, MB."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024 / 1e6


# -------------------------------------------------------------------------------------------------------------- table


def format_table(output: Path, options: argparse.Namespace) -> str:
    """Format the finished cases as a Markdown table, TRL's figures after ours."""
    lines = [
        f"{describe_processor()}; {options.threads} threads; commit {read_commit()}; {options.shape or MODEL}; "
        f"{options.steps} steps, the first not timed",
        "",
        "| stage | weights | dtype | tokens/s | s a step | peak GB | first, last steps | TRL: tokens/s, GB, metric |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for case in options.cases:
        ours, theirs = (output / "cases" / f"{case}-{side}.json" for side in ("ours", "trl"))
        if not ours.exists():
            continue
        stage, weights, dtype = case.split("-")
        row = json.loads(ours.read_text())
        peer = json.loads(theirs.read_text()) if theirs.exists() else None
        change = f"{SHOWN[stage][1]} {row['first']:.3g} -> {row['last']:.3g}"
        other = (
            f"{peer['tokens_per_second']:.0f}, {peer['peak_gb']:.1f}, {peer['first']:.3g} -> {peer['last']:.3g}"
            if peer
            else ""
        )
        lines.append(
            f"| {stage} | {weights} | {dtype} | {row['tokens_per_second']:.0f} | {row['seconds_per_step']:.1f} | "
            f"{row['peak_gb']:.1f} | {change} | {other} |"
        )
    return "\n".join(lines) + "\n"


# ---------------------------------------------------------------------------------------------------------------- TRL


def run_trl(stage: str, weights: str, dtype: str, options: argparse.Namespace) -> dict[str, Any]:
    """Take the same steps with TRL's trainer: bfloat16 = its mixed precision."""
    import tempfile

    import datasets
    import torch
    import transformers
    import trl
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

    transformers.utils.logging.set_verbosity_error()
    datasets.disable_progress_bars()
    folder = find_model_folder()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows = make_rows(stage, options, tokenizer)
    lora = None
    if weights == "lora":
        task = "SEQ_CLS" if stage == "reward" else "CAUSAL_LM"
        lora = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear", task_type=task)
    common = {
        "per_device_train_batch_size": BATCH.get(stage, PROMPTS * GROUP),
        "learning_rate": LEARNING_RATE[weights],
        "lr_scheduler_type": "constant",
        "weight_decay": 0.0,
        "logging_strategy": "steps",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "bf16": dtype == "bfloat16",
        "use_cpu": True,
        "gradient_checkpointing": False,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "max_steps": options.steps,
        "seed": 0,
    }
    chat = lambda text, role: [{"role": role, "content": text}]  # noqa: E731
    times, tokens, values = [], [], []

    class Clock(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            times.append(time.perf_counter())

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            if logs and (key := "reward" if stage == "grpo" else "loss") in logs:
                values.append(float(logs[key]))

    with tempfile.TemporaryDirectory() as output:
        if stage == "reward":
            model: Any = AutoModelForSequenceClassification.from_pretrained(
                folder, num_labels=1, dtype=torch.float32
            )
            model.config.pad_token_id = tokenizer.pad_token_id
        else:
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        if stage == "sft":
            data = [
                {
                    "prompt": chat(row["prompt"], "user"),
                    "completion": chat(row["completion"], "assistant"),
                }
                for row in rows
            ]
            trainer: Any = trl.SFTTrainer(
                model=model,
                args=trl.SFTConfig(output_dir=output, max_length=None, **common),
                train_dataset=datasets.Dataset.from_list(data),
                processing_class=tokenizer,
                peft_config=lora,
            )
        elif stage in ("reward", "dpo"):
            data = [
                {
                    "prompt": chat(row["prompt"], "user"),
                    "chosen": chat(row["chosen"], "assistant"),
                    "rejected": chat(row["rejected"], "assistant"),
                }
                for row in rows
            ]
            kind, config = (
                (trl.RewardTrainer, trl.RewardConfig)
                if stage == "reward"
                else (trl.DPOTrainer, trl.DPOConfig)
            )
            trainer = kind(
                model=model,
                args=config(output_dir=output, max_length=None, **common),
                train_dataset=datasets.Dataset.from_list(data),
                processing_class=tokenizer,
                peft_config=lora,
            )
        else:

            def reward(completions: Any, final: Any, **_: Any) -> list[float]:
                texts = [completion[0]["content"] for completion in completions]
                return [score_answer(text, right) for text, right in zip(texts, final, strict=True)]

            trainer = trl.GRPOTrainer(
                model=model,
                reward_funcs=reward,
                args=trl.GRPOConfig(
                    output_dir=output,
                    num_generations=GROUP,
                    max_completion_length=NEW_TOKENS,
                    temperature=1.0,
                    beta=0.0,
                    **common,
                ),
                train_dataset=datasets.Dataset.from_list(
                    [{"prompt": chat(row["prompt"], "user"), "final": row["final"]} for row in rows]
                ),
                processing_class=tokenizer,
                peft_config=lora,
            )
        inner = trainer.compute_loss

        def count_tokens(model: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
            masks = (
                ("prompt_mask", "completion_mask")
                if "prompt_mask" in batch
                else ("attention_mask",)
            )
            tokens.append(sum(int(batch[name].sum()) for name in masks))
            return inner(model, batch, *args, **kwargs)

        trainer.compute_loss = count_tokens
        trainer.add_callback(Clock())
        started = time.perf_counter()
        trainer.train()
    seconds = [b - a for a, b in zip([started, *times], times, strict=False)]
    return summarize_steps(tokens, seconds, values)


def prepare_model(options: argparse.Namespace) -> str:
    """Return the folder of the model; make it if it has random weights."""
    if options.shape is None:
        return find_model_folder()
    folder = options.output.resolve() / "model"
    if folder.is_dir():
        return str(folder)
    import torch
    from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(find_model_folder())
    width, layers, heads, kv_heads, mlp_width, vocabulary = SHAPES[options.shape]
    config = Qwen2Config(
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=mlp_width,
        vocab_size=vocabulary,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(0)
    part = folder.with_name("model.part")
    Qwen2ForCausalLM(config).save_pretrained(part)
    tokenizer.save_pretrained(part)
    part.rename(folder)
    return str(folder)


def find_model_folder() -> str:
    """Return the folder of the model. A worker reads it from its environment: the peer's Python lacks this project."""
    if path := os.environ.get("REAL_SIZES_MODEL"):
        return path
    from rl_core.models.named_models import resolve_local_model

    return str(resolve_local_model(MODEL))


if __name__ == "__main__":
    sys.exit(main())
