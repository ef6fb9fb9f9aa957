"""Reading prompts into slots: the numbers of transformers' forward pass, independent of the batch, nothing computed
twice.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers.scripted_sequences import VOCAB, ScriptedSequence, make_model

from rl_core.capabilities import Decision, decoding
from rl_core.cpu import fused_decode
from rl_core.environments.step_pool import ReplacementContext
from rl_core.inference import continuous_batching, slot_prompts
from rl_core.inference.continuous_batching import ContinuousBatcher
from rl_core.inference.decoder import Decoder
from rl_core.inference.serving_requests import AnswerSequence, ServedRequest
from rl_core.inference.slot_prompts import SlotPrompts
from rl_core.settings import SamplingSettings

LENGTHS = (2, 3, 8, 17, 34, 41, 8)
PROMPTS = [
    np.random.default_rng(n).integers(1, VOCAB, length).tolist() for n, length in enumerate(LENGTHS)
]
SLOTS, CONTEXT = 10, 48


def create_compiled_decoder(model):
    """Create a decoder with compiled code."""
    if fused_decode.load_decode_kernels() is None:
        pytest.skip("needs a C compiler")
    decoder = Decoder(model)
    decoder.reserve_cache(SLOTS, CONTEXT)
    assert decoder.can_append_tokens
    return decoder


def create_torch_decoder(model, monkeypatch):
    """Create a decoder without compiled code."""
    monkeypatch.setattr(
        decoding,
        "check_packed_weights",
        lambda *_, **__: Decision("packed weights", False, "as on a GPU"),
    )
    decoder = Decoder(model)
    decoder.reserve_cache(SLOTS, CONTEXT)
    assert not decoder.can_append_tokens
    return decoder


def create_prompts(decoder):
    return SlotPrompts(decoder, np.zeros(SLOTS, dtype=np.int64), CONTEXT, 0, "")


def count_pass_tokens(decoder, monkeypatch, name="append_tokens"):
    """Record the number of tokens of each later pass of a decoder."""
    original, passes = getattr(decoder, name), []
    monkeypatch.setattr(
        decoder, name, lambda ids, *rest: passes.append(ids.numel()) or original(ids, *rest)
    )
    return passes


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("is_compiled", [True, False])
def test_keys_and_values_are_those_of_transformers(family, is_compiled, monkeypatch):
    model = (
        make_model(family, head_dim=16) if family != "qwen2" else make_model(family, hidden_size=64)
    )
    decoder = (
        create_compiled_decoder(model) if is_compiled else create_torch_decoder(model, monkeypatch)
    )
    slots = [3, 0, 5, 1, 6, 2, 4, 7]
    counts = create_prompts(decoder).read_prompts(slots, [*PROMPTS, [5]], 33)
    # without the last token, and only part of the longest prompt
    assert counts == [1, 2, 7, 16, 33, 33, 7, 0]
    for slot, prompt, count in zip(slots, PROMPTS, counts, strict=False):
        with torch.no_grad():
            cache = model(torch.tensor([prompt[:count]]), use_cache=True).past_key_values
        kv = decoder.copy_slot_prefix(slot, count)
        for number, layer in enumerate(cache.layers):
            torch.testing.assert_close(kv[number, 0], layer.keys, atol=1e-5, rtol=1e-4)
            torch.testing.assert_close(kv[number, 1], layer.values, atol=1e-5, rtol=1e-4)
    assert not decoder.copy_slot_prefix(7, CONTEXT).any()


def test_a_prompts_numbers_do_not_depend_on_those_read_with_it(monkeypatch):
    """Bit for bit: alone, in one pass, in passes of a few tokens, on two threads."""
    decoder = create_compiled_decoder(make_model("llama", head_dim=16))

    def read_bits(*, together=True, rows=512, threads=1):
        monkeypatch.setattr(slot_prompts, "_PASS_TOKENS", rows)
        num_threads, prompts = torch.get_num_threads(), create_prompts(decoder)
        torch.set_num_threads(threads)
        try:
            if together:
                prompts.read_prompts(range(len(PROMPTS)), PROMPTS, 100)
            else:
                for slot, prompt in enumerate(PROMPTS):
                    prompts.read_prompts([slot], [prompt], 100)
        finally:
            torch.set_num_threads(num_threads)
        prefixes = [
            decoder.copy_slot_prefix(slot, len(prompt) - 1) for slot, prompt in enumerate(PROMPTS)
        ]
        # overwrite the cache
        prompts.read_prompts(range(len(PROMPTS)), [prompt[::-1] for prompt in PROMPTS], 100)
        return torch.cat([part.flatten() for part in prefixes])

    alone = read_bits(together=False)
    for other in (read_bits(), read_bits(rows=20), read_bits(rows=50, threads=2)):
        assert torch.equal(other, alone)


@pytest.mark.parametrize("is_compiled", [True, False])
def test_equal_prompts_are_read_once(is_compiled, monkeypatch):
    model = make_model("llama", head_dim=16)
    decoder = (
        create_compiled_decoder(model) if is_compiled else create_torch_decoder(model, monkeypatch)
    )
    passes = count_pass_tokens(
        decoder, monkeypatch, "append_tokens" if is_compiled else "prefill_prompts"
    )
    same, other = PROMPTS[4], PROMPTS[3]
    create_prompts(decoder).read_prompts([4, 1, 0, 2], [same, other, same, same], 100)
    # padded: to the length of a slot, and to 32
    assert sum(passes) == (33 + 16 if is_compiled else 48 + 32)
    for slot in (0, 2):
        assert torch.equal(decoder.copy_slot_prefix(slot, 33), decoder.copy_slot_prefix(4, 33))
    assert not torch.equal(decoder.copy_slot_prefix(1, 16), decoder.copy_slot_prefix(4, 16))


def test_a_common_beginning_is_copied(monkeypatch):
    """From a prompt of the same pass, another slot, a slot that is overwritten, and the slot itself."""
    decoder = create_compiled_decoder(make_model("llama", head_dim=16))
    passes, prompts, long = (
        count_pass_tokens(decoder, monkeypatch),
        create_prompts(decoder),
        PROMPTS[5],
    )
    first = [*long[:30], 5, 9]
    assert prompts.read_prompts([0, 1], [long, first], 100) == [40, 31]
    assert passes == [40, 1]
    second, third = [*first[:31], 7, 8, 2], [*long[:20], 3, 4, 6]
    prompts.read_prompts(
        [1, 0], [third, second], 100
    )  # each begins like the previous prompt of the other's slot
    assert passes == [40, 1, (33 - 31) + (22 - 20)]
    prompts.read_prompts([0], [[*second[:33], 11, 12]], 100)
    assert passes[3:] == [1]
    prompts.invalidate_slot(0)
    prompts.read_prompts([4], [second], 100)
    assert passes[4:] == [33 - 20]
    for slot, prompt, copied in ((5, second, 4), (6, third, 1), (7, [*second[:33], 11, 12], 0)):
        create_prompts(decoder).read_prompts([slot], [prompt], 100)  # without any cached prompt
        count = len(prompt) - 1
        assert torch.equal(
            decoder.copy_slot_prefix(slot, count), decoder.copy_slot_prefix(copied, count)
        )


def test_only_common_tokens_are_copied(monkeypatch):
    """Short prompts next to a long one with a common beginning: each copies its common tokens from another slot."""
    decoder = create_compiled_decoder(make_model("llama", head_dim=16))
    prompts, long, copied, move, fill = (
        create_prompts(decoder),
        PROMPTS[5],
        [],
        decoder.move_slots,
        decoder.fill_slots,
    )
    prompts.read_prompts([0], [long], 100)
    monkeypatch.setattr(
        decoder, "move_slots", lambda *a: copied.append(len(a[1]) * a[2]) or move(*a)
    )
    monkeypatch.setattr(
        decoder, "fill_slots", lambda *a: copied.append(len(a[0]) * a[1].shape[4]) or fill(*a)
    )
    short = [[*long[:2], 60 - n, 7, 8] for n in range(5)]
    prompts.read_prompts(range(1, 8), [*short, [*long, 9, 9], [*long, 3]], 100)
    assert sum(copied) == 5 * 2 + 2 * 40
    for slot, prompt in enumerate([*short, [*long, 9, 9], [*long, 3]], 1):
        create_prompts(decoder).read_prompts([9], [prompt], 100)
        assert torch.equal(
            decoder.copy_slot_prefix(slot, len(prompt) - 1),
            decoder.copy_slot_prefix(9, len(prompt) - 1),
        )


def answer_requests(slots, requests):
    """Answer requests, starting one per step; return tokens and bits of log-probabilities."""
    remaining = list(requests)
    while remaining or not slots.is_empty:
        if remaining and slots.free:
            slots.start_requests([remaining.pop(0)])
        slots.step()
    return [
        (request.sequence.tokens, [value.hex() for value in request.sequence.logprobs])
        for request in requests
    ]


def test_answers_with_copied_beginnings_are_those_of_a_fresh_cache(monkeypatch):
    """Bit for bit: a shared beginning, prompts read in pieces, continued conversations."""
    monkeypatch.setattr(continuous_batching, "PROMPT_PIECE_TOKENS", 11)
    model = make_model("llama", head_dim=16)
    create_compiled_decoder(model)

    def open_slots():
        return ContinuousBatcher(model, slots=4, context=96, eos_ids=range(1, VOCAB, 17), pad_id=0)

    def build_requests(prompts):
        sampling = SamplingSettings(max_completion_tokens=12)
        return [
            ServedRequest(AnswerSequence(prompt, n), sampling) for n, prompt in enumerate(prompts)
        ]

    shared = PROMPTS[5][:25]
    prompts = [[*shared, *PROMPTS[n % 7][: 3 + 5 * (n % 4)]] for n in range(12)]
    slots = open_slots()
    passes = count_pass_tokens(slots._decoder, monkeypatch)
    answers = answer_requests(slots, build_requests(prompts))
    continued = [
        [*prompt, *tokens, 9, 33] for prompt, (tokens, _) in zip(prompts, answers, strict=True)
    ]
    num_computed = sum(passes)
    # the newest prompt and its answer are still in the cache
    answers += answer_requests(slots, build_requests(continued[-1:]))
    assert sum(passes) - num_computed == 2 and num_computed < sum(map(len, prompts)) / 2
    answers += answer_requests(slots, build_requests(continued[:-1]))
    expected = [
        answer_requests(open_slots(), [request])[0]
        for request in (
            *build_requests(prompts),
            *build_requests(continued[-1:]),
            *build_requests(continued[:-1]),
        )
    ]
    assert answers == expected


def test_a_failed_pass_leaves_no_cached_prompt(monkeypatch):
    decoder = create_compiled_decoder(make_model("llama", head_dim=16))
    prompts, long, append_tokens = create_prompts(decoder), PROMPTS[5], decoder.append_tokens
    prompts.read_prompts([0], [long], 100)

    def fail_after_append(*tokens):
        append_tokens(*tokens)
        raise ValueError("after it was written")

    monkeypatch.setattr(decoder, "append_tokens", fail_after_append)
    with pytest.raises(ValueError, match="written"):
        prompts.read_prompts([0], [[*long[:30], 5, 9]], 100)
    monkeypatch.setattr(decoder, "append_tokens", append_tokens)
    prompts.read_prompts([1], [long], 100)
    create_prompts(decoder).read_prompts([2], [long], 100)
    assert torch.equal(decoder.copy_slot_prefix(1, 40), decoder.copy_slot_prefix(2, 40))


class TurningSequence(ScriptedSequence):
    """A sequence whose first turn is followed by these tokens, appended or as a new context."""

    def __init__(self, prompt, seed, tokens, is_new):
        super().__init__(prompt, seed)
        self.answer = ReplacementContext(tokens, 30) if is_new else tokens

    def take_action(self, action_ids, logprobs, hit_limit):
        super().take_action(action_ids, logprobs, hit_limit)
        return self.answer if len(self.turns) == 1 and not hit_limit else None


@pytest.mark.parametrize("is_new", [True, False])
def test_what_an_environment_appends_is_not_taken_for_the_prompt(is_new):
    """The slot holds other tokens than those of the prompt and the turns."""
    model = make_model("llama", head_dim=16)
    create_compiled_decoder(model)

    def open_slots():
        return ContinuousBatcher(model, slots=1, context=96, eos_ids=range(1, VOCAB, 3), pad_id=0)

    slots, prompt = open_slots(), PROMPTS[5][:20]
    turning = TurningSequence(prompt, 3, [7, 8, 9, 10], is_new)
    slots.start_requests([ServedRequest(turning, SamplingSettings(max_completion_tokens=40))])
    while not slots.is_empty:
        slots.step()
    (first, _), (second, _) = turning.turns
    for next_prompt in ([*prompt, *first, *second, 5], prompt):
        sampling = SamplingSettings(max_completion_tokens=20)
        answers = [
            answer_requests(batcher, [ServedRequest(AnswerSequence(next_prompt, 5), sampling)])
            for batcher in (slots, open_slots())
        ]
        assert answers[0] == answers[1]
