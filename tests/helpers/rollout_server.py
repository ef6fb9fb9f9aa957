"""Trainers of `helpers.letters` whose rollouts come from an inference server: `posttrain serve` in this process."""

from __future__ import annotations

import contextlib
import os
import re

from helpers.serving import TOKEN, running_server
from helpers.worker_cluster import compiled_model, letters_trainer
from rl_core.models.causal_lm import save
from rl_core.rollout_workers.server_backend import ServerBackend
from rl_core.settings import RolloutServerSettings, RolloutSettings

KEY = "POSTTRAIN_TEST_SERVER_KEY"


@contextlib.contextmanager
def letters_server(tokenizer, folder, model=None, **settings):
    """Run a server of the model that `letters_trainer` starts from; it takes orders."""
    model = model or compiled_model(tokenizer)
    save(model, tokenizer, folder / "base")
    os.environ[KEY] = TOKEN
    options = {"rollouts": True, "slots": 64, "context": 32, "max_waiting": 1024, **settings}
    with running_server(folder, folder / "base", **options) as server:
        yield server


def server_settings(url, **options):
    """Return rollout settings for a server at this address."""
    options = {"key_variable": KEY, "patience_s": 0.0, **options}
    address = re.sub("^http://", "", url)
    return RolloutSettings(
        workers="server", address=address, server=RolloutServerSettings(**options)
    )


def with_server(trainer, url, *, max_length=32, bound=None, **options):
    """Replace the trainer's backend by a server, as the recipe does it."""
    tokenizer = trainer.renderer.tokenizer
    backend = ServerBackend(
        trainer.policy,
        tokenizer,
        server_settings(url, **options),
        eos_ids=range(0, trainer.policy.config.vocab_size, 2),
        max_length=max_length,
        bound=bound,
    )
    trainer.backend = trainer.server = trainer._numerics.backend = backend
    return trainer


def served_trainer(tokenizer, url, **options):
    """Make a trainer of letters on a server."""
    of_server = {
        name: options.pop(name)
        for name in list(options)
        if name in RolloutServerSettings.__annotations__
    }
    return with_server(letters_trainer(tokenizer, **options), url, **of_server)


def list_sampled_tokens(trainer):
    """Return tokens and log-probabilities of the newest rollouts."""
    return [
        (r.completion_ids, r.sampler_logprobs) for group in trainer.groups for r in group.rollouts
    ]
