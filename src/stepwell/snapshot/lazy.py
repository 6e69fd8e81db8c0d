"""The lazy snapshot: parameters and optimizer state are copied while the next forward and backward run.

It is only as safe as the claim that nothing changes these tensors before `optimizer.step()`. So: only what belongs to
torch's own optimizers is lazy; a hook in front of every optimizer's `step` holds it back until the copy is whole (the
*barrier*); the first saves are copied eagerly *and* compared at the barrier, and whatever differs there is eager from
then on, by name; and a version that moved without the barrier fails that save.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from bisect import bisect_left
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from ctypes import memmove
from typing import TYPE_CHECKING, Any

import numpy as np

from stepwell.errors import UnsafeSnapshotError
from stepwell.snapshot.device import NothingToWaitFor, Ticket
from stepwell.snapshot.slot import COPY_THREADS, Pieces, Slot
from stepwell.state import address_of
from stepwell.store.layout import Layout
from stepwell.units import format_bytes

if TYPE_CHECKING:
    from stepwell.state import Flat

log = logging.getLogger("stepwell")

AUDITED_SAVES = 2
GROUP_BYTES = 32 << 20
# On the host a smaller tensor takes as long to note down as to copy. This also makes step counters eager.
LAZY_BYTES_MIN = 64 << 10


class LazyPolicy:
    """Knows which tensors may be lazy, hooks the optimizers, and learns which tensors may not.

    `barrier` is called at the entry of every `step()` of a torch optimizer, in the state or not. Used by the trainer's
    thread, but for `learn`, which any thread may call.
    """

    def __init__(self, barrier: Callable[[], None]) -> None:
        self.barrier = barrier
        self.audits_left = AUDITED_SAVES
        self.never: set[str] = set()
        self._candidates: set[str] = set()
        self._hook: Any = None
        self._warned = False

    def split(self, flat: Flat) -> tuple[list[int], list[int]]:
        """(eager, lazy) indices of the stored tensors.

        Lazy: parameters and state of torch's own optimizers that overlap with nothing else in the state. A candidate
        that was none before begins the audits anew.
        """
        eager: list[int] = []
        lazy: list[int] = []
        allowed: dict[int, bool] = {}
        options: set[int] = set()
        owned_aliases = {target for i, target in enumerate(flat.alias_of) if target >= 0 and flat.owners[i] is None}
        for i, owner in enumerate(flat.owners):
            if flat.alias_of[i] >= 0:
                continue
            spec = flat.specs[i]
            if owner is None or (spec.device == "cpu" and spec.nbytes < LAZY_BYTES_MIN):
                eager.append(i)
                continue
            optimizer = owner[1]
            if id(optimizer) not in allowed:
                allowed[id(optimizer)] = _holds_still(optimizer)
                options |= _option_addresses(optimizer)
            tensor = flat.tensors[i]
            may = (
                allowed[id(optimizer)]
                and i not in owned_aliases
                and flat.names[i] not in self.never
                and tensor.data_ptr() not in options
                and (spec.device != "cpu" or address_of(tensor) != 0)  # host tensors are copied by address
                and not tensor.is_inference()  # has no version that could be watched
            )
            (lazy if may else eager).append(i)
        if lazy:
            touched = _overlapped(flat, lazy, eager)
            if touched:
                eager += sorted(touched)
                lazy = [i for i in lazy if i not in touched]
        names = {flat.names[i] for i in lazy}
        if not names <= self._candidates:
            self._candidates |= names
            self.audits_left = AUDITED_SAVES
        if not lazy:
            self._say_once_that_nothing_is_lazy()
        elif self._hook is None:
            from torch.optim.optimizer import register_optimizer_step_pre_hook

            # One hook for all optimizers: also one that is not in the state may hold a parameter that is.
            self._hook = register_optimizer_step_pre_hook(lambda *_: self.barrier())
        return eager, lazy

    def learn(self, names: list[str], why: str) -> None:
        """Make tensors eager from now on."""
        new = [name for name in names if name not in self.never]
        if new:
            self.never.update(new)
            log.warning(
                "lazy snapshot: %d tensors %s; they are copied eagerly from now on: %s", len(new), why, listed(new)
            )

    def _say_once_that_nothing_is_lazy(self) -> None:
        if not self._candidates and not self._warned:
            self._warned = True
            log.warning(
                "lazy snapshot: nothing in this state can wait, so all of it is copied at once; what can: parameters "
                "and state of torch's optimizers, from %s on, with model and optimizer themselves in the state",
                format_bytes(LAZY_BYTES_MIN),
            )

    def close(self) -> None:
        """Give the hook back."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None


class LazyCopy:
    """One lazy snapshot under way: host tensors in groups by the pool, device tensors behind a ticket.

    `finish` is called exactly once, from a thread of the pool, with the error if there is one. The tensors are held
    until then and no longer.
    """

    def __init__(
        self,
        slot: Slot,
        layout: Layout,
        flat: Flat,
        indices: list[int],
        pool: ThreadPoolExecutor,
        finish: Callable[[Exception | None], None],
    ) -> None:
        self.pool, self.finish = pool, finish
        self.done = threading.Event()
        self.barrier_seconds = 0.0  # final once `done`
        self.ticket: Ticket = NothingToWaitFor()  # set before `begin`
        self.moved: list[str] = []
        self._names = [flat.names[i] for i in indices]
        self._tensors = [flat.tensors[i] for i in indices]
        self._versions = [int(tensor._version) for tensor in self._tensors]
        on_host = [i for i in indices if flat.specs[i].device == "cpu"]
        self._groups = Pieces(_groups(slot, layout, flat, on_host), _copy_group)
        self._lock = threading.Lock()
        self._started = False
        self._judged = False
        self._held_since_seconds: float | None = None

    def begin(self) -> None:
        """Have it copied in the background. May be called again."""
        self.pool.submit(self._work)

    def _work(self) -> None:
        with self._lock:
            if self._started:
                return
            self._started = True
        self._groups.help()
        self._groups.ended.wait()
        outcome = self._groups.error
        try:
            self.ticket.wait()
        except Exception as failure:  # kept for the handle
            outcome = outcome or failure
        self._judge()
        if outcome is None and self.moved:
            outcome = UnsafeSnapshotError(
                "tensors changed while the lazy snapshot was reading them",
                where=listed(self.moved),
                expected="no change before optimizer.step()",
                todo="this save is dropped and these tensors are copied eagerly from now on; "
                "or call ckpt.barrier() before changing them",
            )
        self._names, self._tensors, self.ticket = [], [], NothingToWaitFor()
        try:
            self.finish(outcome)
        finally:
            self.done.set()

    def barrier(self) -> None:
        """Hold the trainer until host tensors are copied, and its device until the others are: then they may change."""
        if self.done.is_set():
            return
        with self._lock:
            if not self._judged:
                self._held_since_seconds = time.perf_counter()
        self.begin()  # an interrupted save may not have done so
        for _ in range(COPY_THREADS - 1):
            self.pool.submit(self._groups.help)
        self._groups.ended.wait()
        self._judge()
        self.ticket.hold_device()

    def complete(self) -> None:
        """Return when all is copied and `finish` has been called."""
        if not self.done.is_set():
            self.begin()
            self.done.wait()

    def _judge(self) -> None:
        """Look once for tensors that changed: before the trainer may change them, or else when all is copied."""
        with self._lock:
            if self._judged:
                return
            self._judged = True
            self.moved = [
                name
                for name, tensor, before in zip(self._names, self._tensors, self._versions, strict=True)
                if tensor._version != before
            ]
            if self._held_since_seconds is not None:
                self.barrier_seconds = time.perf_counter() - self._held_since_seconds


class Audit:
    """The comparison at the barrier of a save that was copied eagerly: which lazy candidates did change?"""

    def __init__(self, slot: Slot, layout: Layout, flat: Flat, indices: list[int]) -> None:
        views = slot.views(layout, flat)
        self._names = [flat.names[i] for i in indices]
        self._pairs = [(flat.tensors[i], views[i]) for i in indices]

    def differing(self, pool: ThreadPoolExecutor) -> list[str]:
        """Names of tensors whose bytes are not those in the slot."""
        torch = sys.modules["torch"]

        def differs(pair: tuple[Any, Any]) -> bool:
            live, saved = (t.detach().cpu().contiguous().view(-1).view(torch.uint8) for t in pair)
            return not torch.equal(live, saved)

        found = pool.map(differs, self._pairs)
        return [name for name, different in zip(self._names, found, strict=True) if different]


def listed(names: list[str]) -> str:
    """The first few names, and how many more there are."""
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _holds_still(optimizer: Any) -> bool:
    """Whether an optimizer changes its tensors in `step()` only, where the hook sees it: torch's own, with a step that
    runs hooks, and not captured in a CUDA graph, whose replay calls nothing."""
    module = type(optimizer).__module__
    own = module == "torch.optim" or module.startswith("torch.optim.")
    hooked = getattr(type(optimizer).step, "hooked", False)
    return own and hooked and not any(group.get("capturable") for group in optimizer.param_groups)


def _option_addresses(optimizer: Any) -> set[int]:
    """Where tensors in the options of an optimizer lie: a learning rate is changed by its scheduler."""
    torch = sys.modules["torch"]
    options = [value for group in optimizer.param_groups for key, value in group.items() if key != "params"]
    flat = [part for value in options for part in (value if isinstance(value, (list, tuple)) else (value,))]
    return {value.data_ptr() for value in flat if isinstance(value, torch.Tensor)}


def _overlapped(flat: Flat, lazy: list[int], eager: list[int]) -> set[int]:
    """Those lazy tensors that share memory with an eager one: whoever writes that one need not know of the barrier."""
    ranges = sorted((*_bounds(flat, i), i) for i in lazy)
    begins = [begin for begin, _, _ in ranges]
    furthest = [ranges[0][1]] * len(ranges)  # the furthest end of all ranges up to here
    for k in range(1, len(ranges)):
        furthest[k] = max(furthest[k - 1], ranges[k][1])
    touched: set[int] = set()
    for i in eager:
        low, high = _bounds(flat, i)
        k = bisect_left(begins, high) - 1
        while k >= 0 and low < high and furthest[k] > low:
            if ranges[k][1] > low:
                touched.add(ranges[k][2])
            k -= 1
    return touched


def _bounds(flat: Flat, index: int) -> tuple[int, int]:
    """The address range that a tensor reaches, whatever its strides."""
    tensor, size = flat.tensors[index], flat.specs[index].nbytes
    address = address_of(tensor)
    if address or not size:
        return address, address + size
    if isinstance(tensor, np.ndarray):
        address, item_bytes = int(tensor.__array_interface__["data"][0]), tensor.itemsize
        strides = tensor.strides
    else:
        address, item_bytes = tensor.data_ptr(), tensor.element_size()
        strides = tuple(stride * item_bytes for stride in tensor.stride())
    reaches = [(length - 1) * stride for length, stride in zip(tensor.shape, strides, strict=True)]
    low = sum(reach for reach in reaches if reach < 0)
    high = sum(reach for reach in reaches if reach > 0)
    return address + low, address + high + item_bytes


def _copy_group(group: list[tuple[int, int, int]]) -> None:
    for destination, source, size in group:
        memmove(destination, source, size)


def _groups(slot: Slot, layout: Layout, flat: Flat, indices: list[int]) -> list[list[tuple[int, int, int]]]:
    """(destination, source, bytes) triples in groups of about 32 MiB; large tensors are cut."""
    groups: list[list[tuple[int, int, int]]] = []
    group: list[tuple[int, int, int]] = []
    group_bytes = 0
    base = slot.address
    for i in indices:
        source, size = address_of(flat.tensors[i]), flat.specs[i].nbytes
        destination = base + layout.slot_offsets[i]
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
