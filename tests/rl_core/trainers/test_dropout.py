"""Dropout: off in every update except SFT's, and the same masks on both sides of a ratio if enabled."""

import copy
import math

import pytest
import torch
from helpers.letters import comparable, make_trainer, weights
from helpers.tiny import PAD, VOCABULARY
from torch.nn import functional
from transformers import (
    FalconConfig,
    FalconForCausalLM,
    GPT2Config,
    GPT2ForSequenceClassification,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
)

from rl_core.capabilities import check_training_forward
from rl_core.data.pairs import PairSide, PreferencePair
from rl_core.data.tokenizer import train_tokenizer
from rl_core.models import hidden_states, lora
from rl_core.models.forward_modes import has_dropout, seed_dropout_masks, use_training_mode
from rl_core.models.logprobs import completion_logprobs
from rl_core.settings import (
    CriticSettings,
    LoraSettings,
    OptimizerSettings,
    PolicySettings,
    PreferenceSettings,
    RewardModelSettings,
    SFTSettings,
    ThoughtsSettings,
)
from rl_core.storage import faults
from rl_core.storage.checkpoint import CheckpointStore
from rl_core.storage.faults import InjectedFault
from rl_core.tracking import MemoryTracker
from rl_core.trainers.preference import PreferenceTrainer
from rl_core.trainers.reward_model import RewardModelTrainer
from rl_core.trainers.sft import SFTTrainer
from rl_core.training.loop import run_loop
from rl_core.training.optimizer_step import OptimizerStep
from rl_core.types import TrainBatch


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["abc xyz"], 300)


def run_seeded(make):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return make()


def build_gpt2(model_class=GPT2LMHeadModel, vocabulary=VOCABULARY, **options):
    """Build GPT-2 with the dropout of its default configuration, 0.1 in three places."""
    config = GPT2Config(
        vocab_size=vocabulary,
        n_positions=32,
        n_embd=16,
        n_layer=2,
        n_head=2,
        initializer_range=0.3,
        pad_token_id=PAD,
        bos_token_id=None,
        eos_token_id=None,
        **options,
    )
    assert config.resid_pdrop == config.embd_pdrop == config.attn_pdrop == 0.1
    return run_seeded(lambda: model_class(config))


def build_llama(vocabulary=VOCABULARY, dropout=0.3):
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=32,
        attention_dropout=dropout,
        initializer_range=0.3,
        pad_token_id=PAD,
    )
    return run_seeded(lambda: LlamaForCausalLM(config))


def build_adapted_model(vocabulary=VOCABULARY):
    """Build a Llama without dropout and trained adapters with dropout."""
    settings = LoraSettings(rank=4, dropout=0.4, target_modules=("q_proj", "down_proj"))
    model = run_seeded(lambda: lora.add_adapter(build_llama(vocabulary, 0.0), settings))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.fill_(0.2)
    return model


MODELS = {"gpt2": build_gpt2, "llama": build_llama, "lora": build_adapted_model}


def build_pairs(count, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def draw_ids(length):
        return torch.randint(1, VOCABULARY, (length,), generator=generator).tolist()

    return [
        PreferencePair(
            *(
                PairSide(prompt, ids, [True] * len(ids))
                for ids in (draw_ids(2 + index % 3), draw_ids(1 + index % 4))
            )
        )
        for index in range(count)
        for prompt in [draw_ids(2 + index % 2)]
    ]


def build_preference_trainer(model=None, **changes):
    options = {"learning_rate": 5e-3, "warmup_steps": 0, "batch_size": 4, "epochs": 2.0, **changes}
    return PreferenceTrainer(
        model or build_gpt2(),
        PAD,
        build_pairs(8),
        build_pairs(5, 1),
        PreferenceSettings(**options),
        7,
    )


def build_policy_trainer(tokenizer, model=None, **options):
    model = model or build_gpt2(vocabulary=len(tokenizer))
    return make_trainer(
        tokenizer, model=model, reference=copy.deepcopy(model), **{"kl_coef": 0.1, **options}
    )


def test_only_sft_drops_out_unasked():
    switched_on = {
        kind.__name__
        for kind in (
            PolicySettings,
            PreferenceSettings,
            RewardModelSettings,
            SFTSettings,
            ThoughtsSettings,
        )
        if kind().dropout
    }
    assert switched_on == {"SFTSettings"}


@pytest.mark.parametrize("dropout", [False, True])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    ("loss", "first"), [("dpo", math.log(2)), ("ipo", 25.0)]
)  # 1 / (2 beta) squared, beta 0.1
def test_a_policy_that_is_its_reference_has_the_first_loss_of_the_formula(
    loss, first, name, dropout
):
    trainer = build_preference_trainer(MODELS[name](), loss=loss, dropout=dropout)
    metrics = trainer.step()
    assert metrics["train/loss"] == pytest.approx(first, rel=1e-6)
    assert metrics["train/reference_kl"] == pytest.approx(0, abs=1e-6)
    assert abs(trainer.step()["train/loss"] - first) > 1e-3


@pytest.mark.parametrize("loss", ["dpo", "ipo"])
def test_held_out_pairs_are_measured_without_dropout(loss):
    on, off = build_preference_trainer(dropout=True, loss=loss), build_preference_trainer(loss=loss)
    assert on.references["heldout"] == off.references["heldout"]
    assert on.evaluate()["eval/loss"] == pytest.approx(
        math.log(2) if loss == "dpo" else 25.0, rel=1e-6
    )
    # masks are drawn for each pair
    moved = [
        a[0] - b[0] for a, b in zip(on.references["train"], off.references["train"], strict=True)
    ]
    assert min(map(abs, moved)) > 1e-4 and len({round(value, 4) for value in moved}) == len(moved)


def test_a_pair_has_the_same_masks_at_every_visit_and_in_every_batch():
    """Check that at a learning rate of nearly 0 two epochs in different orders always give the reference's numbers."""
    trainer = build_preference_trainer(dropout=True, learning_rate=1e-12, epochs=4.0, batch_size=3)
    for _ in range(trainer.total_steps):
        assert trainer.step()["train/loss"] == pytest.approx(math.log(2), rel=1e-6)


ALGORITHMS = {
    "grpo": dict(algorithm="grpo"),
    "gspo": dict(algorithm="gspo"),
    "ppo": dict(algorithm="ppo"),
    "shared": dict(algorithm="ppo", critic=CriticSettings(kind="shared", value_clip_eps=0.2)),
    "reward": dict(algorithm="rloo", kl_in="reward", entropy_coef=0.01),
    "limit": dict(algorithm="grpo", kl_max=1.0),
}


@pytest.mark.parametrize("dropout", [False, True])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_weights_that_do_not_move_have_the_ratio_1(tokenizer, name, dropout):
    trainer = build_policy_trainer(
        tokenizer,
        learning_rate=1e-9,
        epochs=2,
        minibatches=3,
        dropout=dropout,
        prompts_per_iteration=4,
        group_size=3,
        **ALGORITHMS[name],
    )
    metrics = trainer.step()
    assert metrics["policy/ratio_max"] == pytest.approx(1, abs=1e-5)
    assert metrics["policy/clip_fraction"] == 0
    assert metrics["policy/ref_kl"] == pytest.approx(0, abs=1e-6)
    assert metrics.get("policy/kl_after_max", 0) == pytest.approx(0, abs=1e-6)
    assert metrics.get("value/clip_fraction", 0) == 0
    # the sampler never uses dropout, so this shows whether the update did
    assert (metrics["policy/sampler_difference_max"] > 0.05) == dropout


@pytest.mark.parametrize("name", ["llama", "lora"])
def test_masks_of_adapters_and_of_attention_are_the_same_too(tokenizer, name):
    trainer = build_policy_trainer(
        tokenizer,
        MODELS[name](len(tokenizer)),
        learning_rate=1e-9,
        epochs=2,
        minibatches=2,
        dropout=True,
    )
    metrics = trainer.step()
    assert metrics["policy/ratio_max"] == pytest.approx(1, abs=1e-5)
    assert metrics["policy/ref_kl"] == pytest.approx(0, abs=1e-6)
    assert metrics["policy/sampler_difference_max"] > 0.05


def build_noisy_adapted_model(vocabulary, base_dropout=0.2, adapter_dropout=0.3, **options):
    """Build a model with dropout, and fresh adapters with dropout on several of its layers."""
    settings = LoraSettings(
        rank=4,
        dropout=adapter_dropout,
        target_modules=("q_proj", "v_proj", "o_proj", "down_proj"),
        **options,
    )
    return run_seeded(lambda: lora.add_adapter(build_llama(vocabulary, base_dropout), settings))


REFERENCES = {
    "itself": lambda model, vocabulary: model,
    "copy": lambda model, vocabulary: copy.deepcopy(model),
    "full weights": lambda model, vocabulary: build_llama(vocabulary, 0.2),
}


@pytest.mark.parametrize("kl_in", ["loss", "reward"])
@pytest.mark.parametrize(
    ("reference", "options"),
    [
        ("itself", {}),
        ("itself", {"dora": True}),
        ("itself", {"modules_to_save": ("k_proj",)}),
        ("copy", {}),
        ("full weights", {}),
    ],
)
def test_masks_of_the_base_are_the_same_with_and_without_adapters(
    tokenizer, reference, options, kl_in
):
    """Check that the reference, without the adapters, draws theirs too: else the base's masks are others."""
    model = build_noisy_adapted_model(len(tokenizer), **options)
    trainer = make_trainer(
        tokenizer,
        model=model,
        reference=REFERENCES[reference](model, len(tokenizer)),
        algorithm="grpo" if kl_in == "loss" else "rloo",
        kl_in=kl_in,
        kl_coef=0.1,
        learning_rate=1e-9,
        epochs=2,
        minibatches=2,
        dropout=True,
    )
    metrics = trainer.step()
    assert metrics["policy/ref_kl"] == pytest.approx(0, abs=1e-7 if kl_in == "loss" else 1e-5)
    assert metrics["policy/ratio_max"] == pytest.approx(1, abs=1e-5)
    assert metrics["policy/sampler_difference_max"] > 0.05


def test_every_iteration_has_separate_masks(tokenizer):
    trainer = build_policy_trainer(
        tokenizer, learning_rate=1e-9, dropout=True, curriculum=(), group_size=3
    )
    differences = [trainer.step()["policy/sampler_difference_max"] for _ in range(2)]
    resumed = build_policy_trainer(
        tokenizer, learning_rate=1e-9, dropout=True, curriculum=(), group_size=3
    )
    assert resumed.step()["policy/sampler_difference_max"] == differences[0] != differences[1]


def test_a_reward_model_trains_without_dropout_unless_asked():
    def compute_first_loss(**options):
        pairs = [(pair.chosen_ids, pair.rejected_ids) for pair in build_pairs(8)]
        torch.manual_seed(5)
        model = build_gpt2(GPT2ForSequenceClassification, num_labels=1)
        trainer = RewardModelTrainer(
            model, PAD, pairs, [], RewardModelSettings(batch_size=8, **options), 7
        )
        expected = trainer._evaluate_examples(trainer._train)["loss"]
        return trainer.step()["train/loss"], expected

    actual, expected = compute_first_loss()
    assert actual == pytest.approx(expected, rel=1e-6)
    actual, expected = compute_first_loss(dropout=True)
    assert abs(actual - expected) > 1e-3


def test_sft_keeps_the_models_dropout_by_default():
    rows = [([1, 2 + index % 5, 3, 4], [False, True, True, True]) for index in range(8)]

    def compute_first_loss(**options):
        torch.manual_seed(5)
        trainer = SFTTrainer(build_gpt2(), PAD, rows, [], SFTSettings(batch_size=8, **options), 7)
        expected = trainer._evaluate_examples(trainer._train)["loss"]
        return trainer.step()["train/loss"], expected

    actual, expected = compute_first_loss(dropout=False)
    assert actual == pytest.approx(expected, rel=1e-6)
    actual, expected = compute_first_loss()
    assert abs(actual - expected) > 1e-3


def build_opt():
    config = OPTConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        ffn_dim=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        dropout=0.3,
        layerdrop=0.5,
        max_position_embeddings=32,
        word_embed_proj_dim=16,
        init_std=0.3,
        pad_token_id=PAD,
    )
    return run_seeded(lambda: OPTForCausalLM(config))


def build_falcon():
    config = FalconConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        hidden_dropout=0.3,
        attention_dropout=0.3,
        initializer_range=0.3,
        pad_token_id=PAD,
        parallel_attn=False,
        alibi=False,
    )
    return run_seeded(lambda: FalconForCausalLM(config))


IDS = torch.tensor([[1, 2, 3, 4, 5, 6], [7, 8, 9, 10, 1, 2]])


@pytest.mark.parametrize(
    "make", [build_gpt2, build_llama, build_opt, build_falcon, build_adapted_model]
)
def test_activations_computed_again_are_without_dropout_too(make):
    """Check recomputed activations: layers checkpoint only in training mode, and some drop out by stored rates."""
    batch = TrainBatch(
        IDS, torch.ones_like(IDS, dtype=torch.bool), torch.ones_like(IDS, dtype=torch.bool)
    )
    batch.loss_mask_BS[:, 0] = False

    def compute_gradient(checkpointing, dropout=False):
        model = make().train()
        step = OptimizerStep(
            model, OptimizerSettings(activation_checkpointing=checkpointing, dropout=dropout), 1
        )
        calls, gradients = [], []
        if checkpointing:
            for module in model.modules():
                if getattr(module, "gradient_checkpointing", False):
                    original = module._gradient_checkpointing_func
                    module._gradient_checkpointing_func = lambda *a, f=original, **k: (
                        calls.append(1) or f(*a, **k)
                    )
        step._update_weights = lambda norm, size: gradients.extend(
            torch.zeros_like(master) if master.grad is None else master.grad.clone()  # layer drop
            for master in step.master_weights.masters.values()
        )
        before = vars(model.config).copy(), [module.training for module in model.modules()]
        step.run_step([batch], lambda batch: (-completion_logprobs(model, batch)[0].sum() / 10, {}))
        assert before == (vars(model.config), [module.training for module in model.modules()])
        # the packed forward pass computes whole layers again by itself
        if make not in (build_llama, build_adapted_model):
            assert bool(calls) == checkpointing
        return torch.cat([gradient.flatten() for gradient in gradients])

    baseline, recomputed = compute_gradient(False), compute_gradient(True)
    torch.testing.assert_close(recomputed, baseline, rtol=1e-5, atol=1e-6)
    model = make().eval()
    loss = functional.cross_entropy(model(IDS).logits[:, :-1].flatten(0, 1), IDS[:, 1:].flatten())
    expected = torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad])
    torch.testing.assert_close(
        baseline, torch.cat([g.flatten() for g in expected]), rtol=1e-4, atol=1e-5
    )
    assert (
        has_dropout(model) and (compute_gradient(True, dropout=True) - baseline).abs().max() > 1e-3
    )


def test_masks_are_drawn_again_where_activations_are(tokenizer):
    """Check dropout with activation checkpointing: the gradient is of the pass whose loss was computed."""

    def train_weights(checkpointing):
        trainer = build_policy_trainer(
            tokenizer,
            build_llama(len(tokenizer)),
            epochs=2,
            minibatches=2,
            prompts_per_iteration=3,
            dropout=True,
            activation_checkpointing=checkpointing,
        )
        metrics = trainer.step()
        return metrics["policy/ratio_mean"], weights(trainer)

    baseline, recomputed = train_weights(False), train_weights(True)
    assert recomputed[0] == pytest.approx(baseline[0], rel=1e-5)
    torch.testing.assert_close(recomputed[1], baseline[1], rtol=1e-4, atol=1e-5)


def test_the_fast_path_is_open_where_configured_dropout_is_off(monkeypatch):
    paths = []
    original = hidden_states.run_packed_forward
    monkeypatch.setattr(
        hidden_states, "run_packed_forward", lambda *a: paths.append(True) or original(*a)
    )
    trainer = build_preference_trainer(build_llama())
    paths.clear()
    trainer.step()
    assert paths
    trainer = build_preference_trainer(build_llama(), dropout=True)
    paths.clear()
    trainer.step()
    assert not paths
    assert "dropout: false switches it off" in check_training_forward(build_llama().train()).reason


def test_the_mode_is_restored_after_an_error():
    model = build_gpt2().train()
    model.transformer.h[0].eval()
    modes = [module.training for module in model.modules()]
    for dropout in (False, True):
        with pytest.raises(ZeroDivisionError), use_training_mode(model, dropout=dropout):
            assert all(module.training == dropout for module in model.modules())
            raise ZeroDivisionError
        assert [module.training for module in model.modules()] == modes


def test_masks_repeat_and_leave_the_generator_alone():
    torch.manual_seed(1)
    state = torch.get_rng_state()
    ones = torch.ones(1000)

    def draw_mask(seed):
        with seed_dropout_masks(torch.device("cpu"), seed):
            return functional.dropout(ones, 0.5)

    big = 2**127 + 3  # seeds have 128 bits
    assert torch.equal(draw_mask(big), draw_mask(big)) and not torch.equal(
        draw_mask(big), draw_mask(big + 1)
    )
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (build_gpt2, True),
        (build_llama, True),
        (build_opt, True),
        (build_falcon, True),
        (build_adapted_model, True),
        (lambda: build_llama(dropout=0.0), False),
    ],
)
def test_models_that_drop_out(make, expected):
    assert has_dropout(make()) is expected


@pytest.mark.parametrize("kind", ["policy", "preference"])
def test_killed_and_resumed_the_masks_are_the_same(tmp_path, tokenizer, kind):
    def run_training(folder):
        torch.manual_seed(3)
        options = dict(dropout=True, checkpoint_every=1)
        if kind == "policy":
            trainer = build_policy_trainer(
                tokenizer,
                build_llama(len(tokenizer)),
                epochs=2,
                minibatches=2,
                iterations=4,
                prompts_per_iteration=3,
                group_size=3,
                **options,
            )
        else:
            trainer = build_preference_trainer(**options)
        tracker = MemoryTracker()
        store = CheckpointStore(folder) if folder else None
        run_loop(trainer, trainer.settings, iterations=4, tracker=tracker, checkpoints=store)
        return weights(trainer), comparable(tracker.metrics[-1][1])

    expected = run_training(None)
    faults.configure_faults("loop.stepped:2:raise")
    with pytest.raises(InjectedFault):
        run_training(tmp_path)
    faults.configure_faults(None)
    actual = run_training(tmp_path)
    assert torch.equal(actual[0], expected[0]) and actual[1] == expected[1]
