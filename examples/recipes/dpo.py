"""DPO on preference pairs: right answers become likelier than wrong ones, without a reward model."""

import random
from pathlib import Path

from sums import (
    FOLDER,
    choose_wrong_answer,
    list_sums,
    make_base_model,
    measure_success,
    write_rows,
)

import rl_core


def build_pairs(pairs_per_question=8):
    """Return rows of a prompt, a right answer and a wrong one."""
    rng = random.Random(1)
    return [
        {
            "prompt": row["prompt"],
            "chosen": row["answer"],
            "rejected": choose_wrong_answer(row, rng),
        }
        for row in list_sums()
        for _ in range(pairs_per_question)
    ]


def main(output=FOLDER / "dpo", epochs=6):
    base = make_base_model()
    pairs = write_rows(Path(output) / "pairs.jsonl", build_pairs())
    trainer = rl_core.dpo(
        str(base),
        pairs,
        heldout=0.1,
        settings=rl_core.PreferenceSettings(
            epochs=epochs, batch_size=32, learning_rate=1e-4, beta=0.1, sft_coef=0.2, eval_every=10
        ),
        output=output,
    )
    trainer.run()
    trainer.save(Path(output) / "model")
    before, after = measure_success(base), measure_success(trainer.policy)
    print(f"right answers: {before:.1%} before, {after:.1%} after")
    return trainer.metrics()


if __name__ == "__main__":
    main()
