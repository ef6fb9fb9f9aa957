"""Chat-template settings through the Python API: demonstrations, rollouts, resume."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from helpers.chat_templates import DATED, HERMES, OPENS_AND_STRIPS, OPENS_KEEPS_LAST, family
from transformers import LlamaConfig, LlamaForCausalLM

import rl_core
from rl_core.api.policy import Policy, load_policy
from rl_core.data.records import read_demonstrations
from rl_core.data.training_sequences import build_training_sequences
from rl_core.environments import make_environment
from rl_core.models.logprobs import completion_logprobs
from rl_core.rollouts.batching import build_batches
from rl_core.rollouts.collect import collect_rollouts
from rl_core.rollouts.episode_sequence import EpisodeRequest
from rl_core.settings import ModelSettings, SamplingSettings, SFTSettings
from rl_core.types import Trajectory

THINK = ("<think>", "</think>")


def build_policy(template: str, markers: tuple[str, ...] = (), **settings: object) -> Policy:
    tokenizer = family(template, markers)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=48,
        max_position_embeddings=2048,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
    return load_policy((model, tokenizer), ModelSettings(path="x", **settings))  # type: ignore[arg-type]


def build_rows(answer: str = "<think>\na\n</think>\n\nred") -> list[dict[str, object]]:
    requests = [f"u{index}" for index in range(4)]
    return [
        {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]}
        for text in requests
    ]


def test_what_sft_learned_under_an_opened_thought_is_what_a_rollout_samples() -> None:
    taught = build_policy(OPENS_KEEPS_LAST, THINK)
    options = SFTSettings(epochs=40.0, batch_size=4, learning_rate=1e-2, warmup_steps=0)
    training = rl_core.sft(taught, build_rows(), heldout=0, settings=options)
    training.run()
    sampling = SamplingSettings(temperature=0.0, max_completion_tokens=40)
    assert training.generate(["u1"], sampling=sampling) == [["<think>\na\n</think>\n\nred"]], (
        "one opening, as taught"
    )


def test_sampler_and_trainer_agree_on_turns_with_opened_thoughts() -> None:
    subject = build_policy(OPENS_AND_STRIPS, THINK)
    environment = make_environment("arithmetic")
    groups = collect_rollouts(
        environment,
        subject.backend(),
        subject.renderer,
        [EpisodeRequest(environment.levels[0], 3)],
        group_size=4,
        sampling=SamplingSettings(temperature=0.7, max_completion_tokens=60),
        seed=1,
    )
    rollouts = groups[0].rollouts
    assert all(r.trajectory.turns[0].action.startswith("<think>\n") for r in rollouts)
    for batch in build_batches(rollouts, 4096, subject.renderer.pad_id):
        logprobs_BS, _ = completion_logprobs(subject.model.eval(), batch)
        assert batch.sampler_logprobs_BS is not None
        torch.testing.assert_close(
            logprobs_BS.detach(), batch.sampler_logprobs_BS, atol=1e-4, rtol=0
        )


def test_native_tools_are_in_the_prompt_of_rollouts_and_of_rows_alike() -> None:
    subject = build_policy(HERMES, native_tools=True)
    environment = make_environment("pixel_grid")
    level = environment.levels[0]
    demonstration = environment.demonstration(5, level)
    assert demonstration is not None
    (row,) = read_demonstrations(
        [{"messages": demonstration.messages, "tools": environment.tools.schema()}]
    ).rows
    ((ids, mask),) = build_training_sequences(subject.renderer, row["messages"], row["tools"])
    (group,) = collect_rollouts(
        environment,
        subject.backend(),
        subject.renderer,
        [EpisodeRequest(level, 5)],
        group_size=1,
        sampling=SamplingSettings(max_completion_tokens=4, max_turns=1),
        seed=1,
    )
    prompt = group.rollouts[0].prompt_ids
    assert prompt == ids[: mask.index(True)]
    assert '"function": {"name": "zoom"' in subject.tokenizer.decode(prompt)


PRIVATE = HERMES.replace(
    '<tool_call>{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}</tool_call>',
    "[[{{ call.function.name }} {{ call.function.arguments | tojson }}]]",
)


@pytest.mark.parametrize(
    ("template", "reason"), [(PRIVATE, r"'\[\["), (DATED, "does not describe tools")]
)
def test_native_tools_that_no_call_would_reach_are_refused(template: str, reason: str) -> None:
    subject = build_policy(template, native_tools=True)
    environment = make_environment("pixel_grid")
    with pytest.raises(rl_core.SettingsError, match=rf"^model.native_tools.*{reason}"):
        collect_rollouts(
            environment,
            subject.backend(),
            subject.renderer,
            [EpisodeRequest(environment.levels[0], 5)],
            group_size=1,
            sampling=SamplingSettings(max_completion_tokens=4),
            seed=1,
        )


def test_a_resumed_run_has_the_same_day_and_variables(tmp_path: Path) -> None:
    def train_sft(**settings: object) -> None:
        options = SFTSettings(max_steps=2, batch_size=2, checkpoint_every=1)
        rl_core.sft(
            build_policy(DATED, **settings),
            build_rows("red"),
            heldout=0,
            settings=options,
            output=tmp_path / "run",
        ).run()

    train_sft()
    train_sft()  # resumed after its end
    with pytest.raises(rl_core.ResumeRefused, match="chat"):
        train_sft(chat_template_date="2025-01-01")
    with pytest.raises(rl_core.ResumeRefused, match="chat"):
        train_sft(chat_template_kwargs={"date_string": "today"})


def test_a_distilled_policy_keeps_its_template_settings_and_resumes_with_them_alone(
    tmp_path: Path,
) -> None:
    def distill_policy(date: str) -> rl_core.Training:
        return rl_core.distill(
            build_policy(DATED, chat_template_date=date),
            build_policy(DATED),
            prompts=["a", "b"],
            output=tmp_path / "run",
            settings=rl_core.DistillationSettings(
                iterations=1,
                prompts_per_iteration=2,
                sampling=SamplingSettings(max_completion_tokens=2),
                checkpoint_every=1,
            ),
        )

    training = distill_policy("2025-01-01")
    assert training.policy.renderer.settings.chat_template_date == "2025-01-01"
    training.run()
    with pytest.raises(rl_core.ResumeRefused, match="chat"):
        distill_policy("2025-01-02").run()


def test_a_trained_policy_keeps_its_template_settings() -> None:
    def score_zero(trajectories: list[Trajectory]) -> list[float]:
        return [0.0 for _ in trajectories]

    subject = build_policy(DATED, chat_template_date="2025-01-01")
    training = rl_core.grpo(
        subject,
        prompts=["a", "b"],
        reward=score_zero,
        settings=rl_core.PolicySettings(
            iterations=1,
            prompts_per_iteration=2,
            group_size=2,
            sampling=SamplingSettings(max_completion_tokens=2),
        ),
    )
    assert training.policy.renderer.settings.chat_template_date == "2025-01-01"
    assert training.policy.renderer.digest == subject.renderer.digest
    reloaded = load_policy(
        (subject.model, subject.tokenizer), dataclasses.replace(subject.renderer.settings)
    )
    assert reloaded.renderer.digest == subject.renderer.digest
