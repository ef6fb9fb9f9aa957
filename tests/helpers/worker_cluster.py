"""A cluster of rollout workers within this process, with faults on demand; and teams of trainers on it."""

import pickle
import random
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor
from concurrent.futures import wait as wait_for

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from helpers.letters import make_trainer
from rl_core.rollout_workers.async_worker import AsyncRolloutWorker
from rl_core.rollout_workers.cluster import WorkerLost
from rl_core.rollout_workers.worker import RolloutWorker
from rl_core.rollout_workers.worker_group import WorkerConfig, WorkerGroup
from rl_core.settings import RolloutSettings


def compiled_model(tokenizer, context=32):
    """A small Llama that compiled code decodes: there a row's bits do not depend on the rows beside it."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=96,
        max_position_embeddings=context,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return LlamaForCausalLM(config)


def letters_trainer(tokenizer, environment=None, **options):
    """The trainer of `helpers.letters` on such a model."""
    model = options.pop("model", None) or compiled_model(tokenizer)
    return make_trainer(tokenizer, environment, model=model, **options)


class LocalCluster:
    """A `WorkerCluster`: specs and tasks travel as pickles, calls end in an order drawn from `seed`.

    lose: numbers of calls (from 0, in the order in which they were made) whose worker dies in place of an answer.
    """

    def __init__(self, seed=0, lose=(), worker_class=RolloutWorker):
        self.random, self.lose, self.worker_class = random.Random(seed), set(lose), worker_class
        self.calls, self.workers, self.opened, self.closed, self.stopped = [], [], [], 0, 0
        self.hung, self.hangs_at_play = (
            [],
            None,
        )  # workers whose calls do not end, and one that will hang
        self.beside = {}  # number of a call that waits -> its result, on a thread
        self.threads = ThreadPoolExecutor(8)

    def open_cluster(self, num_bytes):
        self.opened.append(num_bytes)

    def share_value(self, value):
        return pickle.dumps(value)

    def start_worker(self, spec, base, *, is_live):
        kind = (
            AsyncRolloutWorker
            if is_live and self.worker_class is RolloutWorker
            else self.worker_class
        )
        self.workers.append(kind(pickle.loads(spec), pickle.loads(base)))
        return self.workers[-1]

    def call_worker(self, worker, method, *arguments):
        sent = [
            pickle.loads(a) if isinstance(a, bytes) else pickle.loads(pickle.dumps(a))
            for a in arguments
        ]
        self.calls.append((worker, method, sent))
        if method == "play" and worker is self.hangs_at_play:
            self.hung = [worker]
        return len(self.calls) - 1

    def call_concurrently(self, worker, method, *arguments):
        call = self.call_worker(worker, method, *arguments)
        self.beside[call] = self.threads.submit(self.answer, call)
        return call

    def answer(self, call):
        worker, method, sent = self.calls[call]
        return pickle.loads(pickle.dumps(worker.call_method(method, *sent)))

    def ping_worker(self, worker):
        return ("ping", worker)

    def wait_for_calls(self, calls, timeout_s):
        if calls and isinstance(calls[0], tuple):
            return [] if calls[0][1] in self.hung else calls
        ready = [call for call in calls if self.calls[call][0] not in self.hung]
        waiting = [
            self.beside[call] for call in ready if call in self.beside and call not in self.lose
        ]
        if waiting and len(waiting) == len(ready):
            wait_for(waiting, timeout_s, FIRST_COMPLETED)
        ready = [
            call
            for call in ready
            if call in self.lose or call not in self.beside or self.beside[call].done()
        ]
        return [self.random.choice(ready)] if ready else []

    def fetch_result(self, call):
        if call in self.lose:
            raise WorkerLost("killed by the test")
        return self.beside.pop(call).result() if call in self.beside else self.answer(call)

    def stop_worker(self, worker):
        self.stopped += 1
        self.hung = [other for other in self.hung if other is not worker]
        if isinstance(worker, AsyncRolloutWorker):
            worker.end()

    def close(self):
        self.closed += 1
        self.threads.shutdown(wait=False)
        for worker in self.workers:
            if isinstance(worker, AsyncRolloutWorker):
                worker.end()

    def list_calls(self, method):
        """Arguments of all calls of a method."""
        return [sent for _, name, sent in self.calls if name == method]


def with_team(trainer, cluster, count=2, **options):
    """The trainer of `helpers.letters`, with workers on a cluster."""
    trainer.worker_group = WorkerGroup(
        RolloutSettings(workers="ray", count=count, **options),
        cluster,
        WorkerConfig(
            trainer.policy,
            trainer.backend,
            trainer.renderer,
            lambda_free(trainer.environment),
            eos_ids=range(0, trainer.policy.config.vocab_size, 2),
            pad_id=trainer.pad_id,
        ),
    )
    return trainer


class lambda_free:  # noqa: N801  # a function that can be pickled
    def __init__(self, environment):
        self.environment = environment

    def __call__(self):
        return self.environment
