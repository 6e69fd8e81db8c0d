"""What `Checkpointer` gives out: the handle of a save, of a preparation, and what a restore did."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

from stepwell.agent import protocol as p
from stepwell.errors import UsageError, WaitTimeout
from stepwell.snapshot.lazy import LazyCopy
from stepwell.snapshot.slot import Slot
from stepwell.store.layout import Layout
from stepwell.units import format_seconds

WAIT_SECONDS_MAX = 3600.0


class Save:
    """What `save()` returns: one save on its way.

    `blocked_seconds` is how long the trainer has waited for it, slot wait and lazy barrier included; final once
    `snapshot_done` (the first two lazy saves are compared at the next `optimizer.step()`, which adds to theirs).
    `stages` has the seconds of each stage, those of the agent once it is `done`.
    """

    def __init__(
        self, raise_failure: Callable[[Save], None], step: int, *, skipped: bool = False, reason: str | None = None
    ) -> None:
        self.step, self.skipped, self.reason = step, skipped, reason
        self.identity = uuid.uuid4().hex
        self.key: str | None = None
        self.stages: dict[str, float] = {}
        self.error: BaseException | None = None
        self.retries = 0
        self._raise_failure = raise_failure
        self._snapshot = threading.Event()
        self._done = threading.Event()
        self._blocked_seconds = 0.0
        self._lazy: LazyCopy | None = None
        self._order: p.Persist | None = None
        self._slot: Slot | None = None
        self._layout: Layout | None = None
        self._entered_seconds = time.monotonic()
        if skipped:
            self._snapshot.set()
            self._done.set()

    @property
    def done(self) -> bool:
        """True once the save is durable, failed or skipped."""
        return self._done.is_set()

    @property
    def committed(self) -> bool:
        """True once the step is durable on tier 0."""
        return self.done and not self.skipped and self.error is None

    @property
    def snapshot_done(self) -> bool:
        """True once the state is in the slot and the agent has it: the save survives the death of the trainer.

        `save()` returns with this, unless the agent has just died: then it comes with the next agent.
        """
        return self._snapshot.is_set()

    @property
    def blocked_seconds(self) -> float:
        return self._blocked_seconds + (self._lazy.barrier_seconds if self._lazy else 0.0)

    @property
    def durable_seconds(self) -> float | None:
        """Seconds from the entry of `save()` to the commit on tier 0; None before that."""
        return self.stages.get("durable_seconds")

    @property
    def timings(self) -> dict[str, float]:
        """All that is known by now, in seconds."""
        return {**self.stages, "blocked_seconds": self.blocked_seconds}

    def wait(self, tier: int = 0, timeout: float | None = None) -> Save:
        """Wait until the step is durable on a tier; returns the handle.

        A skipped save returns at once; without a `timeout` the wait ends after an hour. Raises `WaitTimeout` after
        `timeout` seconds, `UsageError` for a tier that the run does not have, and, with
        `on_error="raise"`, the error that the save failed with, once.
        """
        if tier != 0:
            raise UsageError("this run has no such tier", expected="0", found=tier)
        timeout = WAIT_SECONDS_MAX if timeout is None else timeout
        if not self._done.wait(timeout):
            raise WaitTimeout(
                f"step {self.step} is not durable yet", expected=f"within {timeout} s", todo="wait longer; it goes on"
            )
        self._raise_failure(self)
        return self

    def __repr__(self) -> str:
        if self.skipped:
            state = f"skipped: {self.reason}"
        elif self.error is not None:
            state = f"failed: {str(self.error).splitlines()[0]}"
        elif self.done:
            state = f"durable after {format_seconds(self.stages.get('durable_seconds', 0.0))}"
        else:
            state = "accepted" if self.snapshot_done else "on its way to the agent"
        return f"<Save step {self.step} {state}, blocked {format_seconds(self.blocked_seconds)}>"


@dataclass(frozen=True)
class Restored:
    """What `restore()` did: the step that the state now holds; resume at `step + 1`."""

    step: int
    key: str
    attempt: int
    tier: str
    bytes: int
    seconds: float
    metrics: dict[str, float] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()


@dataclass
class Counters:
    """What has happened since the start; nothing is dropped without a count."""

    saves: int = 0
    committed: int = 0
    skipped: int = 0
    failed: int = 0
    retries: int = 0
    agent_restarts: int = 0


class Preparation:
    """Slots being made and touched in the background."""

    def __init__(self) -> None:
        self._done = threading.Event()
        self.error: BaseException | None = None

    def _ended(self, future: Future[None]) -> None:
        if future.cancelled():
            self.error = UsageError("the checkpointer was closed before its slots were ready")
        self._done.set()

    @property
    def done(self) -> bool:
        return self._done.is_set()

    def wait(self, timeout: float | None = None) -> None:
        """Wait until the slots are ready, without a `timeout` at most an hour.

        Raises `WaitTimeout`, or what went wrong (`SlotMemoryError`, `UsageError` when it was closed meanwhile).
        """
        timeout = WAIT_SECONDS_MAX if timeout is None else timeout
        if not self._done.wait(timeout):
            raise WaitTimeout("the slots are not ready yet", expected=f"within {timeout} s")
        if self.error is not None:
            raise self.error
