"""The wrappers do what they say: each fault strikes where it should, and nowhere else."""

from __future__ import annotations

import errno
import mmap
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from stepwell.errors import UsageError
from stepwell.testing import ops as faults
from stepwell.testing.ops import (
    CountingOps,
    Effect,
    FailingOps,
    FullDiskOps,
    KillingOps,
    RecordingOps,
    ShortWritingOps,
    failpoint,
    fails,
    ops_from_environment,
    parse_faults,
    read_effects,
)
from stepwell.tiers.base import FileOps, OsFileOps
from stepwell.tiers.posix import write_all

SOURCE = str(Path(faults.__file__).parents[2])


def every_effect(ops: FileOps, root: Path, data: bytes = b"x" * 6000) -> None:
    """Each kind of effect once: 12 effects."""
    ops.mkdir(f"{root}/d")
    fd = ops.create(f"{root}/d/a")
    try:
        write_all(ops, fd, memoryview(data), 0)
        ops.ftruncate(fd, 5000)
        ops.fsync(fd)
    finally:
        ops.close(fd)
    ops.rename(f"{root}/d/a", f"{root}/d/b")
    ops.link(f"{root}/d/b", f"{root}/d/c")
    ops.unlink(f"{root}/d/b")
    ops.fsync_directory(f"{root}/d")
    log = ops.open_append(f"{root}/log")
    ops.append(log, b"line\n")
    ops.close(log)
    ops.mkdir(f"{root}/e")
    ops.rmdir(f"{root}/e")


KINDS = [
    "mkdir", "create", "pwrite", "ftruncate", "fsync", "rename", "link", "unlink", "fsync_directory", "open_append",
    "append", "mkdir", "rmdir",
]  # fmt: skip


def run_with(fault: str, root: Path, script: str = "every_effect(ops_from_environment(OsFileOps()), root)") -> int:
    """Run a script in a process of its own with the variable set; returns how it ended."""
    code = f"""
import sys
from pathlib import Path
sys.path[:0] = [{SOURCE!r}, {str(Path(__file__).parents[2])!r}]
from tests.testing.test_ops import *
root = Path({str(root)!r})
{script}
"""
    environment = {**os.environ, "STEPWELL_FAULT": fault}
    return subprocess.run([sys.executable, "-c", code], env=environment, timeout=60).returncode


def test_counting(tmp_path: Path) -> None:
    ops = CountingOps(OsFileOps())
    every_effect(ops, tmp_path)
    assert ops.counts.total() == len(KINDS)
    assert ops.counts["mkdir"] == 2 and ops.counts["pwrite"] == 1


def test_recording_keeps_effects_and_data_in_order(tmp_path: Path) -> None:
    sink = tmp_path / "sink"
    ops = RecordingOps(OsFileOps(), str(sink))
    every_effect(ops, tmp_path)
    ops.mark("done")
    assert [effect.kind for effect in ops.effects] == [*KINDS, "mark"]
    write = ops.effects[2]
    assert (write.path, write.offset, write.data) == (f"{tmp_path}/d/a", 0, b"x" * 6000)
    assert ops.effects[5] == Effect("rename", f"{tmp_path}/d/a", f"{tmp_path}/d/b")
    assert {effect.file for effect in ops.effects[1:5]} == {write.file}
    assert read_effects(str(sink)) == ops.effects
    sink.write_bytes(sink.read_bytes()[:-3])  # killed while appending
    assert read_effects(str(sink)) == ops.effects[:-1]


def test_recording_keeps_what_was_written_and_nothing_that_failed(tmp_path: Path) -> None:
    recorder = RecordingOps(FailingOps(ShortWritingOps(OsFileOps(), 4000), fails("fsync", errno.EIO)))
    with pytest.raises(OSError, match="Input/output error"):
        every_effect(recorder, tmp_path)
    writes = [effect for effect in recorder.effects if effect.kind == "pwrite"]
    assert [(write.offset, len(write.data)) for write in writes] == [(0, 4000), (4000, 2000)]
    assert recorder.effects[-1].kind == "ftruncate"


def test_the_nth_effect_fails_and_then_they_work_again(tmp_path: Path) -> None:
    ops = FailingOps(OsFileOps(), fails("mkdir", errno.EACCES, first=2, count=2))
    ops.mkdir(f"{tmp_path}/1")
    for name in "23":
        with pytest.raises(PermissionError) as caught:
            ops.mkdir(f"{tmp_path}/{name}")
        assert caught.value.filename == f"{tmp_path}/{name}"
    ops.mkdir(f"{tmp_path}/4")
    assert sorted(os.listdir(tmp_path)) == ["1", "4"]


@pytest.mark.parametrize("bytes_left", [0, 1, 4095, 5999, 6000])
def test_full_disk_takes_every_byte_that_fits(tmp_path: Path, bytes_left: int) -> None:
    ops = FullDiskOps(OsFileOps(), bytes_left)
    ops.bytes_left = max(1, bytes_left)
    fd = ops.create(f"{tmp_path}/a")
    ops.bytes_left = bytes_left
    if bytes_left < 6000:
        with pytest.raises(OSError, match="No space left"):
            write_all(ops, fd, memoryview(b"x" * 6000), 0)
        with pytest.raises(OSError, match="No space left"):
            ops.mkdir(f"{tmp_path}/d")
        ops.bytes_left = 1 << 20
        ops.mkdir(f"{tmp_path}/d")
    else:
        write_all(ops, fd, memoryview(b"x" * 6000), 0)
    ops.close(fd)
    assert os.path.getsize(f"{tmp_path}/a") == bytes_left


def test_direct_writes_stop_at_whole_blocks(tmp_path: Path) -> None:
    class Direct(OsFileOps):
        """O_DIRECT in name only, since the folder may be on tmpfs."""

        def create(self, path: str, *, direct: bool = False) -> int:
            return super().create(path)

    ops = FullDiskOps(ShortWritingOps(Direct(), 5000), 3 * 4096 + 100)
    fd = ops.create(f"{tmp_path}/a", direct=True)
    with mmap.mmap(-1, 16384) as page, memoryview(page) as view:
        assert ops.pwrite(fd, view, 0) == 4096
        with pytest.raises(OSError, match="No space left"):
            write_all(ops, fd, view, 0)
    ops.close(fd)
    assert os.path.getsize(f"{tmp_path}/a") == 2 * 4096


@pytest.mark.parametrize("at", range(1, len(KINDS) + 1))
def test_killing_strikes_at_each_effect(tmp_path: Path, at: int) -> None:
    """In this process, with a stand-in for SIGKILL: the effects before are done, and none after."""

    class Killed(BaseException):
        pass

    def kill() -> None:
        raise Killed

    for when, done in (("before", at - 1), ("after", at), ("torn", at - 1)):
        root = tmp_path / when
        root.mkdir()
        counting = CountingOps(OsFileOps())
        with pytest.raises(Killed):
            every_effect(KillingOps(counting, at, when, kill), root)
        torn_write = when == "torn" and KINDS[at - 1] == "pwrite"
        assert counting.counts.total() == done + torn_write
        if torn_write:
            assert os.path.getsize(root / "d/a") == 3000


def test_torn_writes_of_many_blocks_tear_at_a_block(tmp_path: Path) -> None:
    assert run_with("kill:3:torn", tmp_path, "every_effect(ops_from_environment(OsFileOps()), root, b'x' * 30000)") < 0
    assert os.path.getsize(tmp_path / "d/a") == 12288


@pytest.mark.parametrize(
    ("fault", "left"), [("kill:6:before", ["a"]), ("kill:6:after", ["b"]), ("kill:8", ["b", "c"]), ("kill:99", ["c"])]
)
def test_a_process_is_killed_by_its_environment(tmp_path: Path, fault: str, left: list[str]) -> None:
    assert run_with(fault, tmp_path) == (0 if fault == "kill:99" else -signal.SIGKILL)
    assert sorted(os.listdir(tmp_path / "d")) == left


def test_once_lets_the_next_process_pass(tmp_path: Path) -> None:
    fault = f"kill:1;once:{tmp_path}/struck"
    assert run_with(fault, tmp_path) == -signal.SIGKILL
    assert run_with(fault, tmp_path) == 0


def test_both_takes_parent_or_children_along(tmp_path: Path) -> None:
    """The child is killed at its first effect and takes the process that started it along."""
    script = "subprocess.run([sys.executable, '-c', %r])"
    child = f"import sys; sys.path.insert(0, {SOURCE!r})\nfrom stepwell.testing.ops import failpoint; failpoint('x')"
    assert run_with("kill-at:x:1;both", tmp_path, script % child) == -signal.SIGKILL
    script = """
sleeper = "import time; print(flush=True); time.sleep(60)"
child = subprocess.Popen([sys.executable, "-c", sleeper], stdout=subprocess.PIPE)
(root / "pid").write_text(str(child.pid))
child.stdout.readline()
failpoint("y")
"""
    assert run_with("kill-at:y:1;both", tmp_path, script) == -signal.SIGKILL
    pid = int((tmp_path / "pid").read_text())
    with pytest.raises(ProcessLookupError):
        for _ in range(1_000_000):  # until init has reaped it; pytest's timeout bounds this
            if Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z":
                raise ProcessLookupError
            os.kill(pid, 0)


def test_failpoints_count_by_name(tmp_path: Path) -> None:
    script = """
for number in range(1, 4):
    failpoint("other")
    (root / str(number)).touch()
    failpoint("here")
"""
    fault = f"trace:{tmp_path}/trace;kill-at:here:2"
    assert run_with(fault, tmp_path, script) == -signal.SIGKILL
    assert (tmp_path / "2").exists() and not (tmp_path / "3").exists()
    assert (tmp_path / "trace").read_text().split("\n")[:2] == ["message other", "message here"]


def test_no_fault_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("STEPWELL_FAULT", raising=False)
    inner = OsFileOps()
    assert ops_from_environment(inner) is inner
    before = dict(faults._reached)
    failpoint("anything")
    assert dict(faults._reached) == before


@pytest.mark.parametrize(
    ("fault", "raises"),
    [
        ("enospc:100", "No space left"),
        ("eio-fsync:1", "Input/output error"),
        ("read-only", "Read-only"),
        ("no-link", "not permitted"),
        ("fail:rename:EIO", "Input/output error"),
        ("fail:mkdir:EACCES:2:1", "Permission denied"),
    ],
)
def test_each_error_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str, raises: str
) -> None:
    monkeypatch.setenv("STEPWELL_FAULT", fault)
    with pytest.raises(OSError, match=raises):
        every_effect(ops_from_environment(OsFileOps()), tmp_path)


def test_no_direct_and_short_writes_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPWELL_FAULT", f"no-direct;short-writes:1000;slow:0;record:{tmp_path}/effects")
    ops = ops_from_environment(OsFileOps())
    with pytest.raises(OSError, match="Invalid argument"):
        ops.create(f"{tmp_path}/direct", direct=True)
    every_effect(ops, tmp_path)
    writes = [effect for effect in read_effects(f"{tmp_path}/effects") if effect.kind == "pwrite"]
    assert [len(write.data) for write in writes] == [1000] * 6


@pytest.mark.parametrize("text", ["kil:3", "kill", "kill:1:2:3", "enospc", "both:1", "kill-at:x", "once:", "record"])
def test_a_fault_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="not a fault"):
        parse_faults(text)


def test_wrappers_compose(tmp_path: Path) -> None:
    counting = CountingOps(OsFileOps())
    stack: Callable[[], FileOps] = lambda: FailingOps(ShortWritingOps(counting, 512), fails("fsync", errno.EIO))  # noqa: E731
    with pytest.raises(OSError, match="Input/output"):
        every_effect(stack(), tmp_path)
    assert counting.counts["pwrite"] == 12 and counting.counts["fsync"] == 0
