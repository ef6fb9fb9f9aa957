"""Prompts into slots: the numbers of transformers' own pass, whatever is read beside them, and nothing twice."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers.scripted_sequences import VOCAB, ScriptedSequence, make_model

from rl_core.capabilities import Decision, decoding
from rl_core.cpu import fused_decode
from rl_core.environments.step_pool import ReplacementContext
from rl_core.inference import continuous_batching
from rl_core.inference.continuous_batching import ContinuousBatcher, SlotPrompts
from rl_core.inference.decoder import Decoder
from rl_core.inference.serving_requests import AnswerSequence, ServedRequest
from rl_core.settings import SamplingSettings

LENGTHS = (2, 3, 8, 17, 34, 41, 8)
PROMPTS = [
    np.random.default_rng(n).integers(1, VOCAB, length).tolist() for n, length in enumerate(LENGTHS)
]
SLOTS, CONTEXT = 10, 48


def compiled(model):
    """The decoder with compiled code."""
    if fused_decode.load_decode_kernels() is None:
        pytest.skip("needs a C compiler")
    decoder = Decoder(model)
    decoder.reserve_cache(SLOTS, CONTEXT)
    assert decoder.can_append_tokens
    return decoder


def kernels(model, monkeypatch):
    """The decoder without compiled code."""
    monkeypatch.setattr(
        decoding,
        "check_packed_weights",
        lambda model: Decision("packed weights", False, "as on a GPU"),
    )
    decoder = Decoder(model)
    decoder.reserve_cache(SLOTS, CONTEXT)
    assert not decoder.can_append_tokens
    return decoder


def prompts_of(decoder):
    return SlotPrompts(decoder, np.zeros(SLOTS, dtype=np.int64), CONTEXT, 0, "")


def counted(decoder, monkeypatch, name="take_in"):
    """Tokens of each pass of a decoder from now on."""
    whole, passes = getattr(decoder, name), []
    monkeypatch.setattr(
        decoder, name, lambda ids, *more: passes.append(ids.numel()) or whole(ids, *more)
    )
    return passes


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("is_compiled", [True, False])
def test_keys_and_values_are_those_of_transformers(family, is_compiled, monkeypatch):
    model = (
        make_model(family, head_dim=16) if family != "qwen2" else make_model(family, hidden_size=64)
    )
    decoder = compiled(model) if is_compiled else kernels(model, monkeypatch)
    slots = [3, 0, 5, 1, 6, 2, 4, 7]
    counts = prompts_of(decoder).read_prompts(slots, [*PROMPTS, [5]], 33)
    assert counts == [
        1,
        2,
        7,
        16,
        33,
        33,
        7,
        0,
    ]  # without the last token, of the longest one a part
    for slot, prompt, count in zip(slots, PROMPTS, counts, strict=False):
        with torch.no_grad():
            cache = model(torch.tensor([prompt[:count]]), use_cache=True).past_key_values
        found = decoder.copy_slot_prefix(slot, count)
        for number, layer in enumerate(cache.layers):
            torch.testing.assert_close(found[number, 0], layer.keys, atol=1e-5, rtol=1e-4)
            torch.testing.assert_close(found[number, 1], layer.values, atol=1e-5, rtol=1e-4)
    assert not decoder.copy_slot_prefix(7, CONTEXT).any()


def test_a_prompts_numbers_do_not_depend_on_those_read_with_it(monkeypatch):
    """To the last bit: alone, in one pass, in passes of a few tokens, on two threads."""
    decoder = compiled(make_model("llama", head_dim=16))

    def bits(*, together=True, rows=512, threads=1):
        monkeypatch.setattr(continuous_batching, "_PASS_TOKENS", rows)
        before, prompts = torch.get_num_threads(), prompts_of(decoder)
        torch.set_num_threads(threads)
        try:
            if together:
                prompts.read_prompts(range(len(PROMPTS)), PROMPTS, 100)
            else:
                for slot, prompt in enumerate(PROMPTS):
                    prompts.read_prompts([slot], [prompt], 100)
        finally:
            torch.set_num_threads(before)
        found = [
            decoder.copy_slot_prefix(slot, len(prompt) - 1) for slot, prompt in enumerate(PROMPTS)
        ]
        prompts.read_prompts(
            range(len(PROMPTS)), [prompt[::-1] for prompt in PROMPTS], 100
        )  # so that nothing stays
        return torch.cat([part.flatten() for part in found])

    alone = bits(together=False)
    for other in (bits(), bits(rows=20), bits(rows=50, threads=2)):
        assert torch.equal(other, alone)


@pytest.mark.parametrize("is_compiled", [True, False])
def test_equal_prompts_are_read_once(is_compiled, monkeypatch):
    model = make_model("llama", head_dim=16)
    decoder = compiled(model) if is_compiled else kernels(model, monkeypatch)
    passes = counted(decoder, monkeypatch, "take_in" if is_compiled else "prefill")
    same, other = PROMPTS[4], PROMPTS[3]
    prompts_of(decoder).read_prompts([4, 1, 0, 2], [same, other, same, same], 100)
    assert sum(passes) == (
        33 + 16 if is_compiled else 48 + 32
    )  # padded: to all of a slot, and to 32
    for slot in (0, 2):
        assert torch.equal(decoder.copy_slot_prefix(slot, 33), decoder.copy_slot_prefix(4, 33))
    assert not torch.equal(decoder.copy_slot_prefix(1, 16), decoder.copy_slot_prefix(4, 16))


def test_a_common_beginning_is_copied(monkeypatch):
    """From a prompt of the same pass, from a slot, from one that is written over, and from the slot itself."""
    decoder = compiled(make_model("llama", head_dim=16))
    passes, prompts, long = counted(decoder, monkeypatch), prompts_of(decoder), PROMPTS[5]
    first = [*long[:30], 5, 9]
    assert prompts.read_prompts([0, 1], [long, first], 100) == [40, 31]
    assert passes == [40, 1]
    second, third = [*first[:31], 7, 8, 2], [*long[:20], 3, 4, 6]
    prompts.read_prompts([1, 0], [third, second], 100)  # each begins as the other's slot did
    assert passes == [40, 1, (33 - 31) + (22 - 20)]
    prompts.read_prompts([0], [[*second[:33], 11, 12]], 100)
    assert passes[3:] == [1]
    prompts.invalidate_slot(0)
    prompts.read_prompts([4], [second], 100)
    assert passes[4:] == [33 - 20]
    for slot, prompt, copied in ((5, second, 4), (6, third, 1), (7, [*second[:33], 11, 12], 0)):
        prompts_of(decoder).read_prompts([slot], [prompt], 100)  # which knows of no slot
        count = len(prompt) - 1
        assert torch.equal(
            decoder.copy_slot_prefix(slot, count), decoder.copy_slot_prefix(copied, count)
        )


def test_no_more_is_copied_than_a_prompt_has_in_common(monkeypatch):
    """Short prompts beside a long one, which all begin alike: as many tokens as each has from another slot."""
    decoder = compiled(make_model("llama", head_dim=16))
    prompts, long, copied, move, fill = (
        prompts_of(decoder),
        PROMPTS[5],
        [],
        decoder.move_slots,
        decoder.fill_slots,
    )
    prompts.read_prompts([0], [long], 100)
    monkeypatch.setattr(decoder, "move", lambda *a: copied.append(len(a[1]) * a[2]) or move(*a))
    monkeypatch.setattr(
        decoder, "fill_slots", lambda *a: copied.append(len(a[0]) * a[1].shape[4]) or fill(*a)
    )
    short = [[*long[:2], 60 - n, 7, 8] for n in range(5)]
    prompts.read_prompts(range(1, 8), [*short, [*long, 9, 9], [*long, 3]], 100)
    assert sum(copied) == 5 * 2 + 2 * 40
    for slot, prompt in enumerate([*short, [*long, 9, 9], [*long, 3]], 1):
        prompts_of(decoder).read_prompts([9], [prompt], 100)
        assert torch.equal(
            decoder.copy_slot_prefix(slot, len(prompt) - 1),
            decoder.copy_slot_prefix(9, len(prompt) - 1),
        )


def answered(slots, requests):
    """Tokens and bits of log-probabilities of requests, one admitted after each step."""
    waiting = list(requests)
    while waiting or not slots.is_empty:
        if waiting and slots.free:
            slots.start_requests([waiting.pop(0)])
        slots.step()
    return [
        (one.sequence.tokens, [value.hex() for value in one.sequence.logprobs]) for one in requests
    ]


def test_answers_with_copied_beginnings_are_those_of_a_fresh_cache(monkeypatch):
    """To the last bit: a shared beginning, prompts read in pieces, conversations that go on."""
    monkeypatch.setattr(continuous_batching, "PROMPT_PIECE_TOKENS", 11)
    model = make_model("llama", head_dim=16)
    compiled(model)

    def opened():
        return ContinuousBatcher(model, slots=4, context=96, eos_ids=range(1, VOCAB, 17), pad_id=0)

    def asked(prompts):
        sampling = SamplingSettings(max_completion_tokens=12)
        return [
            ServedRequest(AnswerSequence(prompt, n), sampling) for n, prompt in enumerate(prompts)
        ]

    shared = PROMPTS[5][:25]
    prompts = [[*shared, *PROMPTS[n % 7][: 3 + 5 * (n % 4)]] for n in range(12)]
    slots = opened()
    passes = counted(slots._decoder, monkeypatch)
    found = answered(slots, asked(prompts))
    goes_on = [
        [*prompt, *tokens, 9, 33] for prompt, (tokens, _) in zip(prompts, found, strict=True)
    ]
    before = sum(passes)
    found += answered(
        slots, asked(goes_on[-1:])
    )  # the newest one is in the cache still, its answer as well
    assert sum(passes) - before == 2 and before < sum(map(len, prompts)) / 2
    found += answered(slots, asked(goes_on[:-1]))
    alone = [
        answered(opened(), [one])[0]
        for one in (*asked(prompts), *asked(goes_on[-1:]), *asked(goes_on[:-1]))
    ]
    assert found == alone


def test_a_pass_that_failed_leaves_nothing_to_copy(monkeypatch):
    decoder = compiled(make_model("llama", head_dim=16))
    prompts, long, whole = prompts_of(decoder), PROMPTS[5], decoder.append_tokens
    prompts.read_prompts([0], [long], 100)

    def fails(*tokens):
        whole(*tokens)
        raise ValueError("after it was written")

    monkeypatch.setattr(decoder, "append_tokens", fails)
    with pytest.raises(ValueError, match="written"):
        prompts.read_prompts([0], [[*long[:30], 5, 9]], 100)
    monkeypatch.setattr(decoder, "append_tokens", whole)
    prompts.read_prompts([1], [long], 100)
    prompts_of(decoder).read_prompts([2], [long], 100)
    assert torch.equal(decoder.copy_slot_prefix(1, 40), decoder.copy_slot_prefix(2, 40))


class Turning(ScriptedSequence):
    """A sequence whose first turn is followed by these tokens, or by them as a new context."""

    def __init__(self, prompt, seed, tokens, is_new):
        super().__init__(prompt, seed)
        self.answer = ReplacementContext(tokens, 30) if is_new else tokens

    def take_action(self, action_ids, logprobs, hit_limit):
        super().take_action(action_ids, logprobs, hit_limit)
        return self.answer if len(self.turns) == 1 and not hit_limit else None


@pytest.mark.parametrize("is_new", [True, False])
def test_what_an_environment_appends_is_not_taken_for_the_prompt(is_new):
    """Other tokens stand in the slot than those of the prompt and the turns."""
    model = make_model("llama", head_dim=16)
    compiled(model)

    def opened():
        return ContinuousBatcher(model, slots=1, context=96, eos_ids=range(1, VOCAB, 3), pad_id=0)

    slots, prompt = opened(), PROMPTS[5][:20]
    turning = Turning(prompt, 3, [7, 8, 9, 10], is_new)
    slots.start_requests([ServedRequest(turning, SamplingSettings(max_completion_tokens=40))])
    while not slots.is_empty:
        slots.step()
    (one, _), (other, _) = turning.turns
    for again in ([*prompt, *one, *other, 5], prompt):
        sampling = SamplingSettings(max_completion_tokens=20)
        found = [
            answered(some, [ServedRequest(AnswerSequence(again, 5), sampling)])
            for some in (slots, opened())
        ]
        assert found[0] == found[1]
