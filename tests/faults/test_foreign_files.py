"""Files that are not Stepwell's are never deleted, changed, or taken for steps (cases 19, 21 and 30)."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from tests.helpers import agents_of, assert_is_step, state_of, wait_until

import stepwell

# What people and other tools leave beside checkpoints, names that look like ours among them.
FOREIGN = [
    "notes.txt",
    ".notes.tmp",
    "latest",
    "step-9",
    "checkpoint-100/model.bin",
    "steps/README",
    "steps/.hidden.tmp",
    "steps/step-10/model.bin",
    "steps/000000000001",
    "steps/000000000001-0001.backup/manifest.json",
    "steps/000000000001-0001.backup/node00000-00.safetensors",
    "steps/0000000000001-0001/manifest.json",
    "steps/000000000001-00001/node00000-00.safetensors",
    "steps/000000000001-0001/notes.txt",
    "steps/000000000001-0001/.notes.tmp",
    "steps/000000000001-0001/node00000-00.safetensors.bak",
    "steps/000000000001-0001/model.safetensors",
    "steps/000000000001-0001/pin-mine",
    "steps/000000000077-0001/notes.txt",
    "layouts/mine.safetensors",
    "layouts/.mine.safetensors.tmp",
    "attempts/notes.json",
    "attempts/.old.json.tmp",
    "telemetry/mine.jsonl",
    "run.json.orig",
]


def put_foreign_files(run: Path) -> dict[Path, str]:
    files = {run / name: f"this is {name}" for name in FOREIGN}
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return files


def train(run: Path, steps: range) -> None:
    with stepwell.Checkpointer(run, keep=stepwell.Keep(last=1), on_error="raise") as ckpt:
        ckpt.restore(state_of(0))
        for step in steps:
            ckpt.save(step, state_of(step))
    wait_until(lambda: not agents_of(run))


def test_case_19_foreign_files_stay(run: Path) -> None:
    """Through saves, prunes and the cleaning-up at the start of two more agents."""
    train(run, range(1, 2))
    files = put_foreign_files(run)
    os.utime(run / "steps" / "000000000001-0001", (0, 0))
    train(run, range(2, 5))
    train(run, range(5, 7))
    gone = [str(path.relative_to(run)) for path, text in files.items() if not path.exists() or path.read_text() != text]
    assert gone == []
    assert [step.key for step in stepwell.steps(run)] == ["000000000006-0003"], "foreign names are no steps"
    assert not (run / "steps" / "000000000001-0001" / "node00000-00.safetensors").exists(), "ours was pruned"


def test_nothing_is_deleted_through_a_link(run: Path, tmp_path: Path) -> None:
    """A link among the steps may lead anywhere; what looks like ours behind it is not."""
    train(run, range(1, 2))
    precious = tmp_path / "precious"
    precious.mkdir()
    names = ("node00000-00.safetensors", "condemned", ".manifest.json.tmp")
    for name in names:
        (precious / name).write_text("precious")
    (run / "steps" / "000000000000-0001").symlink_to(precious)
    moved = tmp_path / "moved"
    (run / "steps" / "000000000001-0001").rename(moved)
    (run / "steps" / "000000000001-0001").symlink_to(moved)
    train(run, range(2, 5))
    train(run, range(5, 7))
    assert sorted(path.name for path in precious.iterdir()) == sorted(names)
    assert (moved / "manifest.json").exists() and (moved / "node00000-00.safetensors").exists()
    assert [one.step for one in stepwell.steps(run)][-1] == 6


def test_case_21_order_is_by_step_and_not_by_time(run: Path, tmp_path: Path) -> None:
    """After a copy that turns all times around, the newest step is the newest and the oldest goes first."""
    with stepwell.Checkpointer(run, keep=stepwell.Keep(last=3)) as ckpt:
        for step in (1, 2, 3):
            ckpt.save(step, state_of(step))
    wait_until(lambda: not agents_of(run))
    copy = tmp_path / "copy"
    subprocess.run(["cp", "-r", str(run), str(copy)], check=True)
    for age, step in enumerate((1, 2, 3)):
        for path in (copy / "steps" / f"{step:012d}-0001").iterdir():
            os.utime(path, (1_000_000 - age, 1_000_000 - age))
    state = state_of(0)
    with stepwell.Checkpointer(copy, keep=stepwell.Keep(last=2)) as ckpt:
        restored = ckpt.restore(state)
        assert restored is not None and restored.step == 3
        ckpt.save(4, state_of(4))
    wait_until(lambda: not agents_of(copy))
    assert [step.step for step in stepwell.steps(copy)] == [3, 4]
    assert_is_step(state, 3)


def test_case_26_a_copy_in_progress_is_not_deleted(run: Path, tmp_path: Path) -> None:
    """A step whose packs have not all arrived is skipped, said to be incomplete, and never cleaned up."""
    with stepwell.Checkpointer(run, keep=stepwell.Keep(last=5)) as ckpt:
        for step in (1, 2, 3):
            ckpt.save(step, state_of(step))
    wait_until(lambda: not agents_of(run))
    pack = run / "steps" / "000000000002-0001" / "node00000-00.safetensors"
    data = pack.read_bytes()
    pack.write_bytes(data[:5000])
    train(run, range(4, 7))
    assert pack.read_bytes() == data[:5000]
    pack.write_bytes(data)
    assert_is_step(stepwell.load(run, 2), 2)


def test_case_30_a_prune_that_fails_does_not_disturb_training(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPWELL_FAULT", "fail:rmdir:ENOTEMPTY;fail:unlink:EBUSY:20:10")
    with stepwell.Checkpointer(run, keep=stepwell.Keep(last=1), on_error="raise") as ckpt:
        saves = [ckpt.save(step, state_of(step)).wait(timeout=60) for step in range(1, 8)]
    assert all(save.committed for save in saves)
    assert_is_step(stepwell.load(run), 7)
