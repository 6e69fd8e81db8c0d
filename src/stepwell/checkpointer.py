"""The one door for training scripts: `Checkpointer` and the handles it gives out."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import signal
import sys
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any, Literal

import msgspec

from stepwell.agent import protocol as p
from stepwell.agent.client import ANSWER_SECONDS_MAX, Client, as_error
from stepwell.agent.prune import LOCAL_FILESYSTEMS
from stepwell.errors import (
    AgentError,
    DamagedError,
    NotARunError,
    RunBusyError,
    SlotMemoryError,
    StateClobbered,
    StateMismatchError,
    StepwellError,
    UnsupportedStateError,
    UsageError,
    WaitTimeout,
)
from stepwell.handles import WAIT_SECONDS_MAX, Counters, Preparation, Restored, Save
from stepwell.policies import History, Keep, Moment, Policy
from stepwell.restore import catalogue as catalogues
from stepwell.restore.catalogue import Step
from stepwell.restore.read import OpenStep, open_slot, open_step
from stepwell.snapshot.device import DeviceCopier, Ticket, copier_for
from stepwell.snapshot.lazy import Audit, LazyCopy, LazyPolicy
from stepwell.snapshot.slot import COPY_THREADS, Slot, copy_eager
from stepwell.state import Flat, encode_values, flatten, match
from stepwell.store import layout as layouts
from stepwell.store import names
from stepwell.store.layout import Layout
from stepwell.store.manifest import metrics_to_json
from stepwell.units import format_bytes, format_seconds

log = logging.getLogger("stepwell")

SLOT_WAIT_SECONDS_MAX = 120.0
RELINK_COUNT_MAX = 5
SETTLE_SECONDS_MAX = 3600.0
SETTLE_NOTICE_SECONDS = 10.0
DIFFERENCES_LOGGED_MAX = 20
NOTICE_SECONDS_MAX = 1.0
SIGNAL_LOOK_SECONDS = 1.0


class Checkpointer:
    """Saves and restores the state of one training run in the folder `run`.

    Guarantees: a step is committed or absent, whatever dies; nothing aliases the trainer's memory after `save()`
    (eager) or after the next `optimizer.step()` begins (lazy); an accepted save survives the trainer; waits are
    bounded; nothing is dropped without a handle and a counter that say so.

    Arguments: `slots` staging buffers, each as large as the state. `when_full` says what `save()` does when no slot
    is free: "wait" (at most `slot_wait_seconds_max`, then a loud skip) or "skip". `snapshot` is "eager" or "lazy".
    `keep` and `save_when` are policies. `on_error` is "warn" (log, count, go on) or "raise" (each failure once, at
    the next `save()`, `wait()` or `close()`). `fresh=True` begins a new branch in a run that has steps.
    `allow_pickle` stores and restores what Stepwell has no type for by pickle.

    Raises `UsageError` for wrong arguments, `RunBusyError` when another trainer writes the run, `AgentError` when the
    agent cannot be started, and `OSError` kinds when the folder cannot be written.
    """

    def __init__(
        self,
        run: str | os.PathLike[str],
        *,
        slots: int = 2,
        when_full: Literal["wait", "skip"] = "wait",
        snapshot: Literal["eager", "lazy"] = "eager",
        keep: Keep | None = None,
        save_when: Policy | None = None,
        on_error: Literal["warn", "raise"] = "warn",
        fresh: bool = False,
        allow_pickle: bool = False,
        slot_wait_seconds_max: float = SLOT_WAIT_SECONDS_MAX,
    ) -> None:
        _check_choice("when_full", when_full, ("wait", "skip"))
        _check_choice("snapshot", snapshot, ("eager", "lazy"))
        _check_choice("on_error", on_error, ("warn", "raise"))
        if isinstance(slots, bool) or not isinstance(slots, int) or not 1 <= slots <= 64:
            raise UsageError("slots is a small whole number", expected="1 to 64", found=slots)
        if not isinstance(slot_wait_seconds_max, (int, float)) or not slot_wait_seconds_max >= 0:
            raise UsageError("slot_wait_seconds_max is a time", expected="0 or more", found=slot_wait_seconds_max)
        if keep is not None and not isinstance(keep, Keep):
            raise UsageError("keep is a policy", expected="as in stepwell.Keep(last=3)", found=repr(keep))
        if save_when is not None and not callable(getattr(save_when, "decide", None)):
            raise UsageError("save_when is a policy", expected="as in stepwell.Every(steps=100)", found=repr(save_when))
        self.run = _run_folder(run)
        _check_not_open_here(self.run)
        self.counters = Counters()
        self.last_save: Save | None = None
        self._slot_count, self._when_full, self._on_error = slots, when_full, on_error
        self._keep, self._policy, self._fresh = keep or Keep(), save_when, fresh
        self._allow_pickle, self._slot_wait_seconds_max = allow_pickle, slot_wait_seconds_max
        self._copiers: dict[str, DeviceCopier] = {}
        self._identity = uuid.uuid4().hex
        self._pid = os.getpid()
        self._lock = threading.Condition()  # guards everything below
        self._slots: list[Slot] = []
        self._making = 0  # slots on their way that are not in `_slots` yet
        self._touching = 0  # slots in `_slots` that are being made ready for their first use
        self._pending: dict[str, Save] = {}
        self._unraised: list[Save] = []
        self._saved_steps: dict[int, Save] = {}
        self._attempt: int | None = None
        self._parent: str | None = None
        self._linked = False
        self._relinking = False
        self._closed = False
        self._sent_layouts: set[str] = set()
        self._layout: Layout | None = None
        self._flat: Flat | None = None
        self._use_count = 0
        self._pool = ThreadPoolExecutor(COPY_THREADS, thread_name_prefix="stepwell-copy")
        self._background = ThreadPoolExecutor(2, thread_name_prefix="stepwell")
        self._lazy = LazyPolicy(self.barrier) if snapshot == "lazy" else None
        self._lazy_save: Save | None = None
        self._audit: Audit | None = None
        self._started_seconds = time.monotonic()
        self._last_started_seconds: float | None = None
        self._last_step: int | None = None
        self._history = History.for_policy(save_when)
        self._signals: dict[int, Any] = {}
        self._preempted = threading.Event()
        self._preempt_deadline: float | None = None
        self._preempt_seconds = 0.0
        self._client = Client(self.run, self._on_message, self._on_lost)
        welcome = self._client.connect(self._hello())
        self._linked = True
        self._say_limits(welcome)
        _open_checkpointers.add(self)

    # ---- saving

    def save(self, step: int, state: Mapping[str, Any], *, metrics: Mapping[str, float] | None = None) -> Save:
        """Snapshot the state after optimizer step `step` and have it persisted in the background.

        Returns a handle at once: accepted, or `skipped` with its reason. The same step saved twice in one attempt
        returns the first handle. Raises `UnsupportedStateError` (a `TypeError`) naming the path of what cannot be
        stored, `LineageError` for a first save into a run that has steps, `SlotMemoryError` when a slot does not fit
        (with `on_error="raise"`; else the handle is skipped), and earlier failures with `on_error="raise"`.
        """
        return self._save(names.step_number(step), state, _clean_metrics(metrics), None)

    def _save(self, step: int, state: Mapping[str, Any], metrics: dict[str, float], reason: str | None) -> Save:
        self._check_open()
        _check_state(state)
        self._raise_once()
        before = self._saved_steps.get(step)
        if before is not None and before.error is None and not before.skipped:
            return before
        handle = Save(self._raise_once, step, reason=reason)
        self._audit = None  # its tensors were never held back
        self._finish_lazy()
        try:
            self._snapshot(handle, state, metrics)
        except (SlotMemoryError, DamagedError, OSError) as error:  # what a sick storage, agent or memory can do
            if self._on_error == "raise":
                raise
            self._skip(handle, f"{type(error).__name__}: {error}")
        if not handle.skipped:
            self._saved_steps = {s: h for s, h in self._saved_steps.items() if not h.done or s > step - 1000}
            self._saved_steps[step] = handle
            self._last_step, self._last_started_seconds = step, time.monotonic()
            self.last_save = handle
        return handle

    def _snapshot(self, handle: Save, state: Mapping[str, Any], metrics: dict[str, float]) -> None:
        begin = time.perf_counter()
        flat = flatten(state, allow_pickle=self._allow_pickle, previous=self._flat)
        values = encode_values(flat.values, allow_pickle=self._allow_pickle)
        layout = self._layout_for(flat, len(values))
        handle.stages["flatten_seconds"] = time.perf_counter() - begin
        with self._lock:
            if not self._linked:
                self._begin_relink()
        self._open_attempt()
        mark = time.perf_counter()
        ready = list(self._slots)
        slot = self._take_slot(layout, len(values), handle)
        handle.stages["slot_wait_seconds"] = time.perf_counter() - mark
        if slot is None:
            return
        assert self._attempt is not None
        handle.key, handle._slot, handle._layout = names.step_key(handle.step, self._attempt), slot, layout
        mark = time.perf_counter()
        try:
            self._tell(p.Begin(slot.index))
            plan = layout.packs[-1]
            slot.write(values, plan.image_offset + plan.header_bytes + plan.data_bytes)
            handle._order = p.Persist(
                save=handle.identity,
                step=handle.step,
                slot=slot.index,
                layout=layout.hash,
                values_bytes=len(values),
                metrics=metrics_to_json(metrics),
                entered_seconds=handle._entered_seconds,
                queue_depth=len(self._pending),
                telemetry={},
            )
            lazy = self._copy(handle, slot, layout, flat)
        except BaseException:
            self._free_slot(slot)
            raise
        handle.stages["copy_seconds"] = time.perf_counter() - mark
        handle._blocked_seconds = time.monotonic() - handle._entered_seconds
        self.counters.saves += 1
        if lazy is None:
            try:
                self._accept(handle)
            except BaseException:  # whatever it is: the slot must not be lost to it
                with self._lock:
                    self._pending.pop(handle.identity, None)
                self._free_slot(slot)
                raise
        else:
            handle._lazy, self._lazy_save = lazy, handle
            lazy.begin()
        if slot not in ready:  # the first save made this slot itself: get it and the others ready for the next ones
            self._background.submit(self._warm_up, slot, layout, flat)

    def _copy(self, handle: Save, slot: Slot, layout: Layout, flat: Flat) -> LazyCopy | None:
        """Copy all that must be copied now; returns what remains to be done, if anything does."""
        if self._lazy is None:
            self._copy_now(slot, layout, flat, layout.on_host, layout.on_device)
            return None
        eager, lazy = self._lazy.split(flat)
        audited = bool(lazy) and self._lazy.audits_left > 0
        if not lazy or audited or slot.fresh:
            self._copy_now(slot, layout, flat, layout.on_host, layout.on_device)
            if audited:
                self._audit = Audit(slot, layout, flat, lazy)
            return None
        self._copy_now(slot, layout, flat, *_by_place(flat, eager))
        copy = LazyCopy(slot, layout, flat, lazy, self._pool, lambda error: self._finish_copy(handle, copy, error))
        _, on_device = _by_place(flat, lazy)
        if on_device:
            copy.ticket = self._queue_device(slot, layout, flat, on_device)
        return copy

    def _copy_now(self, slot: Slot, layout: Layout, flat: Flat, on_host: list[int], on_device: list[int]) -> None:
        ticket = self._queue_device(slot, layout, flat, on_device) if on_device else None
        try:
            copy_eager(slot, layout, flat, on_host, self._pool)
        finally:  # also after an error: the slot must not be given to others while copies into it are queued
            if ticket is not None:
                ticket.wait()
        slot.fresh = False

    def _queue_device(self, slot: Slot, layout: Layout, flat: Flat, indices: list[int]) -> Ticket:
        copier = self._copier_for(flat.specs[indices[0]].device)
        slot.pin(copier)
        views = slot.views(layout, flat)
        return copier.copy([(views[i], flat.tensors[i]) for i in indices])

    def _copier_for(self, device: str) -> DeviceCopier:
        return self._copiers.setdefault(device, copier_for(device))

    def _finish_copy(self, handle: Save, copy: LazyCopy, error: Exception | None) -> None:
        """The end of a lazy copy, in the background."""
        if copy.moved and self._lazy is not None:
            self._lazy.learn(copy.moved, "changed without optimizer.step()")
        if error is None:
            try:
                self._accept(handle)
            except Exception as failure:  # nobody else would see it
                error = failure
        if error is not None:
            self._note_skip(handle, f"{type(error).__name__}: {error}")
            self._settle(handle, error, {})

    def _accept(self, handle: Save) -> None:
        """The snapshot is whole: hand the slot to the agent. From here the save survives this process."""
        assert handle._order is not None
        order = msgspec.structs.replace(
            handle._order,
            telemetry={
                "reason": handle.reason,
                "blocked_seconds": round(handle.blocked_seconds, 6),
                "snapshot": "lazy" if handle._lazy else "eager",
                "barrier_seconds": round(handle._lazy.barrier_seconds, 6) if handle._lazy else 0.0,
                **{name: round(value, 6) for name, value in handle.stages.items()},
            },
        )
        with self._lock:
            handle._order = order
            self._pending[handle.identity] = handle
            if self._linked:
                try:
                    assert handle._layout is not None
                    self._send_layout(handle._layout)
                    self._client.tell(order)
                    handle._snapshot.set()  # only now: who sees it may rely on the agent
                except AgentError:
                    self._linked = False  # the new agent gets it: it is in `_pending`

    def barrier(self) -> None:
        """Let a lazy snapshot finish reading; called at the entry of `optimizer.step()`, or by hand before changing
        tensors in another way. Returns at once when nothing is under way."""
        audit, self._audit = self._audit, None
        if audit is not None and self._lazy is not None:
            begin = time.perf_counter()
            self._lazy.learn(audit.differing(self._pool), "changed before optimizer.step()")
            self._lazy.audits_left -= 1
            if self.last_save is not None:
                seconds = time.perf_counter() - begin
                self.last_save.stages["audit_seconds"] = seconds
                self.last_save._blocked_seconds += seconds
        handle = self._lazy_save
        if handle is not None and handle._lazy is not None:
            handle._lazy.barrier()

    def _finish_lazy(self) -> None:
        """Have the lazy snapshot that is under way accepted, or failed."""
        handle, self._lazy_save = self._lazy_save, None
        if handle is not None and handle._lazy is not None:
            handle._lazy.complete()

    def _layout_for(self, flat: Flat, values_bytes: int) -> Layout:
        before, layout = self._flat, self._layout
        same = (
            layout is not None
            and before is not None
            and flat.specs is before.specs
            and flat.skeleton is before.skeleton
            and flat.alias_of is before.alias_of
            and values_bytes <= self._values_bytes_max
        )
        if not same or layout is None:
            self._values_bytes_max = layouts.values_room_for(values_bytes)
            layout = layouts.build(
                flat.names, flat.specs, flat.alias_of, flat.skeleton, values_bytes_max=self._values_bytes_max
            )
        self._flat, self._layout = flat.layout_only(), layout
        return layout

    _values_bytes_max = 0

    def _send_layout(self, layout: Layout) -> None:
        if layout.hash in self._sent_layouts:
            return
        fd = os.memfd_create("stepwell-layout", os.MFD_CLOEXEC)
        try:
            with os.fdopen(os.dup(fd), "wb") as file:
                file.write(layout.data)
            self._tell(p.LayoutIs(layout.hash, len(layout.data)), (fd,))
        finally:
            os.close(fd)
        self._sent_layouts.add(layout.hash)

    # ---- slots

    def prepare(self, state: Mapping[str, Any]) -> Preparation:
        """Lay out the state and make and touch all slots in the background, so that the first save is a fast one.

        Optimizer state that does not exist yet is estimated as two tensors per parameter. Returns a handle to wait
        on; a failure is in its `error` and in the log, and the first save makes the slots itself then.
        """
        self._check_open()
        _check_state(state)
        preparation = Preparation()
        flat = flatten(state, allow_pickle=self._allow_pickle, previous=self._flat)
        values = encode_values(flat.values, allow_pickle=self._allow_pickle)
        layout = self._layout_for(flat, len(values))
        size = layout.slot_bytes(self._values_bytes_max) + _missing_optimizer_bytes(state)
        future = self._background.submit(self._prepare, preparation, layout, flat, size)
        future.add_done_callback(preparation._ended)
        return preparation

    def _prepare(self, preparation: Preparation, layout: Layout, flat: Flat, size: int) -> None:
        try:
            self._send_layout(layout)
            while True:
                with self._lock:
                    if self._closed or len(self._slots) + self._making >= self._slot_count:
                        break
                    self._making += 1
                slot = self._make_slot(size, touch=True)
                with self._lock:
                    self._touching += 1
                try:
                    slot.populate()
                    if slot.bytes >= layout.slot_bytes(0):
                        slot.views(layout, flat)
                    if layout.on_device:
                        slot.pin(self._copier_for(layout.specs[layout.on_device[0]].device))
                finally:
                    with self._lock:
                        self._touching -= 1
                    self._free_slot(slot)
            with self._lock:  # somebody else may be making the last ones: ready means all
                ready = lambda: self._closed or not (self._making or self._touching)  # noqa: E731
                self._lock.wait_for(ready, self._slot_wait_seconds_max)
        except (StepwellError, OSError) as error:
            preparation.error = error
            if not self._closed:
                log.warning("could not prepare the slots: %s", error)
        finally:
            preparation._done.set()

    def _warm_up(self, slot: Slot, layout: Layout, flat: Flat) -> None:
        slot.populate()
        slot.views(layout, flat)
        self._prepare(Preparation(), layout, flat, slot.bytes)

    def _make_slot(self, size: int, *, touch: bool) -> Slot:
        """One more slot, taken by the caller, who has counted it in `_making`."""
        made = None
        try:
            while made is None:
                client, answer, fds = self._ask_whom(p.MakeSlot(size, touch))
                assert isinstance(answer, p.SlotMade)
                with self._lock:
                    if client is self._client:
                        made = Slot(answer.slot, fds[0], answer.bytes, fresh=not touch)
                        made.free = False
                        self._slots.append(made)
                if made is None:  # that agent has died since, and its successor knows nothing of this slot
                    os.close(fds[0])
        finally:
            with self._lock:
                self._making -= 1
                self._lock.notify_all()
        return made

    def _take_slot(self, layout: Layout, values_bytes: int, handle: Save) -> Slot | None:
        """A free slot that is large enough; waits for one, or skips, as `when_full` says."""
        need = layout.slot_bytes(values_bytes)
        deadline = time.monotonic() + self._slot_wait_seconds_max
        while True:
            preempted = self._preempted.is_set()  # the signal may come while we wait
            if preempted and self._preempt_deadline is not None:
                deadline = min(deadline, self._preempt_deadline)
            with self._lock:
                free = [slot for slot in self._slots if slot.free]
                fitting = [slot for slot in free if slot.bytes >= need]
                if fitting:
                    slot = min(fitting, key=lambda slot: slot.used_at)
                    slot.free = False
                    self._use_count += 1
                    slot.used_at = self._use_count
                    return slot
                for slot in free:  # too small for good: the state has grown
                    self._slots.remove(slot)
                    self._tell(p.DropSlot(slot.index))
                    slot.drop()
                if len(self._slots) + self._making < self._slot_count:
                    self._making += 1
                    break
                if self._when_full == "skip" and not (self._making or self._touching or preempted):
                    self._skip(handle, f"all {self._slot_count} slots are still being persisted")
                    return None
                left = deadline - time.monotonic()
                if left <= 0:
                    waited = format_seconds(time.monotonic() - handle._entered_seconds)
                    self._skip(handle, f"no slot became free within {waited}: the storage is slower than the saves")
                    return None
                self._lock.wait(min(left, SIGNAL_LOOK_SECONDS))
        # An accelerator cannot take pages step by step under the memory limit: the agent does it before.
        slot = self._make_slot(layout.slot_bytes(self._values_bytes_max), touch=bool(layout.on_device))
        with self._lock:
            self._use_count += 1
            slot.used_at = self._use_count
        return slot

    def _free_slot(self, slot: Slot | None) -> None:
        with self._lock:
            if slot is not None:
                slot.free = True
            self._lock.notify_all()

    def _skip(self, handle: Save, reason: str) -> None:
        handle.skipped, handle.reason = True, reason
        handle._blocked_seconds = time.monotonic() - handle._entered_seconds
        handle._snapshot.set()
        handle._done.set()
        self.counters.skipped += 1
        log.warning("step %d was NOT saved: %s", handle.step, reason)
        self._note_skip(handle, reason)

    def _note_skip(self, handle: Save, reason: str) -> None:
        seconds = round(handle.blocked_seconds, 6)
        self._note({"event": "skip", "step": handle.step, "reason": reason, "blocked_seconds": seconds})

    # ---- the agent

    def _hello(self) -> p.Hello:
        keep = self._keep
        return p.Hello(
            p.VERSION,
            os.getpid(),
            self._identity,
            attempt=self._attempt,
            keep_last=keep.last,
            keep_every=keep.every,
            keep_best=keep.best,
        )

    def _tell(self, message: p.AnyMessage, fds: tuple[int, ...] = ()) -> None:
        """Tell the agent something that a new agent would learn anyway when this one is gone."""
        with self._lock:
            if self._linked:
                try:
                    self._client.tell(message, fds)
                except AgentError:
                    self._linked = False

    def _ask(self, message: p.AnyMessage, timeout: float = ANSWER_SECONDS_MAX) -> tuple[p.AnyMessage, list[int]]:
        _, answer, fds = self._ask_whom(message, timeout)
        return answer, fds

    def _ask_whom(
        self, message: p.AnyMessage, timeout: float = ANSWER_SECONDS_MAX
    ) -> tuple[Client, p.AnyMessage, list[int]]:
        """Ask the agent; when it is just dying, ask the one that takes its place. Waits are bounded.

        A signal to a whole group ends the agent at the very moment at which the trainer wants its last save.
        """
        deadline = time.monotonic() + self._slot_wait_seconds_max
        while True:
            with self._lock:
                self._lock.wait_for(lambda: not self._relinking, max(0.0, deadline - time.monotonic()))
                client = self._client
            try:
                return client, *client.ask(message, timeout=timeout)
            except AgentError:
                with self._lock:  # the reading thread notices an agent's death a moment later than the sender
                    replaced = self._lock.wait_for(
                        lambda: self._relinking or self._client is not client,  # noqa: B023  used at once
                        NOTICE_SECONDS_MAX,
                    )
                if not replaced or time.monotonic() >= deadline:
                    raise

    def _note(self, record: dict[str, float | int | str | bool | None]) -> None:
        from stepwell.agent.persist import utc_now

        self._tell(p.Note({"time": utc_now(), "node": 0, "rank": 0, "attempt": self._attempt, **record}))

    def _open_attempt(self) -> None:
        if self._attempt is not None:
            return
        answer, _ = self._ask(p.OpenAttempt(self._parent, self._fresh))
        assert isinstance(answer, p.AttemptOpened)
        self._attempt = answer.attempt

    def _on_message(self, message: p.AnyMessage) -> None:
        if isinstance(message, p.Committed):
            handle = self._pending.get(message.save)
            if handle is not None:
                stages = {
                    **message.stages,
                    "durable_seconds": message.durable_seconds,
                }
                handle.retries = message.retries
                self._settle(handle, None, stages)
        elif isinstance(message, p.Failed):
            handle = self._pending.get(message.save)
            if handle is not None:
                error = as_error(message.error)
                if isinstance(error, OSError):
                    error.errno = message.errno
                handle.retries = message.retries
                self._settle(handle, error, {})
        elif isinstance(message, p.Refused):
            log.warning("the agent refused a message: %s", as_error(message))

    def _settle(self, handle: Save, error: BaseException | None, stages: dict[str, float]) -> None:
        """The end of a save, good or bad; its slot is free again."""
        with self._lock:
            self._pending.pop(handle.identity, None)
            handle.error = error
            handle.stages.update(stages)
            self.counters.retries += handle.retries
            if error is None:
                self.counters.committed += 1
            else:
                self.counters.failed += 1
                self._unraised.append(handle)
        if error is not None:
            log.error("step %d was NOT saved: %s", handle.step, error)
        self._free_slot(handle._slot)
        handle._snapshot.set()
        handle._done.set()

    def _on_lost(self, client: Client) -> None:
        """The agent died: start another and hand everything over again (called from the reading thread)."""
        with self._lock:
            if self._closed or client is not self._client:
                return
            self._linked = False
            log.warning("the agent is gone; starting another one")
            self._begin_relink()

    def _begin_relink(self) -> None:
        """Look for another agent in the background, unless somebody does already; holds the lock."""
        if not self._relinking:
            self._relinking = True
            self._lock.notify_all()
            threading.Thread(target=self._relink, name="stepwell-relink", daemon=True).start()

    def _relink(self) -> None:
        last: Exception = AgentError("each new agent was lost at once", where=self.run)
        self._client.hang_up()  # one that is only silent would take us for a second trainer
        for _ in range(RELINK_COUNT_MAX):
            self.counters.agent_restarts += 1
            client = Client(self.run, self._on_message, self._on_lost)
            try:
                client.connect(self._hello())
                with self._lock:
                    if self._closed:
                        client.close()
                        return
                    self._hand_over(client)
                    if not client.lost:
                        self._relinking = False
                        self._lock.notify_all()
                        return
            except (StepwellError, OSError) as error:
                last = error
                log.warning("the new agent failed as well: %s", error)
            client.hang_up()  # or the next one would find us connected already
        log.error("no agent can be kept alive, the next save tries again: %s", last)
        with self._lock:
            self._linked = self._relinking = False
            for handle in list(self._pending.values()):
                self._settle(handle, last, {})
            self._lock.notify_all()

    def _hand_over(self, client: Client) -> None:
        """Give a new agent the slots, the layout and every accepted save; holds the lock, so nothing is sent twice."""
        for slot in self._slots:
            _, fds = client.ask(p.AdoptSlot(slot.index, slot.bytes), (slot.fd,))
            for fd in fds:
                os.close(fd)
        self._client, self._linked = client, True
        self._sent_layouts.clear()
        for layout in {h._layout.hash: h._layout for h in self._pending.values() if h._layout}.values():
            self._send_layout(layout)
        for handle in self._pending.values():
            assert handle._order is not None
            client.tell(handle._order)
            handle._snapshot.set()
        self._lock.notify_all()

    def _say_limits(self, welcome: p.Welcome) -> None:
        """Which promises are limited on this machine, in words, at every start."""
        limits = []
        if not welcome.direct_io:
            limits.append(f"{welcome.filesystem} has no O_DIRECT: writes go through the page cache")
        if not welcome.hard_links:
            limits.append(f"{welcome.filesystem} has no hard links: only one agent may write this run")
        if welcome.filesystem in ("tmpfs", "ramfs"):
            limits.append(f"{welcome.filesystem} is memory: nothing here survives a reboot")
        elif welcome.filesystem in LOCAL_FILESYSTEMS:
            limits.append(f"{welcome.filesystem} is local to this machine: a step that is durable here is lost with it")
        else:
            limits.append(
                f"{welcome.filesystem} may be seen by other machines: trainers on two of them are not kept apart"
            )
        if welcome.shares_cgroup:
            limits.append(
                "agent and trainer share a cgroup: whatever kills the whole container loses saves that are accepted "
                "but not yet durable (run `stepwell agent --service RUN` outside of it)"
            )
        self.limits = tuple(limits)
        log.info("run %s on %s, agent %d", self.run, welcome.filesystem, welcome.pid)
        if limits:
            log.warning("limits of the promises on this machine:%s", "".join(f"\n  - {limit}" for limit in limits))

    # ---- when to save

    def due(self, step: int, metrics: Mapping[str, float] | None = None) -> bool:
        """True when the policy wants this step saved, or a preemption signal has come.

        With several ranks only rank 0 decides, and announces a step that all ranks reach; in one process the
        announcement is immediate.
        """
        return self._decide(names.step_number(step), _clean_metrics(metrics)) is not None

    def save_if_due(
        self, step: int, state: Mapping[str, Any], *, metrics: Mapping[str, float] | None = None
    ) -> Save | None:
        """`save()` when the policy wants it, else None. Call it once per step with the step's metrics."""
        step, clean = names.step_number(step), _clean_metrics(metrics)
        reason = self._decide(step, clean)
        if reason is None:
            return None
        log.debug("saving step %d: %s", step, reason)
        handle = self._save(step, state, clean, reason)
        if self._preempted.is_set():
            self._wait_preempted(handle)
        return handle

    def _decide(self, step: int, metrics: dict[str, float]) -> str | None:
        self._history = self._history.with_metrics(step, metrics)  # asking twice about a step changes nothing
        if self._preempted.is_set():
            return "a preemption signal has come"
        if self._policy is None:
            raise UsageError(
                "there is no policy that could be due",
                expected="Checkpointer(..., save_when=stepwell.Every(steps=100))",
                todo="set save_when, or call save() yourself",
            )
        settled = [h for h in self._saved_steps.values() if h.snapshot_done and not h.skipped]
        cost = sum(h.blocked_seconds for h in settled) / len(settled) if settled else None
        return self._policy.decide(
            Moment(
                step=step,
                now_seconds=time.monotonic(),
                metrics=metrics,
                last_saved_step=self._last_step,
                last_saved_seconds=self._last_started_seconds,
                started_seconds=self._started_seconds,
                save_cost_seconds=cost,
                history=self._history,
            )
        )

    # ---- preemption

    def save_on_signals(self, *signals: int, deadline_seconds: float = 30.0) -> None:
        """From now on these signals set `preempted` instead of ending the process; the next `save_if_due` saves and
        waits until that save is durable, at most until `deadline_seconds` after the signal. Main thread only."""
        self._preempt_seconds = deadline_seconds
        for number in signals or (signal.SIGTERM,):
            self._signals[number] = signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: object) -> None:
        if not self._preempted.is_set():
            self._preempt_deadline = time.monotonic() + self._preempt_seconds
            self._preempted.set()

    @property
    def preempted(self) -> bool:
        """True once a signal of `save_on_signals` has come: save once more and leave the loop."""
        return self._preempted.is_set()

    def _wait_preempted(self, handle: Save) -> None:
        assert self._preempt_deadline is not None
        self._finish_lazy()
        try:
            handle.wait(timeout=max(0.0, self._preempt_deadline - time.monotonic()))
        except WaitTimeout:
            log.error("step %d was not durable within the preemption deadline; it goes on in the agent", handle.step)

    # ---- restoring

    def restore(
        self,
        state: Mapping[str, Any],
        *,
        step: int | str | None = None,
        strict: bool = True,
        cast: bool = False,
        names: str | Iterable[str] | None = None,
    ) -> Restored | None:
        """Put the newest committed step (or `step`) into `state`, in place, every byte checked.

        Returns None when the run has no committed step. The nearest copy is taken: the agent's memory, then disk. A
        damaged newest step is replaced by an older one, whole, with a warning; when none can be read and the state
        was written to already, `StateClobbered` is raised. Raises `StateMismatchError`, with every difference, before
        anything is changed; `strict=False`, `cast=True` and `names="model.*"` loosen it.
        """
        self._check_open()
        _check_state(state)
        self._audit = None  # its tensors are about to change
        self._finish_lazy()
        begin = time.perf_counter()
        for handle in list(self._pending.values()):  # what was accepted before counts as there
            handle._done.wait(self._slot_wait_seconds_max)
        restored = None
        with self._settled_agent() as memory:
            try:
                catalogue = catalogues.read(self.run)
            except NotARunError:
                catalogue = None
            if step is not None:
                if catalogue is None:
                    raise NotARunError("there is no Stepwell run here", where=self.run)
                candidates = [catalogue.find(step)]
            else:
                candidates = catalogue.fallbacks() if catalogue else []
            if candidates:
                patterns = [names] if isinstance(names, str) else None if names is None else list(names)
                restored = self._restore_first(candidates, memory, state, strict, cast, patterns, begin)
        if restored is not None:
            with self._lock:
                self._parent, self._attempt = restored.key, None
                self._saved_steps.clear()
            self._last_step, self._last_started_seconds = restored.step, None
            self._started_seconds = time.monotonic()  # for policies a restore is a new start
            history = History.for_policy(self._policy)
            assert catalogue is not None
            for one in reversed(catalogue.lineage_of(restored.key)):
                history = history.with_metrics(one.step, one.metrics)
            self._history = history
        self.prepare(state)
        return restored

    def _restore_first(
        self,
        candidates: list[Step],
        memory: Callable[[Step], OpenStep | None],
        state: Mapping[str, Any],
        strict: bool,
        cast: bool,
        patterns: list[str] | None,
        begin: float,
    ) -> Restored:
        warnings: list[str] = []
        stages = {"settle_seconds": time.perf_counter() - begin}
        touched = False
        last: StepwellError | None = None
        for candidate in candidates:
            for opener in (memory, self._open_disk):
                opened: OpenStep | None = None
                mark = time.perf_counter()
                try:
                    opened = opener(candidate)
                    if opened is None:
                        continue
                    stages["open_seconds"] = time.perf_counter() - mark
                    count = self._fill(opened, state, strict, cast, patterns, stages)
                except (DamagedError, StateMismatchError) as error:
                    touched = touched or (opened is not None and opened.touched)
                    if isinstance(error, StateMismatchError) and not touched:
                        raise
                    last = error
                    warnings.append(str(error))
                    log.warning("DAMAGED: step %s cannot be restored: %s", candidate.key, error)
                    continue
                finally:
                    if opened is not None:
                        opened.close()
                seconds = time.perf_counter() - begin
                if warnings:
                    log.warning("restored step %d instead, whole", candidate.step)
                log.info(
                    "restored step %d (%s from tier %s) in %s",
                    candidate.step,
                    format_bytes(count),
                    opened.tier,
                    format_seconds(seconds),
                )
                self._note(
                    {
                        "event": "restore",
                        "step": candidate.step,
                        "key": candidate.key,
                        "tier": opened.tier,
                        "read_bytes": count,
                        **{name: round(value, 6) for name, value in stages.items()},
                        "restore_seconds": round(seconds, 6),
                        "warnings": len(warnings),
                        "reason": "; ".join(text.splitlines()[0] for text in warnings) or None,
                    }
                )
                return Restored(
                    candidate.step, candidate.key, candidate.attempt, opened.tier, count, seconds,
                    candidate.metrics, tuple(warnings),
                )  # fmt: skip
        assert last is not None
        if touched:
            raise StateClobbered(
                "the state was partly overwritten by a damaged step, and no other step could replace it",
                where=self.run,
                found=str(last),
                todo="build the model anew, then restore another step or start fresh",
            )
        raise last

    @contextlib.contextmanager
    def _settled_agent(self) -> Iterator[Callable[[Step], OpenStep | None]]:
        """Let the agent finish what an earlier trainer, now dead, had accepted: that is the newest step.

        Gives what opens a step from the agent's memory, if that holds it.
        """
        notice = threading.Timer(
            SETTLE_NOTICE_SECONDS,
            lambda: log.warning("still waiting for the agent to finish what it had accepted (%s)", self.run),
        )
        notice.daemon = True
        notice.start()
        try:
            answer, fds = self._ask(p.AskMemory(), timeout=SETTLE_SECONDS_MAX)
        finally:
            notice.cancel()
        assert isinstance(answer, p.MemoryIs)

        def open_memory(step: Step) -> OpenStep | None:
            if answer.key != step.key or not step.newest or step.problem is not None or self._pending:
                return None
            return open_slot(self.run, step, fds[0], answer.bytes, self._layout)

        try:
            yield open_memory
        finally:
            for fd in fds:
                os.close(fd)

    def _open_disk(self, step: Step) -> OpenStep:
        return open_step(self.run, step, self._layout)

    def _fill(
        self,
        opened: OpenStep,
        state: Mapping[str, Any],
        strict: bool,
        cast: bool,
        patterns: list[str] | None,
        stages: dict[str, float],
    ) -> int:
        mark = time.perf_counter()
        saved = opened.saved(allow_pickle=self._allow_pickle)
        plan = match(state, saved, strict=strict, cast=cast, names=patterns, allow_pickle=self._allow_pickle)
        matched = time.perf_counter()
        count = opened.fill(plan.copies)
        filled = time.perf_counter()
        opened.touched = True
        plan.finish()
        stages |= {
            "match_seconds": matched - mark,
            "read_seconds": filled - matched,
            "finish_seconds": time.perf_counter() - filled,
        }
        if plan.skipped:
            shown = "".join(f"\n  {one}" for one in plan.skipped[:DIFFERENCES_LOGGED_MAX])
            log.warning("restored with %d differences passed over (strict=False):%s", len(plan.skipped), shown)
        return count

    # ---- looking and ending

    def steps(self) -> list[Step]:
        """The committed steps of the run, by attempt and step, with lineage, bytes, time, metrics and tier."""
        try:
            return list(catalogues.read(self.run).steps)
        except NotARunError:
            return []

    def wait(self, timeout: float | None = None) -> None:
        """Wait until everything accepted is durable or failed. Raises `WaitTimeout`, and failures with "raise"."""
        self._finish_lazy()
        deadline = None if timeout is None else time.monotonic() + timeout
        for handle in list(self._pending.values()):
            handle.wait(timeout=None if deadline is None else max(0.0, deadline - time.monotonic()))
        self._raise_once()

    def close(self, timeout: float | None = WAIT_SECONDS_MAX) -> None:
        """Finish what is accepted, end the agent, give back signals and hooks. Safe to call twice.

        Raises `WaitTimeout` when accepted saves are not durable within `timeout` (they go on in the agent), and
        failures with `on_error="raise"`.
        """
        if self._closed or os.getpid() != self._pid:
            return
        try:
            self.wait(timeout)
        finally:
            with self._lock:
                self._closed = True
                self._lock.notify_all()
            _open_checkpointers.discard(self)
            for number, before in self._signals.items():
                with contextlib.suppress(ValueError):  # not the main thread: leave the handler
                    signal.signal(number, before)
            if self._lazy is not None:
                self._lazy.close()
            self._audit = None
            self._client.close()
            self._background.shutdown(wait=True, cancel_futures=True)
            self._pool.shutdown()
            for slot in self._slots:
                slot.drop()
            self._slots.clear()
            counters = self.counters
            if counters.failed or counters.skipped:
                log.warning(
                    "of %d saves %d were committed, %d failed; %d were skipped",
                    counters.saves, counters.committed, counters.failed, counters.skipped,
                )  # fmt: skip

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if kind is None:
            self.close()
            return
        try:
            self.close()
        except StepwellError as failure:  # the trainer's own error is the one to be seen
            log.error("while closing: %s", failure)

    def _raise_once(self, handle: Save | None = None) -> None:
        """With "raise": raise what was not raised yet (of `handle`, or of any save): the oldest, with the later ones
        as its causes."""
        if self._on_error == "warn":
            return
        with self._lock:
            waiting = [h for h in self._unraised if handle is None or h is handle]
            self._unraised = [h for h in self._unraised if h not in waiting]
        errors = list(dict.fromkeys(h.error for h in waiting if h.error is not None))
        if errors:
            for earlier, later in pairwise(errors):
                earlier.__cause__ = earlier.__cause__ or later
            raise errors[0]

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError("the checkpointer is closed", where=self.run)
        if os.getpid() != self._pid:
            raise UsageError("a forked process cannot use its parent's checkpointer", where=self.run)


_open_checkpointers: weakref.WeakSet[Checkpointer] = weakref.WeakSet()


def _close_all() -> None:
    for checkpointer in list(_open_checkpointers):
        try:
            checkpointer.close()
        except Exception as error:  # the interpreter is ending: nobody is left to catch it
            log.error("while closing %s at exit: %s", checkpointer.run, error)


def _forget_in_child() -> None:
    """A forked worker must not hold the connection open, or the agent would never see the trainer die."""
    for checkpointer in list(_open_checkpointers):
        checkpointer._client.abandon()
        checkpointer._lazy_save = checkpointer._audit = None  # a step() in the child must not write into the slot
    _open_checkpointers.clear()


atexit.register(_close_all)
os.register_at_fork(after_in_child=_forget_in_child)


def _by_place(flat: Flat, indices: list[int]) -> tuple[list[int], list[int]]:
    """(on the host, on an accelerator)."""
    on_host = [i for i in indices if flat.specs[i].device == "cpu"]
    return on_host, [i for i in indices if flat.specs[i].device != "cpu"]


def _check_choice(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise UsageError(f"{name} cannot be {value!r}", expected=" or ".join(map(repr, allowed)), found=repr(value))


def _check_state(state: object) -> None:
    """Refuse anything but a dict: only a dict can be given back what was saved under each of its names."""
    if not isinstance(state, dict):
        raise UnsupportedStateError(
            "the state is not a dict",
            expected='a dict of what to save, as in {"model": model, "optim": optimizer}',
            found=type(state).__name__,
        )


def _run_folder(run: str | bytes | os.PathLike[str]) -> str:
    """The absolute path of a run's folder. Raises `UsageError` for what cannot be one."""
    folder = os.fsdecode(os.fspath(run))
    if not folder or "\0" in folder:
        raise UsageError("a run is a folder", expected="its path", found=repr(folder))
    return os.path.abspath(folder)


def _check_not_open_here(run: str) -> None:
    """A notebook cell that is run again makes a second checkpointer while the first is still there."""
    for other in list(_open_checkpointers):
        if os.path.realpath(other.run) == os.path.realpath(run):
            raise RunBusyError(
                "this process has the run open already, in another Checkpointer",
                where=run,
                todo="close() that one first, or use it",
            )


def _clean_metrics(metrics: Mapping[str, float] | None) -> dict[str, float]:
    """Metrics as plain floats; a tensor of one element counts as a number."""
    if metrics is not None and not isinstance(metrics, Mapping):
        raise UsageError("metrics are a dict of numbers", expected='as in {"loss": 0.25}', found=repr(metrics)[:80])
    clean = {}
    for name, value in (metrics or {}).items():
        try:
            clean[str(name).encode().decode()] = float(value)
        except UnicodeError as error:
            raise UsageError("a metric's name is text", where=f"metrics[{name!r}]", found=repr(name)[:80]) from error
        except (TypeError, ValueError, OverflowError, RuntimeError) as error:  # the last: a tensor without memory
            raise UsageError("a metric is a number", where=f"metrics[{name!r}]", found=repr(value)[:80]) from error
    return clean


def _missing_optimizer_bytes(state: Mapping[str, Any]) -> int:
    """Estimated bytes of optimizer state that the first step will create: two tensors per parameter without any."""
    torch = sys.modules.get("torch")
    if torch is None:
        return 0
    total = 0
    for value in state.values():
        if isinstance(value, torch.optim.Optimizer):
            for group in value.param_groups:
                for parameter in group["params"]:
                    if parameter.requires_grad and not value.state.get(parameter):
                        total += 2 * parameter.numel() * max(4, parameter.element_size())
    return total


__all__ = ["Checkpointer", "Counters", "Preparation", "Restored", "Save"]
