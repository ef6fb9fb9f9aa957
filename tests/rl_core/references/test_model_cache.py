"""Cache of models: order of eviction, bytes, one load for all who ask, models in use, lack of memory."""

import gc
import threading
from dataclasses import dataclass

import pytest
from helpers.waiting import wait_for

from rl_core import out_of_memory
from rl_core.errors import OutOfMemory
from rl_core.references.pool import ModelCache


@dataclass
class Model:
    name: str
    size: int = 10

    __hash__ = object.__hash__


class Loads:
    """Loads models by name, and remembers which."""

    def __init__(self, cache):
        self.cache, self.names = cache, []

    def __call__(self, name, size=10, expected=None):
        def load():
            self.names.append(name)
            return Model(name, size)

        return self.cache.get(
            name, load, lambda model: model.size, size if expected is None else expected, name
        )


def make(most=2, limit=100, free=1000):
    return Loads(ModelCache(most, lambda: limit, lambda: free))


def test_the_one_that_was_used_longest_ago_goes_first():
    get = make()
    for name in ("a", "b", "a", "c", "a", "b"):
        assert get(name).name == name
    assert get.names == ["a", "b", "c", "b"]  # b fell out for c, though it was loaded after a
    state = get.cache.state
    assert (state.kept, state.alive, state.bytes, state.hits, state.loads, state.evictions) == (
        2,
        2,
        20,
        2,
        4,
        2,
    )


def test_bytes_are_a_limit_of_their_own():
    get = make(most=10, limit=35)
    for name in "abcd":
        get(name)
    assert (get.cache.state.bytes, get.cache.state.kept) == (30, 3)
    get("e", 25)
    assert (get.cache.state.bytes, get.cache.state.kept) == (35, 2)  # d stayed: 10 + 25
    get("f", 30, expected=5)  # larger than its files promised
    assert (get.cache.state.bytes, get.cache.state.kept) == (30, 1)
    with pytest.raises(
        OutOfMemory,
        match=r"^g: takes about .* reference models may take .* together; choose a lower",
    ):
        get("g", 36)
    assert get.names == list("abcdef")


def test_a_model_in_use_counts_until_it_is_dropped_and_comes_back_without_a_load():
    get = make(most=1, limit=25)
    used = get("a")
    get("b")
    assert (get.cache.state.kept, get.cache.state.alive, get.cache.state.bytes) == (1, 2, 20)
    assert get("a") is used and get.names == ["a", "b"]
    with pytest.raises(OutOfMemory, match=r"beside .* of reference models in use"):
        get("c", 20)
    del used
    get("c", 20)
    assert get.cache.state.bytes == 20


def test_models_are_dropped_when_the_machine_is_short_of_memory():
    room = [1000]
    get = Loads(ModelCache(5, lambda: 1000, lambda: room[0]))
    get("a"), get("b")
    room[0] = 5
    with pytest.raises(OutOfMemory, match=r"and 0\.00 GiB are free"):
        get("c")
    assert get.cache.state.alive == 0
    room[0] = 1000
    get("a")
    out_of_memory.record_out_of_memory("a test", 1, "rows")  # of whoever ran out
    assert get.cache.state.alive == 0


def test_a_load_that_runs_out_of_memory_is_tried_again_without_the_others():
    get = make()
    get("a")
    tries = []

    def load():
        tries.append(get.cache.state.alive)
        if len(tries) == 1:
            raise MemoryError
        return Model("b")

    assert get.cache.get_or_load(
        "b", load, lambda model: model.size, 10, "b"
    ).name == "b" and tries == [1, 0]


def test_concurrent_askers_share_one_load():
    get, go, found = make(), threading.Event(), []
    begun = threading.Event()

    def load():
        begun.set()
        assert go.wait(20)
        get.names.append("a")
        return Model("a")

    def ask():
        found.append(get.cache.get_or_load("a", load, lambda model: model.size, 10, "a"))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    assert begun.wait(20)
    assert get("b").name == "b"  # another model does not wait for it
    wait_for(lambda: get.cache.state.hits == 7)
    go.set()
    for thread in threads:
        thread.join(20)
    assert get.names == ["b", "a"] and len({id(model) for model in found}) == 1 and len(found) == 8


def test_an_error_reaches_all_who_wait_and_the_next_one_tries_again():
    get = make()

    def fail():
        raise OSError("no such file")

    for _ in range(2):
        with pytest.raises(OSError, match="no such file"):
            get.cache.get_or_load("a", fail, lambda model: 0, 10, "a")
    assert get("a").name == "a" and get.cache.state.bytes == 10


def test_a_cache_does_not_live_on_for_the_lack_of_memory():
    cache = make().cache
    gc.collect()
    before = len(out_of_memory._memory_holders)
    del cache
    gc.collect()
    assert len(out_of_memory._memory_holders) == before - 1
