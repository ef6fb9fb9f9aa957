"""Proofs of export without a fresh process, which takes seconds to start."""

import json
from types import SimpleNamespace

import pytest

from rl_core.models import export_verification_child
from rl_core.models.export_verification import score_in_fresh_process


def in_this_process(models, kind, settings, reward_models=()):
    """As `score_in_fresh_process`, with the same request, answered here."""

    def run(command, *, input, **options):
        results = [
            export_verification_child.process_request(model)
            for model in json.loads(input)["models"]
        ]
        return SimpleNamespace(stdout=json.dumps(results), stderr="", returncode=0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rl_core.models.export_verification.subprocess.run", run)
        return score_in_fresh_process(models, kind, settings, reward_models)
