"""Every algorithm stands in the table of the documents, in its entry point, and in the configuration to start from."""

import re
from typing import get_args

import pytest
from helpers import ROOT

import rl_core
from rl_core.settings import GROUP_ALGORITHMS, Algorithm


@pytest.mark.parametrize("name", get_args(Algorithm))
def test_an_algorithm_is_described_and_named(name):
    described = (ROOT / "docs" / "algorithms.md").read_text(encoding="utf-8")
    assert f"| `{name}` |" in described
    assert re.search(rf"\b{name}\b", (ROOT / "configs" / "grpo.yaml").read_text(encoding="utf-8"))
    if name in GROUP_ALGORITHMS:
        assert re.search(rf"\b{name}\b", (rl_core.grpo.__doc__ or "").lower())
