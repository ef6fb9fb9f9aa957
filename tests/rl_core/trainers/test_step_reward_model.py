"""Reward models of steps: rows, ends of steps, the first loss, learning, saving, and a policy trained on one."""

import math

import pytest
import torch
from helpers.library import small_policy

import rl_core
from rl_core.errors import DataError, RecordsError, SettingsError
from rl_core.models import heads
from rl_core.settings import ModelSettings, RewardModelSettings
from rl_core.trainers.reward_model import SteppedRow, StepRewardTrainer

GOOD, BAD = ["1 + 2 = 3", "eeee"], ["Say 3", "nothing else"]
ROWS = [
    {
        "prompt": f"{n} ?",
        "completions": [GOOD[n % 2], BAD[n % 2] if n % 3 else GOOD[1 - n % 2], GOOD[n % 2]],
        "labels": [True, not n % 3, True],
    }
    for n in range(24)
]


def build_settings(**options):
    arguments = {
        "loss": "process",
        "epochs": 12,
        "batch_size": 6,
        "eval_every": 1000,
        "warmup_steps": 0,
        "learning_rate": 3e-3,
        **options,
    }
    return RewardModelSettings(**arguments)


def build_training(**options):
    return rl_core.reward_model(
        small_policy(), ROWS, heldout=0.25, settings=build_settings(**options)
    )


def test_each_label_is_at_the_last_token_of_its_step():
    policy = small_policy()
    training = build_training()
    decode = policy.renderer.action_text
    row = next(iter(training.recipe.trainer._train))
    prompts = {
        tuple(policy.renderer.prompt_ids([{"role": "user", "content": r["prompt"]}])): r
        for r in ROWS
    }
    start, source = next(
        (len(ids), r) for ids, r in prompts.items() if tuple(row.ids[: len(ids)]) == ids
    )
    text = "\n".join(source["completions"])
    first, second, last = (end for end, _ in row.steps)
    assert decode(row.ids[start : first + 1]) == text.split("\n")[0] + "\n"
    assert decode(row.ids[start : second + 1]) == "\n".join(text.split("\n")[:2]) + "\n"
    assert last == len(row.ids) - 1  # with the end of turn, as in a rollout
    assert [label for _, label in row.steps] == [float(label) for label in source["labels"]]


def test_the_first_loss_is_that_of_a_padded_forward_pass():
    trainer = build_training(batch_size=64).recipe.trainer
    assert isinstance(trainer, StepRewardTrainer)
    losses = []
    with torch.no_grad():
        for row in trainer._train:
            model = trainer.model
            states = model.base_model(torch.tensor([list(row.ids)])).last_hidden_state[0]
            for end, label in row.steps:
                score = float(model.score(states[end]))
                losses.append(math.log1p(math.exp(-score if label else score)))
    assert trainer.step()["train/loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-4)


def test_it_learns_and_micro_batches_change_nothing():
    trainings = [build_training(micro_batch_tokens=tokens) for tokens in (1, 4096)]
    first = trainings[1].recipe.trainer.evaluate()
    for training in trainings:
        training.run()
    last = [training.recipe.trainer.evaluate() for training in trainings]
    assert last[1]["eval/loss"] < 0.5 * first["eval/loss"] and last[1]["eval/accuracy"] > 0.9
    assert last[1]["eval/accuracy_wrong"] > 0.6 and last[1]["eval/accuracy_right"] > 0.9
    assert last[0]["eval/loss"] == pytest.approx(last[1]["eval/loss"], abs=5e-3)


def test_a_resumed_run_has_the_same_bits():
    def make():
        return build_training(epochs=3).recipe.trainer

    whole, first, second = make(), make(), make()
    expected = [whole.step()["train/loss"] for _ in range(4)]
    losses = [first.step()["train/loss"] for _ in range(2)]
    second.model.load_state_dict(first.model.state_dict())
    second.optimizer_step.load_state_dict(first.optimizer_step.state_dict())
    second.load_state_dict(first.state_dict())
    losses += [second.step()["train/loss"] for _ in range(2)]
    assert losses == expected
    for ours, theirs in zip(second.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_scores_are_probabilities_at_positions_of_any_batch():
    model = build_training().recipe.trainer.model
    rows, positions = [[5, 6, 7, 8], [5, 6], [9, 5, 6, 7, 8, 9]], [[1, 3], [0], [5]]
    together = heads.score_steps(model, rows, positions)
    alone = [
        heads.score_steps(model, [row], [places])[0]
        for row, places in zip(rows, positions, strict=True)
    ]
    assert [len(part) for part in together] == [2, 1, 1]
    for a, b in zip(together, alone, strict=True):
        assert a == pytest.approx(b, abs=1e-5) and all(0 < value < 1 for value in a)
    with pytest.raises(DataError, match="row 1"):
        heads.score_steps(model, rows, [[1], [2], [0]])


BAD_ROWS = [
    ({"labels": [True]}, "has 1 labels for 3 completions"),
    ({"labels": [True, 2, False]}, r"labels\[1\]: must be true, false"),
    ({"labels": [True, "yes", False]}, r"labels\[1\]: must be true, false"),
    ({"completions": ["a", " ", "b"]}, r"completions\[1\]: must be a text that is not blank"),
    ({"completions": ["a", 1, "b"]}, r"completions\[1\]"),
    ({"step_separator": "; "}, "step_separator: must be a line break"),
]


@pytest.mark.parametrize(("changes", "problem"), BAD_ROWS)
def test_bad_rows_are_named(changes, problem):
    with pytest.raises(RecordsError, match=problem):
        rl_core.reward_model(small_policy(), [{**ROWS[0], **changes}], settings=build_settings())


def test_rows_of_another_loss_are_refused():
    with pytest.raises(DataError, match="which only a reward model with `loss: process` takes"):
        rl_core.dpo(small_policy(), ROWS)
    pairs = [{"prompt": f"{n}", "chosen": "a", "rejected": "b"} for n in range(8)]
    with pytest.raises(DataError, match="has no labels of steps"):
        rl_core.reward_model(small_policy(), pairs, settings=build_settings())
    same = [{**row, "labels": [True] * 3} for row in ROWS]
    with pytest.raises(DataError, match="all steps have the label 1"):
        rl_core.reward_model(small_policy(), same, settings=build_settings())
    with pytest.raises(DataError, match="each needs a token of its own"):
        StepRewardTrainer(
            build_training().recipe.trainer.model,
            0,
            [SteppedRow([1, 2], [(2, 1.0)])],
            [],
            build_settings(eval_every=0),
            0,
        )


def test_a_policy_learns_from_a_saved_reward_model_of_steps(tmp_path):
    policy = small_policy()
    training = rl_core.reward_model(
        policy, ROWS, heldout=0.25, settings=build_settings(epochs=4), output=tmp_path / "steps"
    )
    training.run()
    training.save(tmp_path / "prm")
    model, _ = heads.load_reward_model(tmp_path / "prm", ModelSettings(device="cpu"))
    assert heads.scores_steps(model)
    settings = rl_core.PolicySettings(
        iterations=2,
        prompts_per_iteration=2,
        group_size=3,
        sampling=rl_core.SamplingSettings(max_completion_tokens=8),
    )
    run = rl_core.grpo(
        policy,
        prompts=["1 ?", "2 ?"],
        reward="process",
        reward_model=tmp_path / "prm",
        settings=settings,
    )
    run.run()
    (metrics, *_) = run.metrics().to_dict("records")
    assert 0 < metrics["reward/process"] < 1
    plain = rl_core.reward_model(
        policy,
        [{"prompt": f"{n}", "chosen": "a", "rejected": "b"} for n in range(8)],
        settings=build_settings(loss="bradley_terry", epochs=1),
        output=tmp_path / "plain",
    )
    plain.run()
    plain.save(tmp_path / "bt")
    with pytest.raises(SettingsError, match="scores whole completions; the component process"):
        rl_core.grpo(policy, prompts=["1 ?"], reward="process", reward_model=tmp_path / "bt")
    with pytest.raises(SettingsError, match="needs a reward model trained with `loss: process`"):
        rl_core.grpo(policy, prompts=["1 ?"], reward="process")
