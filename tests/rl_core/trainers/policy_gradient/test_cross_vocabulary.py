"""A teacher with another vocabulary: rows, advantages, distributions by hand; learning, resume, adapters, servers."""

import collections
import functools

import numpy as np
import pytest
import torch
from helpers.letters import (
    Letters,
    Walk,
    capture_update,
    make_trainer,
    resumes_bit_for_bit,
    weights,
)
from helpers.teacher_server import serve_teacher
from helpers.tokenizer_kinds import train_byte_level, train_sentencepiece, train_word_pieces
from tokenizers import normalizers

import rl_core
from rl_core.api.recipes.policy_gradient import load_teacher
from rl_core.data.chat import ChatRenderer
from rl_core.data.tokenizer import train_tokenizer
from rl_core.environments.environment import warn_once
from rl_core.errors import DataError, SettingsError
from rl_core.inference.teacher import LocalTeacher, ServedTeacher
from rl_core.models import causal_lm
from rl_core.models.lora import add_adapter
from rl_core.settings import (
    DistillationSettings,
    LoraSettings,
    ModelSettings,
    ReplaySettings,
    SamplingSettings,
    SelfTeacherSettings,
    TeacherSettings,
)
from rl_core.settings.distillation import DistilledPolicySettings
from rl_core.trainers.policy_gradient import teacher_divergence
from rl_core.trainers.policy_gradient.cross_vocabulary import AlignedTeacher
from rl_core.trainers.policy_gradient.samples import build_sample_groups
from rl_core.types import Rollout, RolloutGroup, StopReason, Trajectory, Turn

QUESTION = [{"role": "user", "content": "low1"}]
LONG = SamplingSettings(max_completion_tokens=6)


@functools.cache
def read_tokenizer(kind):
    return {
        "student": lambda: train_tokenizer(
            ["hello lower unhappy low1 quixotic zephyr jumble fjord wyvern kumquat oxygen"] * 3, 400
        ),
        "pairs": lambda: train_byte_level(340),
        "sentencepiece": train_sentencepiece,
    }[kind]()


def build_model(kind, seed, sharper=1.0, preset="nano"):
    tokenizer = read_tokenizer(kind)
    settings = ModelSettings(preset=preset, context=64, device="cpu")
    model = causal_lm.create_model(settings, tokenizer, seed)
    with torch.no_grad():
        model.lm_head.weight.mul_(sharper)
    return model


def build_teacher(kind="pairs", seed=5, sharper=8.0, **options):
    renderers = (ChatRenderer(read_tokenizer(name)) for name in ("student", kind))
    model = build_model(kind, seed, sharper)
    return AlignedTeacher(LocalTeacher(model, context=64), *renderers, "theirs", **options)


def build_trainer(teacher=None, environment=None, **options):
    options = {"gamma": 0.0, "sampling": LONG, **options}
    return make_trainer(
        read_tokenizer("student"),
        environment,
        teacher=teacher or build_teacher(),
        kind=DistilledPolicySettings,
        **options,
    )


def attach_text(teacher, text, *, has_end=True, ids=None, **changes):
    """Attach the teacher's row to a rollout of this text in the student's tokens."""
    tokenizer = read_tokenizer("student")
    ids = ids or tokenizer.encode(text, add_special_tokens=False)
    ids = [*ids, tokenizer.eos_token_id] if has_end else ids
    stop = StopReason.TERMINATED if has_end else StopReason.MAX_TOKENS
    trajectory = Trajectory("e", "l", "k", 0, "p", "", turns=[Turn("x")], stop_reason=stop)
    values = {
        "loss_mask": [True] * len(ids),
        "sampler_logprobs": [-1.0] * len(ids),
        "messages": QUESTION,
        **changes,
    }
    rollout = Rollout([1, 2], ids, trajectory=trajectory, **values)
    group = RolloutGroup([rollout])
    samples = build_sample_groups([group])
    metrics = teacher.attach_rows([group], samples)
    return samples[0][0], metrics


@pytest.mark.parametrize("kind", ["pairs", "sentencepiece"])
def test_the_teachers_row_is_its_template_the_text_and_its_end_of_turn(kind):
    teacher = build_teacher(kind)
    theirs = read_tokenizer(kind)
    sample, metrics = attach_text(teacher, "hello lower \U0001f600")
    row = sample.teacher_row
    assert row.prompt_ids == ChatRenderer(theirs).prompt_ids(QUESTION)
    assert row.completion_ids[-1] == theirs.eos_token_id
    assert all(row.loss_mask) and row.temperature == 1.0
    spans = sample.alignment
    assert spans.student_spans[-1] == spans.teacher_spans[-1] == max(spans.student_spans)
    decoded = theirs.decode(row.completion_ids[:-1]).strip()
    assert decoded == "hello lower \U0001f600"
    counts = [collections.Counter(part) for part in (spans.student_spans, spans.teacher_spans)]
    single = sum(counts[0][span] == counts[1][span] == 1 for span in counts[0])
    assert metrics == {"train/taught_rate": 1.0, "policy/aligned_rate": single / len(counts[0])}
    assert 0 < metrics["policy/aligned_rate"] < 1
    cut, _ = attach_text(teacher, "hello", has_end=False)
    assert cut.teacher_row.completion_ids[-1] != theirs.eos_token_id
    assert len(cut.alignment.student_spans) == len(read_tokenizer("student").encode("hello"))


@pytest.mark.parametrize("compares", [True, False])
def test_distributions_over_spans_of_several_tokens_are_warned_about(caplog, compares):
    warn_once.cache_clear()
    attach_text(build_teacher(compares_distributions=compares), "hello lower \U0001f600")
    attach_text(build_teacher(compares_distributions=compares), "a")
    assert caplog.text.count("set divergence: sampled") == int(compares)
    warn_once.cache_clear()
    _, metrics = attach_text(build_teacher("student", compares_distributions=compares), "hello")
    assert metrics["policy/aligned_rate"] == 1.0
    assert caplog.text.count("set divergence: sampled") == int(compares)


def test_a_cut_character_and_control_tokens_have_their_bytes():
    teacher = build_teacher()
    ours, theirs = read_tokenizer("student"), read_tokenizer("pairs")
    ids = ours.encode("a\u20ac", add_special_tokens=False)[:-1]
    sample, _ = attach_text(teacher, "", has_end=False, ids=ids)
    assert theirs.convert_ids_to_tokens(sample.teacher_row.completion_ids) == [
        "a",
        "\u00e2",
        "\u0124",
    ]
    # a control token of both is one token on both sides; one of the student alone is its name
    ids = [*ours.encode("a"), *ours.convert_tokens_to_ids(["<|user|>", "<|tool|>"])]
    sample, _ = attach_text(teacher, "", ids=ids)
    tokens = theirs.convert_ids_to_tokens(sample.teacher_row.completion_ids)
    assert tokens[:2] == ["a", "<|user|>"] and "".join(tokens[2:]) == "<|tool|></s>"
    assert sample.alignment.student_spans == [0, 1, 2, 3]


def test_spans_with_a_token_without_loss_and_texts_that_cannot_be_written_carry_none():
    teacher = build_teacher()
    size = len(read_tokenizer("student").encode("lowest xyz", add_special_tokens=False))
    logprobs = [float("nan"), *[-1.0] * size]
    sample, _ = attach_text(teacher, "lowest xyz", sampler_logprobs=logprobs)
    assert sample.row.loss_mask[0] is False and sample.alignment.student_spans[0] == -1
    left_out = sample.alignment.student_spans.count(-1)
    assert left_out == sample.row.loss_mask.count(False)
    assert -1 in sample.alignment.teacher_spans
    composing = train_byte_level(320, normalizers.NFC())
    renderers = (ChatRenderer(read_tokenizer("student")), ChatRenderer(composing))
    scorer = LocalTeacher(build_model("pairs", 5))
    sample, metrics = attach_text(AlignedTeacher(scorer, *renderers, "theirs"), "cafe\u0301")
    assert metrics == {"train/taught_rate": 0.0} and not any(sample.row.loss_mask)
    for changes in ({"messages": []}, {"loss_mask": [False, *[True] * size]}):
        with pytest.raises(SettingsError, match="several turns or of an agent"):
            attach_text(teacher, "lowest xyz", **changes)


@torch.no_grad()
def compute_logp(model, prompt, ids, temperature):
    """Compute log p over the vocabulary before each token, float64 [T, V], from transformers' logits."""
    logits = model(input_ids=torch.tensor([[*prompt, *ids]])).logits[0].double()
    return (logits / temperature).log_softmax(-1)[len(prompt) - 1 : -1]


def list_spans(sample):
    """List the token places of each span on both sides."""
    numbers = sorted({*sample.alignment.student_spans} - {-1})
    sides = sample.alignment.student_spans, sample.alignment.teacher_spans
    return [
        [[t for t, n in enumerate(side) if n == number] for side in sides] for number in numbers
    ]


@pytest.mark.parametrize("kind", ["pairs", "sentencepiece"])
@pytest.mark.parametrize(("gamma", "temperature"), [(0.0, 1.0), (0.5, 0.7), (1.0, 1.5)])
def test_advantages_are_those_of_spans_by_hand(monkeypatch, kind, gamma, temperature):
    updates = capture_update(monkeypatch)
    teacher = build_teacher(kind)
    sampling = SamplingSettings(max_completion_tokens=6, temperature=temperature)
    trainer = build_trainer(teacher, gamma=gamma, sampling=sampling, micro_batch_tokens=150)
    start = {name: p.clone() for name, p in trainer.policy.state_dict().items()}
    metrics = trainer.step()
    trainer.policy.load_state_dict(start)
    buffer, kl, num_tokens, signs, lengths = updates[0].buffer, 0.0, 0, set(), set()
    for index, sample in enumerate(buffer.samples):
        row, theirs = sample.row, sample.teacher_row
        ours_logp = compute_logp(trainer.policy, row.prompt_ids, row.completion_ids, temperature)
        their_logp = compute_logp(
            teacher.scorer.model, theirs.prompt_ids, theirs.completion_ids, temperature
        )
        spans, rewards = list_spans(sample), []
        for left, right in spans:
            student = sum(float(ours_logp[t, row.completion_ids[t]]) for t in left)
            rewards.append(
                sum(float(their_logp[t, theirs.completion_ids[t]]) for t in right) - student
            )
            lengths.add((len(left), len(right)))
        expected = np.zeros(len(row.completion_ids))
        for j, (left, _) in enumerate(spans):
            expected[left] = sum(r * (gamma**k if k else 1.0) for k, r in enumerate(rewards[j:]))
        first = len(row.prompt_ids)
        actual = buffer.advantages_RS[index, first : first + len(expected)].numpy()
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=2e-5)
        kl -= sum(rewards)
        num_tokens += len(expected)
        signs |= {*np.sign(expected)}
    assert metrics["policy/teacher_kl"] == pytest.approx(kl / num_tokens, rel=1e-4)
    assert {-1.0, 1.0} <= signs and len(lengths) > 1


@pytest.mark.parametrize("options", [{}, {"epochs": 2, "minibatches": 2, "gamma": 0.7}])
def test_equal_tokens_give_the_bits_of_a_teacher_of_the_policys_tokens(options):
    aligned = build_trainer(build_teacher("student"), **options)
    direct = build_trainer(build_teacher("student").scorer, **options)
    for _ in range(2):
        metrics, expected = aligned.step(), direct.step()
        assert metrics["policy/teacher_kl"] == pytest.approx(
            expected["policy/teacher_kl"], rel=1e-5
        )
    assert torch.equal(weights(aligned), weights(direct))
    assert metrics["policy/aligned_rate"] == 1.0


def compute_divergence(trainer, teacher, samples, divergence, beta, temperature):
    """Compute the mean divergence over spans with gradient, from transformers' logits and loops."""
    pairs = teacher.pair_tokens()
    weight = len(pairs[1]) / len(read_tokenizer("pairs"))
    total, count = torch.zeros((), dtype=torch.float64), 0
    for sample in samples:
        row, theirs = sample.row, sample.teacher_row
        ids = torch.tensor([[*row.prompt_ids, *row.completion_ids]])
        logits = trainer.policy(input_ids=ids).logits[0].double() / temperature
        ours_logp = logits.log_softmax(-1)[len(row.prompt_ids) - 1 : -1]
        their_logp = compute_logp(
            teacher.scorer.model, theirs.prompt_ids, theirs.completion_ids, temperature
        )
        for left, right in list_spans(sample):
            q, p = ours_logp[left[0]].exp(), their_logp[right[0]].exp()
            for t in left[1:]:
                q = q * ours_logp[t, row.completion_ids[t]].exp()
            for t in right[1:]:
                p = p * their_logp[t, theirs.completion_ids[t]].exp()
            shared = torch.zeros((), dtype=torch.float64)
            rest_q, rest_p = q, p
            if divergence == "gold":
                a, b = q[pairs[0]], p[pairs[1]]
                m = beta * b + (1 - beta) * a
                if beta == 1:
                    shared = (a * (a / b).log() - a + b).sum()
                else:
                    shared = (
                        beta * (b * (b / m).log()).sum() + (1 - beta) * (a * (a / m).log()).sum()
                    )
                rest_q, rest_p = (
                    x[[n for n in range(len(x)) if n not in {*ids}]]
                    for x, ids in ((q, pairs[0]), (p, pairs[1]))
                )
            rests = [x.sort(descending=True).values for x in (rest_q, rest_p)]
            width = max(map(len, rests))
            rests = [torch.nn.functional.pad(x, (0, width - len(x))) for x in rests]
            rest = (rests[0] - rests[1]).abs().sum()
            total = total + (rest if divergence == "uld" else weight * shared + (1 - weight) * rest)
            count += 1
    return total / count


@pytest.mark.parametrize(
    ("divergence", "beta", "temperature", "joined"),
    [
        ("uld", None, 1.0, 1),
        ("gold", None, 1.0, 2),
        ("gold", 1.0, 0.7, 1),
        ("uld", None, 1.3, 2),
    ],
)
def test_distributions_have_the_loss_and_gradient_by_hand(
    monkeypatch, divergence, beta, temperature, joined
):
    """In several micro-batches and chunks of a few spans, which backward computes again.

    joined: spans made one, so that spans have several tokens of the policy.
    """
    updates = capture_update(monkeypatch)
    monkeypatch.setattr(teacher_divergence, "compute_chunk_tokens", lambda *_: 0)
    monkeypatch.setattr(teacher_divergence, "_MIN_CHUNK", 3)
    teacher = build_teacher()
    align = teacher._align_rollout

    def align_joined(rollout):
        prompt_ids, ids, left, right = align(rollout)
        return prompt_ids, ids, *([n // joined for n in spans] for spans in (left, right))

    monkeypatch.setattr(teacher, "_align_rollout", align_joined)
    options = {} if beta is None else {"beta": beta}
    trainer = build_trainer(
        teacher,
        divergence=divergence,
        sampling=SamplingSettings(max_completion_tokens=6, temperature=temperature),
        micro_batch_tokens=120,
        prompts_per_iteration=3,
        max_grad_norm=1e9,
        **options,
    )
    gradients = {}
    apply = trainer.optimizer_step.optimizer.step

    def record(*arguments, **more):
        gradients.update({n: p.grad.clone() for n, p in trainer.policy.named_parameters()})
        for name, parameter in trainer.policy.named_parameters():
            parameter.data.copy_(start[name])
        return apply(*arguments, **more)

    start = {name: p.detach().clone() for name, p in trainer.policy.named_parameters()}
    trainer.optimizer_step.optimizer.step = record
    metrics = trainer.step()
    for name, parameter in trainer.policy.named_parameters():
        parameter.data.copy_(start[name])
        parameter.grad = None
    samples = updates[0].buffer.samples
    beta = 0.5 if divergence == "gold" and beta is None else beta  # the default
    expected = compute_divergence(trainer, teacher, samples, divergence, beta, temperature)
    expected.backward()
    assert metrics["policy/loss"] == pytest.approx(expected.item(), rel=1e-4)
    assert metrics["policy/teacher_divergence"] == pytest.approx(expected.item(), rel=1e-4)
    for name, parameter in trainer.policy.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=2e-3, atol=1e-6)
    assert max(float(g.abs().max()) for g in gradients.values()) > 1e-4
    assert all(p.grad is None for p in teacher.scorer.model.parameters())


def test_gold_of_equal_vocabularies_is_the_reverse_kl_over_the_whole_vocabulary(monkeypatch):
    """beta 1 with a teacher of the same vocabulary, over episodes of several turns, whose observations have no loss."""
    updates = capture_update(monkeypatch)
    teacher = build_teacher("student", has_equal_tokens=True)
    trainer = build_trainer(
        teacher,
        Walk(),
        divergence="gold",
        beta=1.0,
        sampling=SamplingSettings(max_completion_tokens=12, max_turns=3),
    )
    start = {name: p.clone() for name, p in trainer.policy.state_dict().items()}
    metrics = trainer.step()
    trainer.policy.load_state_dict(start)
    total, count, has_observation = 0.0, 0, False
    for sample in updates[0].buffer.samples:
        row = sample.row
        sides = (trainer.policy, teacher.scorer.model)
        q, p = (compute_logp(model, row.prompt_ids, row.completion_ids, 1.0) for model in sides)
        mask = torch.tensor(row.loss_mask)
        total += float((q.exp() * (q - p)).sum(1)[mask].sum())
        count += int(mask.sum())
        has_observation = has_observation or not all(row.loss_mask)
    assert has_observation
    assert metrics["policy/loss"] == pytest.approx(total / count, rel=1e-4)


@pytest.mark.parametrize("divergence", ["sampled", "uld", "gold"])
def test_a_student_approaches_a_teacher_with_another_vocabulary(divergence):
    trainer = build_trainer(
        build_teacher(sharper=12.0),
        divergence=divergence,
        prompts_per_iteration=10,
        learning_rate=1e-2,
    )
    rows = [trainer.step() for _ in range(20)]
    name = "policy/teacher_kl" if divergence == "sampled" else "policy/teacher_divergence"
    first, last = (sum(row[name] for row in part) for part in (rows[:4], rows[-4:]))
    assert last < 0.9 * first
    assert all(row["train/taught_rate"] == 1.0 for row in rows)


@pytest.mark.parametrize("divergence", ["sampled", "uld", "gold"])
def test_a_run_resumes_with_equal_bits(divergence):
    options = {"epochs": 2, "minibatches": 2, "micro_batch_tokens": 120}
    assert resumes_bit_for_bit(lambda: build_trainer(divergence=divergence, **options))


@pytest.mark.parametrize("divergence", ["sampled", "gold"])
def test_adapters_autocast_and_limits_of_the_update(divergence):
    model = add_adapter(build_model("student", 0), LoraSettings(rank=2))
    frozen = {n: p.clone() for n, p in model.named_parameters() if not p.requires_grad}
    trainer = build_trainer(
        model=model,
        divergence=divergence,
        autocast="bfloat16",
        kl_max=5.0,
        loss_aggregation="sequence_mean",
    )
    before = weights(trainer)
    metrics = trainer.step()
    assert metrics["policy/refused_steps"] == 0.0 and not torch.equal(weights(trainer), before)
    assert all(torch.equal(p, frozen[n]) for n, p in model.named_parameters() if n in frozen)


@pytest.mark.parametrize("kind", ["pairs", "sentencepiece"])
def test_a_served_teacher_gives_what_the_same_model_gives_here(kind, tmp_path):
    student = rl_core.load_policy((build_model("student", 0), read_tokenizer("student")))
    model = build_model(kind, 5, 8.0)
    causal_lm.save(model, read_tokenizer(kind), tmp_path / "theirs")
    here = build_trainer(load_teacher(TeacherSettings(model=str(tmp_path / "theirs")), student))
    with serve_teacher(model) as (url, requests):
        settings = TeacherSettings(url=url, model="m", tokenizer=str(tmp_path / "theirs"))
        served = load_teacher(settings, student)
        there = build_trainer(served)
        pairs = [(here.step(), there.step()) for _ in range(2)]
    assert isinstance(served, AlignedTeacher) and isinstance(served.scorer, ServedTeacher)
    for ours, theirs in pairs:
        assert theirs["policy/teacher_kl"] == pytest.approx(ours["policy/teacher_kl"], abs=1e-4)
    assert torch.allclose(weights(here), weights(there), atol=1e-4)
    assert max(max(request["prompt"]) for request in requests) < len(read_tokenizer(kind))


def test_what_cannot_be_aligned_is_refused(tmp_path):
    student = rl_core.load_policy((build_model("student", 0), read_tokenizer("student")))
    words = train_word_pieces()
    settings = ModelSettings(preset="nano", context=64, device="cpu")
    words_model = causal_lm.create_model(settings, words, 0)
    with pytest.raises(SettingsError, match="the decoder WordPiece does not give"):
        load_teacher(TeacherSettings(), student, (words_model, words))
    local = load_teacher(
        TeacherSettings(), student, (build_model("pairs", 0), read_tokenizer("pairs"))
    )
    assert isinstance(local, AlignedTeacher)
    with pytest.raises(SettingsError, match="replay: rollouts of earlier iterations"):
        build_trainer(local, replay=ReplaySettings(), importance="token")
    with pytest.raises(SettingsError, match="several turns or of an agent"):
        build_trainer(
            local, Walk(), sampling=SamplingSettings(max_completion_tokens=12, max_turns=3)
        ).step()
    with pytest.raises(SettingsError, match="divergence: distributions are compared"):
        build_trainer(LocalTeacher(build_model("student", 1)), divergence="gold")
    for divergence in ("sampled", "uld"):
        teacher = build_teacher()
        teacher.scorer.context = 4
        with pytest.raises(DataError, match="the teacher's context is 4"):
            build_trainer(teacher, divergence=divergence).step()


def test_settings_refuse_what_a_divergence_does_not_use():
    policy = DistillationSettings(divergence="gold", beta=0.0, shared_weight=0.3).policy()
    assert policy.compares_distributions
    assert (policy.divergence, policy.beta, policy.shared_weight) == ("gold", 0.0, 0.3)
    assert not DistillationSettings().policy().compares_distributions
    served = TeacherSettings(url="http://h:1", model="m")
    cases = [
        ({"beta": 0.5}, "beta: not used by divergence sampled"),
        ({"divergence": "uld", "shared_weight": 0.5}, "shared_weight: not used by divergence uld"),
        ({"divergence": "uld", "teacher": served}, "a server does not return"),
        ({"divergence": "gold", "self_teacher": SelfTeacherSettings()}, "with self_teacher"),
        ({"divergence": "uld", "gamma": 0.5}, "gamma: not used by divergence uld"),
        ({"divergence": "uld", "clip_eps": 0.2}, "clip_eps: not used"),
        ({"divergence": "gold", "importance": "token"}, "importance: not used"),
    ]
    for values, message in cases:
        with pytest.raises(SettingsError, match=message):
            DistillationSettings(**values)


def test_the_api_distils_another_vocabulary_and_says_so(caplog, tmp_path):
    caplog.set_level("INFO")
    causal_lm.save(build_model("student", 1), read_tokenizer("student"), tmp_path / "student")
    causal_lm.save(build_model("pairs", 5), read_tokenizer("pairs"), tmp_path / "theirs")
    settings = {
        "iterations": 2,
        "prompts_per_iteration": 4,
        "sampling": {"max_completion_tokens": 4},
        "eval_every": 0,
    }
    prompts = [{"prompt": word} for word in ("abc", "xyz", "a", "b")]
    for divergence in ("sampled", "gold"):
        training = rl_core.distill(
            tmp_path / "student",
            tmp_path / "theirs",
            prompts=prompts,
            settings={**settings, "divergence": divergence},
            output=tmp_path / divergence,
        )
        assert training.run().iterations == 2
        frame = rl_core.read_metrics(tmp_path / divergence)
        assert frame["policy/aligned_rate"].notna().sum() == 2
    assert "has another vocabulary, and shares" in caplog.text


def test_micro_batches_have_the_denominators_of_the_whole_step():
    """One micro-batch, several and single rows give the same step."""
    for divergence, aggregation in (
        ("gold", "token_mean"),
        ("uld", "sequence_mean"),
        ("gold", "constant"),
    ):
        results = []
        for tokens in (4000, 60, 1):
            trainer = build_trainer(
                divergence=divergence,
                loss_aggregation=aggregation,
                micro_batch_tokens=tokens,
                prompts_per_iteration=2,
                group_size=3,
                environment=Letters(),
            )
            metrics = trainer.step()
            results.append((metrics["policy/loss"], metrics["train/grad_norm"]))
        np.testing.assert_allclose(results[1:], [results[0]] * 2, rtol=1e-4)
