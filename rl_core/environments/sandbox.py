"""Confinement of a child process that runs model-written code: what Linux grants without any setup.

    files      a root of its own (mount namespace): system, Python and import path, read-only, and a working folder in
               memory; and Landlock, which holds where namespaces are refused
    network    none (network namespace); without one, Landlock refuses TCP
    processes  it sees and signals only its own (PID namespace), and all of them end with it
    user       another user than the parent (as root), else a user namespace without capabilities
    limits     address space, processor time, file size, disk, processes, open files; no core dumps, no new privileges

Each part is tried; `enter` reports those that this machine does not grant. Standard library alone, loaded by its path
in the child (`subprocess_main.py`), which imports nothing of this package.
Sources: namespaces(7), landlock(7), prctl(2), mount_setattr(2), pivot_root(2).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import struct
import sys
from collections.abc import Iterable

PARTS = ("files", "network", "processes", "user", "limits")
WORK = "/sandbox"
_SYSTEM = (
    "/usr",
    "/bin",
    "/sbin",
    "/lib",
    "/lib32",
    "/lib64",
    "/opt",
    "/nix/store",
    "/etc/ld.so.cache",
    "/etc/ssl",
    "/etc/ca-certificates",
    "/etc/pki",
    "/etc/hosts",
    "/etc/resolv.conf",
    "/etc/nsswitch.conf",
    "/etc/localtime",
    "/etc/mime.types",
    "/etc/passwd",
    "/etc/group",
)
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
_FIRST_USER = 0x60000000  # above the ranges that distributions hand out; plus a random number
_FILE_MIB, _DISK_MIB, _PROCESSES, _OPEN_FILES = 64, 256, 256, 256

_NEWNS, _NEWUTS, _NEWIPC, _NEWUSER, _NEWPID, _NEWNET = (
    0x20000,
    0x4000000,
    0x8000000,
    0x10000000,
    0x20000000,
    0x40000000,
)
_MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_BIND, _MS_REC, _MS_PRIVATE, _MNT_DETACH = (
    2,
    4,
    8,
    4096,
    16384,
    1 << 18,
    2,
)
_PDEATHSIG, _SET_DUMPABLE, _NO_NEW_PRIVS = 1, 4, 38
_MOUNT_SETATTR, _LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = (
    442,
    444,
    445,
    446,
)  # equal on all machines
_AT_FDCWD, _AT_RECURSIVE, _RDONLY, _NOSUID_ATTR = -100, 0x8000, 1, 2


def _load_libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _check_syscall(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


def enter(
    folder: str,
    *,
    memory_gib: float | None,
    network: bool,
    readable: Iterable[str],
    writable: Iterable[str],
) -> dict[str, str]:
    """Confine this process and all that it starts; call it once, before other threads exist.

    Returns in a child of the caller where processes can be separated; the caller then waits for that and ends with it.
    Args:
        folder: an empty one, the working folder; on the disk only where no root can be made.
        memory_gib: address space of each process; None = no limit.
        network: leave the network as it is.
        readable: paths beside the system's and Python's that may be read; writable: those that may be written too.
    Returns: {part: reason} for each of PARTS that could not be had, with what holds in its place.
    """
    missing: dict[str, str] = {}
    if sys.platform != "linux":
        return dict.fromkeys(PARTS[:-1], f"not available on {sys.platform}") | _set_resource_limits(
            memory_gib
        )
    own = _list_user_import_folders()
    paths = _filter_existing_paths([*_SYSTEM, *_list_python_paths(own), *readable])
    extra = _filter_existing_paths(writable)
    has_namespaces = _unshare_namespaces(network, missing)
    if has_namespaces:
        _fork_and_wait()
    work = folder
    if has_namespaces:
        try:
            _mount_private_root(folder, paths, extra)
            work = WORK
        except OSError as error:
            missing["files"] = f"no root of its own ({error.strerror})"
    os.chdir(work)
    os.environ.update(HOME=work, TMPDIR=work, LOGNAME="sandbox", USER="sandbox")
    _switch_user([*paths, *extra], work, missing)
    _drop_privileges(has_namespaces)
    _apply_landlock(paths, [work, *extra], own, network, missing)
    return missing | _set_resource_limits(memory_gib)


def limit_cpu(seconds: float) -> None:
    """End this process after so much processor time, for good."""
    whole = int(seconds) + 1
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_CPU, (whole, whole))


def _filter_existing_paths(paths: Iterable[str]) -> list[str]:
    """Absolute paths that exist, with what links point to; none that lies below another."""
    found = {os.path.abspath(path) for path in paths if path and os.path.exists(path)}
    found |= {os.path.realpath(path) for path in found}
    kept: list[str] = []
    for path in sorted(found):
        if not any(path.startswith(other + os.sep) for other in kept if not os.path.islink(other)):
            kept.append(path)
    return kept


def _list_python_paths(user_folders: list[str]) -> list[str]:
    """Folders that Python imports from. Of the user's own, which may hold secrets, hidden entries are left out."""
    prefixes = [sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix]
    found = [
        *prefixes,
        os.path.dirname(sys.executable),
        os.path.dirname(os.path.realpath(sys.executable)),
    ]
    for path in (os.path.abspath(path) for path in sys.path if path):
        if path not in user_folders:
            found.append(path)
        else:
            with contextlib.suppress(OSError):
                found += [
                    os.path.join(path, name)
                    for name in os.listdir(path)
                    if not name.startswith(".")
                ]
    return found


def _list_user_import_folders() -> list[str]:
    """Folders of the user's own that Python imports from; it lists them to find modules."""
    prefixes = [sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix]
    paths = [os.path.abspath(path) for path in sys.path if path]
    installed = {
        p
        for p in paths
        if "site-packages" in p or any(p.startswith(prefix + os.sep) for prefix in prefixes)
    }
    return [path for path in paths if path not in installed and os.path.isdir(path)]


def _unshare_namespaces(network: bool, missing: dict[str, str]) -> bool:
    """Namespaces of its own; as root without a user namespace, which would keep root's files in reach."""
    flags = _NEWNS | _NEWPID | _NEWIPC | _NEWUTS | (0 if network else _NEWNET)
    uid, gid = os.geteuid(), os.getegid()
    for more in (0, _NEWUSER) if uid == 0 else (_NEWUSER,):
        try:
            _check_syscall(_load_libc().unshare(flags | more))
        except OSError as error:
            reason = error.strerror
            continue
        if more:
            for name, text in (
                ("setgroups", "deny"),
                ("uid_map", f"1000 {uid} 1"),
                ("gid_map", f"1000 {gid} 1"),
            ):
                with (
                    contextlib.suppress(OSError),
                    open(f"/proc/self/{name}", "w") as file,
                ):  # unmapped, it is nobody
                    file.write(text)
        return True
    missing |= dict.fromkeys(
        ("files", "processes", *(() if network else ("network",))), f"no namespaces ({reason})"
    )
    return False


def _fork_and_wait() -> None:
    """Go on in the first process of the new PID namespace; the caller ends with it."""
    pid = os.fork()
    if pid == 0:
        return
    for number in (0, 1):
        with contextlib.suppress(OSError):
            os.close(number)
    os.closerange(3, 256)
    _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    os._exit(code if code >= 0 else 128 - code)


def _mount_filesystem(
    source: str, target: str, kind: str | None, flags: int, options: str | None = None
) -> None:
    encoded = [None if text is None else os.fsencode(text) for text in (source, target, kind)]
    _check_syscall(
        _load_libc().mount(
            *encoded, ctypes.c_ulong(flags), None if options is None else options.encode()
        )
    )


def _mount_private_root(root: str, readable: list[str], writable: list[str]) -> None:
    """Make `root` a file system in memory with these paths in it, and the only one that there is."""
    _mount_filesystem("none", "/", None, _MS_REC | _MS_PRIVATE)
    _mount_filesystem(
        "tmpfs",
        root,
        "tmpfs",
        _MS_NOSUID | _MS_NODEV,
        f"size={_DISK_MIB}m,nr_inodes=20000,mode=755",
    )
    for path in [*readable, *_DEVICES, *writable]:
        _bind_mount(path, root + path, path in readable)
    os.makedirs(root + "/proc", exist_ok=True)
    with contextlib.suppress(
        OSError
    ):  # refused where parts of /proc are hidden, as in containers; then it is empty
        _mount_filesystem("proc", root + "/proc", "proc", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC)
    for name, target in (("fd", "/proc/self/fd"), ("shm", WORK)):
        os.symlink(target, f"{root}/dev/{name}")
    os.mkdir(root + WORK)
    os.chdir(root)
    _check_syscall(_load_libc().pivot_root(b".", b"."))
    _check_syscall(_load_libc().umount2(b".", _MNT_DETACH))
    os.chdir("/")


def _bind_mount(path: str, target: str, is_readonly: bool) -> None:
    os.makedirs(os.path.dirname(target), exist_ok=True)
    if os.path.islink(path):
        with contextlib.suppress(FileExistsError):
            os.symlink(os.readlink(path), target)
        return
    if os.path.isdir(path):
        os.makedirs(target, exist_ok=True)
    elif not os.path.lexists(target):
        open(target, "x").close()
    _mount_filesystem(path, target, None, _MS_BIND | _MS_REC)
    if is_readonly:
        attributes = struct.pack("QQQQ", _RDONLY | _NOSUID_ATTR, 0, 0, 0)
        arguments = (_AT_FDCWD, os.fsencode(target), _AT_RECURSIVE, attributes, len(attributes))
        with contextlib.suppress(OSError):  # before Linux 5.12; Landlock or the user's rights hold
            _check_syscall(_load_libc().syscall(_MOUNT_SETATTR, *arguments))


def _switch_user(needed: list[str], work: str, missing: dict[str, str]) -> None:
    """As root: become a user of no other process, if that one can read what is needed."""
    if os.geteuid() != 0:
        return
    user = _FIRST_USER + int.from_bytes(os.urandom(3), "little")
    try:
        os.chown(work, user, user)
        os.setegid(user)
        os.seteuid(user)
    except OSError as error:  # in a user namespace of one user, as of some containers
        missing["user"] = f"it stays root ({error.strerror})"
        return
    hidden = next(
        (path for path in needed if not os.access(path, os.R_OK, effective_ids=True)), None
    )
    os.seteuid(0)
    os.setegid(0)
    if hidden is not None:
        missing["user"] = f"it stays root, as {hidden} is for root alone"
        os.chown(work, 0, 0)
        return
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)


def _drop_privileges(ends_with_parent: bool) -> None:
    """No capabilities, none to be had by starting a program, and no tracing of this process by its descendants."""
    libc = _load_libc()
    libc.capset(struct.pack("Ii", 0x20080522, 0), bytes(24))
    libc.prctl(_NO_NEW_PRIVS, 1, 0, 0, 0)
    libc.prctl(_SET_DUMPABLE, 0)
    if ends_with_parent:  # last, as another user or capabilities clear it
        libc.prctl(_PDEATHSIG, signal.SIGKILL)


def _apply_landlock(
    readable: list[str],
    writable: list[str],
    listed: list[str],
    network: bool,
    missing: dict[str, str],
) -> None:
    """Refuse files outside these paths, TCP, and signals to processes outside; as far as the kernel knows them.

    `listed`: folders whose names are shown, of hidden files too where there is no root of its own.
    """
    libc = _load_libc()
    try:
        version = _check_syscall(libc.syscall(_LANDLOCK_CREATE, None, 0, 1))
        every = (1 << (13, 14, 15, 15, 16)[min(version, 5) - 1]) - 1
        tcp = 3 if version >= 4 and not network else 0
        attributes = struct.pack("QQQ", every, tcp, 3 if version >= 6 else 0)[
            : 8 if version < 4 else 16 if version < 6 else 24
        ]
        ruleset = _check_syscall(libc.syscall(_LANDLOCK_CREATE, attributes, len(attributes), 0))
        read, of_files = (
            0b1101,
            every & 0b1100000000000111,
        )  # execute, read, list; what a plain file can have
        rules = [(path, read) for path in (*readable, "/proc", "/dev")] + [
            (path, 0b1000) for path in listed
        ]
        for path, rights in [*rules, *((path, every) for path in (*writable, *_DEVICES))]:
            _allow_path(libc, ruleset, path, rights, of_files)
        _check_syscall(libc.syscall(_LANDLOCK_RESTRICT, ruleset, 0))
        os.close(ruleset)
    except OSError as error:
        if "files" in missing:
            missing["files"] += (
                f", no Landlock ({error.strerror}): it reads and writes what its user may"
            )
        return
    for part, holds, what in (
        ("files", True, "Landlock holds"),
        ("network", bool(tcp), "Landlock refuses TCP"),
        ("processes", version >= 6, "Landlock refuses signals"),
    ):
        if part in missing and holds:
            missing[part] += f"; {what}"


def _allow_path(libc: ctypes.CDLL, ruleset: int, path: str, rights: int, of_files: int) -> None:
    try:
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return
    try:
        allowed = rights if os.path.isdir(path) else rights & of_files
        _check_syscall(
            libc.syscall(_LANDLOCK_ADD, ruleset, 1, struct.pack("=Qi", allowed, place), 0)
        )
    finally:
        os.close(place)


def _set_resource_limits(memory_gib: float | None) -> dict[str, str]:
    """Limits of the system; {} or what could not be set."""
    wanted = {
        "RLIMIT_FSIZE": _FILE_MIB * 2**20,
        "RLIMIT_NPROC": _PROCESSES,
        "RLIMIT_NOFILE": _OPEN_FILES,
        "RLIMIT_CORE": 0,
    }
    if memory_gib is not None:
        wanted["RLIMIT_AS"] = int(memory_gib * 2**30)
    refused = []
    for name, value in wanted.items():
        try:
            kind = getattr(resource, name)
            hard = resource.getrlimit(kind)[1]
            value = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(kind, (value, value))
        except (AttributeError, ValueError, OSError):
            refused.append(name)
    return {"limits": f"{', '.join(refused)} cannot be set"} if refused else {}
