"""Prompts into slots: the numbers of transformers' own pass, whatever is read beside them, and each prompt once."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers.scripted_sequences import VOCAB, make_model

from rl_core.capabilities import Decision, decoding
from rl_core.cpu import fused_decode
from rl_core.inference import slot_prompts
from rl_core.inference.decoder import Decoder
from rl_core.inference.slot_prompts import SlotPrompts

LENGTHS = (1, 2, 7, 16, 33, 40, 7)
PROMPTS = [
    tuple(np.random.default_rng(place).integers(1, VOCAB, length).tolist()) for place, length in enumerate(LENGTHS)
]


def compiled(model):
    """The decoder with compiled code."""
    if fused_decode.load() is None:
        pytest.skip("needs a C compiler")
    decoder = Decoder(model)
    decoder.reserve(len(PROMPTS) + 3, 48)
    assert decoder.can_take_in
    return decoder


def kernels(model, monkeypatch):
    """The decoder without compiled code."""
    monkeypatch.setattr(decoding, "packed_weights", lambda model: Decision("packed weights", False, "as on a GPU"))
    decoder = Decoder(model)
    decoder.reserve(len(PROMPTS) + 3, 48)
    assert not decoder.can_take_in
    return decoder


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("is_compiled", [True, False])
def test_keys_and_values_are_those_of_transformers(family, is_compiled, monkeypatch):
    model = make_model(family, head_dim=16) if family != "qwen2" else make_model(family, hidden_size=64)
    decoder = compiled(model) if is_compiled else kernels(model, monkeypatch)
    slots = [3, 0, 5, 1, 6, 2, 4]
    SlotPrompts(decoder, 0, "").read([*slots, 7], [*PROMPTS, ()])
    for slot, prompt in zip(slots, PROMPTS, strict=True):
        with torch.no_grad():
            cache = model(torch.tensor([prompt]), use_cache=True).past_key_values
        found = decoder.taken(slot, len(prompt))
        for number, layer in enumerate(cache.layers):
            torch.testing.assert_close(found[number, 0], layer.keys, atol=1e-5, rtol=1e-4)
            torch.testing.assert_close(found[number, 1], layer.values, atol=1e-5, rtol=1e-4)
    assert not decoder.taken(7, 48).any()


def test_a_prompts_numbers_do_not_depend_on_those_read_with_it(monkeypatch):
    """To the last bit: alone, in one pass, in passes of a few tokens, on two threads."""
    decoder = compiled(make_model("llama", head_dim=16))
    prompts = SlotPrompts(decoder, 0, "")

    def bits(*, together=True, rows=512, threads=1):
        monkeypatch.setattr(slot_prompts, "_ROWS", rows)
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            for slot, prompt in enumerate(PROMPTS) if not together else ():
                prompts.read([slot], [prompt])
            if together:
                prompts.read(range(len(PROMPTS)), PROMPTS)
        finally:
            torch.set_num_threads(before)
        found = [decoder.taken(slot, len(prompt)) for slot, prompt in enumerate(PROMPTS)]
        prompts.read(range(len(PROMPTS)), [tuple(reversed(prompt)) for prompt in PROMPTS])  # so that nothing stays
        return torch.cat([part.flatten() for part in found])

    alone = bits(together=False)
    for other in (bits(), bits(rows=20), bits(rows=50, threads=2)):
        assert torch.equal(other, alone)


@pytest.mark.parametrize("is_compiled", [True, False])
def test_equal_prompts_are_read_once(is_compiled, monkeypatch):
    model = make_model("llama", head_dim=16)
    decoder = compiled(model) if is_compiled else kernels(model, monkeypatch)
    name = "take_in" if is_compiled else "prefill"
    whole, read = getattr(decoder, name), []
    monkeypatch.setattr(decoder, name, lambda ids, *more: read.append(ids.numel()) or whole(ids, *more))
    same, other = PROMPTS[4], PROMPTS[3]
    SlotPrompts(decoder, 0, "").read([4, 1, 0, 2], [same, other, same, same])
    assert sum(read) == (len(same) + len(other) if is_compiled else 48 + 32)  # padded: to all of a slot, and to 32
    for slot in (0, 2):
        assert torch.equal(decoder.taken(slot, len(same)), decoder.taken(4, len(same)))
    assert not torch.equal(decoder.taken(1, 16), decoder.taken(4, 16))
