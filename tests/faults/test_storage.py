"""Storage that refuses: full at any byte, I/O errors at any effect, read-only, without links, without O_DIRECT."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.crash.core import CoreAgent, NoSync, new_trainer
from tests.crash.promises import leftovers, violations
from tests.helpers import agents_of, wait_until

import stepwell
from stepwell.agent import client, persister
from stepwell.agent import protocol as p
from stepwell.errors import AgentError, PersistError, StepwellError
from stepwell.restore import catalogue as catalogues
from stepwell.testing.ops import CountingOps, Effect, FailingOps, FullDiskOps, RecordingOps, fails, os_error, read_only
from stepwell.testing.powerloss import Recording, crash_states
from stepwell.tiers.base import FileOps, OsFileOps

ENOUGH = 1 << 30


class TolerantAgent(CoreAgent):
    """Keeps what the agent refused."""

    def __init__(self, root: str, ops: FileOps) -> None:
        self.said: list[p.Failed | p.Refused] = []
        self.keys: list[str] = []
        super().__init__(root, ops, new_trainer(), self._hear)

    def refused(self, message: p.Failed | p.Refused) -> None:
        self.said.append(message)

    def _hear(self, name: str, value: object) -> None:
        if name == "committed":
            self.keys.append(str(value))

    def leave(self) -> None:
        self.abandon()
        os.close(self.trainer.slot_fd)


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder in memory if there is one; its path is short, since a socket goes there."""
    with tempfile.TemporaryDirectory(prefix="sw", dir="/dev/shm" if os.path.isdir("/dev/shm") else "/tmp") as path:
        yield Path(path)


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retries without waiting in between, and without a line in the log for each of some hundred."""
    monkeypatch.setattr(persister.log, "disabled", True)
    monkeypatch.setattr(persister, "RETRY_SECONDS", (0.0, 0.0))


def bytes_of_a_save(folder: Path) -> int:
    ops = FullDiskOps(NoSync(OsFileOps()), ENOUGH)
    agent = TolerantAgent(str(folder / "measured"), ops)
    agent.start()
    before = ops.bytes_left
    agent.save(1)
    agent.leave()
    return before - ops.bytes_left


@pytest.mark.usefixtures("hurried")
def test_disk_full_at_any_byte(folder: Path) -> None:
    """Case 1: the save fails with its reason and leaves nothing; once there is room again the next one works."""
    total = bytes_of_a_save(folder)
    assert total > 20_000
    # Timings have a digit more or less each time: nearer to the end a save might just fit.
    borders = {0, 1, total - 200, total - 4096, 4096, 4095, 16384, 20480}
    for bytes_left in sorted({*range(0, total - 200, 701), *borders}):
        root = str(folder / str(bytes_left))
        ops = FullDiskOps(NoSync(OsFileOps()), ENOUGH)
        agent = TolerantAgent(root, ops)
        agent.start()
        ops.bytes_left = bytes_left
        agent.save(1)
        (failed,) = agent.said
        assert isinstance(failed, p.Failed), bytes_left
        assert failed.error.kind == "PersistError" and failed.errno == errno.ENOSPC
        assert failed.error.todo is not None and "free at least" in failed.error.todo
        assert agent.keys == [] and violations(root, []) == []
        assert [name for name in leftovers(root) if name.endswith(".tmp")] == []
        ops.bytes_left = ENOUGH
        agent.save(2)
        assert agent.keys == ["000000000002-0001"] and violations(root, agent.keys) == []
        agent.leave()
        shutil.rmtree(root)


def test_a_disk_with_room_for_one_save_is_not_full(folder: Path) -> None:
    total = bytes_of_a_save(folder)
    ops = FullDiskOps(NoSync(OsFileOps()), ENOUGH)
    agent = TolerantAgent(str(folder / "run"), ops)
    agent.start()
    ops.bytes_left = total + 100  # the timings in manifest and telemetry have a digit more or less each time
    agent.save(1)
    assert agent.said == [] and agent.keys == ["000000000001-0001"]
    agent.leave()


class NthEffect:
    """A rule: the n-th effect of all fails once."""

    def __init__(self, at: int, code: int) -> None:
        self.at, self.code, self.count = at, code, 0
        self.struck: Effect | None = None

    def __call__(self, effect: Effect) -> OSError | None:
        self.count += 1
        if self.count != self.at:
            return None
        self.struck = effect
        return os_error(self.code, effect.path)


@pytest.mark.usefixtures("hurried")
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC], ids=["EIO", "ENOSPC"])
def test_one_error_at_any_effect_is_survived(folder: Path, code: int) -> None:
    """Case 25: every effect fails once; all saves are durable in the end, even if the power goes after each."""
    wrong: list[str] = []
    for at in itertools.count(1):
        parent = folder / str(at)
        parent.mkdir()
        recorder = RecordingOps(NoSync(OsFileOps()))
        rule = NthEffect(at, code)
        agent = TolerantAgent(str(parent / "run"), FailingOps(recorder, rule))
        agent.tell = lambda name, value: recorder.mark(str(value)) if name == "committed" else None  # noqa: B023
        try:
            agent.start()
        except OSError as error:  # no agent starts on such a disk; the trainer is told why and may try again
            assert error.errno == code and rule.struck is not None
            agent.leave()
            shutil.rmtree(parent)
            continue
        agent.open_attempt()
        for step in (1, 2, 3, 4):
            agent.save(step)
        agent.leave()
        if rule.struck is None:
            break
        keys = [effect.path for effect in recorder.effects if effect.kind == "mark"]
        case = f"{errno.errorcode[code]} at effect {at}, {rule.struck.kind} {os.path.basename(rule.struck.path)}"
        if len(keys) != 4:
            wrong.append(f"{case}: committed {keys}, refused {agent.said}")
        wrong += [f"{case}: {text}" for text in violations(str(parent / "run"), keys)]
        recording = Recording(str(parent), {}, recorder.effects)
        for number, state in enumerate(crash_states(recording, extremes_only=True)):
            if state.last_effect.startswith("mark"):
                place = parent / f"state-{number}"
                state.materialise(str(place))
                wrong += [f"{case}, then {state}: {text}" for text in violations(str(place / "run"), state.marks)]
        shutil.rmtree(parent)
    assert at > 100
    assert wrong == []


@pytest.mark.usefixtures("hurried")
@pytest.mark.parametrize("kind", ["mkdir", "create", "pwrite", "ftruncate", "fsync", "rename", "fsync_directory"])
def test_an_error_that_stays_is_reported_and_commits_nothing(folder: Path, kind: str) -> None:
    root = str(folder / "run")
    rule = fails(kind, errno.EIO)
    on = False
    agent = TolerantAgent(root, FailingOps(NoSync(OsFileOps()), lambda effect: rule(effect) if on else None))
    agent.start()
    agent.save(1)
    on = True
    agent.save(2)
    (failed,) = agent.said
    assert isinstance(failed, p.Failed) and failed.errno == errno.EIO
    assert "step 2" in failed.error.what
    assert violations(root, agent.keys) == []
    on = False
    agent.save(3)
    assert agent.keys[-1] == "000000000003-0001" and violations(root, agent.keys) == []
    agent.leave()


def test_a_file_system_that_turns_read_only(folder: Path) -> None:
    """As ext4 does after an error: the save fails at once, since waiting would not help."""
    on = False
    agent = TolerantAgent(
        str(folder / "run"), FailingOps(NoSync(OsFileOps()), lambda effect: read_only(effect) if on else None)
    )
    agent.start()
    agent.save(1)
    on = True
    agent.save(2)
    (failed,) = agent.said
    assert isinstance(failed, p.Failed) and failed.errno == errno.EROFS and failed.retries == 0
    assert failed.error.todo is not None and "writable" in failed.error.todo
    assert violations(str(folder / "run"), agent.keys) == []
    on = False
    agent.save(3)
    assert agent.keys[-1] == "000000000003-0001"
    agent.leave()


def test_a_failed_fsync_is_never_tried_again_on_that_file(folder: Path, hurried: None) -> None:
    """The kernel may have dropped the dirty pages: only a new file from the slot can be trusted."""
    recorder = RecordingOps(NoSync(OsFileOps()))
    agent = TolerantAgent(str(folder / "run"), FailingOps(recorder, fails_for_pack()))
    agent.start()
    agent.save(1)
    assert agent.keys == ["000000000001-0001"]
    created = [effect for effect in recorder.effects if effect.kind == "create" and "node00000" in effect.path]
    synced = [effect.file for effect in recorder.effects if effect.kind == "fsync" and "node00000" in effect.path]
    assert len(created) == 2 and synced == [created[1].file]
    agent.leave()


def fails_for_pack() -> Any:
    rule = fails("fsync", errno.EIO, count=1)
    return lambda effect: rule(effect) if "node00000" in effect.path else None


def test_effects_are_few(folder: Path) -> None:
    """A later save costs a fixed, small number of effects."""
    counting = CountingOps(NoSync(OsFileOps()))
    agent = TolerantAgent(str(folder / "run"), counting)
    agent.start()
    agent.save(1)
    before = counting.counts.copy()
    agent.save(2)
    extra = counting.counts - before
    assert extra["create"] == 2 and extra["fsync"] == 2, "one pack and one manifest"
    assert extra.total() <= 20
    agent.leave()


# ---- real agents


def state_of(step: int) -> dict[str, Any]:
    return {"weights": np.full(50_000, step, dtype=np.float32), "epoch": step}


def check(run: Path, step: int) -> None:
    loaded = stepwell.load(run, step)
    assert loaded["epoch"] == step and np.all(loaded["weights"] == step)


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of one mebibyte, where the machine allows mounting."""
    place = tmp_path / "small"
    place.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)], capture_output=True)
    if done.returncode != 0:
        pytest.skip("mounting is not allowed here")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def test_a_full_disk_fails_the_save_and_training_goes_on(mounted: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = mounted / "run"
    with stepwell.Checkpointer(run, keep=stepwell.Keep(last=1)) as ckpt:
        ckpt.save(1, state_of(1)).wait(timeout=60)
        filler = mounted / "filler"
        with pytest.raises(OSError, match="No space left"), open(filler, "wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        failed = ckpt.save(2, state_of(2)).wait(timeout=60)
        assert isinstance(failed.error, PersistError) and failed.error.errno == errno.ENOSPC
        assert failed.retries > 0 and not failed.committed and "NOT saved" in caplog.text
        assert str(run / "steps") in str(failed.error) and "free at least 200 kB" in str(failed.error)
        assert [step.step for step in ckpt.steps()] == [1]
        filler.unlink()
        assert ckpt.save(3, state_of(3)).wait(timeout=60).committed
    check(run, 3)


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How often an agent was started: once, where trying for half a minute would only let a person wait."""
    starts: list[float] = []
    spawn = client.Client._spawn

    def counting(self: client.Client, deadline: float) -> None:
        starts.append(deadline)
        spawn(self, deadline)

    monkeypatch.setattr(client.Client, "_spawn", counting)
    return starts


def test_read_only_from_the_start_is_one_clear_error(
    run: Path, monkeypatch: pytest.MonkeyPatch, starts: list[float]
) -> None:
    monkeypatch.setenv("STEPWELL_FAULT", "read-only")
    with pytest.raises(AgentError, match="Read-only") as caught:
        stepwell.Checkpointer(run)
    assert len(starts) == 1 and str(run) in str(caught.value)


def test_a_disk_that_is_full_at_the_start_is_one_clear_error(mounted: Path, starts: list[float]) -> None:
    with pytest.raises(OSError, match="No space left"), open(mounted / "filler", "wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    with pytest.raises(AgentError, match="No space left") as caught:
        stepwell.Checkpointer(mounted / "run")
    assert len(starts) == 1 and str(mounted / "run") in str(caught.value)
    (mounted / "filler").unlink()
    with stepwell.Checkpointer(mounted / "run") as ckpt:
        assert ckpt.save(1, state_of(1)).wait(timeout=60).committed


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_no_permission_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "closed").mkdir(mode=0o500)
    with pytest.raises((StepwellError, OSError), match="ermission"):
        stepwell.Checkpointer(tmp_path / "closed" / "run")


@pytest.mark.parametrize(
    ("fault", "limit"), [("no-link", "hard links"), ("no-direct", "O_DIRECT"), ("short-writes:5000", "")]
)
def test_file_systems_that_can_do_less(run: Path, monkeypatch: pytest.MonkeyPatch, fault: str, limit: str) -> None:
    """Case 27: it is said at the start, and everything works."""
    monkeypatch.setenv("STEPWELL_FAULT", fault)
    for first in (1, 4):
        with stepwell.Checkpointer(run, keep=stepwell.Keep(last=2), on_error="raise") as ckpt:
            ckpt.restore(state_of(0))
            assert any(limit in text for text in ckpt.limits) or not limit
            for step in range(first, first + 3):
                ckpt.save(step, state_of(step))
        wait_until(lambda: not agents_of(run))  # it prunes after the last commit
    assert [step.step for step in stepwell.steps(run)] == [5, 6]
    for step in (5, 6):
        check(run, step)


def test_memory_file_system(tmp_path: Path) -> None:
    """A run on tmpfs works, and the start says that nothing there survives a reboot."""
    if not os.path.isdir("/dev/shm"):
        pytest.skip("no tmpfs")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as place:
        with stepwell.Checkpointer(Path(place) / "run", on_error="raise") as ckpt:
            ckpt.save(1, state_of(1))
            assert any("survives a reboot" in text for text in ckpt.limits)
        check(Path(place) / "run", 1)


def test_short_of_descriptors(run: Path) -> None:
    """Case 8: 5 000 tensors are saved and restored with 256 descriptors, by trainer and agent alike."""
    script = f"""
import numpy as np, resource, stepwell
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
state = lambda step: {{f"tensor{{i}}": np.full(64, step, dtype=np.float32) for i in range(5000)}}
with stepwell.Checkpointer({str(run)!r}, on_error="raise") as ckpt:
    for step in (1, 2, 3):
        ckpt.save(step, state(step))
    ckpt.wait()
    live = state(0)
    assert ckpt.restore(live).step == 3
    assert all((tensor == 3).all() for tensor in live.values())
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    subprocess.run([sys.executable, "-c", script], env=environment, check=True, timeout=100)
    assert catalogues.read(run).newest is not None
