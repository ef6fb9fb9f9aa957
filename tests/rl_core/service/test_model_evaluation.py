"""Evaluation of models against numpy in float64; samples, refusals; reference models of the pool."""

import math

import numpy as np
import pytest
import torch
from helpers.model_tokenizer import make_tokenizer
from helpers.service import (
    CONTEXT,
    VOCAB,
    loss_request,
    make_base,
    make_engine,
    new_run,
    random_data,
    step_request,
)
from scipy.special import log_softmax
from transformers import LlamaForCausalLM

from rl_core.analysis.statistics import compute_self_bleu
from rl_core.errors import ServiceError
from rl_core.inference.sampling import compute_sequence_seed
from rl_core.models import causal_lm
from rl_core.service.request_checks import EvaluateRequest
from rl_core.service.requests import (
    AdapterConfig,
    CreateModel,
    CreateSampler,
    SampleParameters,
    SampleRequest,
)
from rl_core.service.saved_weights import load_sampling_weights, read_state
from rl_core.service.training_engine import TrainingEngine
from rl_core.settings import ReferenceSettings, ServiceEngineSettings

PATH = "tinker://r/weights/a"


@pytest.fixture(scope="module")
def other_folder(tmp_path_factory):
    """Create a tied model with other weights and the same tokenizer."""
    return make_base(tmp_path_factory.mktemp("service") / "other", seed=7, tie_word_embeddings=True)


@pytest.fixture(scope="module")
def engine(base_folder, other_folder):
    return TrainingEngine(
        ServiceEngineSettings(
            bases={"base": str(base_folder), "tied": str(other_folder)}, device="cpu"
        ),
        ReferenceSettings(precision="full"),
        {"frozen": str(other_folder)},
    )


@pytest.fixture(scope="module")
def saved(engine, tmp_path_factory):
    """Save weights of a run whose adapter has changed all layers, including the head."""
    new_run(engine, "r", seed=3)
    folder = tmp_path_factory.mktemp("saved") / "a"
    engine.save_weights("r", folder)
    return str(folder)


def draw_rows(seed=0, count=5):
    rng = np.random.default_rng(seed)
    return tuple(rng.integers(2, VOCAB, int(size)) for size in rng.integers(2, 20, count))


def compute_log_probs(model, row):
    """Return the log-probabilities of every next token, float64 [S - 1, V], from transformers' logits."""
    with torch.no_grad():
        logits = model(torch.from_numpy(row)[None]).logits[0, :-1]
    return log_softmax(logits.double().numpy(), axis=-1)


def evaluate(engine, saved, **changes):
    request = {
        "model": PATH,
        "against": "base",
        "texts": draw_rows(),
        "folders": {PATH: saved},
        "resamples": 200,
        **changes,
    }
    return engine.evaluate(EvaluateRequest(**request))


def test_text_scores_match_float64(engine, saved):
    result = evaluate(engine, saved)
    base = engine._load_base_model("base")
    sums = []
    for row in draw_rows():
        with base.swap_weights(load_sampling_weights(base, read_state(saved))) as model:
            p = compute_log_probs(model, row)
        q = compute_log_probs(base.model, row)
        indices = np.arange(len(row) - 1), row[1:]
        sums.append(
            [
                len(row) - 1,
                -p[indices].sum(),
                -q[indices].sum(),
                (np.exp(p) * (p - q)).sum(),
                (np.exp(q) * (q - p)).sum(),
                -(np.exp(p) * p).sum(),
                -(np.exp(q) * q).sum(),
            ]
        )
    expected = np.array(sums)
    scores = np.array([[r.tokens, r.nll, r.against_nll, r.kl, r.reverse_kl] for r in result.rows])
    np.testing.assert_allclose(scores, expected[:, :5], rtol=2e-5, atol=2e-6)
    tokens, nll, other, kl, reverse, entropy, other_entropy = expected.sum(0)
    assert result.text_tokens == tokens and result.texts == 5
    assert result.text.nll.value == pytest.approx(nll / tokens, rel=1e-5)
    assert result.text.perplexity.value == pytest.approx(math.exp(nll / tokens), rel=1e-4)
    assert result.text.entropy.value == pytest.approx(entropy / tokens, rel=1e-5)
    assert result.against_text.entropy.value == pytest.approx(other_entropy / tokens, rel=1e-5)
    comparison = result.text_comparison
    assert (
        comparison.kl.value == pytest.approx(kl / tokens, rel=1e-4) and comparison.kl.value > 0.01
    )
    assert comparison.reverse_kl.value == pytest.approx(reverse / tokens, rel=1e-4)
    assert comparison.nll_difference.value == pytest.approx(
        (nll - other) / tokens, rel=1e-3, abs=1e-5
    )
    assert (
        comparison.better == (expected[:, 1] < expected[:, 2]).sum()
        and comparison.better + comparison.worse == 5
    )
    assert comparison.kl.low < comparison.kl.value < comparison.kl.high


def test_a_model_against_itself(engine, saved):
    result = evaluate(engine, saved, against=PATH)
    comparison = result.text_comparison
    assert (comparison.kl.value, comparison.reverse_kl.value, comparison.nll_difference.high) == (
        0.0,
        0.0,
        0.0,
    )
    assert (
        comparison.better,
        comparison.worse,
        comparison.p_value,
        comparison.perplexity_ratio.value,
    ) == (
        0,
        0,
        1.0,
        1.0,
    )


@pytest.mark.parametrize("separate_process_gib", [8.0, pytest.param(0.0, marks=pytest.mark.slow)])
def test_a_reference_model_scores_like_a_base_model(
    engine, base_folder, other_folder, saved, separate_process_gib
):
    """Score in this process and in a separate one; the tied base model has the same files."""
    expected = evaluate(engine, saved, against="tied")
    settings = ReferenceSettings(precision="full", separate_process_gib=separate_process_gib)
    other = TrainingEngine(engine.settings, settings, {"frozen": str(other_folder)})
    result = evaluate(other, saved, against="frozen")
    assert [row.kl for row in result.rows] == pytest.approx(
        [row.kl for row in expected.rows], rel=1e-4
    )
    assert result.text_comparison.kl.value == pytest.approx(
        expected.text_comparison.kl.value, rel=1e-4
    )
    state = other.references.pool.state
    assert (state.loads, state.kept) == (1, 1) and state.hits >= 1
    other.references.pool.release_models()


def test_samples_match_those_of_a_sampler(engine, saved):
    parameters = SampleParameters(max_tokens=6, temperature=0.7)
    prompts = (np.array([3, 4]), "a b", np.array([9]))
    result = evaluate(
        engine, saved, texts=(), prompts=prompts, num_samples=3, parameters=parameters, seed=5
    )
    assert result.rows is None and result.text is None and result.samples == 3
    engine.create_sampler(CreateSampler(sampler_id="s", folder=saved))
    tokenizer = engine._load_base_model("base").tokenizer
    answers = engine.sample(
        [
            SampleRequest(
                sampler_id="s",
                prompt=np.array(tokenizer(prompt)["input_ids"])
                if isinstance(prompt, str)
                else prompt,
                seed=compute_sequence_seed("evaluate", 5, index) % 2**63,
                num_samples=3,
                parameters=parameters,
            )
            for index, prompt in enumerate(prompts)
        ]
    )
    engine.unload_sampler("s")
    words = [
        [tokenizer.decode(s.tokens, skip_special_tokens=True).split() for s in a.sequences]
        for a in answers
    ]
    assert result.diversity.self_bleu.value == pytest.approx(
        np.mean([compute_self_bleu(prompt) for prompt in words]), rel=1e-12
    )
    sequences = [s for answer in answers for s in answer.sequences]
    assert result.diversity.tokens.value == pytest.approx(
        np.mean([len(s.tokens) for s in sequences]), rel=1e-12
    )
    surprise = -sum(float(s.logprobs.sum()) for s in sequences) / sum(
        len(s.tokens) for s in sequences
    )
    assert result.diversity.entropy.value == pytest.approx(surprise, rel=1e-6)
    assert (
        set(result.diversity.distinct) == {"1", "2", "3"}
        and 0 < result.diversity.distinct["1"].value <= 1
    )
    base, comparison = result.against_diversity, result.diversity_comparison
    assert comparison.tokens.value == pytest.approx(
        result.diversity.tokens.value - base.tokens.value, abs=1e-12
    )
    assert comparison.self_bleu.value == pytest.approx(
        result.diversity.self_bleu.value - base.self_bleu.value, abs=1e-12
    )


def test_equal_requests_have_equal_results_and_do_not_affect_training(engine, saved):
    changes = {
        "prompts": draw_rows(1, 2),
        "num_samples": 2,
        "parameters": SampleParameters(max_tokens=5),
    }
    before = {name: part.clone() for name, part in engine.state_dict("r")["model"].items()}
    assert evaluate(engine, saved, **changes) == evaluate(engine, saved, **changes)
    after = engine.state_dict("r")["model"]
    assert all(torch.equal(before[name], after[name]) for name in before)
    single = evaluate(engine, saved, texts=draw_rows(0, 1))
    assert single.text.nll.low is None and single.text_comparison.kl.high is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "bass"}, "no base model 'bass'; did you mean 'base'"),
        ({"model": "frozen"}, "no base model 'frozen'"),
        ({"against": "nobody"}, "no base or reference model 'nobody'"),
        ({"texts": ()}, "neither texts nor prompts"),
        ({"texts": (np.array([3]),)}, r"texts\[0\]: 1 tokens, expected 2 to 48"),
        ({"texts": (np.array([3, VOCAB]),)}, r"texts\[0\]: token 60 is outside"),
        ({"texts": (np.full(CONTEXT + 1, 3),)}, r"texts\[0\]: 49 tokens"),
        ({"texts": (np.zeros((2, 2), int),)}, "in one dimension"),
        (
            {"prompts": (np.array([3]),), "parameters": SampleParameters(max_tokens=None)},
            "need a limit",
        ),
        ({"prompts": (np.array([3]),) * 4000, "num_samples": 1000}, "4000 x 1000 samples"),
        ({"num_samples": 0}, "num_samples: 0"),
        ({"confidence": 1.0}, "confidence: 1.0"),
        ({"resamples": 10**9}, "resamples"),
    ],
)
def test_refusals(engine, saved, changes, message):
    with pytest.raises(ServiceError, match=message) as caught:
        evaluate(engine, saved, **changes)
    assert caught.value.category == "user"


def test_other_tokens_are_refused(engine, saved, tmp_path, base_folder):
    causal_lm.save(
        LlamaForCausalLM.from_pretrained(base_folder), make_tokenizer(VOCAB - 7), tmp_path / "odd"
    )
    other = TrainingEngine(
        engine.settings, ReferenceSettings(precision="full"), {"odd": str(tmp_path / "odd")}
    )
    with pytest.raises(ServiceError, match="'odd' has another tokenizer than base model 'base'"):
        evaluate(other, saved, against="odd")


def build_rewarded_data(seed, shift=False):
    data = random_data(seed, policy=True)
    rewarded = []
    for datum in data:
        inputs = {name: value for name, value in datum.inputs.items() if name != "advantages"}
        inputs["rewards"] = datum.inputs["advantages"]
        rewarded.append(type(datum)(datum.tokens, inputs))
    return tuple(rewarded)


def add_reference_logprobs(engine, data, sampler, temperature=1.0):
    """Add the reference's log-probabilities as a client computes them."""
    extended = []
    for datum in data:
        row = np.append(datum.tokens, datum.inputs["target_tokens"][-1])
        (answer,) = engine.sample(
            [
                SampleRequest(
                    sampler_id=sampler,
                    prompt=row,
                    seed=0,
                    prompt_logprobs=True,
                    parameters=SampleParameters(max_tokens=1),
                )
            ]
        )
        extended.append(
            type(datum)(datum.tokens, {**datum.inputs, "ref_logprobs": answer.prompt_logprobs[1:]})
        )
    return tuple(extended)


@pytest.mark.parametrize("reference", ["base", "frozen"])
def test_the_service_fills_in_the_reference(engine, reference):
    for name in ("sent", "filled"):
        new_run(engine, name, seed=1)
    data = build_rewarded_data(2)
    engine.create_sampler(
        CreateSampler(sampler_id="ref", base="base" if reference == "base" else "tied")
    )
    sent_data = add_reference_logprobs(engine, data, "ref")
    engine.unload_sampler("ref")
    options = {"kl_coef": 0.5}
    sent, filled = engine.forward_backward(
        [
            loss_request("sent", sent_data, "enhanced_ppo", loss_fn_config=options),
            loss_request(
                "filled", data, "enhanced_ppo", loss_fn_config={**options, "reference": reference}
            ),
        ]
    )
    assert filled.loss == pytest.approx(sent.loss, rel=1e-5)
    assert filled.metrics["ref_kl:mean"] == pytest.approx(
        sent.metrics["ref_kl:mean"], rel=1e-4, abs=1e-7
    )
    for name in ("sent", "filled"):
        engine.optim_step(step_request(name))
    ours, theirs = engine.state_dict("filled")["model"], engine.state_dict("sent")["model"]
    assert all(torch.allclose(ours[key], theirs[key], atol=1e-4) for key in ours)
    for name in ("sent", "filled"):
        engine.unload_model(name)


def test_the_base_is_the_adapter_switched_off(base_folder):
    """Check that a run without updates has KL 0, to the last bit, at every temperature."""
    engine = make_engine(base_folder)
    engine.create_model(CreateModel(model_id="new", base="base", adapter=AdapterConfig(rank=4)))
    for temperature in (1.0, 0.5):
        config = {"kl_coef": 0.1, "reference": "base", "temperature": temperature}
        (result,) = engine.forward_backward(
            [loss_request("new", build_rewarded_data(1), "enhanced_ppo", loss_fn_config=config)]
        )
        assert result.metrics["ref_kl:mean"] == 0.0


@pytest.mark.parametrize(
    ("data", "loss", "config", "message"),
    [
        (
            build_rewarded_data(1),
            "enhanced_ppo",
            {"reference": "frosen"},
            "no reference model 'frosen'; did you mean 'frozen'",
        ),
        (
            build_rewarded_data(1),
            "enhanced_ppo",
            {"reference": 1.0},
            "reference is 1.0, expected base or",
        ),
        (random_data(1, policy=True), "ppo", {"reference": "base"}, "ppo takes no reference model"),
        (
            build_rewarded_data(1),
            "enhanced_ppo",
            {"kl_coef": 1.0},
            "needs ref_logprobs, or the option reference",
        ),
    ],
)
def test_refused_references(engine, data, loss, config, message):
    new_run(engine, "x")
    (result,) = engine.forward_backward([loss_request("x", data, loss, loss_fn_config=config)])
    engine.unload_model("x")
    assert isinstance(result, ServiceError) and message in str(result) and result.category == "user"


def test_a_reference_of_other_targets_is_refused(engine):
    new_run(engine, "x")
    (datum, *_) = build_rewarded_data(1)
    shifted = type(datum)(
        datum.tokens, {**datum.inputs, "target_tokens": (datum.inputs["target_tokens"] + 1) % VOCAB}
    )
    (result,) = engine.forward_backward(
        [loss_request("x", (shifted,), "enhanced_ppo", loss_fn_config={"reference": "frozen"})]
    )
    assert "target_tokens are not the next tokens" in str(result)
    (result,) = engine.forward_backward(
        [
            loss_request(
                "x",
                (shifted,),
                "enhanced_ppo",
                loss_fn_config={"reference": "base", "kl_coef": 0.1},
            )
        ]
    )
    assert not isinstance(result, ServiceError)  # the base model scores any target
    engine.unload_model("x")
