"""Same computations by two processes and by one: a program that test_sharded_training.py runs once.

    python sharded_scenarios.py FOLDER [all] [4]   writes FOLDER/0.json and 1.json (of two, or four) and alone.json

Without `all` it leaves out those of LONG, whose parts other scenarios have too.

The processes are forks of one that has imported everything and computed nothing, which is much faster than two starts.
"""

import functools
import json
import os
import socket
import sys
import threading
import traceback
from dataclasses import replace
from pathlib import Path

import torch
from transformers import LlamaForSequenceClassification

from helpers import sharded_policies
from helpers.tiny import PAD, VOCABULARY, nano
from rl_core.data.pairs import PairSide, PreferencePair
from rl_core.distributed import SINGLE_PROCESS, Shards, join_process_group
from rl_core.errors import NonFiniteTensor, Stopped
from rl_core.models import lora
from rl_core.models.trainable_weights import collect_trainable_weights
from rl_core.settings import LoraSettings, PreferenceSettings, RewardModelSettings, SFTSettings
from rl_core.storage.checkpoint import CheckpointStore
from rl_core.tracking import MemoryTracker
from rl_core.trainers.preference import PreferenceTrainer
from rl_core.trainers.reward_model import RewardModelTrainer, SteppedRow, StepRewardTrainer
from rl_core.trainers.sft import SFTTrainer
from rl_core.training import sharded_step
from rl_core.training.loop import run_loop

# 11 rows in batches of 5: the last batch of an epoch has one row, so one process has no row.
OPTIONS = {
    "learning_rate": 1e-2,
    "warmup_steps": 2,
    "batch_size": 5,
    "epochs": 2.0,
    "eval_every": 2,
}
LONG = {
    "extras",
    "muon",
    "bfloat16",
    "limited",
    "inner rewards",
    "dropout",
    "thoughts",
    "by layer grpo",
    "cut muon",
    "rest muon",
    "whole muon",
    "custom functions",
    "sapo",
    "dppo",
    "gdpo",
    "distill",
    "self distill",
    "distill aligned sampled",
    "distill aligned gold",
    "turn credit",
    "dynamic",
    "ppo separate",
    "ppo shared",
    "policy adapters",
    "process rewards",
    "process rewards, ppo",
    "cut process rewards",
    "rest process rewards",
    "whole process rewards",
    "thoughts adapters",
    "by layer other backend",
    "by layer recomputed",
}


def make_model(kind=None):
    torch.manual_seed(3)
    model = nano(tie_word_embeddings=True) if kind is None else nano(0, 0.0, kind, num_labels=1)
    head = model.score if kind else model.lm_head
    head.weight.data.mul_(20)  # far enough apart for differences to show
    return model


def draw_ids(count, seed):
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randint(1, VOCABULARY - 1, (3 + 2 * (i % 4),), generator=generator).tolist()
        for i in range(count)
    ]


def make_sft_trainer(process_group, model=None, **changes):
    def rows(count, seed):
        return [
            (ids + ids, [False] * len(ids) + [True] * len(ids)) for ids in draw_ids(count, seed)
        ]

    settings = SFTSettings(**{**OPTIONS, "micro_batch_tokens": 30, **changes})
    return SFTTrainer(
        model or make_model(), PAD, rows(11, 0), rows(3, 1), settings, 7, process_group
    )


def make_reward_trainer(process_group, **changes):
    def pairs(count, seed):
        return [([*ids, 9], ids + ids[:1] + [2]) for ids in draw_ids(count, seed)]

    settings = RewardModelSettings(**{**OPTIONS, "micro_batch_tokens": 40, **changes})
    model = make_model(LlamaForSequenceClassification)
    return RewardModelTrainer(model, PAD, pairs(11, 0), pairs(5, 1), settings, 7, process_group)


def make_step_trainer(process_group, **changes):
    def rows(count, seed):
        return [
            SteppedRow(
                [*ids, 9], tuple((end, float(ids[end] % 2)) for end in range(1, len(ids), 2))
            )
            for ids in draw_ids(count, seed)
        ]

    settings = RewardModelSettings(
        **{**OPTIONS, "micro_batch_tokens": 40, "loss": "process", **changes}
    )
    model = make_model(LlamaForSequenceClassification)
    return StepRewardTrainer(model, PAD, rows(11, 0), rows(5, 1), settings, 7, process_group)


def make_preference_trainer(process_group, **changes):
    def side(ids, more):
        return PairSide(ids, more, [True] * len(more))

    def pairs(count, seed):
        return [
            PreferencePair(side(ids, [9, *ids[:2]]), side(ids, [2, 3]))
            for ids in draw_ids(count, seed)
        ]

    settings = PreferenceSettings(
        **{**OPTIONS, "micro_batch_tokens": 40, "sft_coef": 0.1, **changes}
    )
    return PreferenceTrainer(
        make_model(), PAD, pairs(11, 0), pairs(5, 1), settings, 7, process_group=process_group
    )


def collect_numbers(trainer, process_group, *, folder=None, iterations=None, **options):
    """Return the loop's metrics by step, and the sum of the absolute weights at its end."""
    tracker = MemoryTracker()
    store = CheckpointStore(folder) if folder else None
    options["iterations"] = iterations or trainer.total_steps
    outcome = run_loop(trainer, trainer.settings, tracker=tracker, checkpoints=store, **options)
    weights = trainer.optimizer_step.sharded.gather_state(collect_trainable_weights(trainer.model))
    reported = {
        f"{name} {step}": value
        for step, row in tracker.metrics
        for name, value in row.items()
        if not name.startswith("perf/")
    }
    size = (
        sum(float(tensor.double().abs().sum()) for tensor in weights.values())
        if process_group.is_rank_zero
        else 0.0
    )
    return {
        "metrics": reported,
        "weights": size,
        "iterations": outcome.iterations,
        "best": outcome.best_iteration,
    }


def refuse_a_row(trainer):
    """Make the loss refuse one row of the second step, in either process; no other row holds the token 10."""
    loss = trainer._compute_loss
    rows, position = list(trainer._train), trainer.order._rows[7]
    rows[position] = replace(
        rows[position], completion_ids=[*rows[position].completion_ids[:-1], 10]
    )
    trainer._train = rows

    def refuse(batch, *counts):
        result = loss(batch, *counts)
        if (
            trainer.optimizer_step.num_steps == 1
            and bool((batch.input_ids_BS == 10).any())
            and torch.is_grad_enabled()
        ):
            raise NonFiniteTensor("logprobs: NaN")
        return result

    trainer._compute_loss = refuse
    return trainer


def make_adapters():
    settings = LoraSettings(rank=2, target_modules=("q_proj", "down_proj"))
    model = lora.add_adapter(nano(), settings)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.fill_(0.05)
    return model


def stop_early(process_group):
    event = threading.Event()
    if (
        process_group.rank == process_group.size - 1
    ):  # the other process hears of it only from this one
        event.set()
    try:
        collect_numbers(make_sft_trainer(process_group), process_group, stop_event=event)
    except Stopped as error:
        return error.signum
    return None


EXTRAS = {
    "grokfast_lambda": 2.0,
    "ema_decay": 0.8,
    "max_grad_norm": 0.3,
    "schedule": "cosine",
    "patience": 1,
    "learning_rate": 5e-2,
    "epochs": 6.0,
}


def list_scenarios(process_group, folder):
    """Yield (name, function that returns numbers); the order is the same in all processes."""
    ours = folder / ("alone" if process_group.size == 1 else "together")
    best = {"best_metric": "eval/loss", "larger_is_better": False}
    yield "sft", lambda: collect_numbers(make_sft_trainer(process_group), process_group)
    yield "reward_model", lambda: collect_numbers(make_reward_trainer(process_group), process_group)
    yield "step_reward", lambda: collect_numbers(make_step_trainer(process_group), process_group)
    yield (
        "preference",
        lambda: collect_numbers(make_preference_trainer(process_group), process_group),
    )
    yield (
        "extras",
        lambda: collect_numbers(make_sft_trainer(process_group, **EXTRAS), process_group, **best),
    )
    yield (
        "muon",
        lambda: collect_numbers(make_sft_trainer(process_group, optimizer="muon"), process_group),
    )
    yield (
        "bfloat16",
        lambda: collect_numbers(
            make_sft_trainer(process_group, make_model().bfloat16()), process_group
        ),
    )
    yield (
        "adapters",
        lambda: collect_numbers(make_sft_trainer(process_group, make_adapters()), process_group),
    )
    yield (
        "refused",
        lambda: collect_numbers(refuse_a_row(make_sft_trainer(process_group)), process_group),
    )
    yield "stopped", lambda: stop_early(process_group)
    for name, changes in (("plain", {}), ("muon", {"optimizer": "muon"})):
        long = functools.partial(run_long, process_group, **changes)
        yield f"cut {name}", functools.partial(long, 3, ours / name)
        yield f"rest {name}", functools.partial(long, 7, ours / name)
        yield f"whole {name}", functools.partial(long, 7)
    yield from sharded_policies.list_scenarios(process_group, folder, collect_numbers)
    if process_group.size == 1:
        yield "taken over", lambda: run_long(process_group, 7, folder / "of two")
        return
    yield "cut for one", lambda: run_long(process_group, 3, folder / "of two")
    yield "taken over", lambda: run_long(process_group, 7, folder / "of one")
    sharded_step.Shards = functools.partial(Shards, by_layer=True)
    yield "by layer", lambda: collect_numbers(make_sft_trainer(process_group), process_group)
    yield (
        "by layer refused",
        lambda: collect_numbers(refuse_a_row(make_sft_trainer(process_group)), process_group),
    )
    yield from sharded_policies.list_layer_scenarios(process_group, collect_numbers)
    yield (
        "by layer recomputed",
        lambda: collect_numbers(
            make_sft_trainer(process_group, activation_checkpointing=True), process_group
        ),
    )


def run_long(process_group, iterations, folder=None, **changes):
    """Train with every kind of state; resume from the folder."""
    trainer = make_sft_trainer(
        process_group, **{**EXTRAS, "patience": None, "checkpoint_every": 3, **changes}
    )
    return collect_numbers(trainer, process_group, folder=folder, iterations=iterations)


def compute(process_group, folder, name, left_out):
    results = {}
    for title, scenario in list_scenarios(process_group, folder):
        if title in left_out:
            continue
        try:
            results[title] = scenario()
        except BaseException:
            results[title] = traceback.format_exc()
            break  # the processes are no longer at the same place
    (folder / f"{name}.json").write_text(json.dumps(results))


def fork(folder, rank, port, left_out, size):
    pid = os.fork()
    if pid:
        return pid
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
    }
    os.environ |= {"MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    try:
        compute(join_process_group(timeout_s=120, on_cpu=True), folder, str(rank), left_out)
    finally:
        os._exit(0)


def main(folder, left_out, size):
    torch.set_num_threads(1)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    begun = os.fork()
    if not begun:  # what one process begins for two to take over; computed in a fork, as autograd must not run before
        run_long(SINGLE_PROCESS, 3, folder / "of one")
        os._exit(0)
    os.waitpid(begun, 0)
    for pid in [fork(folder, rank, port, left_out, size) for rank in range(size)]:
        os.waitpid(pid, 0)
    compute(SINGLE_PROCESS, folder, "alone", left_out)


if __name__ == "__main__":
    main(
        Path(sys.argv[1]), set() if "all" in sys.argv[2:] else LONG, 4 if "4" in sys.argv[2:] else 2
    )
