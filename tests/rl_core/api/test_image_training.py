"""SFT and GRPO on rows with images: they learn from the pixels, and resume to the same bits."""

import os
import signal

import pytest
import torch
from helpers.vision import data_url, message, picture, serve, tiny_policy

import rl_core
from rl_core.environments.pixel_grid import PixelGrid
from rl_core.errors import SettingsError
from rl_core.rollouts.batching import TrainRow
from rl_core.settings import ReplaySettings
from rl_core.trainers.policy_gradient.samples import ReplayBuffer, TrainingSample

COLOURS = ("red", "blue")
GRPO = {
    "iterations": 3, "prompts_per_iteration": 2, "group_size": 4, "learning_rate": 3e-3,
    "warmup_steps": 0, "sampling": {"max_completion_tokens": 4},
    "replay": {"iterations": 2, "share": 0.5},
}  # fmt: skip


def demonstrations():
    return [
        {"messages": [
            {"role": "user", "content": [{"type": "image", "image": picture(size, colour)},
                                         {"type": "text", "text": "colour?"}]},
            {"role": "assistant", "content": colour},
        ]}
        for size in ((16, 16), (24, 16), (16, 24), (32, 16)) for colour in COLOURS
    ]  # fmt: skip


def weights(training):
    return {name: tensor.clone() for name, tensor in training.policy.model.state_dict().items()}


def test_sft_learns_the_colour_from_the_pixels():
    settings = {"epochs": 40, "batch_size": 8, "learning_rate": 1e-2, "eval_every": 0}
    training = rl_core.sft(tiny_policy(), demonstrations(), heldout=0, settings=settings)
    training.run()
    renderer, model = training.policy.renderer, training.policy.model.eval()
    for size in ((24, 24), (32, 24)):  # not among the rows
        asked = [[message("colour?", data_url(size, colour))] for colour in COLOURS]
        answers = serve(training.policy, asked, temperature=0)
        assert [renderer.action_text(answer.tokens) for answer in answers] == list(COLOURS)
    assert not model.training


def grade(trajectories):
    return [float(len(t.turns[0].action)) for t in trajectories]


def start(output, callbacks=()):
    prompts = [{"prompt": [message(f"{n}?", data_url(colour=COLOURS[n % 2]))]} for n in range(4)]
    settings = {**GRPO, "checkpoint_every": 1, "kl_coef": 0.1, "epochs": 2, "importance": "token"}
    return rl_core.grpo(
        tiny_policy(), prompts=prompts, reward=grade, settings=settings, output=output,
        callbacks=callbacks, seed=1,
    )  # fmt: skip


def test_grpo_resumes_to_the_same_bits(tmp_path):
    whole = start(tmp_path / "whole")
    whole.run()

    def stop(event):
        if event.iteration == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    stopped = start(tmp_path / "stopped", [stop])
    with pytest.raises(rl_core.Stopped):
        stopped.run()
    resumed = start(tmp_path / "stopped")
    resumed.run()
    mine, theirs = weights(whole), weights(resumed)
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    groups = resumed.trainer.groups
    assert all(len(rollout.images) == 1 for group in groups for rollout in group.rollouts)


def test_a_replay_buffer_keeps_each_image_once():
    images = tiny_policy().renderer.read_images([message("", data_url(), data_url(colour="blue"))])
    rows = [TrainRow([1], [2], [True], [0.0], images=row) for row in (images, (images[1],), ())]
    buffer = ReplayBuffer(ReplaySettings(iterations=2, share=0.5))
    buffer.add_groups([[TrainingSample(row, 1.0, False) for row in rows]])
    state = buffer.state_dict()
    assert len(state["image_pixels"]) == 2
    restored = ReplayBuffer(ReplaySettings(iterations=2, share=0.5))
    restored.load_state_dict(state)
    for row, sample in zip(rows, restored._past_iterations[0][0], strict=True):
        assert tuple(sample.row.images) == tuple(row.images)
        for mine, theirs in zip(row.images, sample.row.images, strict=True):
            assert torch.equal(mine.pixels_PD, theirs.pixels_PD)


def test_pixel_grid_shows_its_picture():
    environment = PixelGrid(observe="image")
    assert not environment.tools.tools
    (opening,) = environment.episode(3, "easy").reset()
    (again,) = environment.episode(3, "easy").reset()
    assert opening == again and opening["content"].startswith("<image>colour at row")
    (image,) = tiny_policy().renderer.read_images([opening])
    assert image.grid[1] == image.grid[2]
    episode = environment.episode(3, "easy")
    step = episode.step(f"answer {episode.target}")
    assert step.terminated and step.success and step.reward == 1 and step.is_grounded is None
    shown = environment.demonstration(3, "easy")
    assert [m["role"] for m in shown.messages] == [
        "user",
        "assistant",
    ] and "images" in shown.messages[0]
    with pytest.raises(SettingsError, match="look_cost"):
        PixelGrid(observe="image", look_cost=0.1)
    with pytest.raises(SettingsError, match="must be tools or image"):
        PixelGrid(observe="pictures")


def test_what_is_not_done_with_images_is_refused():
    with pytest.raises(SettingsError, match=r"rollouts.workers: ray.*images"):
        rl_core.grpo(tiny_policy(), environment=PixelGrid(observe="image"),
                     settings={**GRPO, "replay": None, "rollouts": {"workers": "ray"}})  # fmt: skip
    with pytest.raises(SettingsError, match="reads images, and a reward model reads texts"):
        rl_core.reward_model(tiny_policy(), [{"prompt": "a", "chosen": "b", "rejected": "c"}] * 4)


def test_adapters_train_the_language_part(tmp_path):
    tiny_policy().save(tmp_path / "base")
    training = rl_core.sft(
        {"path": str(tmp_path / "base"), "lora": {"rank": 2}}, demonstrations(), heldout=0,
        settings={"max_steps": 2, "batch_size": 4, "eval_every": 0},
    )  # fmt: skip
    adapted = [n for n, p in training.policy.model.named_parameters() if p.requires_grad]
    assert adapted and not any("visual" in name for name in adapted)
    training.run()
    training.policy.save(tmp_path / "merged")
    merged = rl_core.load_policy(tmp_path / "merged")
    asked = [[message("colour?", data_url())]]
    one, two = (serve(policy, asked, temperature=0)[0] for policy in (training.policy, merged))
    assert one.tokens == two.tokens
    assert one.logprobs == pytest.approx(two.logprobs, abs=1e-4)
