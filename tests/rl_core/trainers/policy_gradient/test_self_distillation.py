"""The policy as its own teacher: log-probs of the privileged prompt, learning, resume, adapters, what lacks a hint."""

import numpy as np
import pytest
import torch
from helpers.letters import (
    FewLetters,
    LetterEpisode,
    Walk,
    make_trainer,
    resumes_bit_for_bit,
    weights,
)
from helpers.library import Echo, small_policy

import rl_core
from rl_core.data.chat import ChatRenderer
from rl_core.data.tokenizer import train_tokenizer
from rl_core.environments.environment import Step
from rl_core.errors import CheckpointError, SettingsError
from rl_core.models import causal_lm
from rl_core.models.lora import add_adapter
from rl_core.settings import (
    DistillationSettings,
    LaunchSettings,
    LoraSettings,
    ModelSettings,
    ReplaySettings,
    SamplingSettings,
    SelfTeacherSettings,
    TeacherSettings,
    build_settings,
)
from rl_core.settings.distillation import DistilledPolicySettings
from rl_core.trainers.policy_gradient.self_distillation import SelfTeacher

CONTEXT = 96


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["abc xyz low high right answer is"], 300)


class HintedEpisode(LetterEpisode):
    """Tells which letters are right in its target, a column, and feedback on a wrong action."""

    @property
    def target(self):
        return "abc" if self.level == "low" else "xyz"

    @target.setter
    def target(self, value):
        pass

    def reset(self):
        self.row["hint"] = f"like {self.target}"
        return [{"role": "system", "content": "s"}, *super().reset()]

    def act(self, text):
        step = super().act(text)
        info = {} if step.success else {"feedback": f"not {text[:1]}"}
        return Step(reward=step.reward, terminated=True, success=step.success, info=info)


class Hinted(FewLetters):
    def episode(self, seed, level):
        return HintedEpisode(seed, level)


def build_trainer(tokenizer, teacher, environment=None, model=None, **options):
    model = model or causal_lm.create_model(
        ModelSettings(preset="nano", context=CONTEXT, device="cpu"), tokenizer, 0
    )
    return make_trainer(
        tokenizer,
        environment or Hinted(),
        model=model,
        teacher=SelfTeacher(model, ChatRenderer(tokenizer), teacher, context=CONTEXT),
        kind=DistilledPolicySettings,
        context=CONTEXT,
        gamma=0.0,
        **options,
    )


@torch.no_grad()
def compute_teacher_logprobs(model, renderer, rollout, text, temperature=1.0):
    """Compute log p(token) of a rollout after another question, from transformers' logits."""
    messages = [*rollout.messages[:-1], {"role": "user", "content": text}]
    prompt = renderer.prompt_ids(messages)
    logits = model(input_ids=torch.tensor([prompt + rollout.completion_ids])).logits[0].double()
    logp = (logits / temperature).log_softmax(-1)[len(prompt) - 1 : -1]
    return [float(logp[t, token]) for t, token in enumerate(rollout.completion_ids)]


@pytest.mark.parametrize("kind", ["current", "ema", "initial"])
@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_advantages_are_those_of_the_teachers_weights_after_its_prompt(
    tokenizer, kind, adapted, temperature
):
    """Recompute log p_teacher - log p_policy by hand in the second iteration, when all three weights differ."""
    model = None
    if adapted:
        base = causal_lm.create_model(
            ModelSettings(preset="nano", context=CONTEXT, device="cpu"), tokenizer, 0
        )
        model = add_adapter(base, LoraSettings(rank=2))
    teacher = SelfTeacherSettings(
        prompt="{prompt}, {hint}: {target} {{}}",
        weights=kind,
        **({"ema_decay": 0.5} if kind == "ema" else {}),
    )
    sampling = SamplingSettings(max_completion_tokens=3, temperature=temperature)
    trainer = build_trainer(
        tokenizer, teacher, model=model, sampling=sampling, micro_batch_tokens=120
    )
    copies = [{n: p.clone() for n, p in trainer.policy.state_dict().items()}]
    trainer.step()
    copies.append({n: p.clone() for n, p in trainer.policy.state_dict().items()})
    buffers = []
    update = trainer._update_policy

    def spy(rng):
        from rl_core.trainers.policy_gradient.rollout_buffer import RolloutBuffer

        original = RolloutBuffer.compute_teacher_logprobs

        def keep(self, plan):
            original(self, plan)
            buffers.append(self)

        RolloutBuffer.compute_teacher_logprobs = keep
        try:
            return update(rng)
        finally:
            RolloutBuffer.compute_teacher_logprobs = original

    trainer._update_policy = spy
    metrics = trainer.step()
    expected_weights = {
        "current": copies[1],
        "initial": copies[0],
        "ema": {n: (copies[0][n] + copies[1][n]) / 2 for n in copies[0]},
    }[kind]
    after = {n: p.clone() for n, p in trainer.policy.state_dict().items()}
    trainer.policy.load_state_dict(expected_weights)
    (buffer,) = buffers
    rollouts = [rollout for group in trainer.groups for rollout in group.rollouts]
    renderer, largest = ChatRenderer(tokenizer), 0.0
    for row, rollout in enumerate(rollouts):
        t = rollout.trajectory
        text = f"{t.prompt}, like {t.target}: {t.target} {{}}"
        expected = compute_teacher_logprobs(trainer.policy, renderer, rollout, text, temperature)
        start = len(rollout.prompt_ids)
        actual = buffer.teacher_logprobs_RS[row, start : start + len(expected)].numpy()
        np.testing.assert_allclose(actual, expected, atol=1e-4)
        largest = max(largest, np.abs(np.array(expected) - rollout.sampler_logprobs).max())
    assert largest > 0.01 and metrics["train/taught_rate"] == 1
    trainer.policy.load_state_dict(after)


def test_the_policy_has_its_own_weights_after_the_teachers_pass(tokenizer):
    trainer = build_trainer(tokenizer, SelfTeacherSettings(weights="initial"), learning_rate=1e-9)
    trainer.step()
    before = weights(trainer)
    for tensor in trainer.actor_critic.teacher._weights.values():
        tensor.mul_(3)
    assert trainer.step()["policy/teacher_kl"] > 0
    assert torch.allclose(weights(trainer), before, atol=1e-7)


@pytest.mark.parametrize("kind", ["current", "ema", "initial"])
@pytest.mark.parametrize("adapted", [False, True])
def test_it_resumes_bit_for_bit(tokenizer, kind, adapted):
    def build():
        model = causal_lm.create_model(
            ModelSettings(preset="nano", context=CONTEXT, device="cpu"), tokenizer, 0
        )
        if adapted:
            torch.manual_seed(3)
            model = add_adapter(model, LoraSettings(rank=2))
        return build_trainer(
            tokenizer, SelfTeacherSettings(weights=kind), model=model, epochs=2, minibatches=2
        )

    assert resumes_bit_for_bit(build)


def test_an_average_that_is_not_restored_is_noticed(tokenizer):
    """Check the test above: with the average of a fresh trainer, a resumed run differs."""

    def build():
        return build_trainer(tokenizer, SelfTeacherSettings(ema_decay=0.5), learning_rate=3e-2)

    first, second = build(), build()
    for _ in range(2):
        first.step()
    second.model.load_state_dict(first.model.state_dict())
    second.optimizer_step.load_state_dict(first.optimizer_step.state_dict())
    state = first.state_dict()
    assert len(state["self_teacher"]) > 5
    with pytest.raises(CheckpointError, match="averaged weights of another model"):
        second.load_state_dict({**state, "self_teacher": {}})
    second.load_state_dict({**state, "self_teacher": build().state_dict()["self_teacher"]})
    assert first.step()["policy/teacher_kl"] != second.step()["policy/teacher_kl"]


@pytest.mark.slow
def test_the_policy_comes_to_answer_as_with_the_hint(tokenizer):
    """Teach a model to copy from a hint, then distil the hint into it: success rises without any reward."""
    model = causal_lm.create_model(
        ModelSettings(preset="nano", context=CONTEXT, device="cpu"), tokenizer, 0
    )
    renderer = ChatRenderer(tokenizer)
    answers = {}  # hint -> a right letter that ends the action, see `make_trainer`
    for hint, letters in (("abc", "abcdefghijklm"), ("xyz", "nopqrstuvwxyz")):
        ids = [tokenizer.convert_tokens_to_ids(letter) for letter in letters]
        answers[hint] = next(number for number in ids if number % 2 == 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(60):
        optimizer.zero_grad()
        for hint, answer in answers.items():
            for level in ("low", "high"):  # the hint decides, not the question
                for seed in range(3):
                    text = f"{level}{seed}\n\nThe right answer is: {hint}"
                    messages = [
                        {"role": "system", "content": "s"},
                        {"role": "user", "content": text},
                    ]
                    prompt = torch.tensor([renderer.prompt_ids(messages)])
                    logp = model(input_ids=prompt).logits[0, -1].log_softmax(-1)
                    (-logp[answer]).backward()
        optimizer.step()
    trainer = build_trainer(
        tokenizer,
        SelfTeacherSettings(weights="initial"),
        model=model,
        prompts_per_iteration=12,
        learning_rate=5e-3,
    )
    rows = [trainer.step() for _ in range(30)]
    kl = [row["policy/teacher_kl"] for row in rows]
    success = [row["train/success_rate"] for row in rows]
    assert sum(kl[-5:]) < 0.5 * sum(kl[:5])
    assert sum(success[-5:]) / 5 > sum(success[:3]) / 3 + 0.2


def test_only_rollouts_with_a_hint_are_taught(tokenizer):
    """Show that failed rollouts get a peer's solution, and groups without one, or without feedback, nothing."""
    trainer = build_trainer(
        tokenizer, SelfTeacherSettings(prompt="{prompt} {solution}", weights="current")
    )
    metrics = trainer.step()
    taught = [
        sum(other.success for other in group.rollouts if other is not rollout) > 0
        for group in trainer.groups
        for rollout in group.rollouts
    ]
    assert 0 < sum(taught) < len(taught)
    assert metrics["train/taught_rate"] == pytest.approx(sum(taught) / len(taught))
    trainer = build_trainer(
        tokenizer, SelfTeacherSettings(prompt="{prompt} {feedback}", weights="current")
    )
    metrics = trainer.step()
    informed = [
        "feedback" in rollout.trajectory.info
        for group in trainer.groups
        for rollout in group.rollouts
    ]
    assert 0 < sum(informed) < len(informed)
    assert metrics["train/taught_rate"] == pytest.approx(sum(informed) / len(informed))


@pytest.mark.parametrize("prompt", ["{prompt} {feedback}", "{prompt} {missing}"])
def test_an_iteration_without_any_hint_changes_nothing(tokenizer, prompt):
    trainer = build_trainer(
        tokenizer, SelfTeacherSettings(prompt=prompt), environment=FewLetters(), epochs=2
    )
    before = weights(trainer)
    metrics = trainer.step()
    assert metrics["train/taught_rate"] == 0 and metrics["policy/teacher_kl"] == 0
    assert torch.equal(weights(trainer), before)


def test_a_prompt_beyond_the_context_is_not_taught(tokenizer):
    long = "{prompt} {target} " + "z " * 200
    trainer = build_trainer(tokenizer, SelfTeacherSettings(prompt=long))
    assert trainer.step()["train/taught_rate"] == 0


def test_several_turns_and_one_rollout_a_group(tokenizer):
    """Show that the observations of a walk stand behind the teacher's prompt too, and the last one is its feedback."""
    trainer = build_trainer(
        tokenizer,
        SelfTeacherSettings(prompt="{prompt} after {feedback}", weights="current"),
        environment=Walk(),
        group_size=1,
        sampling=SamplingSettings(max_completion_tokens=30, max_turns=4),
    )
    metrics = trainer.step()
    assert 0 < metrics["train/taught_rate"] <= 1
    assert any(len(group.rollouts[0].trajectory.turns) > 1 for group in trainer.groups)


def test_the_entry_point_trains_and_refuses():
    def distil(environment=None, **changes):
        options = {
            "iterations": 2,
            "prompts_per_iteration": 2,
            "eval_every": 0,
            "patience": None,
            "sampling": {"max_completion_tokens": 3},
            **changes,
        }
        return rl_core.distill(small_policy(), environment=environment or Echo(), settings=options)

    training = distil(self_teacher={"prompt": "{prompt} {feedback}", "weights": "current"})
    assert "train/taught_rate" in training.trainer.step()
    policy, mistyped = small_policy(), SelfTeacherSettings(prompt="{prompt} {answr}")
    with pytest.raises(SettingsError, match=r"self_teacher.prompt: '\{answr\}' is none of prompt"):
        SelfTeacher(policy.model, policy.renderer, mistyped, columns=("answer",))
    with pytest.raises(SettingsError, match="tells the teacher nothing"):
        distil(self_teacher={"prompt": "{prompt} again"})
    with pytest.raises(SettingsError, match="set one of the two"):
        rl_core.distill(
            small_policy(),
            small_policy(),
            environment=Echo(),
            settings={"self_teacher": {}},
        )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(teacher=TeacherSettings(model="other")), "self_teacher: the policy teaches itself"),
        (dict(replay=ReplaySettings(), importance="token"), "replay: rollouts of earlier"),
        (
            dict(launch=LaunchSettings(kind="torchrun", processes=2)),
            "self_teacher.weights: ema swaps in other weights",
        ),
        (
            dict(self_teacher={"weights": "initial", "ema_decay": 0.9}),
            "ema_decay: not used by weights initial",
        ),
        (dict(self_teacher={"ema_decay": 1.0}), "ema_decay"),
    ],
)
def test_what_cannot_work_is_refused_by_name(options, message):
    with pytest.raises(SettingsError, match=message):
        build_settings({"self_teacher": {}, **options}, DistillationSettings, "distill")


def test_episodes_of_an_agent_are_refused(tokenizer):
    trainer = build_trainer(tokenizer, SelfTeacherSettings())
    play = trainer._play_round

    def forget(rng, count, attempt):
        groups = play(rng, count, attempt)
        for group in groups:
            for rollout in group.rollouts:
                rollout.messages = []
        return groups

    trainer._play_round = forget
    with pytest.raises(SettingsError, match="episodes of an agent"):
        trainer.step()
