"""SFT of a chat model with LoRA: it learns to answer in a sentence when the system message asks for one."""

from pathlib import Path

from sums import FOLDER, GREEDY, list_sums, make_base_model, write_rows

import rl_core

SYSTEM = "answer in a sentence"


def build_conversations():
    """Return one conversation for each sum, in the format `messages`."""
    return [
        {
            "messages": [
                {"role": "system", "content": SYSTEM},
                {"role": "user", "content": row["prompt"]},
                {"role": "assistant", "content": f"the sum is {row['answer']}"},
            ]
        }
        for row in list_sums()
    ]


def main(output=FOLDER / "sft_lora", epochs=40):
    base = make_base_model()
    data = write_rows(Path(output) / "chat.jsonl", build_conversations())
    trainer = rl_core.sft(
        {"path": str(base), "lora": {"rank": 16, "alpha": 32.0}},
        data,
        heldout=0.1,  # share of the prompts whose loss is evaluated and never trained on
        settings=rl_core.SFTSettings(
            epochs=epochs, batch_size=16, learning_rate=5e-3, schedule="cosine", eval_every=20
        ),
        output=output,
    )
    trainer.run()
    trainer.save(Path(output) / "model")  # merged model, and the adapter next to it
    prompts = ["3 + 4 = ?", "6 + 6 = ?"]
    answers = rl_core.generate(Path(output) / "model", prompts, sampling=GREEDY, system=SYSTEM)
    for prompt, texts in zip(prompts, answers, strict=True):
        print(f"{prompt} {texts[0]}")
    return trainer.metrics()


if __name__ == "__main__":
    main()
