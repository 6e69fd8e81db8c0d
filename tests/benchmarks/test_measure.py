"""What is read from the machine belongs to the process tree that is being measured."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import time
from pathlib import Path

from benchmarks import measure

BURN = "import time\nwhile time.process_time() < 0.3: pass"


def test_the_cpu_of_reaped_children_is_counted() -> None:
    before = measure.cpu_used(os.getpid())
    subprocess.run([sys.executable, "-c", BURN], check=True)
    after = measure.cpu_used(os.getpid())
    assert after.tree_seconds - before.tree_seconds >= 0.29
    assert after.agent_seconds == before.agent_seconds


def test_the_cpu_of_a_living_agent_is_told_apart() -> None:
    code = f"{BURN}\nprint(flush=True)\ninput()"
    command = [sys.executable, "-c", code, "stepwell.agent"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as agent:
        assert agent.stdout is not None
        agent.stdout.readline()
        used = measure.cpu_used(os.getpid())
        assert agent.pid in measure.process_tree(os.getpid())
        agent.communicate(b"\n")
    assert 0.29 <= used.agent_seconds <= used.tree_seconds


def test_memory_counts_private_and_shared_bytes_once() -> None:
    size = 64 << 20
    before_private, before_shared = measure.private_bytes([os.getpid()]), measure.shared_bytes()
    fd = os.memfd_create("test")
    os.ftruncate(fd, size)
    with mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as private, mmap.mmap(fd, size) as shared:
        os.close(fd)
        private[:: mmap.PAGESIZE] = shared[:: mmap.PAGESIZE] = b"x" * (size // mmap.PAGESIZE)
        private_bytes = measure.private_bytes([os.getpid()]) - before_private
        shared_bytes = measure.shared_bytes() - before_shared
    # Other processes may use shared memory meanwhile; 8 MB is room for them and for the interpreter.
    assert abs(private_bytes - size) < 8e6
    assert shared_bytes > size - 8e6


def test_the_memory_peak_keeps_the_most_of_the_tree() -> None:
    code = f"data = bytearray({64 << 20})\nprint(flush=True)\ninput()"
    with measure.MemoryPeak(os.getpid()) as memory:
        for _ in range(2):
            with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
                assert child.stdout is not None
                child.stdout.readline()
                while memory.figures()["memory_peak_bytes"] < 64 << 20:
                    time.sleep(0.01)
                child.communicate(b"\n")
    assert memory.figures()["memory_peak_bytes"] < 120e6


def test_emptying_a_folder_leaves_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "saves"
    measure.empty(folder)
    (folder / "below").mkdir()
    (folder / "below" / "file").write_bytes(b"x")
    assert [path.name for path in measure.files_below(folder)] == ["file"]
    measure.empty(folder)
    assert list(folder.iterdir()) == []
