"""Train your agent: it runs unchanged, and the policy answers its chat requests.

`run_agent` is a ten-line agent with one tool. It asks whatever OPENAI_BASE_URL names, here with the standard library;
any OpenAI client works. To answer right, it has to look up two names in a row: the friend, and then the friend's code.

    python examples/train_agent.py          # imitate a careless agent, then learn from rewards
    posttrain run configs/agent.yaml        # the same with the whole pipeline
"""

import json
import os
import random
import string
import sys
import urllib.request
from pathlib import Path

TOOL = {"name": "lookup", "parameters": {"type": "object", "required": ["name"]}}
TOOL["parameters"]["properties"] = {"name": {"type": "string"}}


def run_agent():
    task = json.loads(os.environ["TASK"])
    messages = [{"role": "user", "content": task["question"]}]
    while True:
        message = ask(messages)
        messages.append(message)
        if not message.get("tool_calls"):
            break
        for call in message["tool_calls"]:
            name = json.loads(call["function"]["arguments"])["name"]
            result = task["table"].get(name, "unknown")
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
    print(message["content"])


def ask(messages):
    """Return the policy's message: what `client.chat.completions.create` of the package openai does."""
    tools = [{"type": "function", "function": TOOL}]
    body = json.dumps({"model": "policy", "messages": messages, "tools": tools}).encode()
    request = urllib.request.Request(f"{os.environ['OPENAI_BASE_URL']}/chat/completions", body)
    request.add_header("Authorization", f"Bearer {os.environ['OPENAI_API_KEY']}")
    with urllib.request.urlopen(request) as response:
        return json.load(response)["choices"][0]["message"]


def score(task, calls, result):
    """Reward the right code at the end of what the agent printed."""
    return float(result.stdout.strip() == task["answer"])


def build_tasks(count=16000, seed=0):
    """Build tasks: each has another table, and the messages of an agent to imitate, which is often careless."""
    draw = random.Random(seed)
    tasks = []
    for _ in range(count):
        names = draw.sample(string.ascii_lowercase, 6)
        friends = dict(zip(names, [*names[1:], names[0]], strict=True))
        codes = {name: str(draw.randrange(10)) for name in names}
        table = {name: f"friend {friends[name]} code {codes[name]}" for name in names}
        first = draw.choice(names)
        question, answer = f"code of the friend of {first}", codes[friends[first]]
        messages = [{"role": "user", "content": question}]
        for name in (first, friends[first])[: draw.choice((1, 1, 2))]:  # often one lookup only
            messages += [
                {"role": "assistant", "content": f"lookup {name}"},
                {"role": "tool", "content": table[name]},
            ]
        messages.append({"role": "assistant", "content": messages[-1]["content"][-1]})
        tasks.append({"question": question, "table": table, "answer": answer, "messages": messages})
    return tasks


def build_environment(count=16000):
    """Build the environment: this file is the agent's program."""
    import rl_core

    options = {
        "command": f"python {Path(__file__).resolve()} agent",
        "tasks": build_tasks(count),
        "reward": score,
        "private": ["answer"],
        "demonstrations": "messages",
        "heldout": 0.1,
    }
    return rl_core.make_environment("agent", options)


def imitate(environment, output, epochs=2, seed=0):
    """Write a model that imitates the messages of the training tasks."""
    import rl_core

    seeds = environment.seeds("train")
    rows = [{"messages": environment.demonstration(number, "all").messages} for number in seeds]
    texts = [message["content"] for row in rows for message in row["messages"]]
    settings = rl_core.ModelSettings(preset="tiny", vocab_size=300, context=256)
    model = rl_core.create_policy(texts, settings, seed=seed)
    settings = rl_core.SFTSettings(
        epochs=epochs,
        batch_size=16,
        learning_rate=4e-3,
        warmup_steps=20,
        schedule="cosine",
        eval_every=0,
    )
    trainer = rl_core.sft(model, rows, heldout=0, settings=settings, seed=seed)
    trainer.run()
    trainer.save(output)


def main(output="outputs/train_agent", iterations=100, epochs=2, count=16000, seed=0):
    import rl_core

    environment, output = build_environment(count), Path(output)
    imitate(environment, output / "model", epochs, seed)
    settings = rl_core.PolicySettings(
        iterations=iterations,
        prompts_per_iteration=4,
        group_size=8,
        learning_rate=5e-4,
        warmup_steps=0,
        sampling=rl_core.SamplingSettings(max_completion_tokens=128, max_turns=4),
    )
    trainer = rl_core.grpo(output / "model", environment=environment, settings=settings, seed=seed)
    trainer.run()
    metrics = trainer.metrics()
    print(metrics["train/success_rate"])
    return metrics


if __name__ == "__main__":
    run_agent() if "agent" in sys.argv else main()
