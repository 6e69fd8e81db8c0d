"""Every file of a run damaged at every kind of place: found by verify, never returned by load or restore."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import stepwell
from stepwell.errors import DamagedError, NotARunError
from stepwell.restore import catalogue as catalogues
from stepwell.restore.verify import verify
from stepwell.store.checksum import CHUNK_BYTES

KEYS = ("000000000001-0001", "000000000002-0001")


SMALL, LARGE = 1000, 2 * CHUNK_BYTES // 8 + 1000  # elements: less than a chunk, a little more than two


def state_of(step: int, size: int = SMALL) -> dict[str, Any]:
    """One tensor of `size` float64, small ones, values; every number is the step."""
    return {
        "big": np.full(size, step, dtype=np.float64),
        "small": [np.full(5, step, dtype=np.int16), np.full((3, 3), step, dtype=np.float32)],
        "epoch": step,
        "text": "x" * 3000,
    }


def make_run(run: Path, size: int) -> Path:
    with stepwell.Checkpointer(run) as ckpt:
        for step in (1, 2):
            ckpt.save(step, state_of(step, size)).wait()
    return run


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with two small steps, never changed."""
    return make_run(tmp_path_factory.mktemp("damage") / "run", SMALL)


@pytest.fixture
def run(pristine: Path, tmp_path: Path) -> Path:
    """A copy to be damaged."""
    shutil.copytree(pristine, tmp_path / "run")
    return tmp_path / "run"


def pack_of(run: Path, key: str = KEYS[1]) -> Path:
    return run / "steps" / key / "node00000-00.safetensors"


def files_of(run: Path) -> list[Path]:
    """All files that a promise is about (telemetry is none)."""
    return sorted(path for path in run.rglob("*") if path.is_file() and path.parent.name != "telemetry")


def findings(run: Path) -> list[str]:
    """What verify finds, or why the run cannot be read at all."""
    try:
        catalogue = catalogues.read(run)
    except (DamagedError, NotARunError) as error:
        return [str(error)]
    return [f"{finding.key}: {finding.text}" for finding in verify(catalogue, list(catalogue.steps))]


def assert_nothing_wrong_is_returned(run: Path) -> None:
    """Each step loads whole or not at all."""
    for step in (1, 2):
        try:
            loaded = stepwell.load(run, step)
        except (DamagedError, NotARunError, LookupError):
            continue
        assert loaded["epoch"] == step and loaded["text"] == "x" * 3000
        for tensor in (loaded["big"], *loaded["small"]):
            assert np.all(tensor == step)


def flip(path: Path, offset: int) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 0x04]))


def places(path: Path) -> Iterator[int]:
    """Offsets of every kind of place in a file."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        header_bytes = 8 + int.from_bytes(file.read(8), "little")
        if path.suffix != ".safetensors" or path.parent.name == "layouts":
            yield from range(0, size, 5)
            yield size - 1
            return
        text = file.read(header_bytes - 8).rstrip()
    yield from range(8)  # the length
    yield from range(8, 8 + len(text), 23)  # the JSON, with its checksums
    yield from (8 + len(text), 8 + len(text) + 1, header_bytes - 1)  # the spaces behind it
    yield from joints(path)
    yield from (size - 1500, size - 4000)  # within the values, within a tensor


def joints(path: Path) -> Iterator[int]:
    """The last byte before and the first behind the borders of header, chunks and file, and the middle of a chunk."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        header_bytes = 8 + int.from_bytes(file.read(8), "little")
    for joint in (0, CHUNK_BYTES // 2, CHUNK_BYTES, 2 * CHUNK_BYTES, size - header_bytes):
        for offset in (header_bytes + joint - 1, header_bytes + joint):
            if header_bytes <= offset < size:
                yield offset


def test_the_pristine_run_is_fine(pristine: Path) -> None:
    assert findings(pristine) == []
    assert {path.name.split(".")[-1] for path in files_of(pristine)} == {"json", "safetensors"}
    assert len(files_of(pristine)) == 7


def test_a_flipped_bit_anywhere_is_found(run: Path) -> None:
    assert missed_flips(run, files_of(run), places) == []
    assert findings(run) == [], "every flip was taken back"


def test_a_flipped_bit_in_any_chunk_is_found(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", LARGE)
    assert missed_flips(run, [pack_of(run)], joints) == []
    assert findings(run) == [], "every flip was taken back"


def missed_flips(run: Path, files: list[Path], where: Callable[[Path], Iterator[int]]) -> list[tuple[str, int]]:
    """Flip one bit at a time; (file, offset) of those that verify did not find."""
    missed = []
    for path in files:
        for offset in where(path):
            flip(path, offset)
            if not findings(run):
                missed.append((path.name, offset))
            assert_nothing_wrong_is_returned(run)
            flip(path, offset)
    return missed


@pytest.mark.parametrize("cut", ["empty", "one byte", "half", "last byte", "one more byte", "gone", "another's"])
def test_a_file_of_the_wrong_length_is_found(run: Path, cut: str) -> None:
    missed = []
    for path in files_of(run):
        before = path.read_bytes()
        changed = {
            "empty": b"",
            "one byte": before[:1],
            "half": before[: len(before) // 2],
            "last byte": before[:-1],
            "one more byte": before + b" ",
            "gone": None,
            "another's": _other(run, path),
        }[cut]
        path.unlink()
        if changed is not None:
            path.write_bytes(changed)
        # A missing manifest is a step that is absent, and a missing attempt says nothing of steps.
        may_be_silent = cut == "gone" and (path.name == "manifest.json" or path.parent.name == "attempts")
        if changed != before and not may_be_silent and not findings(run):
            missed.append(path.name)
        assert_nothing_wrong_is_returned(run)
        path.unlink(missing_ok=True)
        path.write_bytes(before)
    assert missed == []


def _other(run: Path, path: Path) -> bytes:
    """The same file of the other step, whole but in the wrong place; itself when there is no other."""
    swapped = str(path).replace(KEYS[0], "?").replace(KEYS[1], KEYS[0]).replace("?", KEYS[1])
    return Path(swapped).read_bytes()


DAMAGES: dict[str, Callable[[Path], None]] = {
    "first byte of the data": lambda run: flip(pack_of(run), 5000),
    "last byte of the values": lambda run: flip(pack_of(run), pack_of(run).stat().st_size - 1),
    "the header": lambda run: flip(pack_of(run), 100),
    "the manifest": lambda run: flip(run / "steps" / KEYS[1] / "manifest.json", 50),
    "a shorter pack": lambda run: os.truncate(pack_of(run), 6000),
    "a missing pack": lambda run: pack_of(run).unlink(),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_restore_takes_the_step_before_whole(run: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    DAMAGES[damage](run)
    state = state_of(0)
    with stepwell.Checkpointer(run) as ckpt:
        restored = ckpt.restore(state)
    assert restored is not None and restored.step == 1 and len(restored.warnings) > 0
    assert state["epoch"] == 1 and all(np.all(tensor == 1) for tensor in (state["big"], *state["small"]))
    assert "DAMAGED" in caplog.text and KEYS[1] in caplog.text


def test_both_steps_damaged_is_an_error_and_never_a_mixture(run: Path) -> None:
    for key in KEYS:
        flip(pack_of(run, key), 5000)
    state = state_of(0)
    with stepwell.Checkpointer(run) as ckpt, pytest.raises(stepwell.StepwellError) as caught:
        ckpt.restore(state)
    untouched = all(np.all(tensor == 0) for tensor in (state["big"], *state["small"]))
    assert type(caught.value).__name__ == ("DamagedError" if untouched else "StateClobbered")


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE], ids=["EIO", "ESTALE"])
def test_a_pack_that_the_disk_cannot_read_is_damage(run: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    """A bad sector is no reason to end training while an older step can be read."""
    whole = os.preadv
    bad = os.stat(pack_of(run)).st_ino

    def preadv(fd: int, *arguments: Any) -> int:
        if os.fstat(fd).st_ino == bad:
            raise OSError(code, os.strerror(code))
        return whole(fd, *arguments)

    monkeypatch.setattr(os, "preadv", preadv)
    assert any(KEYS[1] in text for text in findings(run))
    state = state_of(0)
    with stepwell.Checkpointer(run) as ckpt:
        restored = ckpt.restore(state)
    assert restored is not None and restored.step == 1 and state["epoch"] == 1
