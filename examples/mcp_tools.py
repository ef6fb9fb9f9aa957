"""Tools of an MCP server: the policy queries your server before it answers. Needs the extra `mcp`.

Each episode has its own session with the server, from its first call to its end. In a configuration:

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


def run_server():
    """Run the server: any program that speaks MCP on its standard streams; `url:` names one behind HTTP."""
    from mcp.server.mcpserver import MCPServer

    server = MCPServer("shop")

    @server.tool()
    def stock(item: str) -> str:
        """Return how many of an item there are."""
        return str(STOCK[item])

    server.run("stdio")


def build_environment(path):
    """Build the environment: questions of a file, the server's tools, and the correct answers."""
    rows = [{"prompt": f"how many {item}?", "answer": str(count)} for item, count in STOCK.items()]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = [sys.executable, str(Path(__file__).resolve()), "serve"]
    variables = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}  # all that the server sees
    servers = {"shop": {"command": command, "env": variables}}
    options = {"path": str(path), "heldout": 0, "verifier": "exact", "mcp": servers}
    return rl_core.make_environment("prompts", options)


def iter_demonstrations(environment):
    """Yield demonstrations for SFT: the call, the server's response, the answer."""
    for seed in environment.seeds("train"):
        episode = environment.episode(seed, "all")
        messages = episode.reset()
        item = messages[-1]["content"].removeprefix("how many ").removesuffix("?")
        call = f'<tool_call>{{"name": "stock", "arguments": {{"item": "{item}"}}}}</tool_call>'
        messages += [{"role": "assistant", "content": call}, *episode.step(call).messages]
        messages += [{"role": "assistant", "content": episode.target}]
        yield {"messages": messages}
        episode.close()


def main(output="outputs/mcp_tools"):
    output = Path(output)
    output.mkdir(parents=True, exist_ok=True)
    environment = build_environment(output / "questions.jsonl")
    rows = list(iter_demonstrations(environment))
    settings = rl_core.ModelSettings(preset="nano", vocab_size=500, context=512)
    model = rl_core.create_policy([m["content"] for row in rows for m in row["messages"]], settings)
    supervised = rl_core.SFTSettings(epochs=150, batch_size=6, learning_rate=3e-3, eval_every=0)
    trainer = rl_core.sft(model, rows, heldout=0, settings=supervised)
    trainer.run()
    trainer.save(output / "model")
    sampling = rl_core.SamplingSettings(temperature=0.5, max_completion_tokens=160, max_turns=4)
    # The demonstrations already teach the right answers, so equal rewards alone would teach nothing more.
    settings = rl_core.PolicySettings(
        iterations=2, prompts_per_iteration=2, group_size=2, entropy_coef=0.01, sampling=sampling
    )
    trainer = rl_core.grpo(output / "model", environment=environment, settings=settings)
    trainer.run()
    metrics = trainer.metrics()
    print(metrics[["train/success_rate", "tool/calls"]])
    return metrics


if __name__ == "__main__":
    run_server() if sys.argv[1:] == ["serve"] else main()
