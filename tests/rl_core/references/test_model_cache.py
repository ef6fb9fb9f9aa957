"""The model cache: eviction order, bytes, one load for all waiting threads, models in use, lack of memory."""

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


class Loader:
    """A loader of models by name that records each load."""

    def __init__(self, cache):
        self.cache, self.names = cache, []

    def __call__(self, name, size=10, expected=None):
        def load():
            self.names.append(name)
            return Model(name, size)

        expected = size if expected is None else expected
        return self.cache.get_or_load(name, load, lambda model: model.size, expected, name)


def make_loader(max_models=2, limit=100, free=1000):
    return Loader(ModelCache(max_models, lambda: limit, lambda: free))


def test_the_least_recently_used_model_is_evicted_first():
    get = make_loader()
    for name in ("a", "b", "a", "c", "a", "b"):
        assert get(name).name == name
    assert get.names == ["a", "b", "c", "b"]  # c replaced b, although b was loaded after a
    state = get.cache.state
    assert (state.kept, state.alive, state.bytes) == (2, 2, 20)
    assert (state.hits, state.loads, state.evictions) == (2, 4, 2)


def test_bytes_are_limited_too():
    get = make_loader(max_models=10, limit=35)
    for name in "abcd":
        get(name)
    assert (get.cache.state.bytes, get.cache.state.kept) == (30, 3)
    get("e", 25)
    assert (get.cache.state.bytes, get.cache.state.kept) == (35, 2)  # 10 of d and 25
    get("f", 30, expected=5)  # larger than estimated from its files
    assert (get.cache.state.bytes, get.cache.state.kept) == (30, 1)
    with pytest.raises(
        OutOfMemory,
        match=r"^g: needs about .* reference models may use .* together; choose a lower",
    ):
        get("g", 36)
    assert get.names == list("abcdef")


@pytest.mark.slow
def test_a_model_in_use_counts_until_it_is_dropped_and_comes_back_without_a_load():
    get = make_loader(max_models=1, limit=25)
    used = get("a")
    get("b")
    assert (get.cache.state.kept, get.cache.state.alive, get.cache.state.bytes) == (1, 2, 20)
    assert get("a") is used and get.names == ["a", "b"]
    with pytest.raises(OutOfMemory, match=r"in addition to .* of reference models in use"):
        get("c", 20)
    del used
    get("c", 20)
    assert get.cache.state.bytes == 20


def test_models_are_dropped_when_the_machine_is_short_of_memory():
    free = [1000]
    get = Loader(ModelCache(5, lambda: 1000, lambda: free[0]))
    get("a")
    get("b")
    free[0] = 5
    with pytest.raises(OutOfMemory, match=r"and 0\.00 GiB are free"):
        get("c")
    assert get.cache.state.alive == 0
    free[0] = 1000
    get("a")
    # any part of the process may run out of memory
    out_of_memory.record_out_of_memory("a test", 1, "rows")
    assert get.cache.state.alive == 0


def test_a_load_that_runs_out_of_memory_is_tried_again_without_the_others():
    get = make_loader()
    get("a")
    alive = []

    def load():
        alive.append(get.cache.state.alive)
        if len(alive) == 1:
            raise MemoryError
        return Model("b")

    model = get.cache.get_or_load("b", load, lambda model: model.size, 10, "b")
    assert model.name == "b" and alive == [1, 0]


def test_concurrent_requests_share_one_load():
    get, models = make_loader(), []
    started, may_finish = threading.Event(), threading.Event()

    def load():
        started.set()
        assert may_finish.wait(20)
        get.names.append("a")
        return Model("a")

    def request_model():
        models.append(get.cache.get_or_load("a", load, lambda model: model.size, 10, "a"))

    threads = [threading.Thread(target=request_model) for _ in range(8)]
    for thread in threads:
        thread.start()
    assert started.wait(20)
    assert get("b").name == "b"  # another model does not wait for it
    wait_for(lambda: get.cache.state.hits == 7)
    may_finish.set()
    for thread in threads:
        thread.join(20)
    assert get.names == ["b", "a"]
    assert len(models) == 8 and len({id(model) for model in models}) == 1


def test_an_error_reaches_all_waiting_threads_and_the_next_request_loads_again():
    get = make_loader()

    def fail():
        raise OSError("no such file")

    for _ in range(2):
        with pytest.raises(OSError, match="no such file"):
            get.cache.get_or_load("a", fail, lambda model: 0, 10, "a")
    assert get("a").name == "a" and get.cache.state.bytes == 10


def test_a_dropped_cache_is_no_longer_a_memory_holder():
    cache = make_loader().cache
    gc.collect()
    before = len(out_of_memory._memory_holders)
    del cache
    gc.collect()
    assert len(out_of_memory._memory_holders) == before - 1
