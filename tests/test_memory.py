"""Memory: a slot that does not fit is refused with the arithmetic, inside a real cgroup too; never an OOM kill."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import textwrap
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from stepwell.agent import memory
from stepwell.agent.memory import make_slot, require, room
from stepwell.errors import SlotMemoryError

MIB = 1 << 20
ROOT = Path(__file__).parents[1]


def own_group() -> Path | None:
    """This process's memory cgroup (v1), if a child of it can be made."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        folder = Path(f"/sys/fs/cgroup/memory/{path}")
        if "memory" in controllers.split(",") and os.access(folder, os.W_OK):
            return folder
    return None


@pytest.fixture
def small_group() -> Iterator[Path]:
    parent = own_group()
    if parent is None:
        pytest.skip("no writable memory cgroup here")
    folder = parent / f"stepwell-{uuid.uuid4().hex[:8]}"
    folder.mkdir()
    (folder / "memory.limit_in_bytes").write_text(str(400 * MIB))
    yield folder
    for pid in (folder / "tasks").read_text().split():
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            (parent / "tasks").write_text(pid)
    folder.rmdir()


def test_case_35_too_large_a_state_in_a_container_is_refused_with_the_arithmetic(run: Path, small_group: Path) -> None:
    script = """
        import os, sys
        sys.path.insert(0, sys.argv[3])
        open(sys.argv[2] + "/cgroup.procs", "w").write(str(os.getpid()))
        import numpy as np, stepwell
        state = {"big": np.zeros(30 * 1024 * 1024), "small": np.ones(10)}   # 240 MiB, the slot does not fit beside it
        state["big"][:] = 1
        with stepwell.Checkpointer(sys.argv[1], slots=2) as ckpt:
            save = ckpt.save(1, state)
            print("skipped", save.skipped, save.reason)
            small = ckpt.save(2, {"small": np.ones(10)})
            small.wait()
            print("small", small.committed)
        try:
            with stepwell.Checkpointer(sys.argv[1], on_error="raise", fresh=True) as ckpt:
                ckpt.save(1, state)
        except MemoryError as error:
            print("raised", type(error).__name__)
    """
    command = [sys.executable, "-c", textwrap.dedent(script), str(run), str(small_group), str(ROOT)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "skipped True" in ended.stdout and "headroom" in ended.stdout and "available" in ended.stdout
    assert "small True" in ended.stdout, "training goes on and the next save that fits works"
    assert "raised SlotMemoryError" in ended.stdout


def test_make_slot_leaves_nothing_behind_when_it_is_refused() -> None:
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(SlotMemoryError, match="available"):
        make_slot(1 << 50, touch=True)
    assert set(os.listdir("/proc/self/fd")) == before


def test_case_7_a_tiny_dev_shm_does_not_matter() -> None:
    """Slots are memfds: they are not files of /dev/shm and know no limit of it."""
    fd = make_slot(8 * MIB, touch=True)
    try:
        assert os.readlink(f"/proc/self/fd/{fd}").startswith("/memfd:stepwell-slot")
        assert os.fstat(fd).st_blocks * 512 == 8 * MIB, "touched pages are really taken"
    finally:
        os.close(fd)


@pytest.mark.parametrize(("version", "files"), [
    (1, ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")),
    (2, ("memory.max", "memory.current", "inactive_file")),
])  # fmt: skip
def test_the_tightest_group_of_the_hierarchy_decides(tmp_path: Path, version: int, files: tuple[str, str, str]) -> None:
    """A fake /proc and /sys/fs/cgroup: the parent is tighter than the group itself; droppable cache counts as free."""
    proc, base = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text("MemTotal: 100000000 kB\nMemAvailable: 90000000 kB\n")
    controllers = "memory" if version == 1 else ""
    (proc / "self/cgroup").write_text(f"4:{controllers}:/job/task\n")
    top = base / "memory" if version == 1 else base
    for folder, limit, usage, cache in (
        (top / "job", 1000 * MIB, 700 * MIB, 100 * MIB),
        (top / "job/task", 2000 * MIB, 0, 0),
    ):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / files[0]).write_text(str(limit))
        (folder / files[1]).write_text(str(usage))
        (folder / "memory.stat").write_text(f"{files[2]} {cache}\n")
    found = room(str(proc), str(base))
    assert found.limit_bytes == 1000 * MIB and found.available_bytes == 400 * MIB
    assert str(top / "job") in found.source


def test_require_shows_the_sum() -> None:
    with pytest.raises(SlotMemoryError) as caught:
        require(1 << 50, "a slot")
    text = str(caught.value)
    assert "PB" in text or "TB" in text
    assert "headroom" in text and "available of" in text and "what to do" in text


def test_a_limit_on_files_holds_for_slots_too_and_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory.resource, "getrlimit", lambda which: (4096, 4096))
    with pytest.raises(SlotMemoryError, match="ulimit -f"):
        make_slot(8192, touch=False)
    os.close(make_slot(4096, touch=True))
