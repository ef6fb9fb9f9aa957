"""Load of a server that learns: answers and tokens a second, latencies, overload, with and without learning.

    python tests/benchmarks/online_load.py --output DIR [--model FOLDER] [--seconds 20] [--clients 1 8 64] [--peer]

The official client (package openai; httpx without it) and the offline engine are those of serving.py. Learning: one
update every eight records, as by default, from consensus, with the worker at its default priority.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import serving

CONFIG = """
name: measured
output: {output}
environment: {{name: pixel_grid}}
model: {{path: {model}, device: cpu}}
serving: {{model: {model}, name: measured, threads: {threads}}}
stages: {{evaluate: {{}}}}
online:
  environment: {{name: chat}}
  service: {{run_gate: false}}
  labels: {{min_confidence: 0.2, min_votes: 1}}
"""


def measure_server(
    config: Path, output: Path, port: int, options: Any, *, learns: bool
) -> dict[str, Any]:
    """Measure one server under rising load, then under too much of it."""
    command = [
        sys.executable,
        "-m",
        "posttrain.cli.main",
        "serve",
        str(config),
        "--port",
        str(port),
    ]
    command += ["--learn"] if learns else []
    url, is_official = f"http://127.0.0.1:{port}", find_spec("openai") is not None
    results: dict[str, Any] = {}
    log = output / f"serve-{'learning' if learns else 'alone'}.log"
    with serving.run_process(command, options.threads, log, f"{url}/readyz", {}):
        token = (output / "out" / "serving" / "token").read_text().strip()
        if learns:
            time.sleep(
                options.settle
            )  # worker and spare load their libraries, which is no learning
        for clients in [*options.clients, options.crowd]:
            name = "overload" if clients == options.crowd else str(clients)
            results[name] = serving.measure_load(
                f"{url}/v1",
                token,
                "measured",
                clients,
                options.tokens,
                options.seconds,
                is_official,
            )
            print("learning" if learns else "alone", name, results[name], flush=True)
    for path in output.glob("out/measured/online/*/worker.json"):
        results["updates"] = json.loads(path.read_text())["online/updates"]
    return results


def compute_shares(results: dict[str, Any]) -> dict[str, Any]:
    """Compute tokens a second as a share of the offline engine's, and the cost of learning."""
    rows = {}
    for clients, offline in results["offline"].items():
        alone, learning = results["alone"][str(clients)], results["learning"][str(clients)]
        rows[str(clients)] = {
            "share_of_offline": alone["tokens_per_second"] / offline,
            "p99_beside_learning": learning["p99"] / alone["p99"]
            if alone["p99"] and learning["p99"]
            else None,
        }
    statuses = {
        int(code)
        for part in ("alone", "learning")
        for code in results[part]["overload"]["statuses"]
    }
    return {
        **rows,
        "overload_statuses": sorted(statuses),
        "only_429": 429 in statuses and statuses <= {200, 429},
    }


def main() -> None:
    """Measure, print, and write load.json."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument(
        "--model", type=Path, help="a model folder; default: random weights of the preset small"
    )
    parser.add_argument("--preset", default="small")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument(
        "--settle", type=float, default=40.0, help="seconds before the load on a server that learns"
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--port", type=int, default=18755, help="and the two next ones")
    parser.add_argument("--clients", type=int, nargs="*", default=[1, 8, 64])
    parser.add_argument("--crowd", type=int, default=400, help="clients of the overload")
    parser.add_argument("--peer", action="store_true", help="transformers serve as well")
    parser.add_argument("--peer-option", action="append", default=[], help="of transformers serve")
    options = parser.parse_args()
    output = options.output.resolve()
    output.mkdir(parents=True, exist_ok=True)
    model = (
        options.model or serving.make_model(output / f"model-{options.preset}", options.preset)
    ).resolve()
    config = output / "learn.yaml"
    config.write_text(CONFIG.format(output=output / "out", model=model, threads=options.threads))
    results: dict[str, Any] = {
        "machine": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "threads": options.threads,
        "tokens": options.tokens,
        "load": os.getloadavg(),
        "client": "openai" if find_spec("openai") else "httpx",
    }
    results["offline"] = serving.measure_offline(
        model, options.clients, options.tokens, options.threads
    )
    results["alone"] = measure_server(config, output, options.port, options, learns=False)
    results["learning"] = measure_server(config, output, options.port + 1, options, learns=True)
    if options.peer:
        options.official = find_spec("openai") is not None
        results["peer"] = serving.measure_peer(
            model, output, options.port + 2, options.threads, options.clients, options
        )
    results |= {"load_after": os.getloadavg(), "shares": compute_shares(results)}
    (output / "load.json").write_text(json.dumps(results, indent=1))
    print(json.dumps(results["shares"], indent=1))


if __name__ == "__main__":
    main()
