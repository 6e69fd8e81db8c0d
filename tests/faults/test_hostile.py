"""Files from a stranger: refused with words; they run nothing, lead nowhere out of the run, and keep nobody waiting."""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from tests.helpers import assert_is_step, state_of

import stepwell
from stepwell.errors import DamagedError, NotARunError, StepwellError
from stepwell.restore import catalogue as catalogues
from stepwell.restore.verify import verify
from stepwell.store import names
from stepwell.store.checksum import digest, hex_digest
from stepwell.store.manifest import Manifest, encode

KEY = "000000000002-0001"
SELF = "header_xxh3_128"


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with steps 1 and 2, never changed."""
    run = tmp_path_factory.mktemp("hostile") / "run"
    with stepwell.Checkpointer(run) as ckpt:
        for step in (1, 2):
            ckpt.save(step, state_of(step)).wait()
    return run


@pytest.fixture
def hostile(pristine: Path, tmp_path: Path) -> Path:
    """A copy whose newest step, 2, is to be forged."""
    shutil.copytree(pristine, tmp_path / "run")
    return tmp_path / "run"


def step_folder(run: Path) -> Path:
    return run / "steps" / KEY


def pack_path(run: Path) -> Path:
    return step_folder(run) / "node00000-00.safetensors"


def manifest_of(run: Path) -> Manifest:
    return catalogues.read_document(str(step_folder(run) / names.MANIFEST), Manifest)


def forge_manifest(folder: Path, **changes: Any) -> None:
    """Write a manifest with these fields and a right checksum."""
    forged = msgspec.structs.replace(manifest_of(folder), **changes)
    (step_folder(folder) / names.MANIFEST).write_bytes(encode(forged))


def forge_pack(run: Path, edit: Callable[[dict[str, Any], bytearray], str | None]) -> None:
    """Change a pack's header and data, and make every checksum right again, that of the manifest included.

    `edit` may return the header's JSON as text when it cannot be said with a dict.
    """
    raw = pack_path(run).read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header, data = json.loads(raw[8 : 8 + size]), bytearray(raw[8 + size :])
    own = header["__metadata__"][SELF]
    header["__metadata__"]["chunks_xxh3_128"] = None
    text = edit(header, data)
    if header["__metadata__"].get("chunks_xxh3_128", "") is None:
        header["__metadata__"]["chunks_xxh3_128"] = digest(bytes(data)).hex()
    text = (text or json.dumps(header, separators=(",", ":"))).replace(own, "0" * 32, 1)
    blank = size.to_bytes(8, "little") + text.encode().ljust(size)
    assert len(blank) == 8 + size
    forged_hash = hex_digest(blank)
    pack_path(run).write_bytes(blank.replace(b"0" * 32, forged_hash.encode(), 1) + data)
    reference = msgspec.structs.replace(
        manifest_of(run).packs[0], header_xxh3_128=forged_hash, bytes=len(blank) + len(data)
    )
    forge_manifest(run, packs=(reference,))


def assert_refused(run: Path) -> None:
    """The forged step is found by verify, cannot be loaded, and a restore takes the step before, whole."""
    catalogue = catalogues.read(run)
    found = verify(catalogue, list(catalogue.steps))
    assert found and all(finding.key in (KEY, "run") for finding in found), found
    with pytest.raises(StepwellError):
        stepwell.load(run, 2)
    state = state_of(0)
    with stepwell.Checkpointer(run) as ckpt:
        restored = ckpt.restore(state)
    assert restored is not None and restored.step == 1
    assert_is_step(state, 1)


def test_the_forger_can_forge(hostile: Path) -> None:
    """Changed data with all checksums made right is read: what is refused below is refused for its own sake."""

    def edit(header: dict[str, Any], data: bytearray) -> None:
        data[:4] = np.float32(77).tobytes()

    forge_pack(hostile, edit)
    assert 77 in np.concatenate(list(stepwell.load(hostile, 2)["model"].values()))


def entry(header: dict[str, Any], index: int = 1) -> dict[str, Any]:
    """A tensor's entry in a header; 0 is the metadata."""
    found: dict[str, Any] = list(header.values())[index]
    assert "data_offsets" in found
    return found


Forgery = Callable[[dict[str, Any], bytearray], "str | None"]

# What we rely on ourselves.
FORGERIES: dict[str, Forgery] = {
    "last tensor out of range": lambda header, data: entry(header, -1).update(data_offsets=[len(data), len(data) + 8]),
    "trailing bytes": lambda header, data: data.extend(b"more"),
    "one checksum too many": lambda header, data: header["__metadata__"].update(chunks_xxh3_128="00" * 32),
    "no checksums": lambda header, data: header["__metadata__"].update(chunks_xxh3_128=""),
    "checksums that are none": lambda header, data: header["__metadata__"].update(chunks_xxh3_128="zz"),
    "metadata that is no text": lambda header, data: header["__metadata__"].update(run=5),
    "another run's": lambda header, data: header["__metadata__"].update(run="0" * 32),
    "another step's": lambda header, data: header["__metadata__"].update(key="000000000001-0001"),
    "no JSON": lambda header, data: "[" * 2000,
    "a list": lambda header, data: "[]",
}
# What only other readers of safetensors files rely on: we go by the layout, and verify compares.
FORGERIES_FOR_OTHERS: dict[str, Forgery] = {
    "overlap": lambda header, data: entry(header, 2).update(data_offsets=entry(header)["data_offsets"]),
    "negative offset": lambda header, data: entry(header).update(data_offsets=[-4000, 0]),
    "backwards": lambda header, data: entry(header).update(data_offsets=entry(header)["data_offsets"][::-1]),
    "overflow": lambda header, data: entry(header).update(shape=[2**62, 2**62]),
    "beyond 64 bits": lambda header, data: entry(header).update(data_offsets=[2**70, 2**70 + 4000]),
    "negative shape": lambda header, data: entry(header).update(shape=[-1000]),
    "offsets that are no numbers": lambda header, data: entry(header).update(data_offsets=["0", "4000"]),
    "unknown dtype": lambda header, data: entry(header).update(dtype="F31"),
    "a hole": lambda header, data: entry(header).update(data_offsets=[4, 4004]),
    "a name that is not ours": lambda header, data: header.update({"../../escape": header.pop("model.layer0")}),
}


@pytest.mark.parametrize("forgery", FORGERIES)
def test_forged_packs(hostile: Path, forgery: str) -> None:
    forge_pack(hostile, FORGERIES[forgery])
    assert_refused(hostile)


@pytest.mark.parametrize("forgery", FORGERIES_FOR_OTHERS)
def test_packs_forged_for_other_readers(hostile: Path, forgery: str) -> None:
    """Found by verify; a load refuses them or reads what the layout says, and never the forger's offsets."""
    forge_pack(hostile, FORGERIES_FOR_OTHERS[forgery])
    catalogue = catalogues.read(hostile)
    assert [finding.key for finding in verify(catalogue, list(catalogue.steps))] == [KEY]
    try:
        loaded = stepwell.load(hostile, 2)
    except StepwellError:
        return
    assert_is_step(loaded, 2)


@pytest.mark.parametrize("length", [0, 1, 100_000_001, 2**63 - 1, 2**64 - 1, "the file's"])
def test_headers_of_impossible_length(hostile: Path, length: int | str) -> None:
    raw = pack_path(hostile).read_bytes()
    number = len(raw) if isinstance(length, str) else length
    pack_path(hostile).write_bytes(number.to_bytes(8, "little") + raw[8:])
    assert_refused(hostile)


@pytest.mark.parametrize(
    "name",
    [
        "../../../../etc/passwd",
        "/etc/passwd",
        "node00000-00.safetensors/../../x",
        "node00000-00.safetensors\0",
        "..",
        "",
        "manifest.json",
        "node00000-00.safetensors.tmp",
    ],
)
def test_manifests_that_name_what_is_no_pack(hostile: Path, name: str) -> None:
    forge_manifest(hostile, packs=(msgspec.structs.replace(manifest_of(hostile).packs[0], name=name),))
    assert_refused(hostile)


@pytest.mark.parametrize(
    "changes",
    [
        {"layout": "../../../../etc/passwd"},
        {"layout": "0" * 32},
        {"layout": ""},
        {"key": "000000000001-0001", "step": 1},
        {"key": "../../x"},
        {"step": 3},
        {"attempt": -1},
        {"parent": "../x"},
        {"run": "0" * 32},
        {"packs": ()},
        {"values_bytes": 1 << 62},
        {"values_bytes": -1},
        {"format": "stepwell-run"},
        {"version": 99},
    ],
    ids=str,
)
def test_forged_manifests(hostile: Path, changes: dict[str, Any]) -> None:
    forge_manifest(hostile, **changes)
    assert_refused(hostile)


@pytest.mark.parametrize("repeat", [2, 100])
def test_a_pack_named_twice(hostile: Path, repeat: int) -> None:
    forge_manifest(hostile, packs=manifest_of(hostile).packs * repeat)
    assert_refused(hostile)


DOCUMENTS: dict[str, bytes] = {
    "deep nesting": b'{"run":' + b"[" * 100_000,
    "a pickle": pickle.dumps({"run": "x"}),
    "not UTF-8": b'{"run":"\xff"}',
    "a number": b"5",
    "huge number": b'{"step":1' + b"0" * 5000 + b"}",
}


@pytest.mark.parametrize("content", DOCUMENTS)
def test_documents_that_are_none(hostile: Path, content: str) -> None:
    (step_folder(hostile) / names.MANIFEST).write_bytes(DOCUMENTS[content])
    assert_refused(hostile)
    (hostile / "run.json").write_bytes(DOCUMENTS[content])
    with pytest.raises(DamagedError):
        stepwell.load(hostile)


def test_a_document_that_fills_the_memory(hostile: Path) -> None:
    path = step_folder(hostile) / names.MANIFEST
    os.truncate(path, 1 << 40)  # sparse: nothing on the disk, and more than any memory
    assert_refused(hostile)


@pytest.mark.parametrize("what", ["manifest", "pack", "layout"])
@pytest.mark.parametrize("kind", ["link out of the run", "fifo", "folder", "device"])
def test_files_that_are_no_files(hostile: Path, what: str, kind: str, tmp_path: Path) -> None:
    """Nothing is followed out of the run, and nobody waits at a pipe."""
    path = {
        "manifest": step_folder(hostile) / names.MANIFEST,
        "pack": pack_path(hostile),
        "layout": hostile / "layouts" / names.layout_file(manifest_of(hostile).layout),
    }[what]
    if what == "layout":  # step 1 shares it: give step 2 one of its own, which has no right hash anyway
        path = path.with_name(names.layout_file("1" * 32))
        forge_manifest(hostile, layout="1" * 32)
    else:
        shutil.move(path, tmp_path / "elsewhere")
    if kind == "link out of the run":
        path.symlink_to(tmp_path / "elsewhere")
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero")
    assert_refused(hostile)


class Bomb:
    """Touches a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.path,))


def test_case_18_a_pickle_is_never_executed_unasked(run: Path, tmp_path: Path) -> None:
    exploded = tmp_path / "exploded"
    with stepwell.Checkpointer(run, allow_pickle=True) as ckpt:
        ckpt.save(1, {"weights": np.ones(3), "bomb": Bomb(exploded)}).wait()
    catalogue = catalogues.read(run)
    assert verify(catalogue, list(catalogue.steps)) == []
    for read in (lambda: stepwell.load(run), lambda: stepwell.load(run, names="weights")):
        with pytest.raises(StepwellError, match="pickle"):
            read()
    with stepwell.Checkpointer(run) as ckpt, pytest.raises(StepwellError, match="allow_pickle"):
        ckpt.restore({"weights": np.zeros(3), "bomb": None})
    assert not exploded.exists()
    stepwell.load(run, allow_pickle=True)
    assert exploded.exists(), "the test's own bomb works"


def forge_layout(run: Path, data: bytes) -> None:
    """Put a layout in the run and make pack and manifest name it."""
    forged = hex_digest(data)
    (run / "layouts" / names.layout_file(forged)).write_bytes(data)
    forge_pack(run, lambda header, _: header["__metadata__"].update(layout=forged))
    forge_manifest(run, layout=forged)


@pytest.mark.parametrize("seed", range(4))
def test_random_changes_of_a_layout_end_in_words(hostile: Path, seed: int) -> None:
    """With all checksums made right, a changed layout is refused or read; it never ends in another kind of error."""
    choose = random.Random(seed)
    path = hostile / "layouts" / names.layout_file(manifest_of(hostile).layout)
    original = path.read_bytes()
    refused = 0
    for _ in range(100):
        data = bytearray(original)
        for _ in range(choose.choice((1, 1, 2, 8))):
            at = choose.randrange(len(data))
            data[at] = choose.choice((0, 255, 128, data[at] ^ (1 << choose.randrange(8)), choose.randrange(256)))
        forge_layout(hostile, bytes(data))
        try:
            stepwell.load(hostile, 2)
        except StepwellError:
            refused += 1
    assert refused > 50


@pytest.mark.parametrize("seed", range(4))
def test_random_changes_of_a_pack_header_end_in_words(hostile: Path, seed: int) -> None:
    choose = random.Random(seed)
    pack = pack_path(hostile).read_bytes()
    manifest = (step_folder(hostile) / names.MANIFEST).read_bytes()

    def edit(header: dict[str, Any], data: bytearray) -> str:
        header["__metadata__"]["chunks_xxh3_128"] = digest(bytes(data)).hex()
        text = list(json.dumps(header, separators=(",", ":")))
        for _ in range(choose.choice((1, 2, 4))):
            text[choose.randrange(len(text))] = choose.choice('{}[]",:0123456789-.eE x\\')
        return "".join(text)

    found = 0
    for _ in range(60):
        pack_path(hostile).write_bytes(pack)
        (step_folder(hostile) / names.MANIFEST).write_bytes(manifest)
        forge_pack(hostile, edit)
        catalogue = catalogues.read(hostile)
        found += bool(verify(catalogue, list(catalogue.steps)))
        try:
            assert_is_step(stepwell.load(hostile, 2), 2)
        except StepwellError:
            pass
    assert found >= 55, "a change may hit the same character again"


def test_a_folder_that_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(NotARunError):
        stepwell.load(tmp_path)
    (tmp_path / "run.json").mkdir()
    with pytest.raises((StepwellError, OSError)):
        stepwell.load(tmp_path)
