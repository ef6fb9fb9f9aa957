"""Reference log-probabilities on disk: computed once, read back bit for bit, not read if damaged or of other inputs."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rl_core.data.pairs import PairSide, PreferencePair
from rl_core.trainers.preference import compute_reference_logprobs
from tasks.stages import preference_pairs
from tasks.stages.preference_pairs import REFERENCES_FILE, load_or_compute_references


def nano(seed=0):
    config = LlamaConfig(
        vocab_size=11,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        intermediate_size=8,
        pad_token_id=0,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)


def pair(last):
    return PreferencePair(PairSide([1, 2], [3, last], [True, True]), PairSide([1, 2], [4], [True]))


PARTS = ([pair(5), pair(6), pair(7)], [pair(8)])


@pytest.fixture
def calls(monkeypatch):
    """Count scored parts in a list."""
    batches = []

    def counted(model, pairs, **named):
        batches.append(len(pairs))
        return compute_reference_logprobs(model, pairs, **named)

    monkeypatch.setattr(preference_pairs, "compute_reference_logprobs", counted)
    return batches


def get(folder, model=None, parts=PARTS, max_tokens=64, code=""):
    return load_or_compute_references(
        folder, model or nano(), parts, pad_id=0, max_tokens=max_tokens, code=code
    )


def test_the_second_time_nothing_is_scored_and_every_bit_is_the_same(tmp_path, calls):
    first = get(tmp_path / "r")
    assert calls == [3, 1]
    assert first == tuple(
        compute_reference_logprobs(nano(), part, pad_id=0, max_tokens=64) for part in PARTS
    )
    assert get(tmp_path / "r") == first
    assert calls == [3, 1]


def test_other_weights_pairs_masks_batches_or_code_are_another_entry(tmp_path, calls):
    get(tmp_path)
    side = PairSide([1, 2], [3, 5], [False, True])
    masked = ([PreferencePair(side, pair(5).rejected), *PARTS[0][1:]], PARTS[1])
    changed = [
        {"model": nano(1)},
        {"parts": (PARTS[0][::-1], PARTS[1])},
        {"parts": masked},
        {"max_tokens": 8},
    ]
    for number, change in enumerate([*changed, {"code": "other"}], start=2):
        get(tmp_path, **change)
        assert len(calls) == 2 * number
    assert len(list(tmp_path.iterdir())) == 6


@pytest.mark.parametrize("damage", ["flip", "truncate", "manifest", "missing"])
def test_a_damaged_entry_is_computed_again_and_reported(tmp_path, calls, caplog, damage):
    first = get(tmp_path)
    (entry,) = tmp_path.iterdir()
    file = entry / REFERENCES_FILE
    data = bytearray(file.read_bytes())
    if damage == "flip":
        data[-1] ^= 1
        file.write_bytes(data)
    elif damage == "truncate":
        file.write_bytes(data[:-3])
    elif damage == "manifest":
        (entry / "manifest.json").write_text("{}")
    else:
        file.unlink()
    assert get(tmp_path) == first
    assert calls == [3, 1, 3, 1]
    assert "damaged and recomputed" in caplog.text
    assert get(tmp_path) == first
    assert calls == [3, 1, 3, 1]  # whole again


def test_a_folder_that_cannot_be_written_costs_nothing_but_time(tmp_path, caplog):
    (tmp_path / "r").write_text("a file where the folder should be")
    assert get(tmp_path / "r") == get(tmp_path / "other")
    assert "not cached" in caplog.text
