"""Proofs of export without a fresh process, which takes seconds to start."""

import json
from types import SimpleNamespace

import pytest

from rl_core.models import plain_logprobs
from rl_core.models.export_proof import fresh_logprobs


def in_this_process(models, kind, settings, reward_models=()):
    """As `fresh_logprobs`, with the same request, answered here."""

    def run(command, *, input, **options):
        found = [plain_logprobs.answer(model) for model in json.loads(input)["models"]]
        return SimpleNamespace(stdout=json.dumps(found), stderr="", returncode=0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rl_core.models.export_proof.subprocess.run", run)
        return fresh_logprobs(models, kind, settings, reward_models)
