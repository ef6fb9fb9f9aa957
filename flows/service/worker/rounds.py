"""Choice of what is computed together, from the requests that are ready.

A round: of every run the next request that is no forward_backward, and new samplers, updates of all runs together;
then every run's next forward_backwards in one batch; then samples in one batch. So the runs' passes fall together
although each is at another point of its loop, and training and sampling take turns.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from flows.service.store.records import line_of
from flows.service.store.work import Ready

__all__ = ["Round", "choose"]

BATCH_BYTES = 64 << 20  # payloads of one batch; the engine cuts passes by itself
ALONE = 3  # deaths of workers after which a request is computed by itself: it may be the reason


@dataclass(slots=True)
class Round:
    """Request ids of the four steps, each in the order of acceptance."""

    single: list[str] = field(default_factory=list)  # computed one by one
    updates: list[str] = field(default_factory=list)  # optim_step, together
    passes: list[str] = field(default_factory=list)  # forward_backward, together
    samples: list[str] = field(default_factory=list)  # together


def choose(ready: Iterable[Ready], most: int, most_runs: int) -> Round:
    """One round.

    Args:
        ready: in the order of acceptance; of each run without holes (`Work.ready`).
        most: requests of a batch. most_runs: runs that fit into memory.
    """
    chains: dict[str, list[Ready]] = {}
    found, samples = Round(), []
    for one in ready:
        if line_of(one.kind) == "training":
            chains.setdefault(one.target, []).append(one)
        elif one.kind == "sample":
            samples.append(one)
        else:
            found.single.append(one.request_id)
    passes: list[Ready] = []
    for chain in list(chains.values())[:most_runs]:
        chain.sort(key=lambda one: one.seq)
        start = 0
        if chain[0].kind != "forward_backward":
            is_update = chain[0].kind == "optim_step" and chain[0].deaths < ALONE
            (found.updates if is_update else found.single).append(chain[0].request_id)
            start = 1
        for one in chain[start:]:
            if one.kind != "forward_backward":
                break
            passes.append(one)
    found.passes = _within(_in_turns(passes), most)
    found.samples = _within(samples, most)
    return found


def _in_turns(passes: Sequence[Ready]) -> list[Ready]:
    """The first of every run, then the second of every run, and so on: a long queue of one keeps none from its turn."""
    turns: dict[str, int] = {}
    ranked = []
    for one in passes:
        turns[one.target] = turns.get(one.target, -1) + 1
        ranked.append((turns[one.target], one.place, one))
    return [one for _, _, one in sorted(ranked, key=lambda entry: entry[:2])]


def _within(chosen: Sequence[Ready], most: int) -> list[str]:
    """As many as a batch may hold, one at least; suspects one by one."""
    found: list[str] = []
    size = 0
    for one in chosen[:most]:
        size += one.size
        if found and (size > BATCH_BYTES or one.deaths >= ALONE):
            break
        found.append(one.request_id)
        if one.deaths >= ALONE:
            break
    return found
