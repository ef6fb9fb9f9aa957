"""The service's clock: steady within a boot, the same for all processes, never running backwards."""

import time

import pytest
from helpers.service_clients import OWNER, create, open_sampler

from posttrain.training_service.store import ResultBody, ServiceStore
from posttrain.training_service.store.database import StoreDatabase, create_service_clock


class Machine:
    """Clocks of a machine, set by hand."""

    def __init__(self):
        self.wall, self.up, self.boot = 1_000_000.0, 50.0, "boot-1"

    def advance(self, seconds):
        self.wall += seconds
        self.up += seconds

    def clock(self, url):
        return create_service_clock(
            StoreDatabase(url), lambda: self.wall, lambda: self.up, lambda: self.boot
        )


@pytest.fixture
def url(tmp_path):
    return f"sqlite:///{tmp_path}/service.db"


def test_a_wall_clock_that_is_set_changes_nothing_within_a_boot(url):
    machine = Machine()
    clock = machine.clock(url)
    assert clock() == pytest.approx(1_000_000.0, abs=1e-3)
    machine.advance(10)
    machine.wall += 1e9  # somebody sets it forward
    assert clock() == pytest.approx(1_000_010.0, abs=1e-3)
    assert machine.clock(url)() == clock()  # a process that starts now
    machine.wall = 0.0  # and back to 1970
    machine.advance(5)
    assert machine.clock(url)() == pytest.approx(1_000_015.0, abs=1e-3)


def test_a_new_boot_takes_the_wall_clock_but_never_goes_back(url):
    machine = Machine()
    store = ServiceStore(url, machine.clock(url))
    machine.advance(100)
    store.expire_results(result_seconds=1.0, memory_seconds=1.0)  # notes the time
    store.close()
    machine.boot, machine.up = "boot-2", 3.0
    machine.wall += 500
    assert machine.clock(url)() == pytest.approx(1_000_600.0, abs=1e-3)
    machine.boot, machine.wall = "boot-3", 100.0  # a machine whose battery is empty
    assert machine.clock(url)() == pytest.approx(1_000_100.0, abs=1e-3)


def test_a_system_without_a_boot_id_has_the_wall_clock(url):
    machine = Machine()
    machine.boot = ""
    clock = machine.clock(url)
    machine.wall += 7
    assert clock() == 1_000_007.0


def test_results_and_samplers_outlive_a_jump_of_the_wall_clock(url, monkeypatch):
    """Move the wall clock ten years forward between an answer and housekeeping: nothing expires."""
    store = ServiceStore(url)
    creation = store.accept_request(create("r"))
    waiting = store.accept_request(open_sampler("s", base="base"))
    store.finish_requests([(creation.request_id, ResultBody(b"{}", "json"))])
    wall = time.time
    monkeypatch.setattr(time, "time", lambda: wall() + 10 * 366 * 86_400)
    again = ServiceStore(url)
    for opened_store in (store, again):
        assert opened_store.expire_results(result_seconds=86_400.0, memory_seconds=3600.0) == (0, 0)
        assert abs(opened_store.read_clock() - wall()) < 60
    assert again.find_result(creation.request_id).answer == b"{}"
    assert again.find_result(waiting.request_id).owner == OWNER
    store.close()
    again.close()
