"""Long matrices of cases: every entry is a test, and every Nth case stays in `make test`."""

import re

import pytest
from helpers import ROOT
from helpers.matrices import MATRICES, find_left_out_cases


@pytest.mark.parametrize("entry", MATRICES)
def test_every_matrix_is_a_test_with_cases(entry):
    path, _, name = entry.partition("::")
    source = (ROOT / "tests" / path).read_text()
    assert re.search(rf"^def {name}\(\s*\w", source, re.MULTILINE), (
        f"{path} has no {name} with cases"
    )


def test_the_first_and_then_every_nth_case_stays():
    entry = "rl_core/cpu/test_fused_decode.py::test_drafts_change_no_token"
    cases = [f"tests/{entry}[{number}]" for number in range(12)]
    others = [f"tests/rl_core/a.py::test_b[{number}]" for number in range(12)]
    mixed = [node_id for pair in zip(cases, others, strict=True) for node_id in pair]
    assert set(cases) - find_left_out_cases(mixed) == {cases[0], cases[5], cases[10]}
    assert not find_left_out_cases(others)
