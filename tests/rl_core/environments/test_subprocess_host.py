"""Children answer, fail, hang, die and flood; the pool continues with new ones."""

from __future__ import annotations

import contextlib
import os
import threading
import time
import uuid
from pathlib import Path

import pytest

from rl_core.environments.subprocess_host import ChildFailed, ChildPool, ChildTimeout

SCRIPT = """
import asyncio, os, subprocess, sys, time
state = {}

def start(setup):
    state["setup"] = setup
    state["count"] = 0
    state["began"] = time.time_ns()
    if setup.get("broken"):
        raise ImportError("no such package")

def handle(request):
    state["count"] += 1
    what = request["what"]
    if what == "hello": return [state["setup"], state["count"], state["began"]]
    if what == "raise": raise KeyError("cell")
    if what == "leave": raise SystemExit(3)
    if what == "cancel": raise asyncio.CancelledError("late")
    if what == "die": os._exit(7)
    if what == "print": print("noise", flush=True); os.write(1, b"more noise"); return "quiet"
    if what == "hang":
        subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)", request["token"]])
        while True: pass
    if what == "flood": return len(bytearray(8 * 2**30))
    if what == "odd": return {1, 2}
    if what == "variables": return sorted(os.environ)
    if what == "meet":  # returns once the other child has come too
        open(request["mine"], "w").close()
        while not os.path.exists(request["other"]): time.sleep(0.01)
        return "met"
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


def wait_until_ended(pid: int) -> bool:
    """Return whether a process ends, or becomes a zombie, within some seconds."""
    for _ in range(200):
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
            os.kill(pid, 0)
        except (OSError, IndexError):
            return True
        time.sleep(0.05)
    return False


def wait_until_unnamed(token: str) -> bool:
    """Return whether no process has this argument, within some seconds."""
    for _ in range(200):
        exists = False
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                exists = exists or token.encode() in path.read_bytes()
        if not exists:
            return True
        time.sleep(0.05)
    return False


def test_a_child_stays_for_the_next_request_which_sees_no_change_of_the_first(script: Path) -> None:
    pool = ChildPool(script, setup={"a": 1}, count=2, timeout_s=20)
    setup, count, began = pool.request_reply({"what": "hello"})
    assert (setup, count) == ({"a": 1}, 1)
    assert pool.request_reply({"what": "hello"}) == [{"a": 1}, 1, began]
    assert pool.request_reply({"what": "print"}) == "quiet", "what is printed is no answer"


def test_what_a_function_raises_is_an_error_and_the_child_stays(script: Path) -> None:
    pool = ChildPool(script, setup={}, count=1, timeout_s=20)
    began = pool.request_reply({"what": "hello"})[2]
    for what, message in (
        ("raise", "KeyError: 'cell'"),
        ("leave", "SystemExit: 3"),
        ("cancel", "CancelledError: late"),
        ("odd", "not JSON serializable"),
    ):
        with pytest.raises(ChildFailed, match=message):
            pool.request_reply({"what": what})
    assert pool.request_reply({"what": "hello"})[2] == began


def test_a_child_that_hangs_is_killed_with_what_it_started(script: Path) -> None:
    pool, token = ChildPool(script, setup={}, count=1, timeout_s=1.0), uuid.uuid4().hex
    first = pool.request_reply({"what": "hello"})[2]
    child = pool._live_children[0]._process.pid
    with pytest.raises(ChildTimeout, match="no answer within 1 s"):
        pool.request_reply({"what": "hang", "token": token})
    assert wait_until_ended(child) and wait_until_unnamed(token)
    assert pool.request_reply({"what": "hello"})[2] > first, "a new one"


def test_a_child_that_dies_is_replaced(script: Path) -> None:
    pool = ChildPool(script, setup={}, count=1, timeout_s=20)
    with pytest.raises(ChildFailed, match=r"died \(exit status 7\)"):
        pool.request_reply({"what": "die"})
    assert pool.request_reply({"what": "hello"})[1] == 1


def test_memory_is_limited(script: Path) -> None:
    pool = ChildPool(script, setup={}, count=1, timeout_s=20, memory_gib=1.0)
    with pytest.raises(ChildFailed, match="MemoryError"):
        pool.request_reply({"what": "flood"})
    assert pool.request_reply({"what": "hello"})[1] == 1


def test_a_child_that_cannot_start_says_why(script: Path) -> None:
    pool = ChildPool(script, setup={"broken": True}, count=1, timeout_s=20)
    for _ in range(2):
        with pytest.raises(ChildFailed, match="ImportError: no such package"):
            pool.request_reply({"what": "hello"})


def test_children_see_few_variables(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "x")
    monkeypatch.setenv("JUDGE_KEY", "y")
    pool = ChildPool(script, setup={}, count=1, timeout_s=20, variables=["JUDGE_KEY"])
    seen = pool.request_reply({"what": "variables"})
    assert "SECRET_TOKEN" not in seen and {"JUDGE_KEY", "PATH"} <= set(seen)


def test_concurrent_requests(script: Path, tmp_path: Path) -> None:
    pool = ChildPool(script, setup={}, count=2, timeout_s=20, writable=[tmp_path / "meet"])
    (tmp_path / "meet").mkdir()
    (tmp_path / "meet").chmod(0o777)  # the child is another user where the tests run as root
    files = [str(tmp_path / "meet" / "a"), str(tmp_path / "meet" / "b")]
    replies: list[str] = []

    def ask(mine: str, other: str) -> None:
        replies.append(pool.request_reply({"what": "meet", "mine": mine, "other": other}))

    threads = [threading.Thread(target=ask, args=pair) for pair in (files, files[::-1])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert replies == ["met", "met"]


def test_children_end_with_their_pool(script: Path) -> None:
    pool = ChildPool(script, setup={}, count=1, timeout_s=20)
    pool.request_reply({"what": "hello"})
    pid = pool._live_children[0]._process.pid
    del pool
    assert wait_until_ended(pid)
