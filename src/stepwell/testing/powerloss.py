"""Every state that a power loss can leave behind, from a recording of effects.

SIGKILL cannot show a missing fsync, because the page cache survives the process. Here the recorded effects are played
on a model of a file system that keeps nothing without being told to:

- A block (4 KiB) of a file that was written since the file's last fsync may hold the old or the new bytes, whatever
  the other blocks hold; the size is old or new by itself. Blocks that never arrived below a size that did read as zero.
- A name (create, mkdir, link, rename, unlink, rmdir) that was changed since the last fsync of its directory may be old
  or new, whatever the other names are; a rename takes place whole or not at all. fsync of a file says nothing about
  its name.

That is harsher than any one file system, and allowed by POSIX. What a directory held when the recording began is
taken as durable.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from stepwell.errors import UsageError
from stepwell.store.checksum import digest
from stepwell.testing.ops import BLOCK_BYTES, Effect

Tree = Mapping[str, "bytes | None"]
"""A folder's content: path relative to it → a file's bytes, or None for a directory. Parents come first."""


@dataclass(frozen=True)
class Recording:
    """Effects below `root`, which held `start` when they began; marks are among the effects."""

    root: str
    start: Tree
    effects: Sequence[Effect] = field(repr=False)


@dataclass(frozen=True)
class CrashState:
    """What a folder may hold after a power loss once `issued` of the recorded effects were issued.

    `dropped` names each unsynced piece that did not arrive, `kept` each that did. `marks` are those passed before.
    """

    issued: int
    last_effect: str
    marks: tuple[str, ...]
    dropped: tuple[str, ...]
    kept: tuple[str, ...]
    tree: Tree = field(repr=False)

    def materialise(self, folder: str) -> None:
        """Write the state into a new folder. Two names of one file become two files."""
        os.mkdir(folder)
        for path, content in self.tree.items():
            if content is None:
                os.mkdir(os.path.join(folder, path))
            else:
                with open(os.path.join(folder, path), "wb") as file:
                    file.write(content)

    def __str__(self) -> str:
        lines = [f"power lost after {self.issued} effects, the last: {self.last_effect}"]
        lines += [f"  lost     {piece}" for piece in self.dropped]
        lines += [f"  arrived  {piece}" for piece in self.kept]
        return "\n".join(lines)


def read_tree(root: str) -> dict[str, bytes | None]:
    """What a folder holds now."""
    tree: dict[str, bytes | None] = {}
    for folder, names, files in os.walk(root):
        names.sort()
        for name in names:
            tree[os.path.relpath(os.path.join(folder, name), root)] = None
        for name in sorted(files):
            path = os.path.join(folder, name)
            with open(path, "rb") as file:
                tree[os.path.relpath(path, root)] = file.read()
    return tree


def crash_states(
    recording: Recording, *, random_per_prefix: int = 8, seed: int = 0, extremes_only: bool = False
) -> Iterator[CrashState]:
    """Every different state after every prefix of the recording.

    For each prefix: nothing unsynced arrived; all of it did; all but one piece; only one piece; and `random_per_prefix`
    random choices. With `extremes_only` just the first two. A state that looks like one already yielded, with the same
    marks passed, is left out. Deterministic for a seed. Raises `UsageError` for an effect on something that the
    recording does not know, such as a file in a folder that was made behind its back.
    """
    disk = _Disk(recording)
    choose = random.Random(seed)
    marks: tuple[str, ...] = ()
    seen: set[bytes] = set()
    for issued, effect in enumerate([None, *recording.effects]):
        if effect is not None:
            if effect.kind == "mark":
                marks = (*marks, effect.path)
            else:
                disk.apply(effect)
        pieces = disk.unsynced()
        for lost in _choices(len(pieces), random_per_prefix, choose, extremes_only):
            tree = disk.tree_without({id(pieces[i]) for i in lost})
            fingerprint = _fingerprint(tree, marks)
            if fingerprint in seen:
                continue
            seen.add(fingerprint)
            yield CrashState(
                issued=issued,
                last_effect="none" if effect is None else str(effect),
                marks=marks,
                dropped=tuple(str(pieces[i]) for i in sorted(lost)),
                kept=tuple(str(piece) for i, piece in enumerate(pieces) if i not in lost),
                tree=tree,
            )


def _choices(count: int, random_count: int, choose: random.Random, extremes_only: bool) -> Iterator[set[int]]:
    everything = set(range(count))
    yield everything
    yield set()
    if extremes_only:
        return
    for one in range(count):
        yield {one}
        yield everything - {one}
    for _ in range(random_count if count > 2 else 0):
        share = choose.random()
        yield {i for i in everything if choose.random() < share}


def _fingerprint(tree: Tree, marks: tuple[str, ...]) -> bytes:
    parts = [f"{path}\0{-1 if data is None else len(data)}\0".encode() + (data or b"") for path, data in tree.items()]
    return digest(b"\0".join([*parts, repr(marks).encode()]))


# ---- the model of a file system


@dataclass(eq=False)
class _Piece:
    """One unsynced change of a file: a block's bytes, or the size when `data` is None."""

    text: str
    offset: int
    data: bytes | None

    def __str__(self) -> str:
        return self.text


@dataclass(eq=False)
class _File:
    """`durable` is what the last fsync left, `live` what a reader sees before the power loss."""

    name: str
    durable: bytes = b""
    live: bytes = b""
    pieces: list[_Piece] = field(default_factory=list)

    def write(self, data: bytes, offset: int) -> None:
        end = offset + len(data)
        at = offset
        while at < end:
            until = min(end, (at // BLOCK_BYTES + 1) * BLOCK_BYTES)
            text = f"bytes [{at}, {until}) of {self.name}"
            self.pieces.append(_Piece(text, at, data[at - offset : until - offset]))
            at = until
        if end > len(self.live):
            self._resize(end)
        self.live = self.live[:offset] + data + self.live[end:]

    def truncate(self, size: int) -> None:
        if size != len(self.live):
            self._resize(size)

    def _resize(self, size: int) -> None:
        self.pieces.append(_Piece(f"the size {size} of {self.name}", size, None))
        self.live = self.live[:size].ljust(size, b"\0")

    def sync(self) -> None:
        self.durable, self.pieces = self.live, []

    def without(self, lost: set[int]) -> bytes:
        """The content when these pieces did not arrive. Sizes come first: a block may lie beyond a size that was lost,
        and is cut off there."""
        if not self.pieces:
            return self.durable
        kept = [piece for piece in self.pieces if id(piece) not in lost]
        size = len(self.durable)
        for piece in kept:
            if piece.data is None:
                size = piece.offset
        content = bytearray(self.durable[:size].ljust(size, b"\0"))
        for piece in kept:
            if piece.data is not None and piece.offset < size:
                part = piece.data[: size - piece.offset]
                content[piece.offset : piece.offset + len(part)] = part
        return bytes(content)


@dataclass(eq=False)
class _Change:
    """One unsynced change of names in a directory; None takes the name away."""

    text: str
    names: Mapping[str, _File | _Folder | None]

    def __str__(self) -> str:
        return self.text


@dataclass(eq=False)
class _Folder:
    durable: dict[str, _File | _Folder] = field(default_factory=dict)
    live: dict[str, _File | _Folder] = field(default_factory=dict)
    changes: list[_Change] = field(default_factory=list)

    def change(self, text: str, names: Mapping[str, _File | _Folder | None]) -> None:
        self.changes.append(_Change(text, names))
        _put(self.live, names)

    def sync(self) -> None:
        self.durable, self.changes = dict(self.live), []

    def without(self, lost: set[int]) -> dict[str, _File | _Folder]:
        entries = dict(self.durable)
        for change in self.changes:
            if id(change) not in lost:
                _put(entries, change.names)
        return entries


def _put(entries: dict[str, _File | _Folder], names: Mapping[str, _File | _Folder | None]) -> None:
    for name, item in names.items():
        if item is None:
            entries.pop(name, None)
        else:
            entries[name] = item


class _Disk:
    """The model: folders and files below one root, and what of them is durable."""

    def __init__(self, recording: Recording) -> None:
        self.root = os.path.abspath(recording.root)
        self.top = _Folder()
        self.open: dict[int, _File] = {}
        for path, content in recording.start.items():
            folder, name = self._folder_of(os.path.join(self.root, path))
            item = _Folder() if content is None else _File(path)
            if isinstance(item, _File) and content is not None:
                item.durable = item.live = content
            folder.durable[name] = folder.live[name] = item

    def apply(self, effect: Effect) -> None:
        """Carry out one effect."""
        text = self._text(effect)
        match effect.kind:
            case "fsync_directory":
                if os.path.abspath(effect.path) != os.path.dirname(self.root):
                    self._folder_at(effect.path).sync()
            case "create" | "open_append":
                folder, name = self._folder_of(effect.path)
                found = folder.live.get(name)
                if effect.kind == "open_append" and isinstance(found, _File):
                    self.open[effect.file] = found
                else:
                    self.open[effect.file] = file = _File(self._short(effect.path))
                    folder.change(text, {name: file})
            case "mkdir":
                folder, name = self._folder_of(effect.path)
                folder.change(text, {name: _Folder()})
            case "rename" | "link":
                folder, old = self._folder_of(effect.path)
                target, new = self._folder_of(effect.new)
                if target is not folder:
                    raise UsageError("the model knows names that move within one folder only", found=effect)
                item = self._item(folder, old, effect)
                folder.change(text, {new: item} if effect.kind == "link" else {old: None, new: item})
            case "unlink" | "rmdir":
                folder, name = self._folder_of(effect.path)
                self._item(folder, name, effect)
                folder.change(text, {name: None})
            case "pwrite":
                self.open[effect.file].write(effect.data, effect.offset)
            case "append":
                file = self.open[effect.file]
                file.write(effect.data, len(file.live))
            case "ftruncate":
                self.open[effect.file].truncate(effect.offset)
            case "fsync":
                self.open[effect.file].sync()
            case _:
                raise UsageError("not an effect", found=effect)

    def unsynced(self) -> list[_Piece | _Change]:
        """All that a power loss may take, as single pieces; those of files that no name can lead to do not matter."""
        names: list[_Change] = []
        pieces: list[_Piece] = []
        met: set[int] = set()

        def visit(item: _File | _Folder | None) -> None:
            if item is None or id(item) in met:
                return
            met.add(id(item))
            if isinstance(item, _File):
                pieces.extend(item.pieces)
                return
            names.extend(item.changes)
            for entries in (item.durable, *(change.names for change in item.changes)):
                for inside in entries.values():
                    visit(inside)

        visit(self.top)
        return [*names, *pieces]

    def tree_without(self, lost: set[int]) -> dict[str, bytes | None]:
        """The folder's content when the pieces with these identities are gone."""
        tree: dict[str, bytes | None] = {}

        def walk(folder: _Folder, prefix: str) -> None:
            for name, item in sorted(folder.without(lost).items()):
                if isinstance(item, _File):
                    tree[prefix + name] = item.without(lost)
                else:
                    tree[prefix + name] = None
                    walk(item, prefix + name + "/")

        walk(self.top, "")
        return tree

    def _short(self, path: str) -> str:
        return os.path.relpath(path, self.root)

    def _text(self, effect: Effect) -> str:
        name = self._short(effect.path)
        return f"{effect.kind} {name} → {self._short(effect.new)}" if effect.new else f"{effect.kind} {name}"

    def _folder_at(self, path: str) -> _Folder:
        inside = os.path.relpath(os.path.abspath(path), self.root)
        at: _File | _Folder | None = self.top
        for part in [] if inside == "." else inside.split(os.sep):
            at = at.live.get(part) if isinstance(at, _Folder) else None
        if not isinstance(at, _Folder):
            raise UsageError("an effect in a folder that the recording does not know", where=path)
        return at

    def _folder_of(self, path: str) -> tuple[_Folder, str]:
        parent, name = os.path.split(os.path.abspath(path))
        return self._folder_at(parent), name

    @staticmethod
    def _item(folder: _Folder, name: str, effect: Effect) -> _File | _Folder:
        item = folder.live.get(name)
        if item is None:
            raise UsageError("an effect on a name that the recording does not know", found=effect)
        return item
