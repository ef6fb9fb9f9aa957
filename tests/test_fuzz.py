"""Short fuzzing: every stored input, and some mutations of them by hypothesis. `make fuzz` runs for minutes."""

from __future__ import annotations

import random

import pytest
from fuzz.mutation import MAX_BYTES, mutate
from fuzz.run import Fuzzer
from fuzz.targets import CORPUS, TARGETS, read_corpus
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

CASES = [(name, path) for name in TARGETS for path in sorted((CORPUS / name).iterdir())]
EXAMPLES = {"config": 15, "data": 30, "tool_call": 150, "chat": 60, "template": 25}
checked = settings(
    deadline=None, suppress_health_check=list(HealthCheck), derandomize=True, database=None
)


@pytest.mark.parametrize(
    ("name", "path"), [pytest.param(n, p, id=f"{n}: {p.name}") for n, p in CASES]
)
def test_stored_inputs_are_read_or_refused(name, path):
    data = path.read_bytes()
    assert len(data) <= MAX_BYTES
    TARGETS[name](data)  # asserts within


@pytest.mark.parametrize("name", TARGETS)
def test_mutations_are_read_or_refused(name):
    inputs = read_corpus(name)

    @settings(checked, max_examples=EXAMPLES[name])
    @given(st.sampled_from(inputs), st.randoms(use_true_random=False))
    def run(data, chance):
        TARGETS[name](mutate(data, chance, inputs))

    run()
    assert EXAMPLES[name] > 0


def test_the_fuzzer_keeps_what_reaches_new_lines_and_makes_failures_smaller(monkeypatch):
    def target(data):
        if b"zz" in data:
            raise KeyError("two")

    monkeypatch.setitem(TARGETS, "tool_call", target)
    fuzzer = Fuzzer("tool_call", 0)
    assert fuzzer.failures == {} and fuzzer.num_inputs == len(read_corpus("tool_call"))
    fuzzer.feed(b"abc" * 50 + b"zz" + b"d" * 99)
    ((cause, smallest),) = fuzzer.failures.items()
    assert cause.startswith("KeyError at test_fuzz.py") and smallest == b"zz"


def test_mutations_are_bounded_and_repeat_with_their_seed():
    mutations = [
        [mutate(b"name: x\n", random.Random(seed), [b"a: b"]) for seed in range(200)]
        for _ in range(2)
    ]
    assert (
        mutations[0] == mutations[1]
        and len(set(mutations[0])) > 150
        and max(map(len, mutations[0])) <= MAX_BYTES
    )
