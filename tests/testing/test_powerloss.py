"""The power-loss model on toy protocols: a correct one survives everything, one without any single fsync does not."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from stepwell.errors import UsageError
from stepwell.testing.ops import Effect, RecordingOps
from stepwell.testing.powerloss import CrashState, Recording, crash_states, read_tree
from stepwell.tiers.base import FileOps, OsFileOps

CONTENT = bytes(range(256)) * 40  # two whole blocks and a part


class WithoutFsync:
    """`FileOps` that leaves out the n-th fsync of either kind."""

    def __init__(self, inner: FileOps, left_out: int) -> None:
        self.inner, self.left_out, self.count = inner, left_out, 0

    def __getattr__(self, name: str) -> Callable[..., object]:
        method: Callable[..., object] = getattr(self.inner, name)
        if name not in ("fsync", "fsync_directory"):
            return method

        def maybe(*arguments: object) -> object:
            self.count += 1
            return None if self.count == self.left_out else method(*arguments)

        return maybe


def write_rename(ops: FileOps, root: str) -> None:
    """The protocol of a pack: a folder, a temporary file, its name."""
    folder = os.path.join(root, "step")
    ops.mkdir(folder)
    ops.fsync_directory(root)
    fd = ops.create(os.path.join(folder, "tmp"))
    ops.pwrite(fd, memoryview(CONTENT.ljust(12288, b"\0")), 0)
    ops.ftruncate(fd, len(CONTENT))
    ops.fsync(fd)
    ops.close(fd)
    ops.rename(os.path.join(folder, "tmp"), os.path.join(folder, "name"))
    ops.fsync_directory(folder)


def write_link(ops: FileOps, root: str) -> None:
    """The protocol of a manifest: a temporary file, a second name, and the first one taken away."""
    folder = os.path.join(root, "step")
    ops.mkdir(folder)
    ops.fsync_directory(root)
    fd = ops.create(os.path.join(folder, "tmp"))
    ops.pwrite(fd, memoryview(CONTENT)[:5000], 0)
    ops.pwrite(fd, memoryview(CONTENT)[5000:], 5000)
    ops.fsync(fd)
    ops.close(fd)
    ops.link(os.path.join(folder, "tmp"), os.path.join(folder, "name"))
    ops.unlink(os.path.join(folder, "tmp"))
    ops.fsync_directory(folder)


Protocol = Callable[[FileOps, str], None]


def record(root: str, protocol: Protocol, left_out: int = 0) -> Recording:
    start = read_tree(root)
    recorder = RecordingOps(OsFileOps())
    protocol(WithoutFsync(recorder, left_out), root)
    recorder.mark("done")
    return Recording(root, start, recorder.effects)


def violation(state: CrashState) -> str | None:
    """What is wrong with a state: the name must hold the whole content or not be there, and be there once done."""
    found = state.tree.get("step/name")
    if found is None:
        return "promised and lost" if "done" in state.marks else None
    return None if found == CONTENT else "torn"


@pytest.mark.parametrize("protocol", [write_rename, write_link])
def test_a_correct_protocol_survives_every_state(tmp_path: os.PathLike[str], protocol: Protocol) -> None:
    states = list(crash_states(record(os.fspath(tmp_path), protocol), random_per_prefix=20))
    assert [str(state) for state in states if violation(state)] == []
    outcomes = {(state.tree.get("step/name") == CONTENT, bool(state.marks)) for state in states}
    assert outcomes == {(False, False), (True, False), (True, True)}


@pytest.mark.parametrize("left_out", [1, 2, 3])
@pytest.mark.parametrize("protocol", [write_rename, write_link])
def test_every_missing_fsync_is_seen(tmp_path: os.PathLike[str], protocol: Protocol, left_out: int) -> None:
    states = crash_states(record(os.fspath(tmp_path), protocol, left_out), random_per_prefix=0)
    found = {violation(state) for state in states} - {None}
    expected = {1: {"promised and lost"}, 2: {"torn"}, 3: {"promised and lost"}}[left_out]
    assert found >= expected


def test_missing_fsync_of_the_file_shows_each_way_of_tearing(tmp_path: os.PathLike[str]) -> None:
    states = crash_states(record(os.fspath(tmp_path), write_rename, left_out=2))
    torn = {state.tree["step/name"] or b"" for state in states if "step/name" in state.tree}
    assert b"" in torn  # nothing arrived but the name
    assert len(CONTENT) in map(len, torn) and 12288 in map(len, torn)  # the size before and after ftruncate
    assert CONTENT[:4096] + bytes(4096) + CONTENT[8192:] in torn  # the block in the middle is missing


def test_an_old_block_may_stay_beside_a_new_one(tmp_path: os.PathLike[str]) -> None:
    def overwrite(ops: FileOps, root: str) -> None:
        fd = ops.create(os.path.join(root, "file"))
        ops.fsync_directory(root)
        ops.pwrite(fd, memoryview(b"a" * 8192), 0)
        ops.fsync(fd)
        ops.pwrite(fd, memoryview(b"b" * 8192), 0)
        ops.close(fd)

    seen = {state.tree.get("file") for state in crash_states(record(os.fspath(tmp_path), overwrite))}
    assert {a * 4096 + b * 4096 for a in (b"a", b"b") for b in (b"a", b"b")} <= seen


def test_names_come_back_until_their_folder_is_synced(tmp_path: os.PathLike[str]) -> None:
    tmp_path = os.fspath(tmp_path)
    os.mkdir(os.path.join(tmp_path, "step"))
    for name in ("step/manifest", "step/pack", "other"):
        with open(os.path.join(tmp_path, name), "w") as file:
            file.write(name)

    def prune(ops: FileOps, root: str) -> None:
        ops.unlink(os.path.join(root, "step/manifest"))
        ops.unlink(os.path.join(root, "step/pack"))
        ops.fsync_directory(os.path.join(root, "step"))
        ops.rmdir(os.path.join(root, "step"))
        ops.fsync_directory(root)

    states = list(crash_states(record(tmp_path, prune)))
    kept = {tuple(sorted(state.tree)) for state in states}
    assert ("other", "step", "step/manifest") in kept  # the second unlink arrived, the first did not
    assert all(state.tree["other"] == b"other" for state in states)
    assert {tuple(state.tree) for state in states if "done" in state.marks} == {("other",)}


def test_states_are_written_out_and_described(tmp_path: os.PathLike[str]) -> None:
    root = os.path.join(tmp_path, "run")
    os.mkdir(root)
    states = list(crash_states(record(root, write_rename, left_out=2), random_per_prefix=0))
    for number, state in enumerate(states):
        folder = os.path.join(tmp_path, str(number))
        state.materialise(folder)
        assert read_tree(folder) == state.tree
    texts = [str(state) for state in states]
    assert any("lost     bytes [4096, 8192) of step/tmp" in text for text in texts)
    assert any("arrived  rename step/tmp → step/name" in text for text in texts)
    assert any("arrived  the size 10240 of step/tmp" in text for text in texts)


def test_deterministic_for_a_seed_and_more_with_more_choices(tmp_path: os.PathLike[str]) -> None:
    recording = record(os.fspath(tmp_path), write_rename, left_out=2)
    first = [state.tree for state in crash_states(recording, seed=3, random_per_prefix=30)]
    assert first == [state.tree for state in crash_states(recording, seed=3, random_per_prefix=30)]
    assert len(first) > len(list(crash_states(recording, random_per_prefix=0)))


@pytest.mark.parametrize(
    ("effect", "what"),
    [
        (Effect("create", "{root}/unknown/file", file=1), "folder that the recording does not know"),
        (Effect("unlink", "{root}/file"), "name that the recording does not know"),
        (Effect("rename", "{root}/a/x", "{root}/b/x"), "within one folder"),
        (Effect("chmod", "{root}/a/x"), "not an effect"),
    ],
)
def test_what_the_model_does_not_know_is_an_error(effect: Effect, what: str) -> None:
    kind, path, new = effect.kind, effect.path.format(root="/run"), effect.new.format(root="/run")
    start = {"a": None, "a/x": b"", "b": None}
    with pytest.raises(UsageError, match=what):
        list(crash_states(Recording("/run", start, [Effect(kind, path, new, effect.file)])))
