"""RLHF: a reward model from preference pairs, then PPO against its score, held near the start by a KL term."""

from pathlib import Path

from dpo import build_pairs
from sums import FOLDER, list_sums, make_base_model, measure_success, write_rows

import rl_core


def main(output=FOLDER / "rlhf", epochs=20, iterations=60):
    base, output = make_base_model(), Path(output)
    pairs = write_rows(output / "pairs.jsonl", build_pairs())
    reward_trainer = rl_core.reward_model(
        str(base),
        pairs,
        heldout=0.1,
        settings=rl_core.RewardModelSettings(
            epochs=epochs, batch_size=64, learning_rate=1e-3, eval_every=20
        ),
        output=output / "reward_model",
    )
    reward_trainer.run()
    trainer = rl_core.ppo(
        str(base),
        prompts=list_sums(),
        reward="learned",
        reward_model=reward_trainer.save(output / "scores"),
        settings=rl_core.PolicySettings(
            algorithm="ppo",
            iterations=iterations,
            prompts_per_iteration=32,
            group_size=4,
            learning_rate=3e-4,
            kl_coef=0.05,
            kl_in="reward",
            critic={"kind": "separate", "learning_rate": 1e-3, "warmup_iterations": 5},
            sampling=rl_core.SamplingSettings(max_completion_tokens=8),
        ),
        output=output / "policy",
    )
    trainer.run()
    trainer.save(output / "model")
    before, after = measure_success(base), measure_success(trainer.policy)
    print(f"right answers: {before:.1%} before, {after:.1%} after")
    return reward_trainer.metrics(), trainer.metrics()


if __name__ == "__main__":
    main()
