"""The lazy snapshot: parameters and optimizer state are copied while the next forward and backward run.

It is only as safe as the claim that nothing changes these tensors before `optimizer.step()`. So: only tensors of
hooked torch optimizers are lazy; the first saves are copied eagerly *and* compared at the barrier, and whatever
differs there is eager from then on, by name; and a version that moved without the barrier fails that save.
"""

from __future__ import annotations

import ctypes
import logging
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from stepwell.errors import UnsafeSnapshotError
from stepwell.snapshot.device import Ticket
from stepwell.snapshot.slot import Slot
from stepwell.state import address_of
from stepwell.store.layout import Layout

if TYPE_CHECKING:
    from stepwell.state import Flat

log = logging.getLogger("stepwell")

AUDITED_SAVES = 2
GROUP_BYTES = 32 << 20


class LazyPolicy:
    """Knows which tensors may be lazy, hooks their optimizers, and learns which may not.

    `barrier` is called at the entry of every hooked `optimizer.step()`.
    """

    def __init__(self, barrier: Callable[[], None]) -> None:
        self.barrier = barrier
        self.never: set[str] = set()
        self.audits_left = AUDITED_SAVES
        self._hooked: dict[int, Any] = {}
        self._choice: tuple[object, list[int], list[int]] | None = None

    def split(self, flat: Flat) -> tuple[list[int], list[int]]:
        """(eager, lazy) indices of the stored tensors."""
        signature = (id(flat.specs), id(flat.skeleton), len(self.never))
        if self._choice is None or self._choice[0] != signature:
            eager: list[int] = []
            lazy: list[int] = []
            for i, owner in enumerate(flat.owners):
                if flat.alias_of[i] >= 0:
                    continue
                known_safe = flat.names[i] not in self.never and can_be_lazy(flat, i)
                may = owner is not None and known_safe and self._hook(owner[1])
                (lazy if may else eager).append(i)
            shared = {target for i, target in enumerate(flat.alias_of) if target >= 0 and flat.owners[i] is None}
            eager += [i for i in lazy if i in shared]
            lazy = [i for i in lazy if i not in shared]
            self._choice = (signature, eager, lazy)
        else:
            for owner in {id(o[1]): o for o in flat.owners if o is not None}.values():
                self._hook(owner[1])
        return self._choice[1], self._choice[2]

    def _hook(self, optimizer: Any) -> bool:
        """Hook an optimizer of torch's own; others, and whole-step CUDA graphs (capturable), stay eager."""
        if not type(optimizer).__module__.startswith("torch.optim"):
            return False
        if any(group.get("capturable") for group in optimizer.param_groups):
            return False
        known = self._hooked.get(id(optimizer))
        if known is None or known[0] is not optimizer:
            handle = optimizer.register_step_pre_hook(lambda *_: self.barrier())
            self._hooked[id(optimizer)] = (optimizer, handle)
        return True

    def learn(self, names: list[str], why: str) -> None:
        """Make tensors eager from now on."""
        new = [name for name in names if name not in self.never]
        if new:
            self.never.update(new)
            log.warning(
                "lazy snapshot: %d tensors %s; they are copied eagerly from now on: %s%s",
                len(new),
                why,
                ", ".join(new[:5]),
                " …" if len(new) > 5 else "",
            )

    def close(self) -> None:
        for _, handle in self._hooked.values():
            handle.remove()
        self._hooked.clear()


class LazyCopy:
    """One lazy snapshot under way. `finish` is called exactly once, from the thread that completes it."""

    def __init__(
        self, slot: Slot, layout: Layout, flat: Flat, indices: list[int], finish: Callable[[Exception | None], None]
    ) -> None:
        self.flat, self.indices, self.finish = flat, indices, finish
        self.versions = [_version(flat.tensors[i]) for i in indices]
        self.done = threading.Event()
        self.barrier_seconds = 0.0
        self._groups = _groups(slot, layout, flat, indices)
        self._next = 0
        self._left = len(self._groups)
        self._lock = threading.Lock()
        self._error: Exception | None = None

    def work(self) -> None:
        """Copy groups until none is left; several threads may do so at once."""
        while True:
            with self._lock:
                if self._next >= len(self._groups):
                    break
                group = self._groups[self._next]
                self._next += 1
            try:
                for destination, source, size in group:
                    ctypes.memmove(destination, source, size)
            except Exception as error:  # kept for the handle; the barrier must not hang on it
                self._error = error
            with self._lock:
                self._left -= 1
                last = self._left == 0
            if last:
                self._complete()

    def barrier(self) -> None:
        """Help copying, then wait for the rest: after this the tensors may change."""
        begin = time.perf_counter()
        if not self.done.is_set():
            self.work()
            self.done.wait()
            self.barrier_seconds += time.perf_counter() - begin

    def changed(self) -> list[str]:
        """Names whose version moved since `save()`."""
        return [
            self.flat.names[i]
            for i, before in zip(self.indices, self.versions, strict=True)
            if _version(self.flat.tensors[i]) != before
        ]

    def _complete(self) -> None:
        error = self._error
        moved = self.changed()
        if moved and error is None:
            error = UnsafeSnapshotError(
                "tensors changed while the lazy snapshot was reading them",
                where=", ".join(moved[:5]) + (f" and {len(moved) - 5} more" if len(moved) > 5 else ""),
                expected="no change before optimizer.step()",
                todo="this save is dropped and these tensors are copied eagerly from now on; "
                "or call ckpt.barrier() before changing them",
            )
        try:
            self.finish(error)
        finally:
            self.done.set()


class DeviceLazyCopy:
    """A lazy snapshot on an accelerator: the copies run on a side stream; the barrier holds the device, not the host."""

    def __init__(self, ticket: Ticket, finish: Callable[[Exception | None], None]) -> None:
        self.ticket, self.finish = ticket, finish
        self.done = threading.Event()
        self.barrier_seconds = 0.0

    def work(self) -> None:
        """Wait on the host for the copies; called in the background."""
        error: Exception | None = None
        try:
            self.ticket.wait()
        except Exception as failure:  # kept for the handle
            error = failure
        try:
            self.finish(error)
        finally:
            self.done.set()

    def barrier(self) -> None:
        if not self.done.is_set():
            self.ticket.hold_device()


class Audit:
    """The comparison at the barrier of a save that was copied eagerly: which lazy candidates did change?"""

    def __init__(self, slot: Slot, layout: Layout, flat: Flat, indices: list[int]) -> None:
        self.flat, self.indices = flat, indices
        self.views = slot.views(layout, flat)

    def differing(self, pool: ThreadPoolExecutor) -> list[str]:
        """Names of tensors whose bytes are not those in the slot."""

        def differs(i: int) -> bool:
            live, saved = self.flat.tensors[i], self.views[i]
            torch = sys.modules["torch"]
            a, b = (t.detach().cpu().contiguous().view(-1).view(torch.uint8) for t in (live, saved))
            return not torch.equal(a, b)

        found = pool.map(differs, self.indices)
        return [self.flat.names[i] for i, different in zip(self.indices, found, strict=True) if different]


def _version(tensor: Any) -> int:
    return int(tensor._version)


def _groups(slot: Slot, layout: Layout, flat: Flat, indices: list[int]) -> list[list[tuple[int, int, int]]]:
    """(destination, source, bytes) triples in groups of about 32 MiB; large tensors are cut."""
    groups: list[list[tuple[int, int, int]]] = []
    group: list[tuple[int, int, int]] = []
    group_bytes = 0
    base = slot.address
    for i in indices:
        source, size = address_of(flat.tensors[i]), flat.specs[i].nbytes
        destination = base + layout.slot_offset(i)
        for begin in range(0, size, GROUP_BYTES):
            part = min(GROUP_BYTES, size - begin)
            group.append((destination + begin, source + begin, part))
            group_bytes += part
            if group_bytes >= GROUP_BYTES:
                groups.append(group)
                group, group_bytes = [], 0
    if group:
        groups.append(group)
    return groups


def can_be_lazy(flat: Flat, index: int) -> bool:
    """Host tensors are copied by address, so they must be contiguous; an accelerator copies anything."""
    return flat.specs[index].device != "cpu" or address_of(flat.tensors[index]) != 0
