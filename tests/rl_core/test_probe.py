"""Teacher-forced measures against brute force and by hand."""

import math

import pytest
import torch
from helpers.tiny import PAD, VOCABULARY, nano

from rl_core.data.chat import ChatRenderer
from rl_core.data.tokenizer import train_tokenizer
from rl_core.models import causal_lm
from rl_core.models.hidden_states import compute_turn_embeddings
from rl_core.models.logprobs import completion_logprobs, iter_next_token_logprobs
from rl_core.probe import ProbedModel, compute_mean_nll, measure_divergence, probe_model
from rl_core.rewards.state_components import CoherenceReward
from rl_core.rollouts.batching import build_batches
from rl_core.settings import CoherenceSettings, ModelSettings, SFTSettings
from rl_core.trainers.sft import SFTTrainer
from rl_core.types import Rollout, Trajectory, Turn

MASKS = ([True, True, False, True], [True, False, False, True, True, False, True], [True])


def build_rollouts():
    draw = torch.Generator().manual_seed(3)
    created = []
    for number, mask in enumerate(MASKS):
        ids = torch.randint(1, VOCABULARY, (2 + len(mask),), generator=draw).tolist()
        trajectory = Trajectory("fake", "easy", "k", number, "p", "t")
        created.append(Rollout(ids[:2], ids[2:], list(mask), [0.0] * len(mask), trajectory))
    return created


def compute_nll_by_brute_force(model):
    """Compute the mean NLL of the sampled tokens, one token at a time."""
    nlls = []
    for rollout in build_rollouts():
        ids = [*rollout.prompt_ids, *rollout.completion_ids]
        with torch.no_grad():
            log_p = torch.log_softmax(model(torch.tensor([ids])).logits[0].double(), -1)
        for place, sampled in enumerate(rollout.loss_mask, len(rollout.prompt_ids)):
            nlls += [-float(log_p[place - 1, ids[place]])] if sampled else []
    return sum(nlls) / len(nlls)


def compute_by_brute_force(model, reference):
    """Compute (entropy, KL, turn) at every sampled token, one sequence at a time."""
    model.eval()
    rows = []
    for rollout in build_rollouts():
        ids = torch.tensor([[*rollout.prompt_ids, *rollout.completion_ids]])
        with torch.no_grad():
            p, q = (torch.log_softmax(m(ids).logits[0].double(), -1) for m in (model, reference))
        turn, before = -1, False
        for index, sampled in enumerate(rollout.loss_mask):
            turn += sampled and not before
            before = sampled
            if sampled:
                here = len(rollout.prompt_ids) + index - 1
                weights = p[here].exp()
                rows.append(
                    (-(weights * p[here]).sum(), (weights * (p[here] - q[here])).sum(), turn)
                )
    return [(float(h), float(kl), t) for h, kl, t in rows]


@pytest.mark.parametrize("chunk", [3, 1000])
def test_entropy_and_kl_agree_with_brute_force(monkeypatch, chunk):
    monkeypatch.setattr("rl_core.models.logprobs.compute_chunk_tokens", lambda *arguments: chunk)
    model, other = nano(0), nano(1)
    actual = measure_divergence(model, other, build_rollouts(), PAD)
    rows = compute_by_brute_force(model, other)
    assert len(rows) == 8
    assert actual.entropy == pytest.approx(sum(h for h, _, _ in rows) / 8, abs=1e-5)
    # of the reference: is the text of one model ordinary to the other?
    assert actual.reference_nll == pytest.approx(compute_nll_by_brute_force(other), abs=1e-5)
    alone = measure_divergence(model, None, build_rollouts(), PAD)
    assert alone.reference_nll == pytest.approx(compute_nll_by_brute_force(model), abs=1e-5)
    assert abs(alone.reference_nll - actual.reference_nll) > 0.01
    assert actual.kl == pytest.approx(sum(kl for _, kl, _ in rows) / 8, abs=1e-6) and actual.kl > 0
    for turn in range(3):
        chosen = [(h, kl) for h, kl, t in rows if t == turn]
        assert actual.entropy_by_turn[turn] == pytest.approx(
            sum(h for h, _ in chosen) / len(chosen), abs=1e-5
        )
        assert actual.kl_by_turn[turn] == pytest.approx(
            sum(kl for _, kl in chosen) / len(chosen), abs=1e-6
        )
    assert len(actual.kl_by_turn) == 3


def test_kl_from_itself_is_zero_and_of_a_flat_model_entropy_is_log_v():
    model = nano(0)
    assert measure_divergence(model, nano(0), build_rollouts(), PAD).kl == pytest.approx(
        0, abs=1e-7
    )
    torch.nn.init.zeros_(model.get_output_embeddings().weight)
    assert measure_divergence(model, None, build_rollouts(), PAD).entropy == pytest.approx(
        math.log(VOCABULARY), rel=1e-6
    )
    assert measure_divergence(model, None, [], PAD) is None


def test_distributions_do_not_depend_on_the_chunk_and_hold_the_training_log_probabilities():
    model = nano(0).eval()
    [batch] = build_batches(build_rollouts(), 1000, PAD)
    full = torch.cat(list(iter_next_token_logprobs(model, batch)))
    assert [len(part) for part in iter_next_token_logprobs(model, batch, chunk_tokens=3)] == [
        3,
        3,
        2,
    ]
    torch.testing.assert_close(
        torch.cat(list(iter_next_token_logprobs(model, batch, chunk_tokens=3))), full
    )
    torch.testing.assert_close(full.exp().sum(-1), torch.ones(8))
    targets = batch.input_ids_BS[batch.loss_mask_BS]
    logprobs, _ = completion_logprobs(model, batch)
    torch.testing.assert_close(
        full.gather(1, targets[:, None]).squeeze(1), logprobs[batch.loss_mask_BS].detach()
    )


@pytest.fixture(scope="module")
def subject():
    tokenizer = train_tokenizer(["zoom 1 2", "answer red", "colour at row 1?"] * 4, 300)
    model = causal_lm.create_model(
        ModelSettings(preset="nano", context=64, device="cpu"), tokenizer, 0
    )
    return ProbedModel(model, ChatRenderer(tokenizer))


def build_conversation(answer):
    return {
        "messages": [
            {"role": "user", "content": "colour?"},
            {"role": "assistant", "content": answer},
        ]
    }


def test_perplexity_is_that_of_the_sft_trainer(subject):
    talks = [build_conversation("answer red"), build_conversation("zoom 1 2")]
    rows = [subject.renderer.encode_conversation(talk["messages"]) for talk in talks]
    trainer = SFTTrainer(
        subject.model, subject.renderer.pad_id, rows, rows, SFTSettings(packing=False), 0
    )
    actual = probe_model(subject, None, [], talks)
    assert actual.perplexity == pytest.approx(trainer.evaluate()["eval/perplexity"], rel=1e-5)
    assert actual.demonstrations == 2 and actual.collect_metrics().keys() == {"perplexity"}


def test_what_does_not_fit_the_context_is_passed_over(subject):
    assert compute_mean_nll(subject, [build_conversation("x" * 500)]) == (None, 0)
    nll, count = compute_mean_nll(
        subject, [build_conversation("x" * 500), build_conversation("answer red")]
    )
    assert count == 1 and nll > 0


def test_states_and_kl_are_the_first_models(subject):
    """Check that coherence is measured with the same model for all; entropy is each model's."""
    other = causal_lm.create_model(
        ModelSettings(preset="nano", context=64, device="cpu"), subject.renderer.tokenizer, 1
    )
    first = ProbedModel(other, subject.renderer)
    played = [
        Rollout(
            [5, 6],
            [7, 8, 9, 10, 11, 12],
            [True, True, False, False, True, True],
            [0.0] * 6,
            Trajectory(
                "fake", "easy", "k", 0, "p", "t", turns=[Turn("a", observation="b"), Turn("c")]
            ),
        )
    ]
    narrow = CoherenceSettings(
        low=0.99, high=1.0
    )  # a band that contains no two states of these models
    score = CoherenceReward(narrow)
    expected = {
        which: score(
            played, compute_turn_embeddings(model, played, pad_id=subject.renderer.pad_id)
        )[0]
        for which, model in (("first", first.model), ("own", subject.model))
    }
    assert expected["first"] != pytest.approx(expected["own"], abs=1e-4)
    actual = probe_model(subject, first, played, coherence=narrow)
    assert actual.coherence == pytest.approx(expected["first"], abs=1e-6)
    alone = probe_model(subject, None, played, coherence=narrow)
    assert alone.coherence == pytest.approx(expected["own"], abs=1e-6) and alone.kl_to_first == 0.0
    spread = measure_divergence(subject.model, first.model, played, subject.renderer.pad_id)
    assert (actual.entropy, actual.kl_to_first) == (spread.entropy, spread.kl) and spread.kl > 0
    assert actual.perplexity_under_first == pytest.approx(math.exp(spread.reference_nll))
