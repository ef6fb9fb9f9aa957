"""Episodes whose history the chat template rewrites: the policy reads, and is trained on, what a server would show.

Expected prompts are the tokenizer's rendering of the messages; expected log-probabilities are those of transformers'
forward pass over each context alone.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from helpers.chat_templates import OPENS_AND_STRIPS, OPENS_KEEPS_LAST, family
from helpers.letters import make_trainer
from helpers.teacher_server import serve_teacher
from helpers.tiny import weights_digest
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
)

from rl_core.data.chat import ChatRenderer
from rl_core.environments.environment import Environment, Episode, Step
from rl_core.environments.step_pool import ReplacementContext
from rl_core.environments.tools import Toolset
from rl_core.errors import DataError, SettingsError
from rl_core.inference.engine import create_rollout_backend
from rl_core.inference.sampling import check_observation
from rl_core.inference.teacher import LocalTeacher, ServedTeacher
from rl_core.inference.transformers_backend import TransformersBackend
from rl_core.models.hidden_states import compute_turn_embeddings
from rl_core.models.logprobs import check_contexts, completion_logprobs
from rl_core.models.lora import add_adapter
from rl_core.rollouts.batching import TrainRow, build_batches, build_train_row
from rl_core.rollouts.collect import collect_rollouts
from rl_core.rollouts.episode_sequence import EpisodeRequest
from rl_core.rollouts.rollout_files import read_rollouts, write_tokens
from rl_core.settings import (
    LoraSettings,
    ModelSettings,
    ReplaySettings,
    SamplingSettings,
    TeacherSettings,
)
from rl_core.thoughts.episodes import read_thought_episode
from rl_core.trainers.policy_gradient.samples import ReplayBuffer, TrainingSample
from rl_core.types import Rollout, StopReason, Trajectory

THINK = ("<think>", "</think>")
TURNS = 4


class ChatEpisode(Episode):
    """A user who asks again after every answer, with one tool result in between."""

    def reset(self):
        self.count = 0
        return [{"role": "user", "content": f"answer {self.seed}"}]

    def act(self, text):
        self.count += 1
        if self.count == TURNS:
            return Step(terminated=True, success=len(text) % 2 == 0, reward=float(len(text) % 3))
        role = "tool" if self.count == 2 else "user"
        return Step(messages=[{"role": role, "content": "the cell is red"}], reward=0.5)


class ChatEnvironment(Environment):
    name, levels = "chats", ("low",)
    blocking = False

    @property
    def tools(self):
        return Toolset([])

    def episode(self, seed, level):
        return ChatEpisode(seed, level)


class SlowChatEnvironment(ChatEnvironment):
    blocking = True


def create_tokenizer(template=OPENS_AND_STRIPS):
    return family(template, THINK)


def create_llama(words, **options):
    config = LlamaConfig(
        vocab_size=len(words),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=256,
        initializer_range=0.3,
        pad_token_id=0,
        **options,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return LlamaForCausalLM(config).eval()


def list_end_tokens(words):
    """List every fourth token as an end token, so that an untrained policy writes several tokens and closes some
    thoughts.
    """
    return [
        token
        for token in range(0, len(words), 4)
        if token != words.convert_tokens_to_ids("</think>")
    ]


def play(backend, words, environment=None, history="template", requests=6, **options):
    sampling = SamplingSettings(
        **{"max_completion_tokens": 120, "max_turns": 6, "temperature": 0.7, **options}
    )
    renderer = ChatRenderer(words, ModelSettings(history_thoughts=history))
    groups = collect_rollouts(
        environment or ChatEnvironment(),
        backend,
        renderer,
        [EpisodeRequest("low", seed) for seed in range(requests)],
        group_size=4,
        sampling=sampling,
        seed=3,
    )
    return [rollout for group in groups for rollout in group.rollouts]


def iter_contexts(rollout):
    """Yield (ids, loss mask, sampler's log-probs) of each context."""
    edges = [0, *rollout.context_starts, len(rollout.completion_ids)]
    for index, (start, stop) in enumerate(itertools.pairwise(edges)):
        front = rollout.prompt_ids if index == 0 else []
        ids = [*front, *rollout.completion_ids[start:stop]]
        mask = [*([False] * len(front)), *rollout.loss_mask[start:stop]]
        logprobs = [*([0.0] * len(front)), *rollout.sampler_logprobs[start:stop]]
        yield ids, mask, logprobs


def compute_context_logprobs(model, ids, mask, temperature):
    """Compute log-probs of the sampled tokens of one context with transformers."""
    with torch.no_grad():
        log_p_SV = (
            model(input_ids=torch.tensor([ids])).logits[0].double() / temperature
        ).log_softmax(-1)
    return [
        float(log_p_SV[position - 1, ids[position]])
        for position in range(len(ids))
        if mask[position]
    ]


def create_backends(model, words, max_length=256):
    ends = list_end_tokens(words)
    return (
        create_rollout_backend(model, eos_ids=ends, pad_id=0, max_length=max_length),
        TransformersBackend(model, eos_ids=ends, pad_id=0, max_length=max_length),
    )


@pytest.fixture(scope="module")
def words():
    return create_tokenizer()


@pytest.fixture(scope="module")
def engine_rollouts(words):
    return play(create_backends(create_llama(words), words)[0], words)


def test_each_prompt_is_the_template_s_and_the_turns_after_it_stay_as_sampled(
    words, engine_rollouts
):
    renderer, num_contexts = ChatRenderer(words), 0
    for rollout in engine_rollouts:
        messages: list[dict[str, Any]] = [
            {"role": "user", "content": f"answer {rollout.trajectory.seed}"}
        ]
        actions = iter(rollout.trajectory.turns)
        prompt: list[int] = []  # the policy's current prompt
        for index, (ids, mask, _) in enumerate(iter_contexts(rollout)):
            if index:
                prompt = words.apply_chat_template(
                    messages, add_generation_prompt=True, tokenize=True
                )["input_ids"]
                assert (
                    ids[: len(prompt)] == prompt
                    and not any(mask[: len(prompt)])
                    and mask[len(prompt)]
                )
                num_contexts += 1
            position = mask.index(True)
            while position < len(ids):
                turn = next(actions)
                assert all(mask[position : position + turn.num_tokens])
                assert (
                    renderer.action_text(ids[position : position + turn.num_tokens]) == turn.action
                )
                position += turn.num_tokens
                messages.append({"role": "assistant", "content": turn.action})
                if turn.observation is not None:
                    role = "tool" if len(messages) == 4 else "user"
                    messages.append({"role": role, "content": turn.observation})
                while position < len(ids) and not mask[position]:
                    position += 1
        assert next(actions, None) is None
        closed = sum("</think>" in turn.action for turn in rollout.trajectory.turns[:-1])
        assert rollout.context_starts or not closed, "closed thoughts are dropped"
    assert 0 < num_contexts == sum(len(rollout.context_starts) for rollout in engine_rollouts)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "lora"])
def test_sampler_and_trainer_agree_with_each_context_alone(words, kind):
    model: Any = create_llama(words)
    if kind == "gpt2":  # has no packed forward pass
        torch.manual_seed(0)
        size = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 256}
        config = GPT2Config(vocab_size=len(words), initializer_range=0.3, **size)
        model = GPT2LMHeadModel(config).eval()
    if kind == "lora":
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = add_adapter(model, LoraSettings(rank=2)).eval()
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if "lora_B" in name:
                    weight.normal_(std=0.1, generator=torch.Generator().manual_seed(1))
    check_contexts(model)
    both = [play(backend, words) for backend in create_backends(model, words)]
    # Log-probs agree up to rounding, so one token in thousands may be drawn differently.
    equal = [
        first.completion_ids == second.completion_ids for first, second in zip(*both, strict=True)
    ]
    assert sum(equal) >= len(equal) - 1
    for first, second, is_equal in zip(*both, equal, strict=True):
        assert first.context_starts == second.context_starts or not is_equal
    assert any(rollout.context_starts for rollout in both[0])
    for rollouts in both:
        for rollout in rollouts:
            for ids, mask, logprobs in iter_contexts(rollout):
                sampled_logprobs = [
                    value for value, sampled in zip(logprobs, mask, strict=True) if sampled
                ]
                np.testing.assert_allclose(
                    sampled_logprobs, compute_context_logprobs(model, ids, mask, 0.7), atol=1e-4
                )
        for batch in build_batches(rollouts, 600, 0):
            with torch.no_grad():
                logprobs_BS = completion_logprobs(model, batch)[0]
            assert torch.allclose(logprobs_BS, batch.sampler_logprobs_BS, atol=1e-4)


def test_the_gradient_is_the_sum_over_contexts(words, engine_rollouts):
    model = create_llama(words)
    rows = engine_rollouts[:4]

    def compute_gradient(rows):
        model.zero_grad()
        for batch in build_batches(rows, 10_000, 0):
            completion_logprobs(model, batch)[0].sum().backward()
        return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])

    separate = [
        TrainRow(ids[:1], ids[1:], mask[1:], lp[1:], 0.7)
        for row in rows
        for ids, mask, lp in iter_contexts(row)
    ]
    together, separate = compute_gradient(rows), compute_gradient(separate)
    assert float((together - separate).abs().max()) < 1e-5 * float(separate.abs().max())
    mixed = compute_gradient([replace(build_train_row(row), context_starts=()) for row in rows])
    assert float((together - mixed).abs().max()) > 1e-2 * float(separate.abs().max()), (
        "as one sequence the gradient differs"
    )


@pytest.mark.parametrize(
    "options", [{"slots": 5}, {"slots": 3, "rejoin": "ready"}, {"repetition_penalty": 1.3}]
)
def test_slots_environments_and_penalties_keep_the_tokens(words, options):
    model = create_llama(words)
    environment = SlowChatEnvironment() if "rejoin" in options else ChatEnvironment()
    engine, transformers = (
        play(backend, words, environment, **options) for backend in create_backends(model, words)
    )
    assert any(rollout.context_starts for rollout in engine)
    assert [r.completion_ids for r in engine] == [r.completion_ids for r in transformers]
    for ours, theirs in zip(engine, transformers, strict=True):
        np.testing.assert_allclose(ours.sampler_logprobs, theirs.sampler_logprobs, atol=1e-4)


def test_the_limit_counts_what_was_sampled_and_observed_once(words):
    for backend in create_backends(create_llama(words), words):
        rollouts = play(backend, words, max_completion_tokens=100)
        stopped = [r for r in rollouts if r.trajectory.stop_reason == StopReason.MAX_TOKENS]
        assert any(r.context_starts for r in rollouts) and stopped and len(stopped) < len(rollouts)
        for rollout in rollouts:
            assert rollout.num_episode_tokens <= 100
            assert all(
                len(ids) <= len(rollout.prompt_ids) + 100 for ids, _, _ in iter_contexts(rollout)
            )


def test_templates_that_keep_the_last_question_continue_after_tools(words):
    keeping = create_tokenizer(OPENS_KEEPS_LAST)
    rollouts = play(create_backends(create_llama(keeping), keeping)[0], keeping)
    for rollout in rollouts:
        tools = [r for r in rollout.trajectory.turns[1:2] if r.observation is not None]
        if not (tools and rollout.context_starts):
            continue
        texts = [keeping.decode(ids) for ids, _, _ in iter_contexts(rollout)]
        assert any("<tool_response>" in text for text in texts)
    starts = [len(rollout.context_starts) for rollout in rollouts]
    assert max(starts) == 2, "after the two questions, not after the tool"


def test_history_as_it_was_sampled_is_one_context(words):
    rollouts = play(create_backends(create_llama(words), words)[0], words, history="keep")
    assert not any(rollout.context_starts for rollout in rollouts)
    assert all(r.num_episode_tokens == len(r.completion_ids) for r in rollouts)
    assert all(r.last_context == [*r.prompt_ids, *r.completion_ids] for r in rollouts)


def create_trainer(words, **options):
    trainer = make_trainer(
        words,
        ChatEnvironment(),
        model=create_llama(words),
        learning_rate=1e-3,
        prompts_per_iteration=3,
        group_size=4,
        sampling=SamplingSettings(max_completion_tokens=100, max_turns=6, temperature=0.7),
        **options,
    )
    trainer.renderer = ChatRenderer(words, ModelSettings(history_thoughts="template"))
    trainer.backend = create_backends(trainer.policy, words)[0]
    return trainer


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_training_sees_the_sampler_s_policy_and_resumes_with_replayed_contexts(words, algorithm):
    options = {"algorithm": algorithm}
    if algorithm == "grpo":
        options |= {"replay": ReplaySettings(share=0.5, iterations=2), "importance": "token"}
    uninterrupted, first = create_trainer(words, **options), create_trainer(words, **options)
    metrics = [uninterrupted.step() for _ in range(3)]
    assert any(
        rollout.context_starts for group in uninterrupted.groups for rollout in group.rollouts
    )
    assert all(abs(row["policy/update_kl"]) < 1e-5 for row in metrics[:1]), (
        "the policy is unchanged before its first step"
    )
    first.step(), first.step()
    second = create_trainer(words, **options)
    second.model.load_state_dict(first.model.state_dict())
    second.optimizer_step.load_state_dict(first.optimizer_step.state_dict())
    second.load_state_dict(first.state_dict())
    second.step()
    assert weights_digest(second.model) == weights_digest(uninterrupted.model)


def test_the_replay_buffer_keeps_contexts(engine_rollouts):
    samples = [
        TrainingSample(build_train_row(rollout), 1.0, False, 0.5) for rollout in engine_rollouts
    ]
    buffer, other = (ReplayBuffer(ReplaySettings(share=1.0, iterations=1)) for _ in range(2))
    buffer.add_groups([samples])
    other.load_state_dict(buffer.state_dict())
    (group,) = other.draw_groups(np.random.default_rng(0), 1)
    assert [list(sample.row.context_starts) for sample in group] == [
        r.context_starts for r in engine_rollouts
    ]


def test_tokens_on_disk_keep_contexts(engine_rollouts, tmp_path):
    import json

    path = tmp_path / "trajectories_x.jsonl"
    path.write_text("".join(json.dumps(r.trajectory.to_json()) + "\n" for r in engine_rollouts))
    write_tokens(tmp_path / "tokens_x.jsonl", engine_rollouts)
    restored = read_rollouts(path, len(engine_rollouts))
    assert [r.context_starts for r in restored] == [r.context_starts for r in engine_rollouts]
    assert [r.loss_mask for r in restored] == [r.loss_mask for r in engine_rollouts]


def test_teachers_judge_each_context_alone(words, engine_rollouts):
    model = create_llama(words)
    selected = [rollout for rollout in engine_rollouts if rollout.context_starts][:3]
    rows = [replace(build_train_row(rollout), temperature=1.0) for rollout in selected]
    (batch,) = build_batches(rows, 10_000, 0)
    local = LocalTeacher(
        model, context=max(len(ids) for r in engine_rollouts for ids, _, _ in iter_contexts(r))
    ).compute_logprobs(batch)
    with serve_teacher(model) as (url, requests):
        served = ServedTeacher(TeacherSettings(url=url, model="m", api="echo")).compute_logprobs(
            batch
        )
    assert len(requests) == sum(1 + len(row.context_starts) for row in rows)
    assert torch.allclose(local, served, atol=1e-4)
    for row, index in enumerate(batch.rows):
        expected = [
            value
            for ids, mask, _ in iter_contexts(selected[index])
            for value in compute_context_logprobs(model, ids, mask, 1.0)
        ]
        np.testing.assert_allclose(local[row][batch.loss_mask_BS[row]], expected, atol=1e-4)


def test_states_of_a_turn_are_those_of_its_context(words, engine_rollouts):
    model = create_llama(words)
    rollout = next(r for r in engine_rollouts if r.context_starts)
    (states,) = compute_turn_embeddings(model, [rollout], pad_id=0)
    ids, mask, _ = list(iter_contexts(rollout))[-1]
    with torch.no_grad():
        hidden_SH = model.base_model(input_ids=torch.tensor([ids])).last_hidden_state[0]
    count = rollout.trajectory.turns[-1].num_tokens
    assert all(mask[-count:])
    assert torch.allclose(states.actions_NH[-1], hidden_SH[-count:].mean(0), atol=1e-4)


class ForgetfulSequence:
    """A sequence that starts a new context after each action, and would sample all of its tokens again."""

    prompt_ids, seed = [1, 2, 3], 5

    def __init__(self, limit):
        self.actions, self._limit = [], limit

    def take_action(self, action_ids, logprobs, hit_limit):
        self.actions.append(action_ids)
        left = self._limit - sum(map(len, self.actions))
        return (
            None
            if hit_limit or left < 1
            else ReplacementContext([1], 1 + (left if len(self.actions) < 3 else 40))
        )

    def should_stop(self, action_ids):
        return False


@pytest.mark.parametrize("kind", ["engine", "transformers"])
def test_contexts_together_sample_no_more_than_the_sequence_may(words, kind):
    """Regression: beyond its random numbers a sequence drew zeros, or those of another one."""
    options = dict(eos_ids=range(0, len(words), 2), pad_id=0, max_length=64)
    model = create_llama(words)
    backend = (
        create_rollout_backend(model, **options)
        if kind == "engine"
        else TransformersBackend(model, **options)
    )
    sequence = ForgetfulSequence(40)
    with pytest.raises(
        DataError, match=r"cannot grow to 41 tokens where \d+ more tokens may be sampled"
    ):
        backend.run_sequences(
            [sequence], SamplingSettings(max_completion_tokens=40, temperature=1.0)
        )
    assert len(sequence.actions) == 3


def test_readers_of_one_sequence_refuse_several(engine_rollouts):
    several = next(r for r in engine_rollouts if r.context_starts)
    single = replace(several, context_starts=[])
    with pytest.raises(
        SettingsError, match=r"^model.history_thoughts: the training of thoughts takes one sequence"
    ):
        read_thought_episode(ChatEnvironment(), None, several)  # type: ignore[arg-type]
    with pytest.raises(
        SettingsError, match=r"^model.history_thoughts: a preference pair takes one sequence"
    ):
        several.check_one_context("a preference pair")
    single.check_one_context("a preference pair")
    torch.manual_seed(0)
    mamba = MambaForCausalLM(
        MambaConfig(vocab_size=32, hidden_size=16, num_hidden_layers=1, state_size=4)
    )
    with pytest.raises(
        SettingsError,
        match=r"^model.history_thoughts: template, or an agent .* gives episodes of several contexts",
    ):
        check_contexts(mamba)


def test_a_context_that_cannot_continue_is_refused():
    check_observation(ReplacementContext([1, 2], 3), room=1, context=3, hit_limit=False, draws=1)
    for ids, limit, draws in (([], 3, 3), ([1, 2, 3], 3, 3), ([1, 2], 4, 3), ([1], 3, 1)):
        with pytest.raises(DataError, match=r"cannot grow to"):
            check_observation(
                ReplacementContext(ids, limit), room=9, context=3, hit_limit=False, draws=draws
            )
    trajectory = Trajectory("e", "l", "k", 0, "", "")
    wrong = Rollout([1], [2, 3], [True, True], [0.0, 0.0], trajectory, context_starts=[2])
    with pytest.raises(
        DataError, match=r"row 0: context_starts \[2\] must be increasing and within 2 tokens"
    ):
        build_batches([wrong], 100, 0)
