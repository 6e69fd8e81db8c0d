"""Clocks, CPU, memory, the heartbeat, the disk: what is read from the machine, and how."""

from __future__ import annotations

import json
import mmap
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
_BLOCK_BYTES = 8 << 20


def process_tree(pid: int) -> list[int]:
    """`pid` and all its descendants; those that end meanwhile are left out."""
    found, queue = [], [pid]
    while queue:
        current = queue.pop()
        found.append(current)
        for path in Path(f"/proc/{current}/task").glob("*/children"):
            try:
                queue.extend(int(child) for child in path.read_text().split())
            except OSError:
                continue
    return found


@dataclass(frozen=True)
class Cpu:
    """CPU seconds used so far, user and system; reaped children count with their parent."""

    tree_seconds: float
    agent_seconds: float


def cpu_used(pid: int) -> Cpu:
    """The CPU of a process tree, and of the Stepwell agents in it."""
    tree = agent = 0.0
    for member in process_tree(pid):
        try:
            fields = Path(f"/proc/{member}/stat").read_text().rpartition(")")[2].split()
            command = Path(f"/proc/{member}/cmdline").read_bytes()
        except OSError:
            continue
        seconds = sum(int(field) for field in fields[11:15]) / _TICKS_PER_SECOND
        tree += seconds
        if b"stepwell.agent" in command:
            agent += seconds
    return Cpu(tree, agent)


def _kibibytes(path: str, key: str) -> int:
    for line in Path(path).read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1])
    return 0


def shared_bytes() -> int:
    """Shared memory of the whole machine: memfds, /dev/shm, tmpfs. Each page counts once, whoever maps it."""
    return _kibibytes("/proc/meminfo", "Shmem:") * 1024


def private_bytes(pids: list[int]) -> int:
    """Anonymous memory of some processes. Program text and libraries are not in it."""
    total = 0
    for pid in pids:
        try:
            total += _kibibytes(f"/proc/{pid}/status", "RssAnon:") * 1024
        except OSError:
            continue
    return total


class MemoryPeak:
    """Watches the memory of a process tree, above what it had when the watch began.

    Private memory is the tree's; shared memory is the machine's, so nothing else may use any meanwhile. RSS would
    count a slot twice that trainer and agent both map; PSS walks the page tables of the process being measured.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._private_before, self._shared_before = private_bytes(process_tree(pid)), shared_bytes()
        self._peak_bytes = self._shared_peak_bytes = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> MemoryPeak:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        turn, tree = 0, [self._pid]
        while not self._stop.wait(0.02):
            if turn % 10 == 0:
                tree = process_tree(self._pid)
            turn += 1
            shared = shared_bytes() - self._shared_before
            private = private_bytes(tree) - self._private_before
            self._peak_bytes = max(self._peak_bytes, private + shared)
            self._shared_peak_bytes = max(self._shared_peak_bytes, shared)

    def figures(self) -> dict[str, float]:
        """The peaks so far."""
        return {"memory_peak_bytes": self._peak_bytes, "shared_memory_peak_bytes": self._shared_peak_bytes}


class Heartbeat:
    """A thread that sleeps 1 ms at a time and keeps the worst lateness: what other threads of a trainer would feel."""

    _PERIOD_SECONDS = 0.001

    def __init__(self) -> None:
        self.cpu_seconds = 0.0
        self._worst_seconds = 0.0
        self._last = time.perf_counter()
        self._thread = threading.Thread(target=self._beat, daemon=True)
        self._thread.start()

    def _beat(self) -> None:
        while True:
            time.sleep(self._PERIOD_SECONDS)
            now = time.perf_counter()
            self._worst_seconds = max(self._worst_seconds, now - self._last - self._PERIOD_SECONDS)
            self._last = now
            self.cpu_seconds = time.thread_time()

    def restart(self) -> None:
        self._worst_seconds = 0.0

    def worst_seconds(self) -> float:
        """The worst lateness since `restart`, the beat that is due right now included."""
        return max(self._worst_seconds, time.perf_counter() - self._last - self._PERIOD_SECONDS)


def fsync_path(path: str) -> None:
    """Make a file, or the names in a directory, durable."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def files_below(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.is_file())


def drop_caches(folder: Path) -> str:
    """Take the files of `folder` out of the page cache, and say how it was done."""
    os.sync()
    for path in files_below(folder):
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3")
    except OSError:
        return "posix_fadvise"
    return "posix_fadvise and drop_caches"


def fill_caches(folder: Path) -> None:
    """Read every file of `folder` into the page cache."""
    buffer = bytearray(_BLOCK_BYTES)
    for path in files_below(folder):
        with open(path, "rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def empty(folder: Path) -> None:
    """Remove what is in `folder` and leave nothing to be written, so that nobody pays for another's dirty pages."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    os.sync()


def touch_memory() -> None:
    """Touch most of the free memory once.

    A virtual machine gets its memory from the host at first touch, which is slow; without this the contestants of the
    first round would pay for it.
    """
    size = _kibibytes("/proc/meminfo", "MemAvailable:") * 1024 * 8 // 10
    with mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory.madvise(mmap.MADV_HUGEPAGE)
        for offset in range(0, size, mmap.PAGESIZE):
            memory[offset] = 1


def fio_bytes_per_second(file: Path, direction: str, size_bytes: int) -> float:
    """What `fio` reaches with O_DIRECT blocks of 8 MiB, four in flight, fsync at the end. `direction`: write, read.

    What is read is there already, and stays as it is.
    """
    size = size_bytes // _BLOCK_BYTES * _BLOCK_BYTES
    command = ["fio", "--name=ceiling", f"--filename={file}", f"--rw={direction}", f"--size={size}", "--bs=8M"]
    command += ["--direct=1", "--ioengine=libaio", "--iodepth=4", "--fallocate=none", "--output-format=json"]
    command.append("--readonly" if direction == "read" else "--end_fsync=1")
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    job = json.loads(output[output.index("{") :])["jobs"][0]
    return float(size / (job["job_runtime"] / 1000))
