"""Carrying out a retention plan so that a crash at any point leaves a step either committed or absent."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from stepwell.flow.retain import RetentionPlan
from stepwell.restore.catalogue import Catalogue, listed
from stepwell.store import names
from stepwell.tiers.posix import PosixTier, write_all

PIN_STALE_SECONDS = 60.0
NETWORK_GRACE_SECONDS = 10.0
LOCAL_FILESYSTEMS = frozenset({"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "tmpfs", "f2fs", "overlay", "bcachefs"})


@dataclass
class Pruner:
    """Removes steps of one run for the agent that holds its lock.

    A step goes in two parts: first its manifest, which makes it absent; later, when no reader holds a pin, its packs.
    What is condemned stays marked on disk, so a new agent finishes what an old one began.
    """

    tier: PosixTier
    clock: Callable[[], float] = time.monotonic
    _condemned_since: dict[str, float] = field(default_factory=dict)
    _pins_seen: dict[str, tuple[bytes, float]] = field(default_factory=dict)

    def condemn(self, plan: RetentionPlan, catalogue: Catalogue) -> list[str]:
        """Make the plan's steps absent. Returns their keys; a step that is pinned right now is left alone."""
        removed = []
        for key in plan.remove:
            folder = self.tier.path(names.STEPS, key)
            if self._pinned(folder) or os.path.islink(folder):  # a link may lead out of the run
                continue
            self._mark(folder)
            # From here the step is absent; its packs are still there for a reader that came before.
            self.tier.remove([os.path.join(folder, names.MANIFEST)])
            self._condemned_since[key] = self.clock()
            removed.append(key)
        self._drop_layouts(catalogue, set(removed))
        return removed

    def condemn_dead_parts(self, attempt: int) -> list[str]:
        """Mark what saves of attempts below this one left without a manifest: nobody can commit it any more.

        Call it after a commit of `attempt`, while holding the run's lock. Returns the keys.
        """
        marked = []
        steps = self.tier.path(names.STEPS)
        for key in listed(steps):
            parsed = names.parse_step_key(key)
            folder = os.path.join(steps, key)
            inside = listed(folder)
            if (
                parsed is None
                or os.path.islink(folder)
                or not os.path.isdir(folder)
                or parsed[1] >= attempt
                or names.MANIFEST in inside
                or names.CONDEMNED in inside
            ):
                continue
            if all(names.is_pack_file(name) for name in inside):  # anything else in it is somebody else's
                self._mark(folder)
                marked.append(key)
        return marked

    def sweep(self) -> list[str]:
        """Delete the parts of condemned steps whose grace is over and that nobody pins. Returns their keys.

        Only files with our own exact names are deleted; a folder with anything else in it stays.
        """
        swept = []
        for key in self._condemned():
            folder = self.tier.path(names.STEPS, key)
            since = self._condemned_since.setdefault(key, self.clock())
            # A reader on another node may see a removed manifest, and we its pin, only after a while.
            if not self._is_local() and self.clock() - since < NETWORK_GRACE_SECONDS:
                continue
            if self._pinned(folder):
                continue
            self._delete_parts(folder)
            self._condemned_since.pop(key, None)
            swept.append(key)
        return swept

    def remove_leftovers(self) -> list[str]:
        """Delete temporary files that a killed agent left. Call only while holding the run's lock."""
        removed = []
        steps = self.tier.path(names.STEPS)
        folders = [self.tier.root, self.tier.path(names.ATTEMPTS), self.tier.path(names.LAYOUTS)]
        folders += [os.path.join(steps, name) for name in listed(steps) if names.parse_step_key(name)]
        for folder in folders:
            if os.path.islink(folder) or not os.path.isdir(folder):
                continue
            stale = [os.path.join(folder, name) for name in listed(folder) if names.is_temporary(name)]
            if stale:
                self.tier.remove(stale)
                removed += stale
            if names.parse_step_key(os.path.basename(folder)) and not os.listdir(folder):
                self.tier.ops.rmdir(folder)
        return removed

    def _is_local(self) -> bool:
        return self.tier.abilities.filesystem in LOCAL_FILESYSTEMS

    def _condemned(self) -> list[str]:
        steps = self.tier.path(names.STEPS)
        found = []
        for name in listed(steps):
            if names.parse_step_key(name) is None or os.path.islink(os.path.join(steps, name)):
                continue
            inside = set(listed(os.path.join(steps, name)))
            if names.CONDEMNED in inside and names.MANIFEST not in inside:
                found.append(name)
        return found

    def _mark(self, folder: str) -> None:
        path = os.path.join(folder, names.CONDEMNED)
        if not os.path.lexists(path):
            fd = self.tier.ops.create(path)
            try:
                write_all(self.tier.ops, fd, memoryview(b"this step was pruned; its files may be deleted\n"), 0)
                self.tier.ops.fsync(fd)
            finally:
                self.tier.ops.close(fd)
            # The mark must be there before the manifest is gone, or nobody would dare to delete the packs.
            self.tier.ops.fsync_directory(folder)

    def _pinned(self, folder: str) -> bool:
        """True while a pin in the folder is younger than its grace: a pin's content changes as long as it is held."""
        held = False
        for name in listed(folder):
            if not names.is_pin(name):
                continue
            path = os.path.join(folder, name)
            try:
                with open(path, "rb") as file:
                    content = file.read(64)
            except OSError:
                continue
            seen = self._pins_seen.get(path)
            if seen is None or seen[0] != content:
                self._pins_seen[path] = (content, self.clock())
                held = True
            elif self.clock() - seen[1] < PIN_STALE_SECONDS:
                held = True
        return held

    def _delete_parts(self, folder: str) -> None:
        inside = listed(folder)
        ours = [name for name in inside if names.is_pack_file(name) or names.is_pin(name) or names.is_temporary(name)]
        self.tier.remove([os.path.join(folder, name) for name in ours])
        for name in ours:
            self._pins_seen.pop(os.path.join(folder, name), None)
        # The mark goes last: without it a crash here would leave packs that nobody dares to delete.
        self.tier.remove([os.path.join(folder, names.CONDEMNED)])
        if not os.listdir(folder):
            self.tier.ops.rmdir(folder)
            self.tier.ops.fsync_directory(os.path.dirname(folder))

    def _drop_layouts(self, catalogue: Catalogue, removed: set[str]) -> None:
        """Delete layouts that only removed steps used; none while some manifest cannot be read."""
        if any(step.manifest is None for step in catalogue.steps):
            return
        used = {step.manifest.layout for step in catalogue.steps if step.manifest and step.key not in removed}
        there = {layout for name in listed(self.tier.path(names.LAYOUTS)) if (layout := names.parse_layout_file(name))}
        gone = there - used
        if gone:
            self.tier.remove([self.tier.path(names.LAYOUTS, names.layout_file(one)) for one in sorted(gone)])
