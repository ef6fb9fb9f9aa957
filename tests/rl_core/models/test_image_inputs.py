"""Models that read images: positions by M-RoPE, the sampler's log-probs are the trainer's, saved and loaded."""

import pytest
import torch
from helpers.vision import data_url, message, serve, tiny_policy

from rl_core.api.policy import load_policy
from rl_core.capabilities import (
    check_rollout_decoder,
    check_sequence_packing,
    check_training_forward,
    inspect_capabilities,
    refuse_image_model,
)
from rl_core.data.images import find_image_reader
from rl_core.environments.environment import Environment, Episode, Step
from rl_core.environments.tools import Toolset
from rl_core.errors import DataError, SettingsError
from rl_core.inference.fallback_batching import FallbackBatcher
from rl_core.inference.serving_requests import ServedRequest
from rl_core.inference.transformers_backend import TransformersBackend
from rl_core.models.image_inputs import compute_image_positions
from rl_core.models.logprobs import completion_logprobs
from rl_core.rollouts.batching import build_batches
from rl_core.rollouts.collect import collect_rollouts
from rl_core.rollouts.episode_sequence import EpisodeRequest, EpisodeSequence
from rl_core.settings import SamplingSettings
from rl_core.types import TrainBatch

SHAPES = ((16, 16), (32, 16), (24, 40))


class Pictures(Environment):
    """Episodes of no, one or two pictures, and another picture in the answer to the first action."""

    name, levels, blocking = "pictures", ("all",), False
    knows_success = False
    tools = Toolset([])

    def episode(self, seed, level):
        return PictureEpisode(seed, level)


class PictureEpisode(Episode):
    def reset(self):
        urls = [data_url(SHAPES[(self.seed + n) % 3], "red", "blue") for n in range(self.seed % 3)]
        return [message(f"question {self.seed}?", *urls)]

    def act(self, text):
        if not hasattr(self, "acted"):
            self.acted = True
            urls = (
                [data_url(SHAPES[self.seed % 3], "green", "white")]
                if self.seed not in (1, 3)
                else []
            )
            return Step([message("and now?", *urls)])
        return Step(terminated=True, reward=1.0)


def play(policy, temperature=0.7, slots=8):
    backend = TransformersBackend(
        policy.model, eos_ids=[*policy.renderer.eos_ids, 60, 61, 62], pad_id=policy.renderer.pad_id,
        max_length=policy.context, textless_ids=policy.textless_ids,
    )  # fmt: skip
    sampling = SamplingSettings(
        temperature=temperature, max_completion_tokens=160, max_turns=2, slots=slots
    )
    requests = [EpisodeRequest("all", seed) for seed in range(6)]
    groups = collect_rollouts(
        Pictures(), backend, policy.renderer, requests, group_size=1, sampling=sampling, seed=3
    )
    return [rollout for group in groups for rollout in group.rollouts]


def sharpen(policy):
    """Make attention and pictures matter: the weights of a new model are small."""
    with torch.no_grad():
        for name, weight in policy.model.named_parameters():
            if weight.ndim > 1 and "embed_tokens" not in name:
                weight.mul_(6)
    return policy


def test_positions_by_hand():
    # text at 0 and 1; 2 x 3 tokens from position 2; text after the largest, 2 + 3; one token; text
    ids = [5, 5, 9, 9, 9, 9, 9, 9, 5, 9, 5]
    positions = compute_image_positions(ids, [(1, 4, 6), (1, 2, 2)], 9, 2)
    assert positions.tolist() == [
        [0, 1, 2, 2, 2, 2, 2, 2, 5, 6, 7],
        [0, 1, 2, 2, 2, 3, 3, 3, 5, 6, 7],
        [0, 1, 2, 3, 4, 2, 3, 4, 5, 6, 7],
    ]
    for wrong in ([(1, 4, 6)], [(1, 4, 6), (1, 2, 2), (1, 2, 2)], [(1, 2, 2), (1, 4, 6)], []):
        with pytest.raises(DataError, match="image"):
            compute_image_positions(ids, wrong, 9, 2)


def test_positions_are_those_of_transformers():
    policy = tiny_policy()
    messages = [message("a", data_url((24, 40))), {"role": "assistant", "content": "b"},
                message("c", data_url(), data_url((40, 16)))]  # fmt: skip
    ids, _ = policy.renderer.encode_turns([*messages, {"role": "assistant", "content": "d"}])
    images = policy.renderer.read_images(messages)
    config = policy.model.config
    expected, _ = policy.model.model.get_rope_index(
        torch.tensor([ids]),
        mm_token_type_ids=(torch.tensor([ids]) == config.image_token_id).int(),
        image_grid_thw=torch.tensor([image.grid for image in images]),
    )
    positions = compute_image_positions(
        ids, [image.grid for image in images], config.image_token_id, 2
    )
    assert torch.equal(positions, expected[:, 0])


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_sampler_has_the_trainers_logprobs(temperature):
    policy = sharpen(tiny_policy())
    rollouts = play(policy, temperature)
    numbers = {len(rollout.images) for rollout in rollouts}
    assert {0, 1, 3} <= numbers
    assert all(rollout.loss_mask.count(False) for rollout in rollouts)  # two turns
    worst = 0.0
    for batch in build_batches(rollouts, 4096, policy.renderer.pad_id):
        assert len(batch.rows) == 6  # other lengths and numbers of images in one batch
        with torch.no_grad():
            logprobs, _ = completion_logprobs(policy.model, batch)
        worst = max(worst, float((logprobs - batch.sampler_logprobs_BS).abs().max()))
    assert worst < 1e-4
    # each row alone, and sampled alone: padding changes nothing
    for rollout, alone in zip(rollouts, play(policy, temperature, slots=1), strict=True):
        assert rollout.completion_ids == alone.completion_ids
        assert rollout.sampler_logprobs == pytest.approx(alone.sampler_logprobs, abs=1e-4)


def test_pictures_decide_the_logprobs():
    policy = sharpen(tiny_policy())
    (batch,) = build_batches([play(policy)[2]], 4096, policy.renderer.pad_id)
    other = policy.renderer.read_images(
        [message("", data_url(SHAPES[2], "white"), data_url(SHAPES[0]))]
    )
    with torch.no_grad():
        expected, _ = completion_logprobs(policy.model, batch)
        swapped = TrainBatch(batch.input_ids_BS, batch.attention_mask_BS, batch.loss_mask_BS,
                             temperatures_BS=batch.temperatures_BS,
                             images=[(*other, batch.images[0][2])])  # fmt: skip
        changed, _ = completion_logprobs(policy.model, swapped)
    assert float((expected - changed).abs().max()) > 1e-2
    with pytest.raises(DataError, match="image token"):
        completion_logprobs(
            policy.model,
            TrainBatch(batch.input_ids_BS, batch.attention_mask_BS, batch.loss_mask_BS),
        )


def test_greedy_tokens_are_those_of_generate():
    policy = sharpen(tiny_policy())
    policy.model.eval()
    messages = [message("colour?", data_url((24, 40), "red", "blue"))]
    ids, images = policy.renderer.prompt_ids(messages), policy.renderer.read_images(messages)
    inputs = torch.tensor([ids])
    with torch.no_grad():
        expected = policy.model.generate(
            inputs,
            pixel_values=images[0].pixels_PD,
            image_grid_thw=torch.tensor([images[0].grid]),
            mm_token_type_ids=(inputs == policy.model.config.image_token_id).int(),
            max_new_tokens=12, do_sample=False, eos_token_id=policy.renderer.eos_id,
            pad_token_id=policy.renderer.pad_id,
            suppress_tokens=list(policy.textless_ids),
        )[0, len(ids):].tolist()  # fmt: skip
    answers = serve(policy, [messages], temperature=0, tokens=12)
    assert answers[0].tokens == expected[: len(answers[0].tokens)] and len(expected) > 3
    # generate leaves positions behind in the model, which our passes must not read
    (rollout,) = [r for r in play(policy, slots=8) if r.trajectory.seed == 2]
    (batch,) = build_batches([rollout], 4096, policy.renderer.pad_id)
    with torch.no_grad():
        logprobs, _ = completion_logprobs(policy.model, batch)
    assert float((logprobs - batch.sampler_logprobs_BS).abs().max()) < 1e-4


def test_served_episodes_have_the_backends_tokens():
    policy = sharpen(tiny_policy())
    rollouts = play(policy)
    sampling = SamplingSettings(temperature=0.7, max_completion_tokens=160, max_turns=2)
    batcher = FallbackBatcher(
        policy.model, slots=4, context=policy.context,
        eos_ids=[*policy.renderer.eos_ids, 60, 61, 62],
        pad_id=policy.renderer.pad_id, textless_ids=policy.textless_ids,
    )  # fmt: skip
    for rollout in rollouts:
        from rl_core.inference.sampling import compute_sequence_seed

        number = rollout.trajectory.seed
        key = compute_sequence_seed(3, "pictures", "all", number, 0)
        sequence = EpisodeSequence(Pictures(), policy.renderer, EpisodeRequest("all", number), sampling,
                                   None, key, 0, print)  # fmt: skip
        sequence.begin_episode(policy.context)
        request = ServedRequest(sequence, sampling)
        batcher.start_requests([request])
        while not batcher.is_empty:
            batcher.step()
        assert request.error is None
        served = sequence.build_rollout(0)
        assert served.completion_ids == rollout.completion_ids
        assert served.sampler_logprobs == pytest.approx(rollout.sampler_logprobs, abs=1e-4)


def test_a_saved_model_reads_the_same_pixels(tmp_path):
    policy = sharpen(tiny_policy())
    policy.save(tmp_path / "model")
    loaded = load_policy(tmp_path / "model")
    assert find_image_reader(loaded.tokenizer).digest == find_image_reader(policy.tokenizer).digest
    assert loaded.context == 256
    for mine, theirs in zip(play(policy), play(loaded), strict=True):
        assert mine.completion_ids == theirs.completion_ids
        assert [i.digest for i in mine.images] == [i.digest for i in theirs.images]
    for name in ("preprocessor_config.json", "manifest.json"):
        (tmp_path / "model" / name).unlink()
    with pytest.raises(Exception, match="has no preprocessor_config"):
        load_policy(tmp_path / "model")


def test_fast_paths_are_refused_with_their_reason():
    model = tiny_policy().model
    for decision in (
        check_rollout_decoder(model),
        check_training_forward(model),
        check_sequence_packing(model),
    ):
        assert not decision.allowed and "reads images" in decision.reason
    capabilities = inspect_capabilities(model)
    assert capabilities.plain_head.allowed
    assert not any(
        d.allowed
        for d in (capabilities.decoder, capabilities.fused_step, capabilities.slot_adapters)
    )
    with pytest.raises(SettingsError, match=r"rollouts.workers: ray.*not sent pixels"):
        refuse_image_model(model, "workers", "rollouts.workers: ray")
