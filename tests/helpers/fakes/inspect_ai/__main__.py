"""Command `eval FILE@TASK`: the file's function returns rows of (question, answer); the server is asked over HTTP."""

import argparse
import json
import os
import runpy
import urllib.request
from pathlib import Path


def ask(question):
    """Return the served model's answer. Proxies of the environment count, as for other programs."""
    body = {
        "model": served,
        "messages": [{"role": "user", "content": question}],
        "max_tokens": 8,
        "temperature": 0,
    }
    request = urllib.request.Request(
        os.environ["POSTTRAIN_BASE_URL"] + "/chat/completions", json.dumps(body).encode()
    )
    request.add_header("Content-Type", "application/json")
    request.add_header("Authorization", f"Bearer {os.environ['POSTTRAIN_API_KEY']}")
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]


parser = argparse.ArgumentParser()
parser.add_argument("command")
parser.add_argument("target")
parser.add_argument("--log-dir")
parser.add_argument("--limit", type=int)
parser.add_argument("--model")
arguments, _ = parser.parse_known_args()
served = arguments.model.removeprefix("openai-api/posttrain/")
file, _, task = arguments.target.rpartition("@")
rows = runpy.run_path(file)[task]()[: arguments.limit]
samples = []
for number, (question, answer) in enumerate(rows):
    completion = ask(question)
    grade = "C" if completion == answer else "I"
    samples.append(
        {
            "id": number,
            "epoch": 1,
            "input": question,
            "target": answer,
            "output": {"completion": completion},
            "scores": {"exact": {"value": grade, "answer": completion}},
            "events": [{"timestamp": "now"}],
        }
    )
mean = sum(sample["scores"]["exact"]["value"] == "C" for sample in samples) / len(samples)
score = {
    "name": "exact",
    "scorer": "exact",
    "metrics": {"accuracy": {"value": mean}, "stderr": {"value": 0.1}},
}
log = {
    "status": "success",
    "eval": {"task": task, "task_version": 2, "packages": {"inspect_ai": "0.3-stand-in"}},
    "results": {"scores": [score]},
    "samples": samples,
}
Path(arguments.log_dir, "log.json").write_text(json.dumps(log))
