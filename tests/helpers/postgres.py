"""A PostgreSQL server for a test: started with initdb and pg_ctl in a temporary folder, ended with it."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

PASSWORD = "pass/word"  # a character that has to be escaped in an address


def find_postgres_problem() -> str:
    """Return why no server can be started here; "" = one can."""
    if not _find_programs():
        return "PostgreSQL's initdb and pg_ctl are not on this machine"
    if os.geteuid() == 0 and (_find_user() is None or shutil.which("setpriv") is None):
        return "PostgreSQL refuses to run as root, and there is no user or no setpriv to change to"
    try:
        import psycopg2
    except ImportError:
        return "psycopg2 is not installed (the extra 'postgres')"
    assert psycopg2
    return ""


def _find_programs() -> Path | None:
    if program := shutil.which("initdb"):
        return Path(program).resolve().parent
    return next(iter(sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)), None)


def _find_user() -> pwd.struct_passwd | None:
    for name in ("postgres", "nobody"):
        with contextlib.suppress(KeyError):
            return pwd.getpwnam(name)
    return None


@contextlib.contextmanager
def postgres() -> Iterator[str]:
    """Run a server; yield `USER:PASSWORD@HOST:PORT` as part of an address."""
    programs = _find_programs()
    assert programs is not None
    folder = Path(
        tempfile.mkdtemp(prefix="posttrain-pg-")
    )  # another user cannot enter pytest's folder
    prefix: list[str] = []
    if os.geteuid() == 0:
        user = _find_user()
        assert user is not None
        os.chown(folder, user.pw_uid, user.pw_gid)
        prefix = ["setpriv", f"--reuid={user.pw_uid}", f"--regid={user.pw_gid}", "--clear-groups"]
    (folder / "password").write_text(PASSWORD)
    (folder / "password").chmod(0o644)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]

    def call(*command: str) -> None:
        environment = {"PATH": os.environ["PATH"], "LC_ALL": "C", "HOME": str(folder)}
        subprocess.run(
            [*prefix, *command],
            cwd=folder,
            env=environment,
            check=True,
            capture_output=True,
            timeout=240,
        )

    data = str(folder / "data")
    try:
        call(
            str(programs / "initdb"),
            "-D",
            data,
            "-U",
            "team",
            "--pwfile",
            str(folder / "password"),
            "-A",
            "scram-sha-256",
            "--no-sync",
            "-E",
            "UTF8",
        )
        options = f"-h 127.0.0.1 -p {port} -k {folder} -F"
        call(
            str(programs / "pg_ctl"),
            "-D",
            data,
            "-l",
            str(folder / "log"),
            "-w",
            "-t",
            "120",
            "-o",
            options,
            "start",
        )
        try:
            yield f"team:{PASSWORD.replace('/', '%2F')}@127.0.0.1:{port}"
        finally:
            call(str(programs / "pg_ctl"), "-D", data, "-m", "immediate", "-w", "stop")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
