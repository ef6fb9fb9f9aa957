"""Cost of restricting a token by a grammar: llguidance, and xgrammar if it is installed.

    python tests/benchmarks/bench_grammars.py FOLDER_OF_A_TOKENIZER

Reads one JSON text token by token, REPEATS times, on one thread: time to compute the mask of each token.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import time

import numpy as np
import torch
from transformers import AutoTokenizer

from rl_core.chat.grammars import GrammarCompiler
from rl_core.inference.token_rules import LogitsEditor, TokenRules

REPEATS = 5
ANY_OBJECT = {"type": "object"}
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "kind": {"enum": ["a", "b"]},
        "nested": {
            "type": "object",
            "properties": {"x": {"type": "number"}, "s": {"type": "string", "maxLength": 40}},
            "required": ["x", "s"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "age", "tags", "kind", "nested"],
    "additionalProperties": False,
}
VALUE = {
    "name": "Ada Lovelace, the first programmer of the world",
    "age": 36,
    "tags": ["maths", "engine", "poetry and other things"],
    "kind": "a",
    "nested": {"x": 1.25, "s": "hello there"},
}


def print_times(name, seconds):
    """Print quantiles in microseconds."""
    values = [1e6 * value for value in seconds]
    print(
        f"{name}: median {statistics.median(values):.0f}, mean {statistics.mean(values):.0f}, "
        f"99th {np.quantile(values, 0.99):.0f}, most {max(values):.0f} us, {len(values)} tokens"
    )


def measure_llguidance(tokenizer, ids, schema, name):
    """Measure the mask alone, and a step of the server with it."""
    compiler = GrammarCompiler(tokenizer, [tokenizer.eos_token_id], opens_thought=False)
    compiler.compile_answer({"enum": [1]}, {}, is_tagged=False, param="")  # reads the vocabulary
    start = time.perf_counter()
    grammar = compiler.compile_answer(schema, {}, is_tagged=False, param="response_format")
    print(f"llguidance, {name}: compiled in {1e3 * (time.perf_counter() - start):.1f} ms")
    masks, edits = [], []
    logits_1V = torch.randn(1, len(tokenizer))
    for _ in range(REPEATS):
        state = grammar.start_answer()
        editor = LogitsEditor(TokenRules(grammar))
        for number, token in enumerate(ids):
            start = time.perf_counter()
            state._matcher.compute_bitmask()
            masks.append(time.perf_counter() - start)
            state.read_tokens([token])
            start = time.perf_counter()
            editor.edit_logits(logits_1V, ids[:number])
            edits.append(time.perf_counter() - start)
    print_times(f"llguidance, {name}, mask", masks)
    print_times(f"llguidance, {name}, mask unpacked and applied to the logits", edits)


def measure_xgrammar(tokenizer, ids, schema, name):
    """Measure the mask alone."""
    import xgrammar

    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=len(tokenizer))
    compiler = xgrammar.GrammarCompiler(info, max_threads=1)
    start = time.perf_counter()
    if schema == ANY_OBJECT:
        compiled = compiler.compile_builtin_json_grammar()
    else:
        compiled = compiler.compile_json_schema(json.dumps(schema))
    print(f"xgrammar, {name}: compiled in {1e3 * (time.perf_counter() - start):.1f} ms")
    masks = []
    for _ in range(REPEATS):
        matcher = xgrammar.GrammarMatcher(compiled)
        for token in ids:
            start = time.perf_counter()
            matcher.fill_next_token_bitmask(xgrammar.allocate_token_bitmask(1, len(tokenizer)))
            masks.append(time.perf_counter() - start)
            assert matcher.accept_token(token)
    print_times(f"xgrammar, {name}, mask", masks)


def main():
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tokenizer")
    parser.add_argument("--gguf", help="name of a GGUF file in the folder")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    options = {"gguf_file": arguments.gguf} if arguments.gguf else {}
    tokenizer = AutoTokenizer.from_pretrained(arguments.tokenizer, **options)
    ids = tokenizer.encode(json.dumps(VALUE), add_special_tokens=False)
    print(f"{len(tokenizer)} tokens in the vocabulary, {len(ids)} in the text")
    for schema, name in ((SCHEMA, "schema"), (ANY_OBJECT, "any object")):
        measure_llguidance(tokenizer, ids, schema, name)
        if importlib.util.find_spec("xgrammar"):
            measure_xgrammar(tokenizer, ids, schema, name)


if __name__ == "__main__":
    main()
