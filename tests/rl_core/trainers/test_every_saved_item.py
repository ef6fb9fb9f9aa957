"""Every trainer, stopped and resumed, computes the same bits, and the loss of any single saved item is noticed.

A state is walked leaf by leaf. A missing leaf must be refused by name, or must change the result; the same holds for a
leaf reset to its value at construction, or changed if it still has that value.
"""

import copy
import dataclasses
import functools
import re

import numpy as np
import pytest
import torch
from helpers.resume_scenarios import CUT, SCENARIOS, MemoryStore, run

from rl_core.storage.checkpoint import CheckpointStore
from rl_core.training.loop_state import LoopMemory

LAST = 5  # iterations of each run, as patience ends it

# In the ordinary suite: one scenario resumed for each trainer, and the items of one; the others are slow proofs.
RESUMED = ("sft", "reward model", "dpo", "kto", "grpo", "ppo", "thoughts lora", "distill")
ITEMS = ("sft",)
GATE = "grpo numerics"  # undoes the effects of most other items

# Items that may be lost or changed silently, and why.
_WINDOW = "counts that matter where episodes fail: test_failed_episodes_in_training.py resumes over failures"
EXCEPTIONS = {
    "trainer/failures/environment/past": _WINDOW,
    "trainer/failures/rewards/past": _WINDOW,
    "trainer/failures/past": _WINDOW,
    "optimizer_step/skipped_in_row": "decides when a run of bad steps ends; test_optimizer_step.py resumes within one",
    "trainer/critic_optimizer_step/skipped_in_row": "as above",
    "trainer/entries/*/optimizer_steps/*/skipped_in_row": "as above",
    "trainer/entries/*/optimizer_steps/*/num_steps": "counters continue over a rollback",
    "trainer/entries/*/optimizer_steps/*/skipped_steps": "as above",
    "trainer/entries/*/optimizer_steps/*/max_tokens": "as above",
    "trainer/entries/*/optimizer_steps/*/learning_rate_scale": "as above: a rollback makes the present one smaller",
    "trainer/entries/*/extra/replay/rewards": "of a critic; groups are compared once, when they are fresh",
    "trainer/entries/*/extra/replay/is_truncated": "as above",
    "trainer/curriculum/stage_iterations": "starts over at the rollback; test_curriculum.py resumes at every iteration",
    "trainer/curriculum/window/series/*": "as above",
    "trainer/curriculum/streaks": "as above",
    "trainer/evaluated/*": "for conditions on an evaluation; test_watched_metrics.py resumes between the two",
    "trainer/numerics/failed": "of rollbacks in a row, which end a run; test_numerics.py resumes between them",
    "loop/metrics/*": "of the last evaluation: an outcome has them where no best metric is chosen (tried below)",
    "loop/unmoved_iterations": "checkpoints of earlier versions lack it; test_learning_check.py resumes with it",
    "loop/initial_digest": "as above",
    "loop/plateau_evaluations": "as above; test_loop_outcomes.py resumes with it",
    "rng/cuda": "of GPUs, of which there is none here",
    "trainer/rewards/watch/alarmed": "decides whether the warning of an alarm is repeated",
    "trainer/rewards/watch/past/*/reward": "of the alarm over a window; test_hacking_monitor.py resumes within one",
    "trainer/rewards/watch/past/*/success": "as above",
    "trainer/rewards/watch/past/*/total/count": "as above",
    "trainer/rewards/watch/past/*/total/mean": "as above",
    "trainer/rewards/watch/past/*/total/squares": "as above",
}

# The monitor of rewards as it was at a stage's entry: "grpo rewards" tries the present one.
MONITORED = "trainer/entries/*/extra/rewards/watch/"

# Items that a scenario does not use. max_tokens: where each pair or rollout is a separate micro-batch, for the sake
# of
# its dropout masks, nothing can be cut. rollouts_played: of the entropy bonus, which a distillation does not have.
# Others: of an iteration that the rollback right behind it undoes; "grpo" tries them.
UNUSED = {
    "optimizer_step/max_tokens": ("dpo", "dpo lora", "grpo lora"),
    "trainer/rollouts_played": ("distill",),
    "optimizer_step/optimizer/state/*/exp_avg": ("grpo rollback",),
    "optimizer_step/optimizer/state/*/exp_avg_sq": ("grpo rollback",),
    "optimizer_step/optimizer/state/*/step": ("grpo rollback",),
    "trainer/orders/high/epoch": ("grpo rollback",),
    "trainer/replay/advantages": ("grpo turns",),  # each token has one
}

# Items that only one policy-gradient scenario uses.
ELSEWHERE = {
    "trainer/curriculum/": "grpo rollback",
    "trainer/entries/": "grpo rollback",
    "trainer/rewards/": "grpo rewards",
}


def mark_slow_except(quick):
    return [
        name if name in quick else pytest.param(name, marks=pytest.mark.slow) for name in SCENARIOS
    ]


@functools.cache
def cut_state(name):
    store = MemoryStore()
    assert run(SCENARIOS[name], store, cut=CUT)[0] is None
    return store.state


@functools.cache
def run_uninterrupted(name):
    return run(SCENARIOS[name])


@functools.cache
def run_resumed(name):
    """Return the result of the resumed part, and its metrics."""
    return run(SCENARIOS[name], MemoryStore(cut_state(name)))


@pytest.mark.parametrize("name", mark_slow_except(RESUMED))
def test_resumed_from_disk_it_is_the_run_in_one_piece(tmp_path, name):
    expected, metrics = run_uninterrupted(name)
    assert expected[1]["iterations"] == LAST and expected[1]["stop_reason"] == "patience"
    assert expected[1]["best_iteration"] == 1
    store = CheckpointStore(tmp_path)
    interrupted, first = run(SCENARIOS[name], store, cut=CUT)
    assert interrupted is None
    actual, second = run(SCENARIOS[name], store)
    assert actual == expected
    assert {**first, **second} == metrics


def iter_leaves(value, path=()):
    """Yield the paths of all leaves: everything except mappings, and lists of mappings."""
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from iter_leaves(item, (*path, key))
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
        for index, item in enumerate(value):
            yield from iter_leaves(item, (*path, index))
    else:
        yield path


def get_item(state, path):
    for key in path:
        state = state[key]
    return state


MISSING = object()


def find_item(state, path):
    try:
        return get_item(state, path)
    except (KeyError, IndexError, TypeError):
        return MISSING


def is_equal(first, second):
    if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
        return first.shape == second.shape and bool(torch.equal(first, second))
    return type(first) is type(second) and bool(np.all(first == second))


def change_value(value):
    """Return another value of the same kind; MISSING if there is none."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    if isinstance(value, torch.Tensor) and value.numel():
        if value.dtype == torch.bool:
            return ~value
        return value + (1 if not value.is_floating_point() else 0.5)
    if isinstance(value, list) and value and all(isinstance(item, int | float) for item in value):
        return [change_value(item) for item in value]
    return MISSING


def alter_item(state, path, value):
    """Return the state with another leaf; MISSING = without it."""
    state = copy.deepcopy(state)
    index = get_item(state, path[:-1])
    if value is MISSING:
        del index[path[-1]]
        return state
    old = index[path[-1]]
    for key, other in list(index.items()) if isinstance(index, dict) else []:
        if (
            isinstance(old, torch.Tensor)
            and isinstance(other, torch.Tensor)
            and other.data_ptr() == old.data_ptr()
        ):
            index[key] = copy.deepcopy(value)  # tied weights have several names
    index[path[-1]] = copy.deepcopy(value)
    return state


def start_state(name):
    """Return the state before the first iteration."""
    trainer = SCENARIOS[name].trainer()
    state = {
        "model": dict(trainer.model.state_dict()),
        "best_model": None,
        "optimizer_step": trainer.optimizer_step.state_dict(),
        "trainer": trainer.state_dict(),
        "loop": dataclasses.asdict(LoopMemory().state),
    }
    return copy.deepcopy(state)


def is_noticed(name, state, path, expected, is_lost):
    """Return whether the change was refused (a missing item by name) or changed the result."""
    try:
        return run(SCENARIOS[name], MemoryStore(state)) != expected
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        assert not is_lost or any(str(key) in text for key in path), (
            f"{path}: refused without its name: {text}"
        )
        return True


def describe_kind(path):
    """Return a leaf's path without numbers, names of weights and of metrics."""
    return "/".join(re.sub(r"^.*\.(weight|bias)$|^\d+$|^.*/.*$", "*", str(key)) for key in path)


def is_excepted(kind):
    """Return whether it is listed above; a snapshot of the gate counts as one of a stage's entry."""
    kind = kind.replace("trainer/numerics/snapshots/", "trainer/entries/")
    return kind in EXCEPTIONS or kind.startswith(MONITORED)


def find_unnoticed_items(name, every=False, within=""):
    """Find kinds of items whose loss, reset or change is not noticed: kind -> what was done.

    every: try each item, not one of a kind. within: these kinds alone.
    """
    state, start, actual, observed = cut_state(name), start_state(name), {}, set()
    scenario = SCENARIOS[name]
    passed_over = (
        {"rng"} if not scenario.draws else set()
    )  # of the global generators, from which nothing draws
    for path in iter_leaves(state):
        kind = describe_kind(path)
        if not kind.startswith(within):
            continue
        if path[0] in passed_over or str(path[-1]).startswith("perf/") or is_excepted(kind):
            continue
        if any(kind.startswith(part) and name != other for part, other in ELSEWHERE.items()):
            continue
        if name in UNUSED.get(kind, ()):
            continue
        if not every and kind in observed:
            continue
        observed.add(kind)
        value, before = get_item(state, path), find_item(start, path)
        is_something = value is not None and not (
            isinstance(value, dict | list | tuple) and not value
        )
        trials = {"lost": MISSING} if is_something and not isinstance(path[-1], int) else {}
        if before is not MISSING and not is_equal(before, value):
            trials["reset"] = before
        elif (other := change_value(value)) is not MISSING:
            trials["changed"] = other
        for completed, other in trials.items():
            if not is_noticed(
                name, alter_item(state, path, other), path, run_resumed(name), other is MISSING
            ):
                actual.setdefault(kind, []).append(completed)
    return actual


@pytest.mark.slow
def test_every_item_of_the_numerics_gate_lost_or_reset_is_noticed():
    assert run_uninterrupted(GATE)[0][2]["policy/numerics_rollbacks"][-1][1] == 1
    assert find_unnoticed_items(GATE, within="trainer/numerics/") == {}


@pytest.mark.parametrize(
    "name",
    [name for name in mark_slow_except(ITEMS) if GATE not in getattr(name, "values", [name])],
)
def test_every_item_lost_or_reset_is_noticed(name):
    assert find_unnoticed_items(name) == {}


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", ["sft", "grpo", "thoughts"])
def test_every_single_tensor_and_number_too(name):
    assert find_unnoticed_items(name, every=True) == {}


def test_the_last_evaluation_is_saved():
    """Check that without a best metric the outcome has it, also if the run was killed just before it returned."""
    store = MemoryStore()
    expected = run(SCENARIOS["sft"], store, best_metric=None)
    assert run(SCENARIOS["sft"], MemoryStore(store.state), best_metric=None)[0] == expected[0]
    for name in store.state["loop"]["metrics"]:
        state = alter_item(store.state, ("loop", "metrics", name), MISSING)
        assert run(SCENARIOS["sft"], MemoryStore(state), best_metric=None)[0] != expected[0]
