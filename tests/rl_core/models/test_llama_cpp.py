"""Written GGUF files read by llama.cpp: tokens, chat prompts, log-probabilities, greedy continuations.

Needs the package xllamacpp (`make llama-test`), which contains llama.cpp's server.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from helpers.gguf_models import FAMILIES, TEXTS, build_model

from rl_core.models import causal_lm
from rl_core.models.gguf_export import write_gguf_file
from rl_core.settings import ModelSettings

pytest.importorskip("gguf")
pytest.importorskip("xllamacpp", reason="xllamacpp is not installed (make llama-test)")

# Mean KL divergence per token from the model to llama.cpp's reading of the file, nats. Measured: see docs/serving.md.
BOUNDS = {"f32": 1e-6, "bf16": 1e-3, "q8_0": 1e-2}
WORDS = (
    *("The", "cat's", "12,345", "naïve\tdéjà-vu", "code:", "x[i]+=3;", "東京", "🙂", "don't"),
    *("WE'LL", "", "", "spaces\n\nlines", "007", "3.14", "<b>", "a_b", ""),
)


def list_texts(count=200):
    """List texts of words, numbers, code, other scripts, emoji, and runs of spaces and lines."""
    pairs = itertools.islice(itertools.cycle(itertools.permutations(WORDS, 5)), 0, count * 97, 97)
    return [(" " * (index % 4)).join(words) for index, words in enumerate(pairs)]


def open_model(file, vocab_size, context=128):
    from helpers.llama_cpp_reader import LlamaCppModel

    return LlamaCppModel(file, vocab_size, context)


def compare_logprobs(model, read, ids):
    """Return the mean KL divergence and the largest difference of a log-probability over all prefixes, nats.

    llama.cpp adds the probabilities of a vocabulary in float32, one after another: of 49,152 tokens the sum is off by
    2e-4. Its log-probabilities are normalised again.
    """
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0].double().log_softmax(-1)
    divergence, largest = 0.0, 0.0
    for length in range(1, len(ids) + 1):
        answer = read.compute_logprobs(ids[:length])
        assert len(answer) == expected.shape[-1]
        total = math.log(math.fsum(map(math.exp, answer.values())))
        assert abs(total) < 1e-3
        for token, logprob in answer.items():
            logprob -= total
            ours = float(expected[length - 1, token])
            divergence += math.exp(ours) * (ours - logprob) / len(ids)
            largest = max(largest, abs(ours - logprob))
    return divergence, largest


@pytest.mark.parametrize("family", FAMILIES)
def test_llama_cpp_reads_what_was_written(family, tmp_path):
    torch.manual_seed(0)
    model, tokenizer = build_model(family)
    ids = tokenizer(TEXTS[0], add_special_tokens=False)["input_ids"]
    for kind, bound in BOUNDS.items():
        write_gguf_file(model, tokenizer, tmp_path / f"{kind}.gguf", kind)
        read = open_model(tmp_path / f"{kind}.gguf", 400)
        divergence, largest = compare_logprobs(model, read, ids)
        print(f"{family} {kind}: KL {divergence:.3g}, largest difference {largest:.3g}")
        assert abs(divergence) < bound, kind
        if kind == "f32":
            assert largest < 1e-4
            generated = model.generate(torch.tensor([ids]), max_new_tokens=8, do_sample=False)
            assert read.generate_greedily(ids, 8) == generated[0, len(ids) :].tolist()


def test_tokens_and_chat_prompts_are_equal(tmp_path):
    model, tokenizer = build_model()
    write_gguf_file(model, tokenizer, tmp_path / "model.gguf", "f32")
    read = open_model(tmp_path / "model.gguf", 400)
    for text in list_texts():
        assert read.tokenize(text) == tokenizer(text, add_special_tokens=False)["input_ids"], text
    chat = [
        {"role": "user", "content": "What is 2 + 2?"},
        {"role": "assistant", "content": "4"},
        {"role": "user", "content": "Sure?"},
    ]
    prompt = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert read.render_chat(chat) == prompt
    assert read.tokenize(prompt) == tokenizer(prompt, add_special_tokens=False)["input_ids"]


@pytest.mark.slow
def test_llama_cpp_reads_the_pretrained_model(tmp_path):
    model, tokenizer = causal_lm.load_model("smollm2-135m", ModelSettings(device="cpu"))
    model.eval()
    ids = tokenizer("The capital of France is", add_special_tokens=False)["input_ids"]
    for kind, bound in BOUNDS.items():
        write_gguf_file(model, tokenizer, tmp_path / f"{kind}.gguf", kind)
        read = open_model(tmp_path / f"{kind}.gguf", len(tokenizer))
        divergence, largest = compare_logprobs(model, read, ids)
        print(f"smollm2-135m {kind}: KL {divergence:.3g}, largest difference {largest:.3g}")
        assert abs(divergence) < bound, kind
        if kind == "f32":
            for text in list_texts():
                tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
                assert read.tokenize(text) == tokens, text
            generated = model.generate(torch.tensor([ids]), max_new_tokens=16, do_sample=False)
            assert read.generate_greedily(ids, 16) == generated[0, len(ids) :].tolist()
            chat = [{"role": "user", "content": "Hi"}]
            prompt = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
            assert read.render_chat(chat) == prompt
