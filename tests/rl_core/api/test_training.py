"""Training through the Python API: run, stop, resume, save; and errors before anything is played."""

import dataclasses
import json
import os
import signal

import numpy as np
import pytest
import torch
from helpers.library import Echo, have_equal_tensors, length, settings, small_policy, weights

import rl_core


def test_a_reward_and_prompts_are_enough(tmp_path):
    rows = [
        {"prompt": "1 + 2 =", "answer": "3", "level": "easy"},
        {"prompt": "say e", "answer": "e", "level": "hard"},
    ]
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    observed = []

    def grade(trajectories):
        observed.extend(trajectories)
        return [
            float(t.row["answer"] in t.turns[0].action) + 0.1 * number
            for number, t in enumerate(trajectories)
        ]

    training = rl_core.grpo(small_policy(), prompts=path, reward=grade, settings=settings())
    outcome = training.run()
    assert (outcome.iterations, outcome.stop_reason) == (3, "iterations")
    assert len(observed) == 3 * 2 * 3
    assert {(t.row["answer"], t.level, t.prompt) for t in observed} <= {
        ("3", "easy", "1 + 2 ="),
        ("e", "hard", "say e"),
    }
    assert list(training.metrics().index) == [1, 2, 3]
    assert training.metrics()["reward/grade"].notna().all()


def test_the_reward_is_learned():
    """Check that more characters earn more: the mean rises well beyond its start."""
    training = rl_core.grpo(
        small_policy(),
        prompts=["say e"],
        reward=length,
        settings=settings(iterations=12, group_size=8),
    )
    training.run()
    rewards = training.metrics()["reward/mean"]
    assert rewards.iloc[-3:].mean() > rewards.iloc[:3].mean() + 0.5


def test_a_reward_takes_the_place_of_the_environment_s_unless_both_are_weighed(tmp_path):
    alone = rl_core.grpo(
        small_policy(),
        environment=Echo(),
        reward=length,
        settings=settings(iterations=1),
        output=tmp_path / "a",
    )
    alone.run()
    row = next(rl_core.iter_rewards(tmp_path / "a"))
    assert row["reward"] == row["rewards"]["length_function"]
    both = rl_core.ppo(
        small_policy(),
        environment=Echo(),
        reward={"task": 1.0, length: 0.5},
        settings=settings(iterations=1),
        output=tmp_path / "b",
    )
    both.run()
    row = next(rl_core.iter_rewards(tmp_path / "b"))
    assert row["reward"] == pytest.approx(
        row["rewards"]["task"] + 0.5 * row["rewards"]["length_function"]
    )
    assert both.settings.algorithm == "ppo"


def train_policy(output=None, stop_at=None, iterations=4, reward=length, **options):
    training = rl_core.grpo(
        small_policy(),
        prompts=["say e", "1 + 2 ="],
        reward=reward,
        output=output,
        settings=settings(iterations=iterations, **options),
    )
    if stop_at is not None:
        step = training.trainer.step

        def step_and_stop():
            if training.trainer.iteration == stop_at:
                os.kill(os.getpid(), signal.SIGINT)
            return step()

        training.trainer.step = step_and_stop
    return training


def test_ctrl_c_and_again_give_the_same_weights_with_and_without_a_folder(tmp_path):
    full = train_policy()
    full.run()
    stopped = train_policy(stop_at=1)
    with pytest.raises(rl_core.Stopped, match="run\\(\\) continues from here"):
        stopped.run()
    assert stopped.memory.state.iteration == 2
    assert stopped.run().iterations == 4
    assert have_equal_tensors(weights(stopped), weights(full))
    selected = train_policy(tmp_path, stop_at=1)
    with pytest.raises(rl_core.Stopped, match="resumes"):
        selected.run()
    fresh = train_policy(tmp_path)  # as a new process would
    outcome = fresh.run()
    assert (outcome.iterations, outcome.resumed_iteration) == (4, 2)
    assert have_equal_tensors(weights(fresh), weights(full))
    assert list(rl_core.read_metrics(tmp_path).index) == [1, 2, 3, 4]
    assert list(rl_core.read_rewards(tmp_path)["iteration"].unique()) == [0, 1, 2, 3]


def test_running_twice_trains_once():
    training = train_policy()
    outcome = training.run()
    before = weights(training)
    assert training.run() is outcome and have_equal_tensors(weights(training), before)
    assert "iterations=" in repr(outcome) and "MetricHistory" not in repr(outcome)


def test_two_trainers_in_one_process_do_not_meet():
    alone = train_policy()
    alone.run()
    first, second = train_policy(), train_policy(learning_rate=1e-3)
    first.run(), second.run()
    assert have_equal_tensors(weights(first), weights(alone)) and not have_equal_tensors(
        weights(first), weights(second)
    )


LOSS = """
from loss_scale import SCALE

def loss(logprobs_BT, old_logprobs_BT, advantages_BT, loss_mask_BT, *, num_loss_tokens, loss_weights_BT):
    scale = SCALE * loss_mask_BT.sum() / num_loss_tokens
    return (-SCALE * advantages_BT * logprobs_BT * loss_weights_BT).sum(), {"scale": scale}
"""


def test_a_loss_of_the_user_s_by_path_and_by_hand(tmp_path, monkeypatch):
    """Check that it is logged and learned from; a resume with an edited file, or an edited import of it, is refused."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "mine.py").write_text(LOSS)
    (tmp_path / "loss_scale.py").write_text("SCALE = 2.0\n")
    first = train_policy(tmp_path / "a", iterations=1, loss="mine.py:loss")
    first.run()
    assert first.metrics()["policy/scale"].iloc[-1] == pytest.approx(2.0)
    assert (
        train_policy(tmp_path / "a", iterations=2, loss="mine.py:loss").run().resumed_iteration == 1
    )
    (tmp_path / "loss_scale.py").write_text("SCALE = 3.0\n")
    with pytest.raises(rl_core.ResumeRefused, match=r"code\.loss_scale"):
        train_policy(tmp_path / "a", iterations=3, loss="mine.py:loss").run()

    def compute_loss(
        logprobs_BT,
        old_logprobs_BT,
        advantages_BT,
        loss_mask_BT,
        *,
        num_loss_tokens,
        loss_weights_BT,
    ):
        return (-advantages_BT * logprobs_BT * loss_weights_BT).sum(), {}

    by_hand = rl_core.grpo(
        small_policy(),
        prompts=["say e", "1 + 2 ="],
        reward=length,
        loss=compute_loss,
        settings=settings(iterations=2),
    )
    by_hand.run()
    assert by_hand.settings.loss == "compute_loss"
    with pytest.raises(rl_core.SettingsError, match="loss: 'nowhere' is not an import path"):
        train_policy(loss="nowhere")


def test_a_resume_with_another_reward_or_setting_is_refused(tmp_path):
    train_policy(tmp_path, iterations=1).run()

    def score_zero(trajectories):
        return [0.0 for _ in trajectories]

    with pytest.raises(rl_core.ResumeRefused, match=r"reward\.score_zero"):
        train_policy(tmp_path, reward=score_zero).run()
    with pytest.raises(rl_core.ResumeRefused, match=r"settings\.learning_rate"):
        train_policy(tmp_path, learning_rate=2e-2).run()
    assert (
        train_policy(tmp_path, iterations=2).run().resumed_iteration == 1
    )  # more iterations change no earlier one


def test_a_reward_that_raises_can_be_fixed_and_the_run_continues():
    state = {"broken": True}

    def fail_while_broken(trajectories):
        if state["broken"]:
            raise KeyError("answer")
        return length(trajectories)

    training = train_policy(reward=fail_while_broken)
    with pytest.raises(rl_core.RewardError, match="reward 'fail_while_broken' raised KeyError"):
        training.run()
    state["broken"] = False
    assert training.run().iterations == 4


def test_a_reward_of_the_wrong_length_is_named():
    training = train_policy(reward=lambda trajectories: [1.0])
    with pytest.raises(rl_core.RewardError, match="'reward' gave 1 values for 6 trajectories"):
        training.run()


def test_saving(tmp_path):
    training = train_policy(iterations=1)
    with pytest.raises(rl_core.CheckpointError, match="call run\\(\\) before save"):
        training.save(tmp_path / "model")
    training.run()
    saved = training.save(tmp_path / "run" / "model")
    loaded = rl_core.load_policy(saved)
    assert have_equal_tensors(weights(training), [p.detach() for p in loaded.model.parameters()])
    texts = rl_core.generate(
        tmp_path / "run", ["say e"], samples=2, seed=3
    )  # a folder that contains model/
    assert texts == training.generate(["say e"], samples=2, seed=3) and [
        len(part) for part in texts
    ] == [2]
    (tmp_path / "file").write_text("")
    with pytest.raises(rl_core.CheckpointError, match="cannot be written"):
        training.save(tmp_path / "file")


def test_adapters_are_trained_and_merged(tmp_path):
    small_policy().save(tmp_path / "base")
    source = rl_core.ModelSettings(
        path=str(tmp_path / "base"), lora=rl_core.LoraSettings(rank=2), device="cpu"
    )
    training = rl_core.grpo(
        source, prompts=["say e"], reward=length, settings=settings(kl_coef=0.1)
    )
    training.run()
    trained = [name for name, p in training.model.named_parameters() if p.requires_grad]
    assert trained and all("lora" in name for name in trained)
    training.save(tmp_path / "out")
    assert (tmp_path / "out" / "adapter").is_dir()
    merged = rl_core.load_policy(tmp_path / "out").model
    base = rl_core.load_policy(tmp_path / "base").model
    assert not torch.equal(
        merged.model.layers[0].mlp.up_proj.weight, base.model.layers[0].mlp.up_proj.weight
    )
    assert "policy/ref_kl" in training.metrics().columns


def test_a_loaded_pair_is_used_as_it_is_and_its_reference_stays():
    policy = small_policy()
    training = rl_core.grpo(
        (policy.model, policy.tokenizer),
        prompts=["e"],
        reward=length,
        settings=settings(kl_coef=0.1, iterations=1),
    )
    before = weights(training)
    training.run()
    assert training.model is policy.model and not have_equal_tensors(weights(training), before)
    assert have_equal_tensors(
        [p.detach() for p in training.trainer.actor_critic.reference.parameters()], before
    )


DEMONSTRATIONS = [{"prompt": f"{n} + 1 =", "completion": str(n + 1)} for n in range(12)]
PAIRS = [{"prompt": f"{n} + 1 =", "chosen": str(n + 1), "rejected": "e"} for n in range(12)]


@pytest.mark.parametrize(
    ("kind", "data", "metric"),
    [
        ("sft", DEMONSTRATIONS, "eval/loss"),
        ("dpo", PAIRS, "eval/loss"),
        ("reward_model", PAIRS, "eval/loss"),
    ],
)
def test_training_on_rows(kind, data, metric, tmp_path):
    classes = {
        "sft": rl_core.SFTSettings,
        "dpo": rl_core.PreferenceSettings,
        "reward_model": rl_core.RewardModelSettings,
    }
    common = {"batch_size": 4, "learning_rate": 1e-2, "warmup_steps": 0, "eval_every": 1}
    chosen = classes[kind](epochs=4, plateau_patience=2, **common)  # without `patience`
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in data))
    training = getattr(rl_core, kind)(small_policy(), path, heldout=0.25, settings=chosen)
    start = training.evaluate()[metric]
    outcome = training.run()
    assert outcome.metrics[metric] < start
    repeated = getattr(rl_core, kind)(small_policy(), data[3:], heldout=data[:3], settings=chosen)
    assert repeated.run().steps == 12  # 9 rows in batches of at most 4, 4 epochs


def test_a_trained_reward_model_rewards(tmp_path):
    chosen = rl_core.RewardModelSettings(epochs=1, batch_size=4, learning_rate=1e-3)
    policy = small_policy()
    before = [p.detach().clone() for p in policy.model.parameters()]
    training = rl_core.reward_model(policy, PAIRS, settings=chosen)
    training.run()
    training.save(tmp_path / "rm")
    assert have_equal_tensors(
        before, list(policy.model.parameters())
    )  # the policy passed in is only a start and stays unchanged
    learned = rl_core.grpo(
        policy, prompts=["1 + 1 ="], reward_model=tmp_path / "rm", settings=settings()
    )
    learned.run()
    assert "reward/learned" in learned.metrics().columns
    with pytest.raises(rl_core.SettingsError, match='add the component "learned"'):
        rl_core.grpo(policy, prompts=["e"], reward=length, reward_model=tmp_path / "rm")
    with pytest.raises(rl_core.SettingsError, match="needs reward_model=FOLDER"):
        rl_core.grpo(policy, prompts=["e"], reward="learned")


@pytest.mark.parametrize("name", ["patience", "plateau_patience"])
def test_validation_on_held_out_prompts_chooses_the_weights_by_the_reward(name):
    training = rl_core.grpo(
        small_policy(),
        prompts=["say e"],
        heldout_prompts=["e", "ee"],
        reward=length,
        settings=settings(eval_every=1, **{name: 5}),
    )
    outcome = training.run()
    evaluated = training.metrics()["eval/reward_mean"]
    assert outcome.best_metric == evaluated.max() and outcome.metrics["eval/episodes"] == 2


def test_evaluate_and_generate(tmp_path):
    policy = small_policy()
    result = rl_core.evaluate(
        policy, Echo(), settings=rl_core.EvaluationSettings(episodes=6, samples=2)
    )
    assert (
        len(result.episodes) == 6
        and len(result.trajectories) == 12
        and set(result.by_level) == {"low", "high"}
    )
    rows = [{"prompt": "a", "n": 1}, {"prompt": "b", "n": 2}, {"prompt": "c", "n": 3}]
    scored = rl_core.evaluate(
        policy, prompts=rows, reward=lambda ts: [float(t.row["n"]) for t in ts]
    )
    assert scored.reward_mean == 2.0 and [t.prompt for t in scored.trajectories] == ["a", "b", "c"]
    assert list(rl_core.trajectory_frame(scored.trajectories)["row/n"]) == [1, 2, 3]
    greedy = rl_core.SamplingSettings(temperature=0.0, max_completion_tokens=5)
    texts = rl_core.generate(policy, ["a", "b"], samples=2, sampling=greedy)
    assert [len(part) for part in texts] == [2, 2] and texts[0][0] == texts[0][1]
    messages = [{"prompt": [{"role": "user", "content": "a"}]}]
    assert rl_core.generate(policy, messages, sampling=greedy) == [[texts[0][0]]]
    only_best = rl_core.SamplingSettings(top_k=1, max_completion_tokens=5)
    assert rl_core.generate(policy, ["a", "b"], samples=2, sampling=only_best) == texts
    everything = rl_core.SamplingSettings(max_completion_tokens=30)
    (long,) = rl_core.generate(policy, ["a"], samples=6, sampling=everything)
    letter = max(long, key=len)[2]
    stopping = rl_core.SamplingSettings(max_completion_tokens=30, stop=(letter,))
    (cut,) = rl_core.generate(policy, ["a"], samples=6, sampling=stopping)
    for full, part in zip(
        long, cut, strict=True
    ):  # the text keeps the token that completes the stop text
        assert full.startswith(part) and letter not in part[:-8]
        assert part == full if letter not in full else letter in part


def assert_refused(match, error=rl_core.SettingsError, **arguments):
    with pytest.raises(error, match=match):
        rl_core.grpo(**{"model": small_policy(), "settings": settings(), **arguments})


def test_what_is_refused_before_anything_is_played(tmp_path):
    assert_refused("neither is given")
    assert_refused("both are given", environment=Echo(), prompts=["a"], reward=length)
    assert_refused("prompts have no reward", prompts=["a"])
    assert_refused("prompts have no reward", prompts=["a"], reward={"task": 1.0, length: 0.0})
    assert_refused("is a class; pass Echo\\(\\)", environment=Echo)
    assert_refused("make_environment", environment="echo")
    assert_refused("is not a reward", prompts=["a"], reward=3)
    assert_refused("two parts are named", prompts=["a"], reward=[length, length])
    assert_refused(
        "given twice",
        environment=Echo(),
        reward=length,
        settings=settings(rewards={"task": 1.0, "length": 0.1}),
    )
    assert_refused(
        "expected rl_core.PolicySettings",
        prompts=["a"],
        reward=length,
        settings=rl_core.SFTSettings(),
    )
    assert_refused("use rl_core.ppo", environment=Echo(), settings=settings(algorithm="ppo"))
    assert_refused(
        "needs heldout_prompts", prompts=["a"], reward=length, settings=settings(eval_every=1)
    )
    assert_refused("needs eval_every", environment=Echo(), settings=settings(patience=1))
    assert_refused(
        "plateau_patience: .*needs eval_every",
        environment=Echo(),
        settings=settings(plateau_patience=1),
    )
    assert_refused("neither a function nor an object", environment=Echo(), callbacks=[3])
    assert_refused(
        r"^model: Llama.* has no tokenizer; pass both: \(model, tokenizer\)",
        model=small_policy().model,
        environment=Echo(),
    )
    assert_refused("create_policy", model=rl_core.ModelSettings(), environment=Echo())
    assert_refused(
        "no model folder", rl_core.CheckpointError, model=tmp_path / "nothing", environment=Echo()
    )
    assert_refused("no tracker 'tensorbord", environment=Echo(), tracker="tensorbord:x")
    assert_refused("has no method log_metrics", environment=Echo(), tracker=object())
    launch = rl_core.LaunchSettings(kind="torchrun", processes=2)
    assert_refused("in this process", environment=Echo(), settings=settings(launch=launch))
    with pytest.raises(rl_core.SettingsError, match="leaves nothing to evaluate on"):
        rl_core.sft(
            small_policy(), DEMONSTRATIONS, heldout=0, settings=rl_core.SFTSettings(eval_every=1)
        )
    with pytest.raises(rl_core.SettingsError, match=r"heldout: 1\.5"):
        rl_core.sft(small_policy(), DEMONSTRATIONS, heldout=1.5)
    with pytest.raises(rl_core.SettingsError, match="pass a list"):
        rl_core.generate(small_policy(), "a question")


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ({"prompt": ["a"]}, r"^prompts: expected .*, found dict; pass columns as a DataFrame$"),
        (iter("ab"), r"^prompts: expected .*, found str_\w*iterator; pass list\(\.\.\.\) of it$"),
        (np.array(["a"]), r"^prompts: expected .*, found ndarray; pass list\(\.\.\.\) of it$"),
        (3, r"^prompts: expected .*, found int$"),
        ([], "^prompts: holds no row"),
        ([{"question": "a"}], r"^prompts: 1 of 1 rows cannot be used:\n  prompts\[0\]: prompt: "),
    ],
    ids=["columns", "iterator", "array", "number", "empty", "no prompt"],
)
def test_bad_prompts_are_called_prompts(prompts, message):
    with pytest.raises(rl_core.DataError, match=message):
        rl_core.grpo(small_policy(), prompts=prompts, reward=length)


def test_bad_rows_are_named(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a"}\n{"question": "b"}\n{"prompt": 3}\n[]\n')
    with pytest.raises(rl_core.RecordsError) as error:
        rl_core.grpo(small_policy(), prompts=path, reward=length)
    for text in (
        "3 of 4 rows",
        ":2: prompt: is missing",
        ":3: prompt: must be text, found a number (3)",
        ":4: must be",
    ):
        assert text in str(error.value)
    with pytest.raises(rl_core.RecordsError, match=r"prompts\[1\]: prompt: is empty"):
        rl_core.grpo(small_policy(), prompts=["a", " "], reward=length)
    with pytest.raises(rl_core.DataError, match="1 of 2 rows have no level"):
        rl_core.grpo(small_policy(), prompts=[{"prompt": "a", "level": "x"}, "b"], reward=length)
    with pytest.raises(
        rl_core.RecordsError, match=r"data\[0\]: is .* tokens long, the context holds 64"
    ):
        rl_core.sft(small_policy(), [{"prompt": "x" * 100, "completion": "y"}, *DEMONSTRATIONS])


def test_advice_is_for_a_script(tmp_path):
    """`on_bad_row` and `options.prompt` are settings of a configuration, which a script cannot set."""
    path = tmp_path / "questions.jsonl"
    path.write_text('{"question": "a", "answer": "b"}\n')
    calls = {
        r"has no column 'prompt'; .*; rename 'question' to 'prompt'$": lambda: rl_core.grpo(
            small_policy(), prompts=path, reward=length
        ),
        r"prompt: is missing; columns found: question, answer\nFix them, or leave them out$": (
            lambda: rl_core.grpo(
                small_policy(), prompts=[{"question": "a", "answer": "b"}], reward=length
            )
        ),
        r"\nFix them, or leave them out; long rows fit into a model with a longer context$": (
            lambda: rl_core.sft(small_policy(), [{"prompt": "x" * 100, "completion": "y"}])
        ),
        "heldout: 1 distinct prompt cannot be split .*; heldout=0 holds nothing out": (
            lambda: rl_core.sft(small_policy(), DEMONSTRATIONS[:1])
        ),
    }
    for message, call in calls.items():
        with pytest.raises(rl_core.DataError, match=message) as error:
            call()
        assert "on_bad_row" not in str(error.value) and "options." not in str(error.value)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"learing_rate": 1e-3},
            "learing_rate: PolicySettings has no such setting; did you mean 'learning_rate'",
        ),
        (
            {"learning_rate": "1e-3"},
            "learning_rate: '1e-3' is not a number; it is text, leave out the quotes",
        ),
        ({"algorithm": "grop"}, "algorithm: 'grop' is not one of .*; did you mean 'grpo'"),
        ({"group_size": 2.5}, "group_size: 2.5 is not a whole number"),
        ({"patience": True}, "patience: True is not a whole number or None"),
        ({"sampling": {"temperatur": 1.0}}, r"sampling\.temperatur: .*did you mean 'temperature'"),
    ],
)
def test_settings_name_the_slip(values, message):
    with pytest.raises(rl_core.SettingsError, match=message):
        rl_core.PolicySettings(**values)
    assert dataclasses.replace(rl_core.PolicySettings(learning_rate=1), epochs=2).learning_rate == 1


def test_a_changed_run_resumes_on_demand_or_starts_over_and_keeps_old_checkpoints(tmp_path, caplog):
    train_policy(tmp_path, iterations=1).run()
    drifted = train_policy(tmp_path, iterations=2, learning_rate=2e-2)
    outcome = drifted.run(allow_drift=True)
    assert (outcome.iterations, outcome.resumed_iteration) == (2, 1)
    assert "settings.learning_rate: 0.01 in the checkpoint, 0.02 now" in caplog.text
    fresh = train_policy(tmp_path, iterations=2, learning_rate=3e-2)
    assert fresh.run(fresh=True).resumed_iteration == 0
    (aside,) = tmp_path.glob("checkpoints.aside*")
    assert list(aside.glob("checkpoint-*/state.json")) and str(aside) in caplog.text
    assert train_policy(tmp_path, iterations=3, learning_rate=3e-2).run().resumed_iteration == 2
    with pytest.raises(rl_core.SettingsError, match="has already started in this process"):
        begun = train_policy(iterations=2)
        begun.run()
        begun.outcome = None
        begun.run(fresh=True)
