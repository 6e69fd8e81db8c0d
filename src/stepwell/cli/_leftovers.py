"""What killed processes leave in a run: found by exact names, so that a foreign file is never taken for one of ours."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from stepwell.restore.catalogue import Catalogue, listed
from stepwell.store import names
from stepwell.tiers.posix import PosixTier


@dataclass(frozen=True)
class Leftover:
    """One thing that no committed step needs. `path` is relative to the run, `files` are those that may be deleted.

    Kinds: `temporary` is a file under a temporary name; `uncommitted` a step folder without a manifest, the parts of
    a save that was never finished; `condemned` a pruned step whose parts are still there; `layout` a layout that no
    step has. While an agent is at work the first two may be a save on its way.
    """

    kind: Literal["temporary", "uncommitted", "condemned", "layout"]
    path: str
    files: tuple[str, ...]
    bytes: int


def find_leftovers(catalogue: Catalogue) -> list[Leftover]:
    """Everything left over in a run. Reads only folders."""
    root = catalogue.root
    found = []
    for folder in ("", names.ATTEMPTS, names.LAYOUTS):
        found += [_file("temporary", root, os.path.join(folder, name)) for name in _temporaries(root, folder)]
    for key in listed(os.path.join(root, names.STEPS)):
        if names.parse_step_key(key) is not None:
            found += _in_step(root, os.path.join(names.STEPS, key))
    if all(step.manifest is not None for step in catalogue.steps):  # one that cannot be read may need any layout
        used = {step.manifest.layout for step in catalogue.steps if step.manifest}
        for name in listed(os.path.join(root, names.LAYOUTS)):
            if names.parse_layout_file(name) not in {None, *used}:
                found.append(_file("layout", root, os.path.join(names.LAYOUTS, name)))
    return found


def _in_step(root: str, folder: str) -> list[Leftover]:
    inside = listed(os.path.join(root, folder))
    if names.MANIFEST in inside:
        return [_file("temporary", root, os.path.join(folder, name)) for name in _temporaries(root, folder)]
    ours = [name for name in inside if names.is_pack_file(name) or names.is_pin(name) or names.is_temporary(name)]
    condemned = names.CONDEMNED in inside
    if inside and not ours and not condemned:
        return []  # whatever this is, it is not ours
    files = tuple(os.path.join(folder, name) for name in ours)
    size = sum(_size(os.path.join(root, file)) for file in files)
    return [Leftover("condemned" if condemned else "uncommitted", folder, files, size)]


def remove_leftovers(tier: PosixTier, leftovers: Sequence[Leftover]) -> None:
    """Delete leftovers that are not condemned (those are the pruner's). Only for the holder of the run's lock."""
    for one in leftovers:
        tier.remove([tier.path(file) for file in one.files])
        if one.kind == "uncommitted" and not os.listdir(tier.path(one.path)):
            tier.ops.rmdir(tier.path(one.path))
            tier.ops.fsync_directory(os.path.dirname(tier.path(one.path)))


def _file(kind: Literal["temporary", "layout"], root: str, path: str) -> Leftover:
    return Leftover(kind, path, (path,), _size(os.path.join(root, path)))


def _temporaries(root: str, folder: str) -> list[str]:
    return [name for name in listed(os.path.join(root, folder)) if names.is_temporary(name)]


def _size(path: str) -> int:
    try:
        return os.lstat(path).st_size
    except FileNotFoundError:
        return 0
