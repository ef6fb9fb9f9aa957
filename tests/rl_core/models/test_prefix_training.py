"""Training on prefix trees against each row alone in float64: log-probabilities, entropies, values, loss, gradients."""

from __future__ import annotations

import copy
from itertools import pairwise

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from rl_core.capabilities import check_prefix_sharing
from rl_core.models.forward_modes import use_training_mode
from rl_core.models.heads import SeparateCritic, ValueHead, compute_sequence_scores
from rl_core.models.hidden_states import compute_prefix_states
from rl_core.models.logprobs import compute_token_outputs
from rl_core.models.lora import add_adapter, unwrap_model
from rl_core.rollouts.batching import TrainRow, build_batches
from rl_core.settings import LoraSettings, SFTSettings
from rl_core.trainers.sft import SFTTrainer

VOCABULARY = 61
SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
}


def create_llama():
    return LlamaForCausalLM(LlamaConfig(**SIZES))


def create_tied_qwen3():
    return Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=True))


def create_adapted_llama():
    model = add_adapter(create_llama(), LoraSettings(rank=4))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:  # initially zero, which would hide a missing adapter
                weight.normal_(std=0.1)
    return model


def create_checkpointed_llama():
    model = create_llama()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def create_small_heads():
    """A head size that attention in compiled code does not support."""
    return LlamaForCausalLM(LlamaConfig(**SIZES, head_dim=8))


MODELS = {
    "llama": create_llama,
    "qwen3, tied": create_tied_qwen3,
    "adapters": create_adapted_llama,
    "checkpointing": create_checkpointed_llama,
    "heads of 8": create_small_heads,
}


def create(make):
    torch.manual_seed(0)
    return make().train()


def draw_loss(row_number: int, count: int) -> list[bool]:
    """Return a mask over a completion's tokens; shared tokens carry loss in some rows alone."""
    return [(position + row_number) % 3 != 0 for position in range(count)]


def build_rows(sequences, *, temperatures=(1.0,)):
    """Build rows with a prompt of one token."""
    return [
        TrainRow(
            ids[:1],
            ids[1:],
            draw_loss(number, len(ids) - 1),
            temperature=temperatures[number % len(temperatures)],
        )
        for number, ids in enumerate(sequences)
    ]


def weigh(row_number: int, position: int) -> float:
    """Return the weight of a token in the loss: an advantage of either sign."""
    return ((7 * row_number + 3 * position) % 11 - 5) / 5


def compute_ours(model, rows, max_tokens=10_000, *, value_head=None):
    """Compute the outputs of every loss token and the loss, in the micro-batches of a step."""
    outputs, total = {}, 0.0
    for batch in build_batches(rows, max_tokens, 0, shares_prefixes=True):
        result = compute_token_outputs(model, batch, with_entropy=True, value_head=value_head)
        for b, number in enumerate(batch.rows):
            for position in batch.loss_mask_BS[b].nonzero().squeeze(1).tolist():
                value = result.values_BS[b, position] if value_head is not None else None
                outputs[number, position] = (
                    result.logprobs_BS[b, position],
                    result.entropy_BS[b, position],
                    value,
                )
        total = total + sum_loss(outputs, batch.rows)
    total.backward()
    return outputs, float(total)


def sum_loss(outputs, numbers):
    """Sum weighted log-probs, entropies and squared values of the tokens of these rows."""
    total = torch.zeros((), dtype=torch.float64)
    for (number, position), (logprob, entropy, value) in outputs.items():
        if number in numbers:
            total = total + weigh(number, position) * logprob.double() + 0.1 * entropy.double()
            if value is not None:
                total = total + 0.1 * value.double().square()
    return total


def compute_oracle(model, rows, *, value_head=None):
    """Compute the same with transformers in float64, context by context."""
    model, head = copy.deepcopy(model).double().eval(), copy.deepcopy(value_head)
    base, outputs = unwrap_model(model), {}
    model.zero_grad()
    for number, row in enumerate(rows):
        ids = [*row.prompt_ids, *row.completion_ids]
        mask = [False] * len(row.prompt_ids) + list(row.loss_mask)
        edges = [0, *(len(row.prompt_ids) + start for start in row.context_starts), len(ids)]
        for begin, end in pairwise(edges):
            states = base.base_model(input_ids=torch.tensor([ids[begin:end]]), use_cache=False)
            states_SH = states.last_hidden_state[0]
            logits_SV = base.get_output_embeddings()(states_SH) / row.temperature
            log_p_SV = logits_SV.log_softmax(-1)
            for position in range(begin, end):
                if mask[position]:
                    log_p_V = log_p_SV[position - begin - 1]
                    value = None
                    if head is not None:
                        value = head.double()(states_SH[position - begin - 1][None])[0]
                    outputs[number, position] = (
                        log_p_V[ids[position]],
                        -(log_p_V.exp() * log_p_V).sum(),
                        value,
                    )
    total = sum_loss(outputs, range(len(rows)))
    total.backward()
    return outputs, float(total), collect_gradients(model, head)


def collect_gradients(*modules):
    return {
        (index, name): parameter.grad.double()
        for index, module in enumerate(modules)
        if module is not None
        for name, parameter in module.named_parameters()
        if parameter.grad is not None
    }


def assert_rows_alone_agree(model, rows, max_tokens=10_000, *, value_head=None):
    expected, expected_loss, expected_gradients = compute_oracle(model, rows, value_head=value_head)
    model.zero_grad()
    ours, loss = compute_ours(model, rows, max_tokens, value_head=value_head)
    assert ours.keys() == expected.keys()
    for key, values in expected.items():
        for value, other in zip(values, ours[key], strict=True):
            if value is not None:
                assert float(other) == pytest.approx(float(value), rel=1e-4, abs=2e-5), key
    assert loss == pytest.approx(expected_loss, rel=1e-4, abs=1e-4)
    gradients = collect_gradients(model, value_head)
    assert gradients.keys() == expected_gradients.keys()
    size = max(float(gradient.norm()) for gradient in expected_gradients.values())
    for name, gradient in expected_gradients.items():
        assert float((gradients[name] - gradient).norm()) < 1e-4 * size, name


def build_turns(prompt, turns, *, samples=1):
    """Build the contexts of an episode whose every turn sends the whole conversation again."""
    sequences = []
    for sample in range(samples):
        history = list(prompt)
        for turn in range(turns):
            history = [*history, 11 + sample, 20 + turn, 30 + (turn * sample) % 3]
            sequences.append(list(history))
            history = [*history, 40, 41 + turn]
    return sequences


PROMPT = [5, 3, 9, 1, 1, 7]
SEQUENCES = {
    "samples of a prompt": [[*PROMPT, 10 + n, *range(20, 22 + n)] for n in range(4)],
    "turns": build_turns(PROMPT, 4),
    "turns of several samples": build_turns(PROMPT, 3, samples=3),
    "branches": [
        [*PROMPT, 2, 4],
        [*PROMPT, 2, 4, 8, 8],
        [*PROMPT, 2, 5],
        [*PROMPT[:3], 6, 6, 6, 6],
    ],
    "identical rows": [[*PROMPT, 2, 4, 6]] * 3,
    "a row that begins another": [PROMPT, [*PROMPT, 1], [*PROMPT, 1, 2, 3]],
    "branches of one token": [[5, n] for n in range(6)],
    "nothing in common": [[n, 3, 9, 1] for n in range(4)],
}


@pytest.mark.parametrize("kind", SEQUENCES)
@pytest.mark.parametrize("name", MODELS)
def test_trees_equal_rows_alone_in_float64(way, name, kind):
    model = create(MODELS[name])
    assert check_prefix_sharing(model).allowed
    assert_rows_alone_agree(model, build_rows(SEQUENCES[kind]))


TOKENS = st.integers(1, 3)
SOME_ROWS = st.lists(st.lists(TOKENS, min_size=2, max_size=9), min_size=1, max_size=7)


@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(rows=SOME_ROWS, max_tokens=st.integers(4, 60))
def test_random_trees_in_any_micro_batches(way, rows, max_tokens):
    train_rows = build_rows(rows)
    if not any(any(row.loss_mask) for row in train_rows):
        return
    assert_rows_alone_agree(create(create_llama), train_rows, max_tokens)


def test_states_at_several_temperatures_and_values(way):
    """Rows with one state and different temperatures have different distributions."""
    sequences = SEQUENCES["identical rows"] + SEQUENCES["samples of a prompt"]
    model, head = create(create_llama), ValueHead(SIZES["hidden_size"])
    with torch.no_grad():
        head.head.weight.normal_(generator=torch.Generator().manual_seed(0))
    assert_rows_alone_agree(
        model, build_rows(sequences, temperatures=(1.0, 0.5, 2.0)), value_head=head
    )


def test_contexts_of_an_episode_in_one_row(way):
    """Turn by turn in one row (`context_starts`), each turn repeating the conversation."""
    rows = []
    for sample in range(2):
        contexts = build_turns([*PROMPT, 50 + sample], 3)
        prompt, completion = contexts[0][:7], contexts[0][7:]
        mask, starts = [True] * len(completion), []
        for context in contexts[1:]:
            starts.append(len(completion))
            completion = [*completion, *context]
            mask += [False] * (len(context) - 3) + [True] * 3
        rows.append(TrainRow(prompt, completion, mask, context_starts=starts))
    assert_rows_alone_agree(create(create_llama), rows)


def test_checkpointing_without_dropout_shares_prefixes():
    """Layers that checkpoint stay in training mode while dropout is off; their adapters draw no masks."""
    torch.manual_seed(0)
    model = add_adapter(create_checkpointed_llama(), LoraSettings(rank=4, dropout=0.5)).train()
    assert not check_prefix_sharing(model).allowed
    (batch,) = build_batches(build_rows(SEQUENCES["turns"]), 1000, 0, shares_prefixes=True)
    with use_training_mode(model, dropout=False):
        assert unwrap_model(model).base_model.layers[0].training
        assert check_prefix_sharing(model).allowed
        assert compute_prefix_states(unwrap_model(model), batch).is_shared


def test_other_families_compute_every_row(way):
    model = create(lambda: MistralForCausalLM(MistralConfig(**SIZES)))
    assert "not of a known family" in check_prefix_sharing(model).reason
    assert_rows_alone_agree(model, build_rows(SEQUENCES["turns"]))


def test_a_row_without_a_completion_changes_nothing():
    """An empty completion: the row has no loss token, and its states belong to the others."""
    model = create(create_llama)
    rows = build_rows(SEQUENCES["samples of a prompt"])
    expected = compute_ours(model, rows)[1]
    gradients = collect_gradients(model)
    model.zero_grad()
    assert compute_ours(model, [*rows, TrainRow(PROMPT, [], [])])[1] == pytest.approx(expected)
    for name, gradient in collect_gradients(model).items():
        torch.testing.assert_close(gradient, gradients[name], rtol=1e-4, atol=1e-5)


def count_head_rows(model, batch, monkeypatch):
    """Return the number of states that the output head reads."""
    from rl_core.models import logprobs

    counts, original = [], logprobs.compute_selected_logprobs

    def record(hidden_NH, *arguments, **options):
        counts.append(len(hidden_NH))
        return original(hidden_NH, *arguments, **options)

    monkeypatch.setattr(logprobs, "compute_selected_logprobs", record)
    compute_token_outputs(model, batch)
    return counts[0]


def test_the_head_reads_each_state_once(monkeypatch):
    rows = [TrainRow(PROMPT, [2, 4, last], [True] * 3) for last in (6, 7, 7)]
    (batch,) = build_batches(rows, 1000, 0, shares_prefixes=True)
    assert count_head_rows(create(create_llama), batch, monkeypatch) == 3 < batch.num_loss_tokens


def test_scores_and_values_of_shared_rows(way):
    """A critic and a reward model read the states of trees as well."""
    sequences = SEQUENCES["branches"]
    (batch,) = build_batches(
        [TrainRow(ids[:1], ids[1:], [True] * (len(ids) - 1)) for ids in sequences], 1000, 0
    )
    critic = SeparateCritic(create(create_llama))
    with torch.no_grad():
        critic.head.head.weight.normal_(generator=torch.Generator().manual_seed(0))
    values_BS, after_B = critic(batch)
    double = copy.deepcopy(critic).double()
    for b, row in enumerate(batch.rows):
        ids = torch.tensor([sequences[row]])
        states_SH = double.trunk(input_ids=ids, use_cache=False).last_hidden_state[0]
        expected_S = double.head(states_SH)
        length = ids.shape[1]
        torch.testing.assert_close(
            values_BS[b, 1:length].double(), expected_S[:-1], rtol=1e-4, atol=1e-4
        )
        torch.testing.assert_close(after_B[b].double(), expected_S[-1], rtol=1e-4, atol=1e-4)
    scorer = create(create_llama)
    scorer.add_module("score", nn.Linear(64, 1, bias=False))
    lengths_B = batch.attention_mask_BS.sum(1)
    scores_B = compute_sequence_scores(scorer, batch.input_ids_BS, lengths_B)
    alone_B = [
        compute_sequence_scores(scorer, ids_S[None, :length], length[None])
        for ids_S, length in zip(batch.input_ids_BS, lengths_B, strict=True)
    ]
    torch.testing.assert_close(scores_B, torch.cat(alone_B), rtol=1e-4, atol=1e-4)


def test_passes_are_deterministic(way):
    results = []
    for _ in range(2):
        model = create(create_llama)
        outputs, loss = compute_ours(model, build_rows(SEQUENCES["turns of several samples"]), 40)
        results.append((loss, {key: float(values[0]) for key, values in outputs.items()}))
        results[-1] += tuple(parameter.grad for parameter in model.parameters())
    assert results[0][:2] == results[1][:2]
    assert all(torch.equal(*pair) for pair in zip(results[0][2:], results[1][2:], strict=True))


@pytest.mark.parametrize("max_tokens", [25, 10_000])
def test_a_trainer_plans_its_steps_by_trees(max_tokens):
    """Turns of two conversations: the step's loss and gradient norm are those of single rows, in fewer tokens."""
    sequences = build_turns([1, *PROMPT], 3) + build_turns([2, *PROMPT], 3)
    data = [(ids, [False] * (len(ids) - 3) + [True] * 3) for ids in sequences]
    norms, tokens = [], []
    for shares in (False, True):
        model = create(create_llama).eval()
        options = {"batch_size": 6, "learning_rate": 1e-3}
        options["micro_batch_tokens"] = max_tokens if shares else 1
        trainer = SFTTrainer(model, 0, data, [], SFTSettings(**options), 0)
        seen = []
        model.model.layers[0].mlp.up_proj.register_forward_pre_hook(
            lambda module, inputs, seen=seen: (
                seen.append(len(inputs[0])) if inputs[0].ndim == 2 else None  # a trial
            )
        )
        metrics = trainer.step()
        norms.append((metrics["train/loss"], metrics["train/grad_norm"]))
        tokens.append(seen)
    assert norms[1] == pytest.approx(norms[0], rel=1e-4)
    assert sum(tokens[0]) == sum(map(len, sequences)) == 2 * (10 + 15 + 20)
    assert tokens[1] == ([40] if max_tokens > 25 else [20, 20])
