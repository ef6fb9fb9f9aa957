"""Load-balancing loss of mixture-of-experts models: numpy, transformers' function, SFT and policy training."""

import math

import numpy as np
import pytest
import torch
from helpers.letters import make_trainer
from helpers.tiny import PAD, VOCABULARY, nano
from transformers import MixtralConfig, MixtralForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from rl_core.capabilities import check_router_logits
from rl_core.data.tokenizer import train_tokenizer
from rl_core.errors import DataError, NonFiniteTensor, SettingsError
from rl_core.losses.supervised import load_balancing_loss
from rl_core.models import lora
from rl_core.models.logprobs import compute_token_outputs
from rl_core.rollouts.batching import TrainRow, build_batches
from rl_core.settings import LoraSettings, SFTSettings
from rl_core.trainers.sft import SFTTrainer

SHAPE = dict(
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    max_position_embeddings=32,
    initializer_range=0.5,
    pad_token_id=PAD,
    bos_token_id=None,
    eos_token_id=None,
    num_experts_per_tok=2,
)


def build_mixture(family="mixtral", vocabulary=VOCABULARY):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        if family == "mixtral":
            return MixtralForCausalLM(
                MixtralConfig(vocab_size=vocabulary, num_local_experts=4, **SHAPE)
            )
        experts = dict(num_experts=5, moe_intermediate_size=8, head_dim=8)
        return Qwen3MoeForCausalLM(Qwen3MoeConfig(vocab_size=vocabulary, **experts, **SHAPE))


def build_rows(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for index in range(count):
        ids = torch.randint(1, VOCABULARY, (3 + 2 * index % 7,), generator=generator).tolist()
        rows.append((ids, [False, *[True] * (len(ids) - 1)]))
    return rows


def compute_by_numpy(layers, real, top_k):
    """Compute E sum_e f_e P_e, token by token in float64."""
    experts = layers[0].shape[1]
    assigned, probability, count = np.zeros(experts), np.zeros(experts), 0
    for logits_NE in layers:
        for logits, is_real in zip(logits_NE.double().numpy(), real.tolist(), strict=True):
            if is_real:
                p = np.exp(logits - logits.max())
                probability += p / p.sum()
                assigned[np.argsort(-logits, kind="stable")[:top_k]] += 1
                count += 1
    return experts * float(assigned / count @ (probability / count))


@pytest.mark.parametrize("top_k", [1, 2, 3])
def test_the_loss_is_that_of_the_paper_and_of_transformers(top_k):
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        layers = tuple(
            2 * torch.randn(12, 5, generator=generator, requires_grad=True) for _ in range(3)
        )
        real = torch.rand(12, generator=generator) < 0.6
        actual = load_balancing_loss(layers, real, top_k=top_k)
        assert actual.item() == pytest.approx(
            compute_by_numpy([layer.detach() for layer in layers], real, top_k), rel=1e-6
        )
        theirs = load_balancing_loss_func(layers, 5, top_k, real.view(2, 6).long())
        assert actual.item() == pytest.approx(theirs.item(), rel=1e-6)
        for our_gradient, their_gradient in zip(
            torch.autograd.grad(actual, layers), torch.autograd.grad(theirs, layers), strict=True
        ):
            torch.testing.assert_close(our_gradient, their_gradient)


def test_an_even_load_costs_top_k_and_one_expert_for_all_costs_most():
    real = torch.ones(4, dtype=torch.bool)
    even = torch.eye(4) * 1e-6  # each token to another expert, all probabilities 1/4
    assert load_balancing_loss([even], real, top_k=1).item() == pytest.approx(1, rel=1e-4)
    single_expert = torch.tensor([[50.0, 0.0, 0.0, 0.0]] * 4)
    assert load_balancing_loss([single_expert], real, top_k=1).item() == pytest.approx(4)


def test_bad_routers_are_named():
    real = torch.tensor([True, False])
    with pytest.raises(
        DataError, match=r"router_logits\[1\]: shape \(3, 2\), expected \[2, experts >= 1\]"
    ):
        load_balancing_loss([torch.zeros(2, 2), torch.zeros(3, 2)], real, top_k=1)
    with pytest.raises(DataError, match="one real token"):
        load_balancing_loss([torch.zeros(2, 2)], ~torch.ones(2, dtype=torch.bool), top_k=1)
    with pytest.raises(NonFiniteTensor, match="router_logits"):
        load_balancing_loss([torch.tensor([[math.nan, 0.0], [0.0, 0.0]])], real, top_k=1)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_a_padded_batch_has_the_loss_that_the_model_itself_gives(family):
    model = build_mixture(family).eval()
    [batch] = build_batches(
        [TrainRow(ids[:1], ids[1:], mask[1:]) for ids, mask in build_rows(4)], 1000, PAD
    )
    assert not batch.attention_mask_BS.all()
    outputs = compute_token_outputs(model, batch, with_load_balancing=True)
    full = model(
        input_ids=batch.input_ids_BS,
        attention_mask=batch.attention_mask_BS.long(),
        output_router_logits=True,
    )
    assert outputs.load_balancing_loss.item() == pytest.approx(full.aux_loss.item(), rel=1e-5)
    # ours has no attention mask: padding is on the right, so real tokens do not see it
    baseline = compute_token_outputs(model, batch)
    assert baseline.load_balancing_loss is None and torch.equal(
        baseline.logprobs_BS, outputs.logprobs_BS
    )


def run_sft(model=None, **changes):
    settings = SFTSettings(
        **{"batch_size": 6, "learning_rate": 1e-2, "warmup_steps": 0, "epochs": 50, **changes}
    )
    return SFTTrainer(model or build_mixture(), PAD, build_rows(6), build_rows(3, 1), settings, 7)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_sft_adds_it_by_its_weight(checkpointing):
    """Compare loss and gradient of a whole step with the model's, in one micro-batch."""
    model = build_mixture()
    trainer = run_sft(
        model, router_aux_loss_coef=0.5, activation_checkpointing=checkpointing, max_grad_norm=1e9
    )
    [batch] = trainer._build_local_batches(trainer._train)
    twin = build_mixture().eval()
    labels = batch.input_ids_BS.masked_fill(~batch.loss_mask_BS, -100)
    mask = batch.attention_mask_BS.long()
    theirs = twin(
        input_ids=batch.input_ids_BS, attention_mask=mask, labels=labels, output_router_logits=True
    )
    nll = theirs.loss - twin.router_aux_loss_coef * theirs.aux_loss
    (nll + 0.5 * theirs.aux_loss).backward()
    norm = torch.stack([p.grad.norm() for p in twin.parameters() if p.grad is not None]).norm()
    metrics = trainer.step()
    assert metrics["train/loss"] == pytest.approx((nll + 0.5 * theirs.aux_loss).item(), rel=1e-5)
    assert metrics["train/nll"] == pytest.approx(nll.item(), rel=1e-5)
    assert metrics["train/router_aux_loss"] == pytest.approx(theirs.aux_loss.item(), rel=1e-5)
    assert metrics["train/grad_norm"] == pytest.approx(norm.item(), rel=1e-4)


def test_micro_batches_are_weighed_by_their_real_tokens():
    trainer = run_sft(router_aux_loss_coef=0.5, micro_batch_tokens=12)
    batches = trainer._build_local_batches(trainer._train)
    assert len(batches) > 2
    model, expected, total = build_mixture().eval(), 0.0, sum(len(ids) for ids, _ in build_rows(6))
    for batch in batches:
        mask = batch.attention_mask_BS.long()
        aux = model(
            input_ids=batch.input_ids_BS, attention_mask=mask, output_router_logits=True
        ).aux_loss
        expected += aux.item() * int(mask.sum()) / total
    assert trainer.step()["train/router_aux_loss"] == pytest.approx(expected, rel=1e-5)


def test_it_evens_the_load_and_leaves_evaluation_alone():
    baseline, balanced = run_sft(), run_sft(router_aux_loss_coef=1.0)
    assert balanced.evaluate() == pytest.approx(baseline.evaluate(), rel=1e-6)
    first = balanced.step()["train/router_aux_loss"]
    for _ in range(30):
        last = balanced.step()["train/router_aux_loss"]
    assert first > 2.05 and last < 2 + 0.5 * (
        first - 2
    )  # 2 experts a token: 2 where the load is even


@pytest.mark.parametrize(
    "options", [{}, {"epochs": 2, "minibatches": 2}, {"micro_batch_tokens": 30}]
)
def test_policies_get_it_too(options):
    tokenizer = train_tokenizer(["abc xyz"], 300)

    def compute_metrics(coef):
        torch.manual_seed(0)
        model = build_mixture(vocabulary=len(tokenizer))
        trainer = make_trainer(
            tokenizer,
            model=model,
            prompts_per_iteration=3,
            group_size=4,
            router_aux_loss_coef=coef,
            learning_rate=1e-9,
            entropy_coef=0.01,
            **options,
        )
        metrics = trainer.step()
        return trainer, metrics

    trainer, metrics = compute_metrics(0.5)
    baseline = compute_metrics(0.0)[1]
    assert "policy/router_aux_loss" not in baseline
    added = metrics["train/loss"] - baseline["train/loss"]
    assert added == pytest.approx(0.5 * metrics["policy/router_aux_loss"], rel=1e-4)
    rollouts = [rollout for group in trainer.groups for rollout in group.rollouts]
    if not options:
        layers = [[], []]
        for rollout in rollouts:
            ids = torch.tensor([[*rollout.prompt_ids, *rollout.completion_ids]])
            with torch.no_grad():
                actual = trainer.policy.eval()(
                    input_ids=ids, output_router_logits=True
                ).router_logits
            for layer, logits in zip(layers, actual, strict=True):
                layer.append(logits.reshape(-1, 4))
        layers = [torch.cat(layer) for layer in layers]
        expected = compute_by_numpy(layers, torch.ones(len(layers[0]), dtype=torch.bool), 2)
        assert metrics["policy/router_aux_loss"] == pytest.approx(expected, rel=1e-4)


def test_adapters_are_trained_by_it():
    settings = LoraSettings(rank=2, target_modules=("q_proj", "v_proj"))
    gradients = []
    for coef in (0.0, 10.0):
        torch.manual_seed(0)
        model = lora.add_adapter(build_mixture(), settings)
        trainer = run_sft(model, router_aux_loss_coef=coef, max_grad_norm=1e9)
        gradients.append(trainer.step()["train/grad_norm"])
    assert abs(gradients[1] - gradients[0]) > 1e-3


def test_models_without_routers_are_refused():
    messages = "router_aux_loss_coef: 0.1 balances the experts of a mixture; LlamaForCausalLM returns no router logits"
    with pytest.raises(SettingsError, match=messages):
        run_sft(nano(), router_aux_loss_coef=0.1)
    tokenizer = train_tokenizer(["abc xyz"], 300)
    with pytest.raises(SettingsError, match=messages):
        make_trainer(tokenizer, router_aux_loss_coef=0.1)
    assert check_router_logits(build_mixture()).reason == "2 routers of 4 experts, 2 per token"
    assert check_router_logits(build_mixture().to("meta")).is_undecided
