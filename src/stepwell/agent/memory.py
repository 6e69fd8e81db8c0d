"""How much memory is left, and slots made within it.

Filling a memfd beyond a cgroup's limit gives no error: the kernel kills somebody. So the arithmetic is done first, and
again while the pages are being taken.
"""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass

from stepwell.errors import SlotMemoryError
from stepwell.units import format_bytes

STEP_BYTES = 64 << 20
HEADROOM_BYTES_MIN = 64 << 20
HEADROOM_FRACTION = 0.02


@dataclass(frozen=True, slots=True)
class Room:
    """The tightest limit on this process: `available_bytes` until it, and where it comes from."""

    available_bytes: int
    limit_bytes: int
    source: str

    @property
    def headroom_bytes(self) -> int:
        return max(HEADROOM_BYTES_MIN, int(self.limit_bytes * HEADROOM_FRACTION))


def room(proc: str = "/proc", cgroup_root: str = "/sys/fs/cgroup") -> Room:
    """The tightest of MemAvailable and every cgroup limit (v1 and v2) from this process up to the root.

    Page cache that a cgroup can drop (inactive_file) counts as free, as the kernel itself treats it.
    """
    rooms = [_machine(proc)]
    try:
        with open(f"{proc}/self/cgroup", encoding="utf-8") as file:
            lines = file.read().splitlines()
    except OSError:
        lines = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            for base in (cgroup_root, f"{cgroup_root}/unified"):
                rooms += _up(base, path, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            rooms += _up(
                f"{cgroup_root}/memory", path, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
            )
    return min(rooms, key=lambda one: one.available_bytes - one.headroom_bytes)


def _machine(proc: str) -> Room:
    fields = {}
    with open(f"{proc}/meminfo", encoding="utf-8") as file:
        for line in file:
            name, rest = line.split(":")
            fields[name] = int(rest.split()[0]) * 1024
    return Room(fields["MemAvailable"], fields["MemTotal"], "MemAvailable of the machine")


def _up(base: str, path: str, limit_name: str, usage_name: str, cache_name: str) -> list[Room]:
    rooms = []
    parts = [part for part in path.split("/") if part and part != ".."]
    for depth in range(len(parts), -1, -1):
        folder = "/".join([base, *parts[:depth]])
        try:
            limit_text = _text(f"{folder}/{limit_name}")
            usage = int(_text(f"{folder}/{usage_name}"))
            stat = dict(line.split(" ", 1) for line in _text(f"{folder}/memory.stat").splitlines())
        except (OSError, ValueError):
            continue  # not mounted here, or the root group, which has no limit
        if limit_text == "max" or int(limit_text) >= 1 << 60:
            continue
        limit = int(limit_text)
        cached = min(usage, int(stat.get(cache_name, 0)))
        rooms.append(Room(limit - (usage - cached), limit, f"{limit_name} of {folder}"))
    return rooms


def _text(path: str) -> str:
    with open(path, encoding="utf-8") as file:
        return file.read().strip()


def require(wanted_bytes: int, purpose: str) -> None:
    """Raise `SlotMemoryError`, with the arithmetic, unless that much memory is left beside the headroom."""
    now = room()
    if wanted_bytes > now.available_bytes - now.headroom_bytes:
        raise SlotMemoryError(
            f"{purpose} does not fit into memory",
            where=now.source,
            expected=f"{format_bytes(wanted_bytes)} for the slot + {format_bytes(now.headroom_bytes)} headroom",
            found=f"{format_bytes(max(0, now.available_bytes))} available of {format_bytes(now.limit_bytes)}",
            todo="use fewer slots, raise the container's memory limit, or save a smaller state",
        )


def make_slot(size: int, *, touch: bool, name: str = "stepwell-slot") -> int:
    """A memfd of `size` bytes; with `touch` all its pages are taken now, step by step under the limit.

    Raises `SlotMemoryError` before anything is taken that could get a process killed; nothing is left behind then.
    """
    require(size, "a slot")
    largest = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if largest != resource.RLIM_INFINITY and size > largest:
        raise SlotMemoryError(
            "a slot is larger than any file may be",
            expected=f"at most {format_bytes(largest)} (ulimit -f), which holds for shared memory and for packs",
            found=format_bytes(size),
            todo="raise that limit",
        )
    fd = os.memfd_create(name, os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, size)
        if touch:
            # Writing takes pages three times faster than fallocate, which leaves them to be cleared at first use.
            zeros = memoryview(bytes(1 << 20))
            for begin in range(0, size, STEP_BYTES):
                end = min(begin + STEP_BYTES, size)
                require(end - begin, "a slot")
                for offset in range(begin, end, len(zeros)):
                    os.pwrite(fd, zeros[: min(len(zeros), end - offset)], offset)
    except BaseException:
        os.close(fd)
        raise
    return fd
