"""Pool of child processes: reuse, replacement, end; children that end with their connection."""

import os
import signal
import threading
import time

import pytest
from helpers.waiting import wait_for

from rl_core.processes.process_pool import ConnectedChild, ProcessPool


class FakeChild:
    """Child that counts its ends."""

    def __init__(self):
        self.ends = 0

    def end_process(self):
        self.ends += 1


class FakePool(ProcessPool[FakeChild]):
    """Pool of fake children, the next of which refuses its setup if `is_broken`."""

    def __init__(self, count):
        super().__init__(count)
        self.started, self.is_broken = [], False

    def _start_child(self):
        self.started.append(FakeChild())
        return self.started[-1]

    def _set_up_child(self, child):
        if self.is_broken:
            raise ValueError("refused")


def test_an_idle_child_is_reused_before_another_is_started():
    pool = FakePool(2)
    with pool.use_child() as first:
        pass
    with pool.use_child() as second:
        assert second is first
        with pool.use_child() as third:
            assert third is not first
    assert len(pool.started) == 2 and all(child.ends == 0 for child in pool.started)


def test_a_child_that_fails_is_ended_and_replaced():
    pool = FakePool(1)
    for error in (ValueError, KeyboardInterrupt):
        with pytest.raises(error), pool.use_child() as child:
            raise error
        assert child.ends == 1 and pool._live_children == []
    pool.is_broken = True
    with pytest.raises(ValueError, match="refused"), pool.use_child():
        pytest.fail("a child that refuses its setup was lent")
    assert pool.started[-1].ends == 1 and pool._live_children == []
    pool.is_broken = False
    with pool.use_child() as child:
        assert child is pool.started[3]


def test_a_request_waits_while_all_children_are_busy():
    pool, order = FakePool(1), []

    def use():
        with pool.use_child():
            order.append("second")

    thread = threading.Thread(target=use)
    with pool.use_child():
        thread.start()
        time.sleep(0.1)
        order.append("first")
    thread.join(20)
    assert order == ["first", "second"] and len(pool.started) == 1


def test_children_end_with_the_pool():
    pool = FakePool(2)
    with pool.use_child(), pool.use_child():
        pass
    children = pool.started
    pool.end_children()
    assert [child.ends for child in children] == [1, 1]
    pool = FakePool(1)
    with pool.use_child() as child:
        pass
    del pool
    assert child.ends == 1


ECHO = """
import sys, time
from rl_core.processes.process_pool import connect_to_owner
connection = connect_to_owner(int(sys.argv[1]))
while True:
    message = connection.recv_bytes()
    if message == b"sleep":
        time.sleep(600)
    connection.send_bytes(message * 2)
"""


@pytest.fixture
def echo(tmp_path, monkeypatch):
    (tmp_path / "echo_child.py").write_text(ECHO)
    monkeypatch.syspath_prepend(str(tmp_path))
    child = ConnectedChild("echo_child", {"ONE": "1"}, quiet=True)
    yield child
    child.end_process()


def test_a_connected_child_exchanges_bytes(echo):
    for message in (b"a", b"b" * 2**20):
        echo.send_bytes(message)
        assert echo.recv_bytes() == message * 2
    echo.end_process()
    assert echo.process.returncode == 0
    echo.end_process()


@pytest.mark.parametrize("message", [b"", b"large"])
def test_a_connected_child_ends_quietly_without_its_watching_thread(tmp_path, monkeypatch, message):
    (tmp_path / "slow_child.py").write_text(
        "import rl_core.processes.process_pool as pool\n"
        "pool._exit_with_owner = lambda descriptor: None\n" + ECHO.replace("* 2", "* 2**22")
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    child = ConnectedChild("slow_child", quiet=True)
    if message:  # the owner leaves while the child sends its reply
        child.send_bytes(message)
    child.end_process()
    assert child.process.returncode == 0


def test_a_connected_child_ends_in_the_middle_of_work_with_its_owner(echo):
    echo.send_bytes(b"a")
    echo.recv_bytes()
    echo.send_bytes(b"sleep")
    echo.connection.close()
    assert echo.process.wait(20) == 0


def test_a_connected_child_that_dies_is_noticed(echo):
    echo.send_bytes(b"sleep")
    os.kill(echo.process.pid, signal.SIGKILL)
    with pytest.raises((EOFError, ConnectionResetError)):
        echo.recv_bytes()
    wait_for(lambda: echo.process.poll() == -signal.SIGKILL, "its end")
    with pytest.raises(OSError):
        echo.send_bytes(b"a")
