"""Where an agent of a run is met: its lock, its socket and its log, in a folder that only this user can enter."""

from __future__ import annotations

import fcntl
import os
import socket
import stat
import struct
import time
from dataclasses import dataclass

from stepwell.errors import AgentError
from stepwell.store.checksum import hex_digest

RUN_LOCK_SECONDS_MAX = 2.0
LOCK_POLL_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class Place:
    """Absolute paths; socket paths are limited to 107 bytes by the kernel."""

    lock: str
    socket: str
    log: str


def runtime_folder() -> str:
    """The user's runtime folder for Stepwell, made with mode 0700 when missing.

    Raises `AgentError` when the folder cannot be made, belongs to somebody else, or others may enter it.
    """
    base = os.environ.get("XDG_RUNTIME_DIR", "")
    candidates = [f"/tmp/stepwell-{os.getuid()}"]
    if os.path.isabs(base) and len(base) < 60:
        candidates.insert(0, os.path.join(base, "stepwell"))
    folder = next((one for one in candidates if _made(one)), None)
    if folder is None:
        raise AgentError(
            "there is no place for the agent's socket",
            expected=" or ".join(candidates),
            todo="set XDG_RUNTIME_DIR to a folder of your own",
        )
    status = os.lstat(folder)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise AgentError(
            "the runtime folder is not safe to use",
            where=folder,
            expected=f"a folder of user {os.getuid()} with mode 0700",
            found=f"owner {status.st_uid}, mode {stat.S_IMODE(status.st_mode):04o}",
            todo="remove it, or set XDG_RUNTIME_DIR to a folder of your own",
        )
    return folder


def _made(folder: str) -> bool:
    """Make a folder for this user alone, unless something is there already; False where that is not possible."""
    try:
        os.mkdir(folder, 0o700)
    except FileExistsError:
        pass
    except OSError:
        return False
    return True


def place_of(root: str) -> Place:
    """The place of the agent for this run on this node; the same for every spelling of the path."""
    name = hex_digest(os.path.realpath(root).encode("utf-8", "surrogateescape"))[:20]
    folder = runtime_folder()
    return Place(*(os.path.join(folder, f"{name}.{kind}") for kind in ("lock", "sock", "log")))


def peer_user(connection: socket.socket) -> tuple[int, int]:
    """(pid, uid) of the process at the other end, from the kernel."""
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, _ = struct.unpack("3i", data)
    return pid, uid


def bound_sending(connection: socket.socket, seconds: int) -> None:
    """Let a send to a peer that does not read fail after a while instead of blocking for ever."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", seconds, 0))


def cgroup_of(pid: int | str) -> str:
    """The cgroups of a process as the kernel prints them; empty when it cannot be read."""
    try:
        with open(f"/proc/{pid}/cgroup", encoding="utf-8") as file:
            return file.read()
    except OSError:
        return ""


def lock_within(fd: int, seconds_max: float) -> bool:
    """Take an exclusive lock on a descriptor; False when somebody else holds it for longer than that."""
    deadline = time.monotonic() + seconds_max
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
        time.sleep(LOCK_POLL_SECONDS)


def lock_run(root: str) -> int:
    """Lock the run's own folder, which is the same one by every path and for every runtime folder; returns the
    descriptor, or -1 where the file system has no such locks.

    Raises `AgentError` when another agent holds it for longer than one needs that is just ending.
    """
    fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if lock_within(fd, RUN_LOCK_SECONDS_MAX):
            return fd
    except OSError:
        os.close(fd)
        return -1
    os.close(fd)
    raise AgentError(
        "another agent serves this run, and is met elsewhere",
        where=root,
        todo="end its trainer; or share its agent: the same path of the run, the same XDG_RUNTIME_DIR",
    )
