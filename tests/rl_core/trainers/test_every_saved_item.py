"""Every trainer, stopped in its middle and resumed: the same bits; and each saved item alone, lost or reset, is noticed.

A state is walked leaf by leaf. A lost leaf has to be refused by its name, or to change the result; so has one that is
reset to its value at construction, or changed where it is still that value.
"""

import copy
import functools
import re

import numpy as np
import pytest
import torch
from helpers.resume_scenarios import CUT, SCENARIOS, MemoryStore, run

from rl_core.storage.checkpoint import CheckpointStore

LAST = 5  # iterations of each run, as patience ends it

# Scenarios whose every item is tried in the ordinary suite; the others are slow proofs.
QUICK = ("sft",)

# Items that may be lost or changed without a word, and why.
EXCEPTIONS = {}


@functools.cache
def cut_state(name):
    store = MemoryStore()
    assert run(SCENARIOS[name], store, cut=CUT)[0] is None
    return store.state


@functools.cache
def ended_state(name):
    """The last checkpoint of a run, which then only has to leave its result."""
    store = MemoryStore()
    run(SCENARIOS[name], store)
    return store.state


@functools.cache
def whole(name):
    return run(SCENARIOS[name])


@functools.cache
def resumed(name):
    """What the resumed part leaves, and its metrics."""
    return run(SCENARIOS[name], MemoryStore(cut_state(name)))


@pytest.mark.parametrize("name", SCENARIOS)
def test_resumed_from_disk_it_is_the_run_in_one_piece(tmp_path, name):
    expected, metrics = whole(name)
    assert expected[1]["iterations"] == LAST and expected[1]["stop_reason"] == "patience"
    assert expected[1]["best_iteration"] == 1
    store = CheckpointStore(tmp_path)
    left, first = run(SCENARIOS[name], store, cut=CUT)
    assert left is None
    found, second = run(SCENARIOS[name], store)
    assert found == expected
    assert {**first, **second} == metrics


# ------------------------------------------------------------------------------------------------- item by item


def leaves(value, path=()):
    """Paths of all leaves: what is no mapping, but for lists of mappings."""
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from leaves(item, (*path, key))
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
        for index, item in enumerate(value):
            yield from leaves(item, (*path, index))
    else:
        yield path


def at(state, path):
    for key in path:
        state = state[key]
    return state


MISSING = object()


def at_start(state, path):
    try:
        return at(state, path)
    except (KeyError, IndexError, TypeError):
        return MISSING


def equal(one, other):
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.shape == other.shape and bool(torch.equal(one, other))
    return type(one) is type(other) and bool(np.all(one == other))


def changed(value):
    """Another value of the same kind; MISSING where there is none to think of."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    if isinstance(value, torch.Tensor) and value.numel():
        if value.dtype == torch.bool:
            return ~value
        return value + (1 if not value.is_floating_point() else 0.5)
    if isinstance(value, list) and value and all(isinstance(item, int | float) for item in value):
        return [changed(item) for item in value]
    return MISSING


def altered(state, path, value):
    """The state with another leaf; MISSING = without it."""
    state = copy.deepcopy(state)
    place = at(state, path[:-1])
    if value is MISSING:
        del place[path[-1]]
    else:
        place[path[-1]] = copy.deepcopy(value)
    return state


def start_state(name):
    """The state before the first iteration."""
    trainer = SCENARIOS[name].trainer()
    state = {
        "model": dict(trainer.model.state_dict()), "best_model": None,
        "optimizer_step": trainer.optimizer_step.state_dict(), "trainer": trainer.state_dict(),
    }  # fmt: skip
    return copy.deepcopy(state)


def is_noticed(name, state, path, expected, is_lost):
    """True = refused, a lost item by its name, or another result."""
    try:
        return run(SCENARIOS[name], MemoryStore(state)) != expected
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        assert not is_lost or any(str(key) in text for key in path), f"{path}: refused without its name: {text}"
        return True


def kind_of(path):
    """A leaf's path with numbers and names of weights left out."""
    return "/".join(re.sub(r"^.*\.(weight|bias)$|^\d+$", "*", str(key)) for key in path)


def unnoticed(name, every):
    """Kinds of items whose loss, reset or change goes unnoticed: kind -> what was done."""
    state, start, found = cut_state(name), start_state(name), {}
    seen = set()
    for path in leaves({key: value for key, value in state.items() if key != "rng"}):
        kind = kind_of(path)
        if not every and kind in seen:
            continue
        seen.add(kind)
        value, before = at(state, path), at_start(start, path)
        trials = {"lost": MISSING} if not isinstance(path[-1], int) else {}
        if before is not MISSING and not equal(before, value):
            trials["reset"] = before
        else:
            trials["changed"] = changed(value)
            if trials["changed"] is MISSING:
                del trials["changed"]
        for done, other in trials.items():
            if is_noticed(name, altered(state, path, other), path, resumed(name), other is MISSING):
                continue
            ended = ended_state(name)
            if at_start(ended, path) is not MISSING and is_noticed(
                name, altered(ended, path, other), path, run(SCENARIOS[name], MemoryStore(ended)), other is MISSING
            ):
                continue
            found.setdefault(kind, []).append(done)
    return found


@pytest.mark.parametrize("name", SCENARIOS)
def test_every_item_lost_or_reset_is_noticed(name):
    found = unnoticed(name, every=False)
    assert found == {}
