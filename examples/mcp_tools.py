"""Tools of an MCP server: the policy asks a server of yours before it answers. Needs the extra `mcp`.

Each episode has a session of its own with the server, begun with its first call and ended with it. In a configuration:

    environment:
      name: prompts
      options:
        path: questions.jsonl
        verifier: exact
        mcp: {shop: {command: [python, mcp_tools.py, serve]}}
"""

import json
import os
import sys
from pathlib import Path

import rl_core

STOCK = {"apples": 3, "pears": 7, "plums": 2, "figs": 9, "limes": 4, "kiwis": 8}


def serve():
    """The server: any program that speaks MCP on its standard streams; `url:` names one behind HTTP."""
    from mcp.server.mcpserver import MCPServer

    server = MCPServer("shop")

    @server.tool()
    def stock(item: str) -> str:
        """How many of an item there are."""
        return str(STOCK[item])

    server.run("stdio")


def shop(path):
    """The environment: questions of a file, the server's tools, and the answer that is right."""
    rows = [{"prompt": f"how many {item}?", "answer": str(count)} for item, count in STOCK.items()]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = [sys.executable, str(Path(__file__).resolve()), "serve"]
    found = {
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path))
    }  # a server sees these variables alone
    return rl_core.make_environment(
        "prompts",
        {
            "path": str(path),
            "heldout": 0,
            "verifier": "exact",
            "mcp": {"shop": {"command": command, "env": found}},
        },
    )


def demonstrations(environment):
    """What SFT imitates: the call, what the server says, the answer."""
    for seed in environment.seeds("train"):
        episode = environment.episode(seed, "all")
        messages = episode.reset()
        item = messages[-1]["content"].removeprefix("how many ").removesuffix("?")
        call = f'<tool_call>{{"name": "stock", "arguments": {{"item": "{item}"}}}}</tool_call>'
        step = episode.step(call)
        answer = [{"role": "assistant", "content": episode.target}]
        yield {
            "messages": [*messages, {"role": "assistant", "content": call}, *step.messages, *answer]
        }
        episode.close()


def main(output="outputs/mcp_tools"):
    output = Path(output)
    output.mkdir(parents=True, exist_ok=True)
    environment = shop(output / "questions.jsonl")
    rows = list(demonstrations(environment))
    settings = rl_core.ModelSettings(preset="nano", vocab_size=500, context=512)
    model = rl_core.create_policy([m["content"] for row in rows for m in row["messages"]], settings)
    supervised = rl_core.SFTSettings(epochs=150, batch_size=6, learning_rate=3e-3, eval_every=0)
    trainer = rl_core.sft(model, rows, heldout=0, settings=supervised)
    trainer.run()
    trainer.save(output / "model")
    sampling = rl_core.SamplingSettings(temperature=0.5, max_completion_tokens=160, max_turns=4)
    tuned = rl_core.grpo(
        model=output / "model",
        environment=environment,
        settings=rl_core.PolicySettings(
            iterations=2, prompts_per_iteration=2, group_size=2, sampling=sampling
        ),
    )
    tuned.run()
    metrics = tuned.metrics()
    print(metrics[["train/success_rate", "tool/calls"]])
    return metrics


if __name__ == "__main__":
    serve() if sys.argv[1:] == ["serve"] else main()
