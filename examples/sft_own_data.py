"""Supervised fine-tuning on your file: one JSON object per line, {"prompt", "completion"} or {"messages"}."""

import json
from pathlib import Path

import rl_core


def write_rows(path):
    """Write a file like yours."""
    rows = [
        {"prompt": f"is {n} small ?", "completion": "yes" if n < 50 else "no"}
        for n in range(10, 100)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def main(output="outputs/sft_own_data"):
    output = Path(output)
    output.mkdir(parents=True, exist_ok=True)
    data = output / "rows.jsonl"
    write_rows(data)
    texts = [f"{row['prompt']} {row['completion']}" for row in map(json.loads, data.open())]
    # Or pass "path-or-hub-name", or ModelSettings(path=..., lora=LoraSettings()), as the model.
    model = rl_core.create_policy(texts)
    trainer = rl_core.sft(
        model,
        data,
        heldout=0.1,  # share of the prompts on which the loss is evaluated
        settings=rl_core.SFTSettings(epochs=15, batch_size=16, learning_rate=3e-3, eval_every=15),
        tracker=["terminal", f"csv:{output / 'metrics.csv'}"],
        output=output,  # metrics and checkpoints; a stopped run resumes here
    )
    trainer.run()
    model_folder = trainer.save(output / "model")
    metrics = rl_core.read_metrics(output)  # a pandas DataFrame, one row per step
    print(metrics[["train/loss", "eval/loss"]].dropna().round(3))
    greedy = rl_core.SamplingSettings(temperature=0.0, max_completion_tokens=8)
    prompts = ["is 17 small ?", "is 83 small ?"]
    completions = rl_core.generate(model_folder, prompts, sampling=greedy)
    for prompt, texts in zip(prompts, completions, strict=True):
        print(f"{prompt} {texts[0]}")
    return metrics


if __name__ == "__main__":
    main()
