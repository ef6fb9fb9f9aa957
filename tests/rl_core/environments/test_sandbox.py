"""Attacks on the sandbox of child processes, from within."""

from __future__ import annotations

import os
import socket
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from rl_core.environments import subprocess_host
from rl_core.environments.subprocess_host import ChildFailed, ChildPool, ChildTimeout, probe_sandbox

SCRIPT = """
import ctypes, json, os, resource, signal, socket, subprocess, sys, time
state = {"requests": 0}

def start(setup): pass

def tried(function, *arguments):
    try:
        return repr(function(*arguments))[:300]
    except BaseException as error:
        return type(error).__name__

def read(path):
    with open(path, "rb") as file: return file.read(100)

def write(path):
    with open(path, "w") as file: file.write("x")
    return "written"

def connect(family, kind, place):
    with socket.socket(family, kind) as one:
        one.settimeout(5)
        one.connect(place)
        one.send(b"hello")
        return "sent"

def fork_bomb():
    children = 0
    while children < 5000:
        try:
            if os.fork() == 0:
                time.sleep(60)
                os._exit(0)
        except OSError:
            break
        children += 1
    return children

def fill(size):
    written = files = 0
    try:
        while written < 2**31:
            with open(f"fill-{files}", "wb") as file:
                for _ in range(size // 2**20):
                    file.write(bytes(2**20)); file.flush(); written += 2**20
            files += 1
    except OSError: pass
    return written

def one_file():
    with open("one", "wb", buffering=0) as file:
        try:
            for _ in range(200): file.write(bytes(2**20))
        except OSError: pass
        return file.tell()

def detached(token):
    code = "import os, sys, time; os.setsid(); time.sleep(600)"
    for _ in range(3): subprocess.Popen([sys.executable, "-S", "-c", code, token], start_new_session=True)

def hold(number, mib):
    for _ in range(number):
        if os.fork() == 0:
            block = bytearray(mib * 2**20)
            for place in range(0, len(block), 4096): block[place] = 1
            time.sleep(60)
    time.sleep(60)

def handle(request):
    state["requests"] += 1
    what = request.pop("do")
    if what == "environment": return dict(os.environ)
    if what == "read": return [tried(read, path) for path in request["paths"]]
    if what == "write": return [tried(write, path) for path in request["paths"]]
    if what == "list": return [tried(os.listdir, path) for path in request["paths"]]
    if what == "work": return [os.getcwd(), tried(write, "mine"), tried(os.listdir, ".")]
    if what == "tcp": return tried(connect, socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", request["port"]))
    if what == "udp": return tried(connect, socket.AF_INET, socket.SOCK_DGRAM, ("127.0.0.1", request["port"]))
    if what == "unix": return tried(connect, socket.AF_UNIX, socket.SOCK_STREAM, request["path"])
    if what == "abstract": return tried(connect, socket.AF_UNIX, socket.SOCK_STREAM, "\\0" + request["name"])
    if what == "fork": return fork_bomb()
    if what == "fill": return fill(request["size"])
    if what == "one file": return one_file()
    if what == "hold": hold(request["number"], request["mib"])
    if what == "signal": return [tried(os.kill, pid, signal.SIGKILL) for pid in request["pids"]]
    if what == "ptrace":
        libc = ctypes.CDLL(None, use_errno=True)
        return [libc.ptrace(16, pid, None, None) for pid in request["pids"]]
    if what == "ignore":
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP): signal.signal(number, signal.SIG_IGN)
        detached(request["token"])
        while True: pass
    if what == "leave": detached(request["token"]); return "left"
    if what == "flood":
        for _ in range(100):
            os.write(1, b"x" * 2**20); os.write(2, b"y" * 2**20)
        return "flooded"
    if what == "long": return "x" * request["size"]
    if what == "nested":
        value = []
        for _ in range(100000): value = [value]
        return value
    if what == "status": return {line.split(":")[0]: line.split(":")[1].split() for line in open("/proc/self/status")}
    if what == "limits": return {name: resource.getrlimit(getattr(resource, name)) for name in request["names"]}
    if what == "raise limits":
        return [tried(resource.setrlimit, getattr(resource, name), (-1, -1)) for name in request["names"]]
    if what == "poison":
        globals()["handle"] = lambda request: "poisoned"
        state["requests"] = 99
        json.dumps = lambda *a, **k: "{}"
        return 1
    if what == "count": return state["requests"]
"""


@pytest.fixture(scope="module")
def missing() -> dict[str, str]:
    return probe_sandbox()


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChildPool]:
    os.environ["SANDBOX_SECRET"] = "s3cret"
    yield make_pool(tmp_path_factory.mktemp("script"))
    del os.environ["SANDBOX_SECRET"]


def make_pool(folder: Path, **options: object) -> ChildPool:
    (folder / "attack.py").write_text(SCRIPT)
    limits = {"timeout_s": 60.0, "memory_gib": 2.0, **options}
    return ChildPool(folder / "attack.py", setup={}, count=1, **limits)  # type: ignore[arg-type]


def require_parts(missing: dict[str, str], *parts: str) -> None:
    for part in parts:
        if part in missing:
            pytest.skip(f"this machine does not grant the part {part}: {missing[part]}")


def processes_named(token: str) -> list[str]:
    pids = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if token.encode() in path.read_bytes():
                pids.append(path.parent.name)
        except OSError:
            continue
    return pids


def wait_until_ended(token: str) -> bool:
    end = time.monotonic() + 20
    while processes_named(token) and time.monotonic() < end:
        time.sleep(0.05)
    return not processes_named(token)


def test_parts_that_are_missing_are_those_of_the_list(missing: dict[str, str]) -> None:
    assert set(missing) <= {"files", "network", "processes", "user", "limits"} and all(
        missing.values()
    )


def test_the_parents_variables_are_not_inherited(pool: ChildPool) -> None:
    replies = pool.request_reply({"do": "environment"})
    assert "s3cret" not in str(replies) and set(replies) <= {
        "PATH",
        "LANG",
        "LC_ALL",
        "LC_CTYPE",
        "PYTHONPATH",
        "OMP_NUM_THREADS",
        "HOME",
        "TMPDIR",
        "LOGNAME",
        "USER",
    }
    assert replies["HOME"] != os.environ.get("HOME")


def test_files_outside_are_neither_read_nor_written(
    pool: ChildPool, missing: dict[str, str], tmp_path: Path
) -> None:
    require_parts(missing, "files")
    (tmp_path / "secret").write_text("s3cret")
    home = Path.home()
    secrets = [
        str(tmp_path / "secret"),
        "/etc/shadow",
        f"/proc/{os.getpid()}/environ",
        f"/proc/{os.getpid()}/mem",
        f"/proc/{os.getpid()}/root/etc/shadow",
        "/proc/1/environ",
    ]
    assert not any(
        "s3cret" in text or text.startswith("b'root:")
        for text in pool.request_reply({"do": "read", "paths": secrets})
    )
    assert (
        pool.request_reply({"do": "list", "paths": [str(tmp_path), str(home / ".ssh"), str(home)]})[
            0
        ]
        == "FileNotFoundError"
    )
    here = Path(subprocess_host.__file__)
    marker = f"canary-{uuid.uuid4().hex}"
    places = [
        tmp_path,
        here.parent,
        Path(os.__file__).parent,
        Path("/etc"),
        Path("/tmp"),
        Path("/var/tmp"),
        home,
    ]
    pool.request_reply(
        {"do": "write", "paths": [*(str(place / marker) for place in places), str(here)]}
    )
    assert not any((place / marker).exists() for place in places) and here.stat().st_size > 1000


def test_modules_of_the_users_folder_are_imported_and_hidden_files_stay_hidden(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_module.py").write_text("VALUE = 7")
    (tmp_path / ".secret").write_text("s3cret")
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "attack").mkdir()
    script = tmp_path / "attack" / "own.py"
    script.write_text(
        "import os\n"
        "def start(setup): pass\n"
        "def handle(path):\n"
        "    import my_module\n"
        "    try: secret = open(path + '/.secret').read()\n"
        "    except OSError as error: secret = type(error).__name__\n"
        "    return my_module.VALUE, secret\n"
    )
    value, secret = ChildPool(script, setup={}, count=1, timeout_s=60.0).request_reply(
        str(tmp_path)
    )
    assert value == 7 and secret in ("FileNotFoundError", "PermissionError")


def test_its_working_folder_is_removed_with_it(tmp_path: Path) -> None:
    def left() -> set[Path]:
        return set(Path(tempfile.gettempdir()).glob("posttrain-sandbox-*"))

    before = left()
    custom_pool = make_pool(tmp_path)
    work, written, listed = custom_pool.request_reply({"do": "work"})
    assert "written" in written and "mine" in listed and len(left() - before) >= 1
    pool_folder = Path(custom_pool._live_children[0]._folder)
    del custom_pool
    assert not pool_folder.exists() and not Path(work).exists()


def test_no_server_is_reached(pool: ChildPool, missing: dict[str, str], tmp_path: Path) -> None:
    require_parts(missing, "network", "files")
    name = uuid.uuid4().hex
    with (
        socket.socket() as tcp,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp,
        socket.socket(socket.AF_UNIX) as unix,
        socket.socket(socket.AF_UNIX) as abstract,
    ):
        tcp.bind(("127.0.0.1", 0))
        udp.bind(("127.0.0.1", 0))
        unix.bind(str(tmp_path / "s"))
        os.chmod(tmp_path / "s", 0o777)
        abstract.bind("\0" + name)
        for server in (tcp, unix, abstract):
            server.listen()
        results = [
            pool.request_reply({"do": "tcp", "port": tcp.getsockname()[1]}),
            pool.request_reply({"do": "udp", "port": udp.getsockname()[1]}),
            pool.request_reply({"do": "unix", "path": str(tmp_path / "s")}),
            pool.request_reply({"do": "abstract", "name": name}),
        ]
        assert "'sent'" not in results
        for server in (tcp, udp, unix, abstract):
            server.setblocking(False)
            with pytest.raises(BlockingIOError):
                server.recv(10) if server is udp else server.accept()


def test_the_network_is_there_where_it_is_asked_for(tmp_path: Path) -> None:
    custom_pool = make_pool(tmp_path, network=True)
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        assert custom_pool.request_reply({"do": "tcp", "port": server.getsockname()[1]}) == "'sent'"


def test_forks_are_limited_and_leave_nothing(pool: ChildPool, missing: dict[str, str]) -> None:
    require_parts(missing, "user", "limits", "processes")
    assert 0 < pool.request_reply({"do": "fork"}) <= 256
    assert 0 < pool.request_reply({"do": "fork"}) <= 256, "those of the first request have ended"


def test_memory_is_limited_for_all_processes_together(tmp_path: Path) -> None:
    custom_pool = make_pool(tmp_path, memory_gib=1.0)
    with pytest.raises(ChildFailed, match="MemoryError"):
        custom_pool.request_reply({"do": "long", "size": 2**31})
    with pytest.raises(ChildFailed, match="GiB together, above memory_gib"):
        custom_pool.request_reply({"do": "hold", "number": 4, "mib": 400})
    assert custom_pool.request_reply({"do": "count"}) == 1


def test_the_disk_is_limited(pool: ChildPool, missing: dict[str, str]) -> None:
    require_parts(missing, "files", "limits")
    assert pool.request_reply({"do": "one file"}) == 64 * 2**20
    assert 0 < pool.request_reply({"do": "fill", "size": 32 * 2**20}) <= 256 * 2**20


def test_the_parent_is_neither_signalled_nor_traced(
    pool: ChildPool, missing: dict[str, str]
) -> None:
    require_parts(missing, "processes")
    pool.request_reply({"do": "count"})
    pids = [os.getpid(), os.getppid(), 1]
    assert "None" not in pool.request_reply({"do": "signal", "pids": pids[:2]})
    pool.request_reply(
        {"do": "signal", "pids": [1, -1]}
    )  # the first process of a PID namespace takes no signal from within
    assert pool.request_reply({"do": "ptrace", "pids": pids}) == [-1, -1, -1]
    assert (
        pool.request_reply({"do": "count"}) == 1 and pool._live_children[0]._process.poll() is None
    )


def test_what_ignores_signals_and_detaches_itself_is_ended(
    tmp_path: Path, missing: dict[str, str]
) -> None:
    require_parts(missing, "processes")
    token = uuid.uuid4().hex
    custom_pool = make_pool(tmp_path, timeout_s=2.0)
    with pytest.raises(ChildTimeout):
        custom_pool.request_reply({"do": "ignore", "token": token})
    assert wait_until_ended(token)
    assert custom_pool.request_reply({"do": "leave", "token": token}) == "left"
    assert wait_until_ended(token), "also where the request came to its end"


def test_floods_and_long_replies(pool: ChildPool) -> None:
    assert pool.request_reply({"do": "flood"}) == "flooded"
    with pytest.raises(ChildFailed, match=r"a reply of .* bytes; at most"):
        pool.request_reply({"do": "long", "size": 100 * 2**20})
    with pytest.raises(ChildFailed, match="RecursionError"):
        pool.request_reply({"do": "nested"})
    assert len(pool.request_reply({"do": "long", "size": 2**20})) == 2**20


def test_it_has_no_privileges_and_gets_none(pool: ChildPool, missing: dict[str, str]) -> None:
    status = pool.request_reply({"do": "status"})
    assert (
        status["NoNewPrivs"] == ["1"]
        and int(status["CapEff"][0], 16) == int(status["CapPrm"][0], 16) == 0
    )
    require_parts(missing, "user")
    assert int(status["Uid"][0]) != os.geteuid()


def test_limits_cannot_be_raised(pool: ChildPool, missing: dict[str, str]) -> None:
    require_parts(missing, "limits")
    names = ["RLIMIT_AS", "RLIMIT_CPU", "RLIMIT_FSIZE", "RLIMIT_NPROC", "RLIMIT_NOFILE"]
    limits = pool.request_reply({"do": "limits", "names": names})
    assert limits["RLIMIT_CPU"] == [61, 61] and limits["RLIMIT_AS"] == [2 * 2**30] * 2
    assert set(pool.request_reply({"do": "raise limits", "names": names})) == {"ValueError"}
    assert pool.request_reply({"do": "limits", "names": names}) == limits


def test_a_request_cannot_change_the_next(pool: ChildPool) -> None:
    pool.request_reply({"do": "count"})
    with pytest.raises(ChildFailed, match="a malformed reply"):
        pool.request_reply({"do": "poison"})
    assert pool.request_reply({"do": "count"}) == 1


def test_several_threads_ask_separate_children(tmp_path: Path) -> None:
    (tmp_path / "attack.py").write_text(SCRIPT)
    custom_pool = ChildPool(tmp_path / "attack.py", setup={}, count=3, timeout_s=60.0)
    replies: list[int] = []
    threads = [
        threading.Thread(target=lambda: replies.append(custom_pool.request_reply({"do": "count"})))
        for _ in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert replies == [1] * 6 and sys.version_info >= (3, 11)
