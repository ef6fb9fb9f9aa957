"""The engine against transformers' generate, the trainer's log-probabilities and the transformers backend."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from helpers.rollout_backends import EOS, create_backends, play
from helpers.scripted_sequences import (
    MODELS,
    ROOM,
    VOCAB,
    ScriptedSequence,
    make_model,
    make_sessions,
    model_named,
    sampling,
)
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Lfm2Config,
    Lfm2ForCausalLM,
    Mamba2Config,
    Mamba2ForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    PreTrainedModel,
)

from rl_core import timing
from rl_core.capabilities import check_packed_weights, decoding
from rl_core.cpu import fused_decode
from rl_core.errors import DataError, NonFiniteTensor
from rl_core.inference import decoder
from rl_core.inference.engine import Engine, create_rollout_backend
from rl_core.inference.transformers_backend import TransformersBackend
from rl_core.models.logprobs import completion_logprobs
from rl_core.models.lora import add_adapter
from rl_core.rollouts.batching import TrainRow, build_batches
from rl_core.settings import LoraSettings


@pytest.fixture(params=list(MODELS))
def model(request: pytest.FixtureRequest, weights: str) -> PreTrainedModel:
    return model_named(request.param)


def test_what_is_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    small = make_model("llama")
    assert (
        check_packed_weights(small).allowed
        and check_packed_weights(make_model("llama").double()).allowed
    )
    assert not check_packed_weights(make_model("llama").half()).allowed
    size = 4 * sum(parameter.numel() for parameter in small.parameters())
    monkeypatch.setattr(decoding, "PACKED_BYTES", size)
    assert check_packed_weights(small).allowed
    monkeypatch.setattr(decoding, "PACKED_BYTES", size - 1)
    assert not check_packed_weights(small).allowed


@pytest.mark.skipif(fused_decode.load_decode_kernels() is None, reason="needs a C compiler")
def test_what_is_compiled() -> None:
    assert decoder.Decoder(make_model("llama", head_dim=16))._compiled is not None
    for other in (make_model("llama", head_dim=8), make_model("llama", head_dim=16).double()):
        assert decoder.Decoder(other)._compiled is None


def measure_trainer_gap(
    model: PreTrainedModel, sequences: list[ScriptedSequence], temperature: float = 1.0
) -> float:
    """Return the largest difference between the sampler's and the trainer's log-probabilities."""
    rows = [
        TrainRow(s.prompt_ids, s.completion_ids, s.loss_mask, s.logprobs, temperature)
        for s in sequences
    ]
    gap = 0.0
    for batch in build_batches(rows, 256, 0):
        with torch.no_grad():
            logprobs_BS, _ = completion_logprobs(model, batch)
        assert batch.sampler_logprobs_BS is not None
        gap = max(gap, (logprobs_BS - batch.sampler_logprobs_BS).abs().max().item())
    return gap


def test_greedy_tokens_equal_generate(model: PreTrainedModel) -> None:
    engine, _ = create_backends(model)
    prompts = [[5, 9, 33, 12], [7], [40, 41, 42, 43, 44, 45, 46, 47, 48]]
    sequences = [ScriptedSequence(prompt, 0) for prompt in prompts]
    engine.run_sequences(sequences, sampling(temperature=0))
    for prompt, sequence in zip(prompts, sequences, strict=True):
        ids = torch.tensor([prompt])
        expected = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=ROOM,
            do_sample=False,
            eos_token_id=EOS,
        )
        assert sequence.completion_ids == expected[0, len(prompt) :].tolist()


def test_multi_turn_episodes_equal_the_transformers_backend(model: PreTrainedModel) -> None:
    engine, fallback = create_backends(model)
    for temperature in (0.0, 0.5, 0.7, 2.0):
        ours, theirs = (
            play(engine, temperature=temperature),
            play(fallback, temperature=temperature),
        )
        assert [s.turns for s in ours] == [s.turns for s in theirs]
        assert sum(len(s.turns) > 1 for s in ours) >= 3, (
            "the test needs episodes with several turns"
        )
        np.testing.assert_allclose(
            np.concatenate([s.logprobs for s in ours]),
            np.concatenate([s.logprobs for s in theirs]),
            atol=1e-4,
        )


def test_sampler_and_trainer_agree(model: PreTrainedModel) -> None:
    """Both backends at every temperature; greedy tokens get log-probs at temperature 1."""
    engine, fallback = create_backends(model)
    for temperature in (0.0, 0.5, 0.7, 1.0, 2.0):
        assert measure_trainer_gap(model, play(engine, temperature=temperature), temperature) < 1e-4
        if temperature in (0.5, 2.0):
            assert (
                measure_trainer_gap(model, play(fallback, temperature=temperature), temperature)
                < 1e-4
            )
            assert measure_trainer_gap(model, play(engine, temperature=temperature)) > 0.1, (
                "the distribution at temperature 1 differs"
            )


def test_norms_that_weigh_a_quiet_channel_heavily(weights: str) -> None:
    """A norm weight of 3,000 on a small hidden state; packing multiplies it into the following weights."""
    model = make_model("llama", head_dim=16, initializer_range=0.1)
    trunk = model.model
    with torch.no_grad():
        for layer in trunk.layers:
            for linear in (layer.self_attn.o_proj, layer.mlp.down_proj):
                linear.weight[5] *= 1e-5
            for norm in (layer.input_layernorm, layer.post_attention_layernorm):
                norm.weight[5] = 3000.0
        trunk.embed_tokens.weight[:, 5] *= 1e-5
        trunk.norm.weight[5] = 3000.0
    engine, _ = create_backends(model)
    with timing.collect_seconds() as totals:
        assert measure_trainer_gap(model, play(engine)) < 1e-5
    if weights == "tiles":  # of 2 layers the inputs of two of four products, and that of the head
        assert totals["packed_weights_in_float"] == 2 * (4 * 16 + 2 * 2 * 16 + 2 * 64) + VOCAB
        assert (
            totals["packed_weights"]
            == sum(p.numel() for p in model.parameters() if p.ndim == 2) - VOCAB * 32
        )


@pytest.mark.parametrize("slots", [1, 4, 7])
def test_the_number_of_slots_changes_nothing(slots: int) -> None:
    engine, fallback = create_backends(make_model("qwen3", head_dim=16))
    expected = [s.turns for s in play(engine)]
    assert [s.turns for s in play(engine, slots=slots)] == expected
    if slots == 4:
        assert [s.turns for s in play(fallback, slots=slots)] == expected


def test_many_sessions_over_few_slots() -> None:
    """More unique prompts than one look-ahead prefills, refilled one by one."""
    engine, _ = create_backends(make_model("llama"))
    generator = np.random.default_rng(1)
    prompts = [generator.integers(3, VOCAB, 60).tolist() for _ in range(30)]
    alone, together = ([ScriptedSequence(p, i) for i, p in enumerate(prompts)] for _ in range(2))
    engine.run_sequences(together, sampling(slots=5, max_completion_tokens=8))
    for sequence in alone:
        engine.run_sequences([sequence], sampling(max_completion_tokens=8))
    assert [s.turns for s in together] == [s.turns for s in alone]


def test_a_common_beginning_is_prefilled_once(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts of 21 to 26 tokens with 20 in common; one ends right after them."""
    engine, _ = create_backends(model)
    generator = np.random.default_rng(2)
    beginning = generator.integers(3, VOCAB, 20).tolist()
    ends = [[7], [8, 9], [8, 10, 11], generator.integers(3, VOCAB, 6).tolist()]
    prefilled: list[tuple[int, ...]] = []
    prefill = engine._decoder.prefill_prompts

    def record(ids_MT: torch.Tensor, *rest: object) -> torch.Tensor:
        prefilled.append(tuple(ids_MT.shape))
        return prefill(ids_MT, *rest)

    def play_prompts() -> list[ScriptedSequence]:
        sequences = [ScriptedSequence([*beginning, *end], i) for i, end in enumerate(ends * 2)]
        engine.run_sequences(sequences, sampling())
        return sequences

    monkeypatch.setattr(engine._decoder, "prefill_prompts", record)
    whole = play_prompts()
    assert prefilled == [(4, 25)]  # so small a model gains nothing
    prefilled.clear()
    monkeypatch.setattr("rl_core.inference.engine._MIN_SAVED_PRODUCTS", 0)
    shared = play_prompts()
    assert prefilled == [(1, 19), (4, 6)]
    assert [s.turns for s in shared] == [s.turns for s in whole]
    for one, other in zip(shared, whole, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=2e-5)
    assert measure_trainer_gap(model, shared) < 1e-4
    prefilled.clear()
    engine.disable_cross_row_batching()  # a row's rounding would depend on the other prompts
    play_prompts()
    assert sorted(prefilled) == [(1, 20), (1, 21), (1, 22), (1, 25)]


def test_follows_an_optimizer_step_in_place() -> None:
    model = make_model("llama")
    engine, _ = create_backends(model)
    before = play(engine)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    model(torch.arange(3, 20)[None]).logits.logsumexp(-1).sum().backward()
    optimizer.step()
    after = play(engine)
    assert [s.turns for s in after] != [s.turns for s in before]
    assert measure_trainer_gap(model, after) < 1e-4


def test_follows_replaced_parameters() -> None:
    model = make_model("llama")
    engine, _ = create_backends(model)
    model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.lm_head.weight))
    assert measure_trainer_gap(model, play(engine)) < 1e-4


def test_limits() -> None:
    model = make_model("llama")
    for backend in (
        create_rollout_backend(model, eos_ids=[], pad_id=0, max_length=20),
        TransformersBackend(model, eos_ids=[], pad_id=0, max_length=20),
    ):
        by_room, by_context = (
            ScriptedSequence([5, 6, 7], 0),
            ScriptedSequence(list(range(3, 18)), 0),
        )
        backend.run_sequences([by_room, by_context], sampling(max_completion_tokens=9))
        assert [(len(ids), hit) for ids, hit in by_room.turns] == [(9, True)]
        assert [(len(ids), hit) for ids, hit in by_context.turns] == [(5, True)]  # 20 - 15


def test_finished_rows_stay_within_learned_positions() -> None:
    """A row at its context's end decodes on while others of its batch continue; GPT-2 has no such positions."""
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=1, n_head=2, n_positions=16)
    )
    full, short = ScriptedSequence(list(range(3, 15)), 0), ScriptedSequence([4, 5], 1)
    alone = ScriptedSequence([4, 5], 1)
    backend = TransformersBackend(model, eos_ids=[], pad_id=0, max_length=16)
    backend.run_sequences([full, short], sampling(max_completion_tokens=14))
    backend.run_sequences([alone], sampling(max_completion_tokens=14))
    assert [len(s.completion_ids) for s in (full, short)] == [4, 14]
    assert short.turns == alone.turns


def test_an_end_token_at_the_very_limit_is_no_cut() -> None:
    model = make_model("llama")
    prompts = [[5, 6, token] for token in range(3, VOCAB)]
    free = [ScriptedSequence(prompt, 0) for prompt in prompts]
    create_rollout_backend(model, eos_ids=[], pad_id=0, max_length=64).run_sequences(
        free, sampling(temperature=0, max_completion_tokens=2)
    )
    ids = next(s.completion_ids for s in free if s.completion_ids[0] != s.completion_ids[1])
    prompt = next(s.prompt_ids for s in free if s.completion_ids == ids)
    for backend_class in (Engine, TransformersBackend):
        sequence = ScriptedSequence(prompt, 0)
        backend = backend_class(model, eos_ids=[ids[1]], pad_id=0, max_length=64)
        backend.run_sequences([sequence], sampling(temperature=0, max_completion_tokens=2))
        assert sequence.turns == [(ids, False)]


@pytest.mark.parametrize("backend_class", [Engine, TransformersBackend])
def test_bad_sessions_are_refused(backend_class: type) -> None:
    model = make_model("llama")
    backend = backend_class(model, eos_ids=list(range(VOCAB)), pad_id=0, max_length=20)
    with pytest.raises(DataError, match="prompt of 0 tokens"):
        backend.run_sequences([ScriptedSequence([], 0)], sampling())
    with pytest.raises(DataError, match="prompt of 20 tokens"):
        backend.run_sequences([ScriptedSequence([3] * 20, 0)], sampling())
    # 20 - 3 - 1 leaves 16, so nothing could be sampled
    with pytest.raises(DataError, match="observation of 16 tokens"):
        backend.run_sequences([ScriptedSequence([3] * 3, 0, [[4] * 16])], sampling())
    fits = ScriptedSequence([3] * 3, 0, [[4] * 15])
    backend.run_sequences([fits], sampling())
    assert len(fits.completion_ids) == 17
    backend.run_sequences([], sampling())


def test_leaves_the_model_as_it_was() -> None:
    model = make_model("llama")
    model.train()
    model.model.layers[1].eval()
    training = {name: module.training for name, module in model.named_modules()}
    state = copy.deepcopy(model.state_dict())
    random_state = torch.get_rng_state()
    for backend in create_backends(model):
        play(backend)
        assert {name: module.training for name, module in model.named_modules()} == training
        assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
        assert torch.equal(torch.get_rng_state(), random_state)
        assert not any(p.is_inference() or not p.requires_grad for p in model.parameters())


def test_adapters_are_sampled_from_and_taken_out_exactly() -> None:
    model = make_model("qwen2")
    base = copy.deepcopy(model)
    lora = add_adapter(model, LoraSettings(rank=4, alpha=8.0))
    with torch.no_grad():
        for name, parameter in lora.named_parameters():
            if "lora_" in name:
                parameter.normal_(0, 0.2)
    state = copy.deepcopy(lora.state_dict())
    engine, fallback = create_backends(lora)
    ours = play(engine)
    assert [s.turns for s in ours] == [s.turns for s in play(fallback)]
    assert [s.turns for s in ours] != [s.turns for s in play(create_backends(base)[0])], (
        "the adapter must have an effect"
    )
    assert measure_trainer_gap(lora, ours) < 1e-4
    assert all(torch.equal(value, state[name]) for name, value in lora.state_dict().items())


def test_an_error_in_a_session_leaves_the_adapter_unmerged() -> None:
    lora = add_adapter(make_model("llama"), LoraSettings(rank=2))
    state = copy.deepcopy(lora.state_dict())

    class Broken(ScriptedSequence):
        def take_action(
            self, action_ids: list[int], logprobs: list[float], hit_limit: bool
        ) -> list[int] | None:
            raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        create_backends(lora)[0].run_sequences([Broken([3, 4], 0)], sampling())
    assert all(torch.equal(value, state[name]) for name, value in lora.state_dict().items())
    assert not any(getattr(module, "merged", False) for module in lora.modules())


def test_sessions_may_compute_gradients_between_turns() -> None:
    """Environments and rewards run outside inference mode."""

    class Learning(ScriptedSequence):
        def take_action(
            self, action_ids: list[int], logprobs: list[float], hit_limit: bool
        ) -> list[int] | None:
            weight = torch.ones(2, requires_grad=True)
            with torch.enable_grad():
                (weight * 2).sum().backward()
            assert weight.grad is not None and weight.grad.tolist() == [2.0, 2.0]
            return super().take_action(action_ids, logprobs, hit_limit)

    for backend in create_backends(make_model("llama")):
        sequence = Learning([3, 4], 0, [[5]], room=ROOM)
        backend.run_sequences([sequence], sampling())
        assert sequence.turns


def test_sampling_follows_the_models_distribution() -> None:
    """2,000 one-token samples against the model's probabilities: chi-square over 64 tokens."""
    model = make_model("llama")
    engine = create_rollout_backend(model, eos_ids=range(VOCAB), pad_id=0, max_length=64)
    sequences = [ScriptedSequence([5, 6, 7], seed) for seed in range(2000)]
    for temperature in (1.0, 1.6):
        engine.run_sequences(sequences, sampling(temperature=temperature, slots=500))
        counts = np.bincount([s.turns[-1][0][0] for s in sequences], minlength=VOCAB)
        with torch.no_grad():
            p = torch.softmax(
                model(torch.tensor([[5, 6, 7]])).logits[0, -1] / temperature, -1
            ).numpy()
        keep = p * 2000 >= 5
        expected, seen = p[keep] * 2000, counts[keep]
        chi2 = ((seen - expected) ** 2 / expected).sum()
        assert keep.sum() >= 4
        # mean k - 1, standard deviation sqrt(2k)
        assert chi2 < keep.sum() + 4 * np.sqrt(2 * keep.sum()), (temperature, chi2)


def test_other_architectures_fall_back() -> None:
    config = GPT2Config(
        vocab_size=VOCAB,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=128,
        bos_token_id=1,
        eos_token_id=1,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    model = GPT2LMHeadModel(config)
    backend = create_rollout_backend(model, eos_ids=EOS, pad_id=0, max_length=128)
    assert isinstance(backend, TransformersBackend)
    sequences = make_sessions()
    backend.run_sequences(sequences, sampling())
    with torch.no_grad():
        model.eval()
        assert measure_trainer_gap(model, sequences) < 1e-4


def test_sliding_window_and_dynamic_rope_fall_back() -> None:
    sliding = make_model("qwen2", use_sliding_window=True, sliding_window=8, max_window_layers=0)
    dynamic = make_model(
        "llama", rope_parameters=dict(rope_type="dynamic", rope_theta=10000.0, factor=2.0)
    )
    for model in (sliding, dynamic):
        assert isinstance(
            create_rollout_backend(model, eos_ids=EOS, pad_id=0, max_length=64), TransformersBackend
        )


def create_recurrent_model(family: str) -> PreTrainedModel:
    shape = dict(
        vocab_size=VOCAB, hidden_size=16, num_hidden_layers=2, initializer_range=0.3, pad_token_id=0
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if family == "mamba":
            model: PreTrainedModel = MambaForCausalLM(MambaConfig(**shape, state_size=4))
        elif family == "mamba2":
            model = Mamba2ForCausalLM(
                Mamba2Config(**shape, state_size=4, num_heads=4, head_dim=8, n_groups=2)
            )
        else:
            layers = ["conv", "full_attention"]
            heads = dict(num_attention_heads=2, num_key_value_heads=1, intermediate_size=24)
            model = Lfm2ForCausalLM(Lfm2Config(**shape, **heads, layer_types=layers))
        with (
            torch.no_grad()
        ):  # a distribution far from uniform, and a mixer that attends to the past
            model.get_output_embeddings().weight.mul_(4.0)
            for name, parameter in model.named_parameters():
                if "conv1d" in name or "dt_proj" in name:
                    parameter.mul_(3.0)
    return model


@pytest.mark.parametrize("family", ["mamba", "mamba2", "lfm2"])
def test_recurrent_models_are_sampled_exactly(family: str) -> None:
    """Ragged prompts, several turns: without a key/value cache, and with one in addition to a recurrent state."""
    model = create_recurrent_model(family)
    backend = create_rollout_backend(model, eos_ids=EOS, pad_id=0, max_length=128)
    assert isinstance(backend, TransformersBackend)
    has_no_cache = "keeps no key/value cache" in decoding.check_rollout_decoder(model).fallback
    assert has_no_cache == (family != "lfm2")
    for temperature in (1.0, 0.7):
        sequences = play(backend, temperature=temperature)
        assert sum(len(sequence.turns) > 1 for sequence in sequences) >= 3
        model.eval()
        assert measure_trainer_gap(model, sequences, temperature) < 1e-4
        alone = make_sessions()[5]
        backend.run_sequences([alone], sampling(temperature=temperature))
        assert alone.turns == sequences[5].turns
    prompt = [5, 9, 33, 12]
    greedy = ScriptedSequence(prompt, 0)
    backend.run_sequences([greedy], sampling(temperature=0))
    ids = list(prompt)
    while len(ids) < len(prompt) + ROOM and (len(ids) == len(prompt) or ids[-1] not in EOS):
        with torch.no_grad():
            ids.append(
                int(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax())
            )
    assert greedy.completion_ids == ids[len(prompt) :]


@pytest.mark.parametrize("backend_class", [Engine, TransformersBackend])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_weight_that_is_not_finite_is_named_before_a_token_is_sampled(
    backend_class: type[Engine] | type[TransformersBackend], value: float, weights: str
) -> None:
    model = make_model("qwen2")
    backend = backend_class(model, eos_ids=EOS, pad_id=0, max_length=128)
    play(backend)
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[3, 5:7] = value
        model.model.norm.weight[0] = value
    sequences = make_sessions()
    with pytest.raises(
        NonFiniteTensor,
        match=r"^weight model\.layers\.1\.mlp\.down_proj\.weight: .* at \(3, 5\), 2 of",
    ) as raised:
        backend.run_sequences(sequences, sampling())
    assert "1 other weights have" in str(raised.value) and str(value) in str(raised.value)
    assert not any(sequence.turns for sequence in sequences)


@pytest.mark.parametrize("backend_class", [Engine, TransformersBackend])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_activations_that_overflow_are_an_error_of_their_token(
    backend_class: type[Engine] | type[TransformersBackend], temperature: float, weights: str
) -> None:
    """Finite weights, infinite hidden states."""
    model = make_model("llama")
    backend = backend_class(model, eos_ids=[], pad_id=0, max_length=128)
    with torch.no_grad():
        for linear in (model.model.layers[0].mlp.gate_proj, model.model.layers[0].mlp.up_proj):
            linear.weight.mul_(1e15)
        model.model.layers[0].mlp.down_proj.weight.mul_(1e15)
    with pytest.raises(
        NonFiniteTensor, match=r"sampled token number 1 of a sequence: .* overflow in float32"
    ):
        backend.run_sequences(make_sessions(), sampling(temperature=temperature))


def test_adapters_that_are_not_finite_are_named() -> None:
    model = add_adapter(make_model("llama"), LoraSettings(rank=2, target_modules=("q_proj",)))
    backend = create_rollout_backend(model, eos_ids=EOS, pad_id=0, max_length=128)
    with torch.no_grad():
        next(p for name, p in model.named_parameters() if "lora_B" in name)[0, 0] = torch.nan
    with pytest.raises(NonFiniteTensor, match=r"layers\.0\.self_attn\.q_proj\.lora_B"):
        play(backend)
