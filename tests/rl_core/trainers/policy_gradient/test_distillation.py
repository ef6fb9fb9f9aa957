"""On-policy distillation: advantages against the oracle, learning, resume; teachers here and behind a server."""

import dataclasses

import numpy as np
import pytest
import torch
from helpers.letters import Letters, make_trainer, resumes_bit_for_bit, weights
from helpers.teacher_server import serve_teacher
from oracles import policy_oracles as oracle

import rl_core
from rl_core.api.recipes.policy_gradient import load_teacher
from rl_core.data.chat import ChatRenderer
from rl_core.data.tokenizer import train_tokenizer
from rl_core.errors import BackendError, DataError, SettingsError
from rl_core.inference.teacher import LocalTeacher, ServedTeacher
from rl_core.models import causal_lm
from rl_core.models.logprobs import completion_logprobs
from rl_core.rollouts.batching import TrainRow, build_batches
from rl_core.settings import (
    DistillationSettings,
    ModelSettings,
    PolicySettings,
    ReplaySettings,
    SamplingSettings,
    TeacherSettings,
)
from rl_core.settings.distillation import DistilledPolicySettings
from rl_core.trainers.policy_gradient.cross_vocabulary import AlignedTeacher
from rl_core.trainers.policy_gradient.samples import TrainingSample
from rl_core.trainers.policy_gradient.trainer import PolicyGradientTrainer
from rl_core.trainers.policy_gradient.update import PolicyUpdate

ROWS = [  # prompt, completion, loss mask; ragged, with an observation in two of them
    ([5, 6], [7, 8, 9, 10], [True, True, False, True]),
    ([5, 6], [7], [True]),
    ([5], [11, 12, 13], [True, False, True]),
]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["abc xyz"], 300)


def build_model(tokenizer, seed, sharper=1.0):
    model = causal_lm.create_model(
        ModelSettings(preset="nano", context=32, device="cpu"), tokenizer, seed
    )
    with torch.no_grad():
        model.lm_head.weight.mul_(sharper)
    return model


def build_trainer(tokenizer, teacher, **options):
    settings = DistillationSettings(
        **{
            "iterations": 50,
            "prompts_per_iteration": 36,
            "learning_rate": 1e-2,
            "warmup_steps": 0,
            "sampling": SamplingSettings(max_completion_tokens=3),
            **options,
        }
    )
    policy = settings.policy()
    values = {field.name: getattr(policy, field.name) for field in dataclasses.fields(policy)}
    del values["rewards"]
    return make_trainer(tokenizer, teacher=teacher, kind=DistilledPolicySettings, **values)


@pytest.mark.parametrize(("gamma", "temperature"), [(0.0, 1.0), (0.0, 0.7), (1.0, 1.0), (0.5, 1.5)])
def test_advantages_of_tokens_equal_the_oracle(tokenizer, gamma, temperature):
    """Compare with log p_teacher - log p_student of each token, at the temperature that it was sampled at."""
    teacher = build_model(tokenizer, 5, sharper=8.0)
    sampling = SamplingSettings(temperature=temperature)
    trainer = build_trainer(
        tokenizer, LocalTeacher(teacher), gamma=gamma, epochs=2, sampling=sampling
    )
    results = []
    for model in (trainer.policy, teacher):
        rows = []
        for prompt, completion, _ in ROWS:
            logits = (
                model(input_ids=torch.tensor([prompt + completion])).logits[0].double()
                / temperature
            )
            logp = logits.log_softmax(-1)[len(prompt) - 1 : -1]
            rows.append([float(logp[t, token]) for t, token in enumerate(completion)])
        results.append(rows)
    samples = [
        TrainingSample(TrainRow(p, c, m, [-5.0] * len(c), temperature), 0.0, False)
        for p, c, m in ROWS
    ]
    update = PolicyUpdate(trainer.actor_critic, trainer.settings, [[sample] for sample in samples])
    metrics = update.run_optimizer_steps(np.random.default_rng(0))
    kl = []
    for index, (prompt, completion, loss_mask) in enumerate(ROWS):
        student, values = (np.array([part[index]]) for part in results)
        mask = np.array([loss_mask])
        expected = oracle.discounted(np.where(mask, values - student, 0.0), mask, gamma)[0]
        start = len(prompt)
        ours = update.buffer.advantages_RS[index, start : start + len(completion)].numpy()
        np.testing.assert_allclose(ours, expected, rtol=1e-4, atol=1e-5)
        kl += (student - values)[mask].tolist()
    assert np.abs(kl).max() > 0.1
    assert metrics["policy/teacher_kl"] == pytest.approx(np.mean(kl), rel=1e-4)


def build_prompts(tokenizer):
    renderer = ChatRenderer(tokenizer)
    questions = [f"{level}{number}" for level in ("low", "high") for number in range(3)]
    return [renderer.prompt_ids([{"role": "user", "content": question}]) for question in questions]


def build_letter_teacher(tokenizer):
    """Build the student's twin after ten steps towards the first half of the alphabet."""
    model = build_model(tokenizer, 0)
    letters = tokenizer.convert_tokens_to_ids(list("abcdefghijklm"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(10):
        for ids in build_prompts(tokenizer):
            logp = model(input_ids=torch.tensor([ids])).logits[0, -1].log_softmax(-1)
            (-logp[letters].logsumexp(0)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


@torch.no_grad()
def compute_reverse_kl(trainer, teacher, tokenizer):
    """Compute KL(policy || teacher) over the whole vocabulary, mean over the first two positions of an answer."""
    results = []
    for prompt in build_prompts(tokenizer):
        for ids in (prompt, [*prompt, 9]):
            ours, theirs = (
                model(input_ids=torch.tensor([ids])).logits[0, -1].double().log_softmax(-1)
                for model in (trainer.policy, teacher)
            )
            results.append(float((ours.exp() * (ours - theirs)).sum()))
    return sum(results) / len(results)


@pytest.mark.parametrize(
    "options", [{}, {"epochs": 2, "importance": "token", "replay": ReplaySettings(iterations=2)}]
)
def test_a_student_comes_nearer_to_its_teacher(tokenizer, options):
    teacher = build_letter_teacher(tokenizer)
    trainer = build_trainer(tokenizer, LocalTeacher(teacher), **options)
    before = compute_reverse_kl(trainer, teacher, tokenizer)
    metrics = [trainer.step() for _ in range(25)]
    assert before > 0.3 and compute_reverse_kl(trainer, teacher, tokenizer) < 0.4 * before
    kl = [part["policy/teacher_kl"] for part in metrics]
    assert sum(kl[-5:]) < 0.4 * sum(kl[:5])
    assert "reward/mean" in metrics[0] and "train/success_rate" in metrics[0]  # still measured


def test_it_resumes_bit_for_bit_and_a_teacher_of_equal_weights_teaches_nothing(tokenizer):
    options = {
        "epochs": 2,
        "minibatches": 2,
        "importance": "sequence",
        "replay": ReplaySettings(iterations=2),
    }
    assert resumes_bit_for_bit(
        lambda: build_trainer(tokenizer, LocalTeacher(build_model(tokenizer, 5)), **options)
    )
    same = build_trainer(tokenizer, LocalTeacher(build_model(tokenizer, 0)), epochs=2)
    before = weights(same)
    assert same.step()["policy/teacher_kl"] == 0
    assert torch.equal(weights(same), before)


def batch_of(temperature=1.0):
    rows = [TrainRow(p, c, m, [0.0] * len(c), temperature) for p, c, m in ROWS]
    return build_batches(rows, 1000, 0)[0]


def build_settings(url, **changes):
    return TeacherSettings(url=url, model="theirs", retry_delay_s=0.0, **changes)


@pytest.mark.parametrize("api", ["prompt_logprobs", "echo"])
def test_a_served_teacher_tells_what_the_same_model_tells_here(tokenizer, api):
    teacher = build_model(tokenizer, 5)
    batch = batch_of()
    with serve_teacher(teacher) as (url, requests):
        served = ServedTeacher(build_settings(url, api=api)).compute_logprobs(batch)
    local = LocalTeacher(teacher).compute_logprobs(batch)
    assert torch.equal(local, completion_logprobs(teacher, batch)[0])
    assert torch.allclose(served, local, atol=1e-5) and bool((served != 0).any())
    assert sorted(len(request["prompt"]) for request in requests) == [3, 4, 6]  # without padding
    assert all(
        request["path"] == "/v1/completions" and request["model"] == "theirs"
        for request in requests
    )


def test_a_student_learns_from_a_served_teacher(tokenizer):
    teacher = build_model(tokenizer, 5, sharper=8.0)
    here = build_trainer(tokenizer, LocalTeacher(teacher))
    with serve_teacher(teacher) as (url, _):
        there = build_trainer(tokenizer, ServedTeacher(build_settings(url)))
        pairs = [(here.step(), there.step()) for _ in range(2)]
    for ours, theirs in pairs:
        assert theirs["policy/teacher_kl"] == pytest.approx(ours["policy/teacher_kl"], abs=1e-4)
    assert torch.allclose(weights(here), weights(there), atol=1e-4)


@pytest.mark.parametrize("failure", [(503, "busy"), (200, "<html>502</html>"), (200, "")])
def test_requests_that_were_not_answered_are_sent_again_a_bounded_number_of_times(
    tokenizer, failure
):
    teacher, batch = build_model(tokenizer, 5), batch_of()
    with serve_teacher(
        teacher, before=lambda requests: failure if len(requests) <= 2 else None
    ) as (
        url,
        requests,
    ):
        actual = ServedTeacher(build_settings(url, retries=2, concurrency=1)).compute_logprobs(
            batch
        )
        assert len(requests) == 5
    assert torch.allclose(actual, LocalTeacher(teacher).compute_logprobs(batch), atol=1e-5)
    message = r"did not answer in 3 tries \(the last: 503 .*busy"
    with (
        serve_teacher(teacher, before=lambda requests: (503, "busy")) as (url, _),
        pytest.raises(BackendError, match=message),
    ):
        ServedTeacher(build_settings(url, retries=2, concurrency=1)).compute_logprobs(batch)
    with pytest.raises(
        BackendError, match="did not answer in 1 tries"
    ):  # the server is no longer listening
        ServedTeacher(build_settings(url, retries=0)).compute_logprobs(batch)
    with serve_teacher(teacher, before=lambda requests: (404, "no such model")) as (url, requests):
        with pytest.raises(BackendError, match=r"refuses the request: 404 .*no such model"):
            ServedTeacher(build_settings(url, concurrency=1)).compute_logprobs(batch)
        assert len({str(request["prompt"]) for request in requests}) == len(
            requests
        )  # none was sent twice


def remove_logprobs(answer):
    """Remove one log-prob."""
    answer["choices"][0]["prompt_logprobs"][-1] = None
    return answer


def replace_token_ids(answer):
    places = answer["choices"][0]["prompt_logprobs"]
    answer["choices"][0]["prompt_logprobs"] = [None] + [
        {"299": {"logprob": -1.0}} for _ in places[1:]
    ]
    return answer


def make_logprobs_infinite(answer):
    for index in answer["choices"][0]["prompt_logprobs"][1:]:
        for values in index.values():
            values["logprob"] = float("-inf")
    return answer


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (remove_logprobs, "log-prob None of token"),
        (replace_token_ids, "lacks the log-probs"),
        (make_logprobs_infinite, "log-prob -inf of token"),
        (lambda answer: {"choices": []}, "lacks the log-probs"),
        (lambda answer: {"choices": [{"prompt_logprobs": None}]}, "lacks the log-probs"),
    ],
)
def test_an_answer_without_every_log_prob_is_an_error(tokenizer, change, message):
    with (
        serve_teacher(build_model(tokenizer, 5), change=change) as (url, _),
        pytest.raises(BackendError, match=message),
    ):
        ServedTeacher(build_settings(url)).compute_logprobs(batch_of())


def test_what_a_teacher_cannot_judge_is_refused(tokenizer, tmp_path):
    student = rl_core.load_policy((build_model(tokenizer, 0), tokenizer))
    other = train_tokenizer(["something else altogether, with other pairs of letters"], 310)
    causal_lm.save(build_model(other, 1), other, tmp_path / "other")
    causal_lm.save(build_model(tokenizer, 1), tokenizer, tmp_path / "same")
    aligned = load_teacher(TeacherSettings(model=str(tmp_path / "other")), student)
    assert isinstance(aligned, AlignedTeacher)  # another vocabulary; `test_cross_vocabulary`
    with pytest.raises(SettingsError, match="teacher: none is named"):
        load_teacher(TeacherSettings(), student)
    with pytest.raises(SettingsError, match="is the policy itself"):
        load_teacher(TeacherSettings(), student, student)
    served = load_teacher(
        TeacherSettings(model="m", url="http://127.0.0.1:1/v1/", tokenizer=str(tmp_path / "same")),
        student,
    )
    assert isinstance(served, ServedTeacher) and served.url == "http://127.0.0.1:1/v1/completions"
    azure = TeacherSettings(model="m", url="https://h/openai/deployments/d?api-version=1")
    assert ServedTeacher(azure).url == "https://h/openai/deployments/d/completions?api-version=1"
    assert (
        ServedTeacher(TeacherSettings(model="m", url="http://h/v4")).url
        == "http://h/v4/completions"
    )
    local = load_teacher(TeacherSettings(model=str(tmp_path / "same")), student)
    assert isinstance(local, LocalTeacher) and not any(
        p.requires_grad for p in local.model.parameters()
    )
    with pytest.raises(DataError, match="at temperature 1"):
        served.compute_logprobs(batch_of(0.5))
    with pytest.raises(DataError, match="the teacher's context is 4"):
        LocalTeacher(local.model, context=4).compute_logprobs(batch_of())


def test_settings_of_a_distillation():
    policy = DistillationSettings(group_size=1, levels=("low",), clip_eps=0.1, gamma=0.5).policy()
    assert (
        policy.is_taught
        and policy.clip == (0.1, 0.1)
        and policy.gamma == 0.5
        and policy.group_size == 1
    )
    assert (
        policy.value_function is None
        and policy.aggregation == "token_mean"
        and not policy.uses_whitening
    )
    assert [dict(stage.levels) for stage in policy.curriculum] == [{"low": 1.0}]
    names = {field.name for field in dataclasses.fields(PolicySettings)}
    custom = {field.name for field in dataclasses.fields(DistillationSettings)} - names
    assert custom == {
        "teacher",
        "self_teacher",
        "divergence",
        "beta",
        "shared_weight",
        "levels",
    }  # all others mean the same as in the policy's settings
    with pytest.raises(SettingsError, match=r"temperature: 0\.5 with a served teacher"):
        DistillationSettings(
            teacher=TeacherSettings(url="http://h:1", model="m"),
            sampling=SamplingSettings(temperature=0.5),
        )
    with pytest.raises(SettingsError, match="url: 'ftp://h' is not an http address"):
        TeacherSettings(url="ftp://h", model="m")
    with pytest.raises(SettingsError, match="contains a password"):
        TeacherSettings(url="http://me:secret@h", model="m")
    with pytest.raises(SettingsError, match="importance: replay uses rollouts of older policies"):
        DistillationSettings(replay=ReplaySettings())


def test_a_teacher_goes_with_a_distillation_alone(tokenizer):
    with pytest.raises(SettingsError, match="a distillation needs one"):
        build_trainer(tokenizer, None)
    baseline = make_trainer(tokenizer)
    with pytest.raises(SettingsError, match="no other algorithm takes one"):
        PolicyGradientTrainer(
            baseline.policy,
            None,
            baseline.renderer,
            Letters(),
            baseline.settings,
            7,
            baseline.rewards,
            baseline.backend,
            teacher=LocalTeacher(build_model(tokenizer, 1)),
        )


def test_the_api_distils(tokenizer, tmp_path):
    prompts = [{"prompt": word} for word in ("abc", "xyz", "a", "b")]
    settings = DistillationSettings(
        iterations=2,
        prompts_per_iteration=4,
        sampling=SamplingSettings(max_completion_tokens=4),
        eval_every=0,
    )
    causal_lm.save(build_model(tokenizer, 1), tokenizer, tmp_path / "student")
    causal_lm.save(build_model(tokenizer, 5), tokenizer, tmp_path / "teacher")
    training = rl_core.distill(
        tmp_path / "student",
        tmp_path / "teacher",
        prompts=prompts,
        settings=settings,
        output=tmp_path / "out",
    )
    outcome = training.run()
    assert outcome.iterations == 2
    frame = rl_core.read_metrics(tmp_path / "out")
    assert (
        frame["policy/teacher_kl"].notna().sum() == 2
        and (frame["perf/teacher_seconds"].dropna() > 0).all()
    )
    with pytest.raises(SettingsError, match="patience: prompts have no"):
        rl_core.distill(
            tmp_path / "student",
            tmp_path / "teacher",
            prompts=prompts,
            settings=dataclasses.replace(settings, patience=1, eval_every=1),
        )
