"""Confinement of a child process that runs model-written code: what Linux provides without any setup.

    files      a private root (mount namespace): system, Python and import path, read-only, and a working folder in
               memory; and Landlock, which still works where namespaces are refused
    network    none (network namespace); without one, Landlock refuses TCP
    processes  it sees and signals only its descendants (PID namespace), and all of them end with it
    user       another user than the parent (as root), else a user namespace without capabilities
    limits     address space, processor time, file size, disk, processes, open files; no core dumps, no new privileges

Each part is tried; `enter` reports those that this machine does not support. Standard library alone, loaded by its path
in the child (`subprocess_main.py`), which imports no module of this package.
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
_FIRST_USER = 0x60000000  # above the ranges that distributions assign; a random number is added
_FILE_MIB, _DISK_MIB, _PROCESSES, _OPEN_FILES = 64, 256, 256, 256

_NEWNS, _NEWUTS, _NEWIPC = 0x20000, 0x4000000, 0x8000000
_NEWUSER, _NEWPID, _NEWNET = 0x10000000, 0x20000000, 0x40000000
_MS_NOSUID, _MS_NODEV, _MS_NOEXEC = 2, 4, 8
_MS_BIND, _MS_REC, _MS_PRIVATE, _MNT_DETACH = 4096, 16384, 1 << 18, 2
_PDEATHSIG, _SET_DUMPABLE, _NO_NEW_PRIVS = 1, 4, 38
# System calls, with equal numbers on all architectures.
_MOUNT_SETATTR = 442
_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446
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
    listed: Iterable[str] = (),
) -> dict[str, str]:
    """Confine this process and everything it starts; call it once, before other threads exist.

    Where processes can be separated, it returns in a child of the caller; the caller waits for that child and ends with
    it.
    Args:
        folder: an empty one, the working folder; used on disk only if no private root can be made.
        memory_gib: address space of each process; None = no limit.
        network: leave the network as it is.
        readable: paths that may be read, in addition to the system's and Python's.
        writable: paths that may be read and written.
        listed: folders that may be listed; where there is no private root, with the names of hidden files.
    Returns: {part: reason} for each of PARTS that is not available, with what applies instead.
    """
    missing: dict[str, str] = {}
    if sys.platform != "linux":
        missing = dict.fromkeys(PARTS[:-1], f"not available on {sys.platform}")
        return missing | _set_resource_limits(memory_gib)
    user_folders = _list_user_import_folders()
    paths = _filter_existing_paths([*_SYSTEM, *_list_python_paths(user_folders), *readable])
    writable_paths = _filter_existing_paths(writable)
    has_namespaces = _unshare_namespaces(network, missing)
    if has_namespaces:
        _fork_and_wait()
    work = folder
    if has_namespaces:
        try:
            _mount_private_root(folder, paths, writable_paths)
            work = WORK
        except OSError as error:
            missing["files"] = f"no private root ({error.strerror})"
    os.chdir(work)
    os.environ.update(HOME=work, TMPDIR=work, LOGNAME="sandbox", USER="sandbox")
    _switch_user([*paths, *writable_paths], work, missing)
    _drop_privileges(has_namespaces)
    listed_paths = [*user_folders, *_filter_existing_paths(listed)]
    _apply_landlock(paths, [work, *writable_paths], listed_paths, network, missing)
    return missing | _set_resource_limits(memory_gib)


def limit_cpu(seconds: float) -> None:
    """Limit the processor time of this process; exceeding it kills the process."""
    limit = int(seconds) + 1
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_CPU, (limit, limit))


def _filter_existing_paths(paths: Iterable[str]) -> list[str]:
    """Return the absolute paths that exist, with link targets, and without paths below another."""
    existing = {os.path.abspath(path) for path in paths if path and os.path.exists(path)}
    existing |= {os.path.realpath(path) for path in existing}
    outermost: list[str] = []
    for path in sorted(existing):
        if not any(
            path.startswith(other + os.sep) for other in outermost if not os.path.islink(other)
        ):
            outermost.append(path)
    return outermost


def _list_python_paths(user_folders: list[str]) -> list[str]:
    """List the folders from which Python imports.

    Hidden entries of the user's folders are omitted, because they may hold secrets.
    """
    prefixes = [sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix]
    folders = [
        *prefixes,
        os.path.dirname(sys.executable),
        os.path.dirname(os.path.realpath(sys.executable)),
    ]
    for path in (os.path.abspath(path) for path in sys.path if path):
        if path not in user_folders:
            folders.append(path)
        else:
            with contextlib.suppress(OSError):
                folders += [
                    os.path.join(path, name)
                    for name in os.listdir(path)
                    if not name.startswith(".")
                ]
    return folders


def _list_user_import_folders() -> list[str]:
    """List the user's import folders, which Python must list to find modules."""
    prefixes = [sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix]
    paths = [os.path.abspath(path) for path in sys.path if path]
    installed = {
        p
        for p in paths
        if "site-packages" in p or any(p.startswith(prefix + os.sep) for prefix in prefixes)
    }
    return [path for path in paths if path not in installed and os.path.isdir(path)]


def _unshare_namespaces(network: bool, missing: dict[str, str]) -> bool:
    """Enter new namespaces.

    Root first tries without a user namespace, which would leave root's files accessible.
    """
    flags = _NEWNS | _NEWPID | _NEWIPC | _NEWUTS | (0 if network else _NEWNET)
    uid, gid = os.geteuid(), os.getegid()
    for user_flag in (0, _NEWUSER) if uid == 0 else (_NEWUSER,):
        try:
            _check_syscall(_load_libc().unshare(flags | user_flag))
        except OSError as error:
            reason = error.strerror
            continue
        if user_flag:
            for name, text in (
                ("setgroups", "deny"),
                ("uid_map", f"1000 {uid} 1"),
                ("gid_map", f"1000 {gid} 1"),
            ):
                # Without a mapping the user is nobody.
                with contextlib.suppress(OSError), open(f"/proc/self/{name}", "w") as file:
                    file.write(text)
        return True
    missing |= dict.fromkeys(
        ("files", "processes", *(() if network else ("network",))), f"no namespaces ({reason})"
    )
    return False


def _fork_and_wait() -> None:
    """Continue in the first process of the new PID namespace; the caller ends with it."""
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
    """Make `root` a file system in memory that contains these paths, and the only file system."""
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
    # Refused where parts of /proc are hidden, as in containers; then it stays empty.
    with contextlib.suppress(OSError):
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
        # Fails before Linux 5.12; then Landlock or the user's rights apply.
        with contextlib.suppress(OSError):
            _check_syscall(_load_libc().syscall(_MOUNT_SETATTR, *arguments))


def _switch_user(needed: list[str], work: str, missing: dict[str, str]) -> None:
    """Switch, as root, to a user that no other process has, if that user can read all `needed` paths."""
    if os.geteuid() != 0:
        return
    user = _FIRST_USER + int.from_bytes(os.urandom(3), "little")
    try:
        os.chown(work, user, user)
        os.setegid(user)
        os.seteuid(user)
    except OSError as error:  # in a user namespace with a single user, as in some containers
        missing["user"] = f"it stays root ({error.strerror})"
        return
    hidden = next(
        (path for path in needed if not os.access(path, os.R_OK, effective_ids=True)), None
    )
    os.seteuid(0)
    os.setegid(0)
    if hidden is not None:
        missing["user"] = f"it stays root, because only root can read {hidden}"
        os.chown(work, 0, 0)
        return
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)


def _drop_privileges(ends_with_parent: bool) -> None:
    """Drop all capabilities, refuse new ones from executed programs, and forbid descendants to trace this process."""
    libc = _load_libc()
    libc.capset(struct.pack("Ii", 0x20080522, 0), bytes(24))
    libc.prctl(_NO_NEW_PRIVS, 1, 0, 0, 0)
    libc.prctl(_SET_DUMPABLE, 0)
    if ends_with_parent:  # last, because changes of user or capabilities clear it
        libc.prctl(_PDEATHSIG, signal.SIGKILL)


def _apply_landlock(
    readable: list[str],
    writable: list[str],
    listed: list[str],
    network: bool,
    missing: dict[str, str],
) -> None:
    """Refuse files outside these paths, TCP, and signals to outside processes, as far as the kernel supports it.

    Args:
        listed: folders that may be listed, including names of hidden files if there is no private root.
    """
    libc = _load_libc()
    try:
        version = _check_syscall(libc.syscall(_LANDLOCK_CREATE, None, 0, 1))
        all_rights = (1 << (13, 14, 15, 15, 16)[min(version, 5) - 1]) - 1
        tcp = 3 if version >= 4 and not network else 0
        attributes_size = 8 if version < 4 else 16 if version < 6 else 24
        attributes = struct.pack("QQQ", all_rights, tcp, 3 if version >= 6 else 0)[:attributes_size]
        ruleset = _check_syscall(libc.syscall(_LANDLOCK_CREATE, attributes, len(attributes), 0))
        file_rights = all_rights & 0b1100000000000111  # rights that apply to regular files
        rules = [(path, 0b1101) for path in (*readable, "/proc", "/dev")]  # execute, read, list
        rules += [(path, 0b1000) for path in listed]  # list
        rules += [(path, all_rights) for path in (*writable, *_DEVICES)]
        for path, rights in rules:
            _allow_path(libc, ruleset, path, rights, file_rights)
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


def _allow_path(libc: ctypes.CDLL, ruleset: int, path: str, rights: int, file_rights: int) -> None:
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return
    try:
        allowed = rights if os.path.isdir(path) else rights & file_rights
        rule = struct.pack("=Qi", allowed, descriptor)
        _check_syscall(libc.syscall(_LANDLOCK_ADD, ruleset, 1, rule, 0))
    finally:
        os.close(descriptor)


def _set_resource_limits(memory_gib: float | None) -> dict[str, str]:
    """Set resource limits; return {} or the ones that could not be set."""
    limits = {
        "RLIMIT_FSIZE": _FILE_MIB * 2**20,
        "RLIMIT_NPROC": _PROCESSES,
        "RLIMIT_NOFILE": _OPEN_FILES,
        "RLIMIT_CORE": 0,
    }
    if memory_gib is not None:
        limits["RLIMIT_AS"] = int(memory_gib * 2**30)
    refused = []
    for name, value in limits.items():
        try:
            kind = getattr(resource, name)
            hard = resource.getrlimit(kind)[1]
            value = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(kind, (value, value))
        except (AttributeError, ValueError, OSError):
            refused.append(name)
    return {"limits": f"{', '.join(refused)} cannot be set"} if refused else {}
