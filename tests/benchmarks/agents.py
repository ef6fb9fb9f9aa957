"""What an agent learns that is trained unchanged: seeds, success on held-out tasks before and after.

    python tests/benchmarks/agents.py OUTPUT [--seeds 0 1 2] [--iterations 100] [--program] [--credit states]

The tasks are those of examples/train_agent.py. The agent is a Python function that does what the example's program
does; with --program, the program itself, once for each episode. With --credit each turn has an advantage. Every seed is
one JSON line in OUTPUT/results.jsonl; what is there is not run again. Then the table, with Wilson's 95% intervals.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import time
from pathlib import Path

import rl_core
from rl_core.settings import EvaluationSettings

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "train_agent.py"


def load_example():
    spec = importlib.util.spec_from_file_location("train_agent", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def build_environment(example, as_program):
    """Build the example's environment, with its program or with the same agent as a function."""
    if as_program:
        return example.build_environment()

    def run(task, client):
        messages = [{"role": "user", "content": task["question"]}]
        while True:
            message = client.chat(messages, tools=[{"type": "function", "function": example.TOOL}])
            messages.append(message)
            if not message.get("tool_calls"):
                return message["content"]
            for call in message["tool_calls"]:
                name = json.loads(call["function"]["arguments"])["name"]
                result = task["table"].get(name, "unknown")
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})

    def score(task, calls, result):
        return float((result.value or "").strip() == task["answer"])

    return rl_core.Agent(
        run,
        example.build_tasks(),
        reward=score,
        private=["answer"],
        demonstrations="messages",
        heldout=0.1,
    )


def evaluate_model(environment, folder):
    sampling = rl_core.SamplingSettings(temperature=1.0, max_completion_tokens=128, max_turns=4)
    settings = EvaluationSettings(episodes=100, samples=2, sampling=sampling)
    return rl_core.evaluate(folder, environment=environment, settings=settings, seed=0)


def run_seed(folder, seed, iterations, as_program, credit=None):
    example = load_example()
    environment = build_environment(example, as_program)
    start = folder.parent / "sft"  # all seeds begin with one model
    if not start.is_dir():
        example.imitate(environment, start)
    before = evaluate_model(environment, start)
    turn_credit = rl_core.TurnCreditSettings(compare=credit) if credit else None
    settings = rl_core.PolicySettings(
        turn_credit=turn_credit,
        iterations=iterations,
        prompts_per_iteration=4,
        group_size=8,
        learning_rate=5e-4,
        warmup_steps=0,
        eval_every=0,
        patience=None,
        sampling=rl_core.SamplingSettings(max_completion_tokens=128, max_turns=4),
    )
    began = time.perf_counter()
    training = rl_core.grpo(start, environment=environment, settings=settings, seed=seed)
    training.run()
    seconds = time.perf_counter() - began
    training.save(folder / "grpo")
    after = evaluate_model(environment, folder / "grpo")
    metrics = training.metrics()
    return {
        "seed": seed,
        "iterations": iterations,
        "agent": "program" if as_program else "function",
        "credit": credit,
        "before": [before.success_rate, *before.interval],
        "after": [after.success_rate, *after.interval],
        "calls_before": before.turns_mean,
        "calls_after": after.turns_mean,
        "failed": float(metrics["train/failed_episodes"].iloc[-1]),
        "rollout_seconds": float(metrics["perf/rollout_seconds"].mean()),
        "seconds": seconds,
        "success_by_iteration": [round(x, 4) for x in metrics["train/success_rate"]],
    }


def format_rate(values):
    rate, low, high = (100 * value for value in values)
    return f"{rate:.1f}% [{low:.1f}, {high:.1f}]"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("output", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--iterations", type=int, default=100)
    parser.add_argument("--program", action="store_true")
    parser.add_argument("--credit", choices=("states", "turns", "group"))
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    path = options.output / "results.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    for seed in options.seeds:
        if all(row["seed"] != seed for row in rows):
            folder = options.output / f"seed{seed}"
            rows.append(run_seed(folder, seed, options.iterations, options.program, options.credit))
            with path.open("a") as file:
                file.write(json.dumps(rows[-1]) + "\n")
    print("| seed | before [95%] | after [95%] | calls an episode | seconds of GRPO |")
    print("|---|---|---|---|---|")
    for row in rows:
        calls = f"{row['calls_before']:.2f} to {row['calls_after']:.2f}"
        before, after = format_rate(row["before"]), format_rate(row["after"])
        print(f"| {row['seed']} | {before} | {after} | {calls} | {row['seconds']:.0f} |")


if __name__ == "__main__":
    main()
