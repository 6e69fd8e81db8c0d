"""Power loss: the effects of real saves, commits and prunes, replayed with everything that was not synced at risk."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest
from tests.crash.core import KEEP, CoreAgent, NoSync, new_trainer
from tests.crash.promises import violations

from stepwell.policies import Keep
from stepwell.store import names
from stepwell.testing.ops import CountingOps, Effect, FailingOps, KillingOps, RecordingOps, WrappedOps, fails
from stepwell.testing.powerloss import CrashState, Recording, crash_states
from stepwell.tiers.base import FileOps, OsFileOps

Result = TypeVar("Result")

# The fsyncs that a promise hangs on. Without those of one kind some state must break a promise.
NEEDED = {
    "file run.json",
    "file attempt",
    "file layout",
    "file pack",
    "file manifest",
    "names beside the run",
    "names in run",
    "names in attempts",
    "names in layouts",
    "names in steps",
    "pack in its step",
    "manifest in its step",
    "mark into a condemned step",
    "manifest out of a condemned step",
    "packs out of a condemned step",
}
# No promise hangs on these: the mark counts by its name, and when it comes back it is removed once more.
HARMLESS = {"file mark", "mark out of a condemned step"}


class WithoutFsync(WrappedOps):
    """Leaves out every fsync of one kind, and keeps the kinds it met in `met`."""

    def __init__(self, inner: FileOps, left_out: str | None = None) -> None:
        super().__init__(inner)
        self.left_out = left_out
        self.met: dict[str, int] = {}
        self._last = Effect("", "")

    def effect(self, effect: Effect, do: Callable[[], Result]) -> Result:
        if effect.kind in ("fsync", "fsync_directory"):
            kind = kind_of_fsync(effect, self._last)
            self.met[kind] = self.met.get(kind, 0) + 1
            if kind == self.left_out:
                do = lambda: None  # type: ignore[assignment,return-value]  # noqa: E731
        elif effect.kind in ("mkdir", "create", "rename", "link", "unlink", "rmdir"):
            self._last = effect
        return do()


def kind_of_fsync(effect: Effect, last: Effect) -> str:
    """What an fsync makes durable, in words; `last` is the change of names before it."""
    if effect.kind == "fsync":
        return f"file {what_is(effect.path)}"
    folder, what = os.path.basename(effect.path), what_is(last.path)
    if names.parse_step_key(folder) is None:
        return f"names in {folder}" if folder in NAMED_FOLDERS else "names beside the run"
    if last.kind == "unlink" and not names.is_temporary(os.path.basename(last.path)):
        return f"{what}{'s' * (what == 'pack')} out of a condemned step"
    return f"{what} into a condemned step" if what == "mark" else f"{what} in its step"


NAMED_FOLDERS = ("run", names.ATTEMPTS, names.LAYOUTS, names.STEPS)


def what_is(path: str) -> str:
    """What a file or folder of a run is."""
    name = re.sub(r"^\.|\.tmp$", "", os.path.basename(path))
    if names.is_pack_file(name):
        return "pack"
    if names.parse_attempt_file(name) is not None:
        return "attempt"
    if names.parse_layout_file(name) is not None:
        return "layout"
    if names.parse_step_key(name) is not None:
        return "step folder"
    return {names.MANIFEST: "manifest", names.CONDEMNED: "mark", names.RUN_FILE: "run.json"}.get(name, name)


def record(parent: Path, ops: FileOps | None = None, left_out: str | None = None) -> tuple[Recording, dict[str, int]]:
    """The effects below `parent` of one attempt in `parent`/run, and how often each kind of fsync was met."""
    recorder = RecordingOps(ops or NoSync(OsFileOps()))
    without = WithoutFsync(recorder, left_out)
    trainer = new_trainer()
    CoreAgent(str(parent / "run"), without, trainer, marks_for(recorder)).play()
    os.close(trainer.slot_fd)
    return Recording(str(parent), {}, recorder.effects), without.met


def marks_for(recorder: RecordingOps) -> Callable[[str, object], None]:
    """Notes in the recording what the trainer was promised."""
    return lambda name, value: recorder.mark(str(value)) if name == "committed" else None


def broken(states: Iterator[CrashState], folder: Path, keep_last: int = KEEP.last) -> Iterator[str]:
    """Each state on which the real reader finds a promise broken, with that promise."""
    for number, state in enumerate(states):
        place = folder / f"state-{number}"
        state.materialise(str(place))
        wrong = violations(str(place / "run"), state.marks, keep_last)
        shutil.rmtree(place)
        if wrong:
            yield f"{state}\n  → {wrong}"


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder in memory if there is one: the model decides what survives. Its path is short: a socket goes there."""
    with tempfile.TemporaryDirectory(prefix="sw", dir="/dev/shm" if os.path.isdir("/dev/shm") else "/tmp") as path:
        yield Path(path)


@pytest.mark.parametrize("links", [True, False], ids=["links", "no-links"])
def test_every_state_after_a_power_loss_keeps_the_promises(folder: Path, links: bool) -> None:
    ops: FileOps = NoSync(OsFileOps())
    recording, _ = record(folder, ops if links else FailingOps(ops, fails("link", 1)))
    assert sum(effect.kind == "mark" for effect in recording.effects) == 4
    assert list(itertools.islice(broken(crash_states(recording, random_per_prefix=4), folder), 3)) == []


@pytest.mark.parametrize("kind", sorted(NEEDED))
def test_leaving_out_any_needed_fsync_is_seen(folder: Path, kind: str) -> None:
    recording, met = record(folder, left_out=kind)
    assert met[kind] > 0
    assert next(broken(crash_states(recording, random_per_prefix=0), folder), None) is not None


def test_every_fsync_is_accounted_for(folder: Path) -> None:
    _, met = record(folder)
    assert set(met) == NEEDED | HARMLESS


class Mortal(WrappedOps):
    """Lets nothing through once it is dead, so that no cleaning up happens that a killed process could not do."""

    dead = False

    def effect(self, effect: Effect, do: Callable[[], Result]) -> Result:
        if self.dead:
            raise Killed
        return do()

    def close(self, fd: int) -> None:
        if not self.dead:
            super().close(fd)

    def kill(self) -> None:
        self.dead = True
        raise Killed


class Killed(BaseException):
    """Stands for SIGKILL in a test that goes on in the same process."""


def test_a_kill_and_then_a_power_loss(folder: Path) -> None:
    """An agent is killed at each of its effects, the next one finishes, and then the power goes.

    What the first one had done without fsync is there when the second one looks, and not after the power loss.
    """
    counting = CountingOps(NoSync(OsFileOps()))
    (folder / "count").mkdir()
    trainer = new_trainer(steps=(1, 2), wide_from=2, keep=Keep(last=1))
    CoreAgent(str(folder / "count" / "run"), counting, trainer, lambda name, value: None).play()
    found: list[str] = []
    for at in range(1, counting.counts.total() + 1):
        parent = folder / str(at)
        parent.mkdir()
        root = str(parent / "run")
        recorder = RecordingOps(NoSync(OsFileOps()))
        mortal = Mortal(recorder)
        first = CoreAgent(root, KillingOps(mortal, at, "before", mortal.kill), trainer, marks_for(recorder))
        with pytest.raises(Killed):
            first.play()
        first.abandon()
        CoreAgent(root, recorder, first.trainer, marks_for(recorder)).play()
        recording = Recording(str(parent), {}, recorder.effects)
        states = (s for s in crash_states(recording, extremes_only=True) if s.last_effect.startswith("mark"))
        found += [f"killed before effect {at} of the first agent, then {text}" for text in broken(states, parent, 1)]
        shutil.rmtree(parent)
    os.close(trainer.slot_fd)
    assert found == []
